//! From logits to tokens: every wanted row of a step, in order, is sampled, reported, delivered; drafts are checked on the way.

use std::panic::{AssertUnwindSafe, catch_unwind};

use plimsoll_memory::faults::{self, Site};

use super::{Worker, panic_message};
use crate::api::constraint::Unfit;
use crate::api::error::Failure;
use crate::api::output::TokenLogprobs;
use crate::api::request::Request;
use crate::runner::Runner;
use crate::sampling::{LogprobError, SampleError, Sampler, TokenCounts, top_logprobs};
use crate::schedule::scheduler::Share;

impl<R: Runner> Worker<R> {
    /// Turns the logits of the last step into tokens, and notes how many rows of each share count.
    pub(super) fn deliver(&mut self) {
        self.counted.clear();
        let (mut first_row, mut logit_row) = (0, 0);
        for i in 0..self.shares.len() {
            let share = self.shares[i];
            let counted = match self.scheduler.running()[share.seq].pooled {
                Some(_) => self.pool_share(share, first_row, logit_row),
                None => self.deliver_share(share, logit_row),
            };
            first_row += share.rows;
            logit_row += share.logit_rows;
            self.counted.push(counted);
            let seq = &mut self.scheduler.running_mut()[share.seq];
            let of_prompt = seq.prompt_len.saturating_sub(share.start).min(share.rows);
            self.shared.metrics.prompt_tokens.inc_by(of_prompt as u64);
            seq.drafts.clear();
            self.delivered += 1;
            if !seq.work.failed() {
                self.scheduler.commit(share, counted);
            }
        }
    }

    /// Delivers one share's rows. Its logits begin with row `logit_row`. Returns how many of its rows count: a draft
    /// that differs from the token sampled before it ends them.
    fn deliver_share(&mut self, share: Share, logit_row: usize) -> usize {
        let known = share.rows - share.drafts;
        let first = share.rows - share.logit_rows;
        let mut counted = known;
        let mut hits = 0;
        if share.drafts > 0 {
            self.scheduler.running_mut()[share.seq].work.drafting().check(share.drafts);
        }
        for row in first..share.rows {
            if row >= counted {
                break;
            }
            let draft = (row + 1).checked_sub(known).filter(|draft| *draft < share.drafts);
            let draft = draft.map(|draft| self.scheduler.running()[share.seq].drafts[draft]);
            let deliver = || self.deliver_row(share.seq, share.start + row, logit_row + row - first, draft);
            let outcome = catch_unwind(AssertUnwindSafe(deliver));
            let seq = &mut self.scheduler.running_mut()[share.seq];
            match outcome {
                Ok(Ok(hit)) => hits += usize::from(hit),
                Ok(Err(failure)) => {
                    self.mistrusts |= matches!(failure, Failure::Numbers(_));
                    seq.work.fail(failure);
                }
                Err(panic) => {
                    self.shared.metrics.panics.inc();
                    seq.work.fail(panic_message(panic));
                }
            }
            if hits > counted - known && !seq.work.finished() {
                counted += 1;
            }
        }
        if share.drafts > 0 {
            self.speculation.checked(share.drafts, hits, &self.shared.metrics);
            self.pace.checked(self.scheduler.running_mut()[share.seq].work.drafting().source, hits);
        }
        counted
    }

    /// The logits at `position`: a report for the next prompt token, or the next token itself. Says whether that is the `draft`.
    fn deliver_row(
        &mut self,
        index: usize,
        position: usize,
        logit_row: usize,
        draft: Option<u32>,
    ) -> Result<bool, Failure> {
        let seq = &mut self.scheduler.running_mut()[index];
        if seq.work.finished() {
            return Ok(false);
        }
        let logits = self.runner.logits(logit_row);
        if let (Some(n), true) = (seq.work.request.prompt_logprobs, position < seq.prompt_len) {
            if position == 0 {
                seq.work.prompt_logprobs(TokenLogprobs::default())?;
            }
            if position + 1 < seq.prompt_len {
                let report = logprobs(logits, seq.tokens[position + 1], n)?;
                seq.work.prompt_logprobs(report)?;
            }
            // Recomputing after a preemption must not report twice.
            seq.logits_from = position + 1;
        }
        if position + 1 < seq.tokens.len() {
            return Ok(false);
        }
        if seq.work.request.max_tokens == 0 {
            seq.work.end_without_output();
            return Ok(false);
        }
        let report = seq.work.request.logprobs;
        if report.is_some() {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        let (work, chooser) = (&mut seq.work, &mut Chooser { sampler: &mut self.sampler, eos: &self.eos });
        let token = match draft.filter(|_| self.optimistic) {
            Some(token) => token,
            None => {
                let (generated, position) = (work.generated, seq.tokens.len());
                let allowed = work.constraint.as_mut().map(|constraint| constraint.allowed()).transpose();
                let allowed = allowed?.flatten();
                let unended = allowed.is_some() && generated < work.request.min_tokens;
                let chosen = chooser.choose(logits, &work.request, &work.counts, generated, position, allowed);
                chosen.map_err(|error| match error {
                    SampleError::NothingAllowed { .. } if unended => Unfit::Form(NOTHING_LEFT.into()).into(),
                    SampleError::NotANumber { .. } => Failure::Numbers(error.to_string()),
                    error => Failure::Words(error.to_string()),
                })?
            }
        };
        let report = report.map(|n| logprobs(&self.raw, token, n)).transpose()?;
        seq.tokens.push(token);
        // Recomputing after a preemption needs no logits of positions with a known next token.
        seq.logits_from = seq.tokens.len() - 1;
        let hit = draft == Some(token);
        if hit {
            seq.work.drafting().hit();
        }
        seq.work.token(token, report, &self.tokenizer, &self.eos, &self.shared.metrics)?;
        Ok(hit)
    }
}

const NOTHING_LEFT: &str =
    "the form allows only tokens here that end the output, and min_tokens does not let it end yet";

/// How a request's tokens are chosen, by the model and by its draft head alike: the same logits give the same token.
pub(super) struct Chooser<'a> {
    pub sampler: &'a mut Sampler,
    pub eos: &'a [u32],
}

impl Chooser<'_> {
    /// The token at `position`, of which the request's output has `generated` before it; only `allowed` ones, if given.
    pub fn choose(
        &mut self,
        logits: &mut [f32],
        request: &Request,
        counts: &TokenCounts,
        generated: u32,
        position: usize,
        allowed: Option<&[u32]>,
    ) -> Result<u32, SampleError> {
        if generated < request.min_tokens {
            for id in self.eos.iter().chain(&request.stop_token_ids) {
                logits.get_mut(*id as usize).into_iter().for_each(|logit| *logit = f32::NEG_INFINITY);
            }
        }
        faults::site(Site::Sampler);
        Ok(self.sampler.sample(logits, &request.sampling, counts, position as u64, allowed)?.token)
    }
}

fn logprobs(logits: &[f32], chosen: u32, n: u32) -> Result<TokenLogprobs, Failure> {
    let mut top = Vec::new();
    top.try_reserve_exact(n as usize)?;
    let own = top_logprobs(logits, chosen, n as usize, &mut top).map_err(|error| match error {
        LogprobError::NoDistribution { .. } => Failure::Numbers(error.to_string()),
        error => Failure::Words(error.to_string()),
    })?;
    Ok(TokenLogprobs { own: Some(own.logprob), top: top.into_boxed_slice() })
}
