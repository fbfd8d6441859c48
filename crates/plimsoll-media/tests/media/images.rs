//! Images of every awkward kind against transformers (on white), and the resize against torchvision (`tools/media_fixtures.py`).

use crate::common::fixture;
use plimsoll_media::Size;
use plimsoll_media::geometry::{Canvases, ImageRule, Patches, Pieces, ProcessorFiles};
use plimsoll_media::image::{
    Filter, Format, ImageLimits, Normalize, Rgb, decode, frames, patchify, patchify_len, pieces, probe, resize, squares,
};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn expected(name: &str) -> Rgb {
    let all: Value = serde_json::from_slice(&fixture("pictures.json")).unwrap();
    let row = all[name].as_array().unwrap();
    let hex = row[2].as_str().unwrap();
    let data = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    Rgb { size: Size::new(row[0].as_u64().unwrap() as u32, row[1].as_u64().unwrap() as u32), data }
}

/// The largest difference of a byte.
fn apart(a: &Rgb, b: &Rgb) -> u8 {
    assert_eq!(a.size, b.size);
    a.data.iter().zip(&b.data).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

#[test]
fn lossless_images_are_equal_to_transformers() {
    let names = [
        "rgb.png",
        "rgba.png",
        "palette.png",
        "gray.png",
        "gray_alpha.png",
        "bits.png",
        "gray16.png",
        "turned.webp",
        "palette.gif",
        "clear.gif",
        "key.png",
    ];
    for name in names {
        let decoded = decode(&fixture(name), &ImageLimits::default()).unwrap();
        assert_eq!(apart(&decoded, &expected(name)), 0, "{name}");
    }
}

#[test]
fn lossy_images_are_close_to_transformers() {
    // Decoders may round the inverse transform differently and interpolate colour differently.
    for (name, most) in [("turned.jpg", 4), ("cmyk.jpg", 4), ("gray.jpg", 2), ("progressive.jpg", 8), ("lossy.webp", 8)]
    {
        let decoded = decode(&fixture(name), &ImageLimits::default()).unwrap();
        let apart = apart(&decoded, &expected(name));
        println!("{name}: {apart} of 255");
        assert!(apart <= most, "{name}: {apart}");
    }
}

#[test]
fn the_header_tells_the_upright_size_before_anything_is_decoded() {
    for name in ["turned.jpg", "turned.webp", "rgb.png", "moving.gif", "moving.webp"] {
        let bytes = fixture(name);
        let header = probe(&bytes, &ImageLimits::default()).unwrap();
        assert_eq!(header.size, decode(&bytes, &ImageLimits::default()).unwrap().size, "{name}");
        assert_eq!(header.frames, if name.starts_with("moving") { 4 } else { 1 }, "{name}");
    }
    let turned = probe(&fixture("turned.jpg"), &ImageLimits::default()).unwrap();
    assert_eq!((turned.size, turned.format), (Size::new(28, 20), Format::Jpeg));
}

#[test]
fn frames_of_an_animation_are_taken_by_position() {
    for name in ["moving.gif", "moving.webp"] {
        let bytes = fixture(name);
        let mut taken = Vec::new();
        frames(&bytes, &[0, 2, 2, 3], &ImageLimits::default(), |frame| taken.push(frame.clone())).unwrap();
        assert_eq!(taken.len(), 4);
        for (frame, at) in taken.iter().zip([0, 2, 2, 3]) {
            // Blending a WebP's frames onto each other may round differently.
            let most = u8::from(name.ends_with("webp"));
            assert!(apart(frame, &expected(&format!("{name} {at}"))) <= most, "{name} {at}");
        }
        assert!(frames(&bytes, &[4], &ImageLimits::default(), |_| {}).is_err());
        let one = ImageLimits { frames: 3, ..ImageLimits::default() };
        let words = probe(&bytes, &one).unwrap_err().to_string();
        assert_eq!(words, "an image has 4 frames; the limit is 3 (--max-animation-frames)");
    }
    let mut still = 0;
    frames(&fixture("rgb.png"), &[0, 0], &ImageLimits::default(), |_| still += 1).unwrap();
    assert_eq!(still, 2, "what does not move has one frame, as often as asked for");
}

/// The image of the resize cases: a gradient with hard edges and noise on top.
fn noise(size: Size) -> Rgb {
    let mut state = u64::from(size.height) * 65536 + u64::from(size.width);
    let mut data = Vec::new();
    for y in 0..size.height {
        for x in 0..size.width {
            for c in 0..3 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let smooth = (x * 3 + y * 5 + c * 40) % 256;
                let base = if (x / 7 + y / 5) % 2 == 1 { smooth } else { 255 * (c % 2) };
                data.push((i64::from(base) + (state >> 58) as i64 - 32).clamp(0, 255) as u8);
            }
        }
    }
    Rgb { size, data }
}

