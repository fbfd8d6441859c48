//! The CPU device: carries out a step on the host's cores.
//!
//! Weights live as long as the device; keys, values and workspace belong to one generation and come and go as
//! one value ([`CpuMemory`]), so nothing can point into a generation that is gone.

mod arena;
mod attention;
mod cut;
mod delta;
mod experts;
mod feed_forward;
mod linear;
mod weights;

use std::sync::Arc;

use plimsoll_kernels::{self as kernels, Isa, KvLayout, RopeStyle};
use plimsoll_memory::step::StepStack;
use plimsoll_memory::{Component, Ledger, OutOfMemory, Region};

use crate::device::{
    Activation, Attention, Blend, Buf, Device, DeviceError, Experts, FeedForward, GatedDelta, Input, Mark, Mode,
    Places, Rotary, StepInput, Unfold,
};
use crate::kv::{KvShape, ModelShape, StateShape, encoder_layout};
use crate::plan_device::{sequence_bytes, within_bytes};
use crate::pool::ThreadPool;
use crate::weights::{LinearId, VectorId};
use arena::Arena;

pub use weights::{CpuWeights, LoadError};

/// Elements of small operations per task, about: fewer are not worth another thread's while.
const ELEMENTS_PER_TASK: usize = 4096;
/// And their rows, at most.
const ROWS_PER_TASK: usize = 16;

/// Bytes of per-thread scratch that a step needs beside its temporaries: attention tiles, one row being normalised, a tile of state.
pub fn scratch_bytes(shape: &ModelShape, threads: usize) -> usize {
    threads * thread_scratch_floats(shape) * size_of::<f32>()
}

fn thread_scratch_floats(shape: &ModelShape) -> usize {
    let attention = attention::scratch_floats(&shape.kv.layout(), shape.heads / shape.kv.kv_heads, shape.rounded);
    let state = shape.state.as_ref().map_or(0, delta::scratch_floats);
    let encoder = shape.encoder.map_or(0, |encoder| {
        attention::scratch_floats(&encoder_layout(1, encoder.head_dim), 1, false).max(2 * encoder.widest)
    });
    attention.max(shape.hidden).max(state).max(encoder).next_multiple_of(16)
}

/// Keys, values, recurrent states and step workspace of one generation.
pub struct CpuMemory {
    kv: Region,
    shape: KvShape,
    layout: KvLayout,
    /// Whether attention can be rounded.
    rounded: bool,
    /// None for a model without recurrent state.
    states: Option<Region>,
    state_shape: Option<StateShape>,
    workspace: Region,
    stack: StepStack,
    /// Floats of each thread's scratch, at the end of the workspace.
    scratch: usize,
    scratch_at: usize,
}

impl CpuMemory {
    /// Maps a pool of `pages` pages, `slots` slots of state (for a model that has one) and a workspace of `workspace` bytes, scratch
    /// for `threads` threads included.
    ///
    /// `touch`: pages and slots are committed now, not on first use.
    pub fn map(
        ledger: &Arc<Ledger>,
        shape: &ModelShape,
        pages: usize,
        slots: usize,
        workspace: usize,
        threads: usize,
        touch: bool,
    ) -> Result<Self, OutOfMemory> {
        let kv = Region::map(ledger, Component::KvPages, (pages * shape.kv.page_bytes()) as u64, touch)?;
        let slots = shape.state.map(|state| (slots * state.slot_bytes()) as u64);
        let states = slots.map(|bytes| Region::map(ledger, Component::StateSlots, bytes, touch)).transpose()?;
        let workspace = Region::map(ledger, Component::StepWorkspace, workspace as u64, true)?;
        let scratch = thread_scratch_floats(shape);
        let scratch_at = workspace.len().saturating_sub(scratch_bytes(shape, threads)) / 64 * 64;
        Ok(Self {
            kv,
            shape: shape.kv,
            layout: shape.kv.layout(),
            rounded: shape.rounded,
            states,
            state_shape: shape.state,
            workspace,
            stack: StepStack::new(scratch_at),
            scratch,
            scratch_at,
        })
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.kv.len().checked_div(self.shape.page_bytes()).unwrap_or(0)
    }

