//! Start-up: plan → lease → load → probe, size, build, self-test → ready. It builds the planner's plan.

mod device;
mod disk;
mod gpu;
mod host;
mod packed;
pub(crate) mod phases;
pub(crate) mod self_test;
pub(crate) mod shadow;
pub(crate) mod size;
mod spawn;
mod start_reserve;

use std::sync::Arc;

use plimsoll_device::{ModelShape, ThreadPool};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::sizing::{self, Failure, Generations, PoolPhase, ProfileConfig, Shape, SizingError, auto_profile};
use plimsoll_memory::{Component, Ledger, OutOfMemory};
use plimsoll_models::Model;

use crate::api::cancel::Cancel;
use crate::api::options::Options;
pub use crate::api::start_error::{NoRoom, StartError};
use crate::handle::EngineHandle;
use crate::media::{MediaPlan, MediaSpec};
use crate::memory::footprint::{Accounts, Tables, engine_bytes, sampler_bytes, table_bytes};
use crate::memory::lease::MemoryLease;
use crate::memory::process::ProcessAccount;
use crate::plan::{Blueprint, EnginePlan};
use crate::request::state::SharedTokenizer;
use crate::runner::backend::{Backend, CpuBackend};
use crate::sampling::Sampler;
use crate::startup::phases::Phases;
use crate::startup::size::{PoolBuild, PoolBuilder, profile_config};
use crate::watch::host::HostedLease;
pub use device::choose_device;
use disk::DiskStart;
pub use gpu::gpus;
pub use host::Host;
use packed::{Loaded, WeightsLoad};
use spawn::{Ready, spawn};
use start_reserve::StartReserve;

/// Plans, builds and tests an engine, and starts its thread. Returns when it is ready.
///
/// `progress` gets the packed bytes of weights as they are loaded.
pub fn start(
    checkpoint: &Checkpoint,
    tokenizer: SharedTokenizer,
    options: &Options,
    host: &Host,
    progress: impl FnMut(u64),
) -> Result<EngineHandle, StartError> {
    start_unless(checkpoint, tokenizer, options, host, progress, &Cancel::default())
}

/// As [`start`], but can be cancelled. A cancelled start stops at the next tensor or the next step of the self-test, and frees everything.
///
/// # Errors
/// [`StartError::Cancelled`] in that case.
pub fn start_unless(
    checkpoint: &Checkpoint,
    tokenizer: SharedTokenizer,
    options: &Options,
    host: &Host,
    progress: impl FnMut(u64),
    cancel: &Cancel,
) -> Result<EngineHandle, StartError> {
    let started = start_as((checkpoint, tokenizer), options, host, progress, cancel, |config| config);
    // A cancelled start can end with any error; the reason is the cancellation.
    started.map_err(|error| if cancel.is_cancelled() { StartError::Cancelled } else { error })
}

/// As [`start_unless`], with a function that changes the sizing configuration, so that tests can have the pool probed and rebuilt.
fn start_as(
    (checkpoint, tokenizer): (&Checkpoint, SharedTokenizer),
    options: &Options,
    host: &Host,
    progress: impl FnMut(u64),
    cancel: &Cancel,
    adjust: impl FnOnce(ProfileConfig) -> ProfileConfig,
) -> Result<EngineHandle, StartError> {
    host.runs_kernels()?;
    let mut phases = Phases::begin();
    let start_reserve = StartReserve::set_aside();
    let blueprint = Blueprint::new(checkpoint, options)?;
    let planned = blueprint.plan(options, host.threads, &host.limit)?;
    for idle in &planned.idle_flags {
        tracing::warn!("{idle}");
    }
    phases.ended("plan");
    let beside = host.engine_host.as_ref().map_or(0, |engine_host| engine_host.mapped_total());
    let memory_lease =
        MemoryLease::take(planned.plan.total(), beside, host.lease_dir.clone(), &host.root, &host.limits)?;
    phases.ended("lease");
    let store = disk::open(&planned, options)?;
    let packed_cache = packed::open(options)?;
    phases.ended("cache directory");
    let ledger = Arc::new(Ledger::new());
    planned.plan.enter(&ledger);
    let hosted = host.engine_host.as_ref().map(|engine_host| engine_host.admit(&ledger)).transpose()?;
    let eos = end_tokens(&blueprint, &tokenizer);
    let fixed = engine_bytes(&blueprint.weights);
    let Blueprint { model, weights, .. } = blueprint;
    let model: Arc<dyn Model> = Arc::from(model);
    let shape = weights.shaped(model.shape(options.kv_dtype));
    let config = adjust(profile_config(&planned));
    let load = WeightsLoad::default();
    let mut start = Start { options, host, cancel, ledger, shape, config, disk: None, load };
    let rest = Rest { tokenizer, eos, memory_lease, hosted, fixed, start_reserve };
    #[cfg(feature = "gpu")]
    if let Some(plan) = planned.gpu.clone() {
        let adapter = gpu::adapter(options)?;
        let mut rest = rest;
        if let Some(room) = gpu::room(&adapter) {
            rest.memory_lease.take_on_device(planned.plan.device_total(), host.lease_dir.clone(), room)?;
        }
        let of = (model, weights, checkpoint);
        let began = std::time::Instant::now();
        let backend = gpu::load(of, (plan, &adapter), &start.ledger, (options, host.threads), progress, cancel)?;
        start.load.took = began.elapsed();
        phases.ended("weights");
        return start.go_on(planned, backend, rest);
    }
    let mut pool = ThreadPool::new(host.threads).map_err(StartError::Thread)?;
    let stopped = || cancel.is_cancelled();
    let (from, parts) = ((checkpoint, options), (&start.ledger, &mut pool));
    let Loaded { weights, how } = packed::load(weights, from, packed_cache.as_ref(), parts, progress, stopped)?;
    start.load = how;
    phases.ended("weights");
    if let Some(store) = store {
        match disk::fingerprint(checkpoint, &weights, &planned, options)? {
            Some(print) => start.disk = Some(DiskStart::new(store, print)),
            None => tracing::warn!(
                "the prefix cache on disk is not used: a file of the model was changed just before the start, or its identity is unknown"
            ),
        }
        phases.ended("fingerprint");
    }
    start.go_on(planned, CpuBackend::new(model, host.isa, weights, pool), rest)
}

