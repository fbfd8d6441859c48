//! Permutes inputs into the order of a matrix's columns.

use super::CpuDevice;
use super::rows::for_rows;
use crate::device::ordered::Ordered;
use crate::device::{Buf, DeviceError, Input, Mode};
use crate::weights::{LinearId, VectorId};

impl Ordered for CpuDevice {
    fn order(&self, id: LinearId) -> Option<VectorId> {
        self.weights.table().linear(id).order
    }

    fn permute(&mut self, out: Buf, x: Buf, order: VectorId) {
        assert_eq!((out.rows, out.cols), (x.rows, x.cols), "a permutation keeps the shape");
        let (arena, order) = (self.arena(), self.weights.vector(order));
        for_rows(&mut self.pool, out, |_, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (out, x) = unsafe { (arena.row(out, row), arena.row(x, row)) };
            // The indices are whole numbers below 2^24, exact in f32.
            out.iter_mut().zip(order).for_each(|(value, input)| *value = x[*input as usize]);
        });
    }

    fn in_order(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        self.run_linear(input, layers, mode, bf16_rows)
    }
}
