//! The planner's device: runs a model's `forward` without data and counts.
//!
//! It takes temporaries from the same stack bookkeeping as the real device, in the same order and sizes. So its high-water mark is
//! the real one. It also adds up floating-point operations and bytes moved, for what-if answers and rooflines.

use plimsoll_memory::step::StepStack;

use crate::device::ordered;
use crate::device::{
    Activation, Attention, Blend, Buf, CausalConv, Device, DeviceError, Experts, GatedDelta, Input, Mark, Mode, Near,
    NgramConv, Ngrams, Places, Rotary, Selection, SelectiveScan, SeqSpan, StepInput, Unfold,
};
use crate::experts::{GPU_EXPERTS_MAX, GpuExperts, Space};
use crate::kv::{KvShape, PAGE_TOKENS};
use crate::weights::{LinearId, VectorId, WeightTable};
use crate::work::{Calls, Work};
use moved::states_moved;
pub(crate) use moved::{sequence_bytes, within};

mod gpu;
mod linear;
mod moved;
mod ngrams;

/// Words of four bytes that each attending row uploads to a device with memory of its own: position, first page, first position
/// that it attends to, position after the last one.
pub const ROW_WORDS: usize = 4;

/// Most row tables that an encoder's pass uploads. An encoder attends in two ways, by windows and by frames. A table is written before
/// the device finds that it is already there, which takes a third.
pub const ENCODER_TABLES: usize = 3;

/// Words that each blended row uploads: four row numbers, and the share of each.
const BLEND_WORDS: usize = 8;

/// Words that each row with candidates uploads: the row, the number of candidates, and the index of the first.
const CANDIDATE_WORDS: usize = 3;

/// A device without memory.
pub struct PlanDevice<'a> {
    weights: &'a WeightTable,
    kv: KvShape,
    stack: StepStack,
    work: Work,
    rounds: bool,
    missing: Option<&'static str>,
    upload: usize,
    /// Whether the current step's table of rows is already part of the upload.
    rows_uploaded: bool,
    /// Whether the table of rows with an encoder's window is already part of the upload.
    windows_uploaded: bool,
    /// Whether the step's sequences and slots are already part of the upload.
    slots_uploaded: bool,
    calls: Calls,
}

impl<'a> PlanDevice<'a> {
    /// A planner over a model's weights and cache shape.
    pub fn new(weights: &'a WeightTable, kv: &KvShape) -> Self {
        let (stack, work) = (StepStack::new(usize::MAX), Work::default());
        let (missing, upload, rows_uploaded, slots_uploaded) = (None, 0, false, false);
        Self {
            weights,
            kv: kv.clone(),
            stack,
            work,
            rounds: false,
            missing,
            upload,
            rows_uploaded,
            windows_uploaded: false,
            slots_uploaded,
            calls: Calls::default(),
        }
    }

    /// The most bytes of step workspace that were in use.
    pub fn high_water(&self) -> usize {
        self.stack.high_water()
    }

    /// Whether rows would have been computed in bfloat16, by layers or attention.
    pub fn rounds(&self) -> bool {
        self.rounds
    }

    /// Returns the work of all operations so far.
    pub fn work(&self) -> Work {
        self.work
    }
}

