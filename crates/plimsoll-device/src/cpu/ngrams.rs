//! Layers that look up n-grams: the rows of their tables, what each residual stream takes of them, and their convolution.
//!
//! What a sequence's rows need of earlier ones is in its slot: the last inputs of the convolution, and the last token ids.

use plimsoll_kernels::{self as kernels, ConvRows, ConvSpec, HeadNorm};

use super::CpuDevice;
use super::conv::CONV_BLOCK;
use super::rows::for_rows;
use crate::device::{Buf, NO_STATE, NgramConv, Ngrams, SeqSpan, StepInput};
use crate::kv::NgramState;

/// Tokens before a row that an n-gram may reach, at most.
const BEFORE_MAX: usize = 16;

/// Floats of scratch one thread needs for the convolution of such layers.
pub(super) fn scratch_floats(ngrams: &NgramState) -> usize {
    let (width, taps) = (CONV_BLOCK.min(ngrams.channels), ngrams.history + 1);
    kernels::conv_weights_len(width, taps) + kernels::conv_scratch_len(width, taps)
}

impl CpuDevice {
    /// Where in a slot such a layer's state begins.
    pub(super) fn ngrams_at(&self, layer: usize) -> usize {
        let shape = self.memory.state_shape.expect("a model with n-grams has a state");
        let ngrams = shape.ngrams.expect("a model with n-grams keeps their state");
        assert!(layer < ngrams.layers, "n-gram layer {layer} of {}", ngrams.layers);
        shape.ngrams_at() + layer * ngrams.layer_bytes()
    }

    /// [`crate::Device::embed_ngrams`].
    pub(super) fn run_ngrams(&mut self, spec: &Ngrams, out: Buf, ids: Buf, step: &StepInput<'_>) {
        let heads = spec.heads.len();
        assert_eq!((ids.rows, ids.cols), (out.rows, heads), "a row of the table for every head");
        assert_eq!(
            (step.tokens.len(), step.state_out.len()),
            (out.rows, out.rows),
            "a token and a slot, or none, a row"
        );
        self.check_slots(step);
        for seq in step.seqs {
            self.number_rows(spec, ids, seq, step);
        }
        let (arena, width) = (self.arena(), out.cols / heads);
        let weights = &self.weights;
        for_rows(&mut self.pool, out, |_, row| {
            // SAFETY: both are inside the workspace and do not overlap, each row of `out` belongs to one task, nothing writes `ids`.
            let (out, ids) = unsafe { (arena.row(out, row), &arena.matrix(ids)[row * heads..][..heads]) };
            for (out, id) in out.chunks_exact_mut(width).zip(ids) {
                let (table, row) = spec.place(id.to_bits() as usize);
                let (linear, data) = weights.linear(table);
                kernels::unpack_row(&linear.packing, data, row, out);
            }
        });
    }

    /// Writes the numbers of the table's rows for a sequence's rows, as the bits of floats, and leaves its last tokens in slots.
    fn number_rows(&mut self, spec: &Ngrams, ids: Buf, seq: &SeqSpan, step: &StepInput<'_>) {
        let count = spec.before();
        assert!(count <= BEFORE_MAX, "{count} tokens before a row, at most {BEFORE_MAX}");
        let tokens = &step.tokens[seq.first_row..][..seq.rows];
        // The nearest first. Read before a slot is written: a sequence may end in the slot that it starts from.
        let mut before = [spec.end; BEFORE_MAX];
        if let Some(slot) = seq.state {
            let stored = self.ngram_tokens(spec.layer, slot, count);
            before
                .iter_mut()
                .zip(stored.as_chunks::<4>().0)
                .for_each(|(token, bytes)| *token = u32::from_ne_bytes(*bytes));
        }
        // The token so many places before a row.
        let at =
            |row: usize, back: usize| row.checked_sub(back).map_or_else(|| before[back - row - 1], |row| tokens[row]);
        let mut rows = [0; 128];
        for (row, token) in tokens.iter().enumerate() {
            spec.rows(*token, |place| at(row, place + 1), &mut rows[..spec.heads.len()]);
            let numbers = self.row_mut(ids, seq.first_row + row);
            numbers.iter_mut().zip(&rows).for_each(|(number, row)| *number = f32::from_bits(*row));
        }
        for (row, slot) in
            step.state_out[seq.first_row..][..seq.rows].iter().enumerate().filter(|(_, slot)| **slot != NO_STATE)
        {
            let stored = self.ngram_tokens(spec.layer, *slot, count).as_chunks_mut::<4>().0;
            stored.iter_mut().enumerate().for_each(|(place, bytes)| *bytes = at(row, place).to_ne_bytes());
        }
    }

