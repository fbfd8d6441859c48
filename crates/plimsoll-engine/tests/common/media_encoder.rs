//! A toy encoder for the remembering runner, and requests with images and videos for it. Its outputs for an image are a hash of all
//! patches. So a wrong row, another image or a wrong place in the prompt changes the next token.

use std::sync::Arc;

use plimsoll_engine::media::{ImageSpec, MediaItem, MediaSpec, Pixels, Spelling, VideoSpec};
use plimsoll_engine::{EngineHandle, Request};
use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{ImageRule, PatchVideo, Patches, ProcessorFiles, VideoRule};
use plimsoll_media::image::{Normalize, Rgb, patchify, patchify_len};
use plimsoll_media::{ContentKey, Modality, OutputPool, Shape, Size, Staging};
use plimsoll_models::{FrameTimes, Grid, PlaceRule, PlacedItem};

use super::recall::{best, code, mix};

/// Placeholder of an image.
pub const IMAGE: u32 = 380;
/// Placeholder of a group of frames.
pub const VIDEO: u32 = 381;
/// Values of an output row.
pub const WIDTH: usize = 4;
/// Rows of a page of outputs.
pub const PAGE_ROWS: usize = 4;
/// Colour of an image that makes the encoder return an error.
pub const FAILS: u8 = 251;
/// Colour of an image that makes the encoder panic.
pub const PANICS: u8 = 252;

const CONFIG: &str = r#"{"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2, "max_frames": 6,
    "size": {"shortest_edge": 16, "longest_edge": 640}, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}"#;

/// Sizes of the toy encoder.
#[derive(Clone, Copy, Debug)]
pub struct MediaEncoder {
    pub batch: usize,
    pub output_pages: usize,
    pub items: usize,
    pub media_bytes: u64,
    /// Groups of frames are separated by text.
    pub frames_apart: bool,
}

impl Default for MediaEncoder {
    fn default() -> Self {
        Self { batch: 2, output_pages: 64, items: 8, media_bytes: 1 << 20, frames_apart: true }
    }
}

impl MediaEncoder {
    /// Returns the media specification of an engine with this encoder.
    pub fn spec(&self) -> MediaSpec {
        let files = ProcessorFiles::read(Some(CONFIG), None, None).unwrap();
        let image = Patches::image(&files.image, None).unwrap();
        let video = PatchVideo::new(&files.video, Budget::Video, None).unwrap();
        let normalize = Normalize::new(&files.image, Normalize::HALVES).unwrap();
        let grid =
            |groups: usize, (a, b): (u64, u64)| Grid { frames: groups, height: 2 * a as usize, width: 2 * b as usize };
        let images = image.frontier().into_iter().map(|sides| grid(1, sides)).collect();
        let films = (1..=6_u64).flat_map(|frames| {
            let sides = video.frontier(frames).into_iter();
            sides.map(move |sides| grid(frames.div_ceil(2) as usize, sides))
        });
        let films = films.collect();
        MediaSpec {
            image: Some(ImageSpec {
                tokens_max: image.worst(|s| s.tokens).tokens,
                rule: ImageRule::Patches(image),
                normalize,
                placeholder: IMAGE,
                bounds: images,
            }),
            video: Some(VideoSpec {
                tokens_max: video.worst(|s| s.tokens).tokens,
                rule: VideoRule::Patches(video),
                normalize,
                placeholder: VIDEO,
                bounds: films,
            }),
            audio: None,
            parameters: CONFIG.into(),
            places: Some(self.rule()),
            image_in_one_step: false,
            spelling: Spelling::Timed,
            items_max: self.items,
            batch: self.batch,
            staging: Staging::new(self.media_bytes),
            outputs: OutputPool::new(WIDTH, PAGE_ROWS, self.output_pages).unwrap(),
        }
    }

    fn rule(&self) -> PlaceRule {
        PlaceRule { merge: 2, frames_apart: self.frames_apart, steps_per_second: None, times: FrameTimes::Cut }
    }
}

/// Returns the output rows of one image.
pub fn outputs(patches: &[f32], tokens: usize) -> impl Iterator<Item = [f32; WIDTH]> {
    let image = patches.iter().fold(7, |hash, value| mix(hash ^ u64::from(value.to_bits())));
    (0..tokens as u64).map(move |row| {
        let hash = mix(image ^ row);
        [0, 16, 32, 48].map(|shift| ((hash >> shift) & 0xffff) as f32)
    })
}

/// Returns the hash that stands for a row of outputs in a history.
pub fn code_of_row(row: &[f32]) -> u32 {
    row.iter().fold(11, |hash, value| mix(hash ^ u64::from(value.to_bits()))) as u32
}

/// A prompt with media, as the server would make it.
#[derive(Clone)]
pub struct Mixed {
    spec: MediaSpec,
    pub prompt: Vec<u32>,
    pub media: Vec<MediaItem>,
}

