//! The last step of a start: the engine thread and the watching thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::time::Instant;

use plimsoll_device::{KvGroup, KvShape};
use plimsoll_media::OutputPool;
use plimsoll_memory::{Component, EmergencyReserve, Ledger, heap};

use super::host::Host;
use super::packed::WeightsLoad;
use super::start_reserve::StartReserve;
use crate::api::options::Options;
use crate::api::start_error::StartError;
use crate::cache::PrefixIndex;
use crate::handle::EngineHandle;
use crate::media::MediaSpec;
use crate::memory::footprint::Accounts;
use crate::memory::lease::MemoryLease;
use crate::plan::EnginePlan;
use crate::request::state::{Arrival, SharedTokenizer};
use crate::runner::Runner;
use crate::sampling::Sampler;
use crate::schedule::prefill_budget::PrefillMeter;
use crate::shared::Shared;
use crate::startup::size::PoolBuild;
use crate::watch::host::HostedLease;
use crate::watch::thread::watch;
use crate::worker::{DiskParts, Encoding, Parts, Worker};

/// A tested engine, before its thread starts.
pub(super) struct Ready<R> {
    pub pool_build: PoolBuild<R>,
    pub sampler: Sampler,
    pub media: Option<MediaSpec>,
    pub planned: EnginePlan,
    pub ledger: Arc<Ledger>,
    pub tokenizer: SharedTokenizer,
    pub eos: Vec<u32>,
    pub memory_lease: MemoryLease,
    pub accounts: Accounts,
    pub hosted: Option<HostedLease>,
    pub disk: Option<DiskParts>,
    pub load: WeightsLoad,
}

/// Starts the engine thread, waits until it has built its tables, and completes the accounts of start-up. An error on the way ends the
/// thread as well.
pub(super) fn spawn<R: Runner + Send + 'static>(
    ready: Ready<R>,
    start_reserve: StartReserve,
    options: &Options,
    host: &Host,
) -> Result<EngineHandle, StartError> {
    let Ready { pool_build, sampler, media, planned, ledger, tokenizer, .. } = ready;
    let Ready { eos, memory_lease, accounts, hosted, disk, load, .. } = ready;
    debug_assert!(planned.plan.shortfall() == 0, "I1: the plan exceeds the memory limit");
    let encoding = media.as_ref().map(Encoding::new).transpose().map_err(StartError::MediaMemory)?;
    let (limits, step, speculation, elastic) = (planned.limits, planned.step, planned.speculation, options.elastic);
    let prefill_meter = PrefillMeter::new(options.long_prompt_slowdown);
    let PoolBuild { runner, cache, emergency_reserve } = pool_build;
    let log = cache.index.as_ref().and_then(PrefixIndex::kv_event_log);
    let shared = Arc::new(Shared::new(limits, planned.plan, Arc::clone(&ledger)));
    complete(&shared, &planned.kv, &eos, media, load);
    log.into_iter().for_each(|log| drop(shared.facts.kv_event_log.set(Arc::clone(log))));
    let (handle, receiver) = connect(&shared, hosted.as_ref(), options);
    let epoch = handle.epoch;
    let emergency_reserve = match emergency_reserve {
        None if hosted.is_none() => {
            Some(EmergencyReserve::map(&ledger, ledger.row(Component::EmergencyReserve).planned)?)
        }
        emergency_reserve => emergency_reserve,
    };
    ledger.seal();
    let ((built, wait), (go, begin)) = (channel(), channel::<MemoryLease>());
    let outputs = handle.shared.facts.media.get().map(|media| media.outputs.clone());
    let body = move || {
        let cache = std::rc::Rc::new(std::cell::RefCell::new(cache));
        let worker = Worker::new(Parts {
            shared,
            arrivals: receiver,
            epoch,
            runner,
            cache,
            limits: step,
            speculation,
            prefill_meter,
            sampler,
            encoding,
            tokenizer,
            eos,
            elastic,
            disk,
        });
        // The starting thread waits for this message, and then sends the lease, which lasts as long as the engine.
        let _ = built.send(());
        let Ok(memory_lease) = begin.recv() else { return };
        worker.run();
        // Readers can outlive the engine and hold the pool; they must not keep its memory.
        outputs.iter().for_each(OutputPool::retire);
        // A hosted engine uses its host's emergency reserve. The lease is dropped last, when all other memory is given back.
        let emergency_reserve = if hosted.is_none() { heap::disarm() } else { None };
        drop((emergency_reserve, memory_lease, hosted));
    };
    let thread = std::thread::Builder::new().name("plimsoll-engine".into()).spawn(body).map_err(StartError::Thread)?;
    let closed = match wait.recv() {
        Ok(()) => {
            let start_reserve = start_reserve.replace(emergency_reserve);
            close_books(&handle, start_reserve, memory_lease, accounts, options, host)
        }
        Err(_) => Err(StartError::Thread(std::io::Error::other("the engine thread ended before it was ready"))),
    };
    match closed {
        Ok((memory_lease, start_reserve)) => {
            start_reserve.keep();
            // The engine thread is alive: it has just sent its message.
            let _ = go.send(memory_lease);
            Ok(handle)
        }
        Err(error) => {
            drop(go);
            // The thread ends without a result. If it has panicked, the error says that it ended.
            let _ = thread.join();
            Err(error)
        }
    }
}

