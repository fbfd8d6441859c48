//! `plimsoll soak`: many clients of all client profiles against one server for a while, and a verdict.
//!
//! Some clients behave, some leave in the middle, some read slowly or not at all, some send rubbish. Meanwhile fixed
//! prompts must keep giving the answers they gave when they were alone, the process must stay under its line, and at
//! the end everything must have been given back.

mod ask;
mod attacks;
pub mod balloon;
mod chart;
mod disk_cache;
mod endpoint;
mod faults;
mod find;
mod golden_answers;
mod image;
mod keep;
mod launch;
mod limits;
mod memory;
mod mix;
mod outcome;
mod profile;
mod question;
mod report;
mod scenario;
mod schemas;
mod setting;
mod tally;
mod verdict;
mod visits;
mod watch;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout_at};

use crate::client::Target;
use crate::keys::KeyArgs;
use crate::process::Sample;
use crate::prompts::{Random, Scale};
use crate::replay::drive::{Models, Pace, replay};
use crate::replay::{Format, Replayed, read};
use chart::Chart;
use disk_cache::DiskWatch;
use endpoint::Endpoint;
use faults::{FaultInjector, FaultLog, Victim};
use golden_answers::GoldenAnswers;
use keep::Keep;
use launch::Launched;
use limits::Limits;
use memory::Page;
use scenario::{Crowd, Kind, Load, Replay, Scenario, Trouble};
use setting::Setting;
use tally::Tally;
use verdict::{Evidence, Verdict};
use watch::Watch;

/// Flags of `soak`.
#[derive(Clone, Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("server").args(["url", "scenario"]).required(true).multiple(true)))]
pub struct Args {
    /// The server, as http://host:port; not needed with a --scenario that starts one.
    #[arg(long)]
    pub url: Option<String>,
    /// The crowd, the server and the trouble in a TOML file; flags win over it, --url over its server. Those in `soak/` say how they
    /// are written.
    #[arg(long, value_name = "FILE")]
    pub scenario: Option<PathBuf>,
    /// API keys for the server.
    #[command(flatten)]
    pub keys: KeyArgs,
    /// The model to ask for; the server's first by default.
    #[arg(long)]
    pub model: Option<String>,
    /// The clients.
    #[command(flatten)]
    pub load: Load,
    /// The server's process, to watch its memory, threads and descriptors [default: the process that listens at the
    /// URL].
    #[arg(long)]
    pub pid: Option<u32>,
    /// Schemas and requests that the clients `schemas` send beside those that they make up: a JSON list of objects with `schema`, or with
    /// `path` and `body`. May be given several times.
    #[arg(long, value_name = "FILE")]
    pub schemas: Vec<PathBuf>,
    /// Bytes the process must not exceed [default: what /v1/memory says is planned].
    #[arg(long)]
    pub line: Option<u64>,
    /// Again and again let a neighbour take nearly all memory that the server's cgroup has left, and give it back.
    #[arg(long)]
    pub balloon: bool,
    /// Write the verdict there as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Draw memory under the line there, as SVG.
    #[arg(long)]
    pub svg: Option<PathBuf>,
}

/// When time is up, clients have this long to end what they are doing.
const LAST_CALL: Duration = Duration::from_secs(5);

/// An answer that needs no work (health, refusals of invalid requests) must come within this time, or within `--health-ms` if that is
/// longer.
const AT_ONCE: Duration = Duration::from_secs(10);

/// If no client was answered when time is up, the soak waits this long for the first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(180);

/// After the clients have stopped, the server has this long to become idle (its own timeouts included).
const IDLE_WITHIN: Duration = Duration::from_secs(90);

/// Runs the soak and prints the verdict. Returns whether it is good; fails only when the server could not be reached.
pub async fn run(args: &Args) -> Result<bool> {
    let mut scenario = args.scenario.as_deref().map(Scenario::read).transpose()?.unwrap_or_default();
    if args.balloon {
        scenario.chaos.push(Trouble::balloon());
    }
    if args.url.is_some() {
        // A server that already runs has the limits that its operator has set.
        scenario.server = None;
        if scenario.has(Kind::FullDisk) {
            bail!("{}: only the scenario's own server has a disk of its own; leave --url away", Kind::FullDisk);
        }
    }
    let crowd = args.load.over(&scenario.crowd)?;
    let key = args.keys.first()?;
    let server =
        scenario.server.as_ref().map(|server| Launched::start(server, scenario.has(Kind::Balloon))).transpose()?;
    let mut told = signal(SignalKind::terminate())?;
    // Returning drops the server's limits, its disk and its process, however the soak ends.
    tokio::select! {
        verdict = soak(args, key.as_deref(), crowd, scenario, server) => verdict,
        _ = tokio::signal::ctrl_c() => bail!("ended before its time"),
        _ = told.recv() => bail!("ended before its time"),
    }
}

