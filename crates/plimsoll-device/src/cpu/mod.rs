//! The CPU device: carries out a step on the host's cores.
//!
//! Weights exist as long as the device. KV cache, states and workspace belong to one pool build and are replaced as one value
//! ([`CpuMemory`]), so nothing can point into an earlier pool build.

mod arena;
mod attention;
mod candidates;
mod conv;
mod cut;
mod delta;
mod embed;
mod encoder;
mod experts;
mod feed_forward;
mod linear;
mod load_error;
mod memory;
mod names;
mod ngrams;
mod ordered;
mod packed;
mod rows;
mod scan;
mod selected;
mod states;
mod tables;
mod weights;

use plimsoll_kernels::{self as kernels, Isa};

use crate::device::ordered::linear_rows;
use crate::device::{
    Activation, Attention, Blend, Buf, CausalConv, Device, DeviceError, Experts, FeedForward, GatedDelta, Input, Mark,
    Mode, Near, NgramConv, Ngrams, Places, Rotary, Selection, SelectiveScan, StepInput, Unfold,
};
use crate::pool::ThreadPool;
use crate::weights::{LinearId, VectorId};
use arena::Arena;
use names::{kernel_activation, rope_style};
use rows::for_rows;

pub use load_error::LoadError;
pub use memory::{CpuMemory, scratch_bytes};
pub use packed::{PackedError, PackedFile};
pub use tables::TableReads;
pub use weights::{CpuWeights, PANELS_PER_TASK, pack_panels, write_vector};

