//! The scheduler: which rows run in the next step. One for all work; it knows nothing of devices, text or clients.
//!
//! A step is the decode rows of every running sequence plus prefill chunks, oldest first, under the step's row budget. Pages are
//! taken as positions need them. When none is left the newest running sequence is preempted: its pages go back, it keeps
//! its place in the queue, and what it had produced is computed again later (with the same bits: I9). The oldest is
//! never preempted and fits the pool alone, so it always finishes (I5).
//!
//! Generic over what a sequence carries, so that the engine, the simulator and the property tests run this very code.

use std::collections::VecDeque;

use crate::cache::PAGE_TOKENS;
use crate::lease::{PageLease, SharedCache};

/// One sequence as the scheduler sees it.
#[derive(Debug)]
pub struct Seq<T> {
    /// Arrival number: smaller is older.
    pub order: u64,
    /// Sequences of different salts share no pages.
    pub salt: u64,
    /// Prompt and output so far.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Prompt plus the most it may generate.
    pub total_max: usize,
    /// Positions whose keys and values are in `pages`.
    pub computed: usize,
    /// Its pages.
    pub pages: PageLease,
    /// Logits are wanted from this position on (the last position's always).
    pub logits_from: usize,
    /// What the owner attaches.
    pub work: T,
}

impl<T> Seq<T> {
    /// Whether only the newest token is left to compute.
    fn decoding(&self) -> bool {
        self.computed + 1 == self.tokens.len() && self.tokens.len() > self.prompt_len
    }

    fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Rows whose logits are wanted among the next `rows`.
    fn logit_rows(&self, rows: usize) -> usize {
        let end = self.computed + rows;
        let wanted = end.saturating_sub(self.logits_from.max(self.computed));
        if end == self.tokens.len() { wanted.max(1) } else { wanted }
    }

    /// Gives up all pages; everything is computed again later.
    fn preempt(&mut self) {
        self.pages.clear();
        self.computed = 0;
    }
}

/// The bounds of a step and of the running set.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Rows of one step.
    pub rows: usize,
    /// Rows of one step whose logits are produced.
    pub logit_rows: usize,
    /// Sequences that run at once.
    pub running: usize,
    /// Prefill rows of a step in which others decode, so that their tokens keep coming.
    pub prefill_rows_beside_decode: usize,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Index in [`Scheduler::running`].
    pub seq: usize,
    /// Position of its first row.
    pub start: usize,
    /// Its rows.
    pub rows: usize,
    /// How many of its last rows produce logits.
    pub logit_rows: usize,
}

/// Counts of what scheduling a step did besides filling it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Sequences preempted.
    pub preempted: u64,
    /// Sequences that left the queue for the running set.
    pub admitted: u64,
}

/// Waiting and running sequences, and the rules between them.
#[derive(Debug)]
pub struct Scheduler<T> {
    limits: StepLimits,
    cache: SharedCache,
    waiting: VecDeque<Seq<T>>,
    running: Vec<Seq<T>>,
    shares: Vec<Share>,
    eased: Eased,
}

/// Bounds below those of the plan, while memory is short.
#[derive(Clone, Copy, Debug)]
struct Eased {
    prefill_rows: usize,
    running: usize,
}

impl<T> Scheduler<T> {
    /// An empty scheduler over `cache`; room for `waiting_max` queued sequences is reserved.
    pub fn new(limits: StepLimits, cache: SharedCache, waiting_max: usize) -> Self {
        Self {
            limits,
            cache,
            // A preempted sequence returns to the queue, so it can hold everybody.
            waiting: VecDeque::with_capacity(waiting_max + limits.running),
            running: Vec::with_capacity(limits.running),
            shares: Vec::with_capacity(limits.running),
            eased: Eased { prefill_rows: limits.rows, running: limits.running },
        }
    }

