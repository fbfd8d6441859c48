//! Mixture of experts on all cores. Rows are copied to their experts, each expert's copies go through its matrices together, and each
//! row sums up its results.
//!
//! A copy's product has the same bits as the row's alone (a promise of `linear`), so grouping changes no bit. Tasks are (matrix, expert,
//! block of rows, block of panels). One row with eight experts keeps all cores busy, and so do five hundred rows with one expert.

use std::ops::Range;

use plimsoll_kernels::{self as kernels, ActLayout, Acts, Input, PANEL, Target};

use super::cut::{PANELS_TOGETHER, TASKS_PER_THREAD, row_block};
use super::rows::for_rows;
use super::{CpuDevice, kernel_activation};
use crate::device::{Buf, Device, DeviceError, Experts, Mode};
use crate::experts::{Inputs, Space};
use crate::weights::LinearId;

/// Copies per task of the passes between the products.
const COPIES_PER_TASK: usize = 4;

impl CpuDevice {
    pub(super) fn run_experts(
        &mut self,
        spec: &Experts<'_>,
        out: Buf,
        x: Buf,
        router: Buf,
        mode: Mode,
    ) -> Result<(), DeviceError> {
        assert_eq!((router.rows, router.cols), (x.rows, spec.gate.len()), "a logit an expert");
        assert_eq!((out.rows, out.cols), (x.rows, x.cols), "experts keep the shape");
        let scope = self.mark();
        let mut space = Space::begin(&mut self.memory.stack, self.weights.table(), spec, x)?;
        self.choose(spec, router, &space);
        let inputs = self.mark();
        space.take_inputs(&mut self.memory.stack)?;
        self.copy_to_experts(spec.top_k, x, &space);
        let products = [(spec.gate, space.gate), (spec.up, space.up)];
        self.grouped(&products[..if spec.up.is_empty() { 1 } else { 2 }], &space.inputs, &space);
        self.release(inputs);
        space.take_outputs(&mut self.memory.stack)?;
        if spec.weighs_inputs {
            self.weigh_inputs(&space);
        }
        self.activate(spec, &space);
        self.grouped(&[(spec.down, space.y)], &space.hidden, &space);
        self.collect(out, mode, &space);
        self.release(scope);
        Ok(())
    }

    /// Computes each row's experts and weights, and the place of every choice.
    fn choose(&mut self, spec: &Experts<'_>, router: Buf, space: &Space) {
        let (isa, top, arena) = (self.isa, spec.top_k, self.arena());
        let scoring = spec.scoring.map(|scoring| kernels::Scoring {
            sigmoid: scoring.sigmoid,
            correction: scoring.correction.map_or(&[], |id| self.weights.vector(id)),
            groups: scoring.groups,
            top_groups: scoring.top_groups,
            renormalise: spec.renormalise,
            scale: scoring.scale,
            expert_scales: scoring.expert_scales.map_or(&[], |id| self.weights.vector(id)),
        });
        for_rows(&mut self.pool, router, |_, row| {
            // SAFETY: rows are inside the workspace, the parts do not overlap, each row belongs to one task.
            unsafe {
                let ids = arena.words(space.ids + row * top * size_of::<u32>(), top);
                let (logits, weights) = (arena.row(router, row), arena.row(space.weights, row));
                match &scoring {
                    Some(scoring) => kernels::route_scored(isa, scoring, logits, ids, weights),
                    None => kernels::route(isa, logits, ids, weights, spec.renormalise),
                }
            }
        });
        // SAFETY: the parts do not overlap, and this is the only thread.
        let (ids, places, starts) = unsafe {
            let experts = spec.gate.len();
            (
                arena.words(space.ids, space.choices),
                arena.words(space.places, space.choices),
                arena.words(space.starts, experts + 1),
            )
        };
        kernels::group_by_expert(ids, starts, places);
    }

