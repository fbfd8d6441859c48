//! `serve --models`: one line, one house, engines that come and go with what is asked.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use plimsoll_engine::startup::StartError;
use plimsoll_engine::{
    Blueprint, EngineHandle, Host, House, LedgerReport, Line, LoadedModel, Options, PlanError, start,
};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Bytes, heap};
use plimsoll_server::{Listed, LoadError, Loader, Served, ServerConfig, serve_models};

use super::serve::{http_runtime, say_ready, served, shutdown};
use crate::args::{ModelArgs, ServeArgs};
use crate::settings::read_models;

/// An engine whose requests have all ended is gone by then.
const UNLOAD_WITHIN: Duration = Duration::from_secs(30);

/// Runs the server.
pub fn run(file: &Path, args: &ServeArgs, config: ServerConfig, began: Instant) -> anyhow::Result<()> {
    let models = read_models(file, &args.inherited)?;
    let listed = models.iter().map(listed).collect();
    let loader = Loading::open(models, args, &config)?;
    let (planned, line) = (loader.house.plan().total(), loader.house.plan().limit);
    let names = loader.models.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    http_runtime()?.block_on(async {
        let listener = plimsoll_server::bind(&config).await?;
        // As for one model: whoever reads "ready" may send a signal at once.
        let shutdown = shutdown().context("listening for signals")?;
        let address = listener.local_addr().context("the listening address")?;
        tracing::info!("what all models share:\n{}", loader.house.plan());
        say_ready(began, &names, address, planned, line);
        serve_models(listener, listed, Arc::new(loader), config, shutdown).await.context("serving")
    })
}

fn listed((name, model): &(String, ModelArgs)) -> Listed {
    let others = model.served_model_name.iter().filter(|other| *other != name).cloned();
    Listed {
        names: std::iter::once(name.clone()).chain(others).collect(),
        idle_after: model.idle_seconds.map(Duration::from_secs),
        grammar_bytes: model.grammar_bytes,
    }
}

/// Loads models into a house.
struct Loading {
    models: Vec<(String, ModelArgs)>,
    house: Arc<House>,
    /// The machine, as the house sees it.
    host: Host,
    log_ledger_every: u64,
}

impl Loading {
    /// Plans what all models share.
    fn open(models: Vec<(String, ModelArgs)>, args: &ServeArgs, config: &ServerConfig) -> anyhow::Result<Self> {
        let host = Host::read(&args.engine.options(0))?;
        // Each model has its own grammars, in its own plan.
        let house = House::open(config.heap_bytes_max() - config.grammar_bytes, &host)?;
        Ok(Self { models, house, host, log_ledger_every: args.log_ledger_every })
    }

    fn options(&self, index: usize) -> Options {
        let (_, model) = &self.models[index];
        Options { guest: true, log_ledger_every: self.log_ledger_every, ..model.engine.options(model.grammar_bytes) }
    }

    /// The machine as this model finds it, alone in the house: under the line, or under the part of it that the operator gave it.
    fn host(&self, options: &Options) -> Host {
        let all = self.house.line();
        let line = match options.memory_budget.map(|budget| budget.bytes(all.bytes)) {
            Some(bytes) if bytes < all.bytes => Line::of_budget(bytes, "the model's memory-budget"),
            Some(_) => Line { chosen: true, ..all },
            None => all,
        };
        Host {
            line,
            threads: options.threads.unwrap_or(self.host.threads).max(1),
            isa: options.isa.unwrap_or(self.host.isa),
            root: self.host.root.clone(),
            limits: self.host.limits.clone(),
            lease_dir: None,
            house: Some(Arc::clone(&self.house)),
        }
    }

    fn path(&self, index: usize) -> Result<PathBuf, LoadError> {
        super::resolve(&self.models[index].1.model).map_err(|error| LoadError::Failed(format!("{error:#}")))
    }
}

impl Loader for Loading {
    fn needed(&self, index: usize) -> Result<u64, LoadError> {
        let checkpoint = Checkpoint::open(&self.path(index)?).map_err(failed)?;
        let options = self.options(index);
        let host = self.host(&options);
        let planned = Blueprint::new(&checkpoint, &options)
            .and_then(|blueprint| blueprint.plan(&options, host.threads, &host.line))
            .map_err(unplanned)?;
        Ok(planned.plan.total())
    }

    fn room(&self) -> u64 {
        self.house.room()
    }

    fn load(&self, index: usize) -> Result<Served, LoadError> {
        let args = &self.models[index].1;
        let path = self.path(index)?;
        let model = LoadedModel::open(&path).map_err(failed)?;
        let options = self.options(index);
        let host = self.host(&options);
        let tokenizer = Arc::clone(&model.tokenizer);
        let started = start(&model.checkpoint, tokenizer, &options, &host, |_| {}).map_err(|error| match error {
            StartError::Plan(error) => unplanned(error),
            StartError::NoRoom(_) | StartError::Refused(_) | StartError::OutOfMemory(_) => {
                LoadError::NoRoom(error.to_string())
            }
            error => failed(error),
        });
        let engine = started.inspect_err(|_| heap::trim())?;
        served(model, engine.clone(), &args.reading, listed(&self.models[index]).names).map_err(|error| {
            self.unload(&engine);
            failed(error)
        })
    }

    fn unload(&self, engine: &EngineHandle) -> bool {
        let gone = engine.move_out(UNLOAD_WITHIN);
        // What the heap keeps of it goes back, too.
        heap::trim();
        tracing::debug!(planned = %Bytes(self.house.planned_total()), "an engine has moved out");
        gone
    }

    fn report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.house.report(engines.iter().copied())
    }
}

fn failed(error: impl std::fmt::Display) -> LoadError {
    LoadError::Failed(error.to_string())
}

fn unplanned(error: PlanError) -> LoadError {
    match error {
        // The plan's table is for the log.
        PlanError::DoesNotFit(short) => {
            tracing::warn!("{short}");
            LoadError::TooLarge(format!(
                "it needs {}, the line leaves {} ({})",
                Bytes(short.needed),
                Bytes(short.limit),
                short.limit_source
            ))
        }
        error => failed(error),
    }
}
