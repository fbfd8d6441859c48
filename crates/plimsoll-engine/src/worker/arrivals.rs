//! Takes arrivals into the scheduler's queue.

use std::panic::{AssertUnwindSafe, catch_unwind};

use plimsoll_memory::faults::{self, Site};

use super::Worker;
use crate::request::state::RequestState;
use crate::runner::Runner;
use crate::schedule::scheduler::{NewSeq, Seq};

impl<R: Runner> Worker<R> {
    /// Queues an arrival. A panic ends only this request: its outbox delivers the error when it is dropped.
    pub(super) fn enqueue(&mut self, mut arrival: NewSeq<RequestState>) {
        let queued = catch_unwind(AssertUnwindSafe(|| {
            faults::site(Site::Accept);
            // A draft that is not verified could break the grammar.
            if self.drafts.per_seq_max == 0 || (self.drafts.optimistic && arrival.payload.constraint.is_some()) {
                arrival.payload.drafting().stop();
            }
            self.scheduler.push(Seq::new(&self.cache, self.arrived, self.limits.slots, arrival));
            self.arrived += 1;
        }));
        if queued.is_err() {
            tracing::error!("the engine panicked while queueing a request: it fails alone");
            self.shared.metrics.panics.inc();
            self.shared.metrics.failed.inc();
        }
    }
}
