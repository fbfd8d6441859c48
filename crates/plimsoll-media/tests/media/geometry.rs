//! Sizes, tokens and sampled frames against transformers' own (`tools/media_fixtures.py`).

use plimsoll_media::Size;
use plimsoll_media::geometry::config::Fields;
use plimsoll_media::geometry::frames::Wanted;
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{
    AudioRule, Canvases, ImageRule, Longest, PatchVideo, Patches, Pieces, ProcessorFiles, Sampling, Squares, Steps,
    Tiles,
};
use serde_json::Value;
use sha2::{Digest, Sha256};

const GOLDEN: &str = include_str!("../../../../tests/fixtures/media/geometry.json");

fn golden(family: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(GOLDEN).unwrap();
    all[family].as_array().unwrap().clone()
}

fn files(config: &Value) -> ProcessorFiles {
    ProcessorFiles::read(Some(&config.to_string()), None, None).unwrap()
}

fn rows(group: &Value) -> impl Iterator<Item = &[Value]> {
    group["rows"].as_array().unwrap().iter().map(|row| row.as_array().unwrap().as_slice())
}

fn number(value: &Value) -> Option<u64> {
    value.as_u64()
}

fn size(height: &Value, width: &Value) -> Size {
    Size::new(number(height).unwrap() as u32, number(width).unwrap() as u32)
}