impl Mixed {
    pub fn new(engine: &EngineHandle) -> Self {
        Self { spec: engine.media().unwrap().clone(), prompt: Vec::new(), media: Vec::new() }
    }

    pub fn text(mut self, ids: &[u32]) -> Self {
        self.prompt.extend_from_slice(ids);
        self
    }

    /// Adds an image of `a` × `b` tokens; its content depends on `seed`.
    pub fn image(self, seed: u64, a: u32, b: u32) -> Self {
        let size = Size::new(a * 4, b * 4);
        let bytes = (0..size.pixels() * 3).map(|i| (mix(seed * 7919 + i) % 250) as u8).collect();
        self.frames(Modality::Image, vec![Rgb { size, data: bytes }])
    }

    /// Adds an image of one colour.
    pub fn coloured(self, colour: u8, a: u32, b: u32) -> Self {
        let size = Size::new(a * 4, b * 4);
        self.frames(Modality::Image, vec![Rgb { size, data: vec![colour; size.pixels() as usize * 3] }])
    }

    /// Adds a video of `frames` frames.
    pub fn video(self, seed: u64, frames: u64, a: u32, b: u32) -> Self {
        let size = Size::new(a * 4, b * 4);
        let frame =
            |n: u64| (0..size.pixels() * 3).map(move |i| (mix(seed * 104_729 + n * 31 + i) % 250) as u8).collect();
        self.frames(Modality::Video, (0..frames).map(|n| Rgb { size, data: frame(n) }).collect())
    }

    fn frames(mut self, modality: Modality, frames: Vec<Rgb>) -> Self {
        let size = frames[0].size;
        let groups = if modality == Modality::Image { 1 } else { frames.len().div_ceil(2) };
        let grid = Grid { frames: groups, height: size.height as usize / 2, width: size.width as usize / 2 };
        let per_group = grid.height * grid.width / 4;
        let tokens = (groups * per_group) as u64;
        let shape =
            Shape { modality, rows: tokens * 4, sequences: groups as u64, longest: per_group as u64 * 4, tokens };
        let content: Vec<u8> = frames.iter().flat_map(|frame| frame.data.iter().copied()).collect();
        let key = ContentKey::of(modality, &self.spec.parameters, &content);
        let staged = self.spec.staging.reserve(content.len() as u64).unwrap();
        let apart = self.spec.places.unwrap().frames_apart && modality == Modality::Video;
        let first = self.prompt.len() as u32 + u32::from(apart);
        let placeholder = if modality == Modality::Image { IMAGE } else { VIDEO };
        for group in 0..groups {
            if apart {
                // The time of the group in the video.
                self.prompt.push(40 + group as u32);
            }
            self.prompt.extend(std::iter::repeat_n(placeholder, per_group));
        }
        let pixels = Arc::new(Pixels { frames, spectrogram: Vec::new(), staged: staged.into() });
        self.media.push(MediaItem { key, shape, grid, first, seconds: None, of_video: false, pixels });
        self
    }

    pub fn request(&self, max_tokens: u32) -> Request {
        Request { media: self.media.clone(), ..super::greedy(&self.prompt, max_tokens) }
    }

    /// Returns the greedy continuation that the model generates.
    pub fn says(&self, tokens: usize) -> Vec<u32> {
        let mut places = vec![[0.0; 3]; self.prompt.len()];
        let placed: Vec<_> =
            self.media.iter().map(|item| PlacedItem { grid: item.grid, seconds: None, track: 0 }).collect();
        let is_media = |token: u32| token == IMAGE || token == VIDEO;
        let after = self.spec.places.unwrap().places(|at| is_media(self.prompt[at]), &placed, &mut places).text.at(0);
        let mut rows = self.media.iter().flat_map(|item| {
            let rule = self.spec.image.as_ref().unwrap().rule.patches();
            let frames = &item.pixels.frames;
            let mut patches = vec![0.0; patchify_len(rule, frames.len(), frames[0].size)];
            patchify(frames, rule, &self.spec.image.as_ref().unwrap().normalize, &mut patches);
            outputs(&patches, item.shape.tokens as usize).collect::<Vec<_>>()
        });
        let own = |token: u32| if is_media(token) { code_of_row(&rows.next().unwrap()) } else { token };
        let codes: Vec<u32> = self.prompt.iter().copied().map(own).collect();
        let mut history = codes
            .iter()
            .zip(&places)
            .fold(1, |history, (own, place)| super::recall::after(history, code(*own, *place)));
        let mut said = Vec::new();
        for n in 0..tokens as u32 {
            let token = best(history);
            said.push(token);
            history = super::recall::after(history, code(token, [after + n as f32; 3]));
        }
        said
    }
}
