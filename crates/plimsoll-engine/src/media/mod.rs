//! Media in requests: what a request carries, and what this engine's model takes.
//!
//! A picture arrives decoded and resized, as pixels: an eighth of its patches, so it can be kept until its request has ended, and a
//! preempted sequence can have it encoded again. A sound arrives as its spectrogram, which is what it is encoded from. The prompt
//! already contains its placeholder tokens. What must not be in here: foreign bytes, decoding, HTTP.

mod placed;
mod plan;
mod rules;
mod seq;

use std::sync::Arc;

use plimsoll_media::audio::Mel;
use plimsoll_media::geometry::{ImageRule, Patches, SoundWindows, VideoRule};
use plimsoll_media::image::{Normalize, Rgb, patchify, patchify_len};
use plimsoll_media::{ContentKey, Modality, OutputPool, Shape, Size, Staged, Staging};
use plimsoll_memory::broken;
use plimsoll_models::{Grid, PlaceRule, Sense};

pub use plan::MediaPlan;
pub use rules::MediaRules;
pub use seq::SeqMedia;

use crate::api::error::Refusal;

/// One medium of a request.
#[derive(Clone, Debug)]
pub struct MediaItem {
    /// Its content and processing: [`ContentKey::of`] its bytes with [`MediaSpec::parameters`] and whatever the request asked for
    /// besides.
    pub key: ContentKey,
    /// What the model's processor makes of it; `shape.tokens` placeholders of its kind stand in the prompt.
    pub shape: Shape,
    /// Its patches, or the frames of its spectrogram.
    pub grid: Grid,
    /// Index of its first placeholder token in the prompt. The others follow, without a gap or (between groups of frames) with text
    /// among them, before the next item's.
    pub first: u32,
    /// Of a video, the seconds from one group of frames to the next; none for all else.
    pub seconds: Option<f32>,
    /// What it looks or sounds like. Requests of the same prompt share it.
    pub pixels: Arc<Pixels>,
}

/// What an item is encoded from, and the host bytes that are reserved for it.
#[derive(Debug)]
pub struct Pixels {
    /// One picture, its tiles, or the sampled frames of a video: all of the size that `grid` says. None of a sound.
    pub frames: Vec<Rgb>,
    /// A sound's spectrogram, frame by frame; empty for all else.
    pub spectrogram: Vec<f32>,
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
    /// Sounds.
    pub audio: Option<AudioSpec>,
    /// The processing in words, for keys of content.
    pub parameters: String,
    /// How the family places media among the positions of a text; none: by their index.
    pub places: Option<PlaceRule>,
    /// How the family's processor writes media into prompts.
    pub spelling: Spelling,
    /// Items in one request, at most.
    pub items_max: usize,
    /// Items that are encoded together, at most.
    pub batch: usize,
    /// Host bytes for media: reserve what decoding takes before decoding, keep what pixels and spectrograms take until the request has
    /// ended.
    pub staging: Staging,
    /// Where encoder outputs go: what one request's items need must fit into it.
    pub outputs: OutputPool,
}

/// What a processor makes of the placeholder that a template has written for a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// It is left as it is.
    Plain,
    /// Every group of a video's frames stands behind the time at which it is shown: Qwen3-VL and later.
    Timed,
    /// Pictures stand between two words. So do the frames of a video, each in a line with its number; what a template writes for a
    /// video is a word that the model never sees. InternVL.
    Framed {
        /// The word before.
        start: String,
        /// The word after.
        end: String,
        /// The word for a video.
        video: String,
    },
}

/// How pictures are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpec {
    /// Resize rule and patch grid.
    pub rule: ImageRule,
    /// Means and deviations.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one picture, at most.
    pub tokens_max: u64,
    /// The largest grids that the rule yields: no picture has more frames, a longer short side and a longer long side than one of
    /// them (I6).
    pub bounds: Arc<[Grid]>,
}

/// How lists of frames are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoSpec {
    /// Resize rule, patch grid and sampling.
    pub rule: VideoRule,
    /// Means and deviations.
    pub normalize: Normalize,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one video, at most.
    pub tokens_max: u64,
    /// The grids that were planned: no video has more patches and larger frames than one of them (I6).
    pub bounds: Arc<[Grid]>,
}

