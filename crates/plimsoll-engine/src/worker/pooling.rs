//! Rows of pooled requests: their hidden states, or their classifier's scores, are collected as they come.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Worker, panic_message};
use crate::api::error::Failure;
use crate::api::pooling::Pooling;
use crate::runner::Runner;
use crate::schedule::scheduler::StepEntry;

impl<R: Runner> Worker<R> {
    /// Collects one entry. Its rows begin with the step's row `first_row`, its logits with row `logit_row`. Returns how
    /// many of its rows count: all.
    pub(super) fn pool_entry(&mut self, entry: StepEntry, first_row: usize, logit_row: usize) -> usize {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.collect(entry, first_row, logit_row)));
        let payload = &mut self.scheduler.running_mut()[entry.seq].payload;
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => {
                self.recovery.non_finite |= matches!(failure, Failure::NonFinite(_));
                payload.fail(failure);
            }
            Err(panic) => {
                self.shared.metrics.panics.inc();
                payload.fail(panic_message(panic));
            }
        }
        entry.rows
    }

    fn collect(&mut self, entry: StepEntry, first_row: usize, logit_row: usize) -> Result<(), Failure> {
        let seq = &mut self.scheduler.running_mut()[entry.seq];
        let (Some(embed), Some(pooled)) = (seq.payload.request.embed, &mut seq.payload.pooled_row) else {
            return Ok(());
        };
        let last = entry.start + entry.rows == seq.prompt_len;
        if entry.start == 0 {
            // The first time, or again after a preemption.
            pooled.clear();
        }
        match embed.pooling {
            Pooling::Mean => (0..entry.rows).for_each(|row| pooled.add(self.runner.hidden(first_row + row))),
            Pooling::First if entry.start == 0 => pooled.set(self.runner.hidden(first_row)),
            Pooling::Last if last => pooled.set(self.runner.hidden(first_row + entry.rows - 1)),
            Pooling::Score | Pooling::Dense if last => pooled.set(self.runner.logits(logit_row)),
            Pooling::First | Pooling::Last | Pooling::Score | Pooling::Dense => {}
        }
        if last {
            seq.payload.pooled(&self.shared.metrics)?;
        }
        Ok(())
    }
}
