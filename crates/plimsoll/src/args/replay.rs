//! Flags of `replay`.

use clap::Args;
use plimsoll_bench::replay;

use super::engine::EngineArgs;
use super::http::HttpArgs;

/// Flags of `replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The trace and its target.
    #[command(flatten)]
    pub trace: replay::Args,
    /// With --simulate: the HTTP side of the plan. --url uses only the keys.
    #[command(flatten)]
    pub http: HttpArgs,
    /// With --simulate: the engine of the plan.
    #[command(flatten)]
    pub engine: EngineArgs,
}
