//! Shadow mode: the choice of auto mode, beside the running server. It reports and changes nothing.
//!
//! The numbers come from a pinned server's own self-test, or from [`dry_run`], which builds a probe, measures, and takes it down.

use super::generations::Generations;
use super::report::ShadowReport;
use super::run::Run;
use super::{ProfileConfig, SizingError, SizingInput};

/// Probes and measures as auto mode does, and reports its choice next to `running_tokens`. The probe is gone afterwards. Nothing of
/// production size is ever built, so this can run beside the running server.
///
/// # Errors
/// [`SizingError`] when the probe could not be built and measured. A capacity that auto mode would refuse is part of the report and no
/// error.
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
    /// Returns the report that all ranks share.
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
