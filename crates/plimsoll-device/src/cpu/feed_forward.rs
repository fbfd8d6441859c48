//! Gated feed-forward layers. For bf16 rows the activation between the two products is written once, in the bf16 form that the second
//! product takes. Step by step it would be written twice in f32, read, multiplied, written, read and rounded, and it does not fit a
//! cache. Each of the other rows is multiplied by its gate and quantized in one pass.

use plimsoll_kernels::{self as kernels, Bf16Acts, Bf16Layout};

use super::arena::Arena;
use super::cut::Cut;
use super::linear::{Shared, next_shares};
use super::{CpuDevice, CpuWeights, kernel_activation};
use crate::device::ordered::Ordered;
use crate::device::{Activation, Buf, Device, DeviceError, FeedForward, Input, Mode};
use crate::weights::LinearId;

impl CpuDevice {
    pub(super) fn run_feed_forward(
        &mut self,
        layer: &FeedForward,
        input: Input,
        out: Buf,
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let FeedForward { gate, up, down, width, act } = *layer;
        let (x, layout) = (input.x, Bf16Layout { rows: bf16_rows, k: input.x.cols });
        let rounds = [gate, up, down].into_iter().all(|id| self.rounds(id));
        if [gate, up, down].into_iter().any(|id| self.order(id).is_some()) {
            return layer.by_steps(self, input, out, mode, bf16_rows);
        }
        // The bf16 input takes the place of a product that is not written.
        if bf16_rows > 0 && (!rounds || layout.bytes() > bf16_rows * width * size_of::<f32>()) {
            return layer.by_steps(self, input, out, mode, bf16_rows);
        }
        // The planner takes the same workspace in the same order.
        let scope = self.mark();
        let (gates, ups) = (self.temp(x.rows, width)?, self.temp(x.rows, width)?);
        let others = x.rows - bf16_rows;
        let (exact, exact_ups) = (gates.span(0, others), ups.span(0, others));
        if others > 0 {
            self.run_linear(input.span(0, others), &[(gate, exact), (up, exact_ups)], Mode::Store, 0)?;
        }
        let bf16_at = ups.span(others, bf16_rows).offset;
        if bf16_rows > 0 {
            self.round(input.span(others, bf16_rows), layout, bf16_at);
        }
        let (isa, kernel_act) = (self.isa, kernel_activation(act));
        let glu_row = |_: &CpuWeights, arena: &Arena, row: usize| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (gate, up) = unsafe { (arena.row(exact, row), arena.row(exact_ups, row)) };
            kernels::glu(isa, kernel_act, gate, up);
        };
        let inner = self.share(exact, bf16_rows, &[(down, out)], Some(&glu_row))?;
        if bf16_rows > 0 {
            self.multiply_gate([gate, up], act, (layout, bf16_at), &inner);
        }
        self.multiply_rows(gates, &inner, &[(down, out)], mode);
        self.release(scope);
        Ok(())
    }

    /// Computes activation(x · Gᵀ) · (x · Uᵀ) of bf16 rows, rounded to bf16.
    fn multiply_gate(&mut self, ids: [LinearId; 2], act: Activation, (input, at): (Bf16Layout, usize), inner: &Shared) {
        self.weights.multiplied(ids.into_iter());
        let (isa, arena, threads) = (self.isa, self.arena(), self.pool.threads());
        let matrices = ids.map(|id| self.weights.matrix(id));
        // SAFETY: it was written before, and during this operation it is only read.
        let acts = Bf16Acts::new(input, unsafe { arena.bytes(at, input.bytes()) });
        let cut = Cut::of(isa, matrices[0].packing, input.rows, input.k * size_of::<u16>(), threads);
        let act = kernel_activation(act);
        let next = next_shares(&self.weights, isa, input.rows, threads);
        let task = |_: usize, task: usize| {
            let Some((rows, panels)) = cut.task(task / cut.tasks(), task % cut.tasks()) else { return };
            let out = arena.at(inner.bf16_at);
            // SAFETY: the buffer is inside the workspace and nothing else uses it; tasks have disjoint rows or panels.
            unsafe { kernels::linear_glu(isa, matrices.each_ref(), act, &acts, panels, rows, out) };
        };
        self.pool.run_then(threads * cut.tasks(), &task, Some(&next));
    }
}
