//! Rotary position embedding of the heads of one row. Which angles belong to a position is the model's business: cosines and
//! sines are given.

use crate::isa::{Isa, Kernel};
use crate::simd::{LANES, Simd};

/// Which elements of a head are rotated against each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Element i with element i + rotary / 2 (GPT-NeoX, Llama in Hugging Face's layout).
    Halves,
    /// Element 2i with element 2i + 1 (GPT-J, Llama in Meta's layout).
    Pairs,
}

/// Rotates every head of `row` (heads of `head_dim` floats): its first `2 · cos.len()` elements by the given angles, leaving
/// the rest. With (a, b) a pair: a' = fma(a, cos, −(b · sin)), b' = fma(b, cos, a · sin).
///
/// Panics if `cos` and `sin` differ in length, exceed half a head, or `row` is not whole heads.
pub fn rope(isa: Isa, style: RopeStyle, row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    assert_eq!(cos.len(), sin.len(), "cosines and sines");
    assert!(2 * cos.len() <= head_dim, "{} angles for heads of {head_dim}", cos.len());
    assert!(row.len().is_multiple_of(head_dim), "{} elements are no whole heads of {head_dim}", row.len());
    isa.run(Rope { style, row, head_dim, cos, sin });
}

struct Rope<'a> {
    style: RopeStyle,
    row: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rope<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.cos.len();
        let angles = self.cos.chunks(LANES).zip(self.sin.chunks(LANES));
        for head in self.row.chunks_exact_mut(self.head_dim) {
            let head = &mut head[..2 * half];
            for (index, (cos, sin)) in angles.clone().enumerate() {
                let (cos_all, sin_all) = (s.load_part(cos, 0.0), s.load_part(sin, 0.0));
                match self.style {
                    RopeStyle::Halves => {
                        let (a, b) = head.split_at_mut(half);
                        let a = &mut a[index * LANES..][..cos.len()];
                        let b = &mut b[index * LANES..][..cos.len()];
                        let (new_a, new_b) = rotate(s, s.load_part(a, 0.0), s.load_part(b, 0.0), cos_all, sin_all);
                        s.store_part(a, new_a);
                        s.store_part(b, new_b);
                    }
                    RopeStyle::Pairs => {
                        let pairs = &mut head[2 * index * LANES..][..2 * cos.len()];
                        let (low, high) = pairs.split_at_mut(pairs.len().min(LANES));
                        let [a, b] = s.unzip(s.load_part(low, 0.0), s.load_part(high, 0.0));
                        let (a, b) = rotate(s, a, b, cos_all, sin_all);
                        let [new_low, new_high] = s.zip(a, b);
                        s.store_part(low, new_low);
                        s.store_part(high, new_high);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn rotate<S: Simd>(s: S, a: S::F, b: S::F, cos: S::F, sin: S::F) -> (S::F, S::F) {
    let minus = s.sub(s.splat(-0.0), s.mul(b, sin));
    (s.fma(a, cos, minus), s.fma(b, cos, s.mul(a, sin)))
}
