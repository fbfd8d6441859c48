//! Takes arrivals into the scheduler's queue.

use std::panic::{AssertUnwindSafe, catch_unwind};

use plimsoll_memory::faults::{self, Site};

use super::Worker;
use crate::api::arrival::Arrival;
use crate::runner::Runner;
use crate::schedule::scheduler::{NewSeq, Pooled, Seq};
use crate::worker::request_state::RequestState;

impl<R: Runner> Worker<R> {
    /// Queues an arrival. A panic ends only this request: its outbox delivers the error when it is dropped.
    pub(super) fn accept(&mut self, arrival: Arrival) {
        let queued = catch_unwind(AssertUnwindSafe(|| {
            faults::site(Site::Accept);
            let Arrival { mut request, outbox, timestamps, permit, mut buffers } = arrival;
            let tokens = std::mem::take(&mut request.prompt);
            let total_max = tokens.len() + request.max_tokens as usize;
            // A draft that is not verified could break the grammar.
            let drafts = self.drafts_max > 0 && !(self.optimistic && buffers.constraint.is_some());
            let candidates = request.candidates(self.shared.limits.vocab_size as usize);
            let new_seq = NewSeq {
                order: self.arrived,
                salt: request.cache_salt,
                total_max,
                logits_from: if request.prompt_logprobs.is_some() { 0 } else { tokens.len() - 1 },
                pooled: request.embed.map(|embed| Pooled {
                    logits: embed.pooling.of_model(),
                    every_row: embed.pooling.needs_every_row(),
                    second_at: embed.second_at.map_or(usize::MAX, |at| at as usize),
                }),
                slots: self.limits.slots,
                media: std::mem::take(&mut buffers.media),
                pages: std::mem::take(&mut buffers.pages),
                window_pages: std::mem::take(&mut buffers.window_pages),
                pins: std::mem::take(&mut request.pins),
                tokens,
                work: RequestState::new(request, outbox, permit, timestamps, buffers, drafts),
            };
            let mut seq = Seq::new(&self.cache, new_seq);
            seq.candidates = candidates;
            self.scheduler.push(seq);
            self.arrived += 1;
        }));
        if queued.is_err() {
            tracing::error!("the engine panicked while queueing a request: it fails alone");
            self.shared.metrics.panics.inc();
            self.shared.metrics.failed.inc();
        }
    }
}
