//! `plimsoll replay`: a trace against a server, at its own pace or faster; or against the scheduler and the memory of a plan, without
//! a model (`--simulate`).

pub(crate) mod drive;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use plimsoll_engine::EnginePlan;
use plimsoll_engine::simulate::{Rates, Simulated, simulate};
use plimsoll_engine::trace::{Trace, burst_gpt, mooncake};
use serde::Serialize;

use crate::client::{Target, client_runtime};
use crate::output::{Print, write_json};
use drive::{Models, Pace};

pub use drive::Replayed;

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// As the first line shows.
    Auto,
    /// As `serve --record` writes it.
    Plimsoll,
    /// JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`.
    Mooncake,
    /// CSV with `Timestamp`, `Request tokens`, `Response tokens`.
    Burstgpt,
}

/// Flags of `replay`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace.
    pub trace: PathBuf,
    /// How it is written.
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    pub format: Format,
    /// The server that gets it, as http://host:port.
    #[arg(long, required_unless_present = "simulate", conflicts_with = "simulate")]
    pub url: Option<String>,
    /// The model to ask for [default: the recorded one where the trace names one, else the server's first], or with --simulate to plan for.
    #[arg(long)]
    pub model: Option<String>,
    /// Only the first requests.
    #[arg(long)]
    pub limit: Option<usize>,
    /// How much faster than it was recorded; 0: as fast as --max-in-flight allows.
    #[arg(long, default_value_t = 1.0, value_parser = speed)]
    pub speed: f64,
    /// Requests at once; further requests wait here and are counted as late.
    #[arg(long, default_value_t = 256)]
    pub max_in_flight: usize,
    /// Token ids below this make up prompts that were recorded without content.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..))]
    pub vocab: u32,
    /// Run the scheduler and the memory of a plan instead of a server. The same trace and flags give the same schedule on every machine.
    #[arg(long)]
    pub simulate: bool,
    /// With --simulate: gigabytes that the imagined machine reads in a second.
    #[arg(long, default_value_t = 20.0, value_parser = rate)]
    pub gigabytes_per_second: f64,
    /// With --simulate: thousand million multiplications and additions in a second.
    #[arg(long, alias = "gigaflops", default_value_t = 400.0, value_parser = rate)]
    pub gigaflops: f64,
    /// Write everything there as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// The slowest replay: a day of trace takes three years.
const SPEED_MIN: f64 = 0.001;

fn speed(text: &str) -> Result<f64, String> {
    match number(text)? {
        speed if speed == 0.0 || speed >= SPEED_MIN => Ok(speed),
        speed => Err(format!("{speed} is neither 0 nor {SPEED_MIN} or more")),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match number(text)? {
        rate if (1e-3..=1e9).contains(&rate) => Ok(rate),
        rate => Err(format!("{rate} is not between 0.001 and 1000000000")),
    }
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| format!("'{text}' is not a number"))
}

/// Reads the trace that the flags name. A torn last line is left out, and the output says so.
///
/// # Errors
/// When the trace cannot be read or holds no requests.
pub fn open(args: &Args, print: Print) -> Result<Trace> {
    let mut trace = read(&args.trace, args.format).with_context(|| args.trace.display().to_string())?;
    if let Some(line) = trace.torn {
        print(format_args!(
            "line {line}, the last of the trace, is incomplete and left out: the recording was interrupted. {} requests are whole",
            trace.lines.len()
        ));
    }
    trace.lines.truncate(args.limit.unwrap_or(usize::MAX));
    if trace.lines.is_empty() {
        bail!("{}: no requests", args.trace.display());
    }
    Ok(trace)
}

/// Reads a trace.
///
/// # Errors
/// When it is not written as it should be.
pub fn read(path: &Path, format: Format) -> Result<Trace> {
    let mut file = BufReader::new(File::open(path)?);
    let format = match format {
        Format::Auto => match file.fill_buf()? {
            [] => bail!("no requests: the file is empty"),
            text if has(text, "\"plimsoll_trace\"") => Format::Plimsoll,
            text if has(text, "\"input_length\"") => Format::Mooncake,
            text if has(text, "Request tokens") => Format::Burstgpt,
            _ => bail!(
                "its beginning is of no format that is read here: traces of `serve --record` begin with \"plimsoll_trace\", Mooncake's lines have \"input_length\", BurstGPT's CSV has a column \"Request tokens\" (--format says which one it is)"
            ),
        },
        named => named,
    };
    Ok(match format {
        Format::Mooncake => mooncake(file)?,
        Format::Burstgpt => burst_gpt(file)?,
        Format::Auto | Format::Plimsoll => Trace::read(file)?,
    })
}

/// Whether these words stand in the beginning of a file.
fn has(text: &[u8], words: &str) -> bool {
    let head = &text[..text.len().min(4 << 10)];
    head.windows(words.len()).any(|window| window.eq_ignore_ascii_case(words.as_bytes()))
}