    /// Slots of recurrent state; 0 for a model without.
    pub fn slots(&self) -> usize {
        let bytes = self.states.as_ref().map_or(0, |states| states.len());
        self.state_shape.map_or(0, |shape| bytes / shape.slot_bytes())
    }

    /// The most bytes of workspace that steps have used, scratch included.
    pub fn workspace_peak(&self) -> usize {
        self.stack.high_water() + (self.workspace.len() - self.scratch_at)
    }

    /// Gives the physical memory of neighbouring pages back (elastic mode); their contents are lost.
    pub fn decommit_pages(&mut self, pages: std::ops::Range<usize>) {
        let bytes = self.shape.page_bytes();
        self.kv.decommit(pages.start * bytes..pages.end * bytes);
    }
}

/// The device: weights, threads, and the memory of the current generation.
pub struct CpuDevice {
    weights: CpuWeights,
    pool: ThreadPool,
    isa: Isa,
    memory: CpuMemory,
}

impl CpuDevice {
    /// A device over loaded weights.
    pub fn new(weights: CpuWeights, pool: ThreadPool, isa: Isa, memory: CpuMemory) -> Self {
        Self { weights, pool, isa, memory }
    }

    /// The memory of the current generation.
    pub fn memory(&mut self) -> &mut CpuMemory {
        &mut self.memory
    }

    /// Takes the device apart, to build another generation over the same weights.
    pub fn into_parts(self) -> (CpuWeights, ThreadPool, CpuMemory) {
        (self.weights, self.pool, self.memory)
    }

    /// Starts a step: all temporaries of the last one are given back.
    pub fn begin_step(&mut self) {
        self.memory.stack.clear();
    }

    /// A row of a matrix of the current step, to read and to change.
    pub fn row_mut(&mut self, x: Buf, row: usize) -> &mut [f32] {
        assert!(row < x.rows, "row {row} of {}", x.rows);
        let arena = self.arena();
        // SAFETY: the row is inside the workspace, and `&mut self` makes this the only view of it.
        unsafe { arena.row(x, row) }
    }

    /// The cosines and sines of every row: of what `place` says once for the row, `position` for a frequency's index, times the
    /// frequency.
    fn angles<P>(
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
                // The angle is the reference's f32 product; its functions are taken in f64, where every libm agrees after
                // rounding.
                let angle = f64::from(position(&place, i) * freq);
                cos[i] = angle.cos() as f32 * scale;
                sin[i] = angle.sin() as f32 * scale;
            }
        });
    }

    /// Has `norm` make every row of `out` of that of `x`, which may be the same, and of some vectors.
    fn norm_rows<const N: usize>(
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

    /// `gate = act(gate) * up`, but for the first `exact` rows roughly.
    fn run_glu(&mut self, gate: Buf, up: Buf, act: Activation, exact: usize) {
        assert_eq!((gate.rows, gate.cols), (up.rows, up.cols), "gate and up have one shape");
        let (isa, act) = (self.isa, kernel_activation(act));
        self.rows(gate, |arena, _, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (gate, up) = unsafe { (arena.row(gate, row), arena.row(up, row)) };
            let glu = if row < exact { kernels::glu } else { kernels::glu_rough };
            glu(isa, act, gate, up);
        });
    }

    fn arena(&mut self) -> Arena {
        Arena::new(&mut self.memory.workspace, self.memory.scratch_at, self.memory.scratch)
    }

    /// Runs `each` for every row of `x`, in parallel when it is worth it. `each` gets the arena, the thread and the row.
    fn rows(&mut self, x: Buf, each: impl Fn(&Arena, usize, usize) + Sync) {
        let arena = self.arena();
        for_rows(&mut self.pool, x, |thread, row| each(&arena, thread, row));
    }
}

