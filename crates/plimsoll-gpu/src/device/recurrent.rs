//! Recurrent layers as dispatches. A workgroup takes some channels, or some columns of a head, of one sequence.

use plimsoll_device::{Buf, CausalConv, GatedDelta, NO_STATE, SelectiveScan, SeqSpan, StateShape, StepInput, VectorId};

use super::operations::{by_row, elements};
use super::{GpuDevice, at};
use crate::kernel::recurrent::COLUMNS;
use crate::kernel::{Kernel, THREADS};

/// The matrices of a layer's heads.
struct Heads {
    layer: usize,
    count: usize,
    /// Groups of heads that share queries and keys.
    groups: usize,
    /// Neighbouring heads of a group; 0: head h belongs to group h modulo `groups`.
    per: usize,
    /// For Mamba-2, the share of a value that is added to its output.
    skip: Option<VectorId>,
}

impl GpuDevice {
    fn state(&self) -> StateShape {
        self.memory.state_shape.expect("a model with recurrent layers has a state")
    }

    /// Uploads a step's sequences, and the slot of each row, once.
    fn slots_of(&mut self, step: &StepInput<'_>) -> [u32; 2] {
        if let Some(sent) = self.sent_slots {
            return sent;
        }
        let slots = self.memory.sizes.slots.max(1);
        let named = step.seqs.iter().filter_map(|seq| seq.state).chain(step.state_out.iter().copied());
        for slot in named.filter(|slot| *slot != NO_STATE) {
            assert!((slot as usize) < slots, "state slot {slot} of {slots}");
        }
        let words = |seq: &SeqSpan| [seq.first_row as u32, seq.rows as u32, seq.state.unwrap_or(NO_STATE)];
        let seqs = self.record.send(step.seqs.iter().flat_map(words));
        let outs = self.record.send(step.state_out.iter().copied());
        self.sent_slots = Some([seqs, outs]);
        [seqs, outs]
    }

    pub(super) fn run_conv(&mut self, conv: &CausalConv, x: Buf, gates: Option<[Buf; 2]>, step: &StepInput<'_>) {
        assert_eq!(x.cols, conv.channels, "channels");
        let shaped = |gate: &Buf| (gate.rows, gate.cols) == (x.rows, x.cols);
        assert!(gates.iter().flatten().all(shaped), "gates have the shape of the rows");
        let state = self.state();
        assert_eq!((state.conv_channels, state.conv_history), (x.cols, conv.taps - 1), "the layer's state");
        assert_eq!(step.state_out.len(), x.rows, "a slot, or none, for every row");
        let [seqs, outs] = self.slots_of(step);
        let [before, after] = gates.map_or([0; 2], |gates| gates.map(|gate| at(gate) + 1));
        let params = [
            at(x),
            x.cols as u32,
            self.vector(conv.weight),
            conv.bias.map_or(0, |bias| self.vector(bias) + 1),
            before,
            after,
            u32::from(conv.silu),
            seqs,
            outs,
            (state.layer_bytes() / 4) as u32,
        ];
        let groups = [x.cols.div_ceil(THREADS as usize) as u32, step.seqs.len() as u32];
        self.call_on(Kernel::Conv(conv.taps), conv.layer, groups, &params);
    }

    pub(super) fn run_delta(&mut self, spec: &GatedDelta, out: Buf, qkv: Buf, [a, b]: [Buf; 2], step: &StepInput<'_>) {
        let state = self.state();
        assert_eq!(spec.state_shape(state.layers), state, "the layer's state");
        assert_eq!((qkv.cols, out.cols), (spec.channels(), spec.value_heads * spec.value_dim), "widths");
        assert_eq!((a.cols, b.cols), (spec.value_heads, spec.value_heads), "one gate a value head");
        let heads = spec.value_heads as u32;
        let (a_log, dt_bias) = (self.vector(spec.a_log), self.vector(spec.dt_bias));
        let count = a.rows * a.cols;
        self.call(Kernel::Gates, elements(count), &[at(a), at(b), count as u32, heads, a_log, dt_bias, 0, 0]);
        let GatedDelta { layer, taps, conv, key_heads, key_dim, .. } = *spec;
        let conv = CausalConv { layer, channels: qkv.cols, taps, weight: conv, bias: None, silu: true };
        self.run_conv(&conv, qkv, None, step);
        let (rows, width) = (qkv.rows as u32, qkv.cols as u32);
        let scale = 1.0 / (key_dim as f32).sqrt();
        let normed = [at(qkv), rows, 2 * key_heads as u32, key_dim as u32, width, key_heads as u32, scale.to_bits()];
        self.call(Kernel::NormHeads, by_row(qkv.rows * 2 * key_heads), &normed);
        let per = if spec.tiled { 0 } else { spec.value_heads / key_heads };
        let heads = Heads { layer, count: spec.value_heads, groups: key_heads, per, skip: None };
        self.update(&heads, [out, qkv, a, b], step);
    }

    pub(super) fn run_scan(
        &mut self,
        spec: &SelectiveScan,
        out: Buf,
        x: Buf,
        [dt, decay]: [Buf; 2],
        step: &StepInput<'_>,
    ) {
        let SelectiveScan { layer, heads, groups, limits: [least, most], .. } = *spec;
        let state = self.state();
        assert_eq!(spec.state_shape(state.layers, state.conv_history + 1), state, "the layer's state");
        assert_eq!((x.cols, out.cols), (spec.channels(), spec.width()), "widths");
        assert_eq!((dt.cols, decay.cols), (heads, heads), "one time step a head");
        let (a_log, dt_bias) = (self.vector(spec.a_log), self.vector(spec.dt_bias));
        // A missing limit becomes the largest number that a kernel may compare with.
        let [least, most] = [least, most].map(|limit| limit.clamp(f32::MIN, f32::MAX).to_bits());
        let count = dt.rows * heads;
        let params = [at(dt), at(decay), count as u32, heads as u32, a_log, dt_bias, least, most];
        self.call(Kernel::TimeSteps, elements(count), &params);
        let heads = Heads { layer, count: heads, groups, per: heads / groups, skip: Some(spec.skip) };
        self.update(&heads, [out, x, decay, dt], step);
    }

    /// Updates the states of the heads with every sequence's rows of `x`.
    fn update(&mut self, heads: &Heads, [out, x, decay, beta]: [Buf; 4], step: &StepInput<'_>) {
        let state = self.state();
        let [seqs, outs] = self.slots_of(step);
        let params = [
            at(x),
            at(out),
            at(decay),
            at(beta),
            heads.count as u32,
            state.value_dim as u32,
            heads.groups as u32,
            heads.per as u32,
            seqs,
            outs,
            (state.layer_bytes() / 4) as u32,
            (state.conv_bytes() / 4) as u32,
            heads.skip.map_or(0, |skip| self.vector(skip)),
        ];
        let tiles = state.value_dim.div_ceil(COLUMNS);
        let groups = [(tiles * heads.count) as u32, step.seqs.len() as u32];
        self.call_on(Kernel::Recur(state.key_dim, heads.skip.is_some()), heads.layer, groups, &params);
    }
}
