//! The scheduler: which rows run in the next step, of generation and of embeddings. It computes nothing on a device, and has no text and
//! no clients.
//!
//! A step is the decode rows of every running sequence (the newest token, and drafts to be checked) plus prefill chunks, oldest
//! first, under the step's row budget; of a long prompt, a chunk between two steps instead (`layered.rs`). Pages are taken as
//! positions need them. When none is left the newest running sequence is preempted: its pages go back, it keeps its place in the
//! queue, and what it had produced is computed again later (with the same bits: I9). The oldest is never preempted and fits the
//! pool alone, so it always finishes (I5).
//!
//! Generic over what a sequence carries, so that the engine, the simulator and the property tests run the same code.

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
    /// Oldest first. No ring buffer: one that never empties would touch all the memory that is reserved for it.
    waiting: Vec<Seq<T>>,
    running: Vec<Seq<T>>,
    entries: Vec<StepEntry>,
    reduced: ReducedLimits,
    prefill_budget: PrefillBudget,
    /// Chunks that were begun layer by layer.
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

    /// Takes the newest sequence out, waiting or running, unless it is the only one.
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

    /// The same, to write results into.
    pub fn running_mut(&mut self) -> &mut [Seq<T>] {
        &mut self.running
    }

    /// The same, and those that could start next.
    pub fn soon_mut(&mut self) -> impl Iterator<Item = &mut Seq<T>> {
        self.running.iter_mut().chain(self.waiting.iter_mut().take(self.limits.running))
    }

    /// Sequences that wait, oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Seq<T>> {
        self.waiting.iter()
    }

    /// The same, to note what is read for them.
    pub(crate) fn waiting_mut(&mut self) -> impl Iterator<Item = &mut Seq<T>> {
        self.waiting.iter_mut()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Takes out every sequence, waiting or running, that `gone` reports as no longer wanted.
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

    /// Lets others share what a sequence has computed of its prompt.
    pub fn publish(&mut self, index: usize) {
        self.running[index].publish();
    }

    /// Takes a finished sequence out; what it computed stays findable, as far as others could start from it.
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
