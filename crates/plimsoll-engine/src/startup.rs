//! Start-up: plan → build → prove → ready. What it builds is what the planner planned, once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, sync_channel};
use std::time::Instant;

use plimsoll_device::{CpuDevice, CpuMemory, CpuWeights, DeviceError, Isa, ModelShape, ThreadPool};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::host::{HostError, HostLimits, HostNow, Root};
use plimsoll_memory::{Component, Ledger, OutOfMemory, Region};
use plimsoll_models::Model;
use thiserror::Error;

use crate::cache::{PagePool, PrefixIndex};
use crate::cpu::CpuRunner;
use crate::delivery::SharedTokenizer;
use crate::handle::{Arrival, EngineHandle, Shared};
use crate::lease::KvCache;
use crate::options::Options;
use crate::planner::{Blueprint, EnginePlan, Line, PlanError};
use crate::sampling::{Sampler, SamplerError};
use crate::stress::stress;
use crate::worker::{Parts, Worker};

/// Why an engine did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// It cannot be planned, or does not fit.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The machine's limits could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The weights could not be loaded.
    #[error(transparent)]
    Load(#[from] plimsoll_device::cpu::LoadError),
    /// Planned memory could not be had.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The sampler's scratch could not be had.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// The system refused a thread.
    #[error("starting a thread: {0}")]
    Thread(std::io::Error),
    /// The worst case did not run.
    #[error("the proof failed: {0}")]
    Proof(DeviceError),
    /// The worst case took more than was planned: a bug in the planner.
    #[error("the proof failed: {component} used {measured} bytes, {planned} were planned")]
    ProofExceeds {
        /// The component.
        component: &'static str,
        /// Bytes used.
        measured: u64,
        /// Bytes planned.
        planned: u64,
    },
}

/// What the machine gives this process, and with how many threads.
pub struct Host {
    /// The line.
    pub line: Line,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
}

impl Host {
    /// Reads the machine's limits and decides line, threads and instruction set.
    pub fn read(options: &Options) -> Result<Self, HostError> {
        let root = Root::system();
        let limits = HostLimits::read(&root, options.memory_budget)?;
        let now = HostNow::read(&root, &limits);
        let binding = limits.binding();
        let peers = now.used_by_others;
        let source = format!("{} ({}), less {} that others use", binding.name, plimsoll_memory::Bytes(binding.bytes), plimsoll_memory::Bytes(peers));
        let line = Line { bytes: limits.effective.saturating_sub(peers), source, chosen: options.memory_budget.is_some() };
        let cores = usize::try_from(limits.cpus.usable).unwrap_or(1).max(1);
        Ok(Self { line, threads: options.threads.unwrap_or(cores).max(1), isa: options.isa.unwrap_or_else(Isa::detect) })
    }
}

