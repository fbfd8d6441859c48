//! The part of a configuration that describes an audio encoder, and the bounds of its values.

use crate::activation::Activation;
use crate::bounds::{DEPTH_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, positive, within, wrong};
use crate::error::FormatError;

/// An audio encoder: the sizes that every encoder has, and the part of its family.
#[derive(Clone, Debug, PartialEq)]
pub struct Audio {
    /// Layers.
    pub depth: usize,
    /// Width of its residual stream.
    pub hidden_size: usize,
    /// Heads.
    pub heads: usize,
    /// Width between the projections of a feed-forward part.
    pub intermediate_size: usize,
    /// The activation of the feed-forward parts, and of Qwen before the last projection.
    pub act: Activation,
    /// Mel bands of a spectrogram frame. With [`AudioKind::Samples`]: samples of a frame.
    pub bands: usize,
    /// The token that stands for a part of an audio clip in a prompt.
    pub placeholder: u32,
    /// The family's own part.
    pub encoder: AudioKind,
}

/// The family of an audio encoder.
#[derive(Clone, Debug, PartialEq)]
pub enum AudioKind {
    /// Qwen3-Omni and Qwen3-ASR.
    Windows(AudioWindows),
    /// Qwen2.5-Omni.
    Chunks(AudioChunks),
    /// Gemma 4 E2B and E4B.
    Conformer(Conformer),
    /// Whisper: an encoder's output that the decoder attends to at every layer.
    Whisper(Whisper),
    /// Gemma 4 Unified: a frame is the samples of a token, which go through a projection. There are no layers.
    Samples,
}

/// Three convolutions over windows of a spectrogram, then layers that attend in larger windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AudioWindows {
    /// Channels of the convolutions.
    pub channels: usize,
    /// Half the spectrogram frames that are convolved together.
    pub half_window: usize,
    /// Spectrogram frames that attend to each other: whole convolution windows.
    pub attention_window: usize,
    /// The task of audio without an instruction.
    pub task: AudioTask,
}

/// Two convolutions over chunks of a spectrogram, the second of which halves time. Layers attend inside chunks, and the mean of two
/// rows is a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioChunks {
    /// Half the spectrogram frames of a chunk, and the rows of one.
    pub half_window: usize,
}

/// The task that a model with an audio encoder does with audio without an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AudioTask {
    /// No fixed task: the model takes instructions (Qwen3-Omni).
    Any,
    /// Transcription: Qwen3-ASR. The answer begins with the language and a mark. Short clips are padded with silence.
    Transcribe,
}

/// Two convolutions over a whole spectrogram, then layers of attention to the rows before, a causal convolution, and two feed-forward
/// parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Conformer {
    /// Channels of the two convolutions. The first has as many channels as there are bands.
    pub channels: [usize; 2],
    /// Inputs of a layer's causal convolution.
    pub taps: usize,
    /// Most rows that a row attends to, itself included.
    pub seen: usize,
    /// Scores become `cap * tanh(score / cap)`.
    pub cap: f32,
    /// The factor on the result of a feed-forward part.
    pub residual: f32,
    /// The bound of residual sums: they are clamped between its negative and itself.
    pub bound: f32,
    /// Whether linear layers keep their inputs and outputs within bounds of the checkpoint.
    pub clipped: bool,
    /// Width of the encoder's output, which is the projection's input.
    pub output: usize,
}

/// Two convolutions over a spectrogram of a fixed length, then layers in which all rows attend to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whisper {
    /// Rows of the output: a position of the encoder each.
    pub positions: usize,
    /// Positions of the decoder.
    pub text_positions: usize,
    /// Tokens that are never generated.
    pub suppressed: Vec<u32>,
    /// Tokens that no text begins with.
    pub suppressed_first: Vec<u32>,
    /// The latest position at which the first timestamp of a text may lie; none for any.
    pub first_time_max: Option<usize>,
    /// Whether a prompt names language and task; otherwise the model supports English only.
    pub multilingual: bool,
}

/// Most mel bands.
const BANDS_MAX: usize = 1024;
/// Most samples of a token.
const SAMPLES_MAX: usize = 1 << 16;
/// Most channels of the convolutions: each multiplies with nine points of each.
const CHANNELS_MAX: usize = 1 << 14;
/// Most frames of half a window.
const HALF_WINDOW_MAX: usize = 4096;
/// Most frames that attend to each other.
const ATTENTION_MAX: usize = 1 << 20;
/// Most positions of an encoder with a fixed length.
const POSITIONS_MAX: usize = 1 << 16;
/// Most inputs of a causal convolution.
const CONV_KERNEL_MAX: usize = 64;
/// Most rows that a row attends to: there is one key for each distance.
const SEEN_MAX: usize = 64;

impl AudioWindows {
    /// Spectrogram frames that are convolved together.
    pub fn window(&self) -> usize {
        2 * self.half_window
    }

