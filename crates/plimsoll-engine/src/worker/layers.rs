//! Layered prefill: after each step of the decoding sequences, some layers of a long prompt's chunk are computed. Their
//! number fits into the time that decoding sequences may wait.
//!
//! One layer of a chunk of many rows takes as long as a whole step of few rows. So decoding sequences wait for a layer
//! instead of all layers, and the chunk need not be small.

use std::time::Instant;

use plimsoll_device::StepInput;

use super::Worker;
use super::step::{note_first_step, run_guarded};
use crate::runner::Runner;
use crate::runner::step_buffers::{StepBuffers, reuse};
use crate::schedule::scheduler::{StepEntry, StepLimits};
use crate::speculation::pace::SpeculationPlan;

/// A chunk between two layers.
#[derive(Debug)]
pub(super) struct Layers {
    buffers: StepBuffers,
    /// The scheduler's number of the chunk in progress, and its next layer.
    begun: Option<(u64, usize)>,
}

impl Layers {
    /// Buffers for the largest chunk, of a sequence of `pages` pages.
    pub fn new(limits: &StepLimits, pages: usize) -> Self {
        let chunk = limits.of_layers();
        Self { buffers: StepBuffers::new(&chunk, chunk.running * pages), begun: None }
    }
}

impl<R: Runner> Worker<R> {
    /// Continues the layered chunk, if there is one. Computes one layer, and those after it that fit into the time that
    /// decoding sequences may wait.
    pub(super) fn advance_layers(&mut self, speculation: SpeculationPlan) {
        self.drop_layers();
        let Some((number, entry)) = self.scheduler.layered() else { return };
        match self.run_layers(number, entry) {
            Ok(false) => {}
            Ok(true) => {
                self.layers.begun = None;
                self.shared.metrics.layered_chunks.inc();
                self.step.entries.clear();
                self.step.entries.push(entry);
                self.finish_step(speculation);
            }
            Err(error) => {
                self.layers.begun = None;
                self.runner.forget();
                self.shared.metrics.failed_steps.inc();
                self.scheduler.running_mut()[entry.seq].payload.fail(error);
            }
        }
    }

    /// Drops the chunk if its sequence was preempted.
    pub(super) fn drop_layers(&mut self) {
        let chunk = self.scheduler.layered().map(|(number, _)| number);
        if self.layers.begun.is_some_and(|(begun, _)| chunk != Some(begun)) {
            self.runner.forget();
            self.layers.begun = None;
            self.shared.metrics.layered_dropped.inc();
        }
    }

    /// True if the chunk is done.
    fn run_layers(&mut self, number: u64, entry: StepEntry) -> Result<bool, String> {
        let Self { runner, scheduler, layers, step: current, prefill_meter, shared, .. } = self;
        let mut began = Instant::now();
        let begins = layers.begun.is_none();
        if begins {
            note_first_step(&mut scheduler.running_mut()[entry.seq], entry.start, began, shared);
        }
        let mut media = std::mem::take(&mut current.media_rows);
        let step = layers.buffers.fill(&[entry], scheduler.running(), &mut media);
        let step = StepInput { media: &media, ..step };
        let mut layer = layers.begun.map_or(0, |(_, layer)| layer);
        let ran = run_guarded(&shared.metrics, || {
            if begins {
                runner.begin(&step)?;
            }
            let mut patience = prefill_meter.layer_seconds_max(current.decodes);
            loop {
                let done = runner.advance(&step)?;
                let seconds = began.elapsed().as_secs_f64();
                began = Instant::now();
                prefill_meter.observe_layer(layer, entry.rows, seconds);
                layer += 1;
                patience -= seconds;
                if done || prefill_meter.layer_seconds(layer, entry.rows) > patience {
                    return Ok(done);
                }
            }
        });
        layers.begun = Some((number, layer));
        self.step.media_rows = reuse(media);
        ran
    }
}
