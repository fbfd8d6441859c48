//! A30: the worst case is the maximum over all legal sizes, found by trying them.

use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{AudioRule, PatchVideo, Patches, ProcessorFiles, Tiles};
use plimsoll_media::image::Filter;
use plimsoll_media::{MediaError, Shape, Size};
use proptest::prelude::*;
use serde_json::json;

/// Possible costs of an encoder: by tokens, by sequences, by the longest sequence, and by a mixture.
const COSTS: [fn(&Shape) -> u64; 4] =
    [|s| s.tokens, |s| s.sequences, |s| s.longest, |s| 3 * s.rows + 40 * s.sequences + s.longest];

/// Every legal size with a short side up to `short`, in both orientations.
fn legal_sizes(short: u32) -> impl Iterator<Item = Size> {
    (1..=short).flat_map(|a| (a..=200 * a).flat_map(move |b| [Size::new(a, b), Size::new(b, a)]))
}

/// Compares the maxima of the costs over all legal sizes with the rule's worst cases.
fn compare(what: &str, short: u32, shape: impl Fn(Size) -> Result<Shape, MediaError>, worst: impl Fn(usize) -> Shape) {
    let mut found = [0; COSTS.len()];
    for size in legal_sizes(short) {
        let shape = shape(size).unwrap();
        for (most, cost) in found.iter_mut().zip(COSTS) {
            *most = cost(&shape).max(*most);
        }
    }
    for (i, cost) in COSTS.iter().enumerate() {
        assert_eq!(found[i], cost(&worst(i)), "cost {i} of {what}: {:?}", worst(i));
    }
}

fn patches(factor: u64, min: u64, max: u64) -> Patches {
    let (patch, merge) = if factor.is_multiple_of(2) { (factor / 2, 2) } else { (factor, 1) };
    Patches {
        patch,
        merge,
        temporal: 2,
        min_pixels: min,
        max_pixels: max,
        window: Some(2),
        filter: Filter::Bicubic,
        fills: false,
    }
}

#[test]
fn a30_images_by_exhaustion() {
    // Token counts that are prime, square, tiny (strips reach past the bound) and equal at both ends.
    for factor in [1, 2, 3, 4] {
        let unit = factor * factor;
        for most in [1, 3, 16, 31, 97, 199, 200, 211, 293, 401] {
            for least in [1, 4, most / 3, most] {
                let (least, most) = (least.clamp(1, most), most);
                for max in [most * unit, most * unit + unit / 2].into_iter().take(unit as usize) {
                    let rule = patches(factor, least * unit, max);
                    compare(&format!("{rule:?}"), 10 * factor as u32, |s| rule.shape(s), |i| rule.worst(COSTS[i]));
                }
            }
        }
    }
}

#[test]
fn a30_a_prime_bound_is_a_strip_only_where_a_strip_is_legal() {
    let rule = patches(28, 56 * 56, 293 * 28 * 28);
    let worst = rule.worst(|shape| shape.tokens);
    assert_eq!(worst.tokens, 293, "41 × 8200 pixels are a strip of 1 × 293 tokens");
    assert_eq!(rule.shape(Size::new(41, 8200)).unwrap().tokens, 293);
    // 10,007 is prime, and 1 × 10,007 is refused as is 2 × 5,003: the worst is 69 × 145.
    let worst = patches(28, 56 * 56, 10_007 * 28 * 28).worst(|shape| shape.tokens);
    assert_eq!(worst.tokens, 10_005);
    // A budget below 200 tokens is exceeded by strips: here by 41 tokens of 100.
    let rule = patches(28, 28 * 28, 100 * 28 * 28);
    assert_eq!(rule.worst(|shape| shape.tokens).tokens, 141);
    assert_eq!(rule.shape(Size::new(280, 56_000)).unwrap().tokens, 141);
}

#[test]
fn a30_images_that_fill_a_budget_by_exhaustion() {
    for (patch, merge) in [(1, 1), (2, 3)] {
        let fields = json!({"patch_size": patch, "pooling_kernel_size": merge, "max_soft_tokens": 70});
        let files = ProcessorFiles::read(Some(&fields.to_string()), None, None).unwrap();
        let rule = Patches::filling(&files.image, 280).unwrap();
        compare(&format!("{rule:?}"), 12, |s| rule.shape(s), |i| rule.worst(COSTS[i]));
        // There is no longest strip.
        assert_eq!(rule.shape(Size::new(1, 60_000)).unwrap().tokens, 70);
    }
}

#[test]
fn a30_a_square_is_not_the_costliest_where_windows_are() {
    let rule = Patches { window: Some(4), ..patches(28, 3136, 16_384 * 28 * 28) };
    let square = rule.shape(Size::new(128 * 28, 128 * 28)).unwrap();
    let worst = rule.worst(|shape| shape.sequences);
    assert_eq!((square.tokens, square.sequences), (16_384, 1024));
    assert!(worst.sequences > 1300 && worst.tokens <= 16_384, "{worst:?}");
}

