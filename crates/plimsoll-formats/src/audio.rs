//! What a configuration says of an audio tower, and the bounds it must keep.

use crate::activation::Activation;
use crate::bounds::{DEPTH_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, within, wrong};
use crate::error::FormatError;

/// The audio tower of Qwen3-Omni and Qwen3-ASR: three convolutions over windows of a spectrogram, then layers that attend in larger windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audio {
    /// Layers.
    pub depth: usize,
    /// Width of its residual stream.
    pub hidden_size: usize,
    /// Heads.
    pub heads: usize,
    /// Width between the projections of a feed-forward part.
    pub intermediate_size: usize,
    /// The activation of the feed-forward parts and before the last projection.
    pub act: Activation,
    /// Mel bands of a spectrogram frame.
    pub bands: usize,
    /// Channels of the convolutions.
    pub channels: usize,
    /// Half the spectrogram frames that are convolved together.
    pub half_window: usize,
    /// Spectrogram frames that attend to each other: whole convolution windows.
    pub attention_window: usize,
    /// The token that stands for a part of an audio clip in a prompt.
    pub placeholder: u32,
    /// What the model does with audio without an instruction.
    pub task: AudioTask,
}

/// What a model with an audio tower does with audio without an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AudioTask {
    /// It takes instructions: Qwen3-Omni.
    Any,
    /// It transcribes: Qwen3-ASR. The answer begins with the language and a mark. Short clips are padded with silence.
    Transcribe,
}

/// Most mel bands.
const BANDS_MAX: usize = 1024;
/// Most channels of the convolutions: each multiplies with nine points of each.
const CHANNELS_MAX: usize = 1 << 14;
/// Most frames of half a window.
const HALF_WINDOW_MAX: usize = 4096;
/// Most frames that attend to each other.
const ATTENTION_MAX: usize = 1 << 20;

impl Audio {
    /// Spectrogram frames that are convolved together.
    pub fn window(&self) -> usize {
        2 * self.half_window
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads
    }

    /// What the three convolutions, each of which halves it, leave of a length.
    pub fn convolved(length: usize) -> usize {
        length.div_ceil(2).div_ceil(2).div_ceil(2)
    }

    /// Rows that the tower makes of a spectrogram of so many frames.
    pub fn rows(&self, frames: usize) -> usize {
        let window = self.window();
        frames / window * Self::convolved(window) + Self::convolved(frames % window)
    }

    /// Checks every size against its bound, and that the parts fit together.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        within("audio layers", self.depth, DEPTH_MAX)?;
        within("audio hidden size", self.hidden_size, HIDDEN_MAX)?;
        within("audio heads", self.heads, HEADS_MAX)?;
        within("audio intermediate size", self.intermediate_size, INTERMEDIATE_MAX)?;
        within("num_mel_bins", self.bands, BANDS_MAX)?;
        within("downsample_hidden_size", self.channels, CHANNELS_MAX)?;
        within("n_window", self.half_window, HALF_WINDOW_MAX)?;
        within("n_window_infer", self.attention_window, ATTENTION_MAX)?;
        within("width of a convolved frame", self.channels * Self::convolved(self.bands), INTERMEDIATE_MAX)?;
        if self.attention_window < self.window() {
            let (infer, window) = (self.attention_window, self.window());
            return wrong(format!("n_window_infer: {infer} frames are less than a window of {window}"));
        }
        // Positions are sines and cosines, one more than half of each.
        if !self.hidden_size.is_multiple_of(self.heads) || !self.hidden_size.is_multiple_of(2) || self.hidden_size < 4 {
            let (heads, hidden) = (self.heads, self.hidden_size);
            return wrong(format!("{heads} audio heads of {hidden} elements together"));
        }
        within("audio head width", self.head_dim(), HEAD_DIM_MAX)
    }
}
