//! `plimsoll soak`: many clients of all manners against one server for a while, and a verdict.
//!
//! Some clients behave, some leave in the middle, some read slowly or not at all, some send rubbish. Meanwhile fixed
//! prompts must keep giving the answers they gave when they were alone, the process must stay under its line, and at
//! the end everything must have been given back.

mod attacks;
pub mod balloon;
mod find;
mod golden;
mod limits;
mod manners;
mod memory;
mod mix;
mod tally;
mod verdict;
mod watch;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout_at;

use crate::bench::client::Target;
use crate::bench::process::Sample;
use crate::bench::prompts::{Random, Scale};
use crate::bench::{first_model, write_json};
use balloon::Balloon;
use golden::Golden;
use limits::Limits;
use manners::Setting;
use memory::Page;
use mix::Mix;
use tally::Tally;
use verdict::{Evidence, Verdict};
use watch::Watch;

/// What to do to the server.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub struct Args {
    /// The server, as http://host:port.
    #[arg(long)]
    pub url: String,
    /// The model to ask for; the server's first by default.
    #[arg(long)]
    pub model: Option<String>,
    /// Clients at once.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub clients: u32,
    /// How long to go on: seconds, or a number with s, m or h.
    #[arg(long, default_value = "600", value_parser = duration)]
    pub duration: Duration,
    /// Which clients: all, polite, hostile, marathon (800 tokens each), or manners with weights, as stream=4,giant=1.
    #[arg(long, default_value = "all")]
    pub mix: Mix,
    /// The server's process, to watch its memory, threads and descriptors [default: who listens at the URL].
    #[arg(long)]
    pub pid: Option<u32>,
    /// Bytes the process must not exceed [default: what /v1/memory says is planned].
    #[arg(long)]
    pub line: Option<u64>,
    /// Tokens of the longest prompts.
    #[arg(long, default_value_t = 512)]
    pub prompt_tokens: usize,
    /// Tokens of the longest answers.
    #[arg(long, default_value_t = 64)]
    pub output_tokens: usize,
    /// The slowest hundredth of health probes may take this many milliseconds.
    #[arg(long, default_value_t = 100)]
    pub health_ms: u64,
    /// Seconds that a client waits for its answer before it calls the server broken; a slow machine needs more.
    #[arg(long, default_value_t = 300)]
    pub patience: u64,
    /// Where the clients' choices start; the same number makes the same choices.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Again and again let a neighbour take nearly all memory that the server's cgroup has left, and give it back.
    #[arg(long)]
    pub balloon: bool,
    /// Write the verdict there as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Prompts whose answers are fixed before and compared throughout.
const GOLDENS: usize = 8;

/// When time is up, clients have this long to end what they are doing.
const LAST_CALL: Duration = Duration::from_secs(5);

/// Somebody must have been answered this long after time is up.
const FIRST_ANSWER: Duration = Duration::from_secs(180);

/// After the clients have stopped, the server has this long to become idle (its own timeouts included).
const IDLE_WITHIN: Duration = Duration::from_secs(90);

