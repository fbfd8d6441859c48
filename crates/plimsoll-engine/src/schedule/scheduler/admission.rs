//! Admission: the oldest waiting sequence with enough room starts. A sequence waits longer if a running one is about to
//! compute a prefix that both share.

use super::{DiskRead, Scheduler, Seq};
use crate::cache::{KvCache, PAGE_TOKENS};

/// The most long prompts that are looked up in the prefix cache in a step without rows for them.
const LOOKS: usize = 4;

/// Whether a waiting sequence waits for a prefix that a running one is about to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PrefixWait {
    /// It waits a step or a few, and then takes the prefix.
    Wait,
    /// It can start. Its first `shared_tokens` tokens, at most, also begin a running sequence.
    Start { shared_tokens: usize },
}

impl<T> Scheduler<T> {
    /// Moves the first waiting sequence that may start into the running set. Returns its index there. `long`: prompts
    /// longer than a step may start. Without it, up to [`LOOKS`] of them are looked up, and start if the cache leaves a step at most.
    pub(super) fn admit(&mut self, long: bool) -> Option<usize> {
        if self.running.len() >= self.reduced.running {
            return None;
        }
        let alone = self.running.is_empty();
        let mut looks = if long { 0 } else { LOOKS };
        let (at, shared) = (0..self.waiting.len()).find_map(|at| {
            if self.waiting[at].disk_read == DiskRead::Waits || !long && self.takes_long(at, &mut looks) {
                return None;
            }
            match self.find_prefix_source(at) {
                PrefixWait::Wait => None,
                PrefixWait::Start { shared_tokens } => Some((at, shared_tokens)),
            }
        })?;
        if !self.has_room_for(&self.waiting[at]) || !self.waiting[at].enter(alone, shared) {
            return None;
        }
        let mut seq = self.waiting.remove(at);
        seq.sched.long = seq.remaining() > self.limits.rows;
        let index = self.running.iter().rposition(|r| r.order < seq.order).map_or(0, |i| i + 1);
        self.running.insert(index, seq);
        // Newer sequences may run already, because they did not wait for a prefix. Their indices move up by one.
        self.entries.iter_mut().filter(|entry| entry.seq >= index).for_each(|entry| entry.seq += 1);
        Some(index)
    }

    /// Whether the `at`-th waiting sequence has more rows left to compute than a step. `looks`: lookups in the prefix cache that are left.
    fn takes_long(&self, at: usize, looks: &mut usize) -> bool {
        let (seq, rows) = (&self.waiting[at], self.limits.rows);
        if seq.remaining() <= rows {
            return false;
        }
        if *looks == 0 || !seq.reuses() {
            return true;
        }
        *looks -= 1;
        seq.remaining() - self.cache.borrow().peek(seq.key()) > rows
    }

    /// Requests the checkpoints that waiting sequences will start from, in the step that was just filled. After the step the state
    /// has moved on.
    pub(super) fn request_shared_checkpoints(&mut self) {
        let prefilling = |seq: &Seq<T>| seq.needs_checkpoints() && seq.remaining() > 1;
        if self.running.iter().any(prefilling) {
            for at in 0..self.waiting.len().min(self.limits.running) {
                self.find_prefix_source(at);
            }
        }
    }

    /// Looks for a running sequence that is about to compute a prefix of the `at`-th waiting sequence's prompt. For a
    /// model with recurrent state or sliding windows, requests a checkpoint from it at the end of that prefix.
    fn find_prefix_source(&mut self, at: usize) -> PrefixWait {
        let Self { running, waiting, cache, .. } = self;
        let cache = cache.borrow();
        let seq = &waiting[at];
        if cache.index.is_none() || !seq.reuses() {
            return PrefixWait::Start { shared_tokens: 0 };
        }
        let key = seq.key();
        let same = |other: &Seq<T>| other.key().common(&key).min(key.tokens.len() - 1) / PAGE_TOKENS * PAGE_TOKENS;
        let (mut source, mut best, mut shared) = (None, 0, 0);
        let publishes = |other: &Seq<T>| other.salt == seq.salt && !other.pages.invalidated();
        for (i, other) in running.iter().enumerate().filter(|(_, other)| publishes(other)) {
            let prefilling = other.remaining() > 1;
            if !prefilling && !seq.needs_checkpoints() {
                continue;
            }
            let same = same(other);
            shared = shared.max(same);
            // States and windows of earlier positions are gone, unless a checkpoint has them.
            if prefilling && same > best && (!seq.needs_checkpoints() || same > other.computed) {
                (source, best) = (Some(i), same);
            }
        }
        let found = cache.peek(key);
        let stateful = seq.needs_checkpoints();
        drop(cache);
        let waits = |source: usize| best > found && (!stateful || running[source].request_checkpoint(best));
        match source.is_some_and(waits) {
            true => PrefixWait::Wait,
            false => PrefixWait::Start { shared_tokens: shared },
        }
    }

    /// Whether the pool has pages for the sequence's tokens, and for half of the tokens that it and the running ones may still generate. So
    /// preemption stays rare, without reserving pages for outputs that mostly end early.
    fn has_room_for(&self, seq: &Seq<T>) -> bool {
        if self.running.is_empty() || self.limits.encoder_batch {
            return true;
        }
        let cache = self.cache.borrow();
        let growth = |s: &Seq<T>| (s.total_max - s.tokens.len()).div_ceil(2 * PAGE_TOKENS);
        let unfilled = |s: &Seq<T>| s.tokens.len().div_ceil(PAGE_TOKENS).saturating_sub(s.pages.pages().len());
        let promised: usize = self.running.iter().map(|s| unfilled(s) + growth(s)).sum();
        let (needed, available) = (seq.tokens.len().div_ceil(PAGE_TOKENS) + growth(seq), cache.pool.available());
        // Pages that a running sequence holds are shared and cost nothing. Idle cached pages are in `available` already.
        let shared = || if seq.reuses() { cache.held(seq.key()) } else { 0 };
        (promised + needed <= available || promised + needed <= available + shared())
            && self.has_windows_for(seq, &cache)
    }

    /// Whether the pool has window pages for it. A sequence holds at most the window pages of its window and its next chunk.
    fn has_windows_for(&self, seq: &Seq<T>, cache: &KvCache) -> bool {
        let Some(windows) = &cache.windows else { return true };
        let needed = |s: &Seq<T>| {
            let rows = s.remaining().max(1 + self.limits.drafts).min(self.limits.rows);
            ((s.tokens.len() + s.total_max) / 2).div_ceil(PAGE_TOKENS).min(windows.need(rows))
        };
        let unfilled = |s: &Seq<T>| needed(s).saturating_sub(s.pages.windows_held());
        self.running.iter().map(unfilled).sum::<usize>() + needed(seq) <= windows.pool().available()
    }
}
