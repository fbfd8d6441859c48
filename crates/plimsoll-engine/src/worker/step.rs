//! One step of the engine: plan it, run it, deliver its tokens, remove finished sequences.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use plimsoll_device::{DeviceError, StepInput};
use plimsoll_memory::faults::{self, Site};

use super::{Worker, panic_message};
use crate::api::degradation::DegradationLevel;
use crate::metrics::Metrics;
use crate::request::state::RequestState;
use crate::runner::Runner;
use crate::runner::step_buffers::reuse;
use crate::schedule::scheduler::Seq;
use crate::shared::Shared;
use crate::speculation::pace::{Done, SpeculationPlan};

/// How long the engine waits at a time for a grammar's mask, if every sequence waits for one.
const HELD_WAIT: Duration = Duration::from_millis(5);

impl<R: Runner> Worker<R> {
    /// Removes abandoned sequences, plans a step, runs it and delivers; then computes layers of a long prompt.
    pub(super) fn run_step(&mut self) {
        let metrics = &self.shared.metrics;
        self.scheduler.remove(
            |seq| seq.payload.abandoned(),
            |_gone| {
                metrics.aborted.inc();
            },
        );
        self.drop_layers();
        self.read_from_disk();
        if self.scheduler.is_empty() || faults::asked(Site::NoStep) {
            return;
        }
        self.run_encoders();
        self.pause_for_masks();
        let began = Instant::now();
        faults::site(Site::Scheduler);
        let speculation = self.plan_step();
        if !self.step.entries.is_empty() {
            for entry in &self.step.entries {
                note_first_step(&mut self.scheduler.running_mut()[entry.seq], entry.start, began, &self.shared);
            }
            match self.forward() {
                Ok(()) => {
                    let drafting = self.finish_step(speculation);
                    self.observe_pace(began, drafting);
                }
                Err(error) => self.quarantine(error),
            }
        } else if self.scheduler.layered().is_none() {
            // All sequences wait for the encoder, for a grammar's mask, or for the disk.
            if let Some(seq) = self.scheduler.running_mut().iter_mut().find(|seq| seq.waits_for_mask) {
                seq.payload.mask_ready(HELD_WAIT);
            } else if self.scheduler.running().is_empty() || self.outputs_read().0 {
                self.wait_for_disk(HELD_WAIT);
            }
            return self.retire();
        }
        self.advance_layers(speculation);
        self.retire();
        self.shared.metrics.step_seconds.observe(began.elapsed().as_secs_f64());
        self.shared.status.steps.fetch_add(1, Release);
    }

    /// Pauses sequences that wait for a grammar's mask, also sequences that are about to start. The others continue.
    /// Each sequence is checked twice: a later one may begin slow work that an earlier one must then wait for.
    fn pause_for_masks(&mut self) {
        for _ in 0..2 {
            for seq in self.scheduler.soon_mut() {
                seq.waits_for_mask = !seq.payload.mask_ready(Duration::ZERO);
            }
        }
    }

    /// Plans the next step: its entries, and whether it verifies and makes drafts.
    pub(super) fn plan_step(&mut self) -> SpeculationPlan {
        self.step.decodes = self.scheduler.running().iter().filter(|seq| seq.decoding() && !seq.waits_for_mask).count();
        let paused = self.drafts.per_seq_max == 0 || self.relief.governor.level() >= DegradationLevel::SpeculationOff;
        let speculation = if paused { SpeculationPlan::OFF } else { self.drafts.pace.next(self.step.decodes) };
        if !speculation.check || !speculation.draft {
            self.scheduler.running_mut().iter_mut().for_each(|seq| seq.drafts.clear());
        }
        self.scheduler.set_prefill_budget(self.prefill_meter.rows(self.step.decodes));
        let (entries, events) = self.scheduler.schedule();
        self.step.entries.clear();
        self.step.entries.extend_from_slice(entries);
        self.shared.metrics.preemptions.inc_by(events.preempted);
        speculation
    }

    /// Runs the entries as one step.
    pub(super) fn forward(&mut self) -> Result<(), String> {
        let mut media = std::mem::take(&mut self.step.media_rows);
        let step = self.step.buffers.fill(&self.step.entries, self.scheduler.running(), &mut media);
        let step = StepInput { media: &media, ..step };
        let ran = run_guarded(&self.shared.metrics, || self.runner.forward(&step));
        self.step.media_rows = reuse(media);
        ran
    }

