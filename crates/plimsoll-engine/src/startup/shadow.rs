//! Shadow mode: plans, probes, measures, and reports the size that a start would choose, beside running servers. It serves nothing and
//! leaves nothing behind.
//!
//! The probe is small (see `plimsoll_memory::sizing`), so it only needs room for the weights and its own pool.

use std::fmt;
use std::sync::Arc;

use plimsoll_device::{CpuWeights, PAGE_TOKENS, ThreadPool};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::sizing::{Mode, ShadowReport, dry_run as probe};
use plimsoll_memory::{Bytes, Component, Ledger};
use plimsoll_models::Model;
use serde::Serialize;

use crate::api::options::Options;
use crate::memory::lease::MemoryLease;
use crate::plan::{Blueprint, PlanError};
use crate::runner::backend::CpuBackend;
use crate::startup::size::profile_config;
use crate::startup::{Host, StartError, own_error, pool_builder};

/// The result of a probe. All sizes are bytes.
#[derive(Clone, Debug, Serialize)]
pub struct DryRun {
    /// Tokens of the planned pool.
    pub planned_tokens: u64,
    /// Tokens of the probe.
    pub probe_tokens: u64,
    /// Planned step workspace.
    pub workspace_planned_bytes: u64,
    /// Step workspace that the probe's largest steps took.
    pub workspace_measured_bytes: u64,
    /// Planned bytes that do not grow with the pool.
    pub fixed_planned_bytes: u64,
    /// The same as measured by the probe.
    pub fixed_measured_bytes: u64,
    /// Tokens that a start would add to the running size; negative for fewer.
    pub delta_tokens: i64,
    /// The choice of auto mode, beside the running size: `--max-total-token-num` where it is given, else the plan's.
    pub report: ShadowReport,
}

/// Plans, loads the weights, builds and tests a probe, measures, and takes everything down again.
///
/// # Errors
/// [`StartError`] where a start would fail before it could measure. A later refusal by auto mode is part of the report.
pub fn dry_run(
    checkpoint: &Checkpoint,
    options: &Options,
    host: &Host,
    progress: impl FnMut(u64),
) -> Result<DryRun, StartError> {
    host.runs_kernels()?;
    let blueprint = Blueprint::new(checkpoint, options)?;
    let planned = blueprint.plan(options, host.threads, &host.limit)?;
    if planned.gpu.is_some() {
        let problem = "measures the host's memory: use it with --device cpu".into();
        return Err(PlanError::Option { flag: "--probe", problem }.into());
    }
    if planned.step.encoder_batch {
        let problem = "sizes a pool of keys and values; an encoder keeps none".into();
        return Err(PlanError::Option { flag: "--probe", problem }.into());
    }
    let planned_tokens = (planned.pages * PAGE_TOKENS) as u64;
    let mut config = profile_config(&planned);
    config.mode = Mode::Auto;
    let (cell, probe_tokens) = (config.cell_bytes, config.probe_tokens());
    let fixed = planned.sizing.fixed;
    let _memory_lease =
        MemoryLease::take(fixed + probe_tokens * cell, 0, host.lease_dir.clone(), &host.root, &host.limits)?;
    let ledger = Arc::new(Ledger::new());
    planned.plan.enter(&ledger);
    // The probe of a small pool can be larger than the pool.
    for (component, bytes) in [
        (Component::KvPages, probe_tokens * cell),
        (Component::PrefixIndex, planned.index_bytes(probe_tokens as usize / PAGE_TOKENS, planned.slots)),
    ] {
        ledger.plan(component, planned.plan.bytes(component).max(bytes));
    }
    let Blueprint { model, weights, .. } = blueprint;
    let model: Arc<dyn Model> = Arc::from(model);
    let mut pool = ThreadPool::new(host.threads).map_err(StartError::Thread)?;
    let weights = CpuWeights::load(weights, checkpoint, &ledger, &mut pool, progress)?;
    let shape = weights.table().shaped(model.shape(options.kv_dtype));
    let backend = CpuBackend::new(model, host.isa, weights, pool);
    let mut builder = pool_builder(&planned, shape, backend, &ledger, options, host)?;
    let running = options.max_total_token_num.unwrap_or(planned_tokens);
    let report = probe(&config, &mut builder, running).map_err(own_error)?;
    Ok(DryRun {
        planned_tokens,
        probe_tokens,
        workspace_planned_bytes: planned.workspace as u64,
        workspace_measured_bytes: builder.workspace_peak,
        fixed_planned_bytes: fixed,
        fixed_measured_bytes: report.target.non_kv,
        delta_tokens: i64::try_from(report.delta()).unwrap_or(i64::MAX),
        report,
    })
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  probe of {} tokens: step workspace {} planned, {} measured; fixed parts {} planned, {} measured",
            self.probe_tokens,
            Bytes(self.workspace_planned_bytes),
            Bytes(self.workspace_measured_bytes),
            Bytes(self.fixed_planned_bytes),
            Bytes(self.fixed_measured_bytes)
        )?;
        writeln!(
            f,
            "  {} left for pools after {} that others use; the plan has {} tokens",
            Bytes(self.report.target.room),
            Bytes(self.report.target.peers),
            self.planned_tokens
        )?;
        write!(f, "  {}", self.report)
    }
}