/// How sounds are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct AudioSpec {
    /// The spectrogram's frames and the tower's windows.
    pub rule: SoundWindows,
    /// Makes spectrograms.
    pub mel: Arc<Mel>,
    /// The placeholder token.
    pub placeholder: u32,
    /// Tokens of one sound, at most.
    pub tokens_max: u64,
}

/// The tower that a kind goes through.
pub(crate) fn sense(modality: Modality) -> Sense {
    match modality {
        Modality::Image | Modality::Video => Sense::Sight,
        Modality::Audio => Sense::Hearing,
    }
}

/// Writes what a tower has made into a row of the pool, which is as wide as the widest tower's: the model's first layers are given
/// nothing more of what has no more.
pub(crate) fn widen(row: &mut [f32], embedding: &[f32]) {
    let (own, more) = row.split_at_mut(embedding.len());
    own.copy_from_slice(embedding);
    more.fill(0.0);
}

impl MediaSpec {
    /// The placeholder token of a kind, if the model takes it, and the most tokens of one item.
    fn kind(&self, modality: Modality) -> Option<(u32, u64)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (image.placeholder, image.tokens_max)),
            Modality::Video => self.video.as_ref().map(|video| (video.placeholder, video.tokens_max)),
            Modality::Audio => self.audio.as_ref().map(|audio| (audio.placeholder, audio.tokens_max)),
        }
    }

    /// Values of the patches of a batch, at most.
    pub(crate) fn patch_values_max(&self) -> usize {
        let of = |kind| {
            self.kind(kind).zip(self.patches(kind)).map_or(0, |((_, tokens), (rule, _))| {
                tokens * rule.merge * rule.merge * 3 * rule.temporal * rule.patch * rule.patch
            })
        };
        let longest = self.audio.as_ref().map_or(0, |audio| audio.rule.frames_max() * audio.mel.bands() as u64);
        self.batch * Modality::ALL.into_iter().map(of).max().unwrap_or(0).max(longest) as usize
    }

    /// Values of the patches of these grids.
    pub(crate) fn values_of(&self, sense: Sense, grids: &[Grid]) -> usize {
        let rule = self.patches(Modality::Image).or_else(|| self.patches(Modality::Video));
        let width = match sense {
            Sense::Sight => rule.map_or(0, |(rule, _)| (3 * rule.temporal * rule.patch * rule.patch) as usize),
            Sense::Hearing => self.audio.as_ref().map_or(0, |audio| audio.mel.bands()),
        };
        grids.iter().map(Grid::patches).sum::<usize>() * width
    }

    /// Tokens of an item.
    pub(crate) fn tokens_of(&self, sense: Sense, grid: &Grid) -> usize {
        match sense {
            Sense::Sight => {
                let rule = self.patches(Modality::Image).or_else(|| self.patches(Modality::Video));
                grid.patches() / rule.map_or(1, |(rule, _)| (rule.merge * rule.merge) as usize)
            }
            Sense::Hearing => self.audio.as_ref().map_or(0, |audio| audio.rule.tokens(grid.patches() as u64) as usize),
        }
    }

    /// Appends what a tower reads of an item.
    pub(crate) fn write_patches(&self, modality: Modality, pixels: &Pixels, values: &mut Vec<f32>) {
        match self.patches(modality) {
            Some((rule, normalize)) => {
                let first = values.len();
                values.resize(first + patchify_len(rule, pixels.frames.len(), pixels.frames[0].size), 0.0);
                patchify(&pixels.frames, rule, normalize, &mut values[first..]);
            }
            None => values.extend_from_slice(&pixels.spectrogram),
        }
    }

    /// The patch grid of a kind.
    pub(crate) fn patches(&self, modality: Modality) -> Option<(&Patches, &Normalize)> {
        match modality {
            Modality::Image => self.image.as_ref().map(|image| (image.rule.patches(), &image.normalize)),
            Modality::Video => self.video.as_ref().map(|video| (video.rule.patches(), &video.normalize)),
            Modality::Audio => None,
        }
    }

    /// The only size that the tower sees of a kind, where there is one.
    fn tile(&self, modality: Modality) -> Option<Size> {
        match modality {
            Modality::Image => self.image.as_ref().and_then(|image| image.rule.tile()),
            Modality::Video => self.video.as_ref().and_then(|video| video.rule.tile()),
            Modality::Audio => None,
        }
    }

    /// Whether a token stands for a part of a medium.
    pub fn is_placeholder(&self, token: u32) -> bool {
        Modality::ALL.into_iter().any(|kind| self.kind(kind).is_some_and(|(placeholder, _)| placeholder == token))
    }

    /// Whether a token stands for a part of what lies in a plane: not for a sound's, which stand one after another as a text's do.
    pub(crate) fn is_plane(&self, token: u32) -> bool {
        let of = |kind| self.kind(kind).is_some_and(|(placeholder, _)| placeholder == token);
        [Modality::Image, Modality::Video].into_iter().any(of)
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
        let Some((_, most)) = self.kind(shape.modality) else {
            return Err(format!("this model does not take {what}"));
        };
        if shape.tokens > most || shape.tokens == 0 {
            let (n, flag) = (shape.tokens, shape.modality.flag());
            return Err(format!("{what} has {n} tokens; 1 to {most} are allowed ({flag})"));
        }
        if let (Modality::Audio, Some(audio)) = (shape.modality, &self.audio) {
            return audio.check(item);
        }
        let Some((rule, _)) = self.patches(shape.modality) else {
            return Err(format!("{what} is no sound and has no patches here"));
        };
        let merge = rule.merge as usize;
        let rows = grid.frames * grid.height * grid.width;
        let whole = grid.height % merge == 0 && grid.width % merge == 0;
        let frames = grid.frames * if shape.modality == Modality::Video { rule.temporal as usize } else { 1 };
        let fits = item.pixels.frames.iter().all(|frame| {
            let side = |patches: usize| patches as u64 * rule.patch;
            (u64::from(frame.size.height), u64::from(frame.size.width)) == (side(grid.height), side(grid.width))
                && self.tile(shape.modality).is_none_or(|tile| tile == frame.size)
        });
        let frames_given = item.pixels.frames.len().next_multiple_of(frames / grid.frames.max(1));
        if !whole || !fits || frames_given != frames || rows as u64 != shape.tokens * rule.merge * rule.merge {
            return Err(format!("{what}: pixels, grid and tokens do not agree ({grid:?}, {} tokens)", shape.tokens));
        }
        let within = match shape.modality {
            Modality::Image => {
                self.image.as_ref().is_some_and(|image| image.bounds.iter().any(|most| inside(grid, *most)))
            }
            _ => self.video.as_ref().is_some_and(|video| video.bounds.iter().any(|most| no_larger(grid, *most))),
        };
        if !within {
            let (height, width, flag) = (grid.height / merge, grid.width / merge, shape.modality.flag());
            return Err(format!("{what} has {height} x {width} tokens: nothing becomes that large here ({flag})"));
        }
        Ok(())
    }
}

