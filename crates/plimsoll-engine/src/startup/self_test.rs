//! The self-test: the largest steps that the scheduler can form, run before "ready".
//!
//! The plan knows the peak, so this is no probe; it checks that the plan is true. Measured bytes must not exceed planned bytes, and every
//! kernel path that serving uses has run once.

use std::time::Instant;

use plimsoll_device::{CANDIDATES_MAX, DeviceError, NO_STATE, PAGE_TOKENS, SeqSpan, StepInput};
use plimsoll_media::{Claim, ContentKey, MediaError, Modality};
use plimsoll_models::{EncoderInput, Grid};

use crate::api::cancel::Cancel;
use crate::cache::Pools;
use crate::media::{MediaPlan, MediaSpec, widen};
use crate::plan::constants::ROWS_OF_MEDIA;
use crate::runner::Runner;
use crate::runner::encoder_batch::{self, EncoderStep};
use crate::sampling::{Sampler, SamplingParams, TokenCounts, top_logprobs};
use crate::schedule::scheduler::StepLimits;

/// Rows of one sequence in a step.
#[derive(Clone, Copy, Debug)]
struct Rows {
    start: usize,
    rows: usize,
    /// Whether the state after each row is kept, as when drafts are checked.
    each: bool,
    /// Whether the rows are a prompt's; prompt rows come last.
    prompt: bool,
}

/// Runs every worst case on `runner` with the pools in `pools`. A chunk of a prompt waits between two layers, so that the encoders run in
/// the workspace above it.
pub fn self_test(
    runner: &mut dyn Runner,
    sampler: &mut Sampler,
    limits: &StepLimits,
    context: usize,
    pools: Pools,
    cancel: &Cancel,
) -> Result<(), DeviceError> {
    if limits.encoder_batch {
        return SelfTest { runner, limits, pools, cancel, candidates: false }.run_whole(context);
    }
    let pool = pools.pages * PAGE_TOKENS;
    let longest = context.min(pool);
    let mut test = SelfTest { runner, limits, pools, cancel, candidates: limits.candidates };
    let rows = limits.rows.min(longest);
    // All steps run beside the largest chunk that waits between two layers.
    let chunk = test.begin(limits.of_layers().rows.min(longest))?;
    if limits.split_numerics() {
        // The most rows of a prompt, and the most rows of a preempted answer that is computed again.
        test.run(&[Rows { start: 0, rows, each: false, prompt: true }], limits.logit_rows.min(rows))?;
        let rows = limits.answer_rows().min(longest);
        test.run(&[Rows { start: 0, rows, each: false, prompt: false }], limits.logit_rows.min(rows))?;
    }
    // A chunk at the end of the longest context, with the longest prefix to attend to.
    let tail = rows.min(PAGE_TOKENS);
    test.run(&[Rows { start: longest - tail, rows: tail, each: false, prompt: true }], 1)?;
    // The largest decode batch, first plain and then with every draft to check.
    let with_drafts = 1 + limits.drafts;
    let by_slots = pools.slots.checked_div(limits.slots).unwrap_or(usize::MAX);
    let decodes = limits.running.min(limits.logit_rows / with_drafts).min(pools.pages).min(by_slots).max(1);
    let deep = (pool / decodes).min(longest);
    let mut mixed = vec![Rows { start: deep - 1, rows: 1, each: false, prompt: false }; decodes];
    test.run(&mixed, decodes)?;
    sample(test.runner, sampler, decodes)?;
    // A device that finds candidates must also return all logits of all rows.
    if std::mem::take(&mut test.candidates) {
        test.run(&mixed, decodes)?;
    }
    test.candidates = limits.candidates;
    let checked = with_drafts.min(deep);
    if checked > 1 && decodes * checked <= limits.rows {
        let start = deep - checked;
        let checks = Rows { start, rows: checked, each: limits.slots > 1, prompt: false };
        test.run(&vec![checks; decodes], decodes * checked)?;
    }
    // All decoding sequences but one, beside a prompt that fills the step. As many rows as possible have logits, since logits of prompt
    // rows can be asked for too.
    mixed.pop();
    let rest = limits.rows.saturating_sub(mixed.len()).clamp(1, longest);
    mixed.push(Rows { start: 0, rows: rest, each: false, prompt: true });
    let rows = mixed.len() - 1 + rest;
    test.run(&mixed, limits.logit_rows.min(rows))?;
    test.go_on(&chunk)
}

