//! Media in requests: what a request carries, and what this engine's model takes.
//!
//! An item arrives decoded and resized, as pixels: an eighth of its patches, so it can be kept until its request has ended, and a
//! preempted sequence can have it encoded again. The prompt already contains its placeholder tokens. What must not be in here:
//! foreign bytes, decoding, HTTP.

mod placed;
mod plan;
mod seq;

use std::sync::Arc;

use plimsoll_media::geometry::{PatchVideo, Patches};
use plimsoll_media::image::{Normalize, Rgb};
use plimsoll_media::{ContentKey, Modality, OutputPool, Shape, Staged, Staging};
use plimsoll_memory::broken;
use plimsoll_models::{Grid, PlaceRule};

pub use plan::{MediaPlan, MediaRules};
pub use seq::SeqMedia;

use crate::request::Refusal;

/// One medium of a request.
#[derive(Clone, Debug)]
pub struct MediaItem {
    /// Its content and processing: [`ContentKey::of`] its bytes with [`MediaSpec::parameters`] and whatever the request asked for
    /// besides.
    pub key: ContentKey,
    /// What the model's processor makes of it; `shape.tokens` placeholders of its kind stand in the prompt.
    pub shape: Shape,
    /// Its patches.
    pub grid: Grid,
    /// Index of its first placeholder token in the prompt. The others follow, without a gap or (between groups of frames) with text
    /// among them, before the next item's.
    pub first: u32,
    /// Of a video, the seconds from one group of frames to the next; none for a picture.
    pub seconds: Option<f32>,
    /// What it looks like. Requests of the same prompt share it.
    pub pixels: Arc<Pixels>,
}

/// Resized frames, and the host bytes that are reserved for them.
#[derive(Debug)]
pub struct Pixels {
    /// One picture, or the sampled frames of a video: all of the size that `grid` says.
    pub frames: Vec<Rgb>,
    /// Their reservation in [`MediaSpec::staging`].
    pub staged: Staged,
}

/// What the engine's model takes besides text, and within which limits.
#[derive(Clone, Debug)]
pub struct MediaSpec {
    /// Pictures.
    pub image: Option<ImageSpec>,
    /// Lists of frames.
    pub video: Option<VideoSpec>,
    /// The processing in words, for keys of content.
    pub parameters: String,
    /// How the family places media among the positions of a text.
    pub places: PlaceRule,
    /// Items in one request, at most.
    pub items_max: usize,
    /// Items that are encoded together, at most.
    pub batch: usize,
    /// Host bytes for media: reserve what decoding takes before decoding, keep what the pixels take until the request has ended.
    pub staging: Staging,
    /// Where encoder outputs go: what one request's items need must fit into it.
    pub outputs: OutputPool,
}

/// How pictures are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpec {
    /// Resize rule and patch grid.
    pub rule: Patches,
    /// Means and deviations.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one picture, at most.
    pub tokens_max: u64,
}

/// How lists of frames are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoSpec {
    /// Resize rule, patch grid and sampling.
    pub rule: PatchVideo,
    /// Means and deviations.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one video, at most.
    pub tokens_max: u64,
}

