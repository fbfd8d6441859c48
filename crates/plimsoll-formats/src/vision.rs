//! The part of a configuration that describes a vision encoder: one struct for all families, and the bounds of its values.

use crate::activation::Activation;
use crate::bounds::{DEPTH_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, within, wrong};
use crate::error::FormatError;

/// The design of an encoder. It decides the names of the tensors and the parts that are built from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisionKind {
    /// Qwen2-VL: layer norms, plain feed-forward parts, rotary positions alone.
    Qwen2,
    /// Qwen2.5-VL: root-mean-square norms, gated feed-forward parts, attention in windows.
    Qwen2_5,
    /// Qwen2.5-Omni: the encoder of Qwen2.5-VL, with separate queries, keys and values. The text's positions continue after the last
    /// frame's.
    Omni2_5,
    /// Qwen3-VL, Qwen3.5: layer norms, a learned table of positions beside the rotary ones, and perhaps deepstack.
    Qwen3,
    /// Qwen3-Omni: the encoder of Qwen3-VL, with Qwen2-VL's names for its mergers. Frames follow one another, spaced by their times.
    Omni,
    /// InternVL: tiles of one size, each with a class row; learned positions alone.
    Intern(Intern),
    /// Gemma 3: SigLIP over images of one size, learned positions alone. A token is the mean of some patches.
    Siglip,
    /// Idefics3 and SmolVLM: SigLIP over squares of one size, with learned positions alone. The patches of a token are joined side by side
    /// and go through one projection.
    Idefics3,
    /// Mistral 3 and Ministral 3: Pixtral, with root-mean-square norms, gated feed-forward parts and rotary positions alone. The patches of
    /// a token are joined side by side and go through three projections.
    Pixtral(Pixtral),
    /// LFM2-VL: SigLIP 2 over images of any grid, with learned positions that are resized to each grid. The patches of a token are joined
    /// side by side and go through two projections.
    Siglip2(Siglip2),
    /// Llama 4: squares of one size, each with a class row; learned and rotary positions. The patches of a token are joined side by side
    /// and go through three projections.
    Llama4(Llama4),
    /// Gemma 4: images of any aspect that fill a budget of tokens, with a learned and a rotary position for each axis. A token is the mean
    /// of some patches.
    Gemma4(Gemma4),
}

/// The differences among the encoders of Gemma 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemma4 {
    /// Positions of the learned table, for each axis.
    pub positions: usize,
    /// Whether linear layers clamp their inputs and outputs to bounds from the checkpoint.
    pub clipped: bool,
    /// Whether tokens are shifted and scaled before the projection.
    pub standardize: bool,
    /// Whether an image's tokens attend to each other in the language model's sliding layers.
    pub sees_ahead: bool,
    /// Whether the encoder has no layers (Unified): a token is one patch, which goes through a projection.
    pub unified: bool,
}

/// The differences among the encoders of Llama 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Llama4 {
    /// Width after the first two projections.
    pub projector_width: usize,
}

/// The differences among the encoders of InternVL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intern {
    /// Whether the layers' norms are root-mean-square ones, without a bias.
    pub rms_norm: bool,
    /// Whether queries and keys are normed, all heads together.
    pub qk_norm: bool,
    /// Whether the query, key and value projections have biases.
    pub attention_bias: bool,
    /// Whether a norm, never a root-mean-square one, follows the last layer.
    pub last_norm: bool,
    /// Fewest and most tiles of an image, where `config.json` has them: in the original form.
    pub tiles: Option<[u32; 2]>,
}

/// The differences among the encoders of Mistral 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pixtral {
    /// Whether the last two projections have biases.
    pub projector_bias: bool,
    /// Whether the numbers of a rotary pair are neighbours, as in GGUF files.
    pub rope_interleaved: bool,
}

/// The differences among the encoders of LFM2-VL: the two projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Siglip2 {
    /// Width between them.
    pub projector_width: usize,
    /// Whether a norm stands before them.
    pub projector_norm: bool,
    /// Whether they have biases.
    pub projector_bias: bool,
}

