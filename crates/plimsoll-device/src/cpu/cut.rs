//! The cut of one matrix product: into as many parts as there are threads, and each part into tasks.
//!
//! The same thread computes the same part of every operation if it is free in time, so it finds its results in its own
//! cache. Parts are groups of panels of outputs, each for all rows. With enough rows, every thread can as well read all
//! weights itself; parts are then groups of rows. A thread then multiplies the rows that it has made, and no
//! other thread needs its results.

use std::ops::Range;

use plimsoll_kernels::{Isa, Packing};

/// Input bytes of a task's rows, roughly. The kernels decide which of them stay in a cache while panels stream past.
const INPUT_BLOCK_BYTES: usize = 1 << 20;
/// Most rows that the kernels take together.
const ROWS_TOGETHER: usize = 16;
/// Panels that stream side by side; most tasks have this many or a multiple.
pub(super) const PANELS_TOGETHER: usize = 4;
/// Panels that the matrix unit multiplies side by side.
const PANELS_PAIRED: usize = 2;
/// Tasks per thread: enough to balance when another process takes a core for a moment.
pub(super) const TASKS_PER_THREAD: usize = 4;
/// Rows of a thread that pay for unpacking the weights itself, where the matrix unit multiplies one unpacked panel by all of them.
const ROWS_UNPACKED: usize = 256;
/// Products per byte of weights that pay for reading the weights itself, without the matrix unit. With 8-bit activations a core of
/// today's servers then reads 7 GB/s.
const PRODUCTS_PER_BYTE: usize = 25;

/// Returns the rows of each thread that pay for reading the whole matrix itself. The constant was measured with two threads; more
/// threads share the memory bandwidth.
fn rows_apart(isa: Isa, packing: &Packing, threads: usize) -> usize {
    let weights = (packing.out() * packing.k()).max(1);
    match isa {
        Isa::Amx => ROWS_UNPACKED,
        _ => {
            let of_two = (PRODUCTS_PER_BYTE * packing.bytes()).div_ceil(weights).next_multiple_of(ROWS_TOGETHER);
            (of_two * threads.div_ceil(2)).min(ROWS_UNPACKED)
        }
    }
}

/// Returns the rows of a task, of `row_bytes` bytes each.
pub(super) fn row_block(row_bytes: usize) -> usize {
    (INPUT_BLOCK_BYTES / row_bytes.max(1) / ROWS_TOGETHER * ROWS_TOGETHER).max(ROWS_TOGETHER)
}

/// The tasks of a product.
pub(super) struct Cut {
    rows: Parts,
    panels: Parts,
    /// Rows and panels of a task.
    row_block: usize,
    panel_block: usize,
}

impl Cut {
    /// Returns the cut for `threads` threads of a product of `rows` rows, of `row_bytes` bytes each, by a matrix.
    pub fn of(isa: Isa, packing: &Packing, rows: usize, row_bytes: usize, threads: usize) -> Self {
        let apart = threads > 1 && rows >= threads * rows_apart(isa, packing, threads);
        Self::new((rows, row_bytes), packing.panels(), threads, apart)
    }

    /// Returns the cut of a product by `panels` panels: by rows if `apart`, otherwise by panels.
    fn new((rows, row_bytes): (usize, usize), panels: usize, threads: usize, apart: bool) -> Self {
        let (row_parts, panel_parts) = if apart { (threads, 1) } else { (1, threads) };
        // With few panels, an equal share matters more than panels in pairs.
        let paired = if panels >= threads * PANELS_TOGETHER { PANELS_PAIRED } else { 1 };
        let rows = Parts { len: rows, unit: ROWS_TOGETHER, parts: row_parts };
        let panels = Parts { len: panels, unit: paired, parts: panel_parts };
        // Blocks are as equal as possible: panels are unpacked once for each block.
        let row_blocks = rows.most().div_ceil(row_block(row_bytes)).max(1);
        let row_block = rows.most().div_ceil(row_blocks).next_multiple_of(ROWS_TOGETHER);
        let panel_block = panels.most() / TASKS_PER_THREAD / PANELS_TOGETHER * PANELS_TOGETHER;
        Self { rows, panels, row_block: row_block.max(ROWS_TOGETHER), panel_block: panel_block.max(PANELS_TOGETHER) }
    }

    /// All panels of a part.
    pub fn panels(&self, part: usize) -> Range<usize> {
        self.panels.block(part, 0, self.panels.len)
    }

    fn panel_blocks(&self) -> usize {
        self.panels.most().div_ceil(self.panel_block)
    }

    /// Tasks of every part, even if some have no rows or panels.
    pub fn tasks(&self) -> usize {
        self.rows.most().div_ceil(self.row_block) * self.panel_blocks()
    }

