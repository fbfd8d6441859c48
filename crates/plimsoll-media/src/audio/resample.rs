//! From any rate to an encoder's: `rubato`'s synchronous resampler, block by block through a Fourier transform.
//!
//! An audio clip at the right rate keeps its samples. Others are off from another resampler's by what their filters differ in, which is
//! nothing in the band that both leave alone.

use std::fmt::Display;
use std::sync::atomic::AtomicBool;

use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler};

use super::{WHAT, check_wanted, malformed};
use crate::MediaError;
use crate::error::contained;

/// Samples of a block, at least: the longer, the closer to the half of the rate is what is kept.
const BLOCK: usize = 4096;

/// Samples that an audio clip of `samples` at `rate` has at another.
pub fn resampled_len(samples: u64, rate: u32, to: u32) -> u64 {
    (samples * u64::from(to)).div_ceil(u64::from(rate))
}

/// The same audio clip at another rate, unless `stop` is set meanwhile.
pub fn resample(samples: Vec<f32>, rate: u32, to: u32, stop: &AtomicBool) -> Result<Vec<f32>, MediaError> {
    if rate == to {
        return Ok(samples);
    }
    contained(WHAT, || by_blocks(&samples, rate, to, stop))
}

fn by_blocks(samples: &[f32], rate: u32, to: u32, stop: &AtomicBool) -> Result<Vec<f32>, MediaError> {
    // Of an even number of the shortest blocks there are: the middle of the filter is a sample on either side.
    let pair = 2 * (rate / common(rate, to)) as usize;
    let resampler = Fft::<f32>::new(rate as usize, to as usize, BLOCK.next_multiple_of(pair), 1, FixedSync::Both);
    let mut resampler = resampler.map_err(failed)?;
    let mut block = vec![0.0; resampler.input_frames_next()];
    let mut made = vec![0.0; resampler.output_frames_next()];
    let count = resampled_len(samples.len() as u64, rate, to) as usize;
    let (mut out, mut left) = (Vec::with_capacity(count), samples);
    let mut early = resampler.output_delay();
    while out.len() < count {
        check_wanted(stop)?;
        let (own, rest) = left.split_at(left.len().min(block.len()));
        block[..own.len()].copy_from_slice(own);
        block[own.len()..].fill(0.0);
        let (frames_in, frames_out) = (block.len(), made.len());
        let from = InterleavedSlice::new(&block, 1, frames_in).map_err(failed)?;
        let mut into = InterleavedSlice::new_mut(&mut made, 1, frames_out).map_err(failed)?;
        resampler.process_into_buffer(&from, &mut into, None).map_err(failed)?;
        out.extend(made[early..].iter().take(count - out.len()));
        (early, left) = (0, rest);
    }
    Ok(out)
}

/// The greatest number that divides both.
fn common(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common(b, a % b) }
}

fn failed(why: impl Display) -> MediaError {
    malformed(format!("it cannot be resampled: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(hertz: f64, rate: u32, samples: usize) -> Vec<f32> {
        (0..samples).map(|i| (std::f64::consts::TAU * hertz * i as f64 / f64::from(rate)).sin() as f32).collect()
    }

    fn resampled(samples: Vec<f32>, rate: u32) -> Vec<f32> {
        resample(samples, rate, 16_000, &AtomicBool::new(false)).unwrap()
    }

    #[test]
    fn nothing_is_made_without_a_waiting_request() {
        let outcome = resample(vec![0.0; 48_000], 48_000, 16_000, &AtomicBool::new(true));
        assert_eq!(outcome, Err(MediaError::Abandoned));
    }

    #[test]
    fn tones_keep_their_pitch_and_what_is_too_high_is_silent() {
        for rate in [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 191_999] {
            let samples = rate as usize / 4;
            let found = resampled(tone(1000.0, rate, samples), rate);
            assert_eq!(found.len() as u64, resampled_len(samples as u64, rate, 16_000));
            let expected = tone(1000.0, 16_000, found.len());
            // The filter rings at both ends of the tone. Worst at 8 kHz, with half the rate nearest to the tone: 4e-4
            // after 300 samples.
            let middle = 1000..found.len() - 1000;
            let worst = middle.clone().map(|i| (found[i] - expected[i]).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-4, "{rate}: off by {worst}");
            if rate > 20_000 {
                let high = resampled(tone(9_000.0, rate, samples), rate);
                let worst = middle.map(|i| high[i].abs()).fold(0.0, f32::max);
                assert!(worst < 1e-3, "{rate}: 9 kHz comes out as {worst}");
            }
        }
        let same = tone(440.0, 16_000, 777);
        assert_eq!(resampled(same.clone(), 16_000), same);
        assert_eq!(resampled(vec![0.5], 48_000).len(), 1);
    }
}
