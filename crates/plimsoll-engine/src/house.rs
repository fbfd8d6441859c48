//! The house: what a process holds once, however many engines live in it: the HTTP side's heap, the process itself, the canary.
//!
//! An engine alone plans all of that as its own. Where several share one line, each plans only what goes with it
//! ([`crate::Options::guest`]) and is a resident here, from before its first byte until its thread has given the last one back. The sum of the
//! house and its residents stays under the line. What must not be in here: which model is loaded or has to go (the server).

use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use plimsoll_memory::{Bytes, Canary, Component, Ledger, Plan, PlanLine, heap};

use crate::berth::Berth;
use crate::handle::{EngineHandle, Shared};
use crate::planner::{CANARY_BYTES, HEAP_KEPT_BYTES, Line, PROCESS_BASELINE_BYTES};
use crate::process::ProcessAccount;
use crate::report::{LedgerReport, Requests, Whole, looked_at};
use crate::startup::{Host, StartError};

/// What the residents share, and who they are.
pub struct House {
    plan: Plan,
    ledger: Arc<Ledger>,
    residents: Mutex<Vec<Arc<Ledger>>>,
    left: Condvar,
    /// What those who have moved out had done.
    past: Mutex<Past>,
    process: ProcessAccount,
    _berth: Berth,
}

/// Requests and steps of engines that are gone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Past {
    pub requests: Requests,
    pub steps: u64,
}

/// An engine's place in the house; it moves out when this is dropped.
pub(crate) struct Resident {
    house: Arc<House>,
    ledger: Arc<Ledger>,
}

/// A house that is to be opened does not fit, or a resident does not fit into it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what} needs {} of which {} are left under the line of {}", Bytes(*needed), Bytes(*left), Bytes(*line))]
pub struct NoRoom {
    /// Who.
    pub what: &'static str,
    /// Bytes it needs.
    pub needed: u64,
    /// Bytes that nobody has planned.
    pub left: u64,
    /// The line.
    pub line: u64,
}

impl House {
    /// What the house takes under `line`, where the HTTP side may take `http_bytes` for all models together.
    pub fn planned(http_bytes: u64, line: &Line) -> Plan {
        let entry = |component, bytes, detail: &str| PlanLine { component, bytes, detail: detail.into() };
        let slices = plimsoll_memory::canary::SLICES;
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
                    Component::Canary,
                    CANARY_BYTES,
                    &format!("ballast in {slices} slices, one for each refused allocation"),
                ),
            ],
        }
    }

    /// The line as an engine alone in a house of this plan sees it.
    pub fn line_in(plan: &Plan) -> Line {
        let bytes = plan.limit.saturating_sub(plan.total());
        let source = format!("{}, less {} that all models share", plan.limit_source, Bytes(plan.total()));
        // What is left is for others, too: a pool whose size nobody names does not take all of it.
        Line { chosen: false, ..Line::of_budget(bytes, source) }
    }

    /// Plans the house under the machine's line, leases it, and puts the canary into the heap's keeping.
    ///
    /// # Errors
    /// [`StartError::NoRoom`] when the line does not even hold this; otherwise as of a start.
    pub fn open(http_bytes: u64, host: &Host) -> Result<Arc<Self>, StartError> {
        let plan = Self::planned(http_bytes, &host.line);
        if plan.shortfall() > 0 {
            let (needed, left) = (plan.total(), plan.limit);
            return Err(NoRoom { what: "what all models share", needed, left, line: plan.limit }.into());
        }
        let mut berth = Berth::take(plan.total(), 0, host.lease_dir.clone(), &host.root, &host.limits)?;
        let ledger = Arc::new(Ledger::new());
        plan.enter(&ledger);
        drop(heap::arm(Canary::map(&ledger, CANARY_BYTES)?));
        let process = ProcessAccount::default();
        process.measure(CANARY_BYTES);
        berth.built(plan.total(), ledger.committed_total())?;
        Ok(Arc::new(Self {
            plan,
            ledger,
            residents: Mutex::default(),
            left: Condvar::new(),
            past: Mutex::default(),
            process,
            _berth: berth,
        }))
    }

    fn residents(&self) -> MutexGuard<'_, Vec<Arc<Ledger>>> {
        // A list of ledgers is whole whoever panicked.
        self.residents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the house itself plans, and the line.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Σ planned bytes of house and residents.
    pub fn planned_total(&self) -> u64 {
        self.plan.total() + self.residents().iter().map(|ledger| planned(ledger)).sum::<u64>()
    }

    /// Bytes under the line that nobody has planned.
    pub fn room(&self) -> u64 {
        self.plan.limit.saturating_sub(self.planned_total())
    }

    /// Σ committed bytes of house and residents; what is measured in the house is measured now.
    pub fn committed_total(&self) -> u64 {
        self.observe();
        self.ledger.committed_total() + self.residents().iter().map(|ledger| ledger.committed_total()).sum::<u64>()
    }

    /// The same with what is mapped and not there yet.
    pub(crate) fn mapped_total(&self) -> u64 {
        self.observe();
        self.ledger.mapped_total() + self.residents().iter().map(|ledger| ledger.mapped_total()).sum::<u64>()
    }

    /// As [`Self::committed_total`], without the engine of `ledger`.
    pub(crate) fn committed_beside(&self, ledger: &Ledger) -> u64 {
        self.committed_total().saturating_sub(ledger.committed_total())
    }

    /// Takes in an engine whose plan stands in `ledger`.
    pub(crate) fn admit(self: &Arc<Self>, ledger: &Arc<Ledger>) -> Result<Resident, NoRoom> {
        let mut residents = self.residents();
        let taken = self.plan.total() + residents.iter().map(|ledger| planned(ledger)).sum::<u64>();
        let (needed, left) = (planned(ledger), self.plan.limit.saturating_sub(taken));
        if needed > left {
            return Err(NoRoom { what: "the model", needed, left, line: self.plan.limit });
        }
        residents.push(Arc::clone(ledger));
        Ok(Resident { house: Arc::clone(self), ledger: Arc::clone(ledger) })
    }

    /// Enters what the house holds now: the heap that is in no resident's account, and the process's own.
    fn observe(&self) {
        let owned = [
            Component::Tokenizer,
            Component::PrefixIndex,
            Component::RequestTable,
            Component::EncoderOutputs,
            Component::MediaStaging,
        ];
        self.residents().iter().for_each(|ledger| ledger.look());
        let accounts: u64 =
            self.residents().iter().flat_map(|ledger| owned.map(|component| ledger.row(component).committed)).sum();
        self.process.observe(&self.ledger, accounts);
    }

    /// House and residents as one report, in the shape of an engine's own. Those that are none of `engines` are on their way in or out:
    /// they hold bytes, and have no more to say.
    pub fn report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        let shared: Vec<&Shared> = engines.iter().map(|engine| &*engine.shared).collect();
        self.told(&shared, &self.moving(engines))
    }

    /// The same without `engines`: what all share, and what is on its way.
    pub fn beside(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.told(&[], &self.moving(engines))
    }

    fn moving(&self, engines: &[&EngineHandle]) -> Vec<Arc<Ledger>> {
        let moves = |ledger: &&Arc<Ledger>| !engines.iter().any(|engine| Arc::ptr_eq(ledger, &engine.shared.ledger));
        self.residents().iter().filter(moves).cloned().collect()
    }

    fn told(&self, engines: &[&Shared], moving: &[Arc<Ledger>]) -> LedgerReport {
        let (process, _) = looked_at(|| {
            // The house counts what no resident does, so the residents are looked at first.
            engines.iter().for_each(|engine| engine.observe_accounts());
            self.committed_total()
        });
        let past = *self.past.lock().unwrap_or_else(PoisonError::into_inner);
        LedgerReport::whole(&Whole { plan: &self.plan, ledger: &self.ledger, engines, moving, past, process })
    }
}

