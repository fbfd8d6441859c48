//! The cache, a model's files in it, and whether its plan fits.

use std::path::{Path, PathBuf};

use anyhow::Context;
use plimsoll_engine::{Blueprint, EngineHost, EnginePlan, Host, LoadedModel, Options, PlanError};
use plimsoll_formats::{Mmproj, MmprojState};
use plimsoll_hub::{Cache, FileCheck, FileState, HubError, ModelRef, Progress, Quiet, TerminalProgress};
use plimsoll_memory::Bytes;
use plimsoll_server::ServerConfig;

use super::Report;
use super::machine::Holders;
use crate::args::{DoctorArgs, ModelArgs};
use crate::commands::plan::options;
use crate::commands::several::Shop;
use crate::commands::{ready, with_device_chosen};

/// Checks the cache and the models of `names`. Returns the path of each model's files; none if they cannot be used.
pub fn files(names: &[&str], args: &DoctorArgs, report: &mut Report) -> Vec<Option<PathBuf>> {
    let cache = match Cache::default_location() {
        Ok(cache) => cache,
        Err(error) => return without_cache(names, &error, report),
    };
    let cached = cache.list();
    let (path, free) = (cache.root().display(), cache.free_bytes());
    let room = free.map_or_else(String::new, |free| format!(", {} free", Bytes(free)));
    report.ok("cache", format!("{path}: {} models{room}", cached.len()));
    let wanted: Vec<String> =
        names.iter().filter_map(|name| ModelRef::parse(name).ok()).map(|model| model.canonical_name()).collect();
    for other in cached.iter().filter(|other| !wanted.contains(&other.name)) {
        // A name from the cache's own list can be parsed.
        if let (true, Ok(model)) = (args.deep, ModelRef::parse(&other.name)) {
            judge(&other.name, &cache.check(&model, true, progress(args).as_mut()), report);
        } else if !other.verified {
            let found = format!("{} is not as it was when it was verified", other.name);
            report.note("model", found, format!("plimsoll pull {}", other.name));
        }
    }
    names.iter().map(|name| files_of(name, &cache, args, report)).collect()
}

/// The local models among `names`. Only other models need a cache.
fn without_cache(names: &[&str], error: &HubError, report: &mut Report) -> Vec<Option<PathBuf>> {
    let next = "set PLIMSOLL_CACHE to a directory";
    let local = |name: &&str| match ModelRef::parse(name) {
        Ok(ModelRef::GgufFile(path) | ModelRef::Directory(path)) => Some(path),
        _ => None,
    };
    let paths: Vec<_> = names.iter().map(local).collect();
    if paths.iter().all(Option::is_some) {
        report.note("cache", error.to_string(), next);
    } else {
        report.problem("cache", error.to_string(), next);
    }
    paths
}

/// Checks the files of one model, and returns their path if they can be used.
fn files_of(name: &str, cache: &Cache, args: &DoctorArgs, report: &mut Report) -> Option<PathBuf> {
    let model = match ModelRef::parse(name) {
        Ok(model) => model,
        Err(error) => {
            report.problem(
                "model",
                error.to_string(),
                "`plimsoll models` lists the names; a path needs its .gguf or its directory",
            );
            return None;
        }
    };
    // There are no known sums for a local file. The plan below reads its headers.
    if let ModelRef::GgufFile(path) | ModelRef::Directory(path) = model {
        return Some(path);
    }
    let name = model.canonical_name();
    // Reading all files takes time: only with --deep or for named models.
    let read = args.deep || args.names_models();
    let files = cache.check(&model, read, progress(args).as_mut());
    if files.iter().all(|file| file.state == FileState::Missing) {
        missing(&model, args, cache.free_bytes(), report);
        return None;
    }
    if judge(&name, &files, report) { cache.ready(&model) } else { None }
}

fn progress(args: &DoctorArgs) -> Box<dyn Progress> {
    if args.json { Box::new(Quiet) } else { Box::new(TerminalProgress::new()) }
}

