//! Layers that look up n-grams: the rows of their tables, the gates of the residual streams, and their convolution.
//!
//! A sequence's slot holds the state of earlier rows: the last inputs of the convolution, and the last token ids.

use plimsoll_kernels as kernels;

use super::CpuDevice;
use super::conv::Convolution;
use crate::device::{Buf, NO_STATE, NgramConv, Ngrams, SeqSpan, StepInput};
use crate::kv::{NgramState, StateShape};

/// Most tokens before a row that an n-gram may reach.
const BEFORE_MAX: usize = 16;
/// Most heads of a layer.
const HEADS_MAX: usize = 128;

impl CpuDevice {
    /// Returns the offset of an n-gram layer's state in a slot, in bytes.
    pub(super) fn ngrams_at(&self, layer: usize) -> usize {
        let (shape, ngrams) = self.ngram_state();
        assert!(layer < ngrams.layers, "n-gram layer {layer} of {}", ngrams.layers);
        shape.ngrams_at() + layer * ngrams.layer_bytes()
    }

    /// Returns the shape of a slot, and of the part that belongs to n-gram layers.
    fn ngram_state(&self) -> (StateShape, NgramState) {
        let shape = self.memory.state_shape.expect("a model with n-grams has a state");
        (shape, shape.ngrams.expect("a model with n-grams keeps their state"))
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
        let arena = self.arena();
        // SAFETY: `ids` is inside the workspace, does not overlap `out`, and nothing writes it.
        let place = |cell: usize| spec.place(unsafe { arena.matrix(ids) }[cell].to_bits() as usize);
        self.unpack_rows(out.reshape(out.cols / heads), spec.table[0].1, place, 1.0);
    }

    /// Writes the numbers of the table's rows for a sequence's rows, as the bits of floats, and leaves its last tokens in slots.
    fn number_rows(&mut self, spec: &Ngrams, ids: Buf, seq: &SeqSpan, step: &StepInput<'_>) {
        let count = spec.before();
        assert!(count <= BEFORE_MAX, "{count} tokens before a row, at most {BEFORE_MAX}");
        assert!(spec.heads.len() <= HEADS_MAX, "{} heads, at most {HEADS_MAX}", spec.heads.len());
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
        // The token `back` places before a row.
        let at =
            |row: usize, back: usize| row.checked_sub(back).map_or_else(|| before[back - row - 1], |row| tokens[row]);
        let mut rows = [0; HEADS_MAX];
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

    /// Returns the token ids that a slot keeps for an n-gram layer, the nearest first, as bytes.
    fn ngram_tokens(&mut self, layer: usize, slot: u32, count: usize) -> &mut [u8] {
        let (_, ngrams) = self.ngram_state();
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

    /// [`crate::Device::ngram_conv`].
    pub(super) fn run_ngram_conv(&mut self, spec: &NgramConv, x: Buf, step: &StepInput<'_>) {
        let NgramConv { layer, channels, weight, taps, dilation } = *spec;
        let (_, shape) = self.ngram_state();
        assert_eq!((shape.channels, shape.history), (channels, spec.history()), "the layer's state");
        let states = self.ngram_states(layer, step.state_out);
        let conv = Convolution { channels, weight, bias: None, taps, dilation, silu: true };
        self.run_convolution(conv, x, None, &states, step);
    }
}
