//! Capacity pinned by the user: built once, stressed once, trimmed once. No probe, no teardown, no second build.
//!
//! Shadow mode is the same start-up with one more line in the log: what auto mode would have chosen.

use super::attempts::Outcome;
use super::diagnose::{Stage, diagnose};
use super::generations::Generations;
use super::pools::own_size;
use super::run::{Fault, Run};
use super::{Event, Phase, ProfileConfig, SizingError, SizingInput, Target, check_sizes, target_tokens};
use std::fmt;

/// What auto mode would choose, beside what is running.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ShadowReport {
    /// KV tokens of the running server.
    pub running_tokens: u64,
    /// KV tokens auto mode would build; zero if it would refuse.
    pub chosen_tokens: u64,
    /// State slots auto mode would build.
    pub chosen_state_slots: u64,
    /// Why auto mode would refuse.
    pub refusal: Option<String>,
    /// The arithmetic.
    pub target: Target,
}

impl ShadowReport {
    /// Computes the report from a measurement alone, for a dry run: nothing is built and nothing is changed.
    #[must_use]
    pub fn new(cfg: &ProfileConfig, input: &SizingInput, running_tokens: u64) -> Self {
        let target = target_tokens(input);
        let size = cfg.validate().and_then(|()| own_size(cfg, &target, input.total));
        let size = size.and_then(|size| check_sizes(Phase::Production, size.0, cfg).map(|_| size));
        let refusal = size.as_ref().err().map(ToString::to_string);
        let (chosen_tokens, chosen_state_slots) = size.unwrap_or((0, 0));
        Self { running_tokens, chosen_tokens, chosen_state_slots, refusal, target }
    }

    /// Tokens auto mode would add (positive) or take away (negative).
    #[must_use]
    pub fn delta(&self) -> i128 {
        i128::from(self.chosen_tokens) - i128::from(self.running_tokens)
    }
}

impl fmt::Display for ShadowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(refusal) = &self.refusal {
            return write!(f, "running with {} tokens; auto would refuse: {refusal}", self.running_tokens);
        }
        let (by, word) = match self.delta() {
            more @ 0.. => (more, "more"),
            fewer => (-fewer, "fewer"),
        };
        write!(f, "running with {} tokens; auto would choose {}, {by} {word}", self.running_tokens, self.chosen_tokens)
    }
}

/// Starts at exactly `tokens`.
pub(super) fn start<D: Generations>(
    mut run: Run<'_, D>,
    tokens: u64,
    shadow: bool,
) -> Result<Outcome<D::G>, SizingError> {
    let cfg = run.cfg;
    let state_slots = cfg.state.map_or(0, |pool| cfg.running_max_req_size.saturating_mul(pool.slots_per_request));
    let max_seq_len = {
        let checked = check_pinned(cfg, tokens, state_slots, run.device.device().available);
        run.agree(checked)?
    };
    let shape = run.shape(tokens, state_slots, Phase::Production);
    let (generation, result) = run.try_generation(shape, 0);
    let (generation, measured) = match (generation, result) {
        (Some(generation), Ok(measured)) => (generation, measured),
        (_, Err(Fault::Fatal(error))) => return Err(error),
        (_, result) => {
            let failure = result.err().and_then(Fault::into_memory);
            let ledger = run.device.components();
            let found = diagnose(Stage::Pinned, 1, tokens, failure, &ledger, cfg);
            return Err(SizingError::OutOfMemory(Box::new(found)));
        }
    };
    run.device.trim();
    let peak_reserved = measured.peak_reserved;
    run.device.event(&Event::Proven { attempt: 1, shape, peak_reserved });
    run.note_context(max_seq_len);
    let shadow = shadow.then(|| {
        let input = run.input(shape, peak_reserved);
        let mut report = ShadowReport::new(cfg, &input, tokens);
        report.chosen_tokens = run.device.reduce_min(report.chosen_tokens);
        report.chosen_state_slots = run.device.reduce_min(report.chosen_state_slots);
        if report.chosen_tokens == 0 && report.refusal.is_none() {
            report.refusal = Some(SizingError::AnotherRank.to_string());
        }
        report
    });
    let outcome = run.outcome(generation, shape, max_seq_len, measured);
    Ok(Outcome { shadow, ..outcome })
}

/// What arithmetic can tell before anything is built; returns the longest request.
fn check_pinned(cfg: &ProfileConfig, tokens: u64, slots: u64, available: u64) -> Result<u64, SizingError> {
    if tokens == 0 {
        return Err(SizingError::Zero { what: "--max-total-token-num" });
    }
    let state = cfg.state_bytes(slots);
    let need = cfg.kv_bytes(tokens).saturating_add(state);
    if need > available {
        let fits = cfg.whole_pages(available.saturating_sub(state) / cfg.cell_bytes);
        return Err(SizingError::PinnedTooLarge { tokens, need, available, fits });
    }
    check_sizes(Phase::Production, tokens, cfg)
}