    /// Every row's copies at their places: quantized once, then copied.
    fn copy_to_experts(&mut self, top: usize, x: Buf, space: &Space) {
        let (isa, inputs) = (self.isa, space.inputs);
        // SAFETY: nothing writes the places from here on.
        let places: &[u32] = unsafe { self.arena().words(space.places, space.choices) };
        self.rows(x, |arena, _, row| {
            // SAFETY: inside the workspace; every choice has a place of its own, and a row's choices belong to one task.
            let x = unsafe { arena.row(x, row) };
            let (first, others) = places[row * top..][..top].split_first().expect("a row takes an expert");
            if let Some((layout, acts)) = inputs.acts {
                let row_bytes = layout.row_bytes();
                // SAFETY: as above.
                let copy = |place: &u32| unsafe { arena.bytes(acts + *place as usize * row_bytes, row_bytes) };
                let quantized = copy(first);
                kernels::quantize_acts(isa, layout, x, quantized);
                others.iter().for_each(|place| copy(place).copy_from_slice(quantized));
            }
            if let Some(floats) = inputs.floats {
                // SAFETY: as above.
                let copy = |place: &u32| unsafe { arena.row(floats, *place as usize) };
                std::iter::once(first).chain(others).for_each(|place| copy(place).copy_from_slice(x));
            }
        });
    }

    /// Multiplies each choice's weight onto the results of gate and up, instead of onto their input. Both are linear, so that is the same.
    /// The weight of the choice's own result becomes 1.
    fn weigh_inputs(&mut self, space: &Space) {
        let (isa, top) = (self.isa, space.weights.cols);
        // SAFETY: nothing writes the places from here on.
        let places: &[u32] = unsafe { self.arena().words(space.places, space.choices) };
        self.rows(space.weights, |arena, _, row| {
            // SAFETY: inside the workspace; every choice has a place of its own, and a row's choices belong to one task.
            let weights = unsafe { arena.row(space.weights, row) };
            for (weight, place) in weights.iter_mut().zip(&places[row * top..]) {
                for made in [space.gate, space.up].into_iter().filter(|made| made.cols > 0) {
                    // SAFETY: as above.
                    let made = unsafe { arena.row(made, *place as usize) };
                    kernels::scale(isa, made, *weight);
                }
                *weight = 1.0;
            }
        });
    }

    /// `gate = act(gate) * up`, or `act(gate)`, quantized for `down` if its weights take quantized input.
    fn activate(&mut self, spec: &Experts<'_>, space: &Space) {
        let (isa, act, arena) = (self.isa, kernel_activation(spec.act), self.arena());
        self.pool.run(space.choices.div_ceil(COPIES_PER_TASK), &|_, task| {
            let first = task * COPIES_PER_TASK;
            for place in first..(first + COPIES_PER_TASK).min(space.choices) {
                // SAFETY: inside the workspace, no overlap, each place belongs to one task.
                let (gate, up) = unsafe { (arena.row(space.gate, place), arena.row(space.up, place)) };
                match up.is_empty() {
                    true => kernels::activate(isa, act, gate),
                    false => kernels::glu(isa, act, gate, up),
                }
                if let Some((layout, acts)) = space.hidden.acts {
                    let row_bytes = layout.row_bytes();
                    // SAFETY: as above.
                    let quantized = unsafe { arena.bytes(acts + place * row_bytes, row_bytes) };
                    kernels::quantize_acts(isa, layout, gate, quantized);
                }
            }
        });
    }