/// Runs the largest batches of media through the encoders and writes their outputs into the pool.
pub(crate) fn self_test_encoder(
    runner: &mut dyn Runner,
    plan: &MediaPlan,
    spec: &MediaSpec,
    cancel: &Cancel,
) -> Result<(), MediaError> {
    for (sense, grids) in &plan.worst {
        let batch = grids.len();
        let failed =
            |error: DeviceError| MediaError::WorstCaseFailed { batch, modality: "medium", why: error.to_string() };
        cancel.checkpoint().map_err(failed)?;
        let patches = vec![0.0; spec.values_of(*sense, grids)];
        runner.encode(*sense, &EncoderInput { grids, patches: &patches }).map_err(failed)?;
        let tokens = |grid: &Grid| spec.tokens_of(*sense, grid);
        let key = |i: usize| ContentKey::of(Modality::Image, "self-test", &i.to_le_bytes());
        let mut first = 0;
        for (i, grid) in grids.iter().enumerate() {
            // No request finds these outputs: claims that are dropped unfilled free their room.
            let mut claims = spec.outputs.claim(&[(key(i), tokens(grid))])?;
            let Some(Claim::Vacant(room)) = claims.first_mut() else { continue };
            for row in 0..room.rows() {
                let embedding = runner.embedding(first + row);
                if !embedding.iter().all(|x| x.is_finite()) {
                    return Err(failed(DeviceError::NotFinite));
                }
                widen(room.row_mut(row), embedding);
            }
            first += tokens(grid);
        }
    }
    Ok(())
}

/// The layout of a step.
#[derive(Debug, Default)]
struct Batch {
    spans: Vec<SeqSpan>,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    pages: Vec<u32>,
    window_pages: Vec<u32>,
    logit_rows: Vec<u32>,
    candidates: Vec<u32>,
    state_out: Vec<u32>,
    places: Vec<[f32; 3]>,
    of_prompts: usize,
}

struct SelfTest<'a> {
    runner: &'a mut dyn Runner,
    limits: &'a StepLimits,
    pools: Pools,
    cancel: &'a Cancel,
    /// Whether candidates are asked for, where the device finds them; otherwise all logits are fetched.
    candidates: bool,
}

