//! `serve --models`: one memory limit and one engine host. Engines are loaded and unloaded as requests need them. `plan --models`:
//! the memory that they need.

mod disk;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use plimsoll_engine::startup::StartError;
use plimsoll_engine::{
    Blueprint, Cancel, CheckpointDefaults, DiskCache, EngineHandle, EngineHost, EnginePlan, Host, LedgerReport,
    LoadedModel, MemoryLimit, Options, PlanError, start_unless, with_weights,
};
use plimsoll_formats::Checkpoint;
use plimsoll_hub::{ModelRef, Progress, TerminalProgress};
use plimsoll_memory::{Bytes, Plan, heap};
use plimsoll_server::{Listed, LoadError, Loader, Served, ServerConfig, serve_models};
use serde_json::{Value, json};

use self::disk::SharedDirectory;
use super::serving::{pooling_and_sampling, say_ready, served};
use super::signals::told;
use crate::args::{EngineArgs, ModelArgs, PlanArgs, ServeArgs};
use crate::models_file;
use crate::output::say;
use crate::runtime::{end, http_runtime};

/// An engine without running requests is unloaded within this time.
const UNLOAD_WITHIN: Duration = Duration::from_secs(30);

/// Runs the server.
pub fn run(file: &Path, args: &ServeArgs, config: ServerConfig, began: Instant) -> anyhow::Result<()> {
    let models = models_file::read(file, &args.inherited)?;
    let listed = models.iter().map(listed).collect();
    let loader = Loading::open(models, args, &config)?;
    loader.shop.foresee(file, &EngineHost::limit_in(loader.engine_host.plan()))?;
    let engine_host = Arc::clone(&loader.engine_host);
    let (planned, limit) = (loader.engine_host.plan().total(), loader.engine_host.plan().limit);
    let names = loader.shop.models.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    let runtime = http_runtime(&config)?;
    let ended = runtime.block_on(async {
        let listener = plimsoll_server::bind(&config).await?;
        // As for one model: the reader of "ready" may send a signal at once.
        let told = told().context("listening for signals")?;
        let address = listener.local_addr().context("the listening address")?;
        tracing::info!("what all models share:\n{}", loader.engine_host.plan());
        say_ready(began, &names, address, planned, limit);
        serve_models(listener, listed, Arc::new(loader), config, told).await.context("serving")
    });
    end(runtime);
    // Cache entries that the engines have not written to disk by then are lost with the process.
    if !engine_host.close(UNLOAD_WITHIN) {
        tracing::warn!("the models were not unloaded within {} s", UNLOAD_WITHIN.as_secs());
    }
    ended
}

fn listed((name, model): &(String, ModelArgs)) -> Listed {
    let others = model.served_model_name.iter().filter(|other| *other != name).cloned();
    Listed {
        names: std::iter::once(name.clone()).chain(others).collect(),
        idle_after: model.idle_seconds.map(Duration::from_secs),
        grammar_bytes: model.grammar_bytes,
    }
}

/// A model of several, and its plan or why it has none.
type Planned<'a> = (&'a str, Result<EnginePlan, LoadError>);

/// Prints the plan of the engine host and of each model, for `plan --models`. Returns whether at least one model fits.
pub fn plan(file: &Path, args: &PlanArgs) -> anyhow::Result<bool> {
    let config = args.http.config()?;
    let models = models_file::read(file, &args.inherited)?;
    let shop = Shop::of(models, &args.engine, &config)?;
    let engine_host = shop.engine_host(&config);
    let all = EngineHost::limit_in(&engine_host);
    let nobody = Cancel::default();
    let plan = |index: usize| (shop.models[index].0.as_str(), shop.needs(index, &all, &nobody));
    let plans: Vec<Planned> = (0..shop.models.len()).map(plan).collect();
    match args.json {
        true => say!("{}", serde_json::to_string_pretty(&document(&engine_host, &plans))?),
        false => print_plans(&engine_host, &plans),
    }
    // A model that is too large is no error, as in `serve`: the others are served.
    let broken = |result: &Result<EnginePlan, LoadError>| matches!(result, Err(error) if !matches!(error, LoadError::TooLarge(_)));
    let broken = names(plans.iter().filter(|(_, result)| broken(result)));
    ensure!(broken.is_empty(), "{}: no plan for {broken}, and why is said above", file.display());
    Ok(plans.iter().any(|(_, result)| result.is_ok()))
}