#[test]
fn the_resize_is_torchvisions_bit_for_bit() {
    let golden: Value = serde_json::from_slice(&fixture("geometry.json")).unwrap();
    let filters =
        [("resize", Filter::Bicubic), ("resize_bilinear", Filter::Bilinear), ("resize_lanczos", Filter::Lanczos)];
    for (key, filter) in filters {
        let rows = golden[key].as_array().unwrap();
        for row in rows {
            let side = |at: usize| row[at].as_u64().unwrap() as u32;
            let resized = resize(&noise(Size::new(side(0), side(1))), Size::new(side(2), side(3)), filter);
            let sum: String = Sha256::digest(&resized.data).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(sum, row[4].as_str().unwrap(), "{key} {row}");
        }
        assert!(rows.len() > 10);
    }
}

#[test]
fn pixel_values_are_the_processors_bit_for_bit() {
    let golden: Value = serde_json::from_slice(&fixture("geometry.json")).unwrap();
    for row in golden["patches"].as_array().unwrap() {
        let files = ProcessorFiles::read(Some(&row[0].to_string()), None, None).unwrap();
        let rule = Patches::image(&files.image, None).unwrap();
        let of = Size::new(row[1].as_u64().unwrap() as u32, row[2].as_u64().unwrap() as u32);
        let image = resize(&noise(of), rule.resize(of).unwrap(), rule.filter);
        let rows = rule.shape(of).unwrap().rows;
        assert_eq!(Some(rows), row[3].as_u64(), "A32: rows announced and made");
        let mut values = vec![f32::NAN; patchify_len(&rule, 1, image.size)];
        patchify(&[image], &rule, &Normalize::new(&files.image, Normalize::CLIP).unwrap(), &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let sum: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sum, row[4].as_str().unwrap(), "{row}");
    }
}

#[test]
fn pieces_are_what_the_processor_makes_bit_for_bit() {
    let golden: Value = serde_json::from_slice(&fixture("geometry.json")).unwrap();
    for row in golden["piece_patches"].as_array().unwrap() {
        let files = ProcessorFiles::read(Some(&row[0].to_string()), None, None).unwrap();
        let rule = Pieces::new(&files).unwrap();
        let of = Size::new(row[1].as_u64().unwrap() as u32, row[2].as_u64().unwrap() as u32);
        let fit = ImageRule::Pieces(rule.clone()).fit(of).unwrap();
        let (image, filter) = (noise(of), rule.patches.filter);
        let made = match fit.cut {
            Some(cut) => pieces(&image, fit.canvas, fit.size, cut.whole, filter),
            None => vec![resize(&image, fit.canvas, filter)],
        };
        let (normalize, mut sum) = (Normalize::new(&files.image, Normalize::HALVES).unwrap(), Sha256::new());
        let mut rows = 0;
        for (piece, grid) in made.iter().zip(row[3].as_array().unwrap()) {
            assert_eq!(Some(u64::from(piece.size.height) / 16), grid[0].as_u64(), "{row}");
            assert_eq!(Some(u64::from(piece.size.width) / 16), grid[1].as_u64(), "{row}");
            let mut values = vec![f32::NAN; patchify_len(&rule.patches, 1, piece.size)];
            patchify(std::slice::from_ref(piece), &rule.patches, &normalize, &mut values);
            values.iter().for_each(|value| sum.update(value.to_le_bytes()));
            rows += rule.patches.piece(piece.size).rows;
        }
        assert_eq!((made.len(), rows), (row[3].as_array().unwrap().len(), fit.shape.rows), "A32: {row}");
        let sum: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sum, row[4].as_str().unwrap(), "{row}");
    }
}

