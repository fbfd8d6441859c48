//! Engines that share a process, through their handles: a report of all engines, and the end of one.

use std::time::Duration;

use super::EngineHandle;
use crate::shared::Shared;
use crate::watch::host::{EngineHost, HostedEngine, HostedEngines};
use crate::watch::ledger_report::{LedgerReport, Whole, looked_at};

impl EngineHost {
    /// Returns one report of the host and its engines, in the shape of an engine's own report. Engines that are not in
    /// `engines` are starting or ending: the report has only their bytes.
    pub fn report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.report_of(engines, true)
    }

    /// Returns the host's part of [`Self::report`]: shared memory, and engines that are starting or ending.
    pub fn shared_report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        self.report_of(engines, false)
    }

    fn report_of(&self, engines: &[&EngineHandle], with: bool) -> LedgerReport {
        let (process, _) = looked_at(|| {
            // The host's total includes memory that no engine counts, so the engines are observed first.
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
        let (plan, ledger) = (self.plan(), &*self.ledger);
        LedgerReport::whole(&Whole { plan, ledger, engines: &known, moving: &moving, past, process })
    }
}

impl EngineHandle {
    /// Ends the engine and waits until it has left its engine host and its memory is free. False when that took longer
    /// than `within`.
    pub fn move_out(&self, within: Duration) -> bool {
        self.stop();
        let Some(engine_host) = &self.engine_host else { return self.stopped() };
        engine_host.wait_until_gone(&self.shared.ledger, within)
    }
}