    /// The token ids that a slot keeps for such a layer, the nearest first.
    fn ngram_tokens(&mut self, layer: usize, slot: u32, count: usize) -> &mut [u8] {
        let ngrams =
            self.memory.state_shape.and_then(|shape| shape.ngrams).expect("a model with n-grams keeps their state");
        let at = self.ngrams_at(layer) + ngrams.conv_bytes();
        assert_eq!(count, ngrams.tokens, "tokens of a slot");
        &mut self.memory.slot_mut(slot as usize)[at..][..count * size_of::<u32>()]
    }

    /// [`crate::Device::gate_streams`].
    pub(super) fn run_gate_streams(&mut self, keys: Buf, queries: Buf, values: Buf) {
        let width = values.cols;
        assert_eq!((keys.rows, keys.cols), (queries.rows, queries.cols), "a query a key");
        assert_eq!((keys.rows, keys.cols % width), (values.rows, 0), "streams as wide as values");
        let isa = self.isa;
        self.rows(keys, |arena, _, row| {
            // SAFETY: rows are inside the workspace, the matrices do not overlap, each row belongs to one task.
            let (keys, queries, value) =
                unsafe { (arena.row(keys, row), arena.row(queries, row), arena.row(values, row)) };
            for (key, query) in keys.chunks_exact_mut(width).zip(queries.chunks_exact(width)) {
                kernels::gate_stream(isa, key, query, value);
            }
        });
    }

    /// [`crate::Device::ngram_conv`]: a task a block of channels.
    pub(super) fn run_ngram_conv(&mut self, spec: &NgramConv, x: Buf, step: &StepInput<'_>) {
        let NgramConv { layer, channels, taps, dilation, .. } = *spec;
        let shape =
            self.memory.state_shape.and_then(|shape| shape.ngrams).expect("a model with n-grams keeps their state");
        assert_eq!((shape.channels, shape.history), (channels, spec.history()), "the layer's state");
        assert_eq!((x.cols, step.state_out.len()), (channels, x.rows), "a slot, or none, for every row");
        self.check_slots(step);
        let states = self.ngram_states(layer, step.state_out);
        let (isa, arena) = (self.isa, self.arena());
        let stored = self.weights.vector(spec.weight);
        assert_eq!(stored.len(), channels * taps, "weights of the convolution");
        let all_taps = spec.history() + 1;
        self.pool.run(channels.div_ceil(CONV_BLOCK), &|thread, task| {
            let first = task * CONV_BLOCK;
            let width = CONV_BLOCK.min(channels - first);
            // SAFETY: scratch belongs to this thread.
            let scratch = unsafe { arena.scratch(thread) };
            let (weights, scratch) = scratch.split_at_mut(kernels::conv_weights_len(width, all_taps));
            kernels::dilated_conv_weights(&stored[first * taps..][..width * taps], (taps, dilation), weights);
            let norm = HeadNorm::None;
            let conv = ConvSpec { weights, taps: all_taps, bias: None, silu: true, norm, history_ld: channels };
            for seq in step.seqs {
                // SAFETY: the sequence's rows of these channels are inside `x`, and, like the same channels in its slots, this task's
                // alone; slots were checked.
                unsafe {
                    let ptr = arena.pointer(x).add(seq.first_row * channels + first);
                    let rows = ConvRows { ptr, ld: channels, channels: width };
                    kernels::causal_conv(isa, &conv, rows, &states.at(first, seq), scratch);
                }
            }
        });
    }
}
