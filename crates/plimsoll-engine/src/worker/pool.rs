//! Rows of pooled requests: their hidden states, or their classifier's scores, are collected as they come.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Worker, panic_message};
use crate::api::error::Failure;
use crate::api::pooling::Pooling;
use crate::runner::Runner;
use crate::schedule::scheduler::Share;

impl<R: Runner> Worker<R> {
    /// Collects one share. Its rows begin with the step's row `first_row`, its logits with row `logit_row`. Returns how
    /// many of its rows count: all.
    pub(super) fn pool_share(&mut self, share: Share, first_row: usize, logit_row: usize) -> usize {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.collect(share, first_row, logit_row)));
        let work = &mut self.scheduler.running_mut()[share.seq].work;
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => {
                self.recovery.non_finite |= matches!(failure, Failure::NonFinite(_));
                work.fail(failure);
            }
            Err(panic) => {
                self.shared.metrics.panics.inc();
                work.fail(panic_message(panic));
            }
        }
        share.rows
    }

    fn collect(&mut self, share: Share, first_row: usize, logit_row: usize) -> Result<(), Failure> {
        let seq = &mut self.scheduler.running_mut()[share.seq];
        let (Some(embed), Some(pool)) = (seq.work.request.embed, &mut seq.work.pool) else { return Ok(()) };
        let last = share.start + share.rows == seq.prompt_len;
        if share.start == 0 {
            // The first time, or again after a preemption.
            pool.clear();
        }
        match embed.pooling {
            Pooling::Mean => (0..share.rows).for_each(|row| pool.add(self.runner.hidden(first_row + row))),
            Pooling::First if share.start == 0 => pool.set(self.runner.hidden(first_row)),
            Pooling::Last if last => pool.set(self.runner.hidden(first_row + share.rows - 1)),
            Pooling::Score | Pooling::Dense if last => pool.set(self.runner.logits(logit_row)),
            Pooling::First | Pooling::Last | Pooling::Score | Pooling::Dense => {}
        }
        if last {
            seq.work.pooled(&self.shared.metrics)?;
        }
        Ok(())
    }
}
