//! After a step: drafts the next tokens, with the draft head or by prompt lookup.
//!
//! Rows of prompts pass through the draft head while drafting may pay. So its KV entries are there for every sequence
//! that shares the pages; each page records whether they are. The first draft of a sequence comes from the pass over
//! its own computed rows, each further one from a pass over the draft before. Drafts are drawn like the model's tokens,
//! with the same parameters, counts and randomness at the same position. So a head with the model's logits drafts the
//! model's tokens. If the head fails, only its drafts are lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use plimsoll_device::DeviceError;

use super::sample_rows::Chooser;
use super::{Worker, panic_message};
use crate::metrics::Metrics;
use crate::request::state::RequestState;
use crate::runner::Runner;
use crate::runner::step_buffers::DraftRows;
use crate::schedule::scheduler::Seq;
use crate::speculation::pace::{Source, SpeculationPlan};
use crate::speculation::prompt_lookup::Continuation;

/// Verified steps between two lines in the log.
const LOG_EVERY: u64 = 4096;

/// Draft counts of the whole engine.
#[derive(Debug, Default)]
pub(super) struct Tally {
    steps: u64,
    drafted: u64,
    accepted: u64,
}

impl Tally {
    /// One sequence's drafts of one step.
    pub fn checked(&mut self, drafted: usize, accepted: usize, metrics: &Metrics) {
        self.steps += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        metrics.drafted_tokens.inc_by(drafted as u64);
        metrics.accepted_tokens.inc_by(accepted as u64);
        let acceptance = self.accepted as f64 / self.drafted.max(1) as f64;
        metrics.acceptance_ratio.set(acceptance);
        if self.steps.is_multiple_of(LOG_EVERY) {
            let (drafted, accepted) = (self.drafted, self.accepted);
            let mean_accepted_length = 1.0 + self.accepted as f64 / self.steps as f64;
            tracing::info!(drafted, accepted, acceptance, mean_accepted_length, "speculation so far");
        }
    }
}

/// A sequence that gets drafts from the head.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftedSeq {
    seq: usize,
    want: usize,
}

/// Whether all but the sequence's last token are computed, and its mask for the next token is ready.
fn can_draft(seq: &mut Seq<RequestState>) -> bool {
    seq.computed + 1 == seq.tokens.len() && !seq.payload.finished() && seq.payload.mask_ready(Duration::ZERO)
}

impl<R: Runner> Worker<R> {
    /// Prompt lookup: after a step, drafts the tokens that followed an earlier occurrence of the last tokens, or the tokens at the place
    /// that the text repeats.
    pub(super) fn look_up(&mut self, speculation: SpeculationPlan) {
        if !speculation.draft {
            return;
        }
        for entry in &self.step.entries {
            let seq = &mut self.scheduler.running_mut()[entry.seq];
            if !can_draft(seq) {
                continue;
            }
            let Some(Continuation { repeat, resumed }) = seq.payload.trail().follow(&seq.tokens) else { continue };
            let source = if resumed { Source::Resumed } else { Source::repeat(repeat.length) };
            let want = seq.drafts_useful(self.drafts.per_seq_max);
            if self.drafts.pace.drafts(speculation, seq.payload.drafting(), source) {
                seq.payload.drafting().source = source;
                seq.drafts.extend(repeat.guesses(&seq.tokens).take(want));
            }
        }
    }

