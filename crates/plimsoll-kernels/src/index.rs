//! The index of sparse attention: how much a block of positions matters to a row, and the choice of the greatest scores.

use crate::isa::{Isa, Kernel};
use crate::simd::{LANES, Simd};

/// Σ over heads of max(query · key, 0). `query` has the heads side by side, each as wide as the key. Panics if lengths do not fit.
pub fn index_score(isa: Isa, query: &[f32], key: &[f32]) -> f32 {
    assert!(!key.is_empty() && query.len().is_multiple_of(key.len()), "{} of {}", query.len(), key.len());
    isa.run(Score { query, key })
}

struct Score<'a> {
    query: &'a [f32],
    key: &'a [f32],
}

impl Kernel for Score<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut score = 0.0;
        for head in self.query.chunks_exact(self.key.len()) {
            let mut sum = s.zero();
            for (query, key) in head.chunks(LANES).zip(self.key.chunks(LANES)) {
                sum = s.fma(s.load_part(query, 0.0), s.load_part(key, 0.0), sum);
            }
            let product = s.sum(sum);
            // NaN counts as 0.
            score += if product > 0.0 { product } else { 0.0 };
        }
        score
    }
}

/// Keeps the greatest of the scores that it is offered, in a min-heap in the caller's buffers. Ids ascend; of equal scores the earlier
/// ids stay.
pub struct Best<'a> {
    scores: &'a mut [f32],
    ids: &'a mut [u32],
    count: usize,
}

impl<'a> Best<'a> {
    /// None yet; at most as many as there is room for. Panics if there is not as much room for scores as for ids.
    pub fn new(scores: &'a mut [f32], ids: &'a mut [u32]) -> Self {
        assert_eq!(scores.len(), ids.len(), "a score an id");
        Self { scores, ids, count: 0 }
    }

    /// The next one; ids ascend.
    pub fn offer(&mut self, id: u32, score: f32) {
        if self.count < self.ids.len() {
            (self.scores[self.count], self.ids[self.count]) = (score, id);
            self.count += 1;
            self.rise(self.count - 1);
        } else if self.count > 0 && score > self.scores[0] {
            (self.scores[0], self.ids[0]) = (score, id);
            self.sink();
        }
    }

    /// Their ids, ascending.
    pub fn into_ids(self) -> &'a mut [u32] {
        let ids = &mut self.ids[..self.count];
        ids.sort_unstable();
        ids
    }

    /// Whether place `a` goes before place `b`.
    fn worse(&self, a: usize, b: usize) -> bool {
        self.scores[a] < self.scores[b] || self.scores[a] == self.scores[b] && self.ids[a] > self.ids[b]
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.scores.swap(a, b);
        self.ids.swap(a, b);
    }

    fn rise(&mut self, mut at: usize) {
        while at > 0 && self.worse(at, (at - 1) / 2) {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
    }

    fn sink(&mut self) {
        let mut at = 0;
        loop {
            let children = (2 * at + 1..=2 * at + 2).filter(|child| *child < self.count);
            let least = children.fold(at, |least, child| if self.worse(child, least) { child } else { least });
            if least == at {
                return;
            }
            self.swap(at, least);
            at = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, isas};

    #[test]
    fn a_score_is_the_sum_of_positive_products() {
        let mut random = Random::new(3);
        for (heads, width) in [(1, 16), (3, 20), (4, 33)] {
            let (query, key) = (random.floats(heads * width), random.floats(width));
            let product = |head: &[f32]| head.iter().zip(&key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let expected: f64 = query.chunks(width).map(product).map(|product| product.max(0.0)).sum();
            let portable = index_score(Isa::Portable, &query, &key);
            assert!((f64::from(portable) - expected).abs() < 1e-4, "{portable} instead of {expected}");
            for isa in isas() {
                assert_eq!(index_score(isa, &query, &key).to_bits(), portable.to_bits(), "{isa}");
            }
        }
    }

    #[test]
    fn the_greatest_scores_are_chosen_and_of_equal_ones_the_first() {
        let best = |scores: &[f32], most: usize| {
            let (mut room, mut ids) = (vec![0.0; most], vec![0; most]);
            let mut best = Best::new(&mut room, &mut ids);
            (0..).zip(scores).for_each(|(id, score)| best.offer(id, *score));
            best.into_ids().to_vec()
        };
        assert_eq!(best(&[1.0, 0.0, 3.0, 2.0, 3.0, 0.0], 3), [2, 3, 4]);
        assert_eq!(best(&[0.0, 0.0, 0.0, 0.0], 2), [0, 1]);
        assert_eq!(best(&[1.0, 2.0, 1.0, 2.0, 1.0], 4), [0, 1, 2, 3]);
        assert_eq!(best(&[5.0], 4), [0]);
        let mut random = Random::new(9);
        let scores: Vec<f32> = random.floats(500).iter().map(|score| (score * 20.0).round()).collect();
        let mut expected: Vec<u32> = (0..500).collect();
        expected.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
        expected.truncate(37);
        expected.sort_unstable();
        assert_eq!(best(&scores, 37), expected);
    }
}
