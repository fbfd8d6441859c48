//! `plimsoll soak`: many clients of all manners against one server for a while, and a verdict.
//!
//! Some clients behave, some leave in the middle, some read slowly or not at all, some send rubbish. Meanwhile fixed
//! prompts must keep giving the answers they gave when they were alone, the process must stay under its line, and at
//! the end everything must have been given back.

mod golden;
mod manners;
mod memory;
mod tally;
mod verdict;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::bench::client::Target;
use crate::bench::process::Sample;
use crate::bench::prompts::{Random, Scale};
use crate::bench::{first_model, write_json};
use golden::Golden;
use manners::{Manner, Setting};
use memory::Page;
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
    /// Seconds to go on for.
    #[arg(long, default_value_t = 600)]
    pub duration: u64,
    /// The server's process, to watch its memory, threads and descriptors.
    #[arg(long)]
    pub pid: Option<u32>,
    /// Bytes the process must not exceed.
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
    /// Where the clients' choices start; the same number makes the same choices.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the verdict there as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Prompts whose answers are fixed before and compared throughout.
const GOLDENS: usize = 8;

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
    let golden = Golden::record(&target, &model, scale, GOLDENS, args.prompt_tokens).await?;
    eprintln!("{GOLDENS} prompts answered alone; {} clients for {} s", args.clients, args.duration);
    let before =
        Page { sample: args.pid.and_then(Sample::of), ..Page::read(&target).await.context("before the soak")? };
    let watch = Watch::start(&target, args.pid);
    let setting = Arc::new(Setting {
        target: target.clone(),
        model,
        scale,
        golden,
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens,
        tally: Tally::default(),
    });
    let started = Instant::now();
    crowd(args, &setting).await;
    let busy_s = started.elapsed().as_secs_f64();
    let watched = watch.stop().await;
    let after = memory::wait_for_idle(&target, args.pid, before.sample, IDLE_WITHIN).await;
    // Alone again: what came before must have left no trace.
    let again = setting.golden.compare_all(&setting).await;
    let evidence = Evidence { args, busy_s, tally: setting.tally.take(), watched, before, after, again };
    let verdict = Verdict::of(&evidence);
    println!("{verdict}");
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

/// All clients, until time is up and the last has ended what it was doing.
async fn crowd(args: &Args, setting: &Arc<Setting>) {
    let until = Instant::now() + Duration::from_secs(args.duration);
    let mut clients = JoinSet::new();
    for client in 0..args.clients {
        let setting = Arc::clone(setting);
        let mut random = Random::new(args.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(client)));
        clients.spawn(async move {
            while Instant::now() < until {
                let manner = Manner::choose(&mut random);
                let outcome = manner.act(&setting, &mut random, until).await;
                setting.tally.add(manner, outcome);
            }
        });
    }
    while clients.join_next().await.is_some() {}
}
