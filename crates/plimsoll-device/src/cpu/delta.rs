//! A recurrent layer on all cores: first gates and convolution, a task a head; then the states, a task a few tiles of one sequence's
//! head.
//!
//! No task depends on another within either pass, and no cut changes a result: heads and columns of a state are independent, and
//! each task takes all rows of a sequence in order.

use plimsoll_kernels::{
    self as kernels, ConvRows, ConvSpec, DeltaInput, DeltaOutput, HeadNorm, STATE_TILE, StateSlots,
};

use super::CpuDevice;
use super::arena::Arena;
use super::cut::TASKS_PER_THREAD;
use super::rows::for_rows;
use crate::device::{Buf, GatedDelta, NO_STATE, SeqSpan, StepInput};
use crate::kv::StateShape;

/// Floats of scratch one thread needs for a state of this shape.
pub(super) fn scratch_floats(shape: &StateShape) -> usize {
    let (taps, widest) = (shape.conv_history + 1, shape.key_dim.max(shape.value_dim));
    let conv = kernels::conv_weights_len(widest, taps) + kernels::conv_scratch_len(widest, taps);
    conv.max(kernels::delta_scratch_len(shape.key_dim))
}

/// The layer's part of all slots, for tasks on other threads.
struct States<'a> {
    /// The layer's part of slot 0.
    base: *mut f32,
    /// Floats from a slot to the next.
    stride: usize,
    out: &'a [u32],
}

// SAFETY: tasks use disjoint parts: other heads, other tiles, or other sequences; sequences have different slots.
unsafe impl Sync for States<'_> {}

impl States<'_> {
    /// What lies `offset` floats into the layer's part, for the rows of `seq`.
    fn at(&self, offset: usize, seq: &SeqSpan) -> StateSlots<'_> {
        let out = &self.out[seq.first_row..][..seq.rows];
        // In bounds: the layer's part is as long as the state's shape says.
        StateSlots { base: self.base.wrapping_add(offset), stride: self.stride, start: seq.state, out }
    }
}

