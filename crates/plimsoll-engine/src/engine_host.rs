//! The engine host: what a process holds once, however many engines live in it: the HTTP side's heap, the process itself, the emergency reserve.
//!
//! An engine alone plans all of that as its own. Where several share one line, each plans only what goes with it
//! ([`crate::Options::hosted`]) and is a resident here, from before its first byte until its thread has given the last one back. The sum of the
//! engine host and its residents stays under the line. What must not be in here: which model is loaded or has to go (the server).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use plimsoll_memory::{Bytes, Component, EmergencyReserve, Ledger, Plan, PlanLine, heap};

use crate::handle::{EngineHandle, Shared};
use crate::memory_lease::MemoryLease;
use crate::planner::{EMERGENCY_RESERVE_BYTES, HEAP_KEPT_BYTES, Line, PROCESS_BASELINE_BYTES};
use crate::process::ProcessAccount;
use crate::report::{Counts, LedgerReport, Whole, looked_at};
use crate::startup::{Host, StartError};

/// What the hosted engines share, and the list of these engines.
pub struct EngineHost {
    plan: Plan,
    ledger: Arc<Ledger>,
    hosted_engines: Mutex<HostedEngines>,
    left: Condvar,
    process: ProcessAccount,
    _memory_lease: MemoryLease,
}

/// The hosted engines, and the counts of those that have left. Each engine is in exactly one of the two at any time,
/// so a sum of counts neither misses an engine nor counts it twice.
#[derive(Clone, Default)]
struct HostedEngines {
    here: Vec<HostedEngine>,
    past: Counts,
}

/// One hosted engine.
#[derive(Clone)]
pub(crate) struct HostedEngine {
    pub ledger: Arc<Ledger>,
    /// None while its weights are loaded.
    pub engine: Option<Arc<Shared>>,
}

impl HostedEngine {
    fn is(&self, ledger: &Arc<Ledger>) -> bool {
        Arc::ptr_eq(&self.ledger, ledger)
    }
}

/// An engine's place in the engine host; it moves out when this is dropped.
pub(crate) struct HostedLease {
    engine_host: Arc<EngineHost>,
    ledger: Arc<Ledger>,
}

/// The engine host itself does not fit under the memory limit, or an engine does not fit into the host.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what} needs {} of which {} are left under the line of {}", Bytes(*needed), Bytes(*left), Bytes(*line))]
pub struct NoRoom {
    /// The part that does not fit.
    pub what: &'static str,
    /// Bytes it needs.
    pub needed: u64,
    /// Bytes that no plan has taken.
    pub left: u64,
    /// The memory limit.
    pub line: u64,
}