/// A start with loaded weights.
struct Start<'a> {
    options: &'a Options,
    host: &'a Host,
    cancel: &'a Cancel,
    ledger: Arc<Ledger>,
    shape: ModelShape,
    config: ProfileConfig,
    /// The prefix cache on disk, if there is one.
    disk: Option<DiskStart>,
    /// Whether the weights were mapped, and the time that loading took.
    load: WeightsLoad,
}

/// The parts of a start that sizing does not need.
struct Rest {
    tokenizer: SharedTokenizer,
    eos: Vec<u32>,
    memory_lease: MemoryLease,
    hosted: Option<HostedLease>,
    /// Bytes of the engine that do not depend on requests.
    fixed: u64,
    start_reserve: StartReserve,
}

impl Start<'_> {
    /// Builds and tests the pool over loaded weights, and starts the engine's thread.
    fn go_on<B: Backend>(self, mut planned: EnginePlan, backend: B, rest: Rest) -> Result<EngineHandle, StartError> {
        let Self { options, host, cancel, ledger, shape, config, disk, load } = self;
        let Rest { tokenizer, eos, memory_lease, hosted, fixed, start_reserve } = rest;
        let mut builder = pool_builder(&planned, shape, backend, &ledger, options, host)?;
        builder.cancel = cancel.clone();
        builder.root = disk.as_ref().map(|disk| disk.root);
        let Tested { pool_build, sampler, workspace_peak, media } = build_and_test(&config, builder)?;
        planned.resize(pool_build.cache.pool.total(), pool_build.cache.slots());
        planned.plan.enter(&ledger);
        let mut accounts = accounts(&planned, &tokenizer, options);
        accounts.tables += fixed;
        accounts.workspace_peak = workspace_peak;
        // After the resize: a request is no longer than the pool.
        let line = planned.plan.lines.iter().find(|line| line.component == Component::DiskCache);
        accounts.disk = disk.as_ref().and(line).map_or(0, |line| line.bytes);
        let disk = disk.map(|disk| disk.start(&planned)).transpose()?;
        let ready = Ready {
            pool_build,
            sampler,
            media,
            planned,
            ledger,
            tokenizer,
            eos,
            memory_lease,
            accounts,
            hosted,
            disk,
            load,
        };
        spawn(ready, start_reserve, options, host)
    }
}

/// The parts that remain after the self-test.
struct Tested<R> {
    pool_build: PoolBuild<R>,
    sampler: Sampler,
    /// Bytes of workspace that the self-test took.
    workspace_peak: u64,
    media: Option<MediaSpec>,
}

impl<R> Tested<R> {
    fn new<B>(pool_build: PoolBuild<R>, builder: PoolBuilder<'_, B>) -> Self {
        let PoolBuilder { sampler, workspace_peak, media, .. } = builder;
        Self { pool_build, sampler, workspace_peak, media }
    }
}