    /// Runs the draft head after a step.
    pub(super) fn draft(&mut self, speculation: SpeculationPlan) {
        self.plan_first_pass(speculation);
        if self.drafts.passes.is_empty() {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| self.draft_passes()));
        let error = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(panic) => Some(panic_message(panic)),
        };
        // Drafts are not output: their counts are removed again.
        for entry in &self.step.entries {
            let seq = &mut self.scheduler.running_mut()[entry.seq];
            if seq.payload.request.sampling.needs_counts() {
                seq.drafts
                    .iter()
                    .for_each(|id| seq.payload.counts.remove_output(*id).expect("added when it was guessed"));
            }
        }
        if let Some(error) = error {
            self.shared.metrics.failed_steps.inc();
            // The head of a lost device did not fail: it drafts as soon as the device is open again.
            if self.runner.lost().is_none() {
                tracing::error!(error, "the draft head failed; speculation is paused");
                self.drafts.pace.fall_silent();
            }
            // Pages were marked before the pass that fills them.
            self.cache.borrow_mut().pool.forget_drafted();
            for seq in self.scheduler.running_mut() {
                seq.drafts.clear();
                seq.drafted = 0..0;
            }
        }
    }

    /// The head's first rows: prompt rows, and the settled rows of sequences that draft.
    fn plan_first_pass(&mut self, speculation: SpeculationPlan) {
        self.drafts.passes.clear();
        self.drafts.drafted.clear();
        let mut from = 0;
        // Rows that a pass may have beside those of the step, which a draft model goes back over after a pause.
        let computed: usize = self.step.entries.iter().map(|entry| entry.rows).sum();
        let mut spare = if self.limits.draft_model { self.limits.rows.saturating_sub(computed) } else { 0 };
        for (entry, accepted) in self.step.entries.iter().zip(&self.step.accepted) {
            let seq = &mut self.scheduler.running_mut()[entry.seq];
            let prompt = speculation.fill && (entry.start < seq.prompt_len || (entry.rows > 1 && entry.drafts == 0));
            let wanted = can_draft(seq) && self.drafts.pace.drafts(speculation, seq.payload.drafting(), Source::Head);
            // The next token of a row must be known.
            let rows = (*accepted).min(seq.tokens.len() - 1 - entry.start);
            if (prompt || wanted) && rows > 0 && !seq.payload.failed() {
                let want = if wanted { seq.room_for_drafts(self.drafts.per_seq_max) } else { 0 };
                let start = if want > 0 { seq.draft_from(entry.start, spare) } else { entry.start };
                spare -= entry.start - start;
                let rows = rows + entry.start - start;
                seq.draft_over(start, rows);
                let wanted = want > 0;
                self.drafts.passes.push(DraftRows { seq: entry.seq, start, rows, from, wanted });
                if wanted {
                    self.drafts.drafted.push(DraftedSeq { seq: entry.seq, want });
                }
            }
            from += entry.rows;
        }
    }

    fn draft_passes(&mut self) -> Result<(), DeviceError> {
        loop {
            let (from, step) = self.step.buffers.fill_drafts(&self.drafts.passes, self.scheduler.running());
            self.runner.draft(from, &step)?;
            if self.drafts.drafted.is_empty() {
                break;
            }
            self.drafts.passes.clear();
            let mut kept = 0;
            for row in 0..self.drafts.drafted.len() {
                let drafted = self.drafts.drafted[row];
                if self.guess(drafted.seq, row) && self.scheduler.running()[drafted.seq].drafts.len() < drafted.want {
                    let seq = &self.scheduler.running()[drafted.seq];
                    let start = seq.tokens.len() - 2 + seq.drafts.len();
                    self.drafts.passes.push(DraftRows { seq: drafted.seq, start, rows: 1, from: row, wanted: true });
                    self.drafts.drafted[kept] = drafted;
                    kept += 1;
                }
            }
            self.drafts.drafted.truncate(kept);
            if kept == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Draws the next draft of a sequence from the `row`-th wanted row of the last pass. False if its logits cannot be
    /// sampled.
    fn guess(&mut self, index: usize, row: usize) -> bool {
        let seq = &mut self.scheduler.running_mut()[index];
        let (payload, ahead) = (&mut seq.payload, seq.drafts.len());
        let mut chooser = Chooser {
            sampler: &mut self.output.sampler,
            eos: &self.output.eos,
            most_likely: false,
            grouped_from: None,
        };
        let (generated, position) = (payload.generated + ahead as u32, seq.tokens.len() + ahead);
        let (request, counts) = (&payload.request, &payload.counts);
        let likely = self.runner.candidates(row);
        let likely =
            likely.and_then(|found| chooser.sample_from_top(found, request, counts, generated, position, None));
        let chosen = match likely {
            Some(token) => Ok(token),
            None => chooser.sample(self.runner.logits(row), request, counts, generated, position, None),
        };
        let Ok(token) = chosen else { return false };
        if payload.request.sampling.needs_counts() {
            payload.counts.add_output(token).expect("room for every token of the answer");
        }
        seq.drafts.push(token);
        true
    }
}
