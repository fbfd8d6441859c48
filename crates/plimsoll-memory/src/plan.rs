//! The plan: what every component may take, and where the line lies.
//!
//! A plan is a value. `plimsoll plan` prints it, start-up builds what it says, admission prices with it (I8).

use std::fmt;

use serde::Serialize;

use crate::{Bytes, Component, Ledger};

/// One component's share, with the arithmetic behind it in words.
#[derive(Clone, Debug, Serialize)]
pub struct PlanLine {
    /// The component.
    pub component: Component,
    /// Planned bytes.
    pub bytes: u64,
    /// How the number comes about, for people.
    pub detail: String,
}

/// The whole tree: every component under one line.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The line: the most this process may use, in bytes.
    pub limit: u64,
    /// Where the line comes from, for people.
    pub limit_source: String,
    /// The components.
    pub lines: Vec<PlanLine>,
}

impl Plan {
    /// Σ planned bytes.
    pub fn total(&self) -> u64 {
        self.lines.iter().map(|l| l.bytes).sum()
    }

    /// Planned bytes of one component; 0 when it is not in the plan.
    pub fn bytes(&self, component: Component) -> u64 {
        let of = |l: &&PlanLine| l.component == component;
        self.lines.iter().filter(of).map(|l| l.bytes).sum()
    }

    /// Bytes by which the plan exceeds the memory limit; 0 when it fits.
    pub fn shortfall(&self) -> u64 {
        self.total().saturating_sub(self.limit)
    }

    /// Writes every line's planned bytes into the ledger.
    pub fn enter(&self, ledger: &Ledger) {
        for component in Component::ALL {
            ledger.plan(component, self.bytes(component));
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            let name = line.component.name();
            let bytes = Bytes(line.bytes).to_string();
            writeln!(f, "  {name:<17} {bytes:>11}   {}", line.detail)?;
        }
        let total = Bytes(self.total()).to_string();
        let limit = Bytes(self.limit).to_string();
        writeln!(f, "  {:<17} {total:>11}", "total")?;
        write!(f, "  {:<17} {limit:>11}   {}", "line", self.limit_source)
    }
}
