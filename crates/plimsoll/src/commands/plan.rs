//! `plan`: what serving would take, from headers and configuration alone. The same code as start-up (I8).

use std::path::{Path, PathBuf};

use plimsoll_device::{Isa, Work};
use plimsoll_engine::media::MediaPlan;
use plimsoll_engine::planner::INPUT_TOKENS;
use plimsoll_engine::whatif::{Answer, Load, what_if};
use plimsoll_engine::{Blueprint, CheckpointDefaults, EnginePlan, Host, Line, LoadedModel, Options, dry_run};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Bytes;
use serde_json::{Value, json};

use super::serving::settled;
use crate::args::{EngineArgs, HttpArgs, PlanArgs};
use crate::output::say;

/// A model's headers, and the options of an engine for it.
pub fn open(model: &str, engine: &EngineArgs, http: &HttpArgs) -> anyhow::Result<(PathBuf, Checkpoint, Options)> {
    let local = Path::new(model);
    let path = if local.exists() { local.to_path_buf() } else { super::resolve(model)? };
    let checkpoint = Checkpoint::open(&path)?;
    // Where there is a tokenizer its size is measured, as `serve` does; a lone configuration is planned by formula.
    let tokenizer_bytes = LoadedModel::open(&path).ok().and_then(|model| model.text_bytes);
    Ok((path, checkpoint, options(engine, http, tokenizer_bytes)?))
}

/// The options of an engine with a tokenizer of this size.
pub fn options(engine: &EngineArgs, http: &HttpArgs, tokenizer_bytes: Option<u64>) -> anyhow::Result<Options> {
    Ok(Options { tokenizer_bytes, ..engine.options_beside(&http.config()?) })
}

/// Prints the plan.
pub fn run(args: PlanArgs) -> anyhow::Result<()> {
    if let Some(file) = &args.models {
        return super::several::plan(file, &args);
    }
    let (path, checkpoint, options) = open(&args.model, &args.engine, &args.http)?;
    let host = Host::read(&options)?;
    if args.users.is_some() || args.context.is_some() || args.images.is_some() || args.audio_seconds.is_some() {
        return print_answer(&answer(&args, &checkpoint, &options, host)?, args.json);
    }
    if args.probe {
        let run = dry_run(&checkpoint, &options, &host, |_| {})?;
        match args.json {
            true => say!("{}", serde_json::to_string_pretty(&run)?),
            false => say!("{}: {} threads, {:?}\n{run}", path.display(), host.threads, host.isa),
        }
        return Ok(());
    }
    // Whatever a pod's node has: no other instruction set takes as much.
    let options = Options { isa: options.isa.or(args.k8s.k8s.then_some(Isa::Amx)), ..options };
    let planned = Blueprint::new(&checkpoint, &options)?.plan(&options, host.threads, &host.line)?;
    if args.k8s.k8s {
        // Pods refuse what `serve` does.
        let defaults = CheckpointDefaults::read(&checkpoint)?;
        settled(defaults, checkpoint.config.encoder, &args.k8s.reading)?;
        say!("{}", super::k8s::Manifest { args: &args, path: &path, planned: &planned, threads: host.threads });
    } else if args.json {
        say!("{}", serde_json::to_string_pretty(&document(&planned))?);
    } else {
        say!("{}: {} threads, {:?}", path.display(), host.threads, host.isa);
        print_plan(&planned);
    }
    Ok(())
}

/// Whether the load that was asked for fits.
fn answer(args: &PlanArgs, checkpoint: &Checkpoint, options: &Options, host: Host) -> anyhow::Result<Answer> {
    let longest = checkpoint.config.max_context as u64;
    let context = args.context.unwrap_or(longest.min(4096));
    let (images, audio_seconds) = (args.images.unwrap_or(0), args.audio_seconds.unwrap_or(0));
    let load = Load { users: args.users.unwrap_or(1), context, images, audio_seconds };
    // A budget that is named is the line, also when it is that of a larger machine than this one.
    let line = match options.memory_budget {
        Some(budget) => Line::of_budget(budget.bytes(host.line.bytes), "--memory-budget"),
        None => host.line,
    };
    Ok(what_if(checkpoint, options, host.threads, &line, load)?)
}

