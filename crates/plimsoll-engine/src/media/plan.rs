//! The memory that media take. The plan follows from the checkpoint's configuration and its processors' files, and covers the worst legal
//! items.
//!
//! The encoders themselves run on the planner's device, for every legal item that no other item exceeds. The self-test runs the worst
//! batches, and requests are held to the plan. Items are encoded in the workspace of steps. A step and an encoder never run at once, so the
//! larger of them is planned, not both.

mod lines;
mod transfers;

use std::sync::Arc;

use plimsoll_device::{DeviceError, KvShape, PlanDevice, WeightTable, Work};
use plimsoll_media::geometry::{ImageRule, Patches, VideoRule};
use plimsoll_media::{MediaError, Modality, OutputPool, Shape, Staging};
use plimsoll_memory::Bytes;
use plimsoll_models::{Encoder, EncoderInput, EncoderKind, Grid, PlaceRule, Vision};

use super::spec::{AudioSpec, ImageSpec, MediaSpec, Spelling, VideoSpec};
use crate::api::options::Options;
use crate::api::plan_error::PlanError;
use transfers::Transfers;

/// The bounds from the options that decide how large items are. Equal bounds have equal plans.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bounds {
    pub image: Option<ImageSpec>,
    pub video: Option<VideoSpec>,
    pub audio: Option<AudioSpec>,
    pub batch: usize,
    pub spelling: Spelling,
}

/// Rows of a page of encoder outputs: small beside an image, so that little of the last page is wasted.
pub(crate) const OUTPUT_PAGE_ROWS: usize = 32;

/// The media that a model with an encoder takes, and their memory and work.
#[derive(Clone, Debug)]
pub struct MediaPlan {
    image: Option<ImageSpec>,
    video: Option<VideoSpec>,
    audio: Option<AudioSpec>,
    parameters: String,
    places: Option<PlaceRule>,
    image_in_one_step: bool,
    spelling: Spelling,
    items_max: usize,
    batch: usize,
    /// Numbers of an output row.
    width: usize,
    /// Pages of outputs.
    pages: usize,
    media_bytes: u64,
    /// Bytes of a batch's patches.
    patch_bytes: u64,
    /// The batches that take most of the workspace; the self-test runs them.
    pub(crate) worst: Vec<(EncoderKind, Vec<Grid>)>,
    /// Bytes of workspace of these batches.
    pub(crate) workspace: usize,
    /// The most that a batch transfers to and from a GPU.
    pub(crate) transfers: Transfers,
    /// Tokens of the largest item.
    tokens: u64,
    /// The most work of one item.
    work: Work,
}

/// One legal item that no other exceeds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    grid: Grid,
    pub shape: Shape,
}

/// Workspace and work of an item. Workspace is `each` bytes for every item of a batch, and `once` bytes for the batch.
#[derive(Clone, Copy, Debug)]
struct Cost {
    each: usize,
    once: usize,
    /// Work of a batch of this one item.
    work: Work,
}

/// The maxima over the items of one encoder, each number by itself.
struct Need {
    worst: Vec<(EncoderKind, Vec<Grid>)>,
    workspace: usize,
    transfers: Transfers,
    patch_bytes: u64,
    tokens: u64,
    work: Work,
}

/// An encoder on the planner's device.
#[derive(Clone, Copy)]
pub(super) struct Planner<'a> {
    pub encoder: &'a dyn Encoder,
    pub weights: &'a WeightTable,
    pub kv: &'a KvShape,
}

