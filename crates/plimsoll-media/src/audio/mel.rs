//! The log-mel spectrogram of audio, as a feature extractor computes it: Whisper's (transformers, `feature_extraction_whisper.py`), also
//! for the Qwens, or Gemma 4's (`feature_extraction_gemma4.py`).
//!
//! Every audio clip is computed by itself: the values are the extractor's for a batch of one. In a batch the extractor pads shorter clips
//! with silence, so that their last frames would depend on the other clips.

use std::fmt;
use std::sync::Arc;

use rustfft::num_complex::Complex;
use rustfft::{Fft, FftPlannerScalar};

use crate::geometry::{AudioChunks, AudioCut, AudioRule, AudioWindows, FixedClip, Gemma4Frames};

/// Upper end of the mel bands, for every rate.
const HIGHEST_HZ: f64 = 8000.0;
/// Least power; silence is raised to it.
const FLOOR: f32 = 1e-10;
/// Range below the loudest value, in powers of ten. Weaker values are raised to its lower end.
const RANGE: f32 = 8.0;

/// The part of a spectrum that a band sums up.
#[derive(Clone, Debug, PartialEq)]
struct Band {
    first: usize,
    weights: Vec<f32>,
}

/// A feature extractor, ready to run.
///
/// Its transform is the scalar one, in double precision, so a spectrogram does not depend on the instruction set.
#[derive(Clone)]
pub struct Mel {
    rule: AudioRule,
    fft: Arc<dyn Fft<f64>>,
    window: Vec<f32>,
    bands: Vec<Band>,
}

impl fmt::Debug for Mel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mel").field("rule", &self.rule).field("bands", &self.bands()).finish()
    }
}

impl PartialEq for Mel {
    /// Transform and window follow from the rule.
    fn eq(&self, other: &Self) -> bool {
        (&self.rule, &self.bands) == (&other.rule, &other.bands)
    }
}

impl Mel {
    /// Returns an extractor of `bands` bands, with the transform that `rule` names.
    pub fn new(rule: &AudioRule, bands: usize) -> Self {
        let (n, window, bands) = match &rule.cut {
            AudioCut::Windows(AudioWindows { fft, .. })
            | AudioCut::Chunks(AudioChunks { fft, .. })
            | AudioCut::Fixed(FixedClip { fft, .. }) => (*fft, *fft, slaney(*fft as usize, rule.rate, bands)),
            AudioCut::Gemma4(whole) => (whole.fft, whole.frame, htk(whole, rule.rate, bands)),
            AudioCut::Samples(_) => (1, 0, Vec::new()),
        };
        let hann = |i: u64| (0.5 - 0.5 * (std::f64::consts::TAU * i as f64 / window as f64).cos()) as f32;
        Self {
            rule: rule.clone(),
            fft: FftPlannerScalar::new().plan_fft_forward(n as usize),
            window: (0..window).map(hann).collect(),
            bands,
        }
    }

    /// Returns the bands of a frame, or the samples of a frame without a spectrogram.
    pub fn bands(&self) -> usize {
        match self.rule.cut {
            AudioCut::Samples(samples) => samples as usize,
            _ => self.bands.len(),
        }
    }

    /// Returns the frames of an audio clip.
    pub fn frames(&self, samples: usize) -> usize {
        self.rule.frames(samples as u64) as usize
    }

