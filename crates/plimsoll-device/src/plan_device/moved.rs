//! Bytes that operations take of the workspace, and states that they move.

use plimsoll_kernels::KvLayout;

use crate::device::{Attention, Buf, NO_STATE, StepInput};
use crate::kv::{PAGE_TOKENS, encoder_layout};

/// Returns the layout of keys and values of one layer of an encoder's step, and the bytes of workspace that they take.
pub(crate) fn within(spec: &Attention, q: Buf, k: Buf, step: &StepInput<'_>) -> (KvLayout, usize) {
    let head_dim = q.cols / spec.heads;
    let layout = encoder_layout(k.cols / head_dim, head_dim);
    (layout, step.pages.len() * layout.bytes_per_page().next_multiple_of(64))
}

/// Bytes of workspace for the keys and values of one sequence of an encoder, and for its page table.
pub(crate) fn sequence_bytes(spec: &Attention, k: Buf) -> [usize; 2] {
    let pages = k.rows.div_ceil(PAGE_TOKENS);
    let layout = encoder_layout(spec.heads, k.cols / spec.heads);
    [pages * layout.bytes_per_page().next_multiple_of(64), pages * size_of::<u32>()]
}

/// States that a recurrent layer reads and writes in a step.
pub(super) fn states_moved(step: &StepInput<'_>) -> usize {
    let started = step.seqs.iter().filter(|seq| seq.state.is_some()).count();
    started + step.state_out.iter().filter(|slot| **slot != NO_STATE).count()
}