impl CpuDevice {
    pub(super) fn run_delta(&mut self, spec: &GatedDelta, out: Buf, qkv: Buf, a: Buf, b: Buf, step: &StepInput<'_>) {
        let shape = self.memory.state_shape.expect("a model with recurrent layers has a state");
        assert_eq!(spec.state_shape(shape.layers), shape, "the layer's state");
        assert!(spec.layer < shape.layers, "recurrent layer {} of {}", spec.layer, shape.layers);
        assert!(spec.value_heads.is_multiple_of(spec.key_heads), "whole groups of value heads");
        assert_eq!((qkv.cols, out.cols), (spec.channels(), spec.value_heads * spec.value_dim), "widths");
        assert_eq!((a.cols, b.cols), (spec.value_heads, spec.value_heads), "one gate a value head");
        assert_eq!(step.state_out.len(), qkv.rows, "a slot, or none, for every row");
        assert!([out.rows, a.rows, b.rows].iter().all(|rows| *rows == qkv.rows), "one height");
        self.check_slots(step);
        let isa = self.isa;
        let (a_log, dt_bias) = (self.weights.vector(spec.a_log), self.weights.vector(spec.dt_bias));
        let arena = Arena::new(&mut self.memory.workspace, self.memory.scratch_at, self.memory.scratch);
        for_rows(&mut self.pool, a, |_, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (a, b) = unsafe { (arena.row(a, row), arena.row(b, row)) };
            kernels::delta_gates(isa, a, b, a_log, dt_bias);
        });
        self.convolve(spec, qkv, step);
        self.update(spec, out, qkv, a, b, step);
    }

    /// A slot out of range, or named for two rows, would be silent damage.
    fn check_slots(&self, step: &StepInput<'_>) {
        let slots = self.memory.slots();
        let twice =
            |row: usize| step.state_out[row] != NO_STATE && step.state_out[..row].contains(&step.state_out[row]);
        debug_assert!(!(0..step.state_out.len()).any(twice), "a slot named twice in {:?}", step.state_out);
        let named = step.seqs.iter().filter_map(|seq| seq.state).chain(step.state_out.iter().copied());
        for slot in named.filter(|slot| *slot != NO_STATE) {
            assert!((slot as usize) < slots, "state slot {slot} of {slots}");
        }
    }

    fn states<'a>(&mut self, layer: usize, out: &'a [u32]) -> States<'a> {
        let shape = self.memory.state_shape.expect("a model with recurrent layers has a state");
        let slots = self.memory.states.as_mut().expect("a model with recurrent layers has slots");
        // In bounds: a layer is part of slot 0.
        let base = slots.as_mut_ptr().wrapping_add(layer * shape.layer_bytes());
        // Regions and all parts of a slot are aligned to cache lines.
        States { base: base.cast(), stride: shape.slot_bytes() / size_of::<f32>(), out }
    }

    /// Convolution, SiLU and the norms of queries and keys: one task a head of queries, keys or values.
    fn convolve(&mut self, spec: &GatedDelta, qkv: Buf, step: &StepInput<'_>) {
        let states = self.states(spec.layer, step.state_out);
        let (isa, arena) = (self.isa, self.arena());
        let (taps, channels) = (spec.taps, spec.channels());
        let stored = self.weights.vector(spec.conv);
        assert_eq!(stored.len(), channels * taps, "weights of the convolution");
        let query_scale = 1.0 / (spec.key_dim as f32).sqrt();
        let keys = 2 * spec.key_heads;
        self.pool.run(keys + spec.value_heads, &|thread, task| {
            let (first, width) = match task.checked_sub(keys) {
                None => (task * spec.key_dim, spec.key_dim),
                Some(head) => (keys * spec.key_dim + head * spec.value_dim, spec.value_dim),
            };
            let norm = match task {
                _ if task < spec.key_heads => HeadNorm::L2(query_scale),
                _ if task < keys => HeadNorm::L2(1.0),
                _ => HeadNorm::None,
            };
            // SAFETY: scratch belongs to this thread.
            let scratch = unsafe { arena.scratch(thread) };
            let (weights, scratch) = scratch.split_at_mut(kernels::conv_weights_len(width, taps));
            kernels::conv_weights(&stored[first * taps..][..width * taps], taps, weights);
            let conv = ConvSpec { weights, taps, norm, history_ld: channels };
            for seq in step.seqs {
                // SAFETY: the sequence's rows of these channels are inside `qkv`, and, like the same channels in its slots, this
                // task's alone; slots were checked.
                unsafe {
                    let ptr = arena.pointer(qkv).add(seq.first_row * channels + first);
                    let rows = ConvRows { ptr, ld: channels, channels: width };
                    kernels::causal_conv(isa, &conv, rows, &states.at(first, seq), scratch);
                }
            }
        });
    }

    /// The states: tasks are cut so that a few are there for each thread.
    fn update(&mut self, spec: &GatedDelta, out: Buf, qkv: Buf, a: Buf, b: Buf, step: &StepInput<'_>) {
        let states = self.states(spec.layer, step.state_out);
        let (isa, arena, threads) = (self.isa, self.arena(), self.pool.threads());
        let GatedDelta { key_heads, value_heads, key_dim, value_dim, .. } = *spec;
        let tiles = value_dim.div_ceil(STATE_TILE);
        let whole_heads = step.seqs.len() * value_heads;
        let wanted = if threads == 1 { 1 } else { (threads * TASKS_PER_THREAD).div_ceil(whole_heads.max(1)) };
        // Tiles advance in pairs where they can.
        let block = tiles.div_ceil(wanted).next_multiple_of(2);
        let blocks = tiles.div_ceil(block);
        let matrices = spec.state_shape(1).conv_bytes() / size_of::<f32>();
        self.pool.run(whole_heads * blocks, &|thread, task| {
            let (seq, head, first) = (task / blocks / value_heads, task / blocks % value_heads, task % blocks * block);
            let seq = &step.seqs[seq];
            let key_head = spec.key_head(head);
            // SAFETY: these matrices are only read here, and scratch belongs to this thread.
            let (qkv, decay, beta, scratch) = unsafe {
                (
                    &arena.matrix(qkv)[seq.first_row * qkv.cols..],
                    &arena.matrix(a)[seq.first_row * value_heads + head..],
                    &arena.matrix(b)[seq.first_row * value_heads + head..],
                    arena.scratch(thread),
                )
            };
            let input = DeltaInput {
                q: &qkv[key_head * key_dim..],
                k: &qkv[(key_heads + key_head) * key_dim..],
                v: &qkv[2 * key_heads * key_dim + head * value_dim..],
                ld: spec.channels(),
                decay,
                beta,
                gate_ld: value_heads,
                key_dim,
                value_dim,
            };
            let slots = states.at(matrices + head * key_dim * value_dim, seq);
            // SAFETY: in bounds of `out` and of the slots, which were checked; each task has its own sequence, head or tiles.
            unsafe {
                let ptr = arena.pointer(out).add(seq.first_row * out.cols + head * value_dim);
                let target = DeltaOutput { ptr, ld: out.cols };
                kernels::gated_delta(isa, &input, first..(first + block).min(tiles), &slots, scratch, target);
            }
        });
    }
}