    /// Returns the rows and panels of a part's task, or none if it has none; consecutive tasks share their rows.
    pub fn task(&self, part: usize, task: usize) -> Option<(Range<usize>, Range<usize>)> {
        let (row, panel) = (task / self.panel_blocks(), task % self.panel_blocks());
        let rows = self.rows.block(part, row, self.row_block);
        let panels = self.panels.block(part, panel, self.panel_block);
        (!rows.is_empty() && !panels.is_empty()).then_some((rows, panels))
    }
}

/// A length in parts as equal as its units allow. With one part, every thread gets all of it.
struct Parts {
    len: usize,
    unit: usize,
    parts: usize,
}

impl Parts {
    /// The length of the longest part.
    fn most(&self) -> usize {
        (self.len.div_ceil(self.unit).div_ceil(self.parts) * self.unit).min(self.len)
    }

    /// The `number`-th `block` of a part.
    fn block(&self, part: usize, number: usize, block: usize) -> Range<usize> {
        let units = self.len.div_ceil(self.unit);
        let part = if self.parts == 1 { 0 } else { part };
        let [start, end] = [part, part + 1].map(|part| (part * units / self.parts * self.unit).min(self.len));
        let first = (start + number * block).min(end);
        first..(first + block).min(end)
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::{Isa, PackKind, PackScales, Packing, QuantPacking};

    use super::{Cut, rows_apart};

    #[test]
    fn a_cut_covers_every_row_and_panel_once() {
        let products = [
            (1, 648, 36, 2),
            (32, 648, 36, 2),
            (47, 648, 36, 2),
            (512, 648, 3072, 2),
            (511, 30_000, 5, 8),
            (5000, 1152, 37, 16),
            (600, 1152, 1, 2),
            (7, 100, 1, 4),
            (4, 100, 12, 5),
            (33, 1 << 20, 9, 1),
            (2048, 3072, 36, 2),
            (0, 1152, 36, 2),
            (5, 1152, 0, 2),
        ];
        for ((rows, row_bytes, panels, threads), apart) in products.iter().flat_map(|p| [(*p, false), (*p, true)]) {
            let cut = Cut::new((rows, row_bytes), panels, threads, apart);
            let mut seen = vec![0; rows * panels];
            for task in 0..threads * cut.tasks() {
                let Some((r, p)) = cut.task(task / cut.tasks(), task % cut.tasks()) else { continue };
                let part = cut.panels(task / cut.tasks());
                assert!(part.start <= p.start && p.end <= part.end, "{p:?} of {part:?}");
                assert!(r.start % 16 == 0 && (r.end % 16 == 0 || r.end == rows), "{r:?} are tiles");
                for row in r {
                    p.clone().for_each(|panel| seen[row * panels + panel] += 1);
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{rows} rows, {panels} panels, {threads} threads, apart: {apart}");
        }
    }

    #[test]
    fn rows_are_apart_when_every_byte_of_the_weights_is_worth_its_reading() {
        let apart_of = |threads, isa, kind| rows_apart(isa, &Packing::new(kind, 1536, 576).unwrap(), threads);
        let apart = |isa, kind| apart_of(2, isa, kind);
        let quant = |bits, offset| {
            PackKind::Quant(QuantPacking { bits, group: 32, scales: PackScales::F16, zero: 0, offset, codebook: None })
        };
        assert_eq!(apart(Isa::Avx512, quant(4, true)), 16, "5 bits each");
        assert_eq!(apart(Isa::Avx2, quant(8, true)), 32);
        assert_eq!(apart(Isa::Avx512, PackKind::F32), 112);
        assert_eq!(apart(Isa::Amx, quant(4, true)), 256);
        assert_eq!([1, 4, 7, 64].map(|threads| apart_of(threads, Isa::Avx512, quant(4, true))), [16, 32, 64, 256]);
    }

    #[test]
    fn parts_are_as_equal_as_pairs_of_panels_allow() {
        let part = |cut: &Cut, part| -> usize {
            (0..cut.tasks()).filter_map(|task| cut.task(part, task)).map(|(_, panels)| panels.len()).sum()
        };
        let panels = |panels, threads| {
            let cut = Cut::new((4, 648), panels, threads, false);
            (0..threads).map(|thread| part(&cut, thread)).collect::<Vec<_>>()
        };
        assert_eq!(panels(36, 2), [18, 18]);
        assert_eq!(panels(37, 4), [8, 10, 10, 9]);
        assert_eq!(panels(36, 16).into_iter().max(), Some(3));
        assert_eq!(panels(5, 4), [1, 1, 1, 2]);
        assert_eq!(panels(2, 4), [0, 1, 0, 1]);
    }
}