/// Prepares the settings that all clients share. While the server is idle, it measures prompts and records the fixed answers.
async fn prepare(args: &Args, crowd: &mut Crowd, target: &Target) -> Result<Setting> {
    let model = match &args.model {
        Some(model) => model.clone(),
        None => target.first_model().await?,
    };
    let scale = Scale::measure(target, &model).await?;
    let context = context(target, &model).await;
    // Valid requests must fit the context, with room for a stalled client's longer answer.
    let prompt_tokens = crowd.prompt_tokens.min(context / 2);
    let output_tokens = crowd.output_tokens.min(context / 8).max(1);
    let golden_answers = GoldenAnswers::record(target, &model, scale, prompt_tokens).await?;
    let schemas: Vec<Vec<_>> = args.schemas.iter().map(|file| schemas::read(file)).collect::<Result<_>>()?;
    crowd.mix = crowd.mix.for_server(&golden_answers).context("this server knows none of the requests in the mix")?;
    Ok(Setting {
        endpoint: Endpoint {
            target: target.clone(),
            model,
            patience: Duration::from_secs(crowd.patience),
            at_once: AT_ONCE.max(Duration::from_millis(crowd.health_ms)),
        },
        scale,
        golden_answers,
        prompt_tokens,
        output_tokens,
        context,
        fault_log: Arc::new(FaultLog::new()),
        keep: Keep::default(),
        schemas: schemas.concat(),
        tally: Tally::default(),
    })
}

/// Starts the scenario's faults around a server.
fn begin(
    scenario: &Scenario,
    target: &Target,
    pid: Option<u32>,
    disk: Option<PathBuf>,
    fault_log: &Arc<FaultLog>,
) -> Result<FaultInjector> {
    let mut troubles = scenario.chaos.clone();
    // A disk that could not be mounted cannot be full. The verdict names a missing disk.
    troubles.retain(|trouble| trouble.kind != Kind::FullDisk || disk.is_some());
    let victim = Victim { pid, authority: target.authority.clone(), disk };
    FaultInjector::start(troubles, &victim, fault_log)
}

async fn soak(
    args: &Args,
    key: Option<&str>,
    mut crowd: Crowd,
    scenario: Scenario,
    server: Option<Launched>,
) -> Result<bool> {
    let url = args.url.as_deref().or(server.as_ref().map(|server| server.url.as_str()));
    let target = Target::parse(url.context("there is neither --url nor a [server] in the --scenario")?, key)?;
    let setting = Arc::new(prepare(args, &mut crowd, &target).await?);
    let pid = args.pid.or(server.as_ref().map(Launched::pid)).or_else(|| find::listener(&target.authority));
    eprintln!(
        "{} questions answered alone; {} clients for {} s, process {}",
        setting.golden_answers.len(),
        crowd.clients,
        crowd.duration.as_secs(),
        pid.map_or_else(|| "unseen".into(), |pid| pid.to_string())
    );
    let before = Page { sample: pid.and_then(Sample::of), ..Page::read(&target).await.context("before the soak")? };
    let limits = pid.and_then(Limits::of);
    let disk = server.as_ref().and_then(|server| server.cache.clone()).map(DiskWatch::start);
    let watch = Watch::start(&target, pid, limits.clone(), &setting.fault_log, setting.endpoint.at_once);
    let faults = begin(&scenario, &target, pid, server.as_ref().and_then(Launched::disk), &setting.fault_log)?;
    let started = Instant::now();
    let trace = scenario.trace.as_ref().map(|trace| trace_of(&setting, trace)).transpose()?;
    come_and_go(&crowd, &setting).await;
    let replayed = match trace {
        Some(trace) => Some(trace.await?),
        None => None,
    };
    let busy_s = started.elapsed().as_secs_f64();
    drop(faults);
    let watched = watch.stop().await;
    let disk = match disk {
        Some(disk) => Some(disk.stop(&target).await),
        None => None,
    };
    let after = memory::wait_for_idle(&target, pid, before.sample, IDLE_WITHIN).await;
    // No other client runs now: earlier requests must not affect these answers.
    let again = (setting.golden_answers.len(), setting.golden_answers.compare_all(&setting.endpoint).await);
    let alone = setting.keep.compare_all(&setting.endpoint).await;
    let limits = limits.map(|limits| limits.kept());
    let without = server.as_ref().map_or_else(Vec::new, |server| server.without.clone());
    let ended = server.map(Launched::end);
    let (ended, complaints) = ended.map_or((None, Vec::new()), |(ended, complaints)| (Some(ended), complaints));
    let (tally, faults, unknown) =
        (setting.tally.take(), setting.fault_log.all(), setting.golden_answers.unknown.clone());
    let (crowd, line) = (&crowd, args.line);
    let evidence = Evidence {
        crowd,
        line,
        busy_s,
        tally,
        watched,
        limits,
        faults,
        without,
        unknown,
        replayed,
        before,
        after,
        again,
        alone,
        ended,
        complaints,
        disk,
    };
    let verdict = Verdict::of(&evidence);
    // A failed write is ignored: the exit code reports the verdict, too.
    let _ = writeln!(std::io::stdout(), "{verdict}");
    hand_in(args, &scenario, &verdict, &evidence)?;
    Ok(verdict.good())
}