/// Plans, builds and proves an engine, and starts its thread. Returns when it is ready.
///
/// `progress` is told the packed bytes of weights as they are loaded.
pub fn start(
    checkpoint: &Checkpoint,
    tokenizer: SharedTokenizer,
    options: &Options,
    host: &Host,
    progress: impl FnMut(u64),
) -> Result<EngineHandle, StartError> {
    let blueprint = Blueprint::new(checkpoint, options)?;
    let planned = blueprint.plan(options, host.threads, &host.line)?;
    let ledger = Arc::new(Ledger::new());
    planned.plan.enter(&ledger);
    let eos = end_tokens(&blueprint, &tokenizer);
    let Blueprint { model, weights, .. } = blueprint;
    let model: Arc<dyn Model> = Arc::from(model);
    let mut pool = ThreadPool::new(host.threads).map_err(StartError::Thread)?;
    let weights = CpuWeights::load(weights, checkpoint, &ledger, &mut pool, progress)?;
    let shape = model.shape(options.kv_dtype);
    let memory = CpuMemory::map(&ledger, &shape, planned.pages, planned.workspace, host.threads, !options.elastic)?;
    let mut runner = CpuRunner::new(model, CpuDevice::new(weights, pool, host.isa, memory));
    let sampler = prove(&mut runner, &planned, &shape)?;
    observe_host(&ledger, &planned, &shape);
    let canary = Region::map(&ledger, Component::Canary, planned.plan.bytes(Component::Canary), true)?;
    ledger.seal();
    spawn(Ready { runner, sampler, canary, planned, ledger, tokenizer, eos, prefix_cache: options.prefix_cache })
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

/// Runs the worst case and compares it with the plan.
fn prove(runner: &mut CpuRunner, planned: &EnginePlan, shape: &ModelShape) -> Result<Sampler, StartError> {
    let _ = shape;
    let mut sampler = Sampler::new(planned.limits.vocab_size as usize)?;
    let context = planned.limits.max_req_total_len as usize;
    stress(runner, &mut sampler, &planned.step, context, planned.pages).map_err(StartError::Proof)?;
    let measured = runner.device().memory().workspace_peak() as u64;
    if measured > planned.workspace as u64 {
        let component = Component::StepWorkspace.name();
        return Err(StartError::ProofExceeds { component, measured, planned: planned.workspace as u64 });
    }
    Ok(sampler)
}

/// Enters the tables whose size is known by construction.
fn observe_host(ledger: &Ledger, planned: &EnginePlan, _shape: &ModelShape) {
    let tables = PagePool::bytes_for(planned.pages) + PrefixIndex::bytes_for(planned.pages);
    ledger.observe(Component::PrefixIndex, tables as u64);
}

/// A proven engine on its way to its thread.
struct Ready {
    runner: CpuRunner,
    sampler: Sampler,
    canary: Region,
    planned: EnginePlan,
    ledger: Arc<Ledger>,
    tokenizer: SharedTokenizer,
    eos: Vec<u32>,
    prefix_cache: bool,
}

/// Starts the engine thread and waits until it has built its tables.
fn spawn(ready: Ready) -> Result<EngineHandle, StartError> {
    let limits = ready.planned.limits;
    let queue = limits.max_waiting as usize + limits.running_max_req_size as usize;
    let (arrivals, receiver) = sync_channel::<Arrival>(queue.max(1));
    let shared = Arc::new(Shared::new(limits, ready.planned.plan.clone(), Arc::clone(&ready.ledger)));
    let epoch = Instant::now();
    let handle = EngineHandle { shared: Arc::clone(&shared), arrivals, epoch };
    let (built, wait) = channel();
    let thread = std::thread::Builder::new().name("plimsoll-engine".into());
    let body = move || {
        let Ready { runner, sampler, canary, planned, tokenizer, eos, prefix_cache, .. } = ready;
        let tables = tables(planned.pages, prefix_cache);
        let cache = match tables {
            Ok(cache) => std::rc::Rc::new(std::cell::RefCell::new(cache)),
            Err(error) => {
                // The receiver waits for exactly this message.
                let _ = built.send(Err(error));
                return;
            }
        };
        let limits = planned.step;
        let worker = Worker::new(Parts { shared, arrivals: receiver, epoch, runner, cache, limits, sampler, tokenizer, eos });
        let _ = built.send(Ok(()));
        worker.run();
        drop(canary);
    };
    thread.spawn(body).map_err(StartError::Thread)?;
    match wait.recv() {
        Ok(Ok(())) => Ok(handle),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            handle.shared.stopped.store(true, Ordering::Release);
            Err(StartError::Thread(std::io::Error::other("the engine thread ended before it was ready")))
        }
    }
}

/// Page pool and prefix index: the host tables whose size depends on capacity.
fn tables(pages: usize, prefix_cache: bool) -> Result<KvCache, StartError> {
    let refused = |what: String| {
        StartError::OutOfMemory(OutOfMemory::Refused { component: Component::PrefixIndex.name(), bytes: PagePool::bytes_for(pages) as u64, reason: what })
    };
    let pool = PagePool::new(pages).map_err(|error| refused(error.to_string()))?;
    let index = match prefix_cache {
        true => Some(PrefixIndex::new(pages).map_err(|error| refused(error.to_string()))?),
        false => None,
    };
    Ok(KvCache { pool, index })
}
