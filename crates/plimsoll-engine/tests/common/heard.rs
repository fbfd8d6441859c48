//! Requests with audio clips, images and videos, made by the formulas of the audio models' references.

#[path = "../../../plimsoll-models/tests/common/played.rs"]
mod played;

use std::sync::Arc;

pub use played::played;
use plimsoll_engine::media::{MediaItem, MediaSpec, Pixels};
use plimsoll_engine::{EngineHandle, Options, Request};
use plimsoll_media::image::Rgb;
use plimsoll_media::{ContentKey, Modality, Shape, Size};
use plimsoll_models::Grid;
use serde_json::Value;

use super::senses::drawn;
use super::{greedy, ids, reference};

/// Options small enough for a test; all media of the references fit.
pub fn small(options: Options) -> Options {
    let media =
        Options { max_image_pixels: Some(8192), max_video_frames: Some(8), max_audio_seconds: Some(5), ..options };
    Options { media_bytes: 4 << 20, ..media }
}

/// An audio clip of these samples.
pub fn audio(spec: &MediaSpec, samples: &[f32], first: usize) -> MediaItem {
    let audio = spec.audio.as_ref().unwrap();
    let mut filled = samples.to_vec();
    filled.resize(audio.rule.filled(samples.len() as u64) as usize, 0.0);
    let frames = audio.mel.frames(filled.len());
    let mut spectrogram = vec![0.0; frames * audio.mel.bands()];
    audio.mel.spectrogram(&filled, &mut spectrogram);
    let content: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let tokens = audio.rule.tokens(frames as u64);
    let shape = Shape { modality: Modality::Audio, rows: tokens, sequences: 1, longest: tokens, tokens };
    let staged = spec.staging.reserve((spectrogram.len() * 4) as u64).unwrap();
    MediaItem {
        key: ContentKey::of(Modality::Audio, &spec.parameters, &content),
        shape,
        grid: Grid::audio(frames),
        first: first as u32,
        seconds: None,
        of_video: false,
        pixels: Arc::new(Pixels { frames: Vec::new(), spectrogram, staged: staged.into() }),
    }
}

fn shown(spec: &MediaSpec, frames: Vec<Rgb>, video: Option<f32>, first: usize) -> MediaItem {
    let size = frames[0].size;
    let groups = if video.is_some() { frames.len().div_ceil(2) } else { 1 };
    let grid = Grid { frames: groups, height: size.height as usize / 4, width: size.width as usize / 4 };
    let modality = if video.is_some() { Modality::Video } else { Modality::Image };
    let (tokens, longest) = ((grid.patches() / 4) as u64, (grid.height * grid.width) as u64);
    let content: Vec<u8> = frames.iter().flat_map(|frame| frame.data.iter().copied()).collect();
    MediaItem {
        key: ContentKey::of(modality, &spec.parameters, &content),
        shape: Shape { modality, rows: tokens * 4, sequences: groups as u64, longest, tokens },
        grid,
        first: first as u32,
        seconds: video,
        of_video: false,
        pixels: Arc::new(Pixels {
            frames,
            spectrogram: Vec::new(),
            staged: spec.staging.reserve(content.len() as u64).unwrap().into(),
        }),
    }
}

/// A case of the reference, as a request.
pub fn request(engine: &EngineHandle, case: &Value, max_tokens: u32) -> Request {
    let spec = engine.media().unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let prompt = ids(&case["ids"]);
    let (mut media, mut from) = (Vec::new(), 0);
    for given in case["items"].as_array().unwrap() {
        let seed = number(&given["seed"]);
        let of_video = given["of_video"] == true;
        // The first token of a video's sound is somewhere among the tokens of the video.
        let video =
            media.last().filter(|_| of_video).map(|video: &MediaItem| (video.first as usize, video.shape.tokens));
        let stands = |at: &usize| match of_video {
            true => prompt[*at] == spec.audio.as_ref().unwrap().placeholder,
            false => spec.is_placeholder(prompt[*at]),
        };
        let first = (video.map_or(from, |(first, _)| first)..prompt.len()).find(stands).unwrap();
        let item = if given["kind"] == "sound" {
            let clip = audio(spec, &played(seed as i64, number(&given["samples"])), first);
            MediaItem { of_video, ..clip }
        } else {
            let frames = number(&given["frames"]);
            let size = Size::new(number(&given["height"]) as u32, number(&given["width"]) as u32);
            let shots = (0..frames.max(1)).map(|frame| drawn(seed, frame, size)).collect();
            shown(spec, shots, (frames > 0).then(|| case["seconds"].as_f64().unwrap() as f32), first)
        };
        let (from_here, tokens) = video.unwrap_or((first, 0));
        from = from_here + (tokens + item.shape.tokens) as usize;
        media.push(item);
    }
    Request { media, logprobs: Some(0), ..greedy(&prompt, max_tokens) }
}

/// The cases of a reference.
pub fn cases_of(model: &str) -> Vec<Value> {
    reference(model)["cases"].as_array().unwrap().clone()
}
