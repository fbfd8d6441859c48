//! The proof: the largest steps the scheduler can form, run before "ready".
//!
//! Not a probe for an unknown peak (the plan knows it) but the check that the plan is true: what was measured must not exceed
//! what was planned, and every kernel path that serving uses has run once.

use plimsoll_device::{DeviceError, PAGE_TOKENS, SeqSpan, StepInput};

use crate::runner::Runner;
use crate::sampling::{Sampler, SamplingParams, TokenCounts, top_logprobs};
use crate::scheduler::StepLimits;

/// Runs every worst case on `runner`, whose pool has `pages` pages.
pub fn stress(
    runner: &mut dyn Runner,
    sampler: &mut Sampler,
    limits: &StepLimits,
    context: usize,
    pages: usize,
) -> Result<(), DeviceError> {
    let pool = pages * PAGE_TOKENS;
    let longest = context.min(pool);
    // The largest prefill; with as many logits as a step may have it is also the largest prompt-logprobs step.
    let rows = limits.rows.min(longest);
    run(runner, &[(0, rows)], limits.logit_rows.min(rows), pages)?;
    // A chunk at the far end of the longest context: the longest prefix to attend to.
    let tail = rows.min(PAGE_TOKENS);
    run(runner, &[(longest - tail, tail)], 1, pages)?;
    // The largest decode batch, then decodes beside a prefill chunk that fills the step.
    let decodes = limits.running.min(limits.logit_rows).min(pages);
    let deep = (pool / decodes).min(longest) - 1;
    let mut mixed: Vec<(usize, usize)> = vec![(deep, 1); decodes];
    run(runner, &mixed, decodes, pages)?;
    sample(runner, sampler, decodes)?;
    let rest = limits.rows.saturating_sub(decodes).min(longest);
    if rest > 0 {
        mixed.pop();
        mixed.push((0, rest));
        run(runner, &mixed, decodes, pages)?;
    }
    Ok(())
}

/// One step of sequences given as (start, rows), the last `logit_rows` rows with logits.
fn run(
    runner: &mut dyn Runner,
    seqs: &[(usize, usize)],
    logit_rows: usize,
    pool_pages: usize,
) -> Result<(), DeviceError> {
    let mut spans = Vec::new();
    let (mut tokens, mut positions, mut pages) = (Vec::new(), Vec::new(), Vec::new());
    for (start, rows) in seqs {
        let count = (start + rows).div_ceil(PAGE_TOKENS);
        spans.push(SeqSpan {
            first_row: tokens.len(),
            rows: *rows,
            start: *start,
            pages_at: pages.len(),
            pages: count,
            seen_from: 0,
            state: None,
        });
        positions.extend(*start as u32..(start + rows) as u32);
        tokens.extend((0..*rows).map(|i| (i % 7) as u32));
        // Sequences may share pages here: what they compute is not looked at.
        pages.extend((0..count as u32).map(|page| page % pool_pages as u32));
    }
    let first = tokens.len() - logit_rows;
    let wanted: Vec<u32> = (first as u32..tokens.len() as u32).collect();
    runner.forward(&StepInput {
        tokens: &tokens,
        positions: &positions,
        seqs: &spans,
        pages: &pages,
        logit_rows: &wanted,
        state_out: &[],
    })
}

/// The sampler's largest scratch: penalties, truncation by probability over the whole vocabulary, and a report.
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