impl SelfTest<'_> {
    /// Runs an encoder's worst cases: the step that takes most, the longest sequence alone, and the most sequences of one row.
    fn run_whole(&mut self, context: usize) -> Result<(), DeviceError> {
        let alone = [context.min(self.limits.rows)];
        let short = vec![1; self.limits.running.min(self.limits.rows)];
        for rows in [&encoder_batch::largest(self.limits, context)[..], &alone, &short] {
            self.cancel.checkpoint()?;
            let step = EncoderStep::new(rows);
            self.runner.forward(&step.input())?;
            for row in 0..rows.len() {
                let scores = self.runner.logits(row);
                let scores_are = scores.iter().all(|x| x.is_finite());
                if !scores_are || !self.runner.hidden(row).iter().all(|x| x.is_finite()) {
                    return Err(DeviceError::NotFinite);
                }
            }
        }
        Ok(())
    }

    /// Begins a chunk of a prompt that is computed layer by layer.
    fn begin(&mut self, rows: usize) -> Result<Batch, DeviceError> {
        let prompt = Rows { start: 0, rows, each: false, prompt: true };
        let chunk = self.batch(&[prompt], 1.min(rows));
        if rows > 0 {
            self.runner.begin(&self.input(&chunk))?;
        }
        Ok(chunk)
    }

    /// Computes one layer of the chunk; the other layers take the same workspace.
    fn go_on(&mut self, chunk: &Batch) -> Result<(), DeviceError> {
        if !chunk.tokens.is_empty() {
            self.cancel.checkpoint()?;
            self.runner.advance(&self.input(chunk))?;
        }
        Ok(())
    }

    /// Runs one step, in which the last `logit_rows` rows have logits, and the draft passes after it.
    fn run(&mut self, seqs: &[Rows], logit_rows: usize) -> Result<(), DeviceError> {
        self.cancel.checkpoint()?;
        let batch = self.batch(seqs, logit_rows);
        let step = self.input(&batch);
        let began = Instant::now();
        self.runner.forward(&step)?;
        tracing::debug!(
            seqs = seqs.len(),
            rows = batch.tokens.len(),
            ms = began.elapsed().as_millis() as u64,
            "self-test step"
        );
        if self.limits.draft_head { self.draft(&step) } else { Ok(()) }
    }

    /// Lays out a step in which the last `logit_rows` rows have logits.
    fn batch(&self, seqs: &[Rows], logit_rows: usize) -> Batch {
        let mut batch = Batch::default();
        let Batch { spans, tokens, positions, pages, window_pages, state_out, .. } = &mut batch;
        for (i, seq) in seqs.iter().enumerate() {
            let Rows { start, rows, each, prompt: _ } = *seq;
            let count = (start + rows).div_ceil(PAGE_TOKENS);
            let ring = self.limits.slots;
            let slot = |at: usize| (i * ring + at % ring) as u32;
            spans.push(SeqSpan {
                first_row: tokens.len(),
                rows,
                start,
                pages_at: pages.len(),
                pages: count,
                seen_from: 0,
                state: (ring > 0 && start > 0).then(|| slot(0)),
            });
            positions.extend(start as u32..(start + rows) as u32);
            tokens.extend((0..rows).map(|i| (i % 7) as u32));
            // Sequences can share pages here, because their results are not used. Each begins with another page, so that each is read
            // separately.
            pages.extend((0..count).map(|page| ((i + page) % self.pools.pages) as u32));
            if self.limits.window > 0 {
                window_pages.extend((0..count).map(|page| ((i + page) % self.pools.slots) as u32));
            }
            if ring > 0 {
                let kept = |row: usize| each || row == rows;
                state_out.extend((1..=rows).map(|row| if kept(row) { slot(row) } else { NO_STATE }));
            }
        }
        if self.limits.media {
            batch.places.extend(batch.positions.iter().map(|position| [*position as f32; 3]));
        }
        let rows = batch.tokens.len();
        batch.logit_rows.extend((rows - logit_rows) as u32..rows as u32);
        batch.candidates.resize(if self.candidates { logit_rows } else { 0 }, CANDIDATES_MAX as u32);
        batch.of_prompts = seqs.iter().filter(|seq| seq.prompt).map(|seq| seq.rows).sum();
        batch
    }

    fn input<'b>(&self, batch: &'b Batch) -> StepInput<'b> {
        StepInput {
            tokens: &batch.tokens,
            positions: &batch.positions,
            seqs: &batch.spans,
            pages: &batch.pages,
            window_pages: &batch.window_pages,
            logit_rows: &batch.logit_rows,
            candidates: &batch.candidates,
            state_out: &batch.state_out,
            places: &batch.places,
            media: if self.limits.media { &ROWS_OF_MEDIA } else { &[] },
            bf16_rows: self.limits.bf16_rows(batch.tokens.len(), batch.of_prompts),
            bf16_logits: self.limits.bf16_logits(),
            // Fetches as much as a step can fetch.
            pooled: true,
            ..StepInput::default()
        }
    }

    /// Runs every row of `step` through the draft head, then one row of each sequence for each further draft.
    fn draft(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let mut spans: Vec<SeqSpan> = step.seqs.iter().map(|span| SeqSpan { state: None, ..*span }).collect();
        let rows: Vec<u32> = (0..step.tokens.len() as u32).collect();
        let last: Vec<u32> = spans.iter().map(|span| (span.first_row + span.rows - 1) as u32).collect();
        let bf16_rows = self.limits.bf16_rows(step.tokens.len(), 0);
        let candidates = vec![CANDIDATES_MAX as u32; if self.candidates { spans.len() } else { 0 }];
        let first = StepInput {
            seqs: &spans,
            logit_rows: &last,
            candidates: &candidates,
            state_out: &[],
            media: &[],
            bf16_rows,
            pooled: false,
            ..*step
        };
        self.runner.draft(&rows, &first)?;
        let seqs: Vec<u32> = (0..spans.len() as u32).collect();
        let tokens = vec![1; spans.len()];
        let mut places = Vec::with_capacity(spans.len());
        let mut positions = Vec::with_capacity(spans.len());
        for (i, span) in spans.iter_mut().enumerate() {
            let end = span.start + span.rows - 1;
            (span.first_row, span.rows, span.start) = (i, 1, end);
            positions.push(end as u32);
            if self.limits.media {
                places.push([end as f32; 3]);
            }
        }
        for _ in 1..self.limits.drafts {
            self.runner.draft(
                &seqs,
                &StepInput {
                    tokens: &tokens,
                    positions: &positions,
                    seqs: &spans,
                    pages: step.pages,
                    logit_rows: &seqs,
                    candidates: &candidates,
                    places: &places,
                    bf16_rows: self.limits.bf16_rows(tokens.len(), 0),
                    bf16_logits: self.limits.bf16_logits(),
                    ..StepInput::default()
                },
            )?;
        }
        Ok(())
    }
}

/// Uses the sampler's largest scratch: penalties, truncation by probability over the whole vocabulary, and reported log-probabilities.
fn sample(runner: &mut dyn Runner, sampler: &mut Sampler, rows: usize) -> Result<(), DeviceError> {
    let params = SamplingParams { top_p: 0.999, min_p: 0.0, temperature: 100.0, ..SamplingParams::default() };
    let counts = TokenCounts::default();
    let mut top = Vec::with_capacity(crate::sampling::TOP_LOGPROBS_MAX);
    for row in 0..rows.min(2) {
        let logits = runner.logits(row);
        let room = top.capacity();
        let reported = top_logprobs(logits, 0, room, &mut top).is_ok();
        let sampled = sampler.sample(logits, &params, &counts, 0, None).is_ok();
        if !(reported && sampled) {
            return Err(DeviceError::NotFinite);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
