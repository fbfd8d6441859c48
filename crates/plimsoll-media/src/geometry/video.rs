//! Videos cut into patches: Qwen2-VL and 2.5-VL bound every frame, Qwen3-VL bounds all frames together, Gemma 4 gives every frame a
//! budget of tokens.

use super::config::{Fields, ProcessorFiles, SizeField, within};
pub use super::frames::Budget;
use super::frames::Sampling;
use super::frontier::{RoundedUp, Rule};
use super::patches::{check_sides, size_of_sides};
use super::{Patches, round_half_even};
use crate::{MediaError, Modality, Shape, Size};

/// The resize rule, patch grid and frame sampling of a video processor.
#[derive(Clone, Debug, PartialEq)]
pub struct PatchVideo {
    /// Patch sizes and pixel bounds.
    pub patches: Patches,
    /// The scope of the bounds.
    pub budget: Budget,
    /// The sampling of frames.
    pub sampling: Sampling,
    /// Tokens that each frame gets a share of, as another bound, if the checkpoint has it.
    pub capped_tokens: Option<u64>,
}

/// A processor's defaults for missing fields.
struct Defaults {
    patch: u64,
    pixels: (u64, u64),
    /// Tokens of a video, if tokens bound its frames.
    tokens: u64,
}

/// Tokens of a frame of Gemma 4, if its processor's file lacks the field.
const FRAME_TOKENS: u64 = 70;

const QWEN2: Defaults = Defaults { patch: 14, pixels: (128 * 28 * 28, 768 * 28 * 28), tokens: 128_000 };
const QWEN3: Defaults = Defaults { patch: 16, pixels: (128 * 32 * 32, 768 * 32 * 32), tokens: 768 };
const OMNI: Defaults = Defaults { pixels: (128 * 32 * 32, 768 * 32 * 32), ..QWEN2 };

impl PatchVideo {
    /// Returns the rule of a checkpoint's video processor.
    pub fn new(fields: &Fields, budget: Budget, window: Option<u64>) -> Result<Self, MediaError> {
        let defaults = if budget == Budget::Video { QWEN3 } else { QWEN2 };
        Self::or(defaults, fields, budget, window)
    }

    /// Returns Qwen3-Omni's rule. Without a file of its own a video still has bounds, for any content of the image processor's file.
    pub fn omni(files: &ProcessorFiles, window: Option<u64>) -> Result<Self, MediaError> {
        Self::bounded(OMNI, files, window)
    }

    /// Returns Qwen2.5-Omni's rule, with bounds as in [`Self::omni`].
    pub fn omni2_5(files: &ProcessorFiles, window: Option<u64>) -> Result<Self, MediaError> {
        Self::bounded(QWEN2, files, window)
    }

    fn bounded(defaults: Defaults, files: &ProcessorFiles, window: Option<u64>) -> Result<Self, MediaError> {
        let mut fields = files.video.clone();
        if !files.video_apart {
            fields = Fields { min_pixels: None, max_pixels: None, size: SizeField::default(), ..fields };
        }
        Self::or(defaults, &fields, Budget::Frame, window)
    }

    /// Returns Gemma 4's rule. Without a file of its own a video has the defaults, for any budget in the image processor's file.
    pub fn filling(files: &ProcessorFiles) -> Result<Self, MediaError> {
        let mut fields = files.video.clone();
        if !files.video_apart {
            fields.max_soft_tokens = None;
        }
        let patches = Patches::filling(&fields, FRAME_TOKENS)?;
        let sampling = Sampling::starts(&fields)?;
        Ok(Self { patches, budget: Budget::Frame, sampling, capped_tokens: None })
    }

    /// Returns this rule with patches as large as tokens: Gemma 4 Unified.
    #[must_use]
    pub fn of_whole_tokens(self) -> Self {
        Self { patches: self.patches.of_whole_tokens(), ..self }
    }

    fn or(defaults: Defaults, fields: &Fields, budget: Budget, window: Option<u64>) -> Result<Self, MediaError> {
        let Defaults { patch, pixels, tokens } = defaults;
        // Qwen3-VL's video processor, unlike the others, does not read the short names of the bounds.
        let named = Fields { min_pixels: None, max_pixels: None, ..fields.clone() };
        let patches = Patches::new(if budget == Budget::Video { &named } else { fields }, window, (patch, pixels))?;
        let max_video_tokens = within("max_video_tokens", fields.max_video_tokens, tokens, 1..=1 << 24)?;
        let capped_tokens = (fields.cap_pixels_per_frame == Some(true)).then_some(max_video_tokens);
        let sampling = Sampling::patches(fields, budget, patches.temporal)?;
        Ok(Self { patches, budget, sampling, capped_tokens })
    }

    /// Returns the size that the frames of a video are resized to.
    pub fn resize(&self, frames: u64, size: Size) -> Result<Size, MediaError> {
        self.check_frames(frames)?;
        size_of_sides(self.resize_sides(frames, (u64::from(size.height), u64::from(size.width)))?)
    }

