//! `serve`: plan, load, self-test, print the ready line, serve until a signal, drain.

use std::time::{Duration, Instant};

use anyhow::Context;
use plimsoll_engine::Options;
use plimsoll_server::{RecordConfig, ServerConfig};

use super::checks::{open_to_all, try_address, try_record};
use super::serving::{say_ready, served};
use super::signals::{Early, told};
use crate::args::ServeArgs;
use crate::names::default_name;
use crate::runtime::{end, http_runtime};

/// An engine stops within this time. It writes to its disk cache for five seconds at most.
const ENDED_WITHIN: Duration = Duration::from_secs(15);

/// Runs the server.
pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let config = ServerConfig {
        host: args.host.clone(),
        port: args.port,
        drain_deadline: Duration::from_secs(args.drain_seconds),
        record: args.record.clone().map(|file| RecordConfig {
            file,
            content: args.record_content,
            max_bytes: args.record_bytes,
        }),
        ..args.http.config()?
    };
    config.check()?;
    if let Some(RecordConfig { file, .. }) = &config.record {
        try_record(file).with_context(|| format!("--record {}", file.display()))?;
    }
    try_address(&config)?;
    if let Some(open) = open_to_all(&config) {
        tracing::warn!("{open} (--api-key-file)");
    }
    if let Some(file) = &args.models {
        return super::several::run(file, &args, config, began);
    }
    if !args.model_is_named {
        super::offer::hint();
    }
    let options = args.engine.options_beside(&config);
    let options = Options { log_ledger_every: args.ledger_steps(), ..options };
    let early = Early::new().context("listening for signals")?;
    let (model, engine) = super::start_engine(&args.model, &options)?;
    let names = match args.served_model_name.is_empty() {
        true => vec![default_name(&args.model)],
        false => args.served_model_name.clone(),
    };
    let served = served(model, engine.clone(), &args.reading, names)?;
    let runtime = http_runtime(&config)?;
    let ended = runtime.block_on(async {
        let listener = plimsoll_server::bind(&config).await?;
        // Before "ready" is printed: its reader may send a signal at once, and that must drain the server, not kill it.
        let told = told().context("listening for signals")?;
        drop(early);
        let address = listener.local_addr().context("the listening address")?;
        let plan = engine.plan();
        say_ready(began, &served.names[0], address, plan.total(), plan.limit);
        plimsoll_server::serve(listener, served, config, told).await.context("serving")
    });
    end(runtime);
    ended?;
    // Before the stop, which frees all memory: the report shows what was held until then.
    tracing::info!("drained; the ledger at the end:\n{}", engine.report());
    engine.stop();
    // Cache entries that the engine has not written to disk by then are lost with the process.
    if !engine.wait_stopped(ENDED_WITHIN) {
        tracing::warn!("the engine did not end within {} s", ENDED_WITHIN.as_secs());
    }
    Ok(())
}