/// A vision encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vision {
    /// Its design.
    pub encoder: VisionKind,
    /// Layers.
    pub depth: usize,
    /// Width of its residual stream.
    pub hidden_size: usize,
    /// Heads.
    pub heads: usize,
    /// Width between the projections of a feed-forward part.
    pub intermediate_size: usize,
    /// The activation of the feed-forward parts.
    pub act: Activation,
    /// Colours of a pixel.
    pub channels: usize,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Frames of a patch.
    pub temporal: usize,
    /// Patches per side of a token.
    pub merge: usize,
    /// Positions per side of the learned table; 0 without one. For InternVL, Gemma 3, Idefics3 and Llama 4 they are the patches per side of
    /// every image.
    pub table_side: usize,
    /// Layers after which the stream is also sent to the model's first layers, in the same order.
    pub deepstack: Vec<usize>,
    /// Side in pixels of the windows inside which most layers attend.
    pub window: Option<usize>,
    /// The layers that attend to whole frames even if there are windows.
    pub full_layers: Vec<usize>,
    /// Time steps per second of video, if the family spaces frames by their times.
    pub steps_per_second: Option<u32>,
    /// Token ids that stand for media in a prompt.
    pub tokens: MediaTokens,
}

/// Token ids that stand for media in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaTokens {
    /// A token of an image.
    pub image: u32,
    /// A token of a video.
    pub video: u32,
}

/// How the frequencies of a rotary embedding are shared out among time, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeSections {
    /// Frequencies of time, height and width.
    pub sizes: [usize; 3],
    /// Whether the axes' frequencies take turns, and time has the rest. Otherwise the axes' frequencies follow one another.
    pub interleaved: bool,
}

/// Longest side of a patch in pixels.
const PATCH_MAX: usize = 1024;
/// Most frames of a patch, and most patches per side of a token.
const GROUP_MAX: usize = 16;
/// Most positions per side of a learned table.
const TABLE_SIDE_MAX: usize = 4096;
/// Most learned positions of an axis.
const POSITIONS_MAX: usize = 1 << 16;

/// Sides of Idefics3's squares, in patches, at which transformers gives some patches the same position. The cause is the rounding of its
/// 32-bit arithmetic: `torch.bucketize(torch.arange(n) * (1 / torch.tensor(n)), torch.arange(1 / n, 1, 1 / n), right=True)`. Published
/// models have 26, 27 or 32. Sides above the last were not examined.
const SHARED_PLACES: [usize; 19] = [19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62, 67, 68];

/// Refuses the sides in [`SHARED_PLACES`], and sides above the last of them.
pub(crate) fn distinct_places(side: usize) -> Result<(), FormatError> {
    match SHARED_PLACES.contains(&side) || side > SHARED_PLACES[18] {
        true => Err(FormatError::Unsupported(format!(
            "squares of {side} patches on a side, some of which share a position; supported are 26, 27, 32 and others up to 66"
        ))),
        false => Ok(()),
    }
}

impl Vision {
    /// Returns an encoder of single images, without videos, windows and deepstack. The caller fills in its sizes.
    pub(crate) fn of_images(encoder: VisionKind, tokens: MediaTokens) -> Self {
        Self {
            encoder,
            depth: 0,
            hidden_size: 0,
            heads: 0,
            intermediate_size: 0,
            act: Activation::GeluTanh,
            channels: 3,
            patch: 0,
            temporal: 1,
            merge: 1,
            table_side: 0,
            deepstack: Vec::new(),
            window: None,
            full_layers: Vec::new(),
            steps_per_second: None,
            tokens,
        }
    }

    /// Numbers of a patch.
    pub fn patch_width(&self) -> usize {
        self.channels * self.temporal * self.patch * self.patch
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads
    }

