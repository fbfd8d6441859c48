//! Operations that compute each row by itself, and the division of rows among threads.

use plimsoll_kernels as kernels;

use super::arena::Arena;
use super::{CpuDevice, kernel_activation};
use crate::device::{Activation, Buf, Unfold};
use crate::pool::ThreadPool;
use crate::weights::VectorId;

/// Elements of small operations per task, about: with fewer, another thread costs more than it saves.
const ELEMENTS_PER_TASK: usize = 4096;
/// Most rows of small operations per task.
const ROWS_PER_TASK: usize = 16;

impl CpuDevice {
    /// Writes the cosines and sines of every row: of the position times the frequency. `place` returns a row's place, once for the row;
    /// `position` returns the position for a frequency's index.
    pub(super) fn angles<P>(
        &mut self,
        out: Buf,
        inv_freq: VectorId,
        scale: f32,
        place: impl Fn(usize) -> P + Sync,
        position: impl Fn(&P, usize) -> f32 + Sync,
    ) {
        let arena = self.arena();
        let inv_freq = self.weights.vector(inv_freq);
        let half = inv_freq.len();
        assert_eq!(out.cols, 2 * half, "cosines and sines");
        for_rows(&mut self.pool, out, |_, row| {
            // SAFETY: rows of `out` are inside the workspace, and each is written by one task.
            let (cos, sin) = unsafe { arena.row(out, row) }.split_at_mut(half);
            let place = place(row);
            for (i, freq) in inv_freq.iter().enumerate() {
                [cos[i], sin[i]] = cos_sin(position(&place, i), *freq, scale);
            }
        });
    }

    /// Computes every row of `out` by `norm` from the row of `x` and some vectors; `out` may be `x`.
    pub(super) fn norm_rows<const N: usize>(
        &mut self,
        out: Buf,
        x: Buf,
        vectors: [VectorId; N],
        norm: impl Fn(&mut [f32], &[f32], [&[f32]; N]) + Sync,
    ) {
        let arena = self.arena();
        let vectors = vectors.map(|id| self.weights.vector(id));
        for_rows(&mut self.pool, x, |thread, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task; scratch to one thread. What is written where it was
            // read is read from a copy.
            unsafe {
                let mut from = arena.row(x, row);
                if out.offset == x.offset {
                    let copy = &mut arena.scratch(thread)[..x.cols];
                    copy.copy_from_slice(from);
                    from = copy;
                }
                norm(arena.row(out, row), from, vectors);
            }
        });
    }

    /// `gate = act(gate) * up`: exactly for the first `exact` rows, approximately for the others.
    pub(super) fn run_glu(&mut self, gate: Buf, up: Buf, act: Activation, exact: usize) {
        assert_eq!((gate.rows, gate.cols), (up.rows, up.cols), "gate and up have one shape");
        let (isa, act) = (self.isa, kernel_activation(act));
        self.rows(gate, |arena, _, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (gate, up) = unsafe { (arena.row(gate, row), arena.row(up, row)) };
            let glu = if row < exact { kernels::glu } else { kernels::glu_rough };
            glu(isa, act, gate, up);
        });
    }

    /// `x[r] *= by[r]`.
    pub(super) fn run_scale_by(&mut self, x: Buf, by: Buf) {
        assert_eq!((by.rows, by.cols), (x.rows, 1), "one factor a row");
        let isa = self.isa;
        self.rows(x, |arena, _, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task, nothing writes `by`.
            let (x, by) = unsafe { (arena.row(x, row), arena.matrix(by)[row]) };
            kernels::scale(isa, x, by);
        });
    }

    pub(super) fn run_unfold(&mut self, out: Buf, x: Buf, spec: &Unfold) {
        let Unfold { inner, taps: [outer_taps, inner_taps], step, pad } = *spec;
        let (windows, taps) = (spec.windows(), outer_taps * inner_taps);
        assert!(
            x.rows.is_multiple_of(inner) && out.rows.is_multiple_of(windows),
            "whole lines of points and of windows"
        );
        assert_eq!(out.cols, x.cols * taps, "a column for every channel and tap");
        let outer = x.rows / inner;
        self.rows(out, |arena, _, row| {
            // SAFETY: both are inside the workspace and do not overlap, each row of `out` belongs to one task, nothing
            // writes `x`.
            let (out, points) = unsafe { (arena.row(out, row), arena.matrix(x)) };
            let corner = [row / windows * step[0], row % windows * step[1]];
            for tap in 0..taps {
                let [o, i] = [tap % outer_taps, tap / outer_taps];
                let at = [(corner[0] + o).checked_sub(pad[0]), (corner[1] + i).checked_sub(pad[1])];
                let columns = out[tap..].iter_mut().step_by(taps);
                match at {
                    [Some(o), Some(i)] if o < outer && i < inner => {
                        let point = &points[(o * inner + i) * x.cols..][..x.cols];
                        columns.zip(point).for_each(|(out, value)| *out = *value);
                    }
                    _ => columns.for_each(|out| *out = 0.0),
                }
            }
        });
    }

    pub(super) fn run_keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf {
        assert!(rows.is_sorted_by(|a, b| a < b), "rows ascend, so that none is overwritten before it is moved");
        let arena = self.arena();
        for (to, from) in rows.iter().map(|from| *from as usize).enumerate() {
            assert!(from < x.rows, "row {from} of {}", x.rows);
            if from != to {
                // SAFETY: two rows inside the workspace, not the same, and this is the only thread.
                unsafe { arena.row(x, to).copy_from_slice(arena.row(x, from)) };
            }
        }
        x.span(0, rows.len())
    }

    /// Runs `each` for every row of `x`, in parallel where that is faster. `each` gets the arena, the thread and the row.
    pub(super) fn rows(&mut self, x: Buf, each: impl Fn(&Arena, usize, usize) + Sync) {
        let arena = self.arena();
        for_rows(&mut self.pool, x, |thread, row| each(&arena, thread, row));
    }
}

/// Cosine and sine of a position times a frequency.
///
/// The angle is the f32 product, as in the reference. Its functions are taken in f64, where every libm agrees after rounding.
pub(super) fn cos_sin(position: f32, frequency: f32, scale: f32) -> [f32; 2] {
    let angle = f64::from(position * frequency);
    [angle.cos() as f32 * scale, angle.sin() as f32 * scale]
}

/// Runs `each` for every row of `x`, in parallel where that is faster. `each` gets the thread and the row.
pub(super) fn for_rows(pool: &mut ThreadPool, x: Buf, each: impl Fn(usize, usize) + Sync) {
    // A power of two, so that a task's rows are whole tiles, or rows of one tile.
    let together = 1 << (ELEMENTS_PER_TASK / x.cols.max(1)).clamp(1, ROWS_PER_TASK).ilog2();
    pool.run(x.rows.div_ceil(together), &|thread, task| {
        let first = task * together;
        (first..(first + together).min(x.rows)).for_each(|row| each(thread, row));
    });
}
