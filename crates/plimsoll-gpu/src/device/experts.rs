//! A mixture of experts as dispatches: rows choose, choices are ordered by expert, and each block of them is multiplied by its matrix.
//!
//! The chosen experts are not known when dispatches are recorded. So there is a workgroup for every block that can occur, and a
//! table has the place of each matrix. One dispatch serves the matrices of one packing in one segment.

use plimsoll_device::{Buf, Device, DeviceError, Experts, GPU_EXPERT_ROWS, GpuExperts, LinearId, Mode};

use super::operations::{by_row, elements};
use super::{GpuDevice, at};
use crate::kernel::{GRID_WIDTH, Kernel, TILE_PANELS, TILE_ROWS, TILES_FROM};

/// The cut of choices into blocks: rows of a block, and the most blocks.
#[derive(Clone, Copy)]
struct Blocks {
    rows: u32,
    count: usize,
}

impl Blocks {
    fn new(choices: usize, experts: usize) -> Self {
        let rows = if choices < TILES_FROM * experts { GPU_EXPERT_ROWS } else { TILE_ROWS as usize };
        Self { rows: rows as u32, count: GpuExperts::most_blocks(choices, experts, rows) }
    }
}

impl GpuDevice {
    pub(super) fn run_experts(
        &mut self,
        spec: &Experts<'_>,
        [out, x, router]: [Buf; 3],
        mode: Mode,
    ) -> Result<(), DeviceError> {
        assert_eq!((router.rows, router.cols), (x.rows, spec.gate.len()), "a logit an expert");
        assert_eq!((out.rows, out.cols), (x.rows, x.cols), "experts keep the shape");
        let scope = self.mark();
        let width = self.weights.table().linear(spec.gate[0]).packing.out();
        let space = GpuExperts::take(self, spec, [x.rows, x.cols, width])?;
        let blocks = Blocks::new(x.rows * spec.top_k, spec.gate.len());
        assert!(blocks.count <= space.blocks.rows, "longer blocks are no more");
        self.choose(spec, router, &space, blocks);
        self.grouped(spec.gate, x, space.gate, spec.top_k, &space, blocks);
        if !spec.up.is_empty() {
            self.grouped(spec.up, x, space.up, spec.top_k, &space, blocks);
        }
        if spec.weighs_inputs {
            // Gate and up are linear: the weight times their result is their result of the weight times the input.
            let weights = space.weights.reshape(1);
            [space.gate, space.up]
                .into_iter()
                .filter(|made| made.rows > 0)
                .for_each(|made| self.scale_by(made, weights));
            self.clamp(space.weights, 1.0, 1.0);
        }
        if spec.up.is_empty() {
            self.activate(space.gate, spec.act);
        } else {
            self.glu(space.gate, space.up, spec.act);
        }
        self.grouped(spec.down, space.gate, space.down, 1, &space, blocks);
        let (count, add) = (out.rows * out.cols, u32::from(mode == Mode::Add));
        let (top, cols) = (spec.top_k as u32, out.cols as u32);
        let params = [at(out), at(space.down), at(space.weights), top, cols, count as u32, add];
        self.call(Kernel::Combine, elements(count), &params);
        self.release(scope);
        Ok(())
    }

    /// Computes each row's experts and weights, and orders all choices by expert.
    fn choose(&mut self, spec: &Experts<'_>, router: Buf, space: &GpuExperts, cut: Blocks) {
        let scoring = spec.scoring;
        let after = |vector| self.vector(vector) + 1;
        let correction = scoring.and_then(|scoring| scoring.correction).map_or(0, after);
        let scales = scoring.and_then(|scoring| scoring.expert_scales).map_or(0, after);
        let (rows, experts) = (router.rows as u32, router.cols as u32);
        let params = [
            at(router),
            rows,
            experts,
            spec.top_k as u32,
            at(space.ids),
            at(space.weights),
            u32::from(scoring.is_some_and(|scoring| scoring.sigmoid)),
            u32::from(spec.renormalise),
            correction,
            scoring.map_or(1, |scoring| scoring.groups as u32),
            scoring.map_or(1, |scoring| scoring.top_groups as u32),
            scales,
            scoring.map_or(1.0, |scoring| scoring.scale).to_bits(),
        ];
        let choices = router.rows * spec.top_k;
        self.call(Kernel::Route, by_row(router.rows), &params);
        if scales != 0 {
            self.call(Kernel::ScaleChoices, elements(choices), &params);
        }
        let [ids, order, blocks] = [space.ids, space.order, space.blocks].map(at);
        let params = [ids, choices as u32, experts, order, blocks, cut.count as u32, cut.rows];
        self.call(Kernel::Group, [u32::from(choices > 0), 1], &params);
    }

    /// Multiplies every choice's row of `x` by its expert's matrix; `share` choices have one row in common.
    fn grouped(&mut self, ids: &[LinearId], x: Buf, out: Buf, share: usize, space: &GpuExperts, cut: Blocks) {
        let linear = self.weights.table().linear(ids[0]);
        let (k, outputs) = (linear.packing.k(), linear.packing.out());
        assert_eq!((x.cols, out.cols), (k, outputs), "shape of '{}'", linear.name);
        let first = self.weights.segments().experts(ids[0]);
        let word = |device: &Self, i: usize| device.weights.segments().segment_word(first + i as u32);
        for (i, id) in ids.iter().enumerate() {
            let segment = word(self, i);
            // Neighbours mostly are in one segment, and there are few segments.
            if (0..i).rev().any(|before| word(self, before) == segment) {
                continue;
            }
            let packing = self.weights.table().linear(*id).packing;
            assert_eq!((packing.k(), packing.out()), (k, outputs), "experts have one shape");
            for first_block in (0..cut.count).step_by(GRID_WIDTH as usize) {
                let blocks = (cut.count - first_block).min(GRID_WIDTH as usize);
                let params = [
                    at(x),
                    at(out),
                    k as u32,
                    outputs as u32,
                    outputs as u32,
                    (packing.panel_bytes() / 4) as u32,
                    at(space.order),
                    at(space.blocks),
                    share as u32,
                    segment,
                    first,
                    first_block as u32,
                ];
                let (kernel, panels): (fn(_) -> _, _) = match cut.rows {
                    TILE_ROWS => (Kernel::ExpertTiles, TILE_PANELS),
                    _ => (Kernel::Experts, 1),
                };
                let groups = [packing.panels().div_ceil(panels) as u32, blocks as u32];
                self.call_on(kernel(packing.kind()), (segment & 0xffff) as usize, groups, &params);
            }
        }
    }
}