/// Builds and tests the pool.
fn build_and_test<B: Backend>(
    config: &ProfileConfig,
    mut builder: PoolBuilder<'_, B>,
) -> Result<Tested<B::Runner>, StartError> {
    if builder.plan.step.encoder_batch {
        // An encoder has no pool to size: it is built once and tested.
        let shape = Shape { tokens: 0, state_slots: 0, generation: 1, phase: PoolPhase::Production };
        let failed = |failure| match failure {
            Failure::Other(error) => own_error(SizingError::Other(error)),
            Failure::OutOfMemory(refused) => refused_start(&refused),
        };
        let mut pool_build = builder.build(shape).map_err(failed)?;
        builder.self_test(&mut pool_build).map_err(failed)?;
        return Ok(Tested::new(pool_build, builder));
    }
    let open = builder.plan.measure;
    let outcome = auto_profile(config, &mut builder).map_err(|error| match error {
        SizingError::PinnedTooLarge { tokens, need, available, .. } if open => {
            StartError::Shrunk { tokens, need, available }
        }
        error => own_error(error),
    })?;
    Ok(Tested::new(outcome.generation, builder))
}

fn refused_start(refused: &sizing::OutOfMemory) -> StartError {
    let sizing::OutOfMemory { component, requested, .. } = refused;
    let name = Component::ALL.iter().map(|component| component.name()).find(|name| name == component);
    let reason = "there is no room for it on this machine any more".into();
    OutOfMemory::Refused { component: name.unwrap_or("memory"), bytes: *requested, reason }.into()
}

/// Returns the builder that builds and tests pools over loaded weights.
pub(crate) fn pool_builder<'a, B: Backend>(
    planned: &'a EnginePlan,
    shape: ModelShape,
    backend: B,
    ledger: &Arc<Ledger>,
    options: &Options,
    host: &'a Host,
) -> Result<PoolBuilder<'a, B>, StartError> {
    let own = Arc::clone(ledger);
    Ok(PoolBuilder {
        plan: planned,
        shape,
        backend,
        ledger: Arc::clone(ledger),
        sampler: Sampler::new(planned.limits.vocab_size as usize)?,
        touch: !options.elastic,
        // An encoder caches nothing, so no sequence must wait for a shared prefix.
        tables: Tables { prefix_cache: options.prefix_cache && !planned.step.encoder_batch, ..planned.tables },
        tokens: 0,
        room: Box::new(move || host.room(&own)),
        workspace_peak: 0,
        cancel: Cancel::default(),
        media: planned.media.as_ref().map(MediaPlan::start).transpose().map_err(StartError::MediaMemory)?,
        root: None,
    })
}

/// Returns an error of the engine that sizing passed through as itself; other errors stay sizing errors.
pub(crate) fn own_error(error: SizingError) -> StartError {
    match error {
        SizingError::Other(other) => other
            .downcast::<StartError>()
            .map_or_else(|other| StartError::Sizing(Box::new(SizingError::Other(other))), |own| *own),
        error => StartError::Sizing(Box::new(error)),
    }
}

/// Returns the heap bytes that the engine holds for its whole life. Without a measurement the tokenizer reports the bytes of its tables.
fn accounts(planned: &EnginePlan, tokenizer: &SharedTokenizer, options: &Options) -> Accounts {
    let tokenizer = options.tokenizer_bytes.unwrap_or(tokenizer.table_bytes() as u64);
    let gpu = planned.gpu.as_ref();
    Accounts {
        buffers_on_heap: gpu.is_some_and(|gpu| gpu.software),
        tokenizer: tokenizer + sampler_bytes(planned.limits.vocab_size as usize),
        tables: table_bytes(
            &planned.step,
            planned.limits.max_waiting as usize,
            planned.limits.max_req_total_len as usize,
        ) + gpu.map_or(0, |gpu| gpu.heap),
        index: planned.index_bytes(planned.pages, planned.slots),
        encoder: planned.media.as_ref().map_or(0, MediaPlan::encoder_bytes),
        process: (!options.hosted).then(ProcessAccount::default),
        ..Accounts::default()
    }
}

/// The model's end-of-sequence tokens and the tokenizer's.
fn end_tokens(blueprint: &Blueprint, tokenizer: &SharedTokenizer) -> Vec<u32> {
    let mut eos = blueprint.eos.clone();
    eos.extend_from_slice(tokenizer.eos());
    eos.retain(|id| (*id as usize) < blueprint.model.vocab_size());
    eos.sort_unstable();
    eos.dedup();
    eos
}

#[cfg(test)]
mod tables_tests;
#[cfg(test)]
mod tests;