impl EngineHost {
    /// What the engine host takes under `line`, where the HTTP side may take `http_bytes` for all models together.
    pub fn planned(http_bytes: u64, line: &Line) -> Plan {
        let entry = |component, bytes, detail: &str| PlanLine { component, bytes, detail: detail.into() };
        let blocks = plimsoll_memory::emergency_reserve::BLOCKS;
        Plan {
            limit: line.bytes,
            limit_source: line.source.clone(),
            lines: vec![
                entry(
                    Component::HostHeap,
                    http_bytes + HEAP_KEPT_BYTES,
                    "an allowance for all models, a bound and no forecast: connections, bodies, parsing, what the allocator keeps",
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

    /// The line as an engine alone in an engine host of this plan sees it.
    pub fn line_in(plan: &Plan) -> Line {
        let bytes = plan.limit.saturating_sub(plan.total());
        let source = format!("{}, less {} that all models share", plan.limit_source, Bytes(plan.total()));
        // The rest is for other engines too: a pool without a configured size does not take all of it.
        Line { chosen: false, ..Line::of_budget(bytes, source) }
    }

    /// Plans the engine host under the machine's line, leases it, and puts the emergency reserve into the heap's keeping.
    ///
    /// # Errors
    /// [`StartError::NoRoom`] when the line does not even hold this; otherwise as of a start.
    pub fn open(http_bytes: u64, host: &Host) -> Result<Arc<Self>, StartError> {
        let plan = Self::planned(http_bytes, &host.line);
        if plan.shortfall() > 0 {
            let (needed, left) = (plan.total(), plan.limit);
            return Err(NoRoom { what: "what all models share", needed, left, line: plan.limit }.into());
        }
        let mut memory_lease = MemoryLease::take(plan.total(), 0, host.lease_dir.clone(), &host.root, &host.limits)?;
        let ledger = Arc::new(Ledger::new());
        plan.enter(&ledger);
        drop(heap::arm(EmergencyReserve::map(&ledger, EMERGENCY_RESERVE_BYTES)?));
        let process = ProcessAccount::default();
        process.measure(EMERGENCY_RESERVE_BYTES);
        memory_lease.built(plan.total(), ledger.committed_total())?;
        Ok(Arc::new(Self {
            plan,
            ledger,
            hosted_engines: Mutex::default(),
            left: Condvar::new(),
            process,
            _memory_lease: memory_lease,
        }))
    }

    fn hosted_engines(&self) -> MutexGuard<'_, HostedEngines> {
        // A panic under the lock leaves the list and the sums valid.
        self.hosted_engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sum of what `of` says of every resident's ledger.
    fn residents(&self, of: impl Fn(&Ledger) -> u64) -> u64 {
        self.hosted_engines().here.iter().map(|hosted_engine| of(&hosted_engine.ledger)).sum()
    }

    /// What the engine host itself plans, and the line.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Σ planned bytes of engine host and residents.
    pub fn planned_total(&self) -> u64 {
        self.plan.total() + self.residents(planned)
    }

    /// Bytes under the memory limit that no plan has taken.
    pub fn room(&self) -> u64 {
        self.plan.limit.saturating_sub(self.planned_total())
    }

    /// Σ committed bytes of engine host and residents; what is measured in the engine host is measured now.
    pub fn committed_total(&self) -> u64 {
        self.observe();
        self.ledger.committed_total() + self.residents(Ledger::committed_total)
    }

    /// The same with what is mapped and not there yet.
    pub(crate) fn mapped_total(&self) -> u64 {
        self.observe();
        self.ledger.mapped_total() + self.residents(Ledger::mapped_total)
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
            return Err(NoRoom { what: "the model", needed, left, line: self.plan.limit });
        }
        hosted_engines.here.push(HostedEngine { ledger: Arc::clone(ledger), engine: None });
        Ok(HostedLease { engine_host: Arc::clone(self), ledger: Arc::clone(ledger) })
    }

    /// Enters what the engine host holds now: the heap that is in no resident's account, and the process's own.
    fn observe(&self) {
        let owned = [
            Component::Tokenizer,
            Component::PrefixIndex,
            Component::RequestTable,
            Component::EncoderOutputs,
            Component::MediaStaging,
        ];
        let accounts = self.residents(|ledger| {
            ledger.look();
            owned.iter().map(|component| ledger.row(*component).committed).sum()
        });
        self.process.observe(&self.ledger, accounts);
    }

    /// House and residents as one report, in the shape of an engine's own. Those that are none of `engines` are on their way in or out:
    /// they hold bytes, and have no more to say.
    pub fn report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.told(engines, true)
    }

    /// The same without `engines`: what all share, and what is on its way.
    pub fn beside(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.told(engines, false)
    }

    fn told(&self, engines: &[&EngineHandle], with: bool) -> LedgerReport {
        let (process, _) = looked_at(|| {
            // The host counts what no engine counts, so the engines are observed first.
            engines.iter().filter(|_| with).for_each(|engine| engine.shared.observe_accounts());
            self.committed_total()
        });
        // An engine that leaves after this line is still in `here`. One that left before is counted in `past`, even
        // if `engines` still lists it.
        let HostedEngines { here, past } = self.hosted_engines().clone();
        let (known, moving): (Vec<HostedEngine>, Vec<HostedEngine>) = here
            .into_iter()
            .partition(|hosted_engine| engines.iter().any(|engine| hosted_engine.is(&engine.shared.ledger)));
        let known: Vec<&Shared> =
            known.iter().filter(|_| with).filter_map(|hosted_engine| hosted_engine.engine.as_deref()).collect();
        let (plan, ledger) = (&self.plan, &*self.ledger);
        LedgerReport::whole(&Whole { plan, ledger, engines: &known, moving: &moving, past, process })
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
    /// The engine stands, and knows where it lives.
    pub fn register(&self, engine: &Arc<Shared>) {
        let _ = engine.engine_host.set(Arc::clone(&self.engine_host));
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

impl EngineHandle {
    /// Ends the engine and waits until it has moved out of its engine host, its memory given back. False when that took longer than `within`.
    pub fn move_out(&self, within: Duration) -> bool {
        self.stop();
        let Some(engine_host) = self.shared.engine_host.get() else { return self.stopped() };
        let deadline = Instant::now() + within;
        let here = |hosted_engines: &mut HostedEngines| {
            hosted_engines.here.iter().any(|hosted_engine| hosted_engine.is(&self.shared.ledger))
        };
        let rest = deadline.saturating_duration_since(Instant::now());
        let waited = engine_host.left.wait_timeout_while(engine_host.hosted_engines(), rest, here);
        let (hosted_engines, late) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(hosted_engines);
        !late.timed_out()
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_memory::Component;

    use super::*;
    use crate::Options;

    #[test]
    fn residents_stay_under_the_line_and_leave_their_room_behind() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { memory_budget: Some("64MiB".parse().unwrap()), ..Options::default() };
        let host = Host { lease_dir: Some(dir.path().join("leases")), ..Host::read(&options).unwrap() };
        let engine_host = EngineHost::open(8 << 20, &host).unwrap();
        let shared = engine_host.plan().total();
        assert_eq!((engine_host.planned_total(), engine_host.room()), (shared, (64 << 20) - shared));
        let ledger = |bytes| {
            let ledger = Arc::new(Ledger::new());
            ledger.plan(Component::Weights, bytes);
            ledger
        };
        let first = engine_host.admit(&ledger(engine_host.room() - 10)).unwrap();
        assert_eq!(engine_host.room(), 10);
        let refused = engine_host.admit(&ledger(11)).err().unwrap();
        assert_eq!((refused.needed, refused.left, refused.line), (11, 10, 64 << 20));
        assert!(refused.to_string().contains("64.0 MiB"), "{refused}");
        let second = engine_host.admit(&ledger(10)).unwrap();
        assert_eq!(engine_host.room(), 0);
        // The report counts hosted engines that are loading or shutting down.
        let report = engine_host.report(&[]);
        assert_eq!(report.planned_bytes, 64 << 20);
        let weights = report.components.iter().find(|row| row.component == Component::Weights.name()).unwrap();
        assert_eq!(weights.planned_bytes, (64 << 20) - shared);
        drop(first);
        drop(second);
        assert_eq!(engine_host.planned_total(), shared);
        assert!(heap::armed());
        drop(engine_host);
        assert!(!heap::armed(), "the emergency reserve goes with the engine host");
        let tight = Host { lease_dir: Some(dir.path().join("leases")), ..Host::read(&options).unwrap() };
        assert!(matches!(EngineHost::open(1 << 30, &tight), Err(StartError::NoRoom(_))));
    }
}