/// Runs `each` for every row of `x`, in parallel when it is worth it. `each` gets the thread and the row.
fn for_rows(pool: &mut ThreadPool, x: Buf, each: impl Fn(usize, usize) + Sync) {
    // A power of two, so that a task's rows are whole tiles' or of one tile.
    let together = 1 << (ELEMENTS_PER_TASK / x.cols.max(1)).clamp(1, ROWS_PER_TASK).ilog2();
    pool.run(x.rows.div_ceil(together), &|thread, task| {
        let first = task * together;
        (first..(first + together).min(x.rows)).for_each(|row| each(thread, row));
    });
}

fn rope_style(interleaved: bool) -> RopeStyle {
    if interleaved { RopeStyle::Pairs } else { RopeStyle::Halves }
}

fn kernel_activation(act: Activation) -> kernels::Activation {
    match act {
        Activation::Silu => kernels::Activation::Silu,
        Activation::GeluTanh => kernels::Activation::GeluTanh,
        Activation::Gelu => kernels::Activation::GeluErf,
        Activation::GeluQuick => kernels::Activation::GeluQuick,
        Activation::Tanh => kernels::Activation::Tanh,
        Activation::Sigmoid => kernels::Activation::Sigmoid,
    }
}

impl Device for CpuDevice {
    fn temp(&mut self, rows: usize, cols: usize) -> Result<Buf, DeviceError> {
        let buf = Buf { offset: 0, rows, cols };
        let offset = self.memory.stack.take(buf.bytes())?;
        Ok(Buf { offset, ..buf })
    }

    fn mark(&self) -> Mark {
        Mark(self.memory.stack.mark())
    }

    fn release(&mut self, mark: Mark) {
        self.memory.stack.release(mark.0);
    }

    fn embed(&mut self, out: Buf, table: LinearId, tokens: &[u32], scale: f32) {
        assert_eq!(out.rows, tokens.len(), "one token a row");
        let (isa, arena) = (self.isa, self.arena());
        let (linear, data) = self.weights.linear(table);
        for_rows(&mut self.pool, out, |_, row| {
            // SAFETY: rows of `out` are inside the workspace, and each is written by one task.
            let out = unsafe { arena.row(out, row) };
            kernels::unpack_row(&linear.packing, data, tokens[row] as usize, out);
            if scale != 1.0 {
                kernels::scale(isa, out, scale);
            }
        });
    }

    fn add_blended(&mut self, x: Buf, table: LinearId, blend: Blend<'_>) {
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

    fn add_rows(&mut self, x: Buf, table: VectorId, which: &(dyn Fn(usize) -> usize + Sync)) {
        let (isa, arena) = (self.isa, self.arena());
        let table = self.weights.vector(table);
        for_rows(&mut self.pool, x, |_, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task.
            kernels::add(isa, unsafe { arena.row(x, row) }, &table[which(row) * x.cols..][..x.cols]);
        });
    }

    fn rms_norm(&mut self, out: Buf, x: Buf, weight: VectorId, eps: f32) {
        assert_eq!((out.rows, out.cols), (x.rows, x.cols), "rms_norm keeps the shape");
        let isa = self.isa;
        self.norm_rows(out, x, [weight], |out, x, [weight]| kernels::rms_norm(isa, out, x, weight, eps));
    }

    fn layer_norm(&mut self, out: Buf, x: Buf, weight: VectorId, bias: VectorId, eps: f32) {
        assert_eq!((out.rows, out.cols), (x.rows, x.cols), "layer_norm keeps the shape");
        let isa = self.isa;
        self.norm_rows(out, x, [weight, bias], |out, x, [weight, bias]| {
            kernels::layer_norm(isa, out, x, weight, bias, eps);
        });
    }

    fn linear_rows(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        rounded_rows: usize,
    ) -> Result<(), DeviceError> {
        self.run_linear(input, layers, mode, rounded_rows)
    }

