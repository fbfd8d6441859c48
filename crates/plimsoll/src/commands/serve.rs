//! `serve`: plan, load, prove, say ready with one line, serve until a signal, drain.

use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{CheckpointDefaults, EngineHandle, LoadedModel, Options, Pooling, Sentence};
use plimsoll_formats::Encoder;
use plimsoll_memory::Bytes;
#[cfg(unix)]
use plimsoll_memory::host::{OwnProcess, Root};
use plimsoll_server::{Formats, Pooled, RecordConfig, SamplingDefaults, Served, ServerConfig, Told};

use crate::args::{GenerationConfig, ReadingArgs, ServeArgs, default_name};
use crate::runtime::{end, http_runtime};

/// A signal that comes so soon after the first is the same one, sent to a process and to its group.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

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
    let options = args.engine.options_beside(&config);
    let options = Options { log_ledger_every: args.log_ledger_every, ..options };
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
    let (pooled, sampling) = settled(model.defaults, model.checkpoint.config.encoder, reading)?;
    if sampling != SamplingDefaults::default() {
        let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = sampling;
        tracing::info!(
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            "default sampling comes from generation_config.json (--generation-config off turns it off)"
        );
    }
    Ok(Served {
        engine,
        tokenizer: model.tokenizer,
        formats: Formats::new(model.template.as_deref(), reading.tool_call_parser, reading.reasoning_parser),
        template: model.template,
        pooled,
        names,
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs()),
        default_max_tokens: None,
        sampling,
    })
}

/// What is known of a model's use without loading it, as the operator and the checkpoint's own files say: how embeddings and scores
/// are made, and the sampling of requests that name none.
pub fn settled(
    by: CheckpointDefaults,
    encoder: Option<Encoder>,
    reading: &ReadingArgs,
) -> anyhow::Result<(Pooled, SamplingDefaults)> {
    let pooled = pooled(reading.pooling, by.sentence, encoder)?;
    let sampling = match reading.generation_config {
        GenerationConfig::Auto => recommended(&by.sampling?),
        GenerationConfig::Off => SamplingDefaults::default(),
    };
    Ok((pooled, sampling))
}

fn recommended(by: &SamplingParams) -> SamplingDefaults {
    let SamplingParams { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *by;
    SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty }
}

/// What is to be said of a server that others than this machine's users may ask, each of them without a key.
pub fn open_to_all(config: &ServerConfig) -> Option<String> {
    let local = config.host == "localhost" || config.host.parse::<IpAddr>().is_ok_and(|host| host.is_loopback());
    let open = config.api_keys.is_empty() && !local;
    open.then(|| format!("no API key is set: every client that reaches {} may use it", config.address()))
}

/// Prints the ready line to standard output. A failed write is ignored: the output may have no reader.
pub fn say_ready(began: Instant, names: &str, address: SocketAddr, planned: u64, line: u64) {
    let seconds = began.elapsed().as_secs_f64();
    let (planned, line) = (Bytes(planned), Bytes(line));
    let _ = writeln!(
        std::io::stdout(),
        "ready in {seconds:.2} s: {names} at http://{address}/v1 ({planned} planned of {line})"
    );
}

/// Why no trace can be recorded in this file, as far as looking tells.
pub fn unrecordable(file: &Path) -> Option<String> {
    let folder = file.parent().filter(|folder| *folder != Path::new(""));
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Some(format!("there is no directory {}", folder.display()));
    }
    let other = file.exists() && !file.is_file();
    other.then(|| "a directory or a device is there, where a file is wanted".into())
}

/// What cannot be written, on a full disk for instance, is found before a model is loaded.
fn try_record(file: &Path) -> anyhow::Result<()> {
    if let Some(why) = unrecordable(file) {
        anyhow::bail!(why);
    }
    let mut beside = file.as_os_str().to_owned();
    beside.push(".try");
    let written = File::create_new(&beside)?.write_all(&[0; 4096]);
    std::fs::remove_file(&beside)?;
    Ok(written?)
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

/// Listens for Ctrl-C, SIGTERM and SIGHUP from now on, and says so of the first and of one that comes later. To be called where HTTP runs.
pub fn told() -> std::io::Result<Told> {
    let mut signals = Signals::new()?;
    let (tell, told) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        signals.next().await;
        let first = Instant::now();
        let _ = tell.send(()).await;
        loop {
            signals.next().await;
            if first.elapsed() >= SAME_SIGNAL {
                break;
            }
        }
        tracing::warn!("told to end again: what still runs is ended now");
        let _ = tell.send(()).await;
    });
    Ok(told)
}

/// Ends the process when it is told so before it serves. Only the first process of a container needs that: the system keeps signals from it
/// that it does not listen for.
struct Early {
    _serving: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Early {
    fn new() -> std::io::Result<Self> {
        if std::process::id() != 1 {
            return Ok(Self { _serving: None });
        }
        let (serving, serves) = tokio::sync::oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = runtime.block_on(async { Signals::new() })?;
        let wait = async move {
            tokio::select! {
                biased;
                _ = serves => {}
                () = signals.next() => {
                    tracing::info!("told to end before it was ready");
                    std::process::exit(0);
                }
            }
        };
        std::thread::Builder::new().name("plimsoll-early".into()).spawn(move || runtime.block_on(wait))?;
        Ok(Self { _serving: Some(serving) })
    }
}

/// What tells the server to end.
#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    /// The terminal has gone; none where that is to be survived (`nohup`).
    hangup: Option<tokio::signal::unix::Signal>,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let survives = OwnProcess::ignores_hangup(&Root::system()).unwrap_or(true);
        let hangup = (!survives).then(|| signal(SignalKind::hangup())).transpose()?;
        let [interrupt, terminate] = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
        Ok(Self { interrupt: interrupt?, terminate: terminate?, hangup })
    }

    async fn next(&mut self) {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! { _ = self.interrupt.recv() => {}, _ = self.terminate.recv() => {}, _ = hangup => {} }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        // Without the signal there is nothing to wait for but the end of the process.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