    /// After a step: delivers tokens, makes drafts, publishes prompts for others to share. Returns when drafting began.
    pub(super) fn finish_step(&mut self, speculation: SpeculationPlan) -> Instant {
        self.sample_rows();
        for entry in &self.step.entries {
            self.scheduler.running_mut()[entry.seq].payload.outbox.wake_reader();
        }
        let drafting = Instant::now();
        match self.limits.draft_head {
            true => self.draft(speculation),
            false if self.drafts.per_seq_max > 0 => self.look_up(speculation),
            false => {}
        }
        self.shared.metrics.device_fetched_bytes.inc_by(self.runner.take_fetched());
        let tables = self.runner.take_table_reads();
        self.shared.metrics.table_rows_cached.inc_by(tables.cached);
        self.shared.metrics.table_rows_read.inc_by(tables.read);
        for entry in &self.step.entries {
            if !self.scheduler.running()[entry.seq].payload.failed() {
                self.scheduler.publish(entry.seq);
            }
        }
        drafting
    }

    pub(super) fn observe_pace(&mut self, began: Instant, drafting: Instant) {
        let now = Instant::now();
        let entries = self.step.entries.iter().zip(&self.step.accepted);
        let decoding = entries.filter(|(entry, _)| entry.rows == 1 + entry.drafts);
        let (decodes, tokens) = decoding.fold((0, 0), |(n, tokens), (_, accepted)| (n + 1, tokens + accepted));
        let rows: usize = self.step.entries.iter().map(|entry| entry.rows).sum();
        let drafts: usize = self.step.entries.iter().map(|entry| entry.drafts).sum();
        let (prompt_rows, seconds) = (rows - decodes - drafts, (now - began).as_secs_f64());
        if let (0, Some(disk)) = (decodes, &mut self.disk) {
            disk.computed(prompt_rows, seconds);
        }
        self.prefill_meter.observe(decodes, prompt_rows, seconds);
        if self.drafts.per_seq_max > 0 {
            let draft_seconds = (now - drafting).as_secs_f64();
            self.drafts.pace.observe(&Done { decodes, prompt_rows, drafts, tokens, seconds, draft_seconds });
        }
    }

    /// After a failed step: a sequence that was alone in it fails. Otherwise each of the step's sequences will run
    /// alone.
    pub(super) fn quarantine(&mut self, error: String) {
        self.shared.metrics.failed_steps.inc();
        if self.scheduler.step_failed() {
            tracing::error!(
                error,
                entries = self.step.entries.len(),
                "a step failed; running its sequences one by one"
            );
            return;
        }
        for entry in &self.step.entries {
            self.scheduler.running_mut()[entry.seq].payload.fail(error.clone());
        }
    }

    /// Removes finished sequences. A failed sequence publishes nothing. After non-finite logits the whole prefix cache
    /// is cleared: the bad values may have come from it.
    pub(super) fn retire(&mut self) {
        let metrics = &self.shared.metrics;
        self.scheduler.remove(
            |seq| seq.payload.failed(),
            |_gone| {
                metrics.failed.inc();
            },
        );
        for index in (0..self.scheduler.running().len()).rev() {
            if self.scheduler.running()[index].payload.finished() {
                let seq = self.scheduler.finish(index);
                self.pin(&seq);
                self.shared.metrics.finished.inc();
            }
        }
        if std::mem::take(&mut self.recovery.non_finite) {
            tracing::error!("non-finite logits: prefix cache cleared");
            self.cache.borrow_mut().invalidate();
            self.clear_disk();
            self.forget_outputs();
        }
    }

    /// Drops encoder outputs that no request holds; they are encoded again when needed.
    pub(super) fn forget_outputs(&self) {
        self.encoding.iter().for_each(|encoding| encoding.spec.outputs.clear());
    }

    pub(super) fn end_all(&mut self, message: &str) {
        let metrics = &self.shared.metrics;
        self.scheduler.remove(
            |_| true,
            |mut seq| {
                seq.payload.fail(message);
                metrics.failed.inc();
            },
        );
    }
}

/// Records a sequence's first step. `start`: prompt tokens that came from the cache.
pub(super) fn note_first_step(seq: &mut Seq<RequestState>, start: usize, began: Instant, shared: &Shared) {
    let first = seq.payload.scheduled(began, start, &shared.metrics);
    if first && seq.reuses() && shared.status.prefix_cache.load(Acquire) {
        shared.cache_stats.looked_up(start, seq.prompt_len);
    }
}

/// Runs the runner's work. A panic in a kernel becomes an error.
pub(super) fn run_guarded<T>(metrics: &Metrics, run: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            metrics.panics.inc();
            Err(panic_message(panic))
        }
    }
}
