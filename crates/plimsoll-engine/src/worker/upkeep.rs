//! Between steps: recovery after a failure, unused memory, memory pressure, the state that other threads read.

use std::sync::atomic::Ordering::Release;
use std::time::Instant;

use plimsoll_device::KvGroup;
use plimsoll_memory::heap;

use super::{Disk, Worker};
use crate::api::degradation::DegradationLevel;
use crate::api::error::Failure;
use crate::api::progress::RequestPhase;
use crate::cache::PAGE_TOKENS;
use crate::memory::trim::Due;
use crate::runner::Runner;

impl<R: Runner> Worker<R> {
    /// Drops all state that may be half changed. Requests are requeued and recomputed, with the same bits. If nothing
    /// was delivered since the last recovery, they end.
    pub(super) fn start_over(&mut self) {
        self.shared.metrics.recoveries.inc();
        self.scheduler.start_over();
        self.disk.iter_mut().for_each(Disk::forget);
        self.cache.borrow_mut().start_over();
        let done = self.recovery.delivered + self.ended();
        if self.recovery.recovered_at.replace(done) == Some(done) {
            self.end_all("the engine failed and recovered; the request was lost");
        }
        self.recovery.progress = (done, Instant::now());
    }

    /// Ends all requests after the loss of a device and opens it again, once. If that fails, later requests end with the reason.
    pub(super) fn recover_device(&mut self) {
        let Some(why) = self.runner.lost().filter(|_| !self.recovery.device_gone) else { return };
        tracing::error!(why, "the GPU was lost: all requests end, and the GPU is opened again");
        self.runner.forget();
        self.end_all(&format!("the GPU was lost: {why}"));
        match self.runner.reopen() {
            Ok(()) => tracing::warn!("the GPU was opened again, and the weights loaded"),
            Err(error) => {
                self.recovery.device_gone = true;
                tracing::error!(
                    error,
                    "the GPU could not be opened again: requests fail until the server is restarted"
                );
            }
        }
        self.start_over();
    }

    /// I10: false if there is work, and nothing has been delivered, encoded, masked or ended for longer than the limit.
    pub(super) fn makes_progress(&mut self) -> bool {
        let encoded = self.encoding.as_ref().map_or(0, |encoding| encoding.done);
        // Sequences of a slow grammar continue together, when the last one's mask is ready.
        let held = self.scheduler.running().iter().filter(|seq| seq.waits_for_mask);
        let moved = held.fold(0_u64, |sum, seq| sum.wrapping_add(seq.payload.moved()));
        let now = (self.recovery.delivered + self.ended() + encoded + self.outputs_read().1).wrapping_add(moved);
        if now != self.recovery.progress.0 || self.scheduler.is_empty() {
            self.recovery.progress = (now, Instant::now());
        }
        self.recovery.progress.1.elapsed() <= self.shared.monitor.watchdog.limit()
    }

    /// Requests that have ended: finished, failed or aborted.
    pub(super) fn ended(&self) -> u64 {
        let metrics = &self.shared.metrics;
        metrics.finished.get() + metrics.failed.get() + metrics.aborted.get()
    }

    /// Returns unused memory to the system: some now and then, all after an idle period.
    pub(super) fn trim(&mut self) {
        let idle = self.scheduler.is_empty();
        match self.relief.trim.due(Instant::now(), self.scheduler.running().len(), self.ended(), idle) {
            Due::Nothing => return,
            Due::Free => {}
            Due::All => {
                self.check_at_rest();
                if self.relief.elastic {
                    self.cache.borrow_mut().evict_idle(&mut self.relief.evicted, &mut self.relief.evicted_windows);
                }
            }
        }
        self.shared.metrics.trims.inc();
        self.shared.monitor.trim.store(true, Release);
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
        self.recovery.recovered_at = None;
    }

