//! The softmax of a row, such as the logits of a router: deterministic, and the same on every instruction set.

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// x = e^(x − max) / Σ. Panics if `x` is empty.
pub fn softmax(isa: Isa, x: &mut [f32]) {
    assert!(!x.is_empty(), "softmax of nothing");
    isa.run(Softmax { x });
}

#[inline(always)]
fn greatest<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut best = s.splat(f32::NEG_INFINITY);
    for part in x.chunks(LANES) {
        best = s.max(s.load_part(part, f32::NEG_INFINITY), best);
    }
    s.max_lane(best)
}

struct Softmax<'a> {
    x: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        softmax_of(s, self.x);
    }
}

/// The softmax as a part of another kernel.
#[inline(always)]
pub(crate) fn softmax_of<S: Simd>(s: S, x: &mut [f32]) {
    let max = greatest(s, x);
    let mut sum = s.zero();
    for part in x.chunks_mut(LANES) {
        let shifted = s.sub(s.load_part(part, f32::NEG_INFINITY), s.splat(max));
        let e = math::exp(s, shifted);
        sum = s.add(sum, e);
        s.store_part(part, e);
    }
    let factor = s.splat(1.0 / s.sum(sum));
    for part in x.chunks_mut(LANES) {
        let y = s.mul(s.load_part(part, 0.0), factor);
        s.store_part(part, y);
    }
}
