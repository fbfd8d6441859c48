//! From logits to tokens: samples each row of a step in order, reports and delivers its token, and verifies drafts.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use plimsoll_memory::faults::{self, Site};

use super::{Worker, panic_message};
use crate::api::constraint::Unfit;
use crate::api::error::Failure;
use crate::api::output::TokenLogprobs;
use crate::request::Request;
use crate::runner::Runner;
use crate::sampling::{LogprobError, SampleError, Sampler, SamplingParams, TokenCounts, top_logprobs};
use crate::schedule::scheduler::StepEntry;

impl<R: Runner> Worker<R> {
    /// Samples and delivers the rows of the last step, and records how many rows of each entry were accepted.
    pub(super) fn sample_rows(&mut self) {
        self.step.accepted.clear();
        let (mut first_row, mut logit_row) = (0, 0);
        for i in 0..self.step.entries.len() {
            let entry = self.step.entries[i];
            let accepted = match self.scheduler.running()[entry.seq].pooled {
                Some(_) => self.pool_entry(entry, first_row, logit_row),
                None => self.sample_entry(entry, logit_row),
            };
            first_row += entry.rows;
            logit_row += entry.logit_rows;
            self.step.accepted.push(accepted);
            let seq = &mut self.scheduler.running_mut()[entry.seq];
            let of_prompt = seq.prompt_len.saturating_sub(entry.start).min(entry.rows);
            self.shared.metrics.prompt_tokens.inc_by(of_prompt as u64);
            seq.drafts.clear();
            self.recovery.delivered += 1;
            if !seq.payload.failed() {
                self.scheduler.commit(entry, accepted);
            }
        }
    }

    /// Samples one entry's rows. Its logits begin with row `logit_row`. Returns how many rows are accepted: checking stops at the first
    /// draft that differs from the sampled token.
    fn sample_entry(&mut self, entry: StepEntry, logit_row: usize) -> usize {
        let known = entry.rows - entry.drafts;
        let first = entry.rows - entry.logit_rows;
        let mut accepted = known;
        let mut hits = 0;
        if entry.drafts > 0 {
            self.scheduler.running_mut()[entry.seq].payload.drafting().check(entry.drafts);
        }
        for row in first..entry.rows {
            if row >= accepted {
                break;
            }
            let draft_index = (row + 1).checked_sub(known).filter(|index| *index < entry.drafts);
            let draft = draft_index.map(|index| self.scheduler.running()[entry.seq].drafts[index]);
            let deliver = || self.sample_row(entry.seq, entry.start + row, logit_row + row - first, draft);
            let outcome = catch_unwind(AssertUnwindSafe(deliver));
            let seq = &mut self.scheduler.running_mut()[entry.seq];
            match outcome {
                Ok(Ok(hit)) => hits += usize::from(hit),
                Ok(Err(failure)) => {
                    self.recovery.non_finite |= matches!(failure, Failure::NonFinite(_));
                    seq.payload.fail(failure);
                }
                Err(panic) => {
                    self.shared.metrics.panics.inc();
                    seq.payload.fail(panic_message(panic));
                }
            }
            if hits > accepted - known && !seq.payload.finished() {
                accepted += 1;
            }
        }
        if entry.drafts > 0 {
            self.drafts.tally.checked(entry.drafts, hits, &self.shared.metrics);
            self.drafts.pace.checked(self.scheduler.running_mut()[entry.seq].payload.drafting().source, hits);
        }
        accepted
    }