    /// Writes the spectrogram of an audio clip at the extractor's rate, [frames, bands]. A clip needs at least one frame; Whisper's
    /// extractor needs more than `fft / 2` samples.
    ///
    /// # Panics
    /// When `out` has another length, or there are too few samples.
    pub fn spectrogram(&self, samples: &[f32], out: &mut [f32]) {
        assert_eq!(out.len(), self.frames(samples.len()) * self.bands(), "a value for every frame and band");
        match &self.rule.cut {
            AudioCut::Windows(AudioWindows { fft, .. }) | AudioCut::Fixed(FixedClip { fft, .. }) => {
                let before = *fft as usize / 2;
                assert!(samples.len() > before, "samples to reflect");
                let sample = |at: usize| samples[reflected(samples.len() - 1, at, before)];
                let loudest = self.logarithms(&sample, out);
                above(loudest, out);
            }
            AudioCut::Chunks(chunks) => {
                let (before, filled, hop) = (chunks.fft as usize / 2, chunks.filled as usize, self.rule.hop as usize);
                let sample = |at| samples.get(reflected(filled - 1, at, before)).copied().unwrap_or(0.0);
                let mut loudest = self.logarithms(&sample, out);
                // Frames behind the clip with a window that still reaches its end are dropped, but may be the loudest.
                let reached = (samples.len() + before).div_ceil(hop).min(filled / hop);
                let mut dropped = vec![0.0; self.bands()];
                for frame in self.frames(samples.len())..reached {
                    loudest = loudest.max(self.logarithms(&|at| sample(frame * hop + at), &mut dropped));
                }
                above(loudest, out);
            }
            AudioCut::Samples(_) => {
                out[..samples.len()].copy_from_slice(samples);
                out[samples.len()..].fill(0.0);
            }
            AudioCut::Gemma4(whole) => {
                let (before, scale) = (whole.frame as usize / 2, whole.scale as f32);
                let sample = |at: usize| at.checked_sub(before).map_or(0.0, |at| samples[at] * scale);
                self.transform(sample, out, |i, band, power| {
                    let value = (band.sum(|k| power(k).sqrt()) + whole.floor).ln();
                    let [mean, deviation] = whole.per_bin.as_ref().map_or([0.0, 1.0], |[m, d]| [m[i], d[i]]);
                    ((value - mean) / deviation) as f32
                });
            }
        }
    }

    /// Samples per second.
    pub(super) fn rate(&self) -> u32 {
        self.rule.rate as u32
    }

    /// Samples from one frame to the next.
    pub(super) fn hop(&self) -> usize {
        self.rule.hop as usize
    }

    /// Samples on either side of a frame's middle that its transform reads.
    pub(super) fn reach(&self) -> usize {
        self.fft.len() / 2
    }

    /// Fills `out` with the frames from `first` on of a clip of `samples` samples, each returned by `sample`. The values are those of
    /// [`Self::spectrogram`] before they are scaled by the loudest one. Returns the largest.
    pub(super) fn part(&self, samples: u64, first: u64, sample: impl Fn(u64) -> f32, out: &mut [f32]) -> f32 {
        let (last, before) = ((samples - 1) as usize, self.reach());
        let start = first as usize * self.hop();
        self.logarithms(&|at: usize| sample(reflected(last, start + at, before) as u64), out)
    }

    /// Scales such frames by the loudest value.
    pub(super) fn cut(loudest: f32, out: &mut [f32]) {
        above(loudest, out);
    }

    /// Fills `out` with the logarithms of the bands' powers. Returns the largest.
    fn logarithms(&self, sample: &dyn Fn(usize) -> f32, out: &mut [f32]) -> f32 {
        let mut loudest = f32::NEG_INFINITY;
        self.transform(sample, out, |_, band, power| {
            let value = f64::from((band.sum(power) as f32).max(FLOOR)).log10() as f32;
            loudest = loudest.max(value);
            value
        });
        loudest
    }

    /// Fills `out` for each frame with `value(band index, band, power by frequency)`. `sample(i)` is the clip with its padding, from the
    /// first frame's first sample.
    fn transform(
        &self,
        sample: impl Fn(usize) -> f32,
        out: &mut [f32],
        mut value: impl FnMut(usize, &Band, &dyn Fn(usize) -> f64) -> f32,
    ) {
        let (bands, hop) = (self.bands(), self.rule.hop as usize);
        let mut spectrum = vec![Complex::default(); self.fft.len()];
        let mut scratch = vec![Complex::default(); self.fft.get_inplace_scratch_len()];
        // Two frames go through one transform, as its real and its imaginary part.
        for (pair, out) in out.chunks_mut(2 * bands).enumerate() {
            spectrum.fill(Complex::default());
            for (i, (point, window)) in spectrum.iter_mut().zip(&self.window).enumerate() {
                let at = |frame: usize| f64::from(window * sample(frame * hop + i));
                *point = Complex::new(at(2 * pair), if out.len() > bands { at(2 * pair + 1) } else { 0.0 });
            }
            self.fft.process_with_scratch(&mut spectrum, &mut scratch);
            for (part, out) in out.chunks_exact_mut(bands).enumerate() {
                for (i, (band, out)) in self.bands.iter().zip(out).enumerate() {
                    *out = value(i, band, &|k| power(&spectrum, k, part));
                }
            }
        }
    }
}