/// Runs the soak and prints the verdict. Returns whether it is good; fails only when the server could not be reached.
pub async fn run(args: &Args) -> Result<bool> {
    let target = Target::parse(&args.url)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&target).await?,
    };
    let scale = Scale::measure(&target, &model).await?;
    let context = context(&target, &model).await;
    // What must be served has to fit, with room for a stalled client's longer answer.
    let (prompt_tokens, output_tokens) =
        (args.prompt_tokens.min(context / 2), args.output_tokens.min(context / 8).max(1));
    let golden = Golden::record(&target, &model, scale, GOLDENS, prompt_tokens).await?;
    let pid = args.pid.or_else(|| find::listener(&target.authority));
    eprintln!(
        "{GOLDENS} prompts answered alone; {} clients for {} s, process {}",
        args.clients,
        args.duration.as_secs(),
        pid.map_or_else(|| "unseen".into(), |pid| pid.to_string())
    );
    let before = Page { sample: pid.and_then(Sample::of), ..Page::read(&target).await.context("before the soak")? };
    let limits = pid.and_then(Limits::of);
    let watch = Watch::start(&target, pid, limits.clone());
    let balloon = match (args.balloon, pid) {
        (true, Some(pid)) => Some(Balloon::start(pid)?),
        (true, None) => bail!("--balloon needs the server's process: give --pid"),
        (false, _) => None,
    };
    let setting = Arc::new(Setting {
        target: target.clone(),
        model,
        scale,
        golden,
        prompt_tokens,
        output_tokens,
        context,
        patience: Duration::from_secs(args.patience),
        tally: Tally::default(),
    });
    let started = Instant::now();
    crowd(args, &setting).await;
    let busy_s = started.elapsed().as_secs_f64();
    let balloon = balloon.map_or_else(Vec::new, Balloon::stop);
    let watched = watch.stop().await;
    let after = memory::wait_for_idle(&target, pid, before.sample, IDLE_WITHIN).await;
    // Alone again: what came before must have left no trace.
    let again = setting.golden.compare_all(&setting).await;
    let limits = limits.map(|limits| limits.kept());
    let tally = setting.tally.take();
    let evidence = Evidence { args, busy_s, tally, watched, limits, balloon, before, after, again };
    let verdict = Verdict::of(&evidence);
    // The exit code says it, too.
    let _ = writeln!(std::io::stdout(), "{verdict}");
    if let Some(path) = &args.json {
        write_json(path, &Document { args, verdict: &verdict, evidence: &evidence })?;
    }
    Ok(verdict.good())
}

#[derive(Serialize)]
struct Document<'a> {
    args: &'a Args,
    verdict: &'a Verdict,
    evidence: &'a Evidence<'a>,
}

/// Tokens of prompt and answer together, as the server says; without limit where it does not.
async fn context(target: &Target, model: &str) -> usize {
    let body = json!({"model": model, "prompt": "x"});
    let asked = async { target.post("/tokenize", &body, Duration::from_secs(30)).await?.json().await };
    let said = asked.await.ok().and_then(|answer: Value| answer.get("max_model_len")?.as_u64());
    said.and_then(|tokens| usize::try_from(tokens).ok()).unwrap_or(usize::MAX)
}

/// `300`, `300s`, `5m`, `1h`.
fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
        Some(at) => text.split_at(at),
        None => (text, "s"),
    };
    let each = match unit {
        "s" => Some(1),
        "m" | "min" => Some(60),
        "h" => Some(3600),
        _ => None,
    };
    let seconds = each.zip(number.parse::<u64>().ok()).and_then(|(each, number)| number.checked_mul(each));
    // A year is more than anybody means.
    match seconds.filter(|seconds| (1..=365 * 24 * 3600).contains(seconds)) {
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Err("a duration is a number of seconds, or a number with s, m or h: 300, 300s, 5m, 1h".into()),
    }
}

/// All clients, until time is up. Whoever is not done a moment later leaves with all the others, but not before somebody has
/// had an answer: a slow machine is no broken server.
async fn crowd(args: &Args, setting: &Arc<Setting>) {
    let until = Instant::now() + args.duration;
    let mut clients = JoinSet::new();
    for client in 0..args.clients {
        let (setting, mix) = (Arc::clone(setting), args.mix.clone());
        let mut random = Random::new(args.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(client)));
        clients.spawn(async move {
            while Instant::now() < until {
                let manner = mix.choose(&mut random);
                let outcome = manner.act(&setting, &mut random, until).await;
                setting.tally.add(manner, outcome);
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
    // Dropping the set ends those who are left.
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_are_written_as_people_write_them() {
        for (text, seconds) in [("300", 300), ("300s", 300), ("5m", 300), ("5min", 300), ("1h", 3600)] {
            assert_eq!(duration(text).unwrap().as_secs(), seconds, "{text}");
        }
        for wrong in ["", "m", "5 m", "-1", "1.5h", "0", "5d", "99999999999999999999", "18446744073709551615h"] {
            assert!(duration(wrong).unwrap_err().contains("5m"), "{wrong}");
        }
    }
}