impl AudioSpec {
    /// I6 of a sound.
    fn check(&self, item: &MediaItem) -> Result<(), String> {
        let (what, frames) = (Modality::Audio.noun(), item.grid.patches() as u64);
        let values = item.pixels.spectrogram.len() as u64;
        let agree = item.grid == Grid::sound(frames as usize)
            && values == frames * self.mel.bands() as u64
            && item.shape.tokens == self.rule.tokens(frames);
        if !agree {
            let tokens = item.shape.tokens;
            let why = format!("({frames} frames, {tokens} tokens)");
            return Err(format!("{what}: spectrogram, frames and tokens do not agree {why}"));
        }
        let most = self.rule.frames_max();
        if frames > most {
            let flag = Modality::Audio.flag();
            return Err(format!("{what} has {frames} frames; the limit is {most} ({flag})"));
        }
        Ok(())
    }
}

/// Whether a picture fits into another, on its side if need be.
fn inside(own: Grid, most: Grid) -> bool {
    let sides = |grid: Grid| (grid.height.min(grid.width), grid.height.max(grid.width));
    let ((short, long), (most_short, most_long)) = (sides(own), sides(most));
    own.frames <= most.frames && short <= most_short && long <= most_long
}

/// Whether a tower takes no more for it than for another: what it takes depends on all patches, and on those of a frame.
fn no_larger(own: Grid, most: Grid) -> bool {
    own.patches() <= most.patches() && own.height * own.width <= most.height * most.width
}