fn names<'a>(plans: impl Iterator<Item = &'a Planned<'a>>) -> String {
    plans.map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn document(engine_host: &Plan, plans: &[Planned]) -> Value {
    let of = |(name, plan): &Planned| match plan {
        Ok(planned) => json!({
            "name": name, "plan": planned.plan, "total": planned.plan.total(), "limits": planned.limits,
            "idle_flags": planned.idle_flags,
        }),
        Err(error) => json!({"name": name, "error": words(error)}),
    };
    let models: Vec<_> = plans.iter().map(of).collect();
    json!({"shared": engine_host, "shared_total": engine_host.total(), "models": models})
}

fn print_plans(engine_host: &Plan, plans: &[Planned]) {
    say!("what all models share:\n{engine_host}");
    for (name, plan) in plans {
        match plan {
            Ok(planned) => {
                say!("{name}, while it is loaded:\n{}", planned.plan);
                for idle in &planned.idle_flags {
                    say!("  {idle}");
                }
            }
            Err(error) => say!("{name}: never loaded: {}", words(error)),
        }
    }
    let sum =
        engine_host.total() + plans.iter().flat_map(|(_, plan)| plan).map(|planned| planned.plan.total()).sum::<u64>();
    let never = names(plans.iter().filter(|(_, plan)| plan.is_err()));
    if plans.iter().all(|(_, plan)| plan.is_err()) {
        return;
    }
    let whom = if never.is_empty() { "all".to_owned() } else { format!("all but {never}") };
    let verdict = if sum <= engine_host.limit { "they fit together" } else { "they take turns" };
    say!("{whom} at once: {} of {}: {verdict}", Bytes(sum), Bytes(engine_host.limit));
}

fn words(error: &LoadError) -> &str {
    match error {
        LoadError::TooLarge(words) | LoadError::NoRoom(words) | LoadError::Failed(words) => words,
        LoadError::Cancelled => "cancelled",
    }
}

/// Heap bytes that the HTTP side may take for all models together, less those that are in the plan of each model.
fn shared_bytes(config: &ServerConfig) -> u64 {
    config.heap_bytes_max() - config.model_bytes_max(config.grammar_bytes)
}

/// The machine, for engines of all these models in one process.
fn machine(models: &[(String, ModelArgs)], engine: &EngineArgs, config: &ServerConfig) -> anyhow::Result<Host> {
    let options = engine.options_beside(config);
    let cores = Host::read(&options)?.threads;
    // Each model has its compute threads, its own thread, its watch thread, and two threads that follow grammars.
    let of = |(_, model): &(String, ModelArgs)| model.engine.threads.unwrap_or(cores) + 4;
    let other_threads = options.other_threads + models.iter().map(of).sum::<usize>();
    Ok(Host::read(&Options { other_threads, ..options })?)
}

/// The models, and the machine they share.
pub struct Shop {
    models: Vec<(String, ModelArgs)>,
    /// Each model's share of the prefix cache on disk, in the order of `models`.
    disks: Vec<Option<DiskCache>>,
    host: Host,
    log_ledger_every: u64,
}

impl Shop {
    /// These models on this machine.
    pub fn of(models: Vec<(String, ModelArgs)>, engine: &EngineArgs, config: &ServerConfig) -> anyhow::Result<Self> {
        let host = machine(&models, engine, config)?;
        let disks = disk::shares(&models, engine);
        Ok(Self { models, disks, host, log_ledger_every: 0 })
    }

    /// Plans the memory that all models share.
    pub fn engine_host(&self, config: &ServerConfig) -> Plan {
        EngineHost::planned(shared_bytes(config), &self.host.limit)
    }

    /// Plans a model under the limit `all`, which the engine host leaves to its models. Also returns the machine as the model finds it.
    pub fn plan(
        &self,
        index: usize,
        checkpoint: &Checkpoint,
        all: &MemoryLimit,
    ) -> Result<(EnginePlan, Host), PlanError> {
        let options = self.options_for(index, checkpoint);
        let host = self.host(&options, all, None);
        let planned = Blueprint::new(checkpoint, &options)?.plan(&options, host.threads, &host.limit)?;
        Ok((planned, host))
    }