/// Reports a model that is not in the cache.
fn missing(model: &ModelRef, args: &DoctorArgs, free: Option<u64>, report: &mut Report) {
    let name = model.canonical_name();
    let bytes = if let ModelRef::Catalogue(entry) = model { Some(entry.bytes) } else { None };
    let found = format!("{name} is not in the cache");
    match (bytes, free) {
        (Some(bytes), Some(free)) if free < bytes => report.problem(
            "model",
            format!("{found}, and its {} do not fit there", Bytes(bytes)),
            "make room, `plimsoll rm` a model, or set PLIMSOLL_CACHE to a larger disk",
        ),
        // A problem for a model that the command line names; else `serve` fetches it.
        _ if args.names_models() => report.problem("model", found, format!("plimsoll pull {name}")),
        _ => report.note("model", found, format!("plimsoll pull {name}; `serve` does it, too")),
    }
}

/// Reports missing, changed and damaged files. Returns whether there are none.
fn judge(name: &str, files: &[FileCheck], report: &mut Report) -> bool {
    let mut good = true;
    let mut read = 0;
    for file in files {
        let path = file.path.display();
        match &file.state {
            FileState::Intact => read += 1,
            FileState::AsVerified => {}
            FileState::Changed => {
                let found = format!("{path} is not as it was when it was verified");
                report.note(
                    "model",
                    found,
                    format!("plimsoll pull {name}: it reads the file and fetches it if it is wrong"),
                );
                good = false;
            }
            FileState::Missing => {
                report.problem("model", format!("{path} is missing"), format!("plimsoll pull {name}"));
                good = false;
            }
            FileState::Damaged(why) => {
                let again = format!("plimsoll rm {name}; plimsoll pull {name}");
                report.problem("model", format!("{path}: {why}"), again);
                good = false;
            }
        }
    }
    if good {
        let bytes = Bytes(files.iter().map(|file| file.bytes).sum());
        let how = if read == files.len() {
            "read, and every sum is right"
        } else {
            "as they were when they were verified (--deep reads them)"
        };
        report.ok("model", format!("{name}: {} files, {bytes}: {how}", files.len()));
    }
    good
}

/// Opens the model's files once, as `serve` does, because a tokenizer's first opening takes more of the heap than a second one.
/// A lone configuration is a problem here: it can be planned, but not served.
fn opened(path: &Path, mmproj: &Mmproj, report: &mut Report) -> Option<LoadedModel> {
    let refused = |error| {
        let found = format!("{}: {error}", path.display());
        report.problem("model", found, "all files of a checkpoint, its tokenizer's among them");
    };
    let model = LoadedModel::open_with(path, mmproj).map_err(refused).ok()?;
    match model.checkpoint.mmproj() {
        MmprojState::LeftOut { path, why } => {
            let found = format!("the model takes text only: {}: {why}", path.display());
            report.note("model", found, "--mmproj FILE names another file, --no-mmproj leaves this one out");
        }
        MmprojState::Loaded { path, .. } => report.ok("model", format!("encoders: {}", path.display())),
        MmprojState::None => {}
    }
    if let Err(error) = &model.defaults.sampling {
        report.note("model", error.to_string(), "correct that file, or serve without what it recommends");
    }
    Some(model)
}

/// The plan that `serve` would make with these flags.
pub fn plan(path: &Path, args: &DoctorArgs, host: &Host, others: &Holders, report: &mut Report) {
    let Some(model) = opened(path, &args.engine.media.mmproj(), report) else { return };
    let planned = options(&args.engine, &args.http, model.text_bytes).and_then(|options| {
        let model = drafted(model, &options)?;
        let options = with_device_chosen(&model.checkpoint, &options)?;
        // Read while the model's file is mapped, as in `serve`: a limit of address space counts the mapping.
        let host = Host::read_from(host.root.clone(), &options)?;
        Ok((Blueprint::new(&model.checkpoint, &options)?.plan(&options, host.threads, &host.limit)?, host))
    });
    let planned = planned.map_err(|error| error.context(path.display().to_string()));
    judge_plan(&Subject { name: String::new(), beside: 0 }, planned, others, report);
}