    /// In elastic mode: every free page's memory goes back to the system.
    pub(super) fn give_pages_back(&mut self) {
        if self.relief.elastic {
            self.relief.evicted.clear();
            self.relief.evicted_windows.clear();
            let cache = self.cache.borrow();
            cache.pool.each_free(|page| self.relief.evicted.push(page));
            if let Some(windows) = &cache.windows {
                windows.pool().each_free(|page| self.relief.evicted_windows.push(page));
            }
            drop(cache);
            self.decommit();
        }
    }

    fn decommit(&mut self) {
        self.runner.decommit(KvGroup::Whole, &self.relief.evicted);
        self.runner.decommit(KvGroup::Window, &self.relief.evicted_windows);
    }

    /// Acts on a new memory reading, if there is one: sets the degradation level and applies it.
    pub(super) fn govern(&mut self) {
        let Some(reading) = self.shared.monitor.gauge.newer(&mut self.relief.readings) else { return };
        let level = self.relief.governor.observe(&reading);
        self.shared.monitor.gauge.stand(level, &reading, &self.shared.metrics);
        if level >= DegradationLevel::EvictPrefix {
            self.cache.borrow_mut().evict_idle(&mut self.relief.evicted, &mut self.relief.evicted_windows);
            self.decommit();
        }
        let prefill_rows = if level >= DegradationLevel::SmallChunks { PAGE_TOKENS } else { usize::MAX };
        let running = if level >= DegradationLevel::Preempt {
            self.scheduler.running().len().saturating_sub(1)
        } else {
            usize::MAX
        };
        let preempted = self.scheduler.reduce_limits(prefill_rows, running);
        self.shared.metrics.preemptions.inc_by(preempted);
        if level < DegradationLevel::Preempt {
            self.relief.given_up = None;
        }
        if level >= DegradationLevel::Fail {
            self.relief.given_up.get_or_insert_with(heap::give_up_reserve);
            if let Some(mut seq) = self.scheduler.give_up_newest() {
                tracing::warn!("memory ran short on this machine: the newest request failed");
                seq.payload.fail(Failure::Memory);
                self.shared.metrics.failed.inc();
            }
        }
    }

    /// Records the state of every sequence and of the pools, for readers on other threads.
    pub(super) fn refresh_status(&self) {
        for seq in self.scheduler.running() {
            let phase = match seq.decoding() {
                true => RequestPhase::Decode,
                false if seq.waits_for_encoder() => RequestPhase::Encode,
                false => RequestPhase::Prefill,
            };
            let held = [seq.pages.pages().len(), seq.pages.windows_held(), seq.states.held()];
            seq.payload.progress().store(phase, seq.computed, held);
        }
        for seq in self.scheduler.waiting() {
            seq.payload.progress().store(RequestPhase::Waiting, 0, [0; 3]);
        }
        let status = &self.shared.status;
        let cache = self.cache.borrow();
        // Before the counts of requests: a reader that sees a request gone also sees what was written of it.
        if let Some(disk) = &self.disk {
            disk.refresh(&self.shared, cache.unsaved());
        }
        status.running.store(self.scheduler.running().len() as u64, Release);
        status.waiting.store(self.scheduler.waiting().len() as u64, Release);
        status.pages_used.store(cache.pool.used() as u64, Release);
        status.pages_peak.fetch_max(cache.pool.peak() as u64, Release);
        status.pages_total.store(cache.pool.total() as u64, Release);
        status.pages_cached.store(cache.pool.idle() as u64, Release);
        if let Some(windows) = &cache.windows {
            status.windows_total.store(windows.pool().total() as u64, Release);
            status.windows_used.store(windows.pool().used() as u64, Release);
            status.windows_cached.store(windows.pool().idle() as u64, Release);
            let counter = &self.shared.metrics.evicted_windows;
            counter.inc_by(windows.evicted() - counter.get());
        }
        if let Some(index) = &cache.index {
            status.prefix_cache.store(true, Release);
            self.shared.metrics.evicted_pages.inc_by(self.shared.cache_stats.refresh(&index.stats()));
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
        status.iterations.fetch_add(1, Release);
        // An iteration without a delivered step is no progress.
        let progress = self.recovery.progress.1.duration_since(self.epoch);
        status.progress_ms.store(progress.as_millis() as u64, Release);
    }
}