    /// Handles the logits at `position`: reports the next prompt token, or samples the next token. True if that equals
    /// the `draft`.
    fn sample_row(
        &mut self,
        index: usize,
        position: usize,
        logit_row: usize,
        draft: Option<u32>,
    ) -> Result<bool, Failure> {
        let seq = &mut self.scheduler.running_mut()[index];
        if seq.payload.finished() {
            return Ok(false);
        }
        if let (Some(n), true) = (seq.payload.request.prompt_logprobs, position < seq.prompt_len) {
            if position == 0 {
                seq.payload.prompt_logprobs(TokenLogprobs::default())?;
            }
            if position + 1 < seq.prompt_len {
                let report = logprobs(self.runner.logits(logit_row), seq.tokens[position + 1], n, None)?;
                seq.payload.prompt_logprobs(report)?;
            }
            // Recomputing after a preemption must not report twice.
            seq.logits_from = position + 1;
        }
        if position + 1 < seq.tokens.len() {
            return Ok(false);
        }
        if seq.payload.request.max_tokens == 0 {
            seq.payload.end_without_output();
            return Ok(false);
        }
        let report = seq.payload.request.logprobs;
        if report.is_some() {
            self.output.raw.clear();
            self.output.raw.extend_from_slice(self.runner.logits(logit_row));
        }
        let payload = &mut seq.payload;
        let most_likely = payload.constraint.as_ref().is_some_and(|constraint| constraint.takes_most_likely());
        let grouped_from = payload.constraint.as_ref().and_then(|constraint| constraint.grouped_from());
        let also_report = payload.constraint.as_ref().and_then(|constraint| constraint.also_report());
        let chooser =
            &mut Chooser { sampler: &mut self.output.sampler, eos: &self.output.eos, most_likely, grouped_from };
        let token = match draft.filter(|_| self.drafts.optimistic) {
            Some(token) => token,
            None => {
                let (generated, next_position) = (payload.generated, seq.tokens.len());
                let allowed = payload.constraint.as_mut().map(|constraint| constraint.allowed()).transpose();
                let allowed = allowed?.flatten();
                let unended = allowed.is_some() && generated < payload.request.min_tokens;
                let (request, counts) = (&payload.request, &payload.counts);
                // Sums over groups of tokens need all logits, so the candidates are not enough.
                let likely = if grouped_from.is_some() { None } else { self.runner.candidates(logit_row) };
                let likely = likely.and_then(|found| {
                    chooser.sample_from_top(found, request, counts, generated, next_position, allowed)
                });
                let chosen = match likely {
                    Some(token) => Ok(token),
                    // The candidates do not decide: the whole row does.
                    None => {
                        let logits = self.runner.logits(logit_row);
                        chooser.sample(logits, request, counts, generated, next_position, allowed)
                    }
                };
                chosen.map_err(|error| match error {
                    SampleError::NothingAllowed { .. } if unended => Unfit::Grammar(NOTHING_LEFT.into()).into(),
                    SampleError::NotANumber { .. } => Failure::NonFinite(error.to_string()),
                    error => Failure::Other(error.to_string()),
                })?
            }
        };
        let report = report.map(|n| logprobs(&self.output.raw, token, n, also_report)).transpose()?;
        seq.tokens.push(token);
        // Recomputing after a preemption needs no logits of positions with a known next token.
        seq.logits_from = seq.tokens.len() - 1;
        let hit = draft == Some(token);
        if hit {
            seq.payload.drafting().hit();
        }
        seq.payload.token(token, report, &self.output.tokenizer, &self.output.eos, &self.shared.metrics)?;
        Ok(hit)
    }
}

const NOTHING_LEFT: &str =
    "the grammar allows only tokens here that end the output, and min_tokens does not let it end yet";

/// Chooses a request's tokens, for the model and for its draft head: the same logits give the same token.
pub(super) struct Chooser<'a> {
    pub sampler: &'a mut Sampler,
    pub eos: &'a [u32],
    /// The most likely token is taken, whatever the request says.
    pub most_likely: bool,
    /// The id from which tokens count as one, as [`Constraint::grouped_from`](crate::api::constraint::Constraint) says.
    pub grouped_from: Option<u32>,
}

impl Chooser<'_> {
    /// The token that [`Self::sample`] would give, sampled from the top logits; `None` where these do not decide.
    pub fn sample_from_top(
        &mut self,
        found: &[[f32; 2]],
        request: &Request,
        counts: &TokenCounts,
        generated: u32,
        position: usize,
        allowed: Option<&[u32]>,
    ) -> Option<u32> {
        let unended = generated < request.min_tokens;
        let banned = |id| unended && (self.eos.contains(&id) || request.stop_token_ids.contains(&id));
        let sampling = &self.sampling(request);
        self.sampler.sample_from_top(found, sampling, counts, position as u64, allowed, banned)
    }

    /// The token at `position`, after `generated` output tokens. `allowed`: the grammar's mask.
    pub fn sample(
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
        let sampling = &self.sampling(request);
        self.sampler.sample_grouped(logits, sampling, counts, position as u64, allowed, self.grouped_from)
    }

    fn sampling<'r>(&self, request: &'r Request) -> Cow<'r, SamplingParams> {
        match self.most_likely {
            true => Cow::Owned(SamplingParams::greedy()),
            false => Cow::Borrowed(&request.sampling),
        }
    }
}

/// The report of the chosen token with its `n` alternatives, and `also_report` behind them.
fn logprobs(logits: &[f32], chosen: u32, n: u32, also_report: Option<u32>) -> Result<TokenLogprobs, Failure> {
    let failure = |error| match error {
        LogprobError::NoDistribution { .. } => Failure::NonFinite(error.to_string()),
        error => Failure::Other(error.to_string()),
    };
    let mut top = Vec::new();
    top.try_reserve_exact(n as usize + usize::from(also_report.is_some()))?;
    let own = top_logprobs(logits, chosen, n as usize, &mut top).map_err(failure)?;
    if let Some(token) = also_report {
        top.push((token, top_logprobs(logits, token, 0, &mut Vec::new()).map_err(failure)?.logprob));
    }
    Ok(TokenLogprobs { own: Some(own.logprob), top: top.into_boxed_slice() })
}