impl Planner<'_> {
    /// Workspace (in bytes) and work of a batch.
    fn run(&self, grids: &[Grid]) -> Result<(usize, Work), DeviceError> {
        let mut device = PlanDevice::new(self.weights, self.kv);
        self.encoder.encode(&mut device, &EncoderInput { grids, patches: &[] })?;
        Ok((device.high_water(), device.work()))
    }

    fn cost(&self, grid: Grid) -> Result<Cost, DeviceError> {
        let ((one, work), two) = (self.run(&[grid])?, self.run(&[grid, grid])?.0);
        let each = two.saturating_sub(one);
        Ok(Cost { each, once: one.saturating_sub(each), work })
    }

    /// Returns the needs of the batches of `batch` items that no other batch exceeds. Such a batch holds the item with the largest `each`,
    /// as often as fits beside the item that makes `once` largest. `None` without candidates.
    fn need(&self, sense: EncoderKind, batch: usize, candidates: &[Candidate]) -> Result<Option<Need>, DeviceError> {
        let mut costs = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            costs.push((self.cost(candidate.grid)?, candidate.grid));
        }
        let Some(most) = costs.iter().max_by_key(|(cost, _)| cost.each) else { return Ok(None) };
        let beside = |cost: &Cost| if batch > 1 { cost.once.max(most.0.once) } else { cost.once };
        let other = costs.iter().max_by_key(|(cost, _)| cost.each + beside(cost)).unwrap_or(most);
        let mut mixed = vec![most.1; batch];
        mixed[batch - 1] = other.1;
        let mut batches = vec![mixed, vec![most.1; batch]];
        batches.dedup();
        let mut workspace = 0;
        for grids in &batches {
            workspace = workspace.max(self.run(grids)?.0);
        }
        let most_of = |of: fn(&Candidate) -> usize| candidates.iter().map(of).max().unwrap_or(0);
        let patches = most_of(|candidate| candidate.grid.patches());
        let work = costs.iter().map(|(cost, _)| cost.work).max_by_key(|work| work.flops).unwrap_or_default();
        Ok(Some(Need {
            worst: batches.into_iter().map(|grids| (sense, grids)).collect(),
            workspace,
            transfers: self.transfers(batch, candidates)?,
            patch_bytes: (batch * patches * self.encoder.patch_width() * size_of::<f32>()) as u64,
            tokens: most_of(|candidate| candidate.shape.tokens as usize) as u64,
            work,
        }))
    }
}

/// Removes every candidate that another candidate equals or exceeds in every size; returns the rest.
fn undominated(all: Vec<Candidate>) -> Vec<Candidate> {
    // Frames and windows are computed one after another, each by itself. Their number takes no workspace.
    let sizes = |shape: &Shape| [shape.rows, shape.longest];
    let mut best: Vec<Candidate> = Vec::new();
    for candidate in all {
        let own = sizes(&candidate.shape);
        let under = |a: [u64; 2], b: [u64; 2]| a.iter().zip(b).all(|(a, b)| *a <= b);
        if best.iter().any(|other| under(own, sizes(&other.shape))) {
            continue;
        }
        best.retain(|other| !under(sizes(&other.shape), own));
        best.push(candidate);
    }
    best
}

/// The largest images, of up to `tokens_max` tokens where the rule leaves a choice.
pub(super) fn largest_images(rule: &ImageRule, tokens_max: u64) -> Vec<Candidate> {
    match rule {
        ImageRule::Patches(rule) => along(rule, Modality::Image, 1, &rule.frontier(), tokens_max),
        ImageRule::Tiles(rule) => vec![tiled(&rule.patches, rule.worst())],
        ImageRule::Pieces(rule) => along(&rule.patches, Modality::Image, 1, &rule.largest(), u64::MAX),
        ImageRule::Canvases(rule) => vec![tiled(&rule.patches, rule.shape())],
        ImageRule::Squares(rule) => vec![tiled(&rule.patches, rule.shape())],
        ImageRule::Longest(rule) => {
            let side = rule.tokens_on_a_side();
            vec![tiled(&rule.patches, rule.patches.shape_of(Modality::Image, 1, side, side))]
        }
    }
}

/// The largest grids of images, for any number of tokens.
pub(super) fn image_bounds(rule: &ImageRule) -> Arc<[Grid]> {
    let frontier = match rule {
        ImageRule::Patches(patches) => patches.frontier(),
        ImageRule::Pieces(pieces) => pieces.largest(),
        ImageRule::Tiles(tiles) => return [tiled(&tiles.patches, tiles.worst()).grid].into(),
        ImageRule::Longest(longest) => [(longest.tokens_on_a_side(), longest.tokens_on_a_side())].into(),
        ImageRule::Canvases(rule) => return [tiled(&rule.patches, rule.shape()).grid].into(),
        ImageRule::Squares(squares) => return [tiled(&squares.patches, squares.shape()).grid].into(),
    };
    let side = |tokens: u64| (tokens * rule.patches().merge) as usize;
    frontier.into_iter().map(|(a, b)| Grid { frames: 1, height: side(a), width: side(b) }).collect()
}

