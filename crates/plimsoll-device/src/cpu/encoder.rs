//! Attention in encoders: within a sequence, or to a few preceding rows.

use plimsoll_kernels as kernels;

use super::CpuDevice;
use super::rows::for_rows;
use crate::device::{Attention, Buf, Device, DeviceError, Near, SeqSpan, StepInput};
use crate::kv::{PAGE_TOKENS, encoder_layout};
use crate::plan_device::{sequence_bytes, within};

impl CpuDevice {
    /// Attends within each sequence of an encoder's step.
    pub(super) fn run_within(
        &mut self,
        spec: &Attention,
        [out, q, k, v]: [Buf; 4],
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let scope = self.mark();
        let (layout, bytes) = within(spec, q, k, step);
        let offset = self.memory.stack.take(bytes)?;
        let place = self.in_workspace(offset, step.pages.len(), layout);
        self.store_kv(&place, None, k, v, step);
        self.attend(&place, spec, out, q, step);
        self.release(scope);
        Ok(())
    }

    /// Attends within one sequence of an encoder, given by its first row and its number of rows.
    pub(super) fn attend_sequence(
        &mut self,
        spec: &Attention,
        all: [Buf; 4],
        (first, rows): (usize, usize),
    ) -> Result<(), DeviceError> {
        let [out, q, k, v] = all.map(|all| all.span(first, rows));
        assert_eq!((q.cols, k.cols, v.cols), (out.cols, q.cols, k.cols), "as many heads of keys as of queries");
        let pages = k.rows.div_ceil(PAGE_TOKENS);
        let scope = self.mark();
        let [keys, list] = sequence_bytes(spec, k);
        let (keys, list) = (self.memory.stack.take(keys)?, self.memory.stack.take(list)?);
        // SAFETY: the workspace outlives this operation, and nothing else accesses these words.
        let list = unsafe { self.arena().words(list, pages) };
        (0..).zip(&mut *list).for_each(|(id, page)| *page = id);
        let seqs = [SeqSpan { first_row: 0, rows: k.rows, start: 0, pages_at: 0, pages, seen_from: 0, state: None }];
        let step = StepInput { seqs: &seqs, pages: list, ..StepInput::default() };
        let place = self.in_workspace(keys, pages, encoder_layout(spec.heads, k.cols / spec.heads));
        self.store_kv(&place, None, k, v, &step);
        self.attend(&place, spec, out, q, &step);
        self.release(scope);
        Ok(())
    }

    /// Attends from every row to itself and the rows before it, with a key for every distance.
    pub(super) fn run_near(
        &mut self,
        spec: &Near,
        out: Buf,
        [q, k, v]: [Buf; 3],
        distances: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) {
        let shape = |x: Buf| (x.rows, x.cols);
        assert_eq!([shape(q), shape(k), shape(v)], [shape(out); 3], "one shape");
        assert!(distances.rows >= spec.rows && distances.cols == q.cols, "a key for every distance");
        let (isa, arena) = (self.isa, self.arena());
        for (first, rows) in sequences {
            let [out, q, k, v] = [out, q, k, v].map(|all| all.span(first, rows));
            for_rows(&mut self.pool, out, |_, row| {
                let first = (row + 1).saturating_sub(spec.rows);
                let seen = |x: Buf| x.span(first, row + 1 - first);
                // SAFETY: all matrices are inside the workspace and do not overlap, each row of `out` belongs to one task, and nothing
                // writes the others.
                let (out, [query, keys, values, distances]) = unsafe {
                    let read = [q.span(row, 1), seen(k), seen(v), distances];
                    (arena.row(out, row), read.map(|x| arena.matrix(x)))
                };
                let near = kernels::Near { query, keys, values, distances, heads: spec.heads, cap: spec.cap };
                kernels::attend_near(isa, &near, out);
            });
        }
    }
}
