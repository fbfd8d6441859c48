//! Linear layers on all cores: the input is quantized once, then tasks take panels of outputs and blocks of rows.
//!
//! How the work is cut has no influence on any result; it is cut so that there are a few tasks per thread to balance, with
//! rows enough in each to be worth its panels.

use plimsoll_kernels::{self as kernels, ActLayout, Acts, Input, Target, Weights};

use super::CpuDevice;
use crate::device::{Buf, Device, DeviceError, Mode};
use crate::weights::LinearId;

/// Input bytes of a task's rows, roughly; what stays in a cache while panels stream past is the kernels' business.
const INPUT_BLOCK_BYTES: usize = 1 << 20;
/// Rows that the kernels take together, at most.
const ROWS_TOGETHER: usize = 16;
/// Panels that stream side by side; a task has this many or a multiple.
pub(super) const PANELS_TOGETHER: usize = 4;
/// Tasks per thread: enough to balance when a neighbour takes a core for a moment.
pub(super) const TASKS_PER_THREAD: usize = 4;

impl CpuDevice {
    pub(super) fn run_linear(&mut self, x: Buf, layers: &[(LinearId, Buf)], mode: Mode) -> Result<(), DeviceError> {
        let scope = self.mark();
        let layout = self.weights.table().act_layout(x.rows, x.cols, layers.iter().map(|(id, _)| id));
        let at = self.memory.stack.take(layout.map_or(0, ActLayout::bytes))?;
        if let Some(layout) = layout {
            self.quantize(x, layout, at);
        }
        for (id, out) in layers {
            self.multiply(x, layout.map(|layout| (layout, at)), *id, *out, mode);
        }
        self.release(scope);
        Ok(())
    }

    fn quantize(&mut self, x: Buf, layout: ActLayout, at: usize) {
        let isa = self.isa;
        let bytes = layout.row_bytes();
        self.rows(x.rows, |arena, _, row| {
            // SAFETY: each row's input and its quantized copy are inside the workspace and belong to one task.
            let (x, acts) = unsafe { (arena.row(x, row), arena.bytes(at + row * bytes, bytes)) };
            kernels::quantize_acts(isa, layout, x, acts);
        });
    }

    fn multiply(&mut self, x: Buf, acts: Option<(ActLayout, usize)>, id: LinearId, out: Buf, mode: Mode) {
        let (isa, arena, threads) = (self.isa, self.arena(), self.pool.threads());
        let (linear, data) = self.weights.linear(id);
        let packing = &linear.packing;
        assert_eq!((out.rows, out.cols, x.cols), (x.rows, packing.out(), packing.k()), "shape of '{}'", linear.name);
        let bias = linear.bias.map(|bias| self.weights.vector(bias));
        let weights = Weights { packing, data, bias };
        let target_mode = match mode {
            Mode::Store => kernels::Mode::Store,
            Mode::Add => kernels::Mode::Add,
        };
        let acts = acts.filter(|_| packing.wants_acts());
        let row_bytes = acts.map_or(x.cols * size_of::<f32>(), |(layout, _)| layout.row_bytes());
        // SAFETY: the quantized copy was written before, and during this operation it is only read.
        let acts = acts.map(|(layout, at)| Acts::new(layout, unsafe { arena.bytes(at, layout.bytes()) }));
        let cut = Cut::new(x.rows, row_bytes, packing.panels(), threads);
        self.pool.run(cut.tasks(), &|_, task| {
            let (rows, panels) = cut.task(task);
            let input = match &acts {
                Some(acts) => Input::Acts(acts),
                // SAFETY: `x` is only read during this operation.
                None => Input::F32 { data: unsafe { arena.matrix(x) }, ld: x.cols },
            };
            let target = Target { ptr: arena.pointer(out), ld: out.cols, mode: target_mode };
            // SAFETY: `out` is inside the workspace and overlaps neither input; tasks have disjoint rows or panels.
            unsafe { kernels::linear(isa, &weights, input, panels, rows, target) };
        });
    }
}

/// Rows of a task, of so many bytes each.
pub(super) fn row_block(row_bytes: usize) -> usize {
    (INPUT_BLOCK_BYTES / row_bytes.max(1) / ROWS_TOGETHER * ROWS_TOGETHER).max(ROWS_TOGETHER)
}

/// How one matrix product is cut into tasks: blocks of rows times blocks of panels.
struct Cut {
    rows: usize,
    row_block: usize,
    panels: usize,
    panel_block: usize,
}

impl Cut {
    fn new(rows: usize, row_bytes: usize, panels: usize, threads: usize) -> Self {
        let row_block = row_block(row_bytes);
        let row_blocks = rows.div_ceil(row_block);
        let tasks = if threads == 1 { 1 } else { threads * TASKS_PER_THREAD };
        let panel_blocks = tasks.div_ceil(row_blocks).min(panels);
        let panel_block = panels.div_ceil(panel_blocks);
        // Unless threads would go without.
        let together = panels >= threads * PANELS_TOGETHER;
        let panel_block = if together { panel_block.next_multiple_of(PANELS_TOGETHER) } else { panel_block };
        Self { rows, row_block, panels, panel_block }
    }

    fn tasks(&self) -> usize {
        self.rows.div_ceil(self.row_block) * self.panels.div_ceil(self.panel_block)
    }

    /// Rows and panels of a task; consecutive tasks share their rows.
    fn task(&self, task: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let panel_blocks = self.panels.div_ceil(self.panel_block);
        let row = task / panel_blocks * self.row_block;
        let panel = task % panel_blocks * self.panel_block;
        (row..(row + self.row_block).min(self.rows), panel..(panel + self.panel_block).min(self.panels))
    }
}

#[cfg(test)]
mod tests {
    use super::Cut;

    #[test]
    fn a_cut_covers_every_row_and_panel_once() {
        for (rows, row_bytes, panels, threads) in
            [(1, 648, 36, 2), (512, 648, 3072, 2), (512, 30_000, 5, 8), (7, 100, 1, 4), (33, 1 << 20, 9, 1)]
        {
            let cut = Cut::new(rows, row_bytes, panels, threads);
            let mut seen = vec![0; rows * panels];
            for task in 0..cut.tasks() {
                let (r, p) = cut.task(task);
                for row in r {
                    p.clone().for_each(|panel| seen[row * panels + panel] += 1);
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{rows} rows, {panels} panels, {threads} threads");
        }
    }
}
