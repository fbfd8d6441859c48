//! Workspace and work of linear layers.

use super::PlanDevice;
use crate::device::ordered::Ordered;
use crate::device::{Buf, Device, DeviceError, Input, Mode};
use crate::weights::{LinearId, VectorId};

/// Most rows of a matrix product on a GPU: each of 65,535 workgroups takes four.
const GPU_ROWS_MAX: usize = 4 * 65_535;

impl Ordered for PlanDevice<'_> {
    fn order(&self, id: LinearId) -> Option<VectorId> {
        self.weights.linear(id).order
    }

    fn permute(&mut self, out: Buf, _x: Buf, _order: VectorId) {
        self.not_on_gpu("columns ordered by activation");
        self.work.flops += (out.rows * out.cols) as u64;
    }

    fn in_order(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        _mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let x = input.ready(self);
        self.rounds |=
            bf16_rows > 0 && layers.iter().any(|(id, _)| self.weights.rounds_rows(&self.weights.linear(*id).packing));
        if x.rows > GPU_ROWS_MAX {
            self.not_on_gpu("a matrix product of more than 262,140 rows");
        }
        let scope = self.mark();
        self.stack.take(self.weights.input_bytes(x.rows, x.cols, layers))?;
        self.calls.plain += layers.len();
        for (id, _) in layers {
            let packing = &self.weights.linear(*id).packing;
            self.work.flops += 2 * (x.rows * packing.out() * packing.k()) as u64;
            self.work.weight_bytes += packing.bytes() as u64;
        }
        self.release(scope);
        Ok(())
    }
}
