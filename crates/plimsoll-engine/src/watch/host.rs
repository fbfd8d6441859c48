//! The engine host: memory that a process holds once, for any number of engines. It has the HTTP side's heap, the process itself, and the
//! emergency reserve.
//!
//! An engine that runs alone plans all of this itself. Where several engines share one memory limit, each plans only its own memory
//! ([`crate::Options::hosted`]). It is listed here from before its first byte until its thread has given the last one back. The sum of the
//! engine host and its engines stays under the limit. Not in here: the server decides which model is loaded or unloaded.

use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plimsoll_memory::{Bytes, Component, EmergencyReserve, Ledger, Plan, PlanLine, heap};

use crate::api::start_error::{NoRoom, StartError};
use crate::memory::lease::MemoryLease;
use crate::memory::process::ProcessAccount;
use crate::plan::constants::{EMERGENCY_RESERVE_BYTES, HEAP_KEPT_BYTES, PROCESS_BASELINE_BYTES};
use crate::plan::limit::MemoryLimit;
use crate::shared::Shared;
use crate::watch::ledger_report::counts::Counts;

/// The parts that hosted engines share, and the list of these engines.
pub struct EngineHost {
    plan: Plan,
    pub(crate) ledger: Arc<Ledger>,
    hosted_engines: Mutex<HostedEngines>,
    left: Condvar,
    process: ProcessAccount,
    _memory_lease: MemoryLease,
}

/// The hosted engines, and the counts of those that have left. Each engine is in exactly one of the two at any time,
/// so a sum of counts neither misses an engine nor counts it twice.
#[derive(Clone, Default)]
pub(crate) struct HostedEngines {
    pub here: Vec<HostedEngine>,
    pub past: Counts,
}

/// One hosted engine.
#[derive(Clone)]
pub(crate) struct HostedEngine {
    pub ledger: Arc<Ledger>,
    /// The engine's shared state; `None` while its weights are loaded.
    pub engine: Option<Arc<Shared>>,
}

impl HostedEngine {
    pub fn is(&self, ledger: &Arc<Ledger>) -> bool {
        Arc::ptr_eq(&self.ledger, ledger)
    }
}

/// An engine's entry in the engine host; dropping it removes the entry.
pub(crate) struct HostedLease {
    engine_host: Arc<EngineHost>,
    ledger: Arc<Ledger>,
}

impl EngineHost {
    /// Returns the engine host's plan under `limit`. The HTTP side may take `http_bytes` for all models together.
    pub fn planned(http_bytes: u64, limit: &MemoryLimit) -> Plan {
        let entry = |component, bytes, detail: &str| PlanLine { component, bytes, detail: detail.into() };
        let blocks = plimsoll_memory::emergency_reserve::BLOCKS;
        Plan {
            limit: limit.bytes,
            limit_source: limit.source.clone(),
            device: None,
            lines: vec![
                entry(
                    Component::HostHeap,
                    http_bytes + HEAP_KEPT_BYTES,
                    "upper limit of all models, not expected use: connections, bodies, parsing, what the allocator keeps",
                ),
                entry(Component::ProcessBaseline, PROCESS_BASELINE_BYTES, "data, runtime"),
                entry(
                    Component::EmergencyReserve,
                    EMERGENCY_RESERVE_BYTES,
                    &format!("{blocks} blocks, one for each refused allocation"),
                ),
            ],
        }
    }

    /// Returns the limit for a single engine in an engine host with this plan.
    pub fn limit_in(plan: &Plan) -> MemoryLimit {
        let bytes = plan.limit.saturating_sub(plan.total());
        let source = format!("{}, less {} that all models share", plan.limit_source, Bytes(plan.total()));
        // The rest is for other engines too: a pool without a configured size does not take all of it.
        MemoryLimit { chosen: false, ..MemoryLimit::of_budget(bytes, source) }
    }

    /// Arms the heap's emergency reserve. The plan fits and is leased.
    pub(crate) fn build(plan: Plan, mut memory_lease: MemoryLease) -> Result<Arc<Self>, StartError> {
        let ledger = Arc::new(Ledger::new());
        plan.enter(&ledger);
        drop(heap::arm(EmergencyReserve::map(&ledger, EMERGENCY_RESERVE_BYTES)?));
        let process = ProcessAccount::default();
        process.measure(EMERGENCY_RESERVE_BYTES);
        memory_lease.built([plan.total(), ledger.committed_total()], [0; 2])?;
        Ok(Arc::new(Self {
            plan,
            ledger,
            hosted_engines: Mutex::default(),
            left: Condvar::new(),
            process,
            _memory_lease: memory_lease,
        }))
    }

    pub(crate) fn hosted_engines(&self) -> MutexGuard<'_, HostedEngines> {
        // A panic under the lock leaves the list and the sums valid.
        self.hosted_engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sum of `of` over the ledgers of all hosted engines.
    fn sum_of_hosted(&self, of: impl Fn(&Ledger) -> u64) -> u64 {
        self.hosted_engines().here.iter().map(|hosted_engine| of(&hosted_engine.ledger)).sum()
    }

    /// The engine host's own plan, with the limit.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Σ planned bytes of engine host and hosted engines.
    pub fn planned_total(&self) -> u64 {
        self.plan.total() + self.sum_of_hosted(planned)
    }

    /// Bytes under the memory limit that no plan has taken.
    pub fn room(&self) -> u64 {
        self.plan.limit.saturating_sub(self.planned_total())
    }