    /// Returns the encoder's input for a video of `frames` sampled frames.
    pub fn shape(&self, frames: u64, size: Size) -> Result<Shape, MediaError> {
        let resized = self.resize(frames, size)?;
        let (a, b) = (u64::from(resized.height), u64::from(resized.width));
        let (a, b) = (a / self.patches.factor(), b / self.patches.factor());
        Ok(self.patches.shape_of(Modality::Video, frames.div_ceil(self.patches.temporal), a, b))
    }

    /// Returns the most expensive legal video, for a cost that never falls when a field of the shape grows.
    pub fn worst(&self, cost: impl Fn(&Shape) -> u64) -> Shape {
        let legal = self.frontiers().filter(|&(frames, _)| self.check_frames(frames).is_ok());
        let shapes = legal.map(|(frames, frontier)| {
            let groups = frames.div_ceil(self.patches.temporal);
            self.patches.costliest(Modality::Video, groups, &frontier, &cost)
        });
        let least = self.patches.shape_of(Modality::Video, 1, 1, 1);
        shapes.max_by_key(|shape| cost(shape)).unwrap_or(least)
    }

    /// Returns [`Patches::frontier`] of videos of `frames` sampled frames.
    pub fn frontier(&self, frames: u64) -> Vec<(u64, u64)> {
        self.frontier_after(frames, &mut RoundedUp::default())
    }

    /// Returns [`Self::frontier`] for every number of frames.
    pub fn frontiers(&self) -> impl Iterator<Item = (u64, Vec<(u64, u64)>)> {
        let mut known = RoundedUp::default();
        (1..=self.sampling.max_frames).map(move |frames| (frames, self.frontier_after(frames, &mut known)))
    }

    fn frontier_after(&self, frames: u64, known: &mut RoundedUp) -> Vec<(u64, u64)> {
        if self.check_frames(frames).is_err() {
            return Vec::new();
        }
        if self.patches.fills {
            return self.patches.frontier();
        }
        self.rule(frames).frontier(known, |sides| self.enlarge_strip(sides).ok())
    }

    /// Returns the values that decide the sizes of videos of `frames` sampled frames.
    fn rule(&self, frames: u64) -> Rule {
        let (min, max) = (self.patches.min_pixels, self.max_pixels(frames));
        let (frames_compared, frames) = match self.budget {
            Budget::Frame => (1, 1),
            Budget::Video => (round_half_even(frames, self.patches.temporal) * self.patches.temporal, frames),
        };
        Rule { factor: self.patches.factor(), min, max, frames_compared, frames }
    }

    /// Refuses more frames than were tested, before any is decoded (A31).
    fn check_frames(&self, frames: u64) -> Result<(), MediaError> {
        if frames > self.sampling.max_frames {
            return Err(MediaError::OverLimit {
                what: "a video",
                asked: frames,
                limit: self.sampling.max_frames,
                unit: "frames",
                flag: Modality::Video.flag(),
            });
        }
        // Qwen3-VL's rule refuses fewer frames than a patch has; its rounding needs one group at least.
        let fewest = if self.budget == Budget::Video { self.patches.temporal } else { 1 };
        if frames < fewest {
            let why = format!("{frames} frames are fewer than {fewest}");
            return Err(MediaError::Malformed { what: "a video", why });
        }
        Ok(())
    }

    fn max_pixels(&self, frames: u64) -> u64 {
        let (min, max, unit) = (self.patches.min_pixels, self.patches.max_pixels, self.patches.factor().pow(2));
        let Some(tokens) = self.capped_tokens else { return max };
        let floor = (min as f64 * 1.05) as u64;
        match self.budget {
            Budget::Frame => {
                let all = ((tokens * unit) as f64 * 0.9) as u64;
                max.min(all * self.patches.temporal / frames).max(floor)
            }
            Budget::Video => (tokens * unit).min(max / frames).max(floor) * frames,
        }
    }

    fn resize_sides(&self, frames: u64, sides: (u64, u64)) -> Result<(u64, u64), MediaError> {
        if self.patches.fills {
            return self.patches.fill(sides);
        }
        Ok(self.rule(frames).resize(self.enlarge_strip(sides)?))
    }

    /// Returns the sides that the bounds are applied to. If all frames share the bounds, a side below one token is first enlarged to it.
    fn enlarge_strip(&self, sides: (u64, u64)) -> Result<(u64, u64), MediaError> {
        let (factor, (mut h, mut w)) = (self.patches.factor(), sides);
        if self.budget == Budget::Video && h.min(w) > 0 && h.min(w) < factor {
            let enlarge = (factor as f64 / h as f64).max(factor as f64 / w as f64);
            (h, w) = ((h as f64 * enlarge) as u64, (w as f64 * enlarge) as u64);
        }
        check_sides((h, w))?;
        Ok((h, w))
    }
}
