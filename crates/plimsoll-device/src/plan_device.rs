//! The planner's device: runs a model's `forward` without data and keeps count.
//!
//! It takes temporaries from the same stack bookkeeping as the real device, in the same order and sizes, so its high-water mark is
//! the real one. It also adds up floating-point operations and bytes moved, for what-if answers and rooflines.

use plimsoll_memory::step::StepStack;

use crate::device::{
    Activation, Attention, Blend, Buf, Device, DeviceError, Experts, GatedDelta, Input, Mark, Mode, NO_STATE, Places,
    Rotary, StepInput, Unfold,
};
use crate::experts::Space;
use crate::kv::{KvShape, PAGE_TOKENS, encoder_layout};
use crate::weights::{LinearId, VectorId, WeightTable};

/// Work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Multiplications and additions.
    pub flops: u64,
    /// Bytes of weights read.
    pub weight_bytes: u64,
    /// Bytes of keys and values read and written.
    pub kv_bytes: u64,
    /// Bytes of recurrent state read and written.
    pub state_bytes: u64,
}

impl std::ops::Sub for Work {
    type Output = Self;

    fn sub(self, less: Self) -> Self {
        Self {
            flops: self.flops - less.flops,
            weight_bytes: self.weight_bytes - less.weight_bytes,
            kv_bytes: self.kv_bytes - less.kv_bytes,
            state_bytes: self.state_bytes - less.state_bytes,
        }
    }
}

/// A device without memory.
pub struct PlanDevice<'a> {
    weights: &'a WeightTable,
    kv: KvShape,
    stack: StepStack,
    work: Work,
    rounds: bool,
}

impl<'a> PlanDevice<'a> {
    /// A planner over a model's weights and cache shape.
    pub fn new(weights: &'a WeightTable, kv: KvShape) -> Self {
        Self { weights, kv, stack: StepStack::new(usize::MAX), work: Work::default(), rounds: false }
    }

    /// The most bytes of step workspace that were in use.
    pub fn high_water(&self) -> usize {
        self.stack.high_water()
    }

    /// Whether rows would have been computed in bfloat16, by layers or attention.
    pub fn rounds(&self) -> bool {
        self.rounds
    }

    /// Work of everything that ran.
    pub fn work(&self) -> Work {
        self.work
    }
}

/// Bytes of workspace for the keys and values of one layer of an encoder's step.
pub(crate) fn within_bytes(kv: &KvShape, step: &StepInput<'_>) -> usize {
    step.pages.len() * kv.layer_bytes()
}