/// The device: weights, threads, and the memory of the current pool build.
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

    /// Returns the memory of the current pool build.
    pub fn memory(&mut self) -> &mut CpuMemory {
        &mut self.memory
    }

    /// Checks that the weights are still the loaded ones ([`CpuWeights::intact`]). Call it after a pass, before its results are used.
    ///
    /// # Errors
    /// [`DeviceError::WeightsChanged`], [`DeviceError::Table`]: a file of weights was cut or written to, or could not be read.
    pub fn check_weights(&self) -> Result<(), DeviceError> {
        self.weights.intact()
    }

    /// Returns the rows of tables in files that were looked up since the last call.
    pub fn take_table_reads(&mut self) -> TableReads {
        self.weights.take_table_reads()
    }

    /// Takes the device apart, for another pool build over the same weights.
    pub fn into_parts(self) -> (CpuWeights, ThreadPool, CpuMemory) {
        (self.weights, self.pool, self.memory)
    }

    /// Starts a step: releases all temporaries of the last one.
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

    fn arena(&mut self) -> Arena {
        Arena::new(&mut self.memory.workspace, self.memory.scratch_at, self.memory.scratch)
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
        self.run_embed(out, table, tokens, scale);
    }

    fn add_blended(&mut self, x: Buf, table: LinearId, blend: Blend<'_>) {
        self.run_blended(x, table, blend);
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
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        linear_rows(self, input, layers, mode, bf16_rows)
    }

    fn feed_forward(
        &mut self,
        layer: &FeedForward,
        input: Input,
        out: Buf,
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        self.run_feed_forward(layer, input, out, mode, bf16_rows)
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
        // `x` may have one row per head; a row of angles serves all heads of its token.
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

    fn glu_for(&mut self, next: LinearId, gate: Buf, up: Buf, act: Activation, bf16_rows: usize) {
        let exact = if self.rounds(next) { gate.rows - bf16_rows } else { gate.rows };
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

    fn scale_rows(&mut self, x: Buf, factor: &(dyn Fn(usize) -> f32 + Sync)) {
        let isa = self.isa;
        self.rows(x, |arena, _, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task.
            kernels::scale(isa, unsafe { arena.row(x, row) }, factor(row));
        });
    }

    fn scale_by(&mut self, x: Buf, by: Buf) {
        self.run_scale_by(x, by);
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
        kv: Option<[Buf; 2]>,
        step: &StepInput<'_>,
    ) {
        let place = self.cached(spec.layer);
        match (kv, rotary) {
            (Some([k, v]), _) => self.store_kv(&place, rotary.map(|rotary| (rotary, q)), k, v, step),
            (None, Some(rotary)) => self.ready_queries(rotary, q, q.cols / spec.heads),
            (None, None) => {}
        }
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
        self.run_within(spec, [out, q, k, v], step)
    }

    fn attend_all(
        &mut self,
        spec: &Attention,
        out: Buf,
        q: Buf,
        k: Buf,
        v: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        for rows in sequences {
            self.attend_sequence(spec, [out, q, k, v], rows)?;
        }
        Ok(())
    }

    fn attend_near(
        &mut self,
        spec: &Near,
        out: Buf,
        qkv: [Buf; 3],
        distances: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) {
        self.run_near(spec, out, qkv, distances, sequences);
    }

    fn attend_selected(&mut self, spec: &Selection, out: Buf, q: Buf, index: [Buf; 3], step: &StepInput<'_>) {
        self.run_selected(spec, out, q, index, step);
    }

    fn embed_ngrams(&mut self, spec: &Ngrams, out: Buf, ids: Buf, step: &StepInput<'_>) {
        self.run_ngrams(spec, out, ids, step);
    }

    fn gate_streams(&mut self, keys: Buf, queries: Buf, values: Buf) {
        self.run_gate_streams(keys, queries, values);
    }

    fn ngram_conv(&mut self, spec: &NgramConv, x: Buf, step: &StepInput<'_>) {
        self.run_ngram_conv(spec, x, step);
    }

    fn causal_conv(&mut self, spec: &CausalConv, x: Buf, gates: Option<[Buf; 2]>, step: &StepInput<'_>) {
        self.run_conv(spec, x, gates, step);
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

    fn selective_scan(&mut self, spec: &SelectiveScan, out: Buf, x: Buf, gates: [Buf; 2], step: &StepInput<'_>) {
        self.run_scan(spec, out, x, gates, step);
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

    fn take(&mut self, out: Buf, x: Buf, column: usize) {
        assert!(out.rows == x.rows && column + out.cols <= x.cols, "columns {column}.. of {}", x.cols);
        self.rows(out, |arena, _, row| {
            // SAFETY: as in `run_glu`.
            let (out, x) = unsafe { (arena.row(out, row), arena.row(x, row)) };
            out.copy_from_slice(&x[column..column + out.len()]);
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
        self.run_unfold(out, x, spec);
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

    fn arrange(&mut self, out: Buf, x: Buf, from: &(dyn Fn(usize) -> usize + Sync)) {
        assert!(x.cols <= out.cols, "{} columns in rows of {}", x.cols, out.cols);
        self.rows(out, |arena, _, row| {
            let from = from(row);
            assert!(from < x.rows, "row {from} of {}", x.rows);
            // SAFETY: both rows are inside the workspace, the matrices do not overlap, and each row of `out` belongs to one task.
            unsafe { arena.row(out, row)[..x.cols].copy_from_slice(arena.row(x, from)) };
        });
    }

    fn keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf {
        self.run_keep_rows(x, rows)
    }

    fn clamp(&mut self, x: Buf, low: f32, high: f32) {
        self.rows(x, |arena, _, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task.
            unsafe { arena.row(x, row) }.iter_mut().for_each(|x| *x = x.max(low).min(high));
        });
    }

    fn candidates(&mut self, out: Buf, _blocks: Buf, x: Buf, counts: &[u32]) {
        self.find_candidates(out, x, counts);
    }

    fn softcap(&mut self, x: Buf, cap: f32) {
        let isa = self.isa;
        self.rows(x, |arena, _, row| {
            // SAFETY: rows are inside the workspace and each belongs to one task.
            kernels::softcap(isa, unsafe { arena.row(x, row) }, cap);
        });
    }
}