    /// Plans every model with files on this machine. After "ready", every name must lead to a model and every setting
    /// must work. A model that can never fit is logged and is no error: the others are served.
    fn foresee(&self, file: &Path, all: &MemoryLimit) -> anyhow::Result<()> {
        for (index, (name, model)) in self.models.iter().enumerate() {
            let what = || format!("{}: the model `{name}` is `{}`", file.display(), model.model);
            let Some(path) = super::ready(&ModelRef::parse(&model.model).with_context(what)?)? else {
                tracing::info!(model = %name, "not in the cache: fetched and planned when it is first asked for");
                continue;
            };
            // A plan needs neither the weights nor the instruction set. Serving needs both, so they are checked here.
            let checkpoint = with_weights(&path, &self.options(index).mmproj).with_context(what)?;
            match self.foreseen(index, &checkpoint, all) {
                Ok((_, host)) => host.runs_kernels().with_context(what)?,
                Err(LoadError::TooLarge(lacks)) => {
                    tracing::warn!(model = %name, "it can never be loaded; requests for it are refused: {lacks}");
                }
                Err(error) => return Err(anyhow!("{}", words(&error))).with_context(what),
            }
        }
        Ok(())
    }

    fn options(&self, index: usize) -> Options {
        let (_, model) = &self.models[index];
        let disk_cache = self.disks[index].clone();
        Options { log_ledger_every: self.log_ledger_every, disk_cache, ..models_file::options_of(model) }
    }

    /// As [`Self::options`], without a disk cache where the checkpoint is an encoder: it has no prefixes to keep.
    fn options_for(&self, index: usize, checkpoint: &Checkpoint) -> Options {
        let options = self.options(index);
        let disk_cache = options.disk_cache.filter(|_| checkpoint.config.encoder.is_none());
        Options { disk_cache, ..options }
    }

    /// The machine as this model finds it when it is alone in the engine host. Its limit is `all`, or the part that its memory budget sets.
    fn host(&self, options: &Options, all: &MemoryLimit, engine_host: Option<&Arc<EngineHost>>) -> Host {
        let limit = match options.memory_budget.map(|budget| budget.bytes(all.bytes)) {
            Some(bytes) if bytes < all.bytes => MemoryLimit::of_budget(bytes, "the model's memory-budget"),
            Some(_) => MemoryLimit { chosen: true, ..all.clone() },
            None => all.clone(),
        };
        Host {
            limit,
            threads: options.threads.unwrap_or(self.host.threads).max(1),
            isa: options.isa.unwrap_or(self.host.isa),
            root: self.host.root.clone(),
            limits: self.host.limits.clone(),
            lease_dir: None,
            engine_host: engine_host.cloned(),
        }
    }

    fn path(&self, index: usize, cancel: &Cancel) -> Result<PathBuf, LoadError> {
        let mut progress = WhileWanted { inner: TerminalProgress::new(), cancel };
        super::resolve_telling(&self.models[index].1.model, &mut progress).map_err(|error| {
            match cancel.is_cancelled() {
                true => LoadError::Cancelled,
                false => LoadError::Failed(format!("{error:#}")),
            }
        })
    }

    /// Finds a model's files and plans it from their headers alone.
    fn needs(&self, index: usize, all: &MemoryLimit, cancel: &Cancel) -> Result<EnginePlan, LoadError> {
        let checkpoint =
            Checkpoint::open_with(&self.path(index, cancel)?, &self.options(index).mmproj).map_err(failed)?;
        Ok(self.foreseen(index, &checkpoint, all)?.0)
    }

    /// The plan of a model from its open checkpoint, and the machine as it is now. A setting that the model cannot use
    /// is an error.
    fn foreseen(
        &self,
        index: usize,
        checkpoint: &Checkpoint,
        all: &MemoryLimit,
    ) -> Result<(EnginePlan, Host), LoadError> {
        let planned = self.plan(index, checkpoint, all).map_err(unplanned)?;
        let defaults = CheckpointDefaults::read(checkpoint).map_err(failed)?;
        pooling_and_sampling(defaults, Some(&checkpoint.config), &self.models[index].1.reading).map_err(failed)?;
        Ok(planned)
    }
}

