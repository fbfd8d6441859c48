//! From arrival to queued sequence.

use std::panic::{AssertUnwindSafe, catch_unwind};

use plimsoll_memory::broken;
use plimsoll_memory::faults::{self, Site};

use super::Worker;
use crate::api::arrival::Arrival;
use crate::api::pooling::Pooling;
use crate::runner::Runner;
use crate::schedule::scheduler::{NewSeq, Pooled, Seq};
use crate::worker::request_state::RequestState;

impl<R: Runner> Worker<R> {
    /// Queues an arrival. A panic ends it alone: its outbox says so when it is dropped.
    pub(super) fn accept(&mut self, arrival: Arrival) {
        if catch_unwind(AssertUnwindSafe(|| self.queue(arrival))).is_err() {
            tracing::error!("a request panicked on its way in");
            self.shared.metrics.panics.inc();
            self.shared.metrics.failed.inc();
        }
    }

    fn queue(&mut self, arrival: Arrival) {
        faults::site(Site::Accept);
        let Arrival { mut request, outbox, timestamps, place, mut room } = arrival;
        let tokens = std::mem::take(&mut request.prompt);
        let total_max = tokens.len() + request.max_tokens as usize;
        if let Some(first) = self.scheduler.running().first().filter(|_| broken("V-J")) {
            request.sampling.clone_from(&first.work.request.sampling);
        }
        // An unchecked draft could break the form; a checked one is compared with a token that keeps it.
        let drafts = self.drafts_max > 0 && !(self.optimistic && room.constraint.is_some());
        let new_seq = NewSeq {
            order: self.arrived,
            salt: if broken("V-66") { request.sampling.temperature.to_bits().into() } else { request.cache_salt },
            total_max,
            logits_from: if request.prompt_logprobs.is_some() { 0 } else { tokens.len() - 1 },
            pooled: request.embed.map(|embed| Pooled {
                logits: embed.pooling == Pooling::Score,
                every_row: embed.pooling.needs_every_row(),
                second_at: embed.second_at.map_or(usize::MAX, |at| at as usize),
            }),
            slots: self.limits.slots,
            media: std::mem::take(&mut room.media),
            pages: std::mem::take(&mut room.pages),
            page_ids: std::mem::take(&mut room.page_ids),
            tokens,
            work: RequestState::new(request, outbox, place, timestamps, room, drafts),
        };
        self.scheduler.push(Seq::new(&self.cache, new_seq));
        self.arrived += 1;
    }
}
