//! Long prompts beside decoding sequences: a chunk goes through the model layer by layer, between their steps. So these
//! sequences wait for a layer and not for a chunk. The scheduler chooses the chunk; the worker chooses how many layers
//! run at a time.

use super::{Events, Scheduler, StepEntry};
use crate::cache::PAGE_TOKENS;

/// The most rows of a prompt's first chunk.
const FIRST_CHUNK_ROWS: usize = 2 * PAGE_TOKENS;

/// A chunk that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layered {
    number: u64,
    pub rows: usize,
    logit_rows: usize,
}

impl<T> Scheduler<T> {
    /// The chunk that is being computed layer by layer, if there is one, and its unique number. It lasts until it is
    /// committed, or its sequence is preempted or ends.
    pub fn layered(&self) -> Option<(u64, StepEntry)> {
        self.running.iter().enumerate().find_map(|(seq, of)| {
            let Layered { number, rows, logit_rows } = of.sched.layered?;
            Some((number, StepEntry { seq, start: of.computed, rows, logit_rows, drafts: 0 }))
        })
    }

    /// Begins a chunk of the `i`-th running sequence, a long prompt, unless another is under way.
    pub(super) fn begin_layers(&mut self, i: usize, events: &mut Events) {
        if self.layered().is_some() {
            return;
        }
        // The first chunk is small: waiting requests often share its prefix, such as the chat template, and get it sooner.
        let first = if self.running[i].computed == 0 { FIRST_CHUNK_ROWS } else { usize::MAX };
        let rows = self.prefill_budget.long.min(self.prefill_rows()).min(first).max(self.running[i].together());
        let Some(entry) = self.chunk(i, rows, self.limits.logit_rows, events) else { return };
        // Checkpoints for waiting sequences must be requested now: the layers write the states.
        self.request_shared_checkpoints();
        self.chunks_begun += 1;
        let seq = &mut self.running[i];
        seq.plan_checkpoints(entry.rows);
        seq.sched.layered = Some(Layered { number: self.chunks_begun, rows: entry.rows, logit_rows: entry.logit_rows });
    }
}