/// Shows a fetch on the terminal, and ends the fetch once no request waits for the model.
struct WhileWanted<'c> {
    inner: TerminalProgress,
    cancel: &'c Cancel,
}

impl Progress for WhileWanted<'_> {
    fn start(&mut self, what: &str, total: Option<u64>) {
        self.inner.start(what, total);
    }

    fn advance(&mut self, bytes: u64) {
        self.inner.advance(bytes);
    }

    fn done(&mut self) {
        self.inner.done();
    }

    fn note(&mut self, line: &str) {
        self.inner.note(line);
    }

    fn wanted(&self) -> bool {
        !self.cancel.is_cancelled()
    }
}

/// Loads models into an engine host.
struct Loading {
    shop: Shop,
    engine_host: Arc<EngineHost>,
    _disk: Option<SharedDirectory>,
}

impl Loading {
    /// Opens the engine host.
    fn open(models: Vec<(String, ModelArgs)>, args: &ServeArgs, config: &ServerConfig) -> anyhow::Result<Self> {
        let shop = Shop { log_ledger_every: args.ledger_steps(), ..Shop::of(models, &args.engine, config)? };
        let engine_host = EngineHost::open(shared_bytes(config), &shop.host)?;
        let _disk = SharedDirectory::open(&args.engine, &shop.disks)?;
        Ok(Self { shop, engine_host, _disk })
    }
}

impl Loader for Loading {
    fn needed(&self, index: usize, cancel: &Cancel) -> Result<u64, LoadError> {
        Ok(self.shop.needs(index, &EngineHost::limit_in(self.engine_host.plan()), cancel)?.plan.total())
    }

    fn room(&self) -> u64 {
        self.engine_host.room()
    }

    fn load(&self, index: usize, cancel: &Cancel) -> Result<Served, LoadError> {
        let shop = &self.shop;
        let path = shop.path(index, cancel)?;
        let model = LoadedModel::open_with(&path, &shop.options(index).mmproj).map_err(failed)?;
        let options = shop.options_for(index, &model.checkpoint);
        super::tell_encoder(&model.checkpoint);
        let host = shop.host(&options, &EngineHost::limit_in(self.engine_host.plan()), Some(&self.engine_host));
        let tokenizer = Arc::clone(&model.tokenizer);
        let started = start_unless(&model.checkpoint, tokenizer, &options, &host, |_| {}, cancel);
        let started = started.map_err(|error| match error {
            StartError::Cancelled => LoadError::Cancelled,
            StartError::Plan(error) => unplanned(error),
            StartError::NoRoom(_) | StartError::Refused(_) | StartError::OutOfMemory(_) => {
                LoadError::NoRoom(error.to_string())
            }
            error => failed(error),
        });
        let engine = started.inspect_err(|_| heap::trim())?;
        served(model, engine.clone(), &shop.models[index].1.reading, listed(&shop.models[index]).names).map_err(
            |error| {
                self.unload(engine);
                failed(error)
            },
        )
    }

    fn unload(&self, engine: EngineHandle) -> bool {
        let gone = engine.move_out(UNLOAD_WITHIN);
        // The last handle holds the tokenizer and the tables of requests. The trim returns their heap pages to the system.
        drop(engine);
        heap::trim();
        tracing::debug!(planned = %Bytes(self.engine_host.planned_total()), "an engine has moved out");
        gone
    }

    fn report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.engine_host.report(engines)
    }

    fn shared_report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.engine_host.shared_report(engines)
    }
}

fn failed(error: impl std::fmt::Display) -> LoadError {
    LoadError::Failed(format!("{error:#}"))
}

fn unplanned(error: PlanError) -> LoadError {
    match error {
        // The plan's table is for the log.
        PlanError::DoesNotFit(short) => {
            tracing::debug!("{short}\n{}", short.details());
            let (needed, limit) = (Bytes(short.needed), Bytes(short.limit));
            LoadError::TooLarge(format!("it needs {needed}, the memory limit leaves {limit} ({})", short.limit_source))
        }
        error => failed(error),
    }
}
