//! Attention of a row to the few rows before it, with a key for every distance: the audio encoder of Gemma 4.

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};
use crate::softmax::softmax_of;

/// The most rows that a row attends to, its own included.
pub const NEAR_MAX: usize = 64;

/// A row that attends, and what it attends to. All rows are equally wide: `heads` heads side by side.
#[derive(Clone, Copy, Debug)]
pub struct Near<'a> {
    /// The row's query.
    pub query: &'a [f32],
    /// Keys of the rows that it sees, its own last.
    pub keys: &'a [f32],
    /// Their values.
    pub values: &'a [f32],
    /// A key for every distance, from 0 on: as many as there are rows, or more.
    pub distances: &'a [f32],
    /// Heads of a row.
    pub heads: usize,
    /// Scores become `cap · tanh(score / cap)`.
    pub cap: f32,
}

/// out = Σ softmax(cap · tanh(q · (key + distance) / cap)) · value, head by head.
///
/// # Panics
/// When lengths do not fit, or there are no rows or more than [`NEAR_MAX`].
pub fn attend_near(isa: Isa, near: &Near<'_>, out: &mut [f32]) {
    let (width, seen) = (near.query.len(), near.keys.len());
    assert!(width > 0 && width.is_multiple_of(near.heads), "{} heads in {width} columns", near.heads);
    assert!(seen.is_multiple_of(width) && (1..=NEAR_MAX).contains(&(seen / width)), "{seen} values of keys");
    assert_eq!((near.values.len(), out.len()), (seen, width), "values as keys, an output as the query");
    assert!(near.distances.len() >= seen, "a key for every distance");
    isa.run(AttendNear { near, out });
}

struct AttendNear<'a> {
    near: &'a Near<'a>,
    out: &'a mut [f32],
}

impl Kernel for AttendNear<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Near { query, keys, values, distances, heads, cap } = *self.near;
        let (width, head) = (query.len(), query.len() / heads);
        let rows = keys.len() / width;
        for (first, out) in (0..width).step_by(head).zip(self.out.chunks_exact_mut(head)) {
            let query = &query[first..][..head];
            let mut scores = [0.0; NEAR_MAX];
            for (row, score) in scores[..rows].iter_mut().enumerate() {
                let key = &keys[row * width + first..][..head];
                let distance = &distances[(rows - 1 - row) * width + first..][..head];
                *score = dot(s, query, key) + dot(s, query, distance);
            }
            soften(s, &mut scores[..rows], cap);
            for (lane, out) in out.chunks_mut(LANES).enumerate() {
                let column = first + lane * LANES;
                let mut sum = s.zero();
                for (row, share) in scores[..rows].iter().enumerate() {
                    let value = s.load_part(&values[row * width + column..][..out.len()], 0.0);
                    sum = s.fma(s.splat(*share), value, sum);
                }
                s.store_part(out, sum);
            }
        }
    }
}

#[inline(always)]
fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.zero();
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        sum = s.fma(s.load_part(a, 0.0), s.load_part(b, 0.0), sum);
    }
    s.sum(sum)
}

/// Scores → shares.
#[inline(always)]
fn soften<S: Simd>(s: S, scores: &mut [f32], cap: f32) {
    let cap = s.splat(cap);
    for part in scores.chunks_mut(LANES) {
        let capped = s.mul(math::tanh(s, s.div(s.load_part(part, 0.0), cap)), cap);
        s.store_part(part, capped);
    }
    softmax_of(s, scores);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, bits, isas};

    /// The same in double precision.
    fn expected(near: &Near<'_>) -> Vec<f64> {
        let (width, head) = (near.query.len(), near.query.len() / near.heads);
        let rows = near.keys.len() / width;
        let dot = |first: usize, all: &[f32], row: usize| -> f64 {
            (first..first + head).map(|i| f64::from(near.query[i]) * f64::from(all[row * width + i])).sum()
        };
        let cap = f64::from(near.cap);
        let column = |column: usize| {
            let first = column / head * head;
            let score = |row: usize| dot(first, near.keys, row) + dot(first, near.distances, rows - 1 - row);
            let power = |row: usize| (cap * (score(row) / cap).tanh()).exp();
            let total: f64 = (0..rows).map(power).sum();
            (0..rows).map(|row| power(row) / total * f64::from(near.values[row * width + column])).sum()
        };
        (0..width).map(column).collect()
    }

    #[test]
    fn a_row_sees_what_is_near() {
        let mut random = Random::new(11);
        for (heads, head, rows) in [(1, 1, 1), (2, 12, 5), (3, 16, 12), (1, 40, 17), (2, 128, NEAR_MAX)] {
            let width = heads * head;
            let [query, keys, values, distances] = [width, rows * width, rows * width, (rows + 1) * width]
                .map(|len| random.floats(len).iter().map(|x| 2.0 * x).collect::<Vec<f32>>());
            let near = Near { query: &query, keys: &keys, values: &values, distances: &distances, heads, cap: 5.0 };
            let mut first: Option<Vec<f32>> = None;
            for isa in isas() {
                let mut out = vec![f32::NAN; width];
                attend_near(isa, &near, &mut out);
                for (found, expected) in out.iter().zip(expected(&near)) {
                    assert!((f64::from(*found) - expected).abs() < 1e-5, "{isa}: {found} instead of {expected}");
                }
                let first = first.get_or_insert_with(|| out.clone());
                assert_eq!(bits(&out), bits(first), "{isa}");
            }
        }
    }
}
