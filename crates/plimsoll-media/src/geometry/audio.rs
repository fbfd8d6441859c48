//! Audio cut into frames of a spectrogram, and frames into tokens: Qwen2.5-Omni, Qwen3-Omni, Qwen3-ASR, Gemma 4, Whisper.

use super::config::{Fields, within};
use crate::{MediaError, Modality, Shape};

/// The mapping of an audio clip to an encoder's input.
#[derive(Clone, Debug, PartialEq)]
pub struct AudioRule {
    /// Samples per second of the encoder's input.
    pub rate: u64,
    /// Samples from one frame of the spectrogram to the next.
    pub hop: u64,
    /// Shorter audio clips are padded with silence to this many samples.
    pub min_samples: u64,
    /// Longest audio clip in seconds.
    pub max_seconds: u64,
    /// The computation of frames, and their mapping to tokens.
    pub cut: AudioCut,
}

/// The computation of frames, and their mapping to tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum AudioCut {
    /// Whisper's frames, each in the middle of one transform's samples. Windows of frames are convolved; the results attend in windows.
    Windows(AudioWindows),
    /// Whisper's frames of an audio clip that silence fills up. Chunks of frames attend, and the mean of two rows is a token. Qwen2.5-Omni.
    Chunks(AudioChunks),
    /// Frames that begin half a frame before the first sample; four become a token.
    Gemma4(Gemma4Frames),
    /// The frames of [`AudioCut::Windows`], of clips that all have the same length: shorter ones end in silence. Two frames become a token,
    /// and all tokens attend to each other. Whisper.
    Fixed(FixedClip),
    /// A frame is a token of this many samples. The last one ends in silence. Gemma 4 Unified.
    Samples(u64),
}

/// The windows of Qwen3-Omni and Qwen3-ASR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioWindows {
    /// Samples of one transform; a clip of less than half of it cannot be transformed.
    pub fft: u64,
    /// Spectrogram frames per convolution window.
    pub window: u64,
    /// Spectrogram frames per attention window.
    pub attention_window: u64,
}

/// The chunks of Qwen2.5-Omni.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioChunks {
    /// Samples of one transform.
    pub fft: u64,
    /// Spectrogram frames of a chunk.
    pub chunk: u64,
    /// Samples of an audio clip with the silence behind it. A frame that consists only of silence is dropped.
    pub filled: u64,
}

/// The clips of Whisper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedClip {
    /// Samples of one transform.
    pub fft: u64,
    /// Seconds of every clip.
    pub seconds: u64,
}

/// The frames of Gemma 4.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Frames {
    /// Samples of a frame.
    pub frame: u64,
    /// Samples of one transform; samples beyond the frame's are silent.
    pub fft: u64,
    /// Lowest and highest frequency of all bands.
    pub hertz: [f64; 2],
    /// Added to a band's magnitude, so that silence has a logarithm.
    pub floor: f64,
    /// Factor of samples.
    pub scale: f64,
    /// Means and deviations of the bands, if the model has them.
    pub per_bin: Option<[Vec<f64>; 2]>,
}

/// Longest audio clip of Gemma 4 in seconds: its feature extractor truncates longer ones.
const GEMMA_4_SECONDS_MAX: u64 = 30;