#[test]
fn tiles_on_a_canvas_are_what_the_processor_makes_bit_for_bit() {
    let golden: Value = serde_json::from_slice(&fixture("geometry.json")).unwrap();
    for row in golden["canvas_patches"].as_array().unwrap() {
        let files = ProcessorFiles::read(Some(&row[0].to_string()), None, None).unwrap();
        let rule = Canvases::new(&files, 4, 2).unwrap();
        let of = Size::new(row[1].as_u64().unwrap() as u32, row[2].as_u64().unwrap() as u32);
        let fit = rule.fit(of).unwrap();
        let made = squares(noise(of), fit.steps.unwrap(), fit.canvas, fit.size, fit.filter);
        let (found, announced) = (made.len() as u64, fit.shape.sequences);
        assert_eq!((Some(found), announced), (row[3].as_u64(), found), "A32: {row}");
        let (normalize, mut sum) = (Normalize::rounded(&files.image, Normalize::HALVES).unwrap(), Sha256::new());
        for tile in &made {
            let mut values = vec![f32::NAN; patchify_len(&rule.patches, 1, tile.size)];
            patchify(std::slice::from_ref(tile), &rule.patches, &normalize, &mut values);
            values.iter().for_each(|value| sum.update(value.to_le_bytes()));
        }
        let sum: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sum, row[4].as_str().unwrap(), "{row}");
    }
}

#[test]
fn a_normalization_that_cannot_be_is_refused() {
    let fields = |text: &str| ProcessorFiles::read(Some(text), None, None).unwrap().image;
    let halves = Normalize::new(&fields("{}"), Normalize::HALVES).unwrap();
    assert_eq!(halves, Normalize { mean: [127.5; 3], std: [127.5; 3], rounded: None });
    for bad in [r#"{"image_std": [1, 0, 1]}"#, r#"{"rescale_factor": 0}"#, r#"{"rescale_factor": -1}"#] {
        assert!(Normalize::new(&fields(bad), Normalize::CLIP).is_err(), "{bad}");
    }
    // Values out of the range of single precision or bfloat16.
    for bad in [
        r#"{"image_std": [1, 0, 1]}"#,
        r#"{"image_std": [1, 1e-46, 1]}"#,
        r#"{"image_mean": [0, 1e39, 1]}"#,
        r#"{"rescale_factor": 1e39}"#,
        r#"{"rescale_factor": 1e37}"#,
    ] {
        let error = Normalize::rounded(&fields(bad), Normalize::HALVES).unwrap_err().to_string();
        assert!(error.contains("image_mean, image_std, rescale_factor"), "{bad}: {error}");
    }
}

#[test]
fn a_video_short_of_frames_repeats_its_last_one() {
    let rule = Patches {
        patch: 2,
        merge: 1,
        temporal: 2,
        min_pixels: 1,
        max_pixels: 100,
        window: None,
        filter: Filter::Bicubic,
        fills: false,
    };
    let frame = |value| Rgb { size: Size::new(2, 2), data: vec![value; 12] };
    let plain = Normalize { mean: [0.0; 3], std: [1.0; 3], rounded: None };
    let mut values = vec![f32::NAN; patchify_len(&rule, 3, Size::new(2, 2))];
    patchify(&[frame(1), frame(2), frame(3)], &rule, &plain, &mut values);
    // Two groups of three channels, each with two frames of four pixels.
    let expected: Vec<f32> = [[1, 2], [3, 3]]
        .iter()
        .flat_map(|pair| [0; 3].into_iter().flat_map(|_| pair.iter().flat_map(|&value| [value as f32; 4])))
        .collect();
    assert_eq!(values, expected);
}