/// The start of the SHA-256, as the fixtures have it.
fn digest(bytes: impl AsRef<[u8]>) -> String {
    Sha256::digest(bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn images_become_as_large_as_in_transformers() {
    let mut compared = 0;
    for group in golden("images") {
        let rule = Patches::image(&files(&group["config"]).image, None).unwrap();
        for row in rows(&group) {
            let of = size(&row[0], &row[1]);
            let resized = rule.resize(of).ok();
            let expected = number(&row[2]).map(|_| size(&row[2], &row[3]));
            assert_eq!(resized, expected, "{of:?} under {rule:?}");
            assert_eq!(rule.shape(of).ok().map(|shape| shape.tokens), number(&row[4]), "{of:?} under {rule:?}");
            compared += 1;
        }
    }
    assert!(compared > 1000, "{compared}");
}

#[test]
fn images_that_fill_a_budget_become_as_large_as_in_transformers() {
    let mut compared = 0;
    for group in golden("budgets") {
        let rule = Patches::filling(&files(&group["config"]).image, 280).unwrap();
        for row in rows(&group) {
            let of = size(&row[0], &row[1]);
            assert_eq!(rule.resize(of).unwrap(), size(&row[2], &row[3]), "{of:?} under {rule:?}");
            assert_eq!(rule.shape(of).unwrap().tokens, number(&row[4]).unwrap(), "{of:?} under {rule:?}");
            compared += 1;
        }
    }
    assert!(compared > 600, "{compared}");
}

#[test]
fn a_budget_is_one_of_those_that_the_model_was_trained_with() {
    let error = Patches::filling(&files(&serde_json::json!({"max_soft_tokens": 256})).image, 280).unwrap_err();
    assert!(error.to_string().contains("max_soft_tokens") && error.to_string().contains("256"), "{error}");
    let rule = Patches::filling(&files(&serde_json::json!({"max_soft_tokens": 560})).image, 280).unwrap();
    let tokens = |pixels: u64| rule.with_max_pixels(pixels * 48 * 48).unwrap().shape(Size::new(99, 99)).unwrap().tokens;
    assert_eq!([70, 139, 140, 400, 560].map(tokens), [64, 64, 121, 256, 529]);
    assert!(rule.with_max_pixels(69 * 48 * 48).is_err());
}

#[test]
fn videos_become_as_large_as_in_transformers() {
    for (family, budget) in [("qwen2_videos", Budget::Frame), ("qwen3_videos", Budget::Video)] {
        let mut compared = 0;
        for group in golden(family) {
            // More frames than the checkpoint samples are refused here; the rule itself is compared for all of them.
            let mut config = group["config"].clone();
            config["max_frames"] = 768.into();
            let rule = PatchVideo::new(&files(&config).video, budget, None).unwrap();
            for row in rows(&group) {
                let (frames, of) = (number(&row[0]).unwrap(), size(&row[1], &row[2]));
                let resized = rule.resize(frames, of).ok();
                let expected = number(&row[3]).map(|_| size(&row[3], &row[4]));
                assert_eq!(resized, expected, "{frames} × {of:?} under {rule:?}");
                let tokens = rule.shape(frames, of).ok().map(|shape| shape.tokens);
                assert_eq!(tokens, number(&row[5]), "{frames} × {of:?} under {rule:?}");
                compared += 1;
            }
        }
        assert!(compared > 400, "{compared}");
    }
}

fn compare_sampling(group: &Value, sampling: Sampling) {
    for row in rows(group) {
        let (total, fps) = (number(&row[0]).unwrap(), row[1].as_f64().unwrap());
        let indices = sampling.indices(total, fps).ok();
        let what = format!("{total} frames at {fps} under {sampling:?}: {indices:?}");
        assert_eq!(indices.as_ref().map(|all| all.len() as u64), number(&row[2]), "{what}");
        let Some(indices) = indices else { continue };
        let bytes: Vec<u8> = indices.iter().flat_map(|&index| (index as u32).to_le_bytes()).collect();
        assert_eq!(digest(bytes), row[3].as_str().unwrap(), "{what}");
        if let Some(expected) = row[4].as_str() {
            let times = sampling.timestamps(&indices, fps);
            let times: Vec<_> = times.iter().map(|seconds| format!("{seconds:.1}")).collect();
            let times = times.join(" ");
            assert_eq!(if times.len() < 200 { times } else { digest(times) }, expected, "{what}");
        }
    }
}

#[test]
fn the_same_frames_are_taken_as_in_transformers() {
    for (family, budget) in [("qwen2_sampling", Budget::Frame), ("qwen3_sampling", Budget::Video)] {
        for group in golden(family) {
            let fields = files(&group["config"]).video;
            compare_sampling(&group, PatchVideo::new(&fields, budget, None).unwrap().sampling);
        }
    }
    for group in golden("tile_sampling") {
        compare_sampling(&group, Sampling::middles(&files(&group["config"]).video, 65_536).unwrap());
    }
}

#[test]
fn a31_more_frames_than_in_the_self_test_are_refused_with_the_limit() {
    let rule = PatchVideo::new(&files(&serde_json::json!({"max_frames": 32})).video, Budget::Video, None).unwrap();
    // Museum T-24: 33 frames sent as a list.
    let error = rule.shape(33, Size::new(64, 64)).unwrap_err();
    assert_eq!(error.to_string(), "a video has 33 frames; the limit is 32 (--max-video-frames)");
    assert!(rule.shape(32, Size::new(64, 64)).is_ok());
    let all = rule.sampling.with(Wanted::Count(33));
    assert!(all.indices(1000, 25.0).unwrap_err().to_string().contains("the limit is 32"));
    assert_eq!(rule.sampling.with(Wanted::Count(32)).indices(1000, 25.0).unwrap().len(), 32);
}

#[test]
fn tiles_are_cut_as_in_transformers() {
    let mut compared = 0;
    for group in golden("tiles") {
        // These are the image processor's own words; the processor around it always crops.
        if group["config"]["crop_to_patches"] != true {
            continue;
        }
        let rule = Tiles::new(&files(&group["config"]), 14, 2).unwrap();
        for row in rows(&group) {
            let of = size(&row[0], &row[1]);
            let grid = rule.grid(of).unwrap();
            assert_eq!((Some(grid.0), Some(grid.1)), (number(&row[2]), number(&row[3])), "{of:?} under {rule:?}");
            let shape = rule.shape(of).unwrap();
            assert_eq!(shape.tokens, 256 * number(&row[4]).unwrap(), "{of:?} under {rule:?}");
            assert!(shape.tokens <= rule.worst().tokens);
            compared += 1;
        }
    }
    assert!(compared > 600, "{compared}");
}

#[test]
fn pieces_are_as_in_transformers() {
    let (mut compared, mut cut) = (0, 0);
    for group in golden("pieces") {
        let rule = Pieces::new(&files(&group["config"])).unwrap();
        for row in rows(&group) {
            let of = size(&row[0], &row[1]);
            let fit = ImageRule::Pieces(rule.clone()).fit(of);
            assert_eq!(fit.as_ref().ok().map(|fit| fit.shape.tokens), number(&row[6]), "{of:?} under {rule:?}");
            compared += 1;
            let Ok(fit) = fit else { continue };
            let whole = size(&row[2], &row[3]);
            match fit.cut {
                Some(pieces) => {
                    assert_eq!((Some(pieces.columns), Some(pieces.rows)), (number(&row[4]), number(&row[5])), "{of:?}");
                    assert!(pieces.whole.is_none_or(|found| found == whole), "{of:?}: {pieces:?}, not {whole:?}");
                    assert!(pieces.pieces() <= rule.pieces_max());
                    cut += 1;
                }
                None => assert_eq!((fit.canvas, number(&row[4]), number(&row[5])), (whole, Some(1), Some(1)), "{of:?}"),
            }
            assert!(fit.shape.tokens <= rule.tokens_max(), "{of:?} under {rule:?}");
        }
    }
    assert!(compared > 600 && cut > 100, "{compared}, {cut} of them cut");
}

#[test]
fn longest_sides_are_as_in_transformers() {
    let mut refused = 0;
    for group in golden("longest") {
        let [patch, merge] = ["patch", "merge"].map(|key| number(&group[key]).unwrap());
        let rule = Longest::new(&files(&group["config"]), patch, merge).unwrap();
        for row in rows(&group) {
            let of = size(&row[0], &row[1]);
            let Ok(fit) = rule.fit(of) else {
                assert!(row[2].is_null(), "{of:?} is refused under {rule:?}");
                refused += 1;
                continue;
            };
            assert_eq!(fit.size, size(&row[2], &row[3]), "{of:?} under {rule:?}");
            assert!(fit.shape.tokens <= rule.tokens_on_a_side().pow(2), "{of:?} under {rule:?}");
        }
    }
    assert!((1..100).contains(&refused), "{refused} are refused");
}

#[test]
fn squares_are_as_in_transformers() {
    let mut cut = 0;
    for group in golden("squares") {
        let [patch, merge] = ["patch", "merge"].map(|key| number(&group[key]).unwrap());
        let rule = Squares::new(&files(&group["config"]), patch, merge).unwrap();
        for row in rows(&group) {
            let of = size(&row[0], &row[1]);
            let fit = rule.fit(of).unwrap();
            let Some(Steps::Twice { first, .. }) = fit.steps else { panic!("{fit:?}") };
            let found = (first, fit.canvas);
            assert_eq!(found, (size(&row[2], &row[3]), size(&row[4], &row[5])), "{of:?} under {rule:?}");
            let grid = fit.cut.map_or((1, 1), |cut| (cut.rows, cut.columns));
            assert_eq!((Some(grid.0), Some(grid.1)), (number(&row[6]), number(&row[7])), "{of:?} under {rule:?}");
            assert!(fit.shape.sequences <= rule.squares_max(), "{of:?} under {rule:?}");
            cut += u64::from(fit.cut.is_some());
        }
    }
    assert!(cut > 300, "{cut} are cut");
}

#[test]
fn canvases_are_as_in_transformers() {
    let (mut compared, mut cut) = (0, 0);
    for group in golden("canvases") {
        let [patch, merge] = ["patch", "merge"].map(|key| number(&group[key]).unwrap());
        let rule = Canvases::new(&files(&group["config"]), patch, merge).unwrap();
        for row in rows(&group) {
            let of = size(&row[0], &row[1]);
            let fit = rule.fit(of).unwrap();
            let Some(Steps::Laid { image, .. }) = fit.steps else { panic!("{fit:?}") };
            let found = (image, fit.canvas);
            assert_eq!(found, (size(&row[2], &row[3]), size(&row[4], &row[5])), "{of:?} under {rule:?}");
            let grid = fit.cut.map_or((1, 1), |cut| (cut.rows, cut.columns));
            assert_eq!((Some(grid.0), Some(grid.1)), (number(&row[6]), number(&row[7])), "{of:?} under {rule:?}");
            assert!(fit.shape.sequences <= rule.tiles_max(), "{of:?} under {rule:?}");
            assert_eq!(fit.shape.tokens, fit.shape.sequences * rule.tile_tokens, "{of:?} under {rule:?}");
            compared += 1;
            cut += u64::from(fit.cut.is_some());
        }
    }
    assert!(compared > 900 && cut > 300, "{compared}, {cut} of them cut");
}

#[test]
fn canvases_that_no_encoder_has_are_refused_by_name() {
    for (text, (patch, merge), words) in [
        (r#"{"size": {"height": 0, "width": 0}}"#, (14, 2), "size.height: 0 is not between 1 and 8192"),
        (r#"{"size": {"height": 28, "width": 8193}}"#, (14, 2), "size.width: 8193 is not between 1 and 8192"),
        (r#"{"size": {"height": 28, "width": 56}}"#, (14, 2), "size: tiles of 28 x 56 pixels are not supported"),
        (r#"{"size": {"height": 42, "width": 42}}"#, (14, 2), "size: 42 pixels are no multiple of 14 x 2"),
        (r#"{"max_patches": 0}"#, (14, 2), "max_patches: 0 is not between 1 and 1024"),
        (r#"{"max_patches": 18446744073709551615}"#, (14, 2), "max_patches: 18446744073709551615 is not between"),
        ("{}", (0, 2), "patch_size: 0 is not between 1 and 336"),
        ("{}", (14, 0), "pixel_shuffle_ratio: one divided by 0"),
    ] {
        let files = ProcessorFiles::read(Some(text), None, None).unwrap();
        let error = Canvases::new(&files, patch, merge).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    let outer = ProcessorFiles::read(None, None, Some(r#"{"patch_size": 16}"#)).unwrap();
    let error = Canvases::new(&outer, 14, 2).unwrap_err().to_string();
    assert!(error.contains("patch_size: the processor says 16, the encoder 14"), "{error}");
    let rule = Canvases::new(&ProcessorFiles::default(), 14, 2).unwrap();
    assert!(rule.fit(Size::new(0, 5)).is_err() && rule.fit(Size::new(1, 1 << 25)).is_err());
}

#[test]
fn fewer_pixels_or_tokens_are_fewer_tiles_then_smaller_images() {
    let rule = Pieces::new(&files(&serde_json::json!({}))).unwrap();
    let all = (rule.pieces_max(), rule.tokens_max(), rule.pixels());
    assert_eq!(all, (11, 2816, (64 * 1024, 10 * 512 * 512)));
    let of = |rule: Pieces| (rule.pieces_max(), rule.tokens_max());
    for (pixels, expected) in [
        (u64::MAX, (11, 2816)),
        (1 << 20, (5, 5 * 256)),
        (2 * 512 * 512, (3, 3 * 256)),
        // No image is cut into one tile.
        (2 * 512 * 512 - 1, (1, 256)),
        (100 * 1024, (1, 100)),
        (0, (1, 64)),
    ] {
        assert_eq!(of(rule.limited(pixels)), expected, "{pixels} pixels");
    }
    for (tokens, expected) in [(4096, (11, 2816)), (2815, (10, 2560)), (768, (3, 768)), (767, (1, 256)), (99, (1, 99))]
    {
        assert_eq!(of(rule.carried_in(tokens)), expected, "{tokens} tokens");
    }
    let bare = Pieces::new(&files(&serde_json::json!({"use_thumbnail": false}))).unwrap();
    assert_eq!((of(bare.clone()), of(bare.carried_in(700))), ((10, 2560), (2, 512)));
    let large = Size::new(3000, 4000);
    for rule in [rule.limited(600_000), bare.limited(0), rule.carried_in(300)] {
        let shape = rule.shape(large).unwrap();
        assert!(shape.tokens <= rule.tokens_max() && shape.longest <= 4 * rule.piece_tokens(), "{rule:?}: {shape:?}");
    }
}

#[test]
fn what_processors_leave_out_is_refused_by_name() {
    let read = |text| ProcessorFiles::read(Some(text), None, None);
    for (text, name) in [
        (r#"{"do_normalize": false}"#, "do_normalize"),
        (r#"{"do_rescale": false}"#, "do_rescale"),
        (r#"{"do_resize": false}"#, "do_resize"),
        (r#"{"resample": 4}"#, "resample"),
        (r#"{"do_pan_and_scan": true}"#, "do_pan_and_scan"),
    ] {
        assert!(read(text).unwrap_err().to_string().contains(name), "{text}");
    }
    read(r#"{"do_normalize": true, "do_rescale": true, "resample": 3}"#).unwrap();
    let outer = r#"{"use_image_special_tokens": false}"#;
    let unspelled = Pieces::new(&ProcessorFiles::read(Some("{}"), None, Some(outer)).unwrap()).unwrap_err();
    assert!(unspelled.to_string().contains("use_image_special_tokens: false is not supported"), "{unspelled}");
    for (text, name) in [
        (r#"{"min_tiles": 1}"#, "min_tiles: 1 is not supported, only 2"),
        (r#"{"min_tiles": 3}"#, "min_tiles: 3 is not supported, only 2"),
        (r#"{"tile_size": 500}"#, "tile_size: 500 is not a multiple of a token's 32 pixels"),
        (r#"{"max_pixels_tolerance": 0}"#, "max_pixels_tolerance"),
        (r#"{"min_image_tokens": 257}"#, "min_image_tokens"),
    ] {
        let error = Pieces::new(&read(text).unwrap()).unwrap_err().to_string();
        assert!(error.contains(name), "{text}: {error}");
    }
    // LFM2-VL's file says that it does not resize, and its processor does.
    Pieces::new(&read(r#"{"encoder_patch_size": 16, "do_resize": false}"#).unwrap()).unwrap();
    // Gemma 4's leaves it to the model.
    read(r#"{"image_processor_type": "Gemma4ImageProcessor", "do_normalize": false}"#).unwrap();
    // A feature extractor's word in the same file.
    read(r#"{"feature_extractor_type": "WhisperFeatureExtractor", "do_normalize": false}"#).unwrap();
    // An image processor does not crop by itself, and is told to by the one around it.
    let tiles = |text| Tiles::new(&read(text).unwrap(), 14, 2).unwrap();
    assert_eq!(tiles(r#"{"crop_to_patches": false}"#), tiles(r#"{"crop_to_patches": true}"#));
}

#[test]
fn t36_a_requests_own_number_of_tiles_is_checked_at_both_ends() {
    let rule = Tiles::new(&files(&serde_json::json!({"max_patches": 12})), 14, 2).unwrap();
    assert!(rule.with_max_tiles(0).unwrap_err().to_string().contains("0 is less than the fewest tiles, 1"));
    assert_eq!(rule.with_max_tiles(1).unwrap().worst().tokens, 256);
    assert_eq!(rule.with_max_tiles(12).unwrap().worst().tokens, 13 * 256);
    assert_eq!(rule.video_shape(5).tokens, 5 * 256, "a frame of a video is one tile");
    let words = rule.with_max_tiles(13).unwrap_err().to_string();
    assert_eq!(words, "image_max_patch_num has 13 tiles; the limit is 12 (--max-image-pixels)");
}

#[test]
fn audio_become_as_many_tokens_as_in_transformers() {
    let rule = AudioRule::windows(&files(&serde_json::json!({})).audio, 50, 800, 7200).unwrap();
    for row in golden("audio") {
        let (samples, tokens) = (number(&row[0]).unwrap(), number(&row[1]).unwrap());
        let shape = rule.shape(samples);
        // The reference cannot transform audio clips of up to 200 samples.
        assert_eq!(shape.is_err(), samples <= 200, "{samples}");
        assert_eq!(shape.map_or(tokens, |shape| shape.tokens), tokens, "{samples}");
    }
    let words = rule.shape(7200 * 16_000 + 1).unwrap_err().to_string();
    assert_eq!(words, "an audio clip has 7201 seconds; the limit is 7200 (--max-audio-seconds)");
}

#[test]
fn audio_of_qwen2_5_omni_is_no_longer_than_its_extractor_takes() {
    let own = r#"{"chunk_length": 300, "feature_extractor_type": "WhisperFeatureExtractor", "hop_length": 160}"#;
    let files = ProcessorFiles::read(Some(own), None, None).unwrap();
    let rule = AudioRule::chunks(&files.audio, 100, 4000).unwrap();
    assert_eq!((rule.worst().tokens, rule.worst().rows, rule.worst().sequences), (7500, 15_000, 150));
    let error = rule.shape(300 * 16_000 + 1).unwrap_err().to_string();
    assert!(error.contains("301 seconds") && error.contains("fixed by the model"), "{error}");
    let error = AudioRule::chunks(&files.audio, 100, 60).unwrap().shape(61 * 16_000).unwrap_err().to_string();
    assert!(error.contains("--max-audio-seconds"), "{error}");
}

#[test]
fn the_limit_of_whisper_is_for_the_clip_that_is_sent() {
    let files = ProcessorFiles::default();
    let rule = AudioRule::fixed(&files.audio, 3000, 10).unwrap();
    assert_eq!(rule.shape(8_000).unwrap().tokens, 1500, "silence fills it up to 30 seconds");
    let error = rule.shape(10 * 16_000 + 1).unwrap_err().to_string();
    assert_eq!(error, "an audio clip has 11 seconds; the limit is 10 (--max-audio-seconds)");
    let own = ProcessorFiles::read(Some(r#"{"n_fft": 65536}"#), None, None).unwrap();
    let error = AudioRule::fixed(&own.audio, 200, 2).unwrap_err().to_string();
    assert!(error.contains("n_fft") && error.contains("32000"), "{error}");
}

#[test]
fn a_video_of_qwen3_omni_has_its_own_bounds() {
    let pixels = |video: Option<&str>| {
        let own = r#"{"patch_size": 16, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}"#;
        let rule = PatchVideo::omni(&ProcessorFiles::read(Some(own), video, None).unwrap(), None).unwrap();
        (rule.patches.patch, rule.patches.min_pixels, rule.patches.max_pixels)
    };
    assert_eq!(pixels(None), (16, 128 * 32 * 32, 768 * 32 * 32));
    let apart = r#"{"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}}"#;
    assert_eq!(pixels(Some(apart)), (16, 4096, 65_536));
}

#[test]
fn configurations_are_found_as_transformers_finds_them() {
    let own =
        r#"{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "size": {"min_pixels": 1, "max_pixels": 2}}"#;
    let video = r#"{"size": {"shortest_edge": 100352, "longest_edge": 602112}, "patch_size": 16}"#;
    let outer = r#"{"image_seq_length": 64, "video_processor": {"size": {"shortest_edge": 4, "longest_edge": 4096}}}"#;
    let pixels = |fields: &Fields| {
        let rule = PatchVideo::new(fields, Budget::Frame, None).unwrap().patches;
        (rule.min_pixels, rule.max_pixels)
    };
    let files = ProcessorFiles::read(Some(own), Some(video), None).unwrap();
    assert_eq!(pixels(&files.image), (3136, 12_845_056));
    assert_eq!(pixels(&files.video), (100_352, 602_112));
    assert_eq!(pixels(&ProcessorFiles::read(Some(own), None, None).unwrap().video), (3136, 12_845_056));
    let files = ProcessorFiles::read(Some(own), Some(video), Some(outer)).unwrap();
    assert_eq!(pixels(&files.video), (4, 4096));
    assert_eq!(Tiles::new(&files, 14, 2).unwrap().tile_tokens, 64);
    for bad in [r#"{"min_pixels": 0}"#, r#"{"max_pixels": 5}"#, r#"{"patch_size": 0}"#, r#"{"merge_size": 99}"#] {
        let files = ProcessorFiles::read(Some(bad), None, None).unwrap();
        let words = Patches::image(&files.image, None).unwrap_err().to_string();
        assert!(words.starts_with("the processor's configuration is not usable: "), "{words}");
    }
    assert!(ProcessorFiles::read(Some("[1"), None, None).is_err());
    assert!(ProcessorFiles::read(Some(r#"{"patch_size": "x"}"#), None, None).is_err());
}
