//! The scheduler chooses the rows of the next step, for generation and embeddings. It computes nothing on a device, and handles no text and
//! no clients.
//!
//! A step has the decode rows of every running sequence (the newest token, and drafts to be verified) and prefill chunks, oldest first,
//! under the step's row budget. A chunk of a long prompt runs between two steps instead (`layered.rs`). Pages are taken as positions need
//! them. When none is left, the newest running sequence is preempted. It releases its pages, keeps its place in the queue, and its
//! positions are computed again later (with the same bits: I9). The oldest is never preempted and fits the pool alone, so it always
//! finishes (I5).
//!
//! Generic over a sequence's payload, so that the engine, the simulator and the property tests run the same code.

mod admission;
mod layered;
mod limits;
mod plan_step;
mod seq;

use crate::cache::PAGE_TOKENS;
use crate::cache::lease::SharedCache;
pub use limits::{Events, PrefillBudget, StepEntry, StepLimits};
pub use seq::{DiskRead, NewSeq, Pooled, Seq};

/// Waiting and running sequences, and the rules between them.
#[derive(Debug)]
pub struct Scheduler<T> {
    limits: StepLimits,
    cache: SharedCache,
    /// Oldest first. Not a ring buffer: one that never empties would touch all its reserved memory.
    waiting: Vec<Seq<T>>,
    running: Vec<Seq<T>>,
    entries: Vec<StepEntry>,
    reduced: ReducedLimits,
    prefill_budget: PrefillBudget,
    /// Layered chunks that were begun; the next chunk's number.
    chunks_begun: u64,
}

/// Limits below those of the plan, while memory is short.
#[derive(Clone, Copy, Debug)]
struct ReducedLimits {
    prefill_rows: usize,
    running: usize,
}

impl<T> Scheduler<T> {
    /// An empty scheduler over `cache`; room for `waiting_max` queued sequences is reserved.
    pub fn new(limits: StepLimits, cache: SharedCache, waiting_max: usize) -> Self {
        Self {
            limits,
            cache,
            // A preempted sequence returns to the queue, so the queue has room for all sequences.
            waiting: Vec::with_capacity(waiting_max + limits.running),
            running: Vec::with_capacity(limits.running),
            entries: Vec::with_capacity(limits.running),
            reduced: ReducedLimits { prefill_rows: limits.rows, running: limits.running },
            prefill_budget: PrefillBudget { prompts: limits.rows, long: limits.rows },
            chunks_begun: 0,
        }
    }

    /// Until the next call, prompts have at most these rows beside decoding sequences.
    pub fn set_prefill_budget(&mut self, prefill_budget: PrefillBudget) {
        self.prefill_budget =
            PrefillBudget { prompts: prefill_budget.prompts.max(1), long: prefill_budget.long.max(1) };
    }

    /// Until the next call, steps have at most `prefill_rows` rows of prompts and at most `running` sequences run: newer
    /// ones are preempted now and wait. The oldest runs in any case. Returns how many were preempted.
    pub fn reduce_limits(&mut self, prefill_rows: usize, running: usize) -> u64 {
        self.reduced = ReducedLimits {
            prefill_rows: prefill_rows.clamp(1, self.limits.rows),
            running: running.clamp(1, self.limits.running),
        };
        let mut preempted = 0;
        while self.running.len() > self.reduced.running {
            self.preempt(self.running.len() - 1);
            preempted += 1;
        }
        preempted
    }

    /// Removes the newest sequence, waiting or running, unless it is the only one.
    pub fn give_up_newest(&mut self) -> Option<Seq<T>> {
        if self.running.len() + self.waiting.len() < 2 {
            return None;
        }
        let newest = |seqs: Option<&Seq<T>>| seqs.map(|seq| seq.order);
        match newest(self.waiting.last()) > newest(self.running.last()) {
            true => self.waiting.pop(),
            false => self.running.pop(),
        }
    }

    /// Queues a sequence behind all older ones.
    pub fn push(&mut self, mut seq: Seq<T>) {
        seq.sched.split_numerics = self.limits.split_numerics();
        let fits = |seq: &Seq<T>| match self.limits.encoder_batch {
            true => seq.total_max <= self.limits.rows,
            false => seq.total_max.div_ceil(PAGE_TOKENS) <= self.cache.borrow().pool.total(),
        };
        debug_assert!(fits(&seq), "checked at submission");
        let behind = self.waiting.iter().rposition(|w| w.order < seq.order).map_or(0, |i| i + 1);
        self.waiting.insert(behind, seq);
    }

    /// Sequences in the running set, oldest first.
    pub fn running(&self) -> &[Seq<T>] {
        &self.running
    }

    /// Mutable sequences of the running set, to write results into.
    pub fn running_mut(&mut self) -> &mut [Seq<T>] {
        &mut self.running
    }

    /// Mutable running sequences, and the waiting ones that could start next.
    pub fn soon_mut(&mut self) -> impl Iterator<Item = &mut Seq<T>> {
        self.running.iter_mut().chain(self.waiting.iter_mut().take(self.limits.running))
    }

    /// Waiting sequences, oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Seq<T>> {
        self.waiting.iter()
    }

    /// Mutable waiting sequences, to record reads from disk.
    pub(crate) fn waiting_mut(&mut self) -> impl Iterator<Item = &mut Seq<T>> {
        self.waiting.iter_mut()
    }

    /// Whether no sequence runs or waits.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Removes every sequence, waiting or running, for which `gone` returns true.
    pub fn remove(&mut self, mut gone: impl FnMut(&Seq<T>) -> bool, mut take: impl FnMut(Seq<T>)) {
        for i in (0..self.running.len()).rev() {
            if gone(&self.running[i]) {
                take(self.running.remove(i));
            }
        }
        for i in (0..self.waiting.len()).rev() {
            if gone(&self.waiting[i]) {
                take(self.waiting.remove(i));
            }
        }
    }

    /// Records that the first `rows` rows of an entry of the last step were accepted; rows after them were drafts that missed.
    pub fn commit(&mut self, entry: StepEntry, rows: usize) {
        let seq = &mut self.running[entry.seq];
        seq.sched.layered = None;
        seq.computed = entry.start + rows;
        seq.media.passed(seq.computed);
        seq.states.advance(entry.start, rows, entry.keeps_each(self.limits.slots));
        if seq.sched.suspect_until.is_some_and(|position| seq.computed >= position) {
            seq.sched.suspect_until = None;
        }
    }

    /// All running sequences return to the queue, with nothing computed and nothing held. The caller rebuilds the
    /// tables.
    pub fn start_over(&mut self) {
        self.entries.clear();
        while let Some(mut seq) = self.running.pop() {
            seq.forget();
            self.push(seq);
        }
    }

    /// Publishes the computed positions of a sequence's prompt to the prefix cache.
    pub fn publish(&mut self, index: usize) {
        self.running[index].publish();
    }

    /// Removes a finished sequence. Its pages stay in the prefix cache, as far as other sequences could start from them.
    pub fn finish(&mut self, index: usize) -> Seq<T> {
        let mut seq = self.running.remove(index);
        seq.donate();
        seq
    }
}

#[cfg(test)]
mod encoder_tests;
#[cfg(test)]
mod tests;