    /// Checks every size against its bound, and that the parts fit together.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        within("vision hidden size", self.hidden_size, HIDDEN_MAX)?;
        within("in_channels", self.channels, 16)?;
        within("patch_size", self.patch, PATCH_MAX)?;
        within("temporal_patch_size", self.temporal, GROUP_MAX)?;
        within("spatial_merge_size", self.merge, GROUP_MAX)?;
        within("numbers of a patch", self.patch_width(), INTERMEDIATE_MAX)?;
        within("width of a merged patch", self.hidden_size * self.merge * self.merge, INTERMEDIATE_MAX)?;
        within("vision positions per side", self.table_side.max(1), TABLE_SIDE_MAX)?;
        if let VisionKind::Gemma4(own) = self.encoder {
            within("position_embedding_size", own.positions, POSITIONS_MAX)?;
        }
        if !matches!(self.encoder, VisionKind::Gemma4(Gemma4 { unified: true, .. })) {
            self.check_layers()?;
        }
        if let Some(layer) = self.deepstack.iter().chain(&self.full_layers).find(|layer| **layer >= self.depth) {
            return wrong(format!("layer {layer} of a vision encoder of {}", self.depth));
        }
        if !self.deepstack.is_sorted_by(|a, b| a < b) {
            return wrong("deepstack_visual_indexes do not ascend".to_owned());
        }
        if let VisionKind::Siglip2(siglip) = self.encoder {
            within("projector_hidden_size", siglip.projector_width, INTERMEDIATE_MAX)?;
        }
        if let VisionKind::Llama4(llama) = self.encoder {
            within("projector_output_dim", llama.projector_width, INTERMEDIATE_MAX)?;
        }
        let token = self.patch * self.merge;
        match self.window {
            Some(window) if window < token || window > token * TABLE_SIDE_MAX => {
                wrong(format!("window_size: {window} pixels, allowed are {token} to {}", token * TABLE_SIDE_MAX))
            }
            _ => Ok(()),
        }
    }

    /// Checks the sizes of an encoder with layers.
    fn check_layers(&self) -> Result<(), FormatError> {
        within("vision layers", self.depth, DEPTH_MAX)?;
        within("vision heads", self.heads, HEADS_MAX)?;
        within("vision intermediate size", self.intermediate_size, INTERMEDIATE_MAX)?;
        if !self.hidden_size.is_multiple_of(self.heads) || !self.head_dim().is_multiple_of(4) {
            let (heads, hidden) = (self.heads, self.hidden_size);
            return wrong(format!("{heads} vision heads of {hidden} elements together cannot be rotated in two axes"));
        }
        within("vision head width", self.head_dim(), HEAD_DIM_MAX)
    }
}

impl RopeSections {
    /// Returns the axis that gives each of `frequencies` its position: 0 time, 1 height, 2 width.
    pub fn axes(&self, frequencies: usize) -> Vec<u8> {
        let [time, height, width] = self.sizes;
        let axis = |i: usize| match self.interleaved {
            true if i % 3 == 1 && i < 3 * height => 1,
            true if i % 3 == 2 && i < 3 * width => 2,
            true => 0,
            false => u8::from(i >= time) + u8::from(i >= time + height),
        };
        (0..frequencies).map(axis).collect()
    }

    /// Checks the sections against the rotated part of a head.
    pub(crate) fn check(&self, rotary_dim: usize) -> Result<(), FormatError> {
        let sum = self.sizes.iter().fold(0usize, |sum, size| sum.saturating_add(*size));
        match sum == rotary_dim / 2 {
            true => Ok(()),
            false => wrong(format!("mrope_section {:?} does not share out {} frequencies", self.sizes, rotary_dim / 2)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_follow_one_another_or_take_turns() {
        let sizes = [3, 2, 2];
        assert_eq!(RopeSections { sizes, interleaved: false }.axes(7), [0, 0, 0, 1, 1, 2, 2]);
        assert_eq!(RopeSections { sizes, interleaved: true }.axes(7), [0, 1, 2, 0, 1, 2, 0]);
        assert!(RopeSections { sizes, interleaved: true }.check(14).is_ok());
        assert!(RopeSections { sizes, interleaved: true }.check(16).is_err());
    }
}