    /// Multiplies each expert's copies by its matrix: one matrix per expert, or two over the same input.
    fn grouped(&mut self, products: &[(&[LinearId], Buf)], inputs: &Inputs, space: &Space) {
        let (isa, arena, threads) = (self.isa, self.arena(), self.pool.threads());
        let experts = products[0].0.len();
        let row_bytes = inputs.acts.map_or(inputs.cols * size_of::<f32>(), |(layout, _)| layout.row_bytes());
        let row_block = row_block(row_bytes);
        // SAFETY: the parts do not overlap; nothing writes them while tasks run, nor the inputs, which were written
        // before.
        let (starts, blocks, acts) = unsafe {
            let acts = |(layout, at): (ActLayout, usize)| Acts::new(layout, arena.bytes(at, layout.bytes()));
            (arena.words(space.starts, experts + 1), arena.words(space.blocks, experts + 1), inputs.acts.map(acts))
        };
        let cut = Cut::new(starts, blocks, row_block, products, threads);
        let weights = &self.weights;
        self.pool.run(cut.tasks(), &|_, task| {
            let Task { product, expert, rows, panels } = cut.task(task);
            let (ids, out) = products[product];
            let matrix = weights.matrix(ids[expert]);
            let packing = matrix.packing;
            let (shape, name) = ((packing.k(), packing.out()), &weights.table().linear(ids[expert]).name);
            assert_eq!(shape, (inputs.cols, out.cols), "shape of '{name}'");
            let target = Target { ptr: arena.pointer(out), ld: out.cols, mode: kernels::Mode::Store };
            // SAFETY: inputs are only read here; `out` is inside the workspace and overlaps none; tasks have disjoint rows or
            // panels.
            unsafe {
                let input = match (&acts, inputs.floats) {
                    (Some(acts), _) if packing.takes_acts() => Input::Acts(acts),
                    (_, Some(floats)) => Input::F32 { data: arena.matrix(floats), ld: floats.cols },
                    _ => unreachable!("inputs are taken for every kind of weight"),
                };
                kernels::linear(isa, &matrix, input, panels, rows, target);
            }
        });
    }

    /// Every row's results, weighted.
    fn collect(&mut self, out: Buf, mode: Mode, space: &Space) {
        let (isa, top) = (self.isa, space.weights.cols);
        let mode = match mode {
            Mode::Store => kernels::Mode::Store,
            Mode::Add => kernels::Mode::Add,
        };
        // SAFETY: nothing writes the places any more.
        let places: &[u32] = unsafe { self.arena().words(space.places, space.choices) };
        self.rows(out, |arena, _, row| {
            let places = &places[row * top..][..top];
            // SAFETY: inside the workspace; the results are only read, each row of `out` belongs to one task.
            unsafe {
                let weights = arena.row(space.weights, row);
                kernels::combine(isa, arena.row(out, row), arena.matrix(space.y), places, weights, mode);
            }
        });
    }
}

/// The cut of grouped products into tasks.
struct Cut<'a> {
    /// First place of each expert's copies, and the end.
    starts: &'a [u32],
    /// Blocks of rows before each expert's own, and the number of all blocks.
    blocks: &'a [u32],
    row_block: usize,
    products: usize,
    panels: usize,
    panel_block: usize,
}

/// One task.
struct Task {
    product: usize,
    expert: usize,
    rows: Range<usize>,
    panels: Range<usize>,
}

impl<'a> Cut<'a> {
    fn new(
        starts: &'a [u32],
        blocks: &'a mut [u32],
        row_block: usize,
        products: &[(&[LinearId], Buf)],
        threads: usize,
    ) -> Self {
        blocks[0] = 0;
        for (expert, copies) in starts.windows(2).enumerate() {
            blocks[expert + 1] = blocks[expert] + (copies[1] - copies[0]).div_ceil(row_block as u32);
        }
        let panels = products[0].1.cols.div_ceil(PANEL);
        let wanted = if threads == 1 { 1 } else { threads * TASKS_PER_THREAD };
        let row_tasks = products.len() * blocks[starts.len() - 1] as usize;
        let panel_block = panels.div_ceil(wanted.div_ceil(row_tasks.max(1)).min(panels));
        let panel_block = panel_block.next_multiple_of(PANELS_TOGETHER).min(panels);
        Self { starts, blocks, row_block, products: products.len(), panels, panel_block }
    }

    fn row_blocks(&self) -> usize {
        self.blocks[self.starts.len() - 1] as usize
    }

    fn tasks(&self) -> usize {
        self.products * self.row_blocks() * self.panels.div_ceil(self.panel_block)
    }