/// Adds the draft model that the options name. A draft model that is not in the cache is an error.
fn drafted(model: LoadedModel, options: &Options) -> anyhow::Result<LoadedModel> {
    let Some(draft) = &options.draft_model else { return Ok(model) };
    let path = ready(&ModelRef::parse(draft)?)?;
    let path =
        path.with_context(|| format!("--draft-model: '{draft}' is not in the cache: `plimsoll pull {draft}`"))?;
    Ok(model.with_draft(&path)?)
}

/// The plans that `serve --models` would make: the shared part, and each model while it is loaded.
pub fn plans(
    models: Vec<(String, ModelArgs)>,
    paths: &[Option<PathBuf>],
    args: &DoctorArgs,
    http: &ServerConfig,
    others: &Holders,
    report: &mut Report,
) -> anyhow::Result<()> {
    let names: Vec<_> =
        models.iter().map(|(name, model)| (format!("`{name}`: "), model.engine.media.mmproj())).collect();
    let shop = Shop::of(models, &args.engine, http)?;
    let engine_host = shop.engine_host(http);
    let (shared, line) = (engine_host.total(), engine_host.limit);
    let found = format!("what all models share takes {} of {}", Bytes(shared), Bytes(line));
    if engine_host.shortfall() > 0 {
        report.problem("plan", found, "a larger --memory-budget, or less for the HTTP side");
        return Ok(());
    }
    report.ok("plan", found);
    let all = EngineHost::limit_in(&engine_host);
    for (index, ((name, mmproj), path)) in names.into_iter().zip(paths).enumerate() {
        if let Some(model) = path.as_ref().and_then(|path| opened(path, &mmproj, report)) {
            let planned = shop.plan(index, &model.checkpoint, &all).map_err(anyhow::Error::from);
            judge_plan(&Subject { name, beside: shared }, planned, others, report);
        }
    }
    Ok(())
}

/// The model under test: its name, and the bytes planned beside it in the same process.
struct Subject {
    name: String,
    beside: u64,
}

fn judge_plan(of: &Subject, planned: anyhow::Result<(EnginePlan, Host)>, others: &Holders, report: &mut Report) {
    let name = &of.name;
    match planned {
        Ok((planned, host)) => {
            for idle in &planned.idle_flags {
                report.note("plan", format!("{name}{idle}"), "for this model it can be left out");
            }
            fits(of, &planned, &host, others, report);
        }
        Err(error) => match error.downcast_ref::<PlanError>() {
            Some(PlanError::DoesNotFit(short)) => {
                let found = format!(
                    "{name}it does not fit: {} are needed for one request of {} tokens, the memory limit is {} ({})",
                    Bytes(short.needed),
                    short.tokens,
                    Bytes(short.limit),
                    short.limit_source
                );
                let flags: String = short.advice.iter().map(|advice| format!("{advice}, ")).collect();
                let more = short.raised();
                report.problem("plan", found, format!("{flags}{more}"));
            }
            _ => report.problem("plan", format!("{name}{error:#}"), "another model, or other flags"),
        },
    }
}

/// Reports a plan within the memory limit. It is a problem if the planned bytes of other servers leave too little memory.
fn fits(of: &Subject, planned: &EnginePlan, host: &Host, others: &Holders, report: &mut Report) {
    let (name, own) = (&of.name, planned.plan.total());
    let total = of.beside + own;
    #[cfg(unix)]
    {
        use plimsoll_memory::host::{HostNow, lease};
        let rooms = HostNow::read(&host.root, &host.limits).rooms;
        if let Err(refusal) = lease::decide(&rooms, others, total, total) {
            let next = format!("end one of them, or --memory-budget {}", refusal.free);
            return report.problem("plan", format!("{name}{refusal}"), next);
        }
    }
    #[cfg(not(unix))]
    let _ = (others, total);
    let limits = planned.limits;
    let found = match limits.encoder {
        true => format!("{name}{} of {}: an encoder", Bytes(own), Bytes(host.limit.bytes)),
        false => format!(
            "{name}{} of {}: {} tokens in the pool, {} of one request at most",
            Bytes(own),
            Bytes(host.limit.bytes),
            limits.max_total_token_num,
            limits.max_req_total_len
        ),
    };
    report.ok("plan", found);
}
