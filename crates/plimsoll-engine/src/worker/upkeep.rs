//! Between steps: what is forgotten after a failure, what is given back, what gives way when memory is short, what others may see.

use std::sync::atomic::Ordering::Release;
use std::time::Instant;

use plimsoll_memory::{broken, heap};

use super::Worker;
use crate::api::error::Failure;
use crate::api::progress::Phase;
use crate::cache::PAGE_TOKENS;
use crate::memory::degradation::DegradationLevel;
use crate::memory::trim::Due;
use crate::runner::Runner;

impl<R: Runner> Worker<R> {
    /// Forgets all state that may be half changed. Requests wait again and are computed anew, with the same bits; if that is of
    /// no use, they end.
    pub(super) fn start_over(&mut self) {
        self.shared.metrics.recoveries.inc();
        self.scheduler.start_over();
        self.cache.borrow_mut().start_over();
        let done = self.delivered + self.ended();
        if self.recovered_at.replace(done) == Some(done) {
            self.end_all("the engine failed and recovered; the request was lost");
        }
        self.progress = (done, Instant::now());
    }

    /// I10: false when there is work and nothing has been delivered, encoded, found out or ended for longer than the limit.
    pub(super) fn gets_anywhere(&mut self) -> bool {
        let encoded = self.encoding.as_ref().map_or(0, |encoding| encoding.done);
        // Outputs of a slow form go on together, when the last one's mask is there.
        let held = self.scheduler.running().iter().filter(|seq| seq.held);
        let moved = held.fold(0_u64, |sum, seq| sum.wrapping_add(seq.work.moved()));
        let now = (self.delivered + self.ended() + encoded).wrapping_add(moved);
        if now != self.progress.0 || self.scheduler.is_empty() {
            self.progress = (now, Instant::now());
        }
        self.progress.1.elapsed() <= self.shared.watchdog.limit()
    }

    /// Requests that have ended, whatever the way.
    pub(super) fn ended(&self) -> u64 {
        let metrics = &self.shared.metrics;
        metrics.finished.get() + metrics.failed.get() + metrics.aborted.get()
    }

    /// Gives back what is free: now and then, and everything when nothing has been left to do for a while.
    pub(super) fn trim(&mut self) {
        let idle = self.scheduler.is_empty();
        match self.trim.due(Instant::now(), self.scheduler.running().len(), self.ended(), idle) {
            Due::Nothing => return,
            Due::Free => {}
            Due::All => {
                self.check_at_rest();
                if self.elastic {
                    self.cache.borrow_mut().evict_idle(&mut self.evicted);
                }
            }
        }
        self.shared.metrics.trims.inc();
        self.shared.trim.store(true, Release);
        self.give_pages_back();
    }

    /// I4: pages or slots that are missing when nothing runs are lost. They are logged and counted, and all tables are
    /// rebuilt, which costs cached prefixes and nothing else.
    fn check_at_rest(&mut self) {
        if let Some(encoding) = &mut self.encoding {
            encoding.check_at_rest(&self.shared.metrics);
        }
        let Some(missing) = self.cache.borrow().missing_at_rest() else { return };
        let (pages_total, slots_total) = {
            let cache = self.cache.borrow();
            (cache.pool.total(), cache.states.as_ref().map_or(0, |states| states.total()))
        };
        let (pages, slots) = (missing.pages, missing.slots);
        tracing::error!(pages, pages_total, slots, slots_total, "lost: nothing runs, but they are still held");
        self.shared.metrics.lost_pages.inc_by(pages as u64);
        self.shared.metrics.lost_slots.inc_by(slots as u64);
        self.start_over();
        // No request was waiting: the next failure is a first one, not a second.
        self.recovered_at = None;
    }

    /// In elastic mode: every free page's memory goes back to the system.
    pub(super) fn give_pages_back(&mut self) {
        if self.elastic {
            self.evicted.clear();
            self.cache.borrow().pool.each_free(|page| self.evicted.push(page));
            self.runner.decommit(&self.evicted);
        }
    }

    /// Acts on a new reading of the machine, if there is one: gives way, or recovers.
    pub(super) fn govern(&mut self) {
        let Some(reading) = self.shared.gauge.newer(&mut self.readings).filter(|_| !broken("T-60")) else { return };
        let level = self.governor.observe(&reading);
        self.shared.gauge.stand(level, &reading, &self.shared.metrics);
        if level >= DegradationLevel::EvictPrefix {
            self.cache.borrow_mut().evict_idle(&mut self.evicted);
            self.runner.decommit(&self.evicted);
        }
        let prefill_rows = if level >= DegradationLevel::SmallChunks { PAGE_TOKENS } else { usize::MAX };
        let running = if level >= DegradationLevel::Preempt {
            self.scheduler.running().len().saturating_sub(1)
        } else {
            usize::MAX
        };
        let preempted = self.scheduler.ease(prefill_rows, running);
        self.shared.metrics.preemptions.inc_by(preempted);
        if level < DegradationLevel::Preempt {
            self.given_up = None;
        }
        if level >= DegradationLevel::Fail {
            self.given_up.get_or_insert_with(heap::give_up_reserve);
            if let Some(mut seq) = self.scheduler.give_up_newest() {
                tracing::warn!("the newest request is given up: memory ran short on this machine");
                seq.work.fail(Failure::Memory);
                self.shared.metrics.failed.inc();
            }
        }
    }

    /// Records the state of every sequence and of the pools, for readers on other threads.
    pub(super) fn refresh_status(&self) {
        for seq in self.scheduler.running() {
            let phase = match seq.decoding() {
                true => Phase::Decode,
                false if seq.at_wall() => Phase::Encode,
                false => Phase::Prefill,
            };
            seq.work.progress().stands(phase, seq.computed, seq.pages.ids().len(), seq.states.held());
        }
        for seq in self.scheduler.waiting() {
            seq.work.progress().stands(Phase::Waiting, 0, 0, 0);
        }
        let status = &self.shared.status;
        let cache = self.cache.borrow();
        status.running.store(self.scheduler.running().len() as u64, Release);
        status.waiting.store(self.scheduler.waiting().len() as u64, Release);
        status.pages_used.store(cache.pool.used() as u64, Release);
        status.pages_peak.fetch_max(cache.pool.peak() as u64, Release);
        status.pages_total.store(cache.pool.total() as u64, Release);
        status.pages_cached.store(cache.pool.idle() as u64, Release);
        if let Some(index) = &cache.index {
            status.prefix_cache.store(true, Release);
            self.shared.metrics.evicted_pages.inc_by(self.shared.cached.refresh(&index.stats()));
            index.kv_event_log().into_iter().for_each(|log| log.wake());
        }
        if let Some(encoding) = &self.encoding {
            encoding.refresh(&self.shared.metrics);
        }
        if let Some(states) = &cache.states {
            let (stats, metrics) = (states.stats(), &self.shared.metrics);
            status.slots_total.store(states.total() as u64, Release);
            status.slots_used.store((states.total() - states.free()) as u64, Release);
            status.slots_kept.store(stats.kept as u64, Release);
            let counters = [
                (&metrics.checkpoints_made, stats.made),
                (&metrics.checkpoints_evicted, stats.evicted),
                (&metrics.checkpoints_superseded, stats.superseded),
                (&metrics.checkpoints_missed, stats.missed),
            ];
            for (counter, now) in counters {
                counter.inc_by(now - counter.get());
            }
        }
        status.turns.fetch_add(1, Release);
        // A round without a step delivered is no progress.
        let progress = self.progress.1.duration_since(self.epoch);
        status.progress_ms.store(progress.as_millis() as u64, Release);
    }
}