/// Bytes of workspace for the keys and values of one sequence of an encoder, and for its page table.
pub(crate) fn sequence_bytes(spec: &Attention, k: Buf) -> [usize; 2] {
    let pages = k.rows.div_ceil(PAGE_TOKENS);
    let layout = encoder_layout(spec.heads, k.cols / spec.heads);
    [pages * layout.bytes_per_page().next_multiple_of(64), pages * size_of::<u32>()]
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
        self.work.flops += (out.rows * out.cols) as u64;
    }

    fn rms_norm(&mut self, out: Buf, _x: Buf, _weight: VectorId, _eps: f32) {
        self.work.flops += 4 * (out.rows * out.cols) as u64;
    }

    fn layer_norm(&mut self, out: Buf, _x: Buf, _weight: VectorId, _bias: VectorId, _eps: f32) {
        self.work.flops += 7 * (out.rows * out.cols) as u64;
    }

    fn linear_rows(
        &mut self,
        input: Input,
        layers: &[(LinearId, Buf)],
        _mode: Mode,
        rounded_rows: usize,
    ) -> Result<(), DeviceError> {
        let x = input.ready(self);
        self.rounds |= rounded_rows > 0
            && layers.iter().any(|(id, _)| self.weights.rounds_rows(&self.weights.linear(*id).packing));
        let scope = self.mark();
        self.stack.take(self.weights.input_bytes(x.rows, x.cols, layers))?;
        for (id, _) in layers {
            let packing = &self.weights.linear(*id).packing;
            self.work.flops += 2 * (x.rows * packing.out() * packing.k()) as u64;
            self.work.weight_bytes += packing.bytes() as u64;
        }
        self.release(scope);
        Ok(())
    }

    fn rope_angles(&mut self, out: Buf, _inv_freq: VectorId, _positions: &[u32], _scale: f32) {
        self.work.flops += (out.rows * out.cols) as u64;
    }

    fn rope_angles_by_axis(&mut self, out: Buf, _inv_freq: VectorId, _axes: &[u8], _places: Places<'_>, _scale: f32) {
        self.work.flops += (out.rows * out.cols) as u64;
    }

    fn add_blended(&mut self, x: Buf, _table: LinearId, _blend: Blend<'_>) {
        self.work.flops += 8 * (x.rows * x.cols) as u64;
    }

    fn add_rows(&mut self, x: Buf, _table: VectorId, _which: &(dyn Fn(usize) -> usize + Sync)) {
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn rope(&mut self, x: Buf, angles: Buf, head_dim: usize, _interleaved: bool) {
        self.work.flops += 3 * (x.rows * x.cols / head_dim * angles.cols) as u64;
    }

    fn glu(&mut self, gate: Buf, _up: Buf, _act: Activation) {
        self.work.flops += 8 * (gate.rows * gate.cols) as u64;
    }

    fn activate(&mut self, x: Buf, _act: Activation) {
        self.work.flops += 8 * (x.rows * x.cols) as u64;
    }

    fn multiply(&mut self, x: Buf, _weight: VectorId) {
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn add(&mut self, x: Buf, _y: Buf) {
        self.work.flops += (x.rows * x.cols) as u64;
    }

    fn attention(
        &mut self,
        spec: &Attention,
        rotary: Option<&Rotary>,
        _out: Buf,
        q: Buf,
        k: Buf,
        _v: Buf,
        step: &StepInput<'_>,
    ) {
        if let Some(Rotary { norms, eps, angles, interleaved }) = rotary.copied() {
            let head_dim = q.cols / spec.heads;
            for (heads, norm) in [q, k].into_iter().zip(norms.into_iter().flatten()) {
                self.rms_norm(heads, heads, norm, eps);
            }
            for heads in [q, k] {
                self.rope(heads, angles, head_dim, interleaved);
            }
        }
        for seq in step.seqs {
            let last = seq.start + seq.rows;
            let seen = |position: usize| {
                let all = position + 1 - seq.seen_from;
                spec.window.map_or(all, |window| window.min(all))
            };
            let pairs: usize = (seq.start..last).map(seen).sum();
            self.work.flops += 4 * (pairs * q.cols) as u64;
            let pages = seen(last - 1).div_ceil(PAGE_TOKENS);
            self.work.kv_bytes += (pages * self.kv.layer_bytes()) as u64;
        }
    }

    fn attend_within(
        &mut self,
        _spec: &Attention,
        _out: Buf,
        q: Buf,
        _k: Buf,
        _v: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let scope = self.mark();
        self.stack.take(within_bytes(&self.kv, step))?;
        self.release(scope);
        let pairs: usize = step.seqs.iter().map(|seq| seq.rows * seq.rows).sum();
        self.work.flops += 4 * (pairs * q.cols) as u64;
        Ok(())
    }

    fn attend_all(&mut self, spec: &Attention, _out: Buf, q: Buf, k: Buf, _v: Buf) -> Result<(), DeviceError> {
        let scope = self.mark();
        for bytes in sequence_bytes(spec, k) {
            self.stack.take(bytes)?;
        }
        self.release(scope);
        self.work.flops += 4 * (q.rows * k.rows * q.cols) as u64;
        Ok(())
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
        let state = spec.value_heads * spec.key_dim * spec.value_dim;
        let convolved = 2 * spec.taps + 8;
        // Two products, decay and update: each a multiplication and an addition an element.
        self.work.flops += (qkv.rows * (spec.channels() * convolved + 8 * state)) as u64;
        let started = step.seqs.iter().filter(|seq| seq.state.is_some()).count();
        let kept = step.state_out.iter().filter(|slot| **slot != NO_STATE).count();
        self.work.state_bytes += ((started + kept) * spec.state_shape(1).slot_bytes()) as u64;
        Ok(())
    }

    fn experts(&mut self, spec: &Experts<'_>, _out: Buf, x: Buf, router: Buf, _mode: Mode) -> Result<(), DeviceError> {
        let scope = self.mark();
        let mut space = Space::begin(&mut self.stack, self.weights, spec, x)?;
        let inputs = self.stack.mark();
        space.take_inputs(&mut self.stack)?;
        self.stack.release(inputs);
        space.take_outputs(&mut self.stack)?;
        self.release(scope);
        self.work.flops += 8 * (router.rows * router.cols) as u64;
        let choices = x.rows * spec.top_k;
        // As many experts as rows can choose, were they all different ones.
        let chosen = choices.min(spec.gate.len());
        for matrices in [spec.gate, spec.up, spec.down] {
            for (expert, id) in matrices[..chosen].iter().enumerate() {
                let packing = &self.weights.linear(*id).packing;
                let rows = choices / chosen + usize::from(expert < choices % chosen);
                self.work.flops += 2 * (rows * packing.out() * packing.k()) as u64;
                self.work.weight_bytes += packing.bytes() as u64;
            }
        }
        Ok(())
    }

    fn add_gated(&mut self, x: Buf, _y: Buf, _gate: Buf) {
        self.work.flops += 2 * (x.rows * x.cols) as u64;
    }

    fn put(&mut self, _out: Buf, _x: Buf, _column: usize) {}

    fn place(&mut self, _: Buf, _: usize, _: &[f32], _: usize, _: usize, _: Mode) {}

    fn unfold(&mut self, _out: Buf, _x: Buf, _spec: &Unfold) {}

    fn gather(&mut self, _out: Buf, _x: Buf, _rows: &[u32]) {}

    fn keep_rows(&mut self, x: Buf, rows: &[u32]) -> Buf {
        x.span(0, rows.len())
    }

    fn softcap(&mut self, x: Buf, _cap: f32) {
        self.work.flops += 8 * (x.rows * x.cols) as u64;
    }
}