#[derive(Serialize)]
struct Document<'a, R> {
    trace: String,
    model: &'a str,
    requests: usize,
    result: &'a R,
}

fn report<R: Serialize>(args: &Args, model: &str, requests: usize, result: &R) -> Result<()> {
    let trace = args.trace.display().to_string();
    args.json.as_ref().map_or(Ok(()), |path| write_json(path, &Document { trace, model, requests, result }))
}

/// Replays a trace against the server at `url`, prints and writes the result.
///
/// # Errors
/// When the server cannot be reached, or a request failed in a way that no server announces.
pub fn against_server(args: &Args, url: &str, key: Option<&str>, trace: Trace, print: Print) -> Result<()> {
    let requests = trace.lines.len();
    let (model, replayed) = client_runtime()?.block_on(async {
        let target = Target::parse(url, key)?;
        let models = Models {
            named: args.model.clone(),
            first: if args.model.is_some() { String::new() } else { target.first_model().await? },
        };
        let pace = Pace { speed: args.speed, max_in_flight: args.max_in_flight.max(1), vocab: args.vocab };
        let replayed = drive::replay(&target, &models, Arc::new(trace), pace).await;
        anyhow::Ok((models.named.unwrap_or(models.first), replayed))
    })?;
    print_replayed(&replayed, print);
    report(args, &model, requests, &replayed)?;
    match &replayed.first_error {
        Some(error) => bail!("{} requests failed; the first: {error}", replayed.failed),
        None => Ok(()),
    }
}

fn print_replayed(replayed: &Replayed, print: Print) {
    print(format_args!(
        "{} answered, {} left as their clients did, {} refused for now (429, 503), {} refused (4xx), {} failed, {} could not be replayed",
        replayed.answered, replayed.left, replayed.refused_for_now, replayed.refused, replayed.failed, replayed.skipped
    ));
    print(format_args!(
        "{:.1} s, {} prompt and {} output tokens ({:.1} output tok/s); {} sent late, by {:.2} s at most",
        replayed.seconds,
        replayed.prompt_tokens,
        replayed.output_tokens,
        replayed.output_tokens as f64 / replayed.seconds,
        replayed.late,
        replayed.late_by_max
    ));
    let [first, recorded] = [&replayed.first_token, &replayed.recorded_first_token];
    print(format_args!("first token: p50 {:.3} s, p99 {:.3} s, max {:.3} s", first.p50, first.p99, first.max));
    if recorded.max > 0.0 {
        print(format_args!(
            "when recorded: p50 {:.3} s, p99 {:.3} s, max {:.3} s",
            recorded.p50, recorded.p99, recorded.max
        ));
    }
}

/// Simulates a trace on a planned engine for `model`, prints and writes the result.
///
/// # Errors
/// When the simulation fails, or the scheduler loses pages.
pub fn in_a_plan(args: &Args, model: &str, planned: &EnginePlan, trace: &Trace, print: Print) -> Result<()> {
    let rates = Rates { bytes: args.gigabytes_per_second * 1e9, flops: args.gigaflops * 1e9 };
    let simulated = simulate(planned, trace, rates)?;
    print_simulated(&simulated, print);
    report(args, model, trace.lines.len(), &simulated)?;
    match simulated.lost {
        0 => Ok(()),
        lost => bail!("{lost} pages or state slots were not given back: a leak in the scheduler"),
    }
}

fn print_simulated(out: &Simulated, print: Print) {
    print(format_args!(
        "{} sequences: {} finished, {} left, {} refused as too large (400), {} refused for now (429); {} preemptions",
        out.sequences, out.finished, out.left, out.refused_invalid, out.refused_full, out.preempted
    ));
    print(format_args!(
        "{:.1} s of the imagined machine in {} steps; {} prompt tokens, {} of them from the prefix cache; {} output tokens ({:.1} tok/s)",
        out.seconds,
        out.steps,
        out.prompt_tokens,
        out.cached_tokens,
        out.output_tokens,
        out.output_tokens as f64 / out.seconds
    ));
    print(format_args!(
        "pages: at most {} of {} held by sequences; at most {} ran and {} waited; requests reserved at most {} bytes",
        out.pages_peak, out.pages, out.running_peak, out.waiting_peak, out.host_bytes_peak
    ));
    let [first, between] = [&out.first_token, &out.between_tokens];
    print(format_args!("first token: p50 {:.3} s, p99 {:.3} s, max {:.3} s", first.p50, first.p99, first.max));
    print(format_args!("between tokens: p50 {:.4} s, p99 {:.4} s, max {:.4} s", between.p50, between.p99, between.max));
    print(format_args!("schedule {}", out.digest));
}
