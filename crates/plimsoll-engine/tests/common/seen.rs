//! Requests with images and videos, made by the formulas of the vision models' references.

use std::sync::Arc;

use plimsoll_engine::media::{MediaItem, MediaSpec, Pixels};
use plimsoll_engine::{EngineHandle, Options, Request};
use plimsoll_media::geometry::{Fit, ImageRule};
use plimsoll_media::image::{Rgb, pieces, resize, squares, tiles};
use plimsoll_media::{ContentKey, Size};
use plimsoll_models::Grid;
use serde_json::Value;

use super::senses::drawn;
use super::{greedy, ids, reference};

/// Options small enough for a test; images of the references fit.
pub fn small(options: Options) -> Options {
    Options { max_image_pixels: Some(8192), max_video_frames: Some(8), media_bytes: 4 << 20, ..options }
}

/// A media item of drawn frames, resized as the model's processor does.
pub fn item(spec: &MediaSpec, frames: Vec<Rgb>, video: bool, first: usize, seconds: Option<f32>) -> MediaItem {
    let image = &spec.image.as_ref().unwrap().rule;
    let fit = match video {
        true => spec.video.as_ref().unwrap().rule.fit(frames.len() as u64, frames[0].size).unwrap(),
        false => image.fit(frames[0].size).unwrap(),
    };
    let content: Vec<u8> = frames.iter().flat_map(|frame| frame.data.iter().copied()).collect();
    let frames: Vec<Rgb> = match video || fit.canvas == fit.size {
        true => frames.iter().map(|frame| resize(frame, fit.size, fit.filter)).collect(),
        false => tiles(&frames[0], fit.canvas, fit.size, fit.filter),
    };
    assert_eq!(frames.len() as u64, fit.images);
    let side = |pixels: u32| (u64::from(pixels) / image.patches().patch) as usize;
    let grid = Grid { frames: fit.groups as usize, height: side(fit.size.height), width: side(fit.size.width) };
    let staged = spec.staging.reserve(frames.iter().map(|frame| frame.data.len() as u64).sum()).unwrap();
    let key = ContentKey::of(fit.shape.modality, &spec.parameters, &content);
    let pixels = Arc::new(Pixels { frames, spectrogram: Vec::new(), staged: staged.into() });
    MediaItem { key, shape: fit.shape, grid, first: first as u32, seconds, of_video: false, pixels }
}

/// The media items of drawn frames, as a request has them. An image that is encoded in pieces is one item a piece. Their first positions
/// are not set yet.
fn items(spec: &MediaSpec, frames: Vec<Rgb>, video: bool, seconds: Option<f32>) -> Vec<MediaItem> {
    let rule = &spec.image.as_ref().unwrap().rule;
    let made = match (rule, rule.fit(frames[0].size)) {
        (ImageRule::Squares(_) | ImageRule::Canvases(_), Ok(Fit { canvas, size, filter, steps: Some(steps), .. })) => {
            squares(frames[0].clone(), steps, canvas, size, filter)
        }
        (ImageRule::Pieces(_), Ok(Fit { canvas, size, filter, cut: Some(cut), .. })) => {
            pieces(&frames[0], canvas, size, cut.whole, filter)
        }
        _ => return vec![item(spec, frames, video, 0, seconds)],
    };
    let piece = |(nth, frame): (usize, Rgb)| {
        let content = [frames[0].data.as_slice(), &[nth as u8]].concat();
        let side = |pixels: u32| (u64::from(pixels) / rule.patches().patch) as usize;
        let Size { height, width } = frame.size;
        let staged = spec.staging.reserve(frame.data.len() as u64).unwrap();
        let shape = rule.piece(frame.size);
        let pixels = Arc::new(Pixels { frames: vec![frame], spectrogram: Vec::new(), staged: staged.into() });
        let key = ContentKey::of(shape.modality, &spec.parameters, &content);
        let grid = Grid { frames: 1, height: side(height), width: side(width) };
        MediaItem { key, shape, grid, first: 0, seconds: None, of_video: false, pixels }
    };
    made.into_iter().enumerate().map(piece).collect()
}

/// A case of a reference, as a request.
pub fn request(engine: &EngineHandle, case: &Value, max_tokens: u32) -> Request {
    let spec = engine.media().unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let prompt = ids(&case["ids"]);
    let (mut media, mut from) = (Vec::new(), 0);
    for image in case["pictures"].as_array().unwrap() {
        let (seed, frames) = (number(&image["seed"]), number(&image["frames"]));
        let size = Size::new(number(&image["height"]) as u32, number(&image["width"]) as u32);
        let shots = (0..frames.max(1)).map(|frame| drawn(seed, frame, size)).collect();
        let seconds = (frames > 0).then(|| case["seconds"].as_f64().unwrap() as f32);
        for item in items(spec, shots, frames > 0, seconds) {
            let first = (from..prompt.len()).find(|at| spec.is_placeholder(prompt[*at])).unwrap();
            let mut left = item.shape.tokens;
            from = first;
            while left > 0 {
                left -= u64::from(spec.is_placeholder(prompt[from]));
                from += 1;
            }
            media.push(MediaItem { first: first as u32, ..item });
        }
    }
    Request { media, logprobs: Some(0), ..greedy(&prompt, max_tokens) }
}

/// The cases of a reference.
pub fn cases(model: &str) -> Vec<Value> {
    reference(model)["cases"].as_array().unwrap().clone()
}
