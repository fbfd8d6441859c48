//! Slots of recurrent state, shared by tasks, and the update of the heads' matrices on all cores. A task is a few tiles of one
//! sequence's head.

use plimsoll_kernels::{self as kernels, DeltaInput, DeltaOutput, STATE_TILE, StateRule, StateSlots};

use super::CpuDevice;
use super::cut::TASKS_PER_THREAD;
use crate::device::{Buf, NO_STATE, SeqSpan, StepInput};
use crate::kv::StateShape;
use crate::weights::VectorId;

/// Channels of a task of a convolution.
pub(super) const CONV_BLOCK: usize = 128;

/// Floats of scratch one thread needs for a state of this shape.
pub(super) fn scratch_floats(shape: &StateShape) -> usize {
    let widest = shape.key_dim.max(shape.value_dim).max(CONV_BLOCK.min(shape.conv_channels));
    let conv =
        |width, history| kernels::conv_weights_len(width, history + 1) + kernels::conv_scratch_len(width, history + 1);
    let ngrams = shape.ngrams.map_or(0, |ngrams| conv(CONV_BLOCK.min(ngrams.channels), ngrams.history));
    conv(widest, shape.conv_history).max(kernels::delta_scratch_len(shape.key_dim)).max(ngrams)
}

/// The layer's part of all slots, for tasks on other threads.
pub(super) struct States<'a> {
    /// The layer's part of slot 0.
    base: *mut f32,
    /// Floats from a slot to the next.
    stride: usize,
    out: &'a [u32],
}

// SAFETY: tasks use disjoint parts: other heads, other tiles, or other sequences; sequences have different slots.
unsafe impl Sync for States<'_> {}

impl States<'_> {
    /// Returns the slots for the rows of `seq`, from `offset` floats into the layer's part.
    pub(super) fn at(&self, offset: usize, seq: &SeqSpan) -> StateSlots<'_> {
        let out = &self.out[seq.first_row..][..seq.rows];
        // In bounds: the layer's part is as long as the state's shape says.
        StateSlots { base: self.base.wrapping_add(offset), stride: self.stride, start: seq.state, out }
    }
}

/// The heads of a recurrent layer.
pub(super) struct Heads<'a> {
    /// The layer's number among the recurrent ones.
    pub layer: usize,
    /// Number of heads.
    pub count: usize,
    /// The columns of a row at which a head's query, key and value begin.
    pub columns: &'a (dyn Fn(usize) -> [usize; 3] + Sync),
    /// For Mamba-2, the share of a value that is added to its output, one factor per head. None for Gated DeltaNet.
    pub skip: Option<VectorId>,
}

impl CpuDevice {
    /// Checks the slots of a step: a slot out of range, or given to two rows, would corrupt state silently.
    pub(super) fn check_slots(&self, step: &StepInput<'_>) {
        let slots = self.memory.slots();
        let twice =
            |row: usize| step.state_out[row] != NO_STATE && step.state_out[..row].contains(&step.state_out[row]);
        debug_assert!(!(0..step.state_out.len()).any(twice), "a slot named twice in {:?}", step.state_out);
        let named = step.seqs.iter().filter_map(|seq| seq.state).chain(step.state_out.iter().copied());
        for slot in named.filter(|slot| *slot != NO_STATE) {
            assert!((slot as usize) < slots, "state slot {slot} of {slots}");
        }
    }

    pub(super) fn states<'a>(&mut self, layer: usize, out: &'a [u32]) -> States<'a> {
        let shape = self.memory.state_shape.expect("a model with recurrent layers has a state");
        let slots = self.memory.states.as_mut().expect("a model with recurrent layers has slots");
        // In bounds: a layer is part of slot 0.
        let base = slots.as_mut_ptr().wrapping_add(layer * shape.layer_bytes());
        // Regions and all parts of a slot are aligned to cache lines.
        States { base: base.cast(), stride: shape.slot_bytes() / size_of::<f32>(), out }
    }

    /// Returns the states of a layer that looks up n-grams.
    pub(super) fn ngram_states<'a>(&mut self, layer: usize, out: &'a [u32]) -> States<'a> {
        let at = self.ngrams_at(layer);
        let states = self.states(0, out);
        // In bounds: a layer is part of slot 0.
        States { base: states.base.wrapping_add(at / size_of::<f32>()), ..states }
    }

    /// Updates the states of the heads with every sequence's rows of `x`. `gates` are decay and write strength, one of each per head.
    /// The cut gives each thread a few tasks.
    pub(super) fn update(&mut self, heads: &Heads<'_>, out: Buf, x: Buf, gates: [Buf; 2], step: &StepInput<'_>) {
        let shape = self.memory.state_shape.expect("a model with recurrent layers has a state");
        let states = self.states(heads.layer, step.state_out);
        let (isa, arena, threads, count) = (self.isa, self.arena(), self.pool.threads(), heads.count);
        let skip = heads.skip.map(|skip| self.weights.vector(skip));
        let (key_dim, value_dim, width) = (shape.key_dim, shape.value_dim, x.cols);
        let tiles = value_dim.div_ceil(STATE_TILE);
        let whole_heads = step.seqs.len() * count;
        let wanted = if threads == 1 { 1 } else { (threads * TASKS_PER_THREAD).div_ceil(whole_heads.max(1)) };
        // Tiles advance in pairs where they can.
        let block = tiles.div_ceil(wanted).next_multiple_of(2);
        let blocks = tiles.div_ceil(block);
        let matrices = shape.conv_bytes() / size_of::<f32>();
        self.pool.run(whole_heads * blocks, &|thread, task| {
            let (seq, head, first) = (task / blocks / count, task / blocks % count, task % blocks * block);
            let seq = &step.seqs[seq];
            // SAFETY: these matrices are only read here, and scratch belongs to this thread.
            let (x, [decay, beta], scratch) = unsafe {
                (
                    &arena.matrix(x)[seq.first_row * x.cols..],
                    gates.map(|gate| &arena.matrix(gate)[seq.first_row * count + head..]),
                    arena.scratch(thread),
                )
            };
            let [q, k, v] = (heads.columns)(head).map(|column| &x[column..]);
            let rule = skip.map_or(StateRule::Delta, |skip| StateRule::Additive { skip: skip[head] });
            let input = DeltaInput { q, k, v, ld: width, decay, beta, gate_ld: count, key_dim, value_dim, rule };
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
