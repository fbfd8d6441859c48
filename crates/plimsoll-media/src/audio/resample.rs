//! Conversion from any sample rate to an encoder's: `rubato`'s synchronous resampler, block by block through a Fourier transform.
//!
//! An audio clip at the right rate keeps its samples. Resampled clips differ from another resampler's by the difference of the filters.
//! In the band that both filters pass, there is none.

use std::fmt::Display;
use std::sync::atomic::AtomicBool;

use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler};

use super::{WHAT, check_wanted, malformed};
use crate::MediaError;
use crate::error::contained;

/// Least samples of a block. In a longer block the pass band ends closer to half of the rate.
const BLOCK: usize = 4096;
/// Bytes of a resampler for each sample of its blocks: blocks, spectra, filter and the transforms' scratch.
const BLOCK_SAMPLE_BYTES: u64 = 128;

/// Returns the samples of an audio clip of `samples` at `rate` after conversion to rate `to`.
pub fn resampled_len(samples: u64, rate: u32, to: u32) -> u64 {
    (samples * u64::from(to)).div_ceil(u64::from(rate))
}

/// Converts an audio clip to another rate, unless `stop` is set meanwhile.
pub fn resample(samples: Vec<f32>, rate: u32, to: u32, stop: &AtomicBool) -> Result<Vec<f32>, MediaError> {
    if rate == to {
        return Ok(samples);
    }
    contained(WHAT, || by_blocks(&samples, rate, to, stop))
}

fn by_blocks(samples: &[f32], rate: u32, to: u32, stop: &AtomicBool) -> Result<Vec<f32>, MediaError> {
    let mut resampling = Resampling::new(rate, to)?;
    let mut out = Vec::with_capacity(resampled_len(samples.len() as u64, rate, to) as usize);
    for part in samples.chunks(resampling.block.len()) {
        check_wanted(stop)?;
        resampling.push(part, &mut out)?;
    }
    check_wanted(stop)?;
    resampling.finish(&mut out)?;
    Ok(out)
}

/// Returns the samples of a block: an even number of the shortest possible blocks, so that the middle of the filter is a sample at both
/// rates.
fn block(rate: u32, to: u32) -> usize {
    BLOCK.next_multiple_of(2 * (rate / common(rate, to)) as usize)
}

/// Returns the most bytes of the resampler for one rate: its transforms are as long as two blocks.
pub(super) fn resampler_bytes(rate: u32, to: u32) -> u64 {
    if rate == to { 0 } else { (block(rate, to) + block(to, rate)) as u64 * BLOCK_SAMPLE_BYTES }
}

/// A resampler of a clip that arrives in pieces.
pub(super) struct Resampling {
    rate: u32,
    to: u32,
    resampler: Fft<f32>,
    block: Vec<f32>,
    /// Samples in the block.
    filled: usize,
    made: Vec<f32>,
    /// Output samples that belong before the first one.
    early: usize,
    given: u64,
    taken: u64,
}

impl Resampling {
    pub fn new(rate: u32, to: u32) -> Result<Self, MediaError> {
        let resampler = Fft::<f32>::new(rate as usize, to as usize, block(rate, to), 1, FixedSync::Both);
        let resampler = resampler.map_err(failed)?;
        let (block, made) = (vec![0.0; resampler.input_frames_next()], vec![0.0; resampler.output_frames_next()]);
        let early = resampler.output_delay();
        Ok(Self { rate, to, resampler, block, filled: 0, made, early, given: 0, taken: 0 })
    }

    /// Takes samples, and appends the resampled ones.
    pub fn push(&mut self, mut samples: &[f32], out: &mut Vec<f32>) -> Result<(), MediaError> {
        self.given += samples.len() as u64;
        while !samples.is_empty() {
            let (own, rest) = samples.split_at(samples.len().min(self.block.len() - self.filled));
            self.block[self.filled..][..own.len()].copy_from_slice(own);
            (self.filled, samples) = (self.filled + own.len(), rest);
            if self.filled == self.block.len() {
                self.process(out)?;
            }
        }
        Ok(())
    }

    /// Appends the rest of a clip that has ended.
    pub fn finish(&mut self, out: &mut Vec<f32>) -> Result<(), MediaError> {
        while self.taken < resampled_len(self.given, self.rate, self.to) {
            self.block[self.filled..].fill(0.0);
            self.process(out)?;
        }
        Ok(())
    }

    fn process(&mut self, out: &mut Vec<f32>) -> Result<(), MediaError> {
        let (frames_in, frames_out) = (self.block.len(), self.made.len());
        let from = InterleavedSlice::new(&self.block, 1, frames_in).map_err(failed)?;
        let mut into = InterleavedSlice::new_mut(&mut self.made, 1, frames_out).map_err(failed)?;
        self.resampler.process_into_buffer(&from, &mut into, None).map_err(failed)?;
        let most = resampled_len(self.given, self.rate, self.to) - self.taken;
        let made = &self.made[self.early..];
        let made = &made[..made.len().min(usize::try_from(most).unwrap_or(usize::MAX))];
        out.extend_from_slice(made);
        (self.taken, self.early, self.filled) = (self.taken + made.len() as u64, 0, 0);
        Ok(())
    }
}

/// Returns the greatest common divisor.
fn common(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common(b, a % b) }
}

fn failed(why: impl Display) -> MediaError {
    malformed(format!("it cannot be resampled: {why}"))
}
