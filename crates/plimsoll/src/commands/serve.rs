//! `serve`: plan, load, prove, say ready with one line, serve until a signal, drain.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use plimsoll_engine::{Options, Pooling, Sentence};
use plimsoll_formats::Encoder;
use plimsoll_memory::Bytes;
use plimsoll_server::{Formats, Pooled, SamplingDefaults, Served, ServerConfig};

use crate::args::{ServeArgs, default_name};

/// Runs the server.
pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let config = ServerConfig {
        host: args.host.clone(),
        port: args.port,
        drain_deadline: Duration::from_secs(args.drain_seconds),
        ..args.http.config()?
    };
    let options = args.engine.options_beside(&config);
    let options = Options { log_ledger_every: args.log_ledger_every, ..options };
    let (model, engine) = super::start_engine(&args.model, &options)?;
    let names = match args.served_model_name.is_empty() {
        true => vec![default_name(&args.model)],
        false => args.served_model_name.clone(),
    };
    let served = Served {
        engine: engine.clone(),
        tokenizer: model.tokenizer,
        formats: Formats::new(model.template.as_deref(), args.tool_call_parser, args.reasoning_parser),
        template: model.template,
        pooled: pooled(args.pooling, model.sentence, model.checkpoint.config.encoder)?,
        names,
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs()),
        default_max_tokens: None,
        sampling: SamplingDefaults::default(),
    };
    drop(model.checkpoint);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the HTTP runtime")?;
    runtime.block_on(async {
        let listener = plimsoll_server::bind(&config).await?;
        // Before "ready" is said: whoever reads it may send a signal at once, and that must drain, not kill.
        let shutdown = shutdown().context("listening for signals")?;
        let address = listener.local_addr().context("the listening address")?;
        let plan = engine.plan();
        println!(
            "ready in {:.2} s: {} at http://{address}/v1 ({} planned of {})",
            began.elapsed().as_secs_f64(),
            served.names[0],
            Bytes(plan.total()),
            Bytes(plan.limit)
        );
        plimsoll_server::serve(listener, served, config, shutdown).await.context("serving")
    })?;
    // Before the stop, which gives everything back: the report says what was held to the last.
    tracing::info!("drained; the ledger at the end:\n{}", engine.report());
    engine.stop();
    Ok(())
}

/// How embeddings and scores are made: as the operator says, or else the checkpoint's own files; an encoder without either gives
/// the mean.
fn pooled(asked: Option<Pooling>, sentence: Option<Sentence>, encoder: Option<Encoder>) -> anyhow::Result<Pooled> {
    let classifies = encoder.is_some_and(|encoder| encoder.labels.is_some());
    if classifies && asked.is_some() {
        anyhow::bail!("--pooling: this model scores pairs and makes no embeddings");
    }
    let default = encoder.is_some().then_some(Pooling::Mean);
    let pooling = asked.or(sentence.map(|sentence| sentence.pooling)).or(default);
    Ok(Pooled {
        pooling: pooling.filter(|_| !classifies),
        normalize: sentence.is_none_or(|sentence| sentence.normalize),
        sigmoid: encoder.is_none_or(|encoder| encoder.sigmoid),
    })
}

/// Listens for Ctrl-C and SIGTERM from now on; what it returns completes at the first of them.
#[cfg(unix)]
fn shutdown() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    })
}

/// Completes on Ctrl-C.
#[cfg(not(unix))]
fn shutdown() -> std::io::Result<impl Future<Output = ()>> {
    Ok(async {
        // Without the signal there is nothing to wait for but the end of the process.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
}