impl Gemma4Frames {
    fn new(fields: &Fields, rate: u64) -> Result<(Self, u64), MediaError> {
        let samples = |key, millis: Option<f64>, default: f64| {
            let millis = millis.unwrap_or(default);
            within(key, Some((rate as f64 * millis / 1000.0).round_ties_even() as u64), 0, 2..=16_384)
        };
        let frame = samples("frame_length_ms", fields.frame_length_ms, 20.0)?;
        let hop = samples("hop_length_ms", fields.hop_length_ms, 10.0)?;
        let unsupported = |key, value: String, supported: &str| {
            Err(MediaError::BadConfig { key, why: format!("{value} is not supported; supported is {supported}") })
        };
        for (key, value) in [("preemphasis", fields.preemphasis), ("dither", fields.dither)] {
            if let Some(value) = value.filter(|value| *value != 0.0) {
                return unsupported(key, value.to_string(), "0");
            }
        }
        let hertz = [fields.min_frequency.unwrap_or(0.0), fields.max_frequency.unwrap_or(8000.0)];
        if !(0.0 <= hertz[0] && hertz[0] < hertz[1] && hertz[1] <= rate as f64 / 2.0) {
            let range = format!("0 to {} Hz, in ascending order", rate / 2);
            return unsupported("min_frequency, max_frequency", format!("{} to {} Hz", hertz[0], hertz[1]), &range);
        }
        let floor = fields.mel_floor.unwrap_or(1e-3);
        if !(floor > 0.0 && floor <= 1.0) {
            return unsupported("mel_floor", floor.to_string(), "above 0, up to 1");
        }
        let scale = fields.input_scale_factor.unwrap_or(1.0);
        if !scale.is_finite() {
            return unsupported("input_scale_factor", scale.to_string(), "a finite number");
        }
        let longer = fields.fft_overdrive == Some(true);
        let fft = frame.next_power_of_two() << u32::from(longer);
        let per_bin = match (&fields.per_bin_mean, &fields.per_bin_stddev) {
            (None, None) => None,
            (mean, deviation) => {
                let bands = fields.feature_size.unwrap_or(128) as usize;
                let both = [(mean, 0.0), (deviation, 1.0)];
                let both = both.map(|(given, default)| given.clone().unwrap_or_else(|| vec![default; bands]));
                if both.iter().any(|values| values.len() != bands) {
                    let lengths = both.map(|values| values.len());
                    return unsupported(
                        "per_bin_mean, per_bin_stddev",
                        format!("{lengths:?} numbers"),
                        &format!("{bands} of each"),
                    );
                }
                Some(both)
            }
        };
        Ok((Self { frame, fft, hertz, floor, scale, per_bin }, hop))
    }
}

impl AudioRule {
    /// Returns the rule from a checkpoint's feature extractor, the audio configuration's `n_window` and `n_window_infer`, and the limit.
    pub fn windows(fields: &Fields, n_window: u64, n_window_infer: u64, max_seconds: u64) -> Result<Self, MediaError> {
        let window = 2 * within("n_window", Some(n_window), 50, 1..=4096)?;
        Ok(Self {
            rate: rate(fields)?,
            hop: within("hop_length", fields.hop_length, 160, 1..=16_384)?,
            min_samples: 0,
            max_seconds: seconds(max_seconds)?,
            cut: AudioCut::Windows(AudioWindows {
                fft: within("n_fft", fields.n_fft, 400, 1..=65_536)?,
                window,
                attention_window: within("n_window_infer", Some(n_window_infer), 400, window..=1 << 20)?,
            }),
        })
    }

    /// Returns the rule from a checkpoint's feature extractor, the audio configuration's `n_window`, and the limit, at most the feature
    /// extractor's.
    pub fn chunks(fields: &Fields, n_window: u64, max_seconds: u64) -> Result<Self, MediaError> {
        let rate = rate(fields)?;
        let filled = within("chunk_length", fields.chunk_length, 30, 1..=86_400)?;
        Ok(Self {
            rate,
            hop: within("hop_length", fields.hop_length, 160, 1..=16_384)?,
            min_samples: 0,
            max_seconds: seconds(max_seconds)?.min(filled),
            cut: AudioCut::Chunks(AudioChunks {
                fft: within("n_fft", fields.n_fft, 400, 1..=1024.min(rate))?,
                chunk: 2 * within("n_window", Some(n_window), 100, 1..=4096)?,
                filled: filled * rate,
            }),
        })
    }

    /// Returns the rule from Gemma 4's feature extractor, and the limit, which is half a minute at most.
    pub fn gemma4(fields: &Fields, max_seconds: u64) -> Result<Self, MediaError> {
        let rate = rate(fields)?;
        let (frames, hop) = Gemma4Frames::new(fields, rate)?;
        let max_seconds = seconds(max_seconds)?.min(GEMMA_4_SECONDS_MAX);
        Ok(Self { rate, hop, min_samples: 0, max_seconds, cut: AudioCut::Gemma4(frames) })
    }

