//! Normalisation of one row. Sums have 16 partial accumulators (element i in lane i mod 16) and then one fixed tree.

use crate::isa::{Isa, Kernel};
use crate::simd::{LANES, Simd};

/// out = x / √(mean(x²) + eps) · w, in this order: (x · (1 / √…)) · w. Panics if lengths differ.
pub fn rms_norm(isa: Isa, out: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    assert!(out.len() == x.len() && w.len() == x.len(), "lengths {} {} {}", out.len(), x.len(), w.len());
    isa.run(RmsNorm { out, x, w, eps });
}

/// out = (x − mean) / √(variance + eps) · w + b; `b` may be empty, for no bias. Panics if lengths differ.
pub fn layer_norm(isa: Isa, out: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
    assert!(out.len() == x.len() && w.len() == x.len(), "lengths {} {} {}", out.len(), x.len(), w.len());
    assert!(b.is_empty() || b.len() == x.len(), "{} biases for {} values", b.len(), x.len());
    isa.run(LayerNorm { out, x, w, b, eps });
}

/// Σ (x − shift)².
#[inline(always)]
pub(crate) fn sum_of_squares<S: Simd>(s: S, x: &[f32], shift: f32) -> f32 {
    let shift_all = s.splat(shift);
    let mut sum = s.zero();
    for part in x.chunks(LANES) {
        // Padding with the shift adds zeros.
        let d = s.sub(s.load_part(part, shift), shift_all);
        sum = s.fma(d, d, sum);
    }
    s.sum(sum)
}

struct RmsNorm<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    w: &'a [f32],
    eps: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mean = sum_of_squares(s, self.x, 0.0) / self.x.len() as f32;
        let factor = s.splat(1.0 / (mean + self.eps).sqrt());
        for ((out, x), w) in self.out.chunks_mut(LANES).zip(self.x.chunks(LANES)).zip(self.w.chunks(LANES)) {
            let y = s.mul(s.mul(s.load_part(x, 0.0), factor), s.load_part(w, 0.0));
            s.store_part(out, y);
        }
    }
}

struct LayerNorm<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    w: &'a [f32],
    b: &'a [f32],
    eps: f32,
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.x.len() as f32;
        let mut sum = s.zero();
        for part in self.x.chunks(LANES) {
            sum = s.add(sum, s.load_part(part, 0.0));
        }
        let mean = s.sum(sum) / n;
        let variance = sum_of_squares(s, self.x, mean) / n;
        let (mean, factor) = (s.splat(mean), s.splat(1.0 / (variance + self.eps).sqrt()));
        let rows = self.out.chunks_mut(LANES).zip(self.x.chunks(LANES)).zip(self.w.chunks(LANES));
        for (index, ((out, x), w)) in rows.enumerate() {
            let y = s.mul(s.sub(s.load_part(x, 0.0), mean), factor);
            let w = s.load_part(w, 0.0);
            let y = match self.b.get(index * LANES..) {
                Some(b) if !b.is_empty() => s.fma(y, w, s.load_part(b, 0.0)),
                _ => s.mul(y, w),
            };
            s.store_part(out, y);
        }
    }
}
