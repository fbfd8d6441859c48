//! Components of plan and ledger, in the machine's memory and a GPU's.

use plimsoll_memory::ledger::Row;
use plimsoll_memory::{Ledger, Plan};
use serde::Serialize;

/// The memory of a GPU that has its own. Its components are among the other rows.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceMemory {
    /// The most bytes that this process may use there.
    pub line_bytes: u64,
    /// Where that limit comes from.
    pub line_source: String,
    /// Σ planned there.
    pub planned_bytes: u64,
    /// Σ committed there.
    pub committed_bytes: u64,
}

impl DeviceMemory {
    pub(super) fn of(plan: &Plan, ledger: &Ledger) -> Option<Self> {
        let device = plan.device.as_ref()?;
        let (line_bytes, line_source) = (device.limit, device.source.clone());
        let (planned_bytes, committed_bytes) = (plan.device_total(), ledger.committed_on_device());
        Some(Self { line_bytes, line_source, planned_bytes, committed_bytes })
    }
}

/// One component of plan and ledger.
#[derive(Clone, Debug, Serialize)]
pub struct ComponentRow {
    /// Its name.
    pub component: &'static str,
    /// Whether it lies in the memory of a GPU that has its own, under that GPU's limit.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub on_device: bool,
    /// Bytes that the plan allows.
    pub planned_bytes: u64,
    /// Bytes that it holds.
    pub committed_bytes: u64,
    /// The most bytes that it ever held.
    pub peak_bytes: u64,
    /// The arithmetic behind the planned bytes, as text.
    pub detail: String,
}

impl ComponentRow {
    pub(super) fn of(row: Row, plan: &Plan) -> Self {
        let line = plan.lines.iter().find(|line| line.component == row.component);
        Self {
            component: row.component.name(),
            on_device: plan.apart(row.component),
            planned_bytes: row.planned,
            committed_bytes: row.committed,
            peak_bytes: row.peak,
            detail: line.map_or_else(String::new, |line| line.detail.clone()),
        }
    }
}