    fn feed_forward(
        &mut self,
        layer: &FeedForward,
        input: Input,
        out: Buf,
        mode: Mode,
        rounded_rows: usize,
    ) -> Result<(), DeviceError> {
        self.run_feed_forward(layer, input, out, mode, rounded_rows)
    }

    fn rope_angles(&mut self, out: Buf, inv_freq: VectorId, positions: &[u32], scale: f32) {
        assert_eq!(out.rows, positions.len(), "one position a row");
        self.angles(out, inv_freq, scale, |row| positions[row] as f32, |position, _| *position);
    }

    fn rope_angles_by_axis(&mut self, out: Buf, inv_freq: VectorId, axes: &[u8], places: Places<'_>, scale: f32) {
        assert_eq!(out.cols, 2 * axes.len(), "an axis for every frequency");
        self.angles(out, inv_freq, scale, places, |place, i| place[usize::from(axes[i])]);
    }

    fn rope(&mut self, x: Buf, angles: Buf, head_dim: usize, interleaved: bool) {
        let isa = self.isa;
        let style = rope_style(interleaved);
        // `x` may be seen as one row per head; a row of angles serves all heads of its token.
        let x = Buf { rows: angles.rows, cols: x.rows * x.cols / angles.rows, ..x };
        self.rows(x, |arena, _, row| {
            // SAFETY: rows are inside the workspace, `x` and `angles` do not overlap, each row belongs to one task.
            let (x, angles) = unsafe { (arena.row(x, row), arena.row(angles, row)) };
            let (cos, sin) = angles.split_at(angles.len() / 2);
            kernels::rope(isa, style, x, head_dim, cos, sin);
        });
    }

    fn glu(&mut self, gate: Buf, up: Buf, act: Activation) {
        self.run_glu(gate, up, act, gate.rows);
    }

    fn glu_for(&mut self, next: LinearId, gate: Buf, up: Buf, act: Activation, rounded_rows: usize) {
        let exact = if self.rounds(next) { gate.rows - rounded_rows } else { gate.rows };
        self.run_glu(gate, up, act, exact);
    }

