//! Pooling: embeddings and scores from a sequence's hidden states.
//!
//! A pooled request decodes nothing and samples nothing. Its prompt is computed in the same steps as other requests,
//! and its result is collected row by row. Sums go from position to position, whatever the chunks, so the bits do not
//! depend on the other requests.

use crate::api::error::Failure;

/// How a sequence's hidden states become one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all positions' hidden states.
    Mean,
    /// The last position's hidden state.
    Last,
    /// The first position's hidden state.
    First,
    /// The classifier's scores.
    Score,
    /// The output of the model's dense layers; the model pools the hidden states itself.
    Dense,
}

impl Pooling {
    /// Whether every row of the prompt must be computed, so that the prefix cache is not used.
    pub(crate) fn needs_every_row(self) -> bool {
        matches!(self, Self::Mean | Self::First)
    }

    /// Whether the model returns the answer itself, in place of logits.
    pub(crate) fn of_model(self) -> bool {
        matches!(self, Self::Score | Self::Dense)
    }
}

/// The pooling of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embed {
    /// How the hidden states are pooled.
    pub pooling: Pooling,
    /// Where the second text of a pair begins: from there on tokens are of the second type.
    pub second_at: Option<u32>,
    /// Numbers of the answer; known once the request is checked against a model.
    pub(crate) size: u32,
}

impl Embed {
    /// One text's embedding.
    pub fn new(pooling: Pooling) -> Self {
        Self { pooling, second_at: None, size: 0 }
    }

    /// The score of a pair. The second text begins at `second_at`, if the model has token types.
    pub fn pair(second_at: Option<u32>) -> Self {
        Self { pooling: Pooling::Score, second_at, size: 0 }
    }
}

/// The pooled hidden state of one sequence, as collected so far. Its memory is reserved before the request is accepted.
#[derive(Debug)]
pub(crate) struct PooledRow {
    values: Vec<f32>,
    rows: usize,
}

impl PooledRow {
    /// Reserves `size` numbers. None without memory for them.
    pub fn reserve(size: u32) -> Option<Self> {
        let mut values = Vec::new();
        values.try_reserve_exact(size as usize).ok()?;
        Some(Self { values, rows: 0 })
    }

    /// Drops the collected values: the sequence starts over.
    pub fn clear(&mut self) {
        self.values.clear();
        self.rows = 0;
    }

    /// Adds the hidden state of the next position to a mean.
    pub fn add(&mut self, row: &[f32]) {
        self.rows += 1;
        if self.rows == 1 {
            self.set(row);
            return;
        }
        self.values.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }

    /// Replaces what was collected by this row.
    pub fn set(&mut self, row: &[f32]) {
        debug_assert!(row.len() <= self.values.capacity(), "room was reserved for it");
        self.values.clear();
        self.values.extend_from_slice(row);
    }

    /// Returns the answer.
    ///
    /// # Errors
    /// [`Failure::NonFinite`] if a value is not finite, or if there is none.
    pub fn finish(&mut self) -> Result<Vec<f32>, Failure> {
        if self.rows > 1 {
            let rows = self.rows as f32;
            self.values.iter_mut().for_each(|sum| *sum /= rows);
        }
        match self.values.iter().all(|x| x.is_finite()) && !self.values.is_empty() {
            true => Ok(std::mem::take(&mut self.values)),
            false => Err(Failure::NonFinite("the model's hidden states are not finite numbers".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_is_the_same_in_any_chunks_and_starts_over() {
        let rows = [[1.0, -2.0], [0.5, 4.0], [3.0, 1.0]];
        let mut pool = PooledRow::reserve(2).unwrap();
        pool.add(&rows[2]);
        pool.clear();
        rows.iter().for_each(|row| pool.add(row));
        assert_eq!(pool.finish().unwrap(), [1.5, 1.0]);
    }

    #[test]
    fn what_is_no_number_is_no_answer() {
        for row in [&[f32::NAN][..], &[f32::INFINITY], &[]] {
            let mut pool = PooledRow::reserve(1).unwrap();
            pool.set(row);
            assert!(pool.finish().is_err());
        }
    }
}