    /// Returns the rule for clips of `frames` frames, and the limit, which is their length at most: Whisper.
    pub fn fixed(fields: &Fields, frames: u64, max_seconds: u64) -> Result<Self, MediaError> {
        let (rate, hop) = (rate(fields)?, within("hop_length", fields.hop_length, 160, 1..=16_384)?);
        let (samples, said) = (frames * hop, fields.chunk_length.unwrap_or(frames * hop / rate));
        // Half a transform is reflected at the ends of a clip.
        let fft = within("n_fft", fields.n_fft, 400, 1..=65_536.min(samples))?;
        if said.saturating_mul(rate) != samples {
            let why =
                format!("{said} seconds of {rate} samples are not the {frames} frames of {hop} that the encoder takes");
            return Err(MediaError::BadConfig { key: "chunk_length", why });
        }
        let cut = AudioCut::Fixed(FixedClip { fft, seconds: said });
        Ok(Self { rate, hop, min_samples: samples, max_seconds: seconds(max_seconds)?.min(said), cut })
    }

    /// Returns the rule for tokens of `samples` samples: Gemma 4 Unified.
    pub fn samples(fields: &Fields, samples: u64, max_seconds: u64) -> Result<Self, MediaError> {
        let said = fields.audio_samples_per_token.unwrap_or(samples);
        if said != samples {
            let why = format!("the feature extractor says {said}, the model {samples}");
            return Err(MediaError::BadConfig { key: "audio_samples_per_token, audio_embed_dim", why });
        }
        let (rate, max_seconds) = (rate(fields)?, seconds(max_seconds)?);
        Ok(Self { rate, hop: samples, min_samples: 0, max_seconds, cut: AudioCut::Samples(samples) })
    }

    /// Returns this rule with clips padded to the samples that the feature extractor names, or else to `default`.
    pub fn filled_up(self, fields: &Fields, default: u64) -> Result<Self, MediaError> {
        let min_samples = within("min_length", fields.min_length, default, 0..=self.rate)?;
        Ok(Self { min_samples, ..self })
    }

