//! A recurrent layer on all cores. First come gates and convolution, one task per head. Then come the states: a task is a few tiles of
//! one sequence's head.
//!
//! No task depends on another within either pass, and no cut changes a result. Heads and columns of a state are independent, and
//! each task takes all rows of a sequence in order.

use plimsoll_kernels::{self as kernels, ConvRows, ConvSpec, HeadNorm};

use super::CpuDevice;
use super::arena::Arena;
use super::rows::for_rows;
use super::states::Heads;
use crate::device::{Buf, GatedDelta, StepInput};
use crate::kv::StateShape;

impl CpuDevice {
    pub(super) fn run_delta(&mut self, spec: &GatedDelta, out: Buf, qkv: Buf, a: Buf, b: Buf, step: &StepInput<'_>) {
        let shape = self.memory.state_shape.expect("a model with recurrent layers has a state");
        let expected = StateShape { ngrams: shape.ngrams, ..spec.state_shape(shape.layers) };
        assert_eq!(expected, shape, "the layer's state");
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
        let GatedDelta { key_heads, value_heads, key_dim, value_dim, .. } = *spec;
        let columns = |head: usize| {
            let key_head = spec.key_head(head);
            let [q, k] = [key_head, key_heads + key_head].map(|head| head * key_dim);
            [q, k, 2 * key_heads * key_dim + head * value_dim]
        };
        let heads = Heads { layer: spec.layer, count: value_heads, columns: &columns, skip: None };
        self.update(&heads, out, qkv, [a, b], step);
    }

    /// Convolution, SiLU and the norms of queries and keys. A task is one head of queries, keys or values.
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
            let conv = ConvSpec { weights, taps, bias: None, silu: true, norm, history_ld: channels };
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
}