impl Device for PlanDevice<'_> {
    fn temp(&mut self, rows: usize, cols: usize) -> Result<Buf, DeviceError> {
        let buf = Buf { offset: 0, rows, cols };
        let offset = self.stack.take(buf.bytes())?;
        Ok(Buf { offset, ..buf })
    }

    fn mark(&self) -> Mark {
        Mark(self.stack.mark())
    }

    fn release(&mut self, mark: Mark) {
        self.stack.release(mark.0);
    }

    fn embed(&mut self, out: Buf, _table: LinearId, _tokens: &[u32], _scale: f32) {
        self.calls.plain += 1;
        self.upload += out.rows;
        self.work.flops += (out.rows * out.cols) as u64;
    }

    fn rms_norm(&mut self, out: Buf, _x: Buf, _weight: VectorId, _eps: f32) {
        self.calls.plain += 1;
        self.work.flops += 4 * (out.rows * out.cols) as u64;
    }

    fn layer_norm(&mut self, out: Buf, _x: Buf, _weight: VectorId, _bias: VectorId, _eps: f32) {
        self.calls.plain += 1;
        self.work.flops += 7 * (out.rows * out.cols) as u64;
    }

    fn linear_rows(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        ordered::linear_rows(self, input, layers, mode, bf16_rows)
    }

    fn rope_angles(&mut self, out: Buf, _inv_freq: VectorId, _positions: &[u32], _scale: f32) {
        self.calls.plain += 1;
        self.upload += out.rows * out.cols;
        self.work.flops += (out.rows * out.cols) as u64;
    }

    fn rope_angles_by_axis(&mut self, out: Buf, _inv_freq: VectorId, _axes: &[u8], _places: Places<'_>, _scale: f32) {
        self.calls.plain += 1;
        self.upload += out.rows * out.cols;
        self.work.flops += (out.rows * out.cols) as u64;
    }

    fn add_blended(&mut self, x: Buf, _table: LinearId, _blend: Blend<'_>) {
        self.calls.plain += 1;
        self.upload += BLEND_WORDS * x.rows;
        self.work.flops += 8 * (x.rows * x.cols) as u64;
    }

    fn add_rows(&mut self, x: Buf, _table: VectorId, _which: &(dyn Fn(usize) -> usize + Sync)) {
        self.calls.plain += 1;
        self.upload += x.rows;
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn rope(&mut self, x: Buf, angles: Buf, head_dim: usize, _interleaved: bool) {
        self.calls.plain += 1;
        self.work.flops += 3 * (x.rows * x.cols / head_dim * angles.cols) as u64;
    }

    fn glu(&mut self, gate: Buf, _up: Buf, _act: Activation) {
        self.calls.plain += 1;
        self.work.flops += 8 * (gate.rows * gate.cols) as u64;
    }

    fn activate(&mut self, x: Buf, _act: Activation) {
        self.calls.plain += 1;
        self.work.flops += 8 * (x.rows * x.cols) as u64;
    }

    fn multiply(&mut self, x: Buf, _weight: VectorId) {
        self.calls.plain += 1;
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn scale_rows(&mut self, x: Buf, _factor: &(dyn Fn(usize) -> f32 + Sync)) {
        self.calls.plain += 1;
        self.upload += x.rows;
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn scale_by(&mut self, x: Buf, _by: Buf) {
        self.calls.plain += 1;
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn add(&mut self, x: Buf, _y: Buf) {
        self.calls.plain += 1;
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn attention(
        &mut self,
        spec: &Attention,
        rotary: Option<&Rotary>,
        _out: Buf,
        q: Buf,
        kv: Option<[Buf; 2]>,
        step: &StepInput<'_>,
    ) {
        self.calls.plain += 2;
        if spec.encoded.is_some() {
            self.not_on_gpu("attention to an encoder's output");
        }
        if let Some(Rotary { norms, eps, angles, interleaved }) = rotary.copied() {
            let head_dim = q.cols / spec.heads;
            let made = || std::iter::once(q).chain(kv.map(|[k, _]| k));
            for (heads, norm) in made().zip(norms.into_iter().flatten()) {
                self.rms_norm(heads, heads, norm, eps);
            }
            for heads in made() {
                self.rope(heads, angles, head_dim, interleaved);
            }
        }
        // Layers that skip rows without logits upload their rows once more, which are at most as many.
        if !std::mem::replace(&mut self.rows_uploaded, true) {
            self.upload += 2 * ROW_WORDS * q.rows;
        }
        let bytes = self.kv.layers()[spec.layer].kv_bytes();
        for seq in step.seqs {
            let last = seq.start + seq.rows;
            let seen = |position: usize| spec.seen(position, seq.seen_from).len();
            let pairs: usize = (seq.start..last).map(seen).sum();
            self.work.flops += 4 * (pairs * q.cols) as u64;
            let pages = (seq.start..last).map(seen).max().unwrap_or(0).div_ceil(PAGE_TOKENS);
            self.work.kv_bytes += (pages * bytes) as u64;
        }
    }

    fn attend_within(
        &mut self,
        spec: &Attention,
        _out: Buf,
        q: Buf,
        k: Buf,
        _v: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        self.calls.plain += 1;
        // Rows of a window have a table of their own. Every such layer writes it before it finds that it was uploaded already.
        let (sent, tables) = match spec.window {
            Some(_) => (&mut self.windows_uploaded, 2),
            None => (&mut self.rows_uploaded, 1),
        };
        if !std::mem::replace(sent, true) {
            self.upload += tables * ROW_WORDS * q.rows;
        }
        // On a GPU keys and values stay in their rows.
        if !self.weights.on_gpu() {
            let scope = self.mark();
            self.stack.take(within(spec, q, k, step).1)?;
            self.release(scope);
        }
        let seen = |seq: &SeqSpan| (0..seq.rows).map(|row| spec.seen_within(row, seq.rows).len()).sum::<usize>();
        let pairs: usize = step.seqs.iter().map(seen).sum();
        self.work.flops += 4 * (pairs * q.cols) as u64;
        Ok(())
    }

    fn attend_all(
        &mut self,
        spec: &Attention,
        _out: Buf,
        q: Buf,
        k: Buf,
        _v: Buf,
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        self.calls.plain += 1;
        if !(q.cols / spec.heads).is_multiple_of(2) {
            self.not_on_gpu("heads of an odd width");
        }
        if !std::mem::replace(&mut self.rows_uploaded, true) {
            self.upload += ENCODER_TABLES * ROW_WORDS * q.rows;
        }
        for (first, rows) in sequences {
            // On a GPU keys and values stay in their rows.
            if !self.weights.on_gpu() {
                let scope = self.mark();
                for bytes in sequence_bytes(spec, k.span(first, rows)) {
                    self.stack.take(bytes)?;
                }
                self.release(scope);
            }
            self.work.flops += 4 * (rows * rows * q.cols) as u64;
        }
        Ok(())
    }

    fn attend_near(
        &mut self,
        spec: &Near,
        _out: Buf,
        [q, ..]: [Buf; 3],
        _distances: Buf,
        _sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) {
        self.calls.plain += 1;
        if !std::mem::replace(&mut self.rows_uploaded, true) {
            self.upload += ENCODER_TABLES * ROW_WORDS * q.rows;
        }
        self.work.flops += 6 * (q.rows * spec.rows * q.cols) as u64;
    }

    fn attend_selected(&mut self, spec: &Selection, _out: Buf, q: Buf, index: [Buf; 3], step: &StepInput<'_>) {
        self.count_selected(spec, q, index, step);
    }

    fn embed_ngrams(&mut self, _spec: &Ngrams, out: Buf, ids: Buf, step: &StepInput<'_>) {
        self.count_ngrams(out, ids, step);
    }

    fn gate_streams(&mut self, keys: Buf, _queries: Buf, _values: Buf) {
        self.calls.plain += 1;
        self.work.flops += 3 * (keys.rows * keys.cols) as u64;
    }

    fn ngram_conv(&mut self, spec: &NgramConv, x: Buf, step: &StepInput<'_>) {
        self.count_ngram_conv(spec, x, step);
    }

    fn causal_conv(&mut self, spec: &CausalConv, x: Buf, gates: Option<[Buf; 2]>, step: &StepInput<'_>) {
        self.calls.plain += 1;
        self.send_slots(x.rows);
        let each = 2 * spec.taps + if spec.silu { 8 } else { 0 } + gates.map_or(0, |gates| gates.len());
        self.work.flops += (x.rows * x.cols * each) as u64;
        self.work.state_bytes += (states_moved(step) * spec.state_shape(1).slot_bytes()) as u64;
    }

    fn gated_delta(
        &mut self,
        spec: &GatedDelta,
        _out: Buf,
        qkv: Buf,
        _a: Buf,
        _b: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        self.calls.plain += 4;
        self.send_slots(qkv.rows);
        let state = spec.value_heads * spec.key_dim * spec.value_dim;
        let convolved = 2 * spec.taps + 8;
        // Two products, decay and update: each a multiplication and an addition an element.
        self.work.flops += (qkv.rows * (spec.channels() * convolved + 8 * state)) as u64;
        self.work.state_bytes += (states_moved(step) * spec.state_shape(1).slot_bytes()) as u64;
        Ok(())
    }

    fn selective_scan(&mut self, spec: &SelectiveScan, _out: Buf, x: Buf, _gates: [Buf; 2], step: &StepInput<'_>) {
        self.calls.plain += 2;
        self.send_slots(x.rows);
        let state = spec.heads * spec.state_dim * spec.head_dim;
        // One product, decay and update: each a multiplication and an addition an element.
        self.work.flops += (x.rows * 6 * state) as u64;
        let matrices = spec.state_shape(1, 1).slot_bytes();
        self.work.state_bytes += (states_moved(step) * matrices) as u64;
    }

    fn experts(&mut self, spec: &Experts<'_>, _out: Buf, x: Buf, router: Buf, _mode: Mode) -> Result<(), DeviceError> {
        self.calls.plain += 5;
        let scope = self.mark();
        if self.weights.on_gpu() {
            let groups = spec.scoring.map_or(1, |scoring| scoring.groups);
            let has = [spec.gate.len(), spec.top_k, groups];
            if has.iter().zip(GPU_EXPERTS_MAX).any(|(has, most)| *has > most) {
                self.not_on_gpu("more experts than a GPU chooses from");
            }
            let width = self.weights.linear(spec.gate[0]).packing.out();
            GpuExperts::take(self, spec, [x.rows, x.cols, width])?;
            self.calls.grouped += if spec.up.is_empty() { 2 } else { 3 };
            self.calls.plain += if spec.weighs_inputs { 3 } else { 0 };
        } else {
            let mut space = Space::begin(&mut self.stack, self.weights, spec, x)?;
            let inputs = self.stack.mark();
            space.take_inputs(&mut self.stack)?;
            self.stack.release(inputs);
            space.take_outputs(&mut self.stack)?;
        }
        self.release(scope);
        self.work.flops += 8 * (router.rows * router.cols) as u64;
        let choices = x.rows * spec.top_k;
        // At most as many experts as there are choices.
        let chosen = choices.min(spec.gate.len());
        for matrices in [spec.gate, spec.up, spec.down] {
            for (expert, id) in matrices.iter().take(chosen).enumerate() {
                let packing = &self.weights.linear(*id).packing;
                let rows = choices / chosen + usize::from(expert < choices % chosen);
                self.work.flops += 2 * (rows * packing.out() * packing.k()) as u64;
                self.work.weight_bytes += packing.bytes() as u64;
            }
        }
        Ok(())
    }

    fn add_gated(&mut self, x: Buf, _y: Buf, _gate: Buf) {
        self.calls.plain += 1;
        self.work.flops += 2 * (x.rows * x.cols) as u64;
    }

    fn put(&mut self, _out: Buf, _x: Buf, _column: usize) {
        self.calls.plain += 1;
    }

    fn take(&mut self, _out: Buf, _x: Buf, _column: usize) {
        self.calls.plain += 1;
    }

    fn place(&mut self, x: Buf, first_row: usize, _: &[f32], _: usize, _: usize, _: Mode) {
        self.calls.plain += 1;
        // Each row, and its destination.
        self.upload += (x.rows - first_row) * (x.cols + 1);
    }

    fn unfold(&mut self, _out: Buf, _x: Buf, _spec: &Unfold) {
        self.calls.plain += 1;
    }

    fn gather(&mut self, _out: Buf, _x: Buf, rows: &[u32]) {
        self.calls.plain += 1;
        self.upload += rows.len();
    }

    fn arrange(&mut self, out: Buf, _x: Buf, _from: &(dyn Fn(usize) -> usize + Sync)) {
        self.calls.plain += 1;
        self.upload += out.rows;
    }

    fn keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf {
        self.calls.plain += 1;
        self.upload += rows.len();
        x.span(0, rows.len())
    }

    fn clamp(&mut self, x: Buf, _low: f32, _high: f32) {
        self.calls.plain += 1;
        self.work.flops += 2 * (x.rows * x.cols) as u64;
    }

    fn candidates(&mut self, _out: Buf, _blocks: Buf, _x: Buf, counts: &[u32]) {
        self.calls.plain += 2;
        self.upload += CANDIDATE_WORDS * counts.len();
    }

    fn softcap(&mut self, x: Buf, _cap: f32) {
        self.calls.plain += 1;
        self.work.flops += 8 * (x.rows * x.cols) as u64;
    }
}