impl Band {
    /// The sum of `of(k)` over frequencies k, weighted by the band.
    fn sum(&self, of: impl Fn(usize) -> f64) -> f64 {
        self.weights.iter().zip(self.first..).map(|(weight, k)| f64::from(*weight) * of(k)).sum()
    }
}

/// Raises values far below the loudest one, and scales all.
fn above(loudest: f32, out: &mut [f32]) {
    out.iter_mut().for_each(|value| *value = (value.max(loudest - RANGE) + 4.0) / 4.0);
}

/// Returns the index of the i-th sample of an audio clip that is continued by its mirror image, `before` samples on either side.
fn reflected(last: usize, i: usize, before: usize) -> usize {
    let at = i.abs_diff(before);
    if at > last { last.saturating_sub(at - last) } else { at }
}

/// Returns the power at frequency `k` of the signal in the real (0) or the imaginary (1) part.
fn power(spectrum: &[Complex<f64>], k: usize, part: usize) -> f64 {
    let (own, mirrored) = (spectrum[k], spectrum[(spectrum.len() - k) % spectrum.len()].conj());
    (if part == 0 { own + mirrored } else { own - mirrored }).norm_sqr() / 4.0
}

/// Returns the mel of a frequency on Slaney's scale: linear up to 1000 Hz, logarithmic above.
fn mel_of(hertz: f64) -> f64 {
    if hertz < 1000.0 { 3.0 * hertz / 200.0 } else { 15.0 + (hertz / 1000.0).ln() * (27.0 / 6.4_f64.ln()) }
}

fn hertz_of(mel: f64) -> f64 {
    if mel < 15.0 { 200.0 * mel / 3.0 } else { 1000.0 * ((mel - 15.0) * (6.4_f64.ln() / 27.0)).exp() }
}

/// Returns triangles of equal area, evenly spaced on Slaney's scale.
fn slaney(n: usize, rate: u64, bands: usize) -> Vec<Band> {
    let highest = mel_of(HIGHEST_HZ);
    let corner = |i: usize| hertz_of(highest * i as f64 / (bands + 1) as f64);
    triangles(n, rate, bands, corner, |[low, _, high]| 2.0 / (high - low))
}

/// Returns triangles of equal height, evenly spaced on HTK's scale.
fn htk(frames: &Gemma4Frames, rate: u64, bands: usize) -> Vec<Band> {
    let [lowest, highest] = frames.hertz.map(|hertz| 2595.0 * (1.0 + hertz / 700.0).log10());
    let corner = |i: usize| {
        let mel = lowest + (highest - lowest) * i as f64 / (bands + 1) as f64;
        700.0 * (10.0_f64.powf(mel / 2595.0) - 1.0)
    };
    triangles(frames.fft as usize, rate, bands, corner, |_| 1.0)
}

/// Returns triangles between every three neighbouring corners, each of height `height`.
fn triangles(
    n: usize,
    rate: u64,
    bands: usize,
    corner: impl Fn(usize) -> f64,
    height: impl Fn([f64; 3]) -> f64,
) -> Vec<Band> {
    let bins = n / 2 + 1;
    let bin = |k: usize| rate as f64 / 2.0 * k as f64 / (bins - 1) as f64;
    let band = |i: usize| {
        let corners = [corner(i), corner(i + 1), corner(i + 2)];
        let [low, middle, high] = corners;
        let weight = |k: usize| {
            let slope = ((bin(k) - low) / (middle - low)).min((high - bin(k)) / (high - middle)).max(0.0);
            (slope * height(corners)) as f32
        };
        let first = (0..bins).find(|k| weight(*k) > 0.0).unwrap_or(0);
        Band { first, weights: (first..bins).map(weight).take_while(|weight| *weight > 0.0).collect() }
    };
    (0..bands).map(band).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audio_is_padded_by_reflection() {
        let samples = [0.0, 1.0, 2.0, 3.0];
        let found: Vec<f32> = (0..8).map(|i| samples[reflected(3, i, 2)]).collect();
        assert_eq!(found, [2.0, 1.0, 0.0, 1.0, 2.0, 3.0, 2.0, 1.0]);
    }
}