/// The plan as JSON.
fn document(planned: &EnginePlan) -> Value {
    let work = |w: Work| json!({"flops": w.flops, "weight_bytes": w.weight_bytes, "kv_bytes": w.kv_bytes, "state_bytes": w.state_bytes});
    let [prefill, decode] = planned.work;
    json!({
        "plan": planned.plan,
        "total": planned.plan.total(),
        "limits": planned.limits,
        "kv_bytes_per_token": planned.kv.token_bytes(),
        "state_slots": planned.slots,
        "idle_flags": planned.idle_flags,
        "work": {
            "largest_prefill_step": work(prefill),
            // An encoder decodes nothing; it has an input of 128 tokens, or of as many as it takes.
            (if planned.limits.encoder { "one_input" } else { "one_decode_row_at_position_127" }): work(decode),
            "checking_its_drafts": planned.draft_work.map(|[checking, _]| work(checking)),
            "drafting": planned.draft_work.map(|[_, drafting]| work(drafting)),
        },
    })
}

/// The plan for people: components, flags that change nothing, limits, work.
fn print_plan(planned: &EnginePlan) {
    say!("{}", planned.plan);
    for idle in &planned.idle_flags {
        say!("  {idle}");
    }
    let limits = &planned.limits;
    let (longest, at_once, waiting) = (limits.max_req_total_len, limits.running_max_req_size, limits.max_waiting);
    let [_, decode] = planned.work;
    let (bytes, gflop) = (Bytes(decode.weight_bytes), gflop(decode));
    if limits.encoder {
        let tokens = INPUT_TOKENS.min(longest as usize);
        say!("  inputs of {longest} tokens at most, each computed whole, {at_once} at once, {waiting} waiting");
        say!("  an input of {tokens} tokens reads {bytes} of weights and takes {gflop:.2} GFLOP");
        return;
    }
    let pool = limits.max_total_token_num;
    say!("  {pool} tokens in the pool, {longest} per request at most, {at_once} requests at once, {waiting} waiting");
    if let Some(media) = &planned.media {
        print_media(media);
    }
    say!("  a decoded token reads {bytes} of weights and takes {gflop:.2} GFLOP");
    if let Some(work) = planned.draft_work {
        print_drafts(planned, work);
    }
}

fn print_media(media: &MediaPlan) {
    let (tokens, work) = media.largest();
    let (gflop, pictures) = (gflop(work), media.image_tokens());
    say!("  media of {tokens} tokens and {gflop:.2} GFLOP at most; images of {pictures} tokens");
    let seconds = media.audio_seconds();
    if seconds > 0 {
        say!("  audio of {seconds} s at most, {} tokens", media.sound(seconds).0);
    }
}

fn print_drafts(planned: &EnginePlan, [checking, drafting]: [Work; 2]) {
    let passes = match planned.step.draft_head {
        true => format!(", drafting them {} and {:.2} GFLOP", Bytes(drafting.weight_bytes), gflop(drafting)),
        false => String::new(),
    };
    let (drafts, cost) = (planned.step.drafts, planned.speculation.cost);
    let (bytes, gflop) = (Bytes(checking.weight_bytes), gflop(checking));
    say!("  checking {drafts} drafts reads {bytes} and takes {gflop:.2} GFLOP{passes}: {cost:.2} plain steps in all");
}

fn gflop(work: Work) -> f64 {
    work.flops as f64 / 1e9
}

/// Does it fit, how much would, and what would help.
fn print_answer(answer: &Answer, json: bool) -> anyhow::Result<()> {
    if json {
        say!("{}", serde_json::to_string_pretty(answer)?);
        return Ok(());
    }
    let Load { users, context, images, audio_seconds } = answer.load;
    let context_words = match (images, audio_seconds) {
        (0, 0) => format!("{context} tokens"),
        (images, 0) => format!("{context} tokens, {images} images among them,"),
        (0, seconds) => format!("{context} tokens, {seconds} s of audio among them,"),
        (images, seconds) => format!("{context} tokens, {images} images and {seconds} s of audio among them,"),
    };
    let verdict = if answer.fits { "fit" } else { "do not fit" };
    say!("{users} users x {context_words} {verdict}: {} of {}", Bytes(answer.needed_bytes), Bytes(answer.limit_bytes));
    say!("  at {context} tokens each: {} users at most", answer.users_max);
    say!("  with {users} users: {} tokens each at most", answer.context_max);
    for knob in &answer.knobs {
        let saved = Bytes(answer.needed_bytes - knob.needed_bytes);
        say!("  {} {} saves {saved}: {} users of {context} tokens", knob.flag, knob.value, knob.users_max);
    }
    Ok(())
}