/// The largest videos.
fn largest_videos(video: &VideoSpec) -> Vec<Candidate> {
    let rule = match &video.rule {
        VideoRule::Patches(rule) => rule,
        VideoRule::Tiles(rule) => {
            return vec![tiled(&rule.frame.patches, rule.frame.video_shape(rule.sampling.max_frames))];
        }
    };
    let mut all = Vec::new();
    for (frames, frontier) in rule.frontiers() {
        let groups = frames.div_ceil(rule.patches.temporal);
        let legal = along(&rule.patches, Modality::Video, groups, &frontier, video.tokens_max);
        all = undominated([all, legal].concat());
    }
    all
}

/// An image or video of tiles, as one grid with a frame for each tile.
fn tiled(tile: &Patches, shape: Shape) -> Candidate {
    let side = (tile.max_pixels.isqrt() / tile.patch) as usize;
    Candidate { grid: Grid { frames: shape.sequences as usize, height: side, width: side }, shape }
}

/// The largest items on a frontier, cut to `tokens_max` tokens.
fn along(rule: &Patches, modality: Modality, groups: u64, frontier: &[(u64, u64)], tokens_max: u64) -> Vec<Candidate> {
    let cut = |&(a, b): &(u64, u64)| (a, b.min(tokens_max / (a * groups)));
    let sides = frontier.iter().map(cut).filter(|(_, b)| *b > 0).flat_map(|(a, b)| [(a, b), (b, a)]);
    let candidate = |(a, b): (u64, u64)| {
        let side = |tokens: u64| (tokens * rule.merge) as usize;
        let grid = Grid { frames: groups as usize, height: side(a), width: side(b) };
        Candidate { grid, shape: rule.shape_of(modality, groups, a, b) }
    };
    undominated(sides.map(candidate).collect())
}

impl Need {
    /// The maxima over both encoders: one runs at a time.
    fn and(self, other: Self) -> Self {
        Self {
            worst: [self.worst, other.worst].concat(),
            workspace: self.workspace.max(other.workspace),
            transfers: self.transfers.max(other.transfers),
            patch_bytes: self.patch_bytes.max(other.patch_bytes),
            tokens: self.tokens.max(other.tokens),
            work: if other.work.flops > self.work.flops { other.work } else { self.work },
        }
    }
}

/// Returns the needs of images and videos, and the video specification with its bounds.
fn seen(bounds: &Bounds, image: &ImageSpec, planner: &Planner<'_>) -> Result<(Option<VideoSpec>, Need), PlanError> {
    let Bounds { video, batch, .. } = bounds;
    let images = largest_images(&image.rule, image.tokens_max);
    let videos = video.as_ref().map_or(Vec::new(), largest_videos);
    let video = video.clone().map(|video| VideoSpec {
        tokens_max: videos.iter().map(|candidate| candidate.shape.tokens).max().unwrap_or(0),
        bounds: videos.iter().map(|candidate| candidate.grid).collect(),
        ..video
    });
    let need = planner.need(EncoderKind::Vision, *batch, &undominated([images, videos].concat()))?;
    let Some(need) = need else {
        let why = "the context is too short for any image".into();
        return Err(MediaError::BadConfig { key: "min_pixels", why }.into());
    };
    Ok((video, need))
}

/// Returns the needs of audio clips: the longest clip is the worst in every size.
fn heard(audio: &AudioSpec, batch: usize, planner: &Planner<'_>) -> Result<Option<Need>, DeviceError> {
    let grid = Grid::audio(audio.rule.frames_max() as usize);
    planner.need(EncoderKind::Audio, batch, &[Candidate { grid, shape: audio.rule.worst() }])
}