/// Starts the replay of a trace beside the crowd.
fn trace_of(setting: &Setting, wanted: &Replay) -> Result<tokio::task::JoinHandle<Replayed>> {
    let trace = read(&wanted.file, Format::Auto).with_context(|| wanted.file.display().to_string())?;
    if let Some(line) = trace.torn {
        bail!("{}: line {line}, the last, has no end: a soak replays whole traces", wanted.file.display());
    }
    let trace = Arc::new(trace);
    let models = Models { named: Some(setting.endpoint.model.clone()), first: String::new() };
    // Made-up token ids stay below the smallest vocabulary.
    let pace = Pace { speed: wanted.speed, max_in_flight: wanted.max_in_flight.max(1), vocab: 1000 };
    let target = setting.endpoint.target.clone();
    Ok(tokio::spawn(async move { replay(&target, &models, trace, pace).await }))
}

#[derive(Serialize)]
struct Document<'a> {
    scenario: &'a Scenario,
    version: &'static str,
    verdict: &'a Verdict,
    evidence: &'a Evidence<'a>,
    series: Value,
}

/// Writes the JSON and SVG files that the operator asked for.
fn hand_in(args: &Args, scenario: &Scenario, verdict: &Verdict, evidence: &Evidence<'_>) -> Result<()> {
    let looks = report::thin(&evidence.watched.looks);
    if let Some(path) = &args.json {
        let version = env!("CARGO_PKG_VERSION");
        report::write(path, &Document { scenario, version, verdict, evidence, series: report::columns(&looks) })?;
    }
    if let Some(path) = &args.svg {
        let title = format!(
            "{}, {:.0} min, {} clients: {}",
            scenario.server.as_ref().map_or("a running server", |server| &server.model),
            evidence.busy_s / 60.0,
            evidence.crowd.clients,
            if verdict.good() { "PASS" } else { "FAIL" }
        );
        let line = evidence.line.or(evidence.before.planned());
        let limit = evidence.limits.as_ref().map(|limits| limits.bytes);
        // A limit far above the plan is the machine's. It would flatten the chart.
        let limit = limit.filter(|limit| line.is_some_and(|line| *limit < line * 3));
        let chart = Chart { title, looks: &looks, line, limit, faults: &evidence.faults };
        std::fs::write(path, chart.draw()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the server's limit on tokens of prompt and answer together; no limit where it reports none.
async fn context(target: &Target, model: &str) -> usize {
    let body = json!({"model": model, "prompt": "x"});
    let asked = async { target.post("/tokenize", &body, Duration::from_secs(30)).await?.json().await };
    let said = asked.await.ok().and_then(|answer: Value| answer.get("max_model_len")?.as_u64());
    said.and_then(|tokens| usize::try_from(tokens).ok()).unwrap_or(usize::MAX)
}

/// Runs all clients until time is up. Clients that are still busy a moment later end together. Before that, the soak
/// waits for a first answer: a slow machine is no broken server.
async fn come_and_go(crowd: &Crowd, setting: &Arc<Setting>) {
    let until = Instant::now() + crowd.duration;
    let mut clients = JoinSet::new();
    for client in 0..crowd.clients {
        let (setting, mix, think_ms) = (Arc::clone(setting), crowd.mix.clone(), crowd.think_ms);
        let mut random = Random::new(crowd.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(client)));
        clients.spawn(async move {
            while Instant::now() < until {
                let profile = mix.choose(&mut random);
                let outcome = profile.act(&setting, &mut random, until).await;
                setting.tally.add(profile, outcome);
                let rest = Duration::from_millis(random.between(0, 2 * think_ms));
                sleep(rest.min(until.saturating_duration_since(Instant::now()))).await;
            }
        });
    }
    let done = async { while clients.join_next().await.is_some() {} };
    tokio::pin!(done);
    let mut last_call = until + LAST_CALL;
    while timeout_at(last_call.into(), done.as_mut()).await.is_err() {
        if setting.tally.answered() || Instant::now() >= until + FIRST_ANSWER {
            break;
        }
        last_call += LAST_CALL;
    }
    // Dropping the set ends the remaining clients.
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::Args;

    #[test]
    fn a_missing_server_names_both_ways_to_give_one() {
        let parsed =
            |words: &[&str]| Args::augment_args(Command::new("soak")).try_get_matches_from([&["soak"], words].concat());
        let error = parsed(&[]).unwrap_err().to_string();
        assert!(error.contains("--url <URL>|--scenario <FILE>"), "{error}");
        for words in [&["--url", "http://a"][..], &["--scenario", "a.toml"]] {
            assert!(parsed(words).is_ok(), "{words:?}");
        }
        assert!(parsed(&["--url", "http://a", "--scenario", "a.toml"]).is_ok());
    }
}