    /// Returns the source of the limit in seconds: the flag, or the model.
    pub fn limited_by(&self) -> &'static str {
        let own = match self.cut {
            AudioCut::Gemma4(_) => Some(GEMMA_4_SECONDS_MAX),
            AudioCut::Chunks(chunks) => Some(chunks.filled / self.rate),
            AudioCut::Fixed(clip) => Some(clip.seconds),
            AudioCut::Windows(_) | AudioCut::Samples(_) => None,
        };
        match own == Some(self.max_seconds) {
            true => "fixed by the model: send the audio in parts",
            false => Modality::Audio.flag(),
        }
    }

    /// Returns the samples of a window of a longer clip; none if clips are not cut into windows.
    pub fn window(&self) -> Option<u64> {
        matches!(self.cut, AudioCut::Fixed(_)).then_some(self.min_samples)
    }

    /// Returns the samples of an audio clip after padding.
    pub fn filled(&self, samples: u64) -> u64 {
        if samples == 0 { 0 } else { samples.max(self.min_samples) }
    }

    /// Returns the encoder's input for an audio clip of `samples` samples at the encoder's rate.
    pub fn shape(&self, samples: u64) -> Result<Shape, MediaError> {
        if samples > self.max_seconds * self.rate {
            return Err(MediaError::OverLimit {
                what: Modality::Audio.noun(),
                asked: samples.div_ceil(self.rate),
                limit: self.max_seconds,
                unit: "seconds",
                flag: self.limited_by(),
            });
        }
        let samples = self.filled(samples);
        let too_few = match &self.cut {
            AudioCut::Windows(AudioWindows { fft, .. }) | AudioCut::Fixed(FixedClip { fft, .. }) => samples <= fft / 2,
            AudioCut::Chunks(_) | AudioCut::Gemma4(_) | AudioCut::Samples(_) => false,
        };
        if too_few || self.tokens(self.frames(samples)) == 0 {
            let why = format!("{samples} samples are too few to transform: send a longer clip");
            return Err(MediaError::Malformed { what: Modality::Audio.noun(), why });
        }
        Ok(self.shape_of(samples))
    }

    /// Returns the shape of the most expensive legal audio clip: the longest.
    pub fn worst(&self) -> Shape {
        self.shape_of(self.filled(self.max_seconds * self.rate))
    }

    /// Returns the frames of the spectrogram of an audio clip of `samples` samples.
    pub fn frames(&self, samples: u64) -> u64 {
        match &self.cut {
            AudioCut::Windows(_) | AudioCut::Fixed(_) => samples / self.hop,
            AudioCut::Chunks(chunks) => samples.div_ceil(self.hop).min(chunks.filled / self.hop),
            // A frame counts if the sample behind it exists.
            AudioCut::Gemma4(frames) => match (samples + frames.frame / 2).checked_sub(frames.frame + 1) {
                Some(room) => room / self.hop + 1,
                None => 0,
            },
            AudioCut::Samples(each) => samples.div_ceil(*each),
        }
    }

    /// Returns the tokens of a spectrogram of `frames` frames.
    pub fn tokens(&self, frames: u64) -> u64 {
        match &self.cut {
            AudioCut::Windows(windows) => windows.tokens(frames),
            AudioCut::Chunks(_) => frames.div_ceil(2) / 2,
            AudioCut::Gemma4(_) => frames.div_ceil(2).div_ceil(2),
            AudioCut::Fixed(_) => frames.div_ceil(2),
            AudioCut::Samples(_) => frames,
        }
    }

    /// Returns the frames of an audio clip of `seconds` seconds, after padding.
    pub fn frames_in(&self, seconds: u64) -> u64 {
        self.frames(self.filled(seconds * self.rate))
    }

    /// Returns the frames of the longest audio clip.
    pub fn frames_max(&self) -> u64 {
        self.frames_in(self.max_seconds)
    }

    /// Returns this rule with audio clips of at most `tokens` tokens; none if a second has more.
    pub fn carried_in(self, tokens: u64) -> Option<Self> {
        let fits = |seconds: &u64| self.tokens(self.frames_in(*seconds)) <= tokens;
        let max_seconds = (1..=self.max_seconds).rev().find(fits)?;
        Some(Self { max_seconds, ..self })
    }

    fn shape_of(&self, samples: u64) -> Shape {
        let frames = self.frames(samples);
        let tokens = self.tokens(frames);
        // Rows of the layers, and rows that attend to each other. The convolutions run before the layers.
        let (rows, together) = match &self.cut {
            AudioCut::Windows(windows) => {
                (tokens, windows.attention_window / windows.window * halved_thrice(windows.window))
            }
            AudioCut::Chunks(chunks) => (frames.div_ceil(2), chunks.chunk / 2),
            AudioCut::Gemma4(_) | AudioCut::Fixed(_) | AudioCut::Samples(_) => (tokens, tokens),
        };
        let sequences = rows.div_ceil(together.max(1));
        Shape { modality: Modality::Audio, rows, sequences, longest: rows.min(together), tokens }
    }
}

impl AudioWindows {
    fn tokens(&self, frames: u64) -> u64 {
        let (whole, rest) = (frames / self.window, frames % self.window);
        whole * halved_thrice(self.window) + halved_thrice(rest)
    }
}

fn rate(fields: &Fields) -> Result<u64, MediaError> {
    within("sampling_rate", fields.sampling_rate, 16_000, 1000..=384_000)
}

fn seconds(max_seconds: u64) -> Result<u64, MediaError> {
    within("--max-audio-seconds", Some(max_seconds), 0, 1..=86_400)
}

/// Returns the frames of a window after three convolutions of stride two.
fn halved_thrice(frames: u64) -> u64 {
    frames.div_ceil(2).div_ceil(2).div_ceil(2)
}