/// The processing as text, for content keys.
fn parameters(image: Option<&ImageSpec>, video: Option<&VideoSpec>, audio: Option<&AudioSpec>) -> String {
    let processing = |rule: &dyn std::fmt::Debug, normalize| format!("{rule:?} {normalize:?}");
    let image = image.map_or(String::new(), |image| processing(&image.rule, &image.normalize));
    let video = video.map(|video| processing(&video.rule, &video.normalize));
    let audio = audio.map(|audio| (&audio.rule, audio.mel.bands()));
    format!("{image} {video:?} {audio:?}")
}

impl MediaPlan {
    /// Plans items within `bounds`, without pools yet. `None` where there are no legal items.
    pub(super) fn new(
        bounds: &Bounds,
        vision: Option<(&dyn Vision, Planner<'_>)>,
        audio_planner: Option<Planner<'_>>,
    ) -> Result<Option<Self>, PlanError> {
        let Bounds { image, audio, batch, spelling, .. } = bounds;
        let (video, seen) = match (image, &vision) {
            (Some(image), Some((_, planner))) => {
                let (video, need) = seen(bounds, image, planner)?;
                (video, Some(need))
            }
            _ => (None, None),
        };
        let heard = match (audio, &audio_planner) {
            (Some(audio), Some(planner)) => heard(audio, *batch, planner)?,
            _ => None,
        };
        let need = match (seen, heard) {
            (Some(seen), Some(heard)) => seen.and(heard),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => return Ok(None),
        };
        // Of two encoders' outputs, those of the vision encoder are the wider.
        let planner = vision.as_ref().map(|(_, planner)| *planner).or(audio_planner);
        let width = planner.map_or(0, |planner| planner.encoder.output_width());
        let vision = vision.map(|(vision, _)| vision);
        let Need { worst, workspace, transfers, patch_bytes, tokens, work } = need;
        let (pieces, whole) = image.as_ref().map_or((1, 0), |image| (image.rule.pieces_max(), image.tokens_max));
        Ok(Some(Self {
            parameters: parameters(image.as_ref(), video.as_ref(), audio.as_ref()),
            patch_bytes,
            image: image.clone(),
            video,
            audio: audio.clone(),
            places: vision.and_then(Vision::place_rule),
            image_in_one_step: vision.is_some_and(Vision::tokens_see_each_other),
            spelling: spelling.clone(),
            items_max: 0,
            batch: *batch,
            width,
            pages: 0,
            media_bytes: 0,
            worst,
            workspace,
            transfers,
            tokens: tokens.max(whole),
            work: Work { flops: work.flops * pieces, ..work },
        }))
    }

    /// Returns the same plan with the pools that `options` ask for.
    pub(super) fn sized(&self, options: &Options) -> Result<Self, PlanError> {
        let pages = pages(options, self.width, (self.item_pages(), self.tokens), self.batch)?;
        let items_max = options.max_media_per_request;
        Ok(Self { pages, items_max, media_bytes: options.media_bytes, ..self.clone() })
    }

    /// Returns the specification that requests are checked against, with the pool of outputs.
    pub(crate) fn start(&self) -> Result<MediaSpec, MediaError> {
        Ok(MediaSpec {
            image: self.image.clone(),
            video: self.video.clone(),
            audio: self.audio.clone(),
            parameters: self.parameters.clone(),
            places: self.places,
            image_in_one_step: self.image_in_one_step,
            spelling: self.spelling.clone(),
            items_max: self.items_max,
            batch: self.batch,
            staging: Staging::new(self.media_bytes),
            outputs: OutputPool::new(self.width, OUTPUT_PAGE_ROWS, self.pages)?,
        })
    }

    /// The most pages that one item takes: each piece of an image has pages of its own.
    fn item_pages(&self) -> usize {
        let image = self.image.as_ref().map_or(0, |image| image.output_pages(OUTPUT_PAGE_ROWS));
        image.max((self.tokens as usize).div_ceil(OUTPUT_PAGE_ROWS))
    }

    /// Bytes of a page of outputs.
    pub(crate) fn output_page_bytes(&self) -> usize {
        OUTPUT_PAGE_ROWS * self.width * size_of::<f32>()
    }

    /// Bytes of the pool of outputs, and of a batch's patches.
    pub(crate) fn encoder_bytes(&self) -> u64 {
        OutputPool::bytes_for(self.width, OUTPUT_PAGE_ROWS, OUTPUT_PAGE_ROWS, self.pages) + self.patch_bytes
    }

    /// The next smaller bounds worth trying: pixels of an image, frames of a video.
    pub(crate) fn smaller(&self) -> (Option<u64>, Option<u64>) {
        let image = self.image.as_ref().map(|image| image.rule.pixels()).map(|(least, most)| (most / 2, least));
        let video = self.video.as_ref().map(|video| &video.rule);
        let video = video.map(|rule| (rule.sampling().max_frames / 2, rule.patches().temporal));
        let allowed = |bound: Option<(u64, u64)>| bound.filter(|(value, least)| value >= least).map(|(value, _)| value);
        (allowed(image), allowed(video))
    }

    /// Half the seconds of an audio clip.
    pub(crate) fn shorter(&self) -> Option<u64> {
        self.audio.as_ref().map(|audio| audio.rule.max_seconds / 2).filter(|seconds| *seconds > 0)
    }

    /// Seconds of the longest audio clip; 0 for a model that takes no audio.
    pub fn audio_seconds(&self) -> u64 {
        self.audio.as_ref().map_or(0, |audio| audio.rule.max_seconds)
    }

    /// Tokens of an audio clip of this many seconds, and bytes of its spectrogram.
    pub fn audio(&self, seconds: u64) -> (u64, u64) {
        self.audio.as_ref().map_or((0, 0), |audio| {
            let frames = audio.rule.frames_in(seconds);
            (audio.rule.tokens(frames), frames * (audio.mel.bands() * size_of::<f32>()) as u64)
        })
    }

    /// Returns two numbers of bytes for `images` of the largest size and `clips` of `seconds`: encoder outputs, and pixels with
    /// spectrograms. The outputs have room for the largest item of any kind, since a request can carry a video.
    pub fn bytes_of(&self, images: u64, clips: u64, seconds: u64) -> (u64, u64) {
        let (tokens, page) = (self.image_tokens(), self.output_page_bytes() as u64);
        let pages = self.image.as_ref().map_or(0, |image| image.output_pages(OUTPUT_PAGE_ROWS) as u64) * page;
        let any = self.item_pages() as u64 * page;
        let side = self.image.as_ref().map_or(0, |image| image.rule.patches().factor());
        let (heard, spectrogram) = self.audio(seconds);
        let rows = OutputPool::bytes_for(self.width, OUTPUT_PAGE_ROWS, heard as usize, 1);
        ((images * pages + clips * rows).max(any), images * tokens * side * side * 3 + clips * spectrogram)
    }

    /// The most tokens of one item, and the most work of one item. The two can be different items.
    pub fn largest(&self) -> (u64, Work) {
        (self.tokens, self.work)
    }

    /// Rows of an image, or of a video's frame, that are computed in one step; 0 where an image may be cut.
    pub(crate) fn rows_in_one_step(&self) -> usize {
        let frame = self.video.as_ref().map_or(0, |video| video.rule.frame_tokens());
        if self.image_in_one_step { self.image_tokens().max(frame) as usize } else { 0 }
    }

    /// Tokens of the largest image.
    pub fn image_tokens(&self) -> u64 {
        self.image.as_ref().map_or(0, |image| image.tokens_max)
    }
}

/// Pages of the pool: as many as the options say, or enough for a batch and one more item. One item must fit.
fn pages(options: &Options, width: usize, (one, tokens): (usize, u64), batch: usize) -> Result<usize, PlanError> {
    let page = (OUTPUT_PAGE_ROWS * width * size_of::<f32>()) as u64;
    let Some(bytes) = options.encoder_output_bytes else { return Ok(one * (batch + 1)) };
    let pages = usize::try_from(bytes / page).unwrap_or(usize::MAX);
    if pages < one || pages > 1 << 24 {
        let needed = one as u64 * page;
        return Err(PlanError::Option {
            flag: "--encoder-output-bytes",
            problem: format!(
                "is {bytes}; one item of {tokens} tokens takes {needed} ({} at most): or make items smaller by \
                 --max-image-pixels, --max-video-frames and --max-audio-seconds",
                Bytes(page << 24)
            ),
        });
    }
    Ok(pages)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
