//! Parameters of layers that look up n-grams of token ids.

use plimsoll_formats::HashedHead;

use crate::weights::{LinearId, VectorId};

/// The mapping of n-grams to rows of a table.
///
/// An n-gram ends at a row's token. Its hash is the xor of `token * factor` over its tokens, and head h of its order takes row
/// `first + hash % rows`. Where a token before the last one is `end`, that token and all before it count as `end`; so do tokens before
/// the sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ngrams {
    /// The layer's number among the layers that look up n-grams.
    pub layer: usize,
    /// The parts of the table, each with its first row.
    pub table: Box<[(usize, LinearId)]>,
    /// The factors, the last token's first.
    pub factors: Box<[u64]>,
    /// The heads, first those of n-grams of two tokens.
    pub heads: Box<[HashedHead]>,
    /// Heads of each order.
    pub per_order: usize,
    /// The token that ends a text: no n-gram reaches across it.
    pub end: u32,
}

impl Ngrams {
    /// Returns the number of tokens before a row's own that its longest n-gram reaches.
    pub fn before(&self) -> usize {
        self.factors.len() - 1
    }

    /// The part of the table that has a row, and the row within it.
    pub fn place(&self, row: usize) -> (LinearId, usize) {
        let part = self.table.partition_point(|(first, _)| *first <= row) - 1;
        let (first, id) = self.table[part];
        (id, row - first)
    }

    /// Writes the rows of all heads for a token; `before(i)` is the token i + 1 places before it.
    pub fn rows(&self, token: u32, before: impl Fn(usize) -> u32, rows: &mut [u32]) {
        let (mut hash, mut over) = (u64::from(token).wrapping_mul(self.factors[0]), false);
        let heads = self.heads.chunks_exact(self.per_order).zip(rows.chunks_exact_mut(self.per_order));
        for ((place, factor), (heads, rows)) in self.factors[1..].iter().enumerate().zip(heads) {
            let token = if over { self.end } else { before(place) };
            over |= token == self.end;
            hash ^= u64::from(token).wrapping_mul(*factor);
            for (row, head) in rows.iter_mut().zip(heads) {
                *row = (head.first + hash % head.rows) as u32;
            }
        }
    }
}

/// The convolution of a layer that looks up n-grams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramConv {
    /// The layer's number among the layers that look up n-grams.
    pub layer: usize,
    /// Channels, each convolved by itself.
    pub channels: usize,
    /// Weights: `taps` of channel 0 (the oldest input's first), of channel 1, …
    pub weight: VectorId,
    /// Inputs that the convolution sees, the row's own included.
    pub taps: usize,
    /// Rows from one input of the convolution to the next.
    pub dilation: usize,
}

impl NgramConv {
    /// Inputs before a row's own that the convolution reaches.
    pub fn history(&self) -> usize {
        (self.taps - 1) * self.dilation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_at_which_texts_end_hides_what_is_before_it() {
        let head = |first| HashedHead { first, rows: 1009 };
        let ngrams = Ngrams {
            layer: 0,
            table: Box::default(),
            factors: [3, 5, 7].into(),
            heads: [head(0), head(1009)].into(),
            per_order: 1,
            end: 9,
        };
        let rows = |before: [u32; 2]| {
            let mut rows = [0; 2];
            ngrams.rows(4, |place| before[place], &mut rows);
            rows
        };
        assert_eq!(rows([2, 6]), [12 ^ 10, 1009 + (12 ^ 10 ^ 42)]);
        assert_eq!(rows([2, 9]), [12 ^ 10, 1009 + (12 ^ 10 ^ 63)]);
        assert_eq!(rows([9, 6]), [12 ^ 45, 1009 + (12 ^ 45 ^ 63)], "what is before the end is not seen");
    }

    #[test]
    fn rows_are_found_in_parts_of_any_size() {
        let table = [(0, LinearId(4)), (5, LinearId(5)), (9, LinearId(6))].into();
        let (factors, heads) = (Box::default(), Box::default());
        let ngrams = Ngrams { layer: 0, table, factors, heads, per_order: 1, end: 0 };
        let places =
            [(0, LinearId(4), 0), (4, LinearId(4), 4), (5, LinearId(5), 0), (8, LinearId(5), 3), (11, LinearId(6), 2)];
        places.iter().for_each(|(row, id, within)| assert_eq!(ngrams.place(*row), (*id, *within)));
    }
}