    /// Until told otherwise, steps have at most `prefill_rows` rows of prompts and at most `running` sequences run: newer
    /// ones are preempted now and wait. The oldest runs in any case. Returns how many were preempted.
    pub fn ease(&mut self, prefill_rows: usize, running: usize) -> u64 {
        self.eased = Eased {
            prefill_rows: prefill_rows.clamp(1, self.limits.rows),
            running: running.clamp(1, self.limits.running),
        };
        let mut preempted = 0;
        while self.running.len() > self.eased.running {
            let mut victim = self.running.pop().expect("not empty");
            victim.preempt();
            self.push(victim);
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
        match newest(self.waiting.back()) > newest(self.running.last()) {
            true => self.waiting.pop_back(),
            false => self.running.pop(),
        }
    }

    /// Queues a sequence behind all older ones.
    pub fn push(&mut self, seq: Seq<T>) {
        debug_assert!(seq.total_max.div_ceil(PAGE_TOKENS) <= self.cache.borrow().pool.total(), "checked at submission");
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

    /// Sequences that wait, oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Seq<T>> {
        self.waiting.iter()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Takes out every sequence, waiting or running, that `gone` says has nobody left to serve.
    pub fn remove(&mut self, mut gone: impl FnMut(&Seq<T>) -> bool, mut take: impl FnMut(Seq<T>)) {
        for i in (0..self.running.len()).rev() {
            if gone(&self.running[i]) {
                take(self.running.remove(i));
            }
        }
        for i in (0..self.waiting.len()).rev() {
            if gone(&self.waiting[i]) {
                take(self.waiting.remove(i).expect("in range"));
            }
        }
    }

    /// Fills the next step. The result is empty only when nothing waits or runs.
    pub fn schedule(&mut self) -> (&[Share], Events) {
        self.shares.clear();
        let mut events = Events::default();
        let mut rows = self.limits.rows;
        let mut logit_rows = self.limits.logit_rows;
        let decodes = self.schedule_decodes(&mut rows, &mut logit_rows, &mut events);
        if decodes > 0 {
            rows = rows.min(self.limits.prefill_rows_beside_decode);
        }
        rows = rows.min(self.eased.prefill_rows);
        let mut i = 0;
        while i < self.running.len() {
            if !self.running[i].decoding() {
                self.schedule_chunk(i, &mut rows, &mut logit_rows, &mut events);
            }
            i += 1;
        }
        while rows > 0 && logit_rows > 0 {
            let Some(admitted) = self.admit() else { break };
            events.admitted += 1;
            // One that comes back from preemption and finds its prefix cached may have nothing left but its newest token.
            self.schedule_chunk(admitted, &mut rows, &mut logit_rows, &mut events);
        }
        (&self.shares, events)
    }

    fn schedule_decodes(&mut self, rows: &mut usize, logit_rows: &mut usize, events: &mut Events) -> usize {
        let mut decodes = 0;
        let mut i = 0;
        while i < self.running.len() && *rows > 0 && *logit_rows > 0 {
            if self.running[i].decoding() && self.fit(i, 1, events) {
                self.share(i, 1, rows, logit_rows);
                decodes += 1;
            }
            i += 1;
        }
        decodes
    }

    fn schedule_chunk(&mut self, i: usize, rows: &mut usize, logit_rows: &mut usize, events: &mut Events) {
        let seq = &self.running[i];
        if *rows == 0 || *logit_rows == 0 {
            return;
        }
        let mut chunk = seq.remaining().min(*rows);
        while seq.logit_rows(chunk) > *logit_rows {
            chunk -= seq.logit_rows(chunk) - *logit_rows;
        }
        if chunk > 0 && self.fit(i, chunk, events) {
            self.share(i, chunk, rows, logit_rows);
        }
    }

    fn share(&mut self, i: usize, count: usize, rows: &mut usize, logit_rows: &mut usize) {
        let seq = &self.running[i];
        let share = Share { seq: i, start: seq.computed, rows: count, logit_rows: seq.logit_rows(count) };
        *rows -= share.rows;
        *logit_rows -= share.logit_rows;
        self.shares.push(share);
    }

    /// Gives sequence `i` pages for `rows` more positions, preempting newer ones if need be. When there is no newer one,
    /// `i` itself waits for older ones to finish: false.
    fn fit(&mut self, i: usize, rows: usize, events: &mut Events) -> bool {
        let positions = self.running[i].computed + rows;
        while !self.running[i].pages.grow(positions) {
            let newest = self.running.len() - 1;
            debug_assert!(newest > 0, "I5: the oldest fits the pool alone");
            if newest == 0 {
                return false;
            }
            let mut victim = self.running.pop().expect("not empty");
            victim.preempt();
            self.shares.retain(|share| share.seq != newest);
            events.preempted += 1;
            self.push(victim);
            if newest == i {
                return false;
            }
        }
        true
    }

    /// Moves the first waiting sequence that may start into the running set. Returns its index there.
    fn admit(&mut self) -> Option<usize> {
        if self.running.len() >= self.eased.running {
            return None;
        }
        let at = self.waiting.iter().position(|seq| !self.follows_a_leader(seq))?;
        if !self.has_room_for(&self.waiting[at]) {
            return None;
        }
        let mut seq = self.waiting.remove(at).expect("in range");
        if seq.logits_from >= seq.prompt_len.saturating_sub(1) {
            // Prompt log-probabilities need every position computed here and now.
            seq.computed = seq.pages.take_prefix(seq.salt, &seq.tokens);
        }
        let index = self.running.iter().rposition(|r| r.order < seq.order).map_or(0, |i| i + 1);
        self.running.insert(index, seq);
        // Newer ones may run already (they did not have to wait for a prefix): they move up by one.
        self.shares.iter_mut().filter(|share| share.seq >= index).for_each(|share| share.seq += 1);
        Some(index)
    }

    /// Whether a running sequence is about to compute a prefix that this one could take from the index: then it
    /// waits a step or a few instead of computing the same thing beside it.
    fn follows_a_leader(&self, seq: &Seq<T>) -> bool {
        let cache = self.cache.borrow();
        let Some(index) = &cache.index else { return false };
        if seq.logits_from + 1 < seq.prompt_len {
            return false;
        }
        let shared = |leader: &Seq<T>| {
            let same = leader.tokens.iter().zip(&seq.tokens).take_while(|(a, b)| a == b).count();
            same.min(seq.tokens.len() - 1) / PAGE_TOKENS * PAGE_TOKENS
        };
        let prefilling = |r: &&Seq<T>| r.salt == seq.salt && r.remaining() > 1;
        let best = self.running.iter().filter(prefilling).map(shared).max().unwrap_or(0);
        best > 0 && best > index.peek(seq.salt, &seq.tokens)
    }

    /// Whether the pool has pages for the sequence as it stands, and half of what it and the running ones may yet generate:
    /// enough that preemption stays rare, without reserving for outputs that mostly end early.
    fn has_room_for(&self, seq: &Seq<T>) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let cache = self.cache.borrow();
        let growth = |s: &Seq<T>| (s.total_max - s.tokens.len()).div_ceil(2 * PAGE_TOKENS);
        let unfilled = |s: &Seq<T>| s.tokens.len().div_ceil(PAGE_TOKENS).saturating_sub(s.pages.ids().len());
        let promised: usize = self.running.iter().map(|s| unfilled(s) + growth(s)).sum();
        let needed = seq.tokens.len().div_ceil(PAGE_TOKENS) + growth(seq);
        promised + needed <= cache.pool.available()
    }

    /// Records that the shares of the last step were computed, and lets others share the whole pages.
    pub fn commit(&mut self, share: Share) {
        let seq = &mut self.running[share.seq];
        let before = seq.computed / PAGE_TOKENS;
        seq.computed = share.start + share.rows;
        if seq.computed <= seq.prompt_len && seq.computed / PAGE_TOKENS > before {
            seq.pages.publish(seq.salt, &seq.tokens[..seq.computed]);
        }
    }

    /// Everybody waits again, with nothing computed and no page held. The caller makes the page tables anew.
    pub fn start_over(&mut self) {
        self.shares.clear();
        while let Some(mut seq) = self.running.pop() {
            seq.pages.forget();
            seq.computed = 0;
            self.push(seq);
        }
    }

    /// Takes a finished sequence out; what it computed stays findable.
    pub fn finish(&mut self, index: usize) -> Seq<T> {
        let mut seq = self.running.remove(index);
        let computed = seq.computed;
        seq.pages.donate(seq.salt, &seq.tokens[..computed]);
        seq
    }
}

#[cfg(test)]
mod tests;
