//! `serve`: plan, load, prove, say ready with one line, serve until a signal, drain.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use plimsoll_engine::{EngineHandle, LoadedModel, Options, Pooling, Sentence};
use plimsoll_formats::Encoder;
use plimsoll_memory::Bytes;
use plimsoll_server::{Formats, HTTP_WORKERS, Pooled, RecordConfig, SamplingDefaults, Served, ServerConfig};

use crate::args::{ReadingArgs, ServeArgs, default_name};

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
    if let Some(record) = &config.record {
        let folder = record.file.parent().filter(|folder| *folder != Path::new(""));
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            anyhow::bail!("--record {}: there is no directory {}", record.file.display(), folder.display());
        }
    }
    if let Some(record) = config.record.as_ref().filter(|record| record.file.exists()) {
        let what = match record.file.is_file() {
            true => "the file exists and is not overwritten; name one that is not there yet",
            false => "a directory or a device is there, where a new file is wanted",
        };
        anyhow::bail!("--record {}: {what}", record.file.display());
    }
    try_address(&config)?;
    if let Some(file) = &args.models {
        return super::several::run(file, &args, config, began);
    }
    let options = args.engine.options_beside(&config);
    let options = Options { log_ledger_every: args.log_ledger_every, ..options };
    let (model, engine) = super::start_engine(&args.model, &options)?;
    let names = match args.served_model_name.is_empty() {
        true => vec![default_name(&args.model)],
        false => args.served_model_name.clone(),
    };
    let served = served(model, engine.clone(), &args.reading, names)?;
    let runtime = http_runtime()?;
    let ended = runtime.block_on(async {
        let listener = plimsoll_server::bind(&config).await?;
        // Before "ready" is said: whoever reads it may send a signal at once, and that must drain, not kill.
        let shutdown = shutdown().context("listening for signals")?;
        let address = listener.local_addr().context("the listening address")?;
        let plan = engine.plan();
        say_ready(began, &served.names[0], address, plan.total(), plan.limit);
        plimsoll_server::serve(listener, served, config, shutdown).await.context("serving")
    });
    end(runtime);
    ended?;
    // Before the stop, which gives everything back: the report says what was held to the last.
    tracing::info!("drained; the ledger at the end:\n{}", engine.report());
    engine.stop();
    Ok(())
}

/// Whether the server could listen, tried with its own socket: that an address is taken is known before a model is loaded, not after.
pub fn try_address(config: &ServerConfig) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(plimsoll_server::bind(config)).map(drop)?)
}

/// A model with its engine, as it is served.
pub fn served(
    model: LoadedModel,
    engine: EngineHandle,
    reading: &ReadingArgs,
    names: Vec<String>,
) -> anyhow::Result<Served> {
    Ok(Served {
        engine,
        tokenizer: model.tokenizer,
        formats: Formats::new(model.template.as_deref(), reading.tool_call_parser, reading.reasoning_parser),
        template: model.template,
        pooled: pooled(reading.pooling, model.sentence, model.checkpoint.config.encoder)?,
        names,
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs()),
        default_max_tokens: None,
        sampling: SamplingDefaults::default(),
    })
}

/// What HTTP runs on.
pub fn http_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(HTTP_WORKERS).enable_all().build().context("starting the HTTP runtime")
}

/// Ends it. A fetch, a load or a download that has not come to its end a second later has nobody to work for, and ends with the process.
pub fn end(runtime: tokio::runtime::Runtime) {
    runtime.shutdown_timeout(Duration::from_secs(1));
}

/// The line on standard output that says so. Nobody may be reading it.
pub fn say_ready(began: Instant, names: &str, address: SocketAddr, planned: u64, line: u64) {
    let seconds = began.elapsed().as_secs_f64();
    let (planned, line) = (Bytes(planned), Bytes(line));
    let _ = writeln!(
        std::io::stdout(),
        "ready in {seconds:.2} s: {names} at http://{address}/v1 ({planned} planned of {line})"
    );
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
pub fn shutdown() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    })
}

/// Completes on Ctrl-C.
#[cfg(not(unix))]
pub fn shutdown() -> std::io::Result<impl Future<Output = ()>> {
    Ok(async {
        // Without the signal there is nothing to wait for but the end of the process.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
}
