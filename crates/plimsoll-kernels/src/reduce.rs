//! Reductions over a long row, such as the logits of a vocabulary: deterministic, and the same on every instruction set.

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// The parts of log Σ eˣ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogSumExp {
    /// The greatest element.
    pub max: f32,
    /// max + ln Σ e^(x − max): subtract it from a logit for its log-probability.
    pub log_sum: f32,
}

/// The greatest element and log Σ eˣ. Panics if `x` is empty.
pub fn log_sum_exp(isa: Isa, x: &[f32]) -> LogSumExp {
    assert!(!x.is_empty(), "log-sum-exp of nothing");
    isa.run(LogSum { x })
}

/// x = e^(x − max) / Σ. Panics if `x` is empty.
pub fn softmax(isa: Isa, x: &mut [f32]) {
    assert!(!x.is_empty(), "softmax of nothing");
    isa.run(Softmax { x });
}

/// The lowest index of the greatest element; NaN is never the greatest. 0 if there is nothing but NaN and −∞. Panics if
/// `x` is empty.
pub fn argmax(isa: Isa, x: &[f32]) -> usize {
    assert!(!x.is_empty(), "argmax of nothing");
    let max = isa.run(Greatest { x });
    x.iter().position(|v| *v == max && max > f32::NEG_INFINITY).unwrap_or(0)
}

#[inline(always)]
fn greatest<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut best = s.splat(f32::NEG_INFINITY);
    for part in x.chunks(LANES) {
        best = s.max(s.load_part(part, f32::NEG_INFINITY), best);
    }
    s.max_lane(best)
}

/// Σ e^(x − max), 16 partial sums and a tree.
#[inline(always)]
fn exp_sum<S: Simd>(s: S, x: &[f32], max: f32) -> f32 {
    let mut sum = s.zero();
    for part in x.chunks(LANES) {
        let shifted = s.sub(s.load_part(part, f32::NEG_INFINITY), s.splat(max));
        sum = s.add(sum, math::exp(s, shifted));
    }
    s.sum(sum)
}

struct Greatest<'a> {
    x: &'a [f32],
}

impl Kernel for Greatest<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        greatest(s, self.x)
    }
}

struct LogSum<'a> {
    x: &'a [f32],
}

impl Kernel for LogSum<'_> {
    type Output = LogSumExp;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> LogSumExp {
        let max = greatest(s, self.x);
        let ln = s.to_array(math::ln(s, s.splat(exp_sum(s, self.x, max))))[0];
        LogSumExp { max, log_sum: max + ln }
    }
}

struct Softmax<'a> {
    x: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let max = greatest(s, self.x);
        let mut sum = s.zero();
        for part in self.x.chunks_mut(LANES) {
            let shifted = s.sub(s.load_part(part, f32::NEG_INFINITY), s.splat(max));
            let e = math::exp(s, shifted);
            sum = s.add(sum, e);
            s.store_part(part, e);
        }
        let factor = s.splat(1.0 / s.sum(sum));
        for part in self.x.chunks_mut(LANES) {
            let y = s.mul(s.load_part(part, 0.0), factor);
            s.store_part(part, y);
        }
    }
}