    /// Returns the length that is left of `length` after the three convolutions. Each halves it and rounds up.
    pub fn convolved(length: usize) -> usize {
        length.div_ceil(2).div_ceil(2).div_ceil(2)
    }

    /// Returns the rows that the encoder makes of a spectrogram of `frames` frames.
    pub fn rows(&self, frames: usize) -> usize {
        let window = self.window();
        frames / window * Self::convolved(window) + Self::convolved(frames % window)
    }

    fn check(&self, bands: usize) -> Result<(), FormatError> {
        within("downsample_hidden_size", self.channels, CHANNELS_MAX)?;
        within("n_window", self.half_window, HALF_WINDOW_MAX)?;
        within("n_window_infer", self.attention_window, ATTENTION_MAX)?;
        within("width of a convolved frame", self.channels * Self::convolved(bands), INTERMEDIATE_MAX)?;
        if self.attention_window < self.window() {
            let (infer, window) = (self.attention_window, self.window());
            return wrong(format!("n_window_infer: {infer} frames are less than a window of {window}"));
        }
        Ok(())
    }
}

impl AudioChunks {
    /// Spectrogram frames of a chunk.
    pub fn chunk(&self) -> usize {
        2 * self.half_window
    }
}

impl Conformer {
    /// Returns the length that is left of `length` after the two convolutions. Each halves it and rounds up.
    pub fn convolved(length: usize) -> usize {
        length.div_ceil(2).div_ceil(2)
    }

    fn check(&self, bands: usize) -> Result<(), FormatError> {
        within("subsampling_conv_channels", self.channels[0], CHANNELS_MAX)?;
        within("subsampling_conv_channels", self.channels[1], CHANNELS_MAX)?;
        within("width of a convolved frame", self.channels[1] * Self::convolved(bands), INTERMEDIATE_MAX)?;
        within("conv_kernel_size", self.taps, CONV_KERNEL_MAX)?;
        within("attention_context_left", self.seen, SEEN_MAX)?;
        within("output_proj_dims", self.output, HIDDEN_MAX)?;
        positive("attention_logit_cap", self.cap, f32::MAX)?;
        positive("residual_weight", self.residual, f32::MAX)?;
        positive("gradient_clipping", self.bound, f32::MAX)?;
        if self.channels[0] != bands {
            let first = self.channels[0];
            return wrong(format!("subsampling_conv_channels: {first}, expected {bands}, the number of mel bands"));
        }
        Ok(())
    }
}

impl Whisper {
    /// Spectrogram frames that the encoder takes: the second convolution halves them.
    pub fn frames(&self) -> usize {
        2 * self.positions
    }
}

impl Audio {
    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads
    }

    /// Returns the rows that the encoder makes of a spectrogram of `frames` frames.
    pub fn rows(&self, frames: usize) -> usize {
        match &self.encoder {
            AudioKind::Windows(windows) => windows.rows(frames),
            AudioKind::Chunks(_) => frames.div_ceil(2) / 2,
            AudioKind::Conformer(_) => Conformer::convolved(frames),
            AudioKind::Whisper(_) => frames.div_ceil(2),
            AudioKind::Samples => frames,
        }
    }

    /// Checks every size against its bound, and that the parts fit together.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        if self.encoder == AudioKind::Samples {
            return within("audio_embed_dim", self.bands, SAMPLES_MAX);
        }
        within("audio layers", self.depth, DEPTH_MAX)?;
        within("audio hidden size", self.hidden_size, HIDDEN_MAX)?;
        within("audio heads", self.heads, HEADS_MAX)?;
        within("audio intermediate size", self.intermediate_size, INTERMEDIATE_MAX)?;
        within("num_mel_bins", self.bands, BANDS_MAX)?;
        match &self.encoder {
            AudioKind::Windows(windows) => windows.check(self.bands)?,
            AudioKind::Chunks(chunks) => within("n_window", chunks.half_window, HALF_WINDOW_MAX)?,
            AudioKind::Conformer(conformer) => conformer.check(self.bands)?,
            AudioKind::Whisper(whisper) => {
                within("max_source_positions", whisper.positions, POSITIONS_MAX)?;
                within("max_target_positions", whisper.text_positions, POSITIONS_MAX)?;
            }
            AudioKind::Samples => {}
        }
        // A row's positions are sines in one half and cosines in the other. Their frequencies need at least two elements in each half.
        if !self.hidden_size.is_multiple_of(self.heads) || !self.hidden_size.is_multiple_of(2) || self.hidden_size < 4 {
            let (heads, hidden) = (self.heads, self.hidden_size);
            return wrong(format!("{heads} audio heads of {hidden} elements together"));
        }
        within("audio head width", self.head_dim(), HEAD_DIM_MAX)
    }
}