impl MediaSpec {
    /// The placeholder token of a kind, if the model takes it, and the most tokens of one item.
    fn kind(&self, modality: Modality) -> Option<(u32, u64)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (image.placeholder, image.tokens_max)),
            Modality::Video => self.video.as_ref().map(|video| (video.placeholder, video.tokens_max)),
            Modality::Audio => None,
        }
    }

    /// Values of the patches of a batch, at most.
    pub(crate) fn patch_values_max(&self) -> usize {
        let of = |kind| {
            self.kind(kind).zip(self.patches(kind)).map_or(0, |((_, tokens), (rule, _))| {
                tokens * rule.merge * rule.merge * 3 * rule.temporal * rule.patch * rule.patch
            })
        };
        self.batch * Modality::ALL.into_iter().map(of).max().unwrap_or(0) as usize
    }

    /// Values of the patches of these grids.
    pub(crate) fn values_of(&self, grids: &[Grid]) -> usize {
        let rule = self.patches(Modality::Image).or_else(|| self.patches(Modality::Video));
        let width = rule.map_or(0, |(rule, _)| 3 * rule.temporal * rule.patch * rule.patch);
        grids.iter().map(Grid::patches).sum::<usize>() * width as usize
    }

    /// The patch grid of a kind.
    pub(crate) fn patches(&self, modality: Modality) -> Option<(&Patches, &Normalize)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (&image.rule, &image.normalize)),
            Modality::Video => self.video.as_ref().map(|video| (&video.rule.patches, &video.normalize)),
            Modality::Audio => None,
        }
    }

    /// Whether a token stands for a part of a medium.
    pub fn is_placeholder(&self, token: u32) -> bool {
        Modality::ALL.into_iter().any(|kind| self.kind(kind).is_some_and(|(placeholder, _)| placeholder == token))
    }

    /// Checks a request's items against the limits and against its prompt.
    pub(crate) fn check(&self, prompt: &[u32], items: &[MediaItem]) -> Result<(), Refusal> {
        let invalid = |message: String| Refusal::Invalid { param: "messages", message };
        if items.len() > self.items_max && !broken("T-24") {
            let (n, most) = (items.len(), self.items_max);
            return Err(invalid(format!("the request has {n} media; the limit is {most} (--max-media-per-request)")));
        }
        for item in items {
            self.check_item(item).map_err(invalid)?;
        }
        let rows = items.iter().map(|item| item.shape.tokens as usize);
        self.outputs.check(rows).map_err(|error| invalid(error.to_string()))?;
        placed::check(self, prompt, items).map_err(invalid)
    }

    /// I6: nothing larger than the worst case that was proven.
    fn check_item(&self, item: &MediaItem) -> Result<(), String> {
        let (shape, grid) = (&item.shape, item.grid);
        let what = shape.modality.noun();
        let Some(((_, most), (rule, _))) = self.kind(shape.modality).zip(self.patches(shape.modality)) else {
            return Err(format!("this model does not take {what}"));
        };
        if shape.tokens > most || shape.tokens == 0 {
            let (n, flag) = (shape.tokens, shape.modality.flag());
            return Err(format!("{what} has {n} tokens; 1 to {most} are allowed ({flag})"));
        }
        let merge = rule.merge as usize;
        let rows = grid.frames * grid.height * grid.width;
        let whole = grid.height % merge == 0 && grid.width % merge == 0;
        let frames = grid.frames * if shape.modality == Modality::Video { rule.temporal as usize } else { 1 };
        let fits = item.pixels.frames.iter().all(|frame| {
            let side = |patches: usize| patches as u64 * rule.patch;
            (u64::from(frame.size.height), u64::from(frame.size.width)) == (side(grid.height), side(grid.width))
        });
        let frames_given = item.pixels.frames.len().next_multiple_of(frames / grid.frames.max(1));
        if !whole || !fits || frames_given != frames || rows as u64 != shape.tokens * rule.merge * rule.merge {
            return Err(format!("{what}: pixels, grid and tokens do not agree ({grid:?}, {} tokens)", shape.tokens));
        }
        let (a, b) = ((grid.height / merge) as u64, (grid.width / merge) as u64);
        let frontier = match (&self.image, &self.video) {
            (Some(image), _) if shape.modality == Modality::Image => image.rule.frontier(),
            (_, Some(video)) => video.rule.frontier(item.pixels.frames.len() as u64),
            _ => Vec::new(),
        };
        if !frontier.iter().any(|(short, long)| *short >= a.min(b) && *long >= a.max(b)) {
            let flag = shape.modality.flag();
            return Err(format!("{what} has {a} x {b} tokens: nothing becomes that large here ({flag})"));
        }
        Ok(())
    }
}