/// Σ planned bytes of a ledger.
fn planned(ledger: &Ledger) -> u64 {
    ledger.rows().iter().map(|row| row.planned).sum()
}

impl Drop for House {
    fn drop(&mut self) {
        drop(heap::disarm());
    }
}

impl Resident {
    pub fn house(&self) -> &Arc<House> {
        &self.house
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.house.residents().retain(|ledger| !Arc::ptr_eq(ledger, &self.ledger));
        self.house.left.notify_all();
    }
}

impl EngineHandle {
    /// Ends the engine and waits until it has moved out of its house, its memory given back. False when that took longer than `within`.
    pub fn move_out(&self, within: Duration) -> bool {
        self.stop();
        let Some(house) = self.shared.house.get() else { return self.stopped() };
        let deadline = Instant::now() + within;
        let here = |residents: &mut Vec<Arc<Ledger>>| residents.iter().any(|l| Arc::ptr_eq(l, &self.shared.ledger));
        let rest = deadline.saturating_duration_since(Instant::now());
        let waited = house.left.wait_timeout_while(house.residents(), rest, here);
        let (residents, late) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(residents);
        let mut past = house.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.requests.add(&Requests::of(&self.shared));
        past.steps += self.shared.status.steps.load(Acquire);
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
        let house = House::open(8 << 20, &host).unwrap();
        let shared = house.plan().total();
        assert_eq!((house.planned_total(), house.room()), (shared, (64 << 20) - shared));
        let ledger = |bytes| {
            let ledger = Arc::new(Ledger::new());
            ledger.plan(Component::Weights, bytes);
            ledger
        };
        let first = house.admit(&ledger(house.room() - 10)).unwrap();
        assert_eq!(house.room(), 10);
        let refused = house.admit(&ledger(11)).err().unwrap();
        assert_eq!((refused.needed, refused.left, refused.line), (11, 10, 64 << 20));
        assert!(refused.to_string().contains("64.0 MiB"), "{refused}");
        let second = house.admit(&ledger(10)).unwrap();
        assert_eq!(house.room(), 0);
        // Who has no engine yet, or none any more, is in the books all the same.
        let report = house.report(&[]);
        assert_eq!(report.planned_bytes, 64 << 20);
        let weights = report.components.iter().find(|row| row.component == Component::Weights.name()).unwrap();
        assert_eq!(weights.planned_bytes, (64 << 20) - shared);
        drop(first);
        drop(second);
        assert_eq!(house.planned_total(), shared);
        assert!(heap::armed());
        drop(house);
        assert!(!heap::armed(), "the canary goes with the house");
        let tight = Host { lease_dir: Some(dir.path().join("leases")), ..Host::read(&options).unwrap() };
        assert!(matches!(House::open(1 << 30, &tight), Err(StartError::NoRoom(_))));
    }
}