/// Sets the parts of the shared state that only start-up knows. Each is set once, here.
fn complete(shared: &Shared, kv: &KvShape, eos: &[u32], media: Option<MediaSpec>, load: WeightsLoad) {
    shared.metrics.weights_mapped.set(load.mapped.into());
    shared.metrics.weights_load_seconds.set(load.took.as_secs_f64());
    let _ = shared.facts.page_bytes.set([KvGroup::Whole, KvGroup::Window].map(|group| kv.page_bytes(group) as u64));
    let _ = shared.facts.eos.set(eos.to_vec());
    media.into_iter().for_each(|media| drop(shared.facts.media.set(media)));
}

/// Returns the engine's handle, and the receiver of its arrivals.
fn connect(shared: &Arc<Shared>, hosted: Option<&HostedLease>, options: &Options) -> (EngineHandle, Receiver<Arrival>) {
    let limits = &shared.limits;
    let queue = limits.max_waiting as usize + limits.running_max_req_size as usize;
    let (arrivals, receiver) = sync_channel::<Arrival>(queue.max(1));
    hosted.iter().for_each(|hosted| hosted.register(shared));
    let engine_host = hosted.map(|hosted| Arc::clone(hosted.engine_host()));
    let handle = EngineHandle { shared: Arc::clone(shared), engine_host, arrivals, epoch: Instant::now() };
    handle.set_stall_limit(options.stall_limit);
    (handle, receiver)
}

/// Measures the memory that is not counted, tells other processes what was built, and starts the watching thread.
fn close_books(
    handle: &EngineHandle,
    start_reserve: StartReserve,
    mut memory_lease: MemoryLease,
    accounts: Accounts,
    options: &Options,
    host: &Host,
) -> Result<(MemoryLease, StartReserve), StartError> {
    let ledger = &handle.shared.ledger;
    accounts.measure_baseline(ledger);
    accounts.observe(ledger, 0, 0);
    // Mapped memory that can be touched at any time counts as touched. Pages of held files do not: other processes see them as available.
    let there = ledger.mapped_total().saturating_sub(ledger.held_files());
    let plan = handle.plan();
    // The driver's share is used without an entry in the ledger.
    let on_device = ledger.committed_on_device() + plan.bytes(Component::DeviceReserve);
    memory_lease.built([plan.total(), there], [plan.device_total(), on_device])?;
    report_baseline(ledger);
    // Set once, here.
    let _ = handle.shared.facts.accounts.set(accounts);
    let (epoch, root, limits) = (handle.epoch, host.root.clone(), host.limits.clone());
    watch(&handle.shared, handle.engine_host.as_ref(), epoch, root, limits, options.log_ledger_every)
        .map_err(StartError::Thread)?;
    Ok((memory_lease, start_reserve))
}

/// Warns if the process took more before the engine than was planned. The start continues.
fn report_baseline(ledger: &Ledger) {
    for component in [Component::ProcessBaseline, Component::Tokenizer, Component::HostHeap] {
        let row = ledger.row(component);
        if row.committed > row.planned {
            tracing::warn!(
                component = component.name(),
                planned = row.planned,
                measured = row.committed,
                "more than was planned"
            );
        }
    }
}
