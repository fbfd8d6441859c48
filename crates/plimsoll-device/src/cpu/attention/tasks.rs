//! How a step's attention is cut into units, each one thread's.

use crate::device::{SeqSpan, StepInput};
use crate::kv::SPLIT_PAGES;

/// Query rows of one task: they share every load of keys and values.
const ROWS: usize = 16;
/// Queries of one rounded task, about: they share the conversion of keys and values.
const ROUNDED_QUERIES: usize = 384;
/// Query rows of one task, at most.
pub(super) const ROWS_MAX: usize = ROUNDED_QUERIES;

/// Rows of a task over `group` query heads.
pub(super) fn task_rows(rounded: bool, group: usize) -> usize {
    if rounded { (ROUNDED_QUERIES / group / ROWS * ROWS).max(ROWS) } else { ROWS }
}

/// The units of one step's attention, for every key/value head: sequence by sequence, in chunks of rows; or neighbouring sequences
/// that begin alike, as many as have the rows of one chunk.
pub(super) struct Tasks<'a> {
    step: &'a StepInput<'a>,
    kv_heads: usize,
    /// Query heads of each.
    pub(super) group: usize,
    /// Sequences from this row on are rounded.
    rounded_from: usize,
    /// Sequences that begin alike are computed together.
    joined: bool,
    pub(super) count: usize,
}

/// One unit.
#[derive(Clone, Copy)]
pub(super) struct Share<'a> {
    pub(super) seqs: &'a [SeqSpan],
    /// First row within the sequences' rows.
    pub(super) first: usize,
    pub(super) rows: usize,
    /// Key/value head.
    pub(super) head: usize,
}

impl<'a> Tasks<'a> {
    pub(super) fn new(step: &'a StepInput<'a>, kv_heads: usize, heads: usize, rounded_from: usize) -> Self {
        Self { step, kv_heads, group: heads / kv_heads, rounded_from, joined: true, count: 0 }.counted()
    }

    /// The same with every sequence by itself: more units, where joined ones leave threads without.
    pub(super) fn apart(self) -> Self {
        Self { joined: false, ..self }.counted()
    }

    fn counted(mut self) -> Self {
        let chunks = self.groups().map(|(seqs, rows)| rows.div_ceil(self.rows(&seqs[0])));
        self.count = self.kv_heads * chunks.sum::<usize>();
        self
    }

    pub(super) fn rounded(&self, seq: &SeqSpan) -> bool {
        seq.first_row >= self.rounded_from
    }

    pub(super) fn any_rounded(&self) -> bool {
        self.step.seqs.iter().any(|seq| self.rounded(seq))
    }

    /// Rows of a task among which are those of a sequence.
    fn rows(&self, seq: &SeqSpan) -> usize {
        task_rows(self.rounded(seq), self.group)
    }

    /// Sequences whose units are theirs together, and their rows.
    fn groups(&self) -> impl Iterator<Item = (&'a [SeqSpan], usize)> {
        let mut rest = self.step.seqs;
        std::iter::from_fn(move || {
            let first = rest.first()?;
            let (mut count, mut rows) = (1, first.rows);
            while let Some(next) = rest.get(count)
                && self.joined
                && rows + next.rows <= self.rows(first)
                && next.first_row == first.first_row + rows
                && self.begin_alike(first, next)
            {
                (count, rows) = (count + 1, rows + next.rows);
            }
            let group;
            (group, rest) = rest.split_at(count);
            Some((group, rows))
        })
    }

    /// Whether two sequences have the last page of the first split in common, and then the pages before it: it is worth it to compute
    /// them together.
    fn begin_alike(&self, a: &SeqSpan, b: &SeqSpan) -> bool {
        let page = |seq: &SeqSpan| self.step.pages[seq.pages_at..][..seq.pages].get(SPLIT_PAGES - 1);
        self.rounded(a) == self.rounded(b) && page(a).is_some() && page(a) == page(b)
    }

    pub(super) fn share(&self, task: usize) -> Share<'a> {
        let (mut chunk, head) = (task / self.kv_heads, task % self.kv_heads);
        for (seqs, all) in self.groups() {
            let rows = self.rows(&seqs[0]);
            let chunks = all.div_ceil(rows);
            if chunk < chunks {
                let first = chunk * rows;
                return Share { seqs, first, rows: rows.min(all - first), head };
            }
            chunk -= chunks;
        }
        unreachable!("task {task} of {}", self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequences of so many rows and pages; all those of more than 32 pages begin alike.
    fn spans(sequences: &[(usize, usize)]) -> (Vec<SeqSpan>, Vec<u32>) {
        let (mut pages, mut first_row) = (Vec::new(), 0);
        let span = |(rows, count): &(usize, usize)| {
            let pages_at = pages.len();
            pages.extend((0..*count).map(|page| if page < 32 && *count > 32 { page } else { pages_at + page } as u32));
            first_row += rows;
            SeqSpan {
                first_row: first_row - rows,
                rows: *rows,
                start: 3,
                pages_at,
                pages: *count,
                seen_from: 0,
                state: None,
            }
        };
        let seqs = sequences.iter().map(span).collect();
        (seqs, pages)
    }

    #[test]
    fn every_row_and_head_is_in_one_task() {
        let (seqs, pages) =
            spans(&[(1, 9), (16, 9), (1, 40), (2, 33), (14, 50), (1, 33), (33, 60), (1, 9), (1, 40), (1, 40)]);
        let step = StepInput { seqs: &seqs, pages: &pages, ..StepInput::default() };
        let tasks = Tasks::new(&step, 3, 6, 70);
        let groups: Vec<_> = tasks.groups().map(|(seqs, rows)| (seqs.len(), rows)).collect();
        assert_eq!(
            groups,
            [(1, 1), (1, 16), (2, 3), (2, 15), (1, 33), (1, 1), (1, 1), (1, 1)],
            "16 rows, one arithmetic"
        );
        let mut seen = vec![0; 71 * 3];
        for task in 0..tasks.count {
            let share = tasks.share(task);
            for row in 0..share.rows {
                seen[(share.seqs[0].first_row + share.first + row) * 3 + share.head] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n == 1));
        assert_eq!(tasks.apart().count, 3 * (seqs.len() + 2), "one of 33 rows is three units");
    }
}
