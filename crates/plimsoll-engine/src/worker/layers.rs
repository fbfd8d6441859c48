//! A long prompt beside those who decode: behind each of their steps go as many layers of a chunk of it as they have patience for.
//!
//! A layer takes as long for a chunk of many rows as a step takes for few, so those who decode wait for a layer where they would have
//! waited for all of them, and the chunk is as large as a chunk should be.

use std::time::Instant;

use plimsoll_device::StepInput;

use super::{Worker, enters, run_guarded};
use crate::runner::Runner;
use crate::scheduler::{Share, StepLimits};
use crate::speculation::Next;
use crate::step::{StepBuffers, reuse};

/// A chunk between two layers.
#[derive(Debug)]
pub(super) struct Layers {
    buffers: StepBuffers,
    /// The scheduler's number of the chunk that the runner has begun, and its next layer.
    begun: Option<(u64, usize)>,
}

impl Layers {
    /// Room for the largest chunk, of a sequence of so many pages.
    pub fn new(limits: &StepLimits, pages: usize) -> Self {
        let chunk = limits.of_layers();
        Self { buffers: StepBuffers::new(&chunk, chunk.running * pages), begun: None }
    }
}

impl<R: Runner> Worker<R> {
    /// Goes on with the chunk that is computed layer by layer, if there is one: by a layer, and by those after it that fit into the time
    /// that those who decode may wait.
    pub(super) fn advance_layers(&mut self, next: Next) {
        self.drop_layers();
        let Some((number, share)) = self.scheduler.layered() else { return };
        match self.run_layers(number, share) {
            Ok(false) => {}
            Ok(true) => {
                self.layers.begun = None;
                self.shared.metrics.layered_chunks.inc();
                self.shares.clear();
                self.shares.push(share);
                self.settle(next);
            }
            Err(error) => {
                self.layers.begun = None;
                self.runner.forget();
                self.shared.metrics.failed_steps.inc();
                self.scheduler.running_mut()[share.seq].work.fail(error);
            }
        }
    }

    /// Forgets the chunk if its sequence has given up its place.
    pub(super) fn drop_layers(&mut self) {
        let chunk = self.scheduler.layered().map(|(number, _)| number);
        if self.layers.begun.is_some_and(|(begun, _)| chunk != Some(begun)) {
            self.runner.forget();
            self.layers.begun = None;
            self.shared.metrics.layered_dropped.inc();
        }
    }

    /// Says whether the chunk is done.
    fn run_layers(&mut self, number: u64, share: Share) -> Result<bool, String> {
        let Self { runner, scheduler, layers, media_rows, yielding, shared, decodes, .. } = self;
        let mut began = Instant::now();
        let begins = layers.begun.is_none();
        if begins {
            enters(&mut scheduler.running_mut()[share.seq], share.start, began, shared);
        }
        let mut media = std::mem::take(media_rows);
        let step = layers.buffers.fill(&[share], scheduler.running(), &mut media);
        let step = StepInput { media: &media, ..step };
        let mut layer = layers.begun.map_or(0, |(_, layer)| layer);
        let ran = run_guarded(&shared.metrics, || {
            if begins {
                runner.begin(&step)?;
            }
            let mut patience = yielding.patience(*decodes);
            loop {
                let done = runner.advance(&step)?;
                let seconds = began.elapsed().as_secs_f64();
                began = Instant::now();
                yielding.observe_layer(layer, share.rows, seconds);
                layer += 1;
                patience -= seconds;
                if done || yielding.layer(layer, share.rows) > patience {
                    return Ok(done);
                }
            }
        });
        layers.begun = Some((number, layer));
        self.media_rows = reuse(media);
        ran
    }
}