    fn activate(&mut self, x: Buf, act: Activation) {
        let (isa, act) = (self.isa, kernel_activation(act));
        self.rows(x, |arena, _, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task.
            kernels::activate(isa, act, unsafe { arena.row(x, row) });
        });
    }

    fn multiply(&mut self, x: Buf, weight: VectorId) {
        let (isa, arena) = (self.isa, self.arena());
        let weight = self.weights.vector(weight);
        for_rows(&mut self.pool, x, |_, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task.
            kernels::mul(isa, unsafe { arena.row(x, row) }, weight);
        });
    }

    fn add(&mut self, x: Buf, y: Buf) {
        assert_eq!((x.rows, x.cols), (y.rows, y.cols), "both have one shape");
        let isa = self.isa;
        self.rows(x, |arena, _, row| {
            // SAFETY: as in `run_glu`.
            let (x, y) = unsafe { (arena.row(x, row), arena.row(y, row)) };
            kernels::add(isa, x, y);
        });
    }

    fn attention(
        &mut self,
        spec: &Attention,
        rotary: Option<&Rotary>,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        step: &StepInput<'_>,
    ) {
        let place = self.cached(spec.layer);
        self.store_kv(&place, rotary.map(|rotary| (rotary, q)), k, v, step);
        self.attend(&place, spec, out, q, step);
    }

    fn attend_within(
        &mut self,
        spec: &Attention,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let scope = self.mark();
        let offset = self.memory.stack.take(within_bytes(&self.memory.shape, step))?;
        let place = self.within(offset, step);
        self.store_kv(&place, None, k, v, step);
        self.attend(&place, spec, out, q, step);
        self.release(scope);
        Ok(())
    }

    fn attend_all(&mut self, spec: &Attention, out: Buf, q: Buf, k: Buf, v: Buf) -> Result<(), DeviceError> {
        let scope = self.mark();
        let [keys, pages] = sequence_bytes(spec, k);
        let (keys, pages) = (self.memory.stack.take(keys)?, self.memory.stack.take(pages)?);
        self.attend_sequence(spec, (out, q, k, v), keys, pages);
        self.release(scope);
        Ok(())
    }

    fn gated_delta(
        &mut self,
        spec: &GatedDelta,
        out: Buf,
        qkv: Buf,
        a: Buf,
        b: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        self.run_delta(spec, out, qkv, a, b, step);
        Ok(())
    }

    fn experts(&mut self, spec: &Experts<'_>, out: Buf, x: Buf, router: Buf, mode: Mode) -> Result<(), DeviceError> {
        self.run_experts(spec, out, x, router, mode)
    }

    fn add_gated(&mut self, x: Buf, y: Buf, gate: Buf) {
        assert_eq!((x.rows, x.cols, x.rows, 1), (y.rows, y.cols, gate.rows, gate.cols), "one shape, one gate a row");
        let isa = self.isa;
        self.rows(x, |arena, _, row| {
            // SAFETY: as in `run_glu`.
            let (x, y, gate) = unsafe { (arena.row(x, row), arena.row(y, row), arena.row(gate, row)) };
            kernels::add_gated(isa, x, y, gate[0]);
        });
    }

    fn put(&mut self, out: Buf, x: Buf, column: usize) {
        assert!(out.rows == x.rows && column + x.cols <= out.cols, "columns {column}.. of {}", out.cols);
        self.rows(out, |arena, _, row| {
            // SAFETY: as in `run_glu`.
            let (out, x) = unsafe { (arena.row(out, row), arena.row(x, row)) };
            out[column..column + x.len()].copy_from_slice(x);
        });
    }

    fn place(&mut self, x: Buf, first_row: usize, values: &[f32], width: usize, from: usize, mode: Mode) {
        let rows = values.chunks_exact(width);
        assert!(rows.remainder().is_empty() && from + x.cols <= width, "{} values in rows of {width}", values.len());
        assert!(first_row + rows.len() <= x.rows, "{} rows from {first_row} of {}", rows.len(), x.rows);
        let arena = self.arena();
        for (row, values) in rows.enumerate() {
            // SAFETY: the row is inside the workspace, and this is the only thread.
            let out = unsafe { arena.row(x, first_row + row) };
            let values = &values[from..from + x.cols];
            match mode {
                Mode::Store => out.copy_from_slice(values),
                Mode::Add => out.iter_mut().zip(values).for_each(|(out, value)| *out += value),
            }
        }
    }

    fn unfold(&mut self, out: Buf, x: Buf, spec: &Unfold) {
        let Unfold { inner, taps: [outer_taps, inner_taps], step, pad } = *spec;
        let (windows, taps) = (spec.windows(), outer_taps * inner_taps);
        assert!(
            x.rows.is_multiple_of(inner) && out.rows.is_multiple_of(windows),
            "whole lines of points and of windows"
        );
        assert_eq!(out.cols, x.cols * taps, "a column for every channel and tap");
        let outer = x.rows / inner;
        self.rows(out, |arena, _, row| {
            // SAFETY: both are inside the workspace and do not overlap, each row of `out` belongs to one task, nobody writes `x`.
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

    fn gather(&mut self, out: Buf, x: Buf, rows: &[u32]) {
        assert_eq!((out.rows, out.cols), (rows.len(), x.cols), "gather keeps the width");
        let arena = self.arena();
        for (to, from) in rows.iter().enumerate() {
            assert!((*from as usize) < x.rows, "row {from} of {}", x.rows);
            // SAFETY: both rows are inside the workspace, the matrices do not overlap, and this is the only thread.
            unsafe { arena.row(out, to).copy_from_slice(arena.row(x, *from as usize)) };
        }
    }

    fn keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf {
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

    fn softcap(&mut self, x: Buf, cap: f32) {
        let isa = self.isa;
        self.rows(x, |arena, _, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task.
            kernels::softcap(isa, unsafe { arena.row(x, row) }, cap);
        });
    }
}
