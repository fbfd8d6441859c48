//! `plimsoll bench`: load against any server with OpenAI's completions, several servers in turn, so that what disturbs
//! the machine disturbs all of them alike.

mod intruder;
mod load;
mod report;
mod request;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::client::Target;
use crate::keys::KeyArgs;
use crate::output::{Print, write_json};
use crate::process::Sample;
use crate::prompts::{Recipe, Scale};
use load::{Load, round};
use report::Series;
use request::{Dialect, Server};

/// Flags of `bench`.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub struct Args {
    /// A server, as http://host:port; give it again for each server to compare.
    #[arg(long, required = true)]
    pub url: Vec<String>,
    /// API keys for the servers.
    #[command(flatten)]
    #[serde(skip)]
    pub keys: KeyArgs,
    /// The model to ask for; the server's first by default.
    #[arg(long)]
    pub model: Option<String>,
    /// Requests at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: u32,
    /// Requests per round.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 128)]
    pub prompt_tokens: usize,
    /// Tokens to generate for each.
    #[arg(long, default_value_t = 128)]
    pub output_tokens: usize,
    /// Tokens that all prompts begin with, in every round: a cache of prefixes has them after the first.
    #[arg(long, default_value_t = 0)]
    pub shared_prefix: usize,
    /// Other seeds give other prompts and another shared beginning, which no cache has seen.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Tokens of the prompt of one more request, sent when all streams run; reported is what it does to their tokens.
    #[arg(long)]
    pub intruder_tokens: Option<usize>,
    /// Rounds per server, another one's first each time; the table shows medians, and ratios of rounds with the same number.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// The process of each server, in the order of the URLs, to watch its memory.
    #[arg(long)]
    pub pid: Vec<u32>,
    /// Write everything there as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Runs the benchmark and prints the table. Fails when a server cannot be reached or every request of a round failed.
pub async fn run(args: &Args, print: Print) -> Result<()> {
    if !args.pid.is_empty() && args.pid.len() != args.url.len() {
        bail!("{} --pid for {} --url: give one for each or none", args.pid.len(), args.url.len());
    }
    if let Some(pid) = args.pid.iter().find(|pid| Sample::of(**pid).is_none()) {
        bail!("--pid {pid}: no such process, or what it holds may not be seen");
    }
    let key = args.keys.first()?;
    let mut servers = Vec::new();
    for (i, url) in args.url.iter().enumerate() {
        let target = Target::parse(url, key.as_deref())?;
        servers.push(greet(target, args.model.as_deref(), args.pid.get(i).copied()).await?);
    }
    // One scale for all: every server gets the same texts.
    let scale = Scale::measure(&servers[0].target, &servers[0].model).await?;
    let recipe = Recipe { scale, shared: args.shared_prefix, seed: args.seed };
    let mut all: Vec<Series> = args.url.iter().zip(&servers).map(|(url, server)| series(url, server)).collect();
    for number in 0..args.rounds as usize {
        // Another server begins each round.
        for turn in 0..servers.len() {
            let index = (number + turn) % servers.len();
            let (server, series) = (&servers[index], &mut all[index]);
            let done = round(server, &load(args, recipe, number)).await;
            eprintln!(
                "round {} {}: {:.1} output tok/s, {} errors",
                number + 1,
                series.url,
                done.output_tokens_per_s,
                done.errors
            );
            if let Some(error) = &done.first_error {
                eprintln!("  first error: {error}");
            }
            if let Some(error) = &done.intruder_error {
                eprintln!("  the intruder: {error}");
            }
            if done.answered == 0 {
                bail!("every request to {} failed", series.url);
            }
            series.rounds.push(done);
        }
    }
    print(format_args!("{}", report::table(&all)));
    if let Some(path) = &args.json {
        write_json(path, &Document { args, servers: &all })?;
    }
    Ok(())
}

#[derive(Serialize)]
struct Document<'a> {
    args: &'a Args,
    servers: &'a [Series],
}

/// Finds out the model's name and the server's dialect; the request this takes is also the warm-up.
async fn greet(target: Target, model: Option<&str>, pid: Option<u32>) -> Result<Server> {
    let model = match model {
        Some(model) => model.to_owned(),
        None => target.first_model().await?,
    };
    let dialect = Dialect::find(&target, &model).await?;
    if !dialect.ignore_eos {
        eprintln!("{} does not take ignore_eos: its answers may be shorter than asked for", target.authority);
    }
    Ok(Server { target, model, dialect, pid })
}

fn series(url: &str, server: &Server) -> Series {
    Series { url: url.into(), model: server.model.clone(), rounds: Vec::new() }
}

fn load(args: &Args, recipe: Recipe, round: usize) -> Load {
    let prompt = |i: u32| recipe.prompt(args.prompt_tokens, round, i as usize);
    // No cache holds any part of an intruder's prompt: it has its own seed and shares no beginning.
    let alien = Recipe { shared: 0, seed: !recipe.seed, ..recipe };
    Load {
        prompts: Arc::new((0..args.requests).map(prompt).collect()),
        concurrency: args.concurrency as usize,
        output_tokens: args.output_tokens,
        intruder: args.intruder_tokens.map(|tokens| alien.prompt(tokens, round, 0)),
    }
}
