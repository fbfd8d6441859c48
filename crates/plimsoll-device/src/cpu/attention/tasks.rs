//! The cut of a step's attention into units; one thread computes a unit.

use plimsoll_kernels::SPLIT;

use crate::device::{SeqSpan, StepInput};
use crate::kv::SPLIT_PAGES;

/// With fewer units than this for each thread, cutting units into splits pays off.
pub(super) const UNITS_PER_THREAD: usize = 2;
/// Query rows of one task: they share every load of the KV cache.
const ROWS: usize = 16;
/// Queries of one bf16 task, about: they share the conversion of keys and values.
const BF16_QUERIES: usize = 384;
/// Query rows of one task, at most.
pub(super) const ROWS_MAX: usize = BF16_QUERIES;

/// Cost of reading a split's keys and values once for all rows of a unit, in rows.
const SPLIT_COST: usize = 16;

/// Rows of a task over `group` query heads.
pub(super) fn task_rows(bf16: bool, group: usize) -> usize {
    if bf16 { (BF16_QUERIES / group / ROWS * ROWS).max(ROWS) } else { ROWS }
}

/// The units of one step's attention, for every key/value head. They go sequence by sequence, in chunks of rows. Neighbouring sequences
/// with a common prefix share a unit, as many as have the rows of one chunk.
#[derive(Clone, Copy)]
pub(super) struct Tasks<'a> {
    step: &'a StepInput<'a>,
    kv_heads: usize,
    /// Query heads of each key/value head.
    pub(super) group: usize,
    /// Sequences from this row on are computed in bfloat16.
    bf16_from: usize,
    /// Whether sequences with a common prefix are computed together.
    joined: bool,
    /// Most positions before its own that a row attends to.
    window: Option<usize>,
    which: Which,
    pub(super) count: usize,
}

/// The units that belong to a [`Tasks`].
#[derive(Clone, Copy)]
enum Which {
    All,
    /// Units of more than this cost.
    Long(usize),
    /// Units of at most this cost.
    Short(usize),
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
    pub(super) fn new(
        step: &'a StepInput<'a>,
        kv_heads: usize,
        heads: usize,
        bf16_from: usize,
        window: Option<usize>,
    ) -> Self {
        let (group, which) = (heads / kv_heads, Which::All);
        Self { step, kv_heads, group, bf16_from, joined: true, window, which, count: 0 }.counted()
    }

    /// Returns the long units, then the short ones. A long unit costs more than half of one thread's share of the work: as a whole it would
    /// leave other threads idle. There are fewer than [`UNITS_PER_THREAD`] long units for each thread.
    pub(super) fn by_length(self, threads: usize) -> [Self; 2] {
        let all = self.groups().map(|(seqs, rows)| rows.div_ceil(self.rows(&seqs[0])) * self.cost(seqs, rows));
        let limit = self.kv_heads * all.sum::<usize>() / (UNITS_PER_THREAD * threads);
        [Which::Long(limit), Which::Short(limit)].map(|which| Self { which, ..self }.counted())
    }

    /// Returns the approximate cost of a unit. With several sequences, the longest one decides.
    fn cost(&self, seqs: &[SeqSpan], rows: usize) -> usize {
        let seen = seqs.iter().map(|seq| (seq.start + seq.rows).saturating_sub(seq.seen_from)).max().unwrap_or(0);
        // A window may begin within a split.
        let seen = seen.min(self.window.map_or(usize::MAX, |window| window + SPLIT));
        seen.div_ceil(SPLIT) * (SPLIT_COST + rows.min(self.rows(&seqs[0])))
    }

    /// Returns the tasks with every sequence by itself. That makes more units, where joined sequences leave threads without work.
    pub(super) fn apart(self) -> Self {
        Self { joined: false, ..self }.counted()
    }

    fn counted(self) -> Self {
        let chunks = self.groups().map(|(seqs, rows)| rows.div_ceil(self.rows(&seqs[0])));
        Self { count: self.kv_heads * chunks.sum::<usize>(), ..self }
    }

    pub(super) fn bf16(&self, seq: &SeqSpan) -> bool {
        seq.first_row >= self.bf16_from
    }

    pub(super) fn any_bf16(&self) -> bool {
        self.step.seqs.iter().any(|seq| self.bf16(seq))
    }

    /// Returns the rows of a task with rows of this sequence.
    fn rows(&self, seq: &SeqSpan) -> usize {
        task_rows(self.bf16(seq), self.group)
    }

    /// Returns groups of sequences that share their units, each with its number of rows.
    fn groups(&self) -> impl Iterator<Item = (&'a [SeqSpan], usize)> {
        let mut rest = self.step.seqs;
        let groups = std::iter::from_fn(move || {
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
        });
        groups.filter(move |(seqs, rows)| match self.which {
            Which::All => true,
            Which::Long(limit) => self.cost(seqs, *rows) > limit,
            Which::Short(limit) => self.cost(seqs, *rows) <= limit,
        })
    }

    /// Whether two sequences share the last page of the first split, and so all pages before it. Then it pays off to compute them together.
    fn begin_alike(&self, a: &SeqSpan, b: &SeqSpan) -> bool {
        let page = |seq: &SeqSpan| self.step.pages[seq.pages_at..][..seq.pages].get(SPLIT_PAGES - 1);
        self.bf16(a) == self.bf16(b) && page(a).is_some() && page(a) == page(b)
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

    /// Returns sequences of these (rows, pages); all sequences of more than 32 pages have a common prefix.
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
        let tasks = Tasks::new(&step, 3, 6, 70, None);
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
    #[test]
    fn units_that_would_keep_one_thread_busy_for_long_are_told_from_the_others() {
        let (mut seqs, pages) = spans(&[(1, 9), (1, 9), (16, 600), (1, 9), (40, 600)]);
        seqs[2].start = 8000;
        seqs[4].start = 8000;
        let step = StepInput { seqs: &seqs, pages: &pages, ..StepInput::default() };
        let counts = |window, threads| {
            let all = Tasks::new(&step, 3, 6, 60, window);
            let [long, short] = all.by_length(threads);
            assert_eq!(long.count + short.count, all.count);
            assert!(long.count < UNITS_PER_THREAD * threads);
            let rows = |tasks: Tasks<'_>| (0..tasks.count).map(|task| tasks.share(task).rows).sum::<usize>();
            assert_eq!(rows(long) + rows(short), 3 * 59, "each row is in one of them");
            (long.count, short.count)
        };
        // 40 exact rows are three units for each of three heads: four of 16 splits, three of one.
        assert_eq!(counts(None, 2), (0, 21), "one of four of a head is no half of two threads' share");
        assert_eq!(counts(None, 8), (12, 9));
        assert_eq!(counts(None, 1), (0, 21));
        // With this window no row sees more than two splits.
        assert_eq!(counts(Some(500), 4), (0, 21));
        assert_eq!(counts(Some(500), 8), (12, 9));
        assert_eq!(counts(Some(500), 64), (21, 0));
    }
}
