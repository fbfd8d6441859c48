//! The plan: the most bytes of every component, and the memory limit.
//!
//! A plan is a value. `plimsoll plan` prints it, start-up builds its parts, and admission computes with it (I8).

use std::fmt;

use serde::Serialize;

use crate::{Bytes, Component, Ledger};

/// One component's share, with the arithmetic behind it as text.
#[derive(Clone, Debug, Serialize)]
pub struct PlanLine {
    /// The component.
    pub component: Component,
    /// Planned bytes.
    pub bytes: u64,
    /// The arithmetic behind the number, for people.
    pub detail: String,
}

/// The memory of a GPU that has its own.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceLimit {
    /// The most that this process may use of it, in bytes.
    pub limit: u64,
    /// Where the limit comes from, for people.
    pub source: String,
}

/// The whole tree: every component under one limit, or, on a GPU with memory of its own, under two.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The memory limit: the most bytes that this process may use.
    pub limit: u64,
    /// Where the limit comes from, for people.
    pub limit_source: String,
    /// The limit of a GPU's own memory, where there is one. Components on the device are under it ([`Component::on_device`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceLimit>,
    /// The components.
    pub lines: Vec<PlanLine>,
}

impl Plan {
    /// Σ planned bytes in the machine's memory.
    pub fn total(&self) -> u64 {
        self.lines.iter().filter(|line| !self.apart(line.component)).map(|line| line.bytes).sum()
    }

    /// Σ planned bytes in a GPU's own memory; 0 without one.
    pub fn device_total(&self) -> u64 {
        self.lines.iter().filter(|line| self.apart(line.component)).map(|line| line.bytes).sum()
    }

    /// Whether a component is under the GPU's limit.
    pub fn apart(&self, component: Component) -> bool {
        self.device.is_some() && component.on_device()
    }

    /// Planned bytes of one component; 0 when it is not in the plan.
    pub fn bytes(&self, component: Component) -> u64 {
        let of = |l: &&PlanLine| l.component == component;
        self.lines.iter().filter(of).map(|l| l.bytes).sum()
    }

    /// Bytes by which the plan exceeds the memory limit; 0 when it fits.
    pub fn shortfall(&self) -> u64 {
        let device = self.device.as_ref().map_or(0, |device| self.device_total().saturating_sub(device.limit));
        self.total().saturating_sub(self.limit).max(device)
    }

    fn write_lines(&self, f: &mut fmt::Formatter<'_>, apart: bool) -> fmt::Result {
        for line in self.lines.iter().filter(|line| self.apart(line.component) == apart) {
            let bytes = Bytes(line.bytes).to_string();
            writeln!(f, "  {:<17} {bytes:>11}   {}", line.component.name(), line.detail)?;
        }
        Ok(())
    }

    /// Writes every line's planned bytes into the ledger.
    pub fn enter(&self, ledger: &Ledger) {
        ledger.set_apart(self.device.is_some());
        for component in Component::ALL {
            ledger.plan(component, self.bytes(component));
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_lines(f, true)?;
        if let Some(device) = &self.device {
            let (total, limit) = (Bytes(self.device_total()).to_string(), Bytes(device.limit).to_string());
            writeln!(f, "  {:<17} {total:>11}", "total on the GPU")?;
            writeln!(f, "  {:<17} {limit:>11}   {}", "GPU memory limit", device.source)?;
        }
        self.write_lines(f, false)?;
        let total = Bytes(self.total()).to_string();
        let limit = Bytes(self.limit).to_string();
        writeln!(f, "  {:<17} {total:>11}", "total")?;
        write!(f, "  {:<17} {limit:>11}   {}", "memory limit", self.limit_source)
    }
}