    /// Consecutive tasks share their expert.
    fn task(&self, task: usize) -> Task {
        let panel_blocks = self.panels.div_ceil(self.panel_block);
        let first_panel = task % panel_blocks * self.panel_block;
        let (product, block) = (task / panel_blocks / self.row_blocks(), task / panel_blocks % self.row_blocks());
        let expert = self.blocks.partition_point(|before| *before as usize <= block) - 1;
        let first = self.starts[expert] as usize + (block - self.blocks[expert] as usize) * self.row_block;
        let rows = first..(first + self.row_block).min(self.starts[expert + 1] as usize);
        let panels = first_panel..(first_panel + self.panel_block).min(self.panels);
        Task { product, expert, rows, panels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panels of weights that the tasks read. A kernel takes four panels at a time through all rows of its task, so each panel comes
    /// from memory once for each task.
    fn panels_read(counts: &[u32], cols: usize, row_bytes: usize, threads: usize) -> usize {
        let mut starts = vec![0];
        counts.iter().for_each(|count| starts.push(starts[starts.len() - 1] + count));
        let out = Buf { offset: 0, rows: starts[counts.len()] as usize, cols };
        let mut blocks = vec![0; counts.len() + 1];
        let cut = Cut::new(&starts, &mut blocks, row_block(row_bytes), &[(&[], out), (&[], out)], threads);
        (0..cut.tasks()).map(|task| cut.task(task).panels.len()).sum()
    }

    #[test]
    fn sixteen_streams_read_the_weights_of_each_chosen_expert_once() {
        // Qwen3-30B-A3B, Qwen3.5-35B-A3B, gpt-oss-20b: experts, experts a row, width, bytes of a quantized row of inputs.
        for (experts, top, width, hidden) in [(128, 8, 768, 2048), (256, 8, 512, 2048), (32, 4, 2880, 2880)] {
            let row_bytes = 2 * hidden + hidden / 32 * 20;
            let panels = usize::div_ceil(width, PANEL);
            for threads in [1, 2, 16, 64] {
                // All rows to the same experts, each to its own, and a mix; idle experts are not read.
                let same: Vec<u32> = (0..experts).map(|expert| if expert < top { 16 } else { 0 }).collect();
                let mut mixed = vec![0; experts];
                (0..16 * top).for_each(|choice| mixed[choice * choice * 7 % experts] += 1);
                let apart: Vec<u32> =
                    (0..experts).map(|expert| (16 * top).div_ceil(experts).min(1 + expert) as u32).collect();
                for counts in [same, mixed, apart] {
                    let chosen = counts.iter().filter(|count| **count > 0).count();
                    let read = panels_read(&counts, width, row_bytes, threads);
                    assert_eq!(read, 2 * chosen * panels, "{chosen} of {experts} experts, {threads} threads");
                }
            }
            // The rows of a prompt pass in blocks of a mebibyte of inputs. The weights are read once for each block.
            let block = row_block(row_bytes);
            assert!(block >= 16 * 8, "{block} rows together");
            assert_eq!(panels_read(&[block as u32 + 1], width, row_bytes, 2), 2 * 2 * panels);
        }
    }

    #[test]
    fn a_cut_covers_every_copy_and_panel_of_every_product_once() {
        // All rows to one expert, evenly, and ragged with idle experts.
        for (counts, cols, threads) in [
            (vec![0, 0, 700, 0], 100, 2),
            (vec![1; 8], 768, 16),
            (vec![0, 3, 0, 0, 65, 64, 1, 0], 33, 3),
            (vec![5], 16, 1),
            (vec![0, 0], 16, 2),
        ] {
            let mut starts = vec![0u32];
            counts.iter().for_each(|count| starts.push(starts[starts.len() - 1] + count));
            let copies = starts[counts.len()] as usize;
            let out = Buf { offset: 0, rows: copies, cols };
            let mut blocks = vec![0; counts.len() + 1];
            let cut = Cut::new(&starts, &mut blocks, 64, &[(&[], out), (&[], out)], threads);
            let panels = cols.div_ceil(PANEL);
            let mut seen = vec![0; 2 * copies * panels];
            for task in 0..cut.tasks() {
                let Task { product, expert, rows, panels: range } = cut.task(task);
                assert!(rows.start >= starts[expert] as usize && rows.end <= starts[expert + 1] as usize);
                for row in rows {
                    range.clone().for_each(|panel| seen[(product * copies + row) * panels + panel] += 1);
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{counts:?}");
        }
    }
}
