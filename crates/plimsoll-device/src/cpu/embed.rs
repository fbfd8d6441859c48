//! Rows of tables: token embeddings, and interpolation between learned positions.

use plimsoll_kernels as kernels;

use super::CpuDevice;
use super::rows::for_rows;
use crate::device::{Blend, Buf, Device};
use crate::weights::{InFile, LinearId};

impl CpuDevice {
    /// [`Device::embed`].
    pub(super) fn run_embed(&mut self, out: Buf, table: LinearId, tokens: &[u32], scale: f32) {
        assert_eq!(out.rows, tokens.len(), "one token a row");
        self.unpack_rows(out, table, |row| (table, tokens[row] as usize), scale);
    }

    /// Writes a row of a table, in memory or in the model's files, times `scale` into each row of `out`. `place` returns the matrix of the
    /// table that has the row, and the row's number there; `part` is one of these matrices.
    pub(super) fn unpack_rows(
        &mut self,
        out: Buf,
        part: LinearId,
        place: impl Fn(usize) -> (LinearId, usize) + Sync,
        scale: f32,
    ) {
        let (isa, arena) = (self.isa, self.arena());
        if let Some(InFile { table, .. }) = self.weights.table().linear(part).in_file {
            // SAFETY: rows of `out` are inside the workspace, and each is written by one task.
            self.weights.look_up(&mut self.pool, (table, out.rows), place, |row| unsafe { arena.row(out, row) });
            if scale != 1.0 {
                self.scale_rows(out, &|_| scale);
            }
            return;
        }
        let weights = &self.weights;
        for_rows(&mut self.pool, out, |_, row| {
            // SAFETY: rows of `out` are inside the workspace, and each is written by one task.
            let out = unsafe { arena.row(out, row) };
            let (id, number) = place(row);
            let (linear, data) = weights.linear(id);
            kernels::unpack_row(&linear.packing, data, number, out);
            if scale != 1.0 {
                kernels::scale(isa, out, scale);
            }
        });
    }

    /// [`Device::add_blended`].
    pub(super) fn run_blended(&mut self, x: Buf, table: LinearId, blend: Blend<'_>) {
        let arena = self.arena();
        let (linear, data) = self.weights.linear(table);
        assert_eq!(x.cols, linear.packing.k(), "the table's width");
        for_rows(&mut self.pool, x, |thread, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task; scratch to one thread.
            let (x, scratch) = unsafe { (arena.row(x, row), arena.scratch(thread)) };
            let (sum, one) = scratch[..2 * x.len()].split_at_mut(x.len());
            sum.fill(0.0);
            for (from, share) in blend(row).into_iter().filter(|(_, share)| *share != 0.0) {
                kernels::unpack_row(&linear.packing, data, from as usize, one);
                sum.iter_mut().zip(&*one).for_each(|(sum, value)| *sum += value * share);
            }
            x.iter_mut().zip(&*sum).for_each(|(x, sum)| *x += sum);
        });
    }
}