    /// Σ committed bytes of engine host and hosted engines; the engine host's memory is measured now.
    pub fn committed_total(&self) -> u64 {
        self.observe();
        self.ledger.committed_total() + self.sum_of_hosted(Ledger::committed_total)
    }

    /// The same, with mapped memory that is not touched yet.
    pub(crate) fn mapped_total(&self) -> u64 {
        self.observe();
        self.ledger.mapped_total() + self.sum_of_hosted(Ledger::mapped_total)
    }

    /// As [`Self::committed_total`], without the engine of `ledger`.
    pub(crate) fn committed_beside(&self, ledger: &Ledger) -> u64 {
        self.committed_total().saturating_sub(ledger.committed_total())
    }

    /// Admits an engine with the plan in `ledger`.
    pub(crate) fn admit(self: &Arc<Self>, ledger: &Arc<Ledger>) -> Result<HostedLease, NoRoom> {
        let mut hosted_engines = self.hosted_engines();
        let taken = self.plan.total()
            + hosted_engines.here.iter().map(|hosted_engine| planned(&hosted_engine.ledger)).sum::<u64>();
        let (needed, left) = (planned(ledger), self.plan.limit.saturating_sub(taken));
        if needed > left {
            return Err(NoRoom { what: "the model", needed, left, limit: self.plan.limit });
        }
        hosted_engines.here.push(HostedEngine { ledger: Arc::clone(ledger), engine: None });
        Ok(HostedLease { engine_host: Arc::clone(self), ledger: Arc::clone(ledger) })
    }

    /// Waits until the engine of `ledger` has left. False when that takes longer than `within`.
    pub(crate) fn wait_until_gone(&self, ledger: &Arc<Ledger>, within: Duration) -> bool {
        let here = |hosted_engines: &mut HostedEngines| {
            hosted_engines.here.iter().any(|hosted_engine| hosted_engine.is(ledger))
        };
        let waited = self.left.wait_timeout_while(self.hosted_engines(), within, here);
        let (hosted_engines, late) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(hosted_engines);
        !late.timed_out()
    }

    /// Ends all engines and waits until they have left, with their disk caches written. False when that takes longer than `within`.
    pub fn close(&self, within: Duration) -> bool {
        let hosted_engines = self.hosted_engines();
        for engine in hosted_engines.here.iter().flat_map(|hosted_engine| &hosted_engine.engine) {
            engine.shutdown.draining.store(true, Release);
            engine.shutdown.stop.store(true, Release);
        }
        let waited =
            self.left.wait_timeout_while(hosted_engines, within, |hosted_engines| !hosted_engines.here.is_empty());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Enters the bytes that the engine host holds now: heap that is in no hosted engine's account, and the process's own memory.
    fn observe(&self) {
        let owned = [
            Component::Tokenizer,
            Component::PrefixIndex,
            Component::DiskCache,
            Component::RequestTable,
            Component::EncoderOutputs,
            Component::MediaStaging,
        ];
        let accounts = self.sum_of_hosted(|ledger| {
            ledger.look();
            owned.iter().map(|component| ledger.row(*component).committed).sum()
        });
        self.process.observe(&self.ledger, accounts);
    }
}

/// Σ planned bytes of a ledger.
fn planned(ledger: &Ledger) -> u64 {
    ledger.rows().iter().map(|row| row.planned).sum()
}

impl Drop for EngineHost {
    fn drop(&mut self) {
        drop(heap::disarm());
    }
}

impl HostedLease {
    /// The host of the engine.
    pub fn engine_host(&self) -> &Arc<EngineHost> {
        &self.engine_host
    }

    /// Registers a built engine: its counts are read from now on.
    pub fn register(&self, engine: &Arc<Shared>) {
        let mut hosted_engines = self.engine_host.hosted_engines();
        let mine = hosted_engines.here.iter_mut().filter(|hosted_engine| hosted_engine.is(&self.ledger));
        mine.for_each(|hosted_engine| hosted_engine.engine = Some(Arc::clone(engine)));
    }
}

impl Drop for HostedLease {
    fn drop(&mut self) {
        let mut hosted_engines = self.engine_host.hosted_engines();
        let HostedEngines { here, past } = &mut *hosted_engines;
        let gone = here.iter().position(|hosted_engine| hosted_engine.is(&self.ledger)).map(|at| here.remove(at));
        gone.iter().flat_map(|hosted_engine| &hosted_engine.engine).for_each(|engine| past.add(&Counts::of(engine)));
        // `gone` may hold the last reference to the engine, so it is dropped after the lock is released.
        drop((hosted_engines, gone));
        self.engine_host.left.notify_all();
    }
}

/// Sums over the whole process: the engine host's where there is one, otherwise the engine's own.
pub(crate) struct ProcessSums<'a> {
    pub engine: &'a Shared,
    pub engine_host: Option<&'a EngineHost>,
}

impl ProcessSums<'_> {
    /// Planned bytes.
    pub fn planned(&self) -> u64 {
        self.engine_host.map_or_else(|| self.engine.plan.total(), EngineHost::planned_total)
    }

    /// Committed bytes.
    pub fn committed(&self) -> u64 {
        self.engine_host.map_or_else(|| self.engine.ledger.committed_total(), EngineHost::committed_total)
    }

    /// Committed bytes, and mapped bytes that are not touched yet.
    pub fn mapped(&self) -> u64 {
        self.engine_host.map_or_else(|| self.engine.ledger.mapped_total(), EngineHost::mapped_total)
    }

    /// The memory limit.
    pub fn limit(&self) -> u64 {
        self.engine_host.map_or(self.engine.plan.limit, |engine_host| engine_host.plan().limit)
    }
}
