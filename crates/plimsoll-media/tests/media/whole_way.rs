//! One image's whole way: header, shape, decoding, resize, patches, an encoder, outputs.

use plimsoll_media::geometry::{Patches, ProcessorFiles};
use plimsoll_media::image::{ImageLimits, Normalize, decode, patchify, patchify_len, probe, resize};
use plimsoll_media::{Claim, ContentKey, MediaError, Modality, OutputPool, Pinned, Size, Vacant};

const CONFIG: &str = r#"{"patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096, "max_frames": 6,
    "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}"#;

fn files() -> ProcessorFiles {
    ProcessorFiles::read(Some(CONFIG), None, None).unwrap()
}

/// A PNG of one colour.
fn png(size: Size, color: [u8; 3]) -> Vec<u8> {
    let image = image::RgbImage::from_pixel(size.width, size.height, image::Rgb(color));
    let mut bytes = std::io::Cursor::new(Vec::new());
    image.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// An image's patches with room for their outputs, or the outputs, if it was there before.
fn prepare(outputs: &OutputPool, bytes: &[u8]) -> Result<Result<(Vec<f32>, Vacant), Pinned>, MediaError> {
    let files = files();
    let rule = Patches::image(&files.image, Some(16))?;
    let header = probe(bytes, &ImageLimits::default())?;
    let shape = rule.shape(header.size)?;
    let key = ContentKey::of(Modality::Image, CONFIG, bytes);
    let room = match outputs.claim(&[(key, shape.tokens as usize)])?.pop().unwrap() {
        Claim::Ready(pinned) => return Ok(Err(pinned)),
        Claim::Vacant(room) => room,
    };
    let image = resize(&decode(bytes, &ImageLimits::default())?, rule.resize(header.size)?, rule.filter);
    let mut values = vec![0.0; patchify_len(&rule, 1, image.size)];
    patchify(&[image], &rule, &Normalize::new(&files.image, Normalize::CLIP)?, &mut values);
    Ok(Ok((values, room)))
}

/// An encoder: the mean of each token's patches.
fn encode((values, mut room): (Vec<f32>, Vacant)) -> Pinned {
    let per_token = values.len() / room.rows();
    for (row, values) in values.chunks_exact(per_token).enumerate() {
        room.row_mut(row).fill(values.iter().sum::<f32>() / per_token as f32);
    }
    room.fill()
}

#[test]
fn images_keep_their_colour_and_come_back_from_the_pool() {
    let outputs = OutputPool::new(4, 16, 600).unwrap();
    let colors = [[10, 10, 10], [200, 200, 200], [90, 90, 90]];
    let files_of: Vec<_> = colors.iter().map(|&color| png(Size::new(50, 31), color)).collect();
    let pinned: Vec<_> = files_of.iter().map(|bytes| encode(prepare(&outputs, bytes).unwrap().ok().unwrap())).collect();
    for (outputs, color) in pinned.iter().zip(colors) {
        for row in 0..outputs.rows() {
            let expected = f32::from(color[0]) / 255.0;
            assert!(outputs.row(row).iter().all(|value| (value - expected).abs() < 1e-5));
        }
    }
    // The same bytes again need no encoder.
    let again = prepare(&outputs, &files_of[1]).unwrap().err().unwrap();
    assert_eq!(again.row(0), pinned[1].row(0));
    drop((pinned, again));
    outputs.clear();
    assert_eq!(outputs.stats().pages_free, 600);
}

#[test]
fn a32_tokens_and_rows_agree_for_every_legal_size() {
    let rule = Patches::image(&files().image, Some(16)).unwrap();
    for (h, w) in (1..90).flat_map(|h| (1..90).map(move |w| (h, w))) {
        let shape = rule.shape(Size::new(h, w)).unwrap();
        let values = patchify_len(&rule, 1, rule.resize(Size::new(h, w)).unwrap());
        assert_eq!(values as u64, shape.rows * 3 * 2 * 2 * 2, "{h} × {w}");
        assert_eq!(shape.rows, shape.tokens * 4, "{h} × {w}");
        // And none lies beyond the frontier, by which an engine plans and checks.
        let merged = |side: u64| side / rule.factor();
        let size = rule.resize(Size::new(h, w)).unwrap();
        let (a, b) = (merged(size.height.into()), merged(size.width.into()));
        assert!(rule.frontier().iter().any(|(short, long)| *short >= a.min(b) && *long >= a.max(b)), "{h} × {w}");
    }
}
