//! Shadow mode: what auto mode would choose, beside what runs. It reports and changes nothing.
//!
//! Two ways to the numbers: a pinned server's own stress, or [`dry_run`], which builds a probe, measures, and takes it down.

use super::generations::Generations;
use super::pools::own_size;
use super::run::Run;
use super::{Phase, ProfileConfig, SizingError, SizingInput, Target, check_sizes, target_tokens};
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

/// Probes and measures as auto mode does, and reports what it would choose next to `running_tokens`. The probe is gone afterwards;
/// nothing of production size is ever built, so that this can run beside the server it asks about.
///
/// # Errors
/// [`SizingError`] when not even the probe could be built and measured. A capacity that auto mode would refuse is no error
/// but part of the report.
pub fn dry_run<D: Generations>(
    cfg: &ProfileConfig,
    device: &mut D,
    running_tokens: u64,
) -> Result<ShadowReport, SizingError> {
    let mut run = Run::new(cfg, device);
    run.agree(cfg.validate())?;
    let (_, input) = run.measure()?;
    Ok(run.shadow_report(&input, running_tokens))
}

impl<D: Generations> Run<'_, D> {
    /// The report that all ranks share.
    pub(super) fn shadow_report(&mut self, input: &SizingInput, running_tokens: u64) -> ShadowReport {
        let mut report = ShadowReport::new(self.cfg, input, running_tokens);
        report.chosen_tokens = self.device.reduce_min(report.chosen_tokens);
        report.chosen_state_slots = self.device.reduce_min(report.chosen_state_slots);
        if report.chosen_tokens == 0 && report.refusal.is_none() {
            report.refusal = Some(SizingError::AnotherRank.to_string());
        }
        report
    }
}