#[test]
fn a30_videos_by_exhaustion() {
    for (factor, cap) in [(2, false), (4, true)] {
        let unit = factor * factor;
        for (least, most) in [(4, 97), (30, 211), (120, 120), (1, 24)] {
            for budget in [Budget::Frame, Budget::Video] {
                let config = json!({
                    "patch_size": factor / 2, "max_frames": 7, "min_frames": 2, "cap_pixels_per_frame": cap, "max_video_tokens": 150,
                    "size": {"shortest_edge": least * unit, "longest_edge": most * unit},
                });
                let files = ProcessorFiles::read(Some(&config.to_string()), None, None).unwrap();
                let rule = PatchVideo::new(&files.video, budget, Some(2 * factor)).unwrap();
                let fewest = if budget == Budget::Video { 2 } else { 1 };
                let mut found = [0; COSTS.len()];
                for (frames, size) in (fewest..=7).flat_map(|n| legal_sizes(10 * factor as u32).map(move |s| (n, s))) {
                    let shape = match rule.shape(frames, size) {
                        Ok(shape) => shape,
                        // Small images are scaled before their aspect is looked at, which can push it past the bound.
                        Err(MediaError::OverLimit { limit: 200, .. }) => continue,
                        Err(other) => panic!("{other}"),
                    };
                    for (most, cost) in found.iter_mut().zip(COSTS) {
                        *most = cost(&shape).max(*most);
                    }
                }
                for (i, most) in found.iter().enumerate() {
                    assert_eq!(*most, COSTS[i](&rule.worst(COSTS[i])), "cost {i} of {rule:?}");
                }
            }
        }
    }
}

#[test]
fn a30_tiles_and_audio_by_exhaustion() {
    for most in 1..=13 {
        let config = json!({"size": {"height": 8, "width": 8}, "max_patches": most, "min_patches": most.min(3)});
        let rule = Tiles::new(&ProcessorFiles::read(Some(&config.to_string()), None, None).unwrap(), 2, 1).unwrap();
        let sizes = (1..=60).flat_map(|h| (1..=60).map(move |w| Size::new(h, w)));
        let found = sizes.map(|size| rule.shape(size).unwrap().tokens).max().unwrap();
        assert_eq!(found, rule.worst().tokens, "at most {most}");
    }
    let rule = AudioRule::windows(&ProcessorFiles::default().audio, 50, 800, 60).unwrap();
    let mut longest = 0;
    for samples in (201..=60 * 16_000).step_by(160) {
        let tokens = rule.shape(samples).unwrap().tokens;
        assert!(tokens >= longest, "a longer sound has no fewer tokens");
        longest = tokens;
    }
    assert_eq!(rule.worst().tokens, rule.shape(60 * 16_000).unwrap().tokens.max(longest));
}

#[test]
fn a31_a_requests_own_pixels_may_be_fewer_never_more() {
    let rule = patches(28, 56 * 56, 1280 * 28 * 28);
    let words = rule.with_max_pixels(1280 * 28 * 28 + 1).unwrap_err().to_string();
    assert_eq!(words, "max_pixels has 1003521 pixels; the limit is 1003520 (--max-image-pixels)");
    assert!(rule.with_max_pixels(3135).is_err());
    assert_eq!(rule.with_max_pixels(64 * 28 * 28).unwrap().max_pixels, 64 * 28 * 28);
}

#[test]
fn what_cannot_be_resized_is_refused_with_the_reason() {
    let rule = patches(28, 56 * 56, 1280 * 28 * 28);
    let words = |h, w| rule.shape(Size::new(h, w)).unwrap_err().to_string();
    assert_eq!(words(0, 5), "an image cannot be read: 5 × 0 has no pixels");
    assert!(words(1, 65_535).contains("65535 times the short side as its long side; the limit is 200"));
    assert!(words(1 << 25, 1 << 25).contains("pixels on a side; the limit is 16777216"));
}

proptest! {
    /// A30 and A32 at the sizes of real checkpoints, where trying everything takes too long.
    #[test]
    fn no_image_costs_more_than_the_worst(h in 1_u32..9000, ratio in 0.005_f64..200.0, least in 1_u64..2000, most in 1_u64..20_000, patch in 7_u64..17, window in 1_u64..9) {
        let unit = 4 * patch * patch;
        let rule = Patches { patch, merge: 2, temporal: 2, min_pixels: least.min(most) * unit / 3 + 1, max_pixels: most * unit, window: Some(window), filter: Filter::Bicubic, fills: false };
        let w = (f64::from(h) * ratio) as u32;
        if let Ok(shape) = rule.shape(Size::new(h, w)) {
            let resized = rule.resize(Size::new(h, w)).unwrap();
            prop_assert_eq!(resized.pixels() / (patch * patch), shape.rows);
            prop_assert_eq!(shape.rows, shape.tokens * 4);
            for cost in COSTS {
                prop_assert!(cost(&shape) <= cost(&rule.worst(cost)), "{:?} of {}×{} under {:?}", shape, h, w, rule);
            }
        }
    }
}
