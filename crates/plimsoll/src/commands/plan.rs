//! `plan`: the memory that serving would take, from headers and configuration alone. The same code plans start-up (I8).

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use plimsoll_device::{Isa, KvGroup, Work};
use plimsoll_engine::media::MediaPlan;
use plimsoll_engine::planner::INPUT_TOKENS;
use plimsoll_engine::whatif::{Answer, Load, what_if};
use plimsoll_engine::{
    Blueprint, CheckpointDefaults, EnginePlan, Host, LoadedModel, MemoryLimit, Options, PlanError, dry_run,
};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Bytes;
use serde_json::{Value, json};

use super::serving::pooling_and_sampling;
use crate::args::{EngineArgs, HttpArgs, PlanArgs};
use crate::output::{say, tell};

/// A model's headers, and the options of an engine for it.
pub fn open(model: &str, engine: &EngineArgs, http: &HttpArgs) -> anyhow::Result<(PathBuf, Checkpoint, Options)> {
    let path = files_of(model)?;
    let mmproj = engine.media.mmproj();
    let checkpoint = Checkpoint::open_with(&path, &mmproj)?;
    super::tell_encoder(&checkpoint);
    // Where there is a tokenizer its size is measured, as `serve` does; a lone configuration is planned by formula.
    let loaded = LoadedModel::open_with(&path, &mmproj).ok();
    let options = options(engine, http, loaded.as_ref().and_then(|model| model.text_bytes))?;
    let checkpoint = match (&options.draft_model, loaded) {
        (None, _) => checkpoint,
        (Some(_), Some(loaded)) => super::with_draft(loaded, &options)?.checkpoint,
        (Some(draft), None) => checkpoint.with_draft(Checkpoint::open(&files_of(draft)?)?)?,
    };
    let options = super::with_device_chosen(&checkpoint, &options)?;
    Ok((path, checkpoint, options))
}

/// A model's files, which may be a lone configuration.
fn files_of(model: &str) -> anyhow::Result<PathBuf> {
    let local = Path::new(model);
    if local.exists() { Ok(local.to_path_buf()) } else { super::resolve(model) }
}

/// The options of an engine with a tokenizer of this size.
pub fn options(engine: &EngineArgs, http: &HttpArgs, tokenizer_bytes: Option<u64>) -> anyhow::Result<Options> {
    Ok(Options { tokenizer_bytes, ..engine.options_beside(&http.config()?) })
}

/// The exit code of `plan` when the model or the load does not fit.
const DOES_NOT_FIT: u8 = 2;

/// Prints the plan. The exit code is 2 where something does not fit, so that scripts can tell it from a mistake.
pub fn run(args: PlanArgs) -> anyhow::Result<ExitCode> {
    match print(args) {
        Ok(true) => Ok(ExitCode::SUCCESS),
        Ok(false) => Ok(ExitCode::from(DOES_NOT_FIT)),
        Err(error) => match error.downcast_ref() {
            Some(PlanError::DoesNotFit(short)) => {
                tell!("{}", short.details());
                crate::log::last_words(&format!("{error:#}"));
                Ok(ExitCode::from(DOES_NOT_FIT))
            }
            _ => Err(error),
        },
    }
}

/// Prints the plan. Returns whether the model or the load fits.
fn print(args: PlanArgs) -> anyhow::Result<bool> {
    if let Some(file) = &args.models {
        return super::several::plan(file, &args);
    }
    let (path, checkpoint, options) = open(&args.model, &args.engine, &args.http)?;
    let host = Host::read(&options)?;
    if args.users.is_some() || args.context.is_some() || args.images.is_some() || args.audio_seconds.is_some() {
        let answer = answer(&args, &checkpoint, &options, host)?;
        print_answer(&answer, args.json)?;
        return Ok(answer.fits);
    }
    if args.probe {
        let run = dry_run(&checkpoint, &options, &host, |_| {})?;
        match args.json {
            true => say!("{}", serde_json::to_string_pretty(&run)?),
            false => say!("{}: {} threads, {:?}\n{run}", path.display(), host.threads, host.isa),
        }
        return Ok(true);
    }
    // The instruction set of the pod's node is unknown. AMX takes the most memory, so the plan assumes it.
    let options = Options { isa: options.isa.or(args.k8s.k8s.then_some(Isa::Amx)), ..options };
    let planned = Blueprint::new(&checkpoint, &options)?.plan(&options, host.threads, &host.limit)?;
    if args.k8s.k8s {
        // Pods refuse what `serve` does.
        let defaults = CheckpointDefaults::read(&checkpoint)?;
        pooling_and_sampling(defaults, Some(&checkpoint.config), &args.k8s.reading)?;
        say!("{}", super::k8s::Manifest { args: &args, path: &path, planned: &planned, threads: host.threads });
    } else if args.json {
        say!("{}", serde_json::to_string_pretty(&document(&planned))?);
    } else {
        say!("{}: {} threads, {:?}", path.display(), host.threads, host.isa);
        print_plan(&planned);
    }
    Ok(true)
}

