//! Sound cut into windows of a spectrogram: Qwen3-Omni, Qwen3-ASR.

use super::config::{Fields, within};
use crate::{MediaError, Modality, Shape};

/// The spectrogram and convolution windows of an audio encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AudioWindows {
    /// Samples per second that the encoder wants.
    pub rate: u64,
    /// Samples per frame of the spectrogram.
    pub hop: u64,
    /// Samples of one transform; less than half of it cannot be transformed.
    pub fft: u64,
    /// Spectrogram frames per convolution window.
    pub window: u64,
    /// Spectrogram frames per attention window.
    pub attention_window: u64,
    /// Shorter audio clips are padded with silence to this many samples.
    pub min_samples: u64,
    /// Longest audio clip in seconds.
    pub max_seconds: u64,
}

impl AudioWindows {
    /// The feature extractor of a checkpoint, the audio configuration's `n_window` and `n_window_infer`, and the limit.
    pub fn new(fields: &Fields, n_window: u64, n_window_infer: u64, max_seconds: u64) -> Result<Self, MediaError> {
        let window = 2 * within("n_window", Some(n_window), 50, 1..=4096)?;
        Ok(Self {
            rate: within("sampling_rate", fields.sampling_rate, 16_000, 1000..=384_000)?,
            hop: within("hop_length", fields.hop_length, 160, 1..=16_384)?,
            fft: within("n_fft", fields.n_fft, 400, 1..=65_536)?,
            window,
            min_samples: 0,
            attention_window: within("n_window_infer", Some(n_window_infer), 400, window..=1 << 20)?,
            max_seconds: within("--max-audio-seconds", Some(max_seconds), 0, 1..=86_400)?,
        })
    }

    /// The same rule with clips padded to the samples that the feature extractor names, or else to `default`.
    pub fn filled_up(self, fields: &Fields, default: u64) -> Result<Self, MediaError> {
        let min_samples = within("min_length", fields.min_length, default, 0..=self.rate)?;
        Ok(Self { min_samples, ..self })
    }

    /// Samples of an audio clip after padding.
    pub fn filled(&self, samples: u64) -> u64 {
        if samples == 0 { 0 } else { samples.max(self.min_samples) }
    }

    /// What the encoder sees of an audio clip of `samples` samples at its own rate.
    pub fn shape(&self, samples: u64) -> Result<Shape, MediaError> {
        let samples = self.filled(samples);
        let limit = self.max_seconds * self.rate;
        if samples > limit {
            return Err(MediaError::OverLimit {
                what: Modality::Audio.noun(),
                asked: samples.div_ceil(self.rate),
                limit: self.max_seconds,
                unit: "seconds",
                flag: Modality::Audio.flag(),
            });
        }
        if samples <= self.fft / 2 || samples < self.hop {
            let why = format!("{samples} samples are too few to transform");
            return Err(MediaError::Malformed { what: Modality::Audio.noun(), why });
        }
        Ok(self.shape_of(samples))
    }

    /// The legal audio clip that costs most: the longest.
    pub fn worst(&self) -> Shape {
        self.shape_of(self.max_seconds * self.rate)
    }

    /// Frames of the spectrogram of an audio clip of `samples` samples.
    pub fn frames(&self, samples: u64) -> u64 {
        samples / self.hop
    }

    /// Tokens of a spectrogram of `frames` frames.
    pub fn tokens(&self, frames: u64) -> u64 {
        let (whole, rest) = (frames / self.window, frames % self.window);
        whole * halved_thrice(self.window) + halved_thrice(rest)
    }

    /// Frames of the longest audio clip.
    pub fn frames_max(&self) -> u64 {
        self.frames(self.max_seconds * self.rate)
    }

    /// The same with audio clips of no more tokens than so many; none if a second has more.
    pub fn carried_in(self, tokens: u64) -> Option<Self> {
        let fits = |seconds: &u64| self.tokens(self.frames(seconds * self.rate)) <= tokens;
        let max_seconds = (1..=self.max_seconds).rev().find(fits)?;
        Some(Self { max_seconds, ..self })
    }

    fn shape_of(&self, samples: u64) -> Shape {
        let tokens = self.tokens(self.frames(samples));
        let windows = self.attention_window / self.window * halved_thrice(self.window);
        // One row per token: the convolutions run window by window before the layers.
        let sequences = tokens.div_ceil(windows);
        Shape { modality: Modality::Audio, rows: tokens, sequences, longest: tokens.min(windows), tokens }
    }
}

/// Frames left of a window after three convolutions of stride two.
fn halved_thrice(frames: u64) -> u64 {
    frames.div_ceil(2).div_ceil(2).div_ceil(2)
}
