//! Work of the vector units between the matrix unit's products: rounding queries, softmax of scores, and checking sums.

use std::f32::consts::LOG2_E;

use super::super::tile::visible;
use super::TILE_BYTES;
use crate::bf16::round_any;
use crate::isa::Kernel;
use crate::math;
use crate::packing::BLOCK;
use crate::simd::{LANES, Simd};

/// Stores 32 numbers, rounded, as a line of a row tile: in every sixteen, the first eight are paired with the last eight.
///
/// # Safety
/// `line` is valid for writing 64 bytes.
#[inline(always)]
unsafe fn store_line<S: Simd>(s: S, line: *mut u8, numbers: [S::F; 2]) {
    let [first, second] = s.eights(round_any(s, numbers[0]), round_any(s, numbers[1]));
    // SAFETY: the caller's word.
    unsafe { s.store(line.cast(), s.upper_halves(first, second)) }
}

/// Writes one query, scaled, as a line of tiles.
pub(super) struct RoundQuery<'a> {
    pub(super) x: &'a [f32],
    pub(super) scale: f32,
    pub(super) groups: usize,
    pub(super) to: *mut u8,
}

impl Kernel for RoundQuery<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = s.splat(self.scale);
        for group in 0..self.groups {
            let x = &self.x[(group * BLOCK).min(self.x.len())..];
            let numbers = [s.load_part(x, 0.0), s.load_part(x.get(LANES..).unwrap_or(&[]), 0.0)];
            // SAFETY: a line of every group's tile.
            unsafe {
                let line = self.to.add(group * TILE_BYTES);
                store_line(s, line, [s.mul(numbers[0], scale), s.mul(numbers[1], scale)]);
            }
        }
    }
}

/// The softmax of one query's scores in the visible `span`. Writes exp(score − max), rounded, as a line of tiles, with zeros in the
/// rest of `blocks`. Returns the maximum and the sum before rounding; −∞ and 0 for an empty span.
pub(super) struct Softmax<'a> {
    pub(super) scores: &'a mut [f32],
    pub(super) softcap: Option<f32>,
    pub(super) span: (usize, usize),
    pub(super) blocks: std::ops::Range<usize>,
    pub(super) to: *mut u8,
}

impl Kernel for Softmax<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let Softmax { scores, softcap, span: (low, high), blocks, to } = self;
        let scores = scores.as_chunks_mut::<LANES>().0;
        let max = prepare(s, scores, softcap, (low, high));
        let own = if low < high { low / LANES..high.div_ceil(LANES) } else { 0..0 };
        let (scale, highest) = (s.splat(LOG2_E), s.splat(max));
        let mut sum = s.zero();
        for block in blocks {
            let mut numbers = [s.zero(); 2];
            for (half, p) in numbers.iter_mut().enumerate() {
                if own.contains(&(2 * block + half)) {
                    let less = s.sub(s.load_part(&scores[2 * block + half], 0.0), highest);
                    *p = math::exp2_rough(s, s.mul(less, scale));
                    sum = s.add(sum, *p);
                }
            }
            // SAFETY: a line of every block's tile.
            unsafe { store_line(s, to.add(block * TILE_BYTES), numbers) };
        }
        (max, s.sum(sum))
    }
}

/// Caps the visible scores and sets the others in the same vectors to −∞. Returns the greatest.
#[inline(always)]
fn prepare<S: Simd>(s: S, scores: &mut [[f32; LANES]], softcap: Option<f32>, (low, high): (usize, usize)) -> f32 {
    if low >= high {
        return f32::NEG_INFINITY;
    }
    let (first, last) = (low / LANES, (high - 1) / LANES);
    if let Some(cap) = softcap {
        for scores in &mut scores[first..=last] {
            let score = s.div(s.load_part(scores, 0.0), s.splat(cap));
            s.store_part(scores, s.mul(s.splat(cap), math::tanh(s, score)));
        }
    }
    for vector in [first, last] {
        let score = s.load_part(&scores[vector], 0.0);
        s.store_part(&mut scores[vector], visible(s, vector * LANES, low, high, score));
    }
    let mut best = s.splat(f32::NEG_INFINITY);
    for scores in &scores[first..=last] {
        best = s.max(s.load_part(scores, 0.0), best);
    }
    s.max_lane(best)
}

/// Copies sums and returns whether all of them are finite.
pub(super) struct CopyFinite<'a> {
    pub(super) sums: &'a [f32],
    pub(super) to: &'a mut [f32],
}

impl Kernel for CopyFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let mut worst = s.splat_i(0);
        for (sums, to) in self.sums.as_chunks::<LANES>().0.iter().zip(self.to.as_chunks_mut::<LANES>().0) {
            let sums = s.load_part(sums, 0.0);
            worst = s.max_i(worst, s.bits(s.abs(sums)));
            s.store_part(to, sums);
        }
        s.to_array(s.as_floats(worst)).iter().all(|worst| worst.is_finite())
    }
}
