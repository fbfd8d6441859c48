//! The largest step of an encoder, which computes each sequence whole: how many rows each sequence has, and the step
//! itself. Planner and self-test share this code.

use plimsoll_device::{PAGE_TOKENS, SeqSpan, StepInput};

use crate::schedule::scheduler::StepLimits;

/// Rows of each sequence in the step that takes the most workspace. It has as many rows and sequences as the limits allow, none longer than
/// `context`. Rows are distributed so that their KV cache takes the most pages of any such step.
pub(crate) fn largest(limits: &StepLimits, context: usize) -> Vec<usize> {
    let seqs = limits.running.min(limits.rows).max(1);
    let mut rows = vec![1; seqs];
    let mut left = limits.rows.min(seqs * context) - seqs;
    // A first row opens a page, and so does every sixteenth after it; the remaining rows open none.
    let full = (context - 1) / PAGE_TOKENS * PAGE_TOKENS;
    for most in [full, context - 1] {
        for of in &mut rows {
            let more = (most + 1 - *of).min(left);
            *of += more;
            left -= more;
        }
    }
    rows
}

/// A step of whole sequences, each with a score wanted.
pub(crate) struct EncoderStep {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    seqs: Vec<SeqSpan>,
    pages: Vec<u32>,
    types: Vec<u32>,
    logit_rows: Vec<u32>,
}

impl EncoderStep {
    /// Sequences of these lengths.
    pub fn new(rows: &[usize]) -> Self {
        let (mut positions, mut seqs, mut pages) = (Vec::new(), Vec::new(), 0);
        for &rows in rows {
            let count = rows.div_ceil(PAGE_TOKENS);
            let first_row = positions.len();
            seqs.push(SeqSpan { first_row, rows, start: 0, pages_at: pages, pages: count, seen_from: 0, state: None });
            positions.extend(0..rows as u32);
            pages += count;
        }
        Self {
            tokens: vec![0; positions.len()],
            types: vec![0; positions.len()],
            pages: (0..pages as u32).collect(),
            logit_rows: seqs.iter().map(|seq| seq.first_row as u32).collect(),
            positions,
            seqs,
        }
    }

    /// The step in the device's layout.
    pub fn input(&self) -> StepInput<'_> {
        StepInput {
            tokens: &self.tokens,
            positions: &self.positions,
            seqs: &self.seqs,
            pages: &self.pages,
            types: &self.types,
            logit_rows: &self.logit_rows,
            pooled: true,
            ..StepInput::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most pages of any step, by trying all.
    fn brute(rows: usize, running: usize, context: usize) -> usize {
        // best[n] after some sequences: the most pages of n rows; a sequence may be left out.
        let mut best = vec![0; rows + 1];
        for _ in 0..running {
            for n in (1..=rows).rev() {
                let with = |own: usize| best[n - own] + own.div_ceil(PAGE_TOKENS);
                best[n] = (1..=n.min(context)).map(with).max().unwrap_or(0).max(best[n]);
            }
        }
        best[rows]
    }

    #[test]
    fn no_step_has_more_pages() {
        for (rows, running, context) in
            [(1, 1, 1), (64, 8, 20), (64, 64, 512), (100, 3, 33), (100, 3, 96), (40, 7, 16), (90, 4, 17), (90, 2, 40)]
        {
            let limits = StepLimits { rows, running, ..StepLimits::default() };
            let largest = largest(&limits, context);
            assert!(largest.iter().all(|own| (1..=context).contains(own)) && largest.len() <= running);
            assert_eq!(largest.iter().sum::<usize>(), rows.min(running.min(rows) * context));
            assert_eq!(
                EncoderStep::new(&largest).pages.len(),
                brute(rows, running, context),
                "{rows} rows, {running} of {context}"
            );
        }
    }
}
