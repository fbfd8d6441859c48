//! `replay`: sends a recorded trace to a server, or runs it through the scheduler and the memory of a plan.

use plimsoll_bench::replay;
use plimsoll_engine::{Blueprint, Host};

use super::plan;
use crate::args::ReplayArgs;
use crate::output::print;

/// Replays the trace.
pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let trace = replay::open(&args.trace, print)?;
    if let Some(url) = &args.trace.url {
        let key = args.http.access.keys.first()?;
        return replay::against_server(&args.trace, url, key.as_deref(), trace, print);
    }
    let model = args.trace.model.as_deref().unwrap_or(plimsoll_hub::DEFAULT_MODEL);
    let (_, checkpoint, options) = plan::open(model, &args.engine, &args.http)?;
    let host = Host::read(&options)?;
    let planned = Blueprint::new(&checkpoint, &options)?.plan(&options, host.threads, &host.limit)?;
    replay::in_a_plan(&args.trace, model, &planned, &trace, print)
}