/// Computes whether the load of `--users`, `--context`, `--images` and `--audio-seconds` fits.
fn answer(args: &PlanArgs, checkpoint: &Checkpoint, options: &Options, host: Host) -> anyhow::Result<Answer> {
    let longest = checkpoint.config.max_context as u64;
    let context = args.context.unwrap_or(longest.min(4096));
    let (images, audio_seconds) = (args.images.unwrap_or(0), args.audio_seconds.unwrap_or(0));
    let load = Load { users: args.users.unwrap_or(1), context, images, audio_seconds };
    // An explicit budget is the limit, even if it is larger than this machine's.
    let limit = match options.memory_budget {
        Some(budget) => {
            let limit = MemoryLimit::of_budget(budget.bytes(host.limit.bytes), "--memory-budget");
            MemoryLimit { gpu: host.limit.gpu, ..limit }
        }
        None => host.limit,
    };
    Ok(what_if(checkpoint, options, host.threads, &limit, load)?)
}

/// The plan as JSON.
fn document(planned: &EnginePlan) -> Value {
    let work = |w: Work| json!({"flops": w.flops, "weight_bytes": w.weight_bytes, "kv_bytes": w.kv_bytes, "state_bytes": w.state_bytes});
    let [prefill, decode] = planned.work;
    json!({
        "plan": planned.plan,
        "total": planned.plan.total(),
        "device_total": planned.plan.device.as_ref().map(|_| planned.plan.device_total()),
        "limits": planned.limits,
        "kv_bytes_per_token": planned.kv.token_bytes(),
        "kv_window": planned.kv.window().map(|tokens| json!({
            "tokens": tokens,
            "pages": planned.slots,
            "page_bytes": planned.kv.page_bytes(KvGroup::Window),
        })),
        "state_slots": if planned.kv.window().is_some() { 0 } else { planned.slots },
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
    let (gflop, images) = (gflop(work), media.image_tokens());
    say!("  media of {tokens} tokens and {gflop:.2} GFLOP at most; images of {images} tokens");
    let seconds = media.audio_seconds();
    if seconds > 0 {
        say!("  audio of {seconds} s at most, {} tokens", media.audio(seconds).0);
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

/// Prints whether the load fits, how much would, and which changes would help.
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
    let plural = |one: bool| if one { "" } else { "s" };
    let (ones, most) = (plural(users == 1), plural(answer.users_max == 1));
    let here = format!("{} of {}", Bytes(answer.needed_bytes), Bytes(answer.limit_bytes));
    let needed = match &answer.device {
        Some(gpu) => {
            let there = format!("{} of {}", Bytes(gpu.needed_bytes), Bytes(gpu.limit_bytes));
            format!("{there} on the GPU, {here} of the machine's memory")
        }
        None => here,
    };
    say!("{users} user{ones} x {context_words} {verdict}: {needed}");
    say!("  at {context} tokens each: {} user{most} at most", answer.users_max);
    say!("  with {users} user{ones}: {} tokens each at most", answer.context_max);
    for knob in &answer.knobs {
        // On a GPU with its own memory, a flag may save memory on the GPU, in the host, or both.
        let all = |device: Option<u64>, here: u64| device.unwrap_or(0).saturating_add(here);
        let needed = all(answer.device.map(|gpu| gpu.needed_bytes), answer.needed_bytes);
        let saved = Bytes(needed.saturating_sub(all(knob.device_needed_bytes, knob.needed_bytes)));
        say!("  {} {} saves {saved}: {} users of {context} tokens", knob.flag, knob.value, knob.users_max);
    }
    Ok(())
}
