//! The ledger: planned, committed and peak bytes of every component, always current.
//!
//! Fixed arrays of atomics, so that reading it never blocks the engine and keeping it costs one addition.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use crate::host::touched_in;

/// A use of memory: one line of the plan, one row of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(usize)]
pub enum Component {
    /// Packed model weights.
    Weights,
    /// The most recently used rows of tables that stay in the model's files.
    TableCache,
    /// Pages of the key/value cache.
    KvPages,
    /// Slots of recurrent state: one position's state of one sequence each.
    StateSlots,
    /// Temporaries of one forward step, logits included.
    StepWorkspace,
    /// Host buffers for transfers to and from a GPU with memory of its own.
    Transfers,
    /// A GPU's own memory for its driver and a margin.
    DeviceReserve,
    /// Output rows of media encoders, and the patches of a batch before it is encoded.
    EncoderOutputs,
    /// Media while they are decoded, and their pixels.
    MediaStaging,
    /// Running and waiting requests: token ids, page tables, outputs not yet read.
    RequestTable,
    /// Nodes of the prefix index.
    PrefixIndex,
    /// Buffers and index of the prefix cache on disk.
    DiskCache,
    /// Vocabulary, merges, chat template and sampler scratch.
    Tokenizer,
    /// All other heap memory: HTTP bodies, connections, parsing.
    HostHeap,
    /// The process before it holds any other component: code, stacks, runtime.
    ProcessBaseline,
    /// The emergency reserve. A block is given back for each refused allocation.
    EmergencyReserve,
}

impl Component {
    /// All components, in the order in which the plan prints them.
    pub const ALL: [Component; 16] = [
        Component::Weights,
        Component::TableCache,
        Component::KvPages,
        Component::StateSlots,
        Component::StepWorkspace,
        Component::Transfers,
        Component::DeviceReserve,
        Component::EncoderOutputs,
        Component::MediaStaging,
        Component::RequestTable,
        Component::PrefixIndex,
        Component::DiskCache,
        Component::Tokenizer,
        Component::HostHeap,
        Component::ProcessBaseline,
        Component::EmergencyReserve,
    ];

    /// Whether the component lies in the GPU's memory, for a GPU with memory of its own.
    pub fn on_device(self) -> bool {
        use Component::{DeviceReserve, KvPages, StateSlots, StepWorkspace, Weights};
        matches!(self, Weights | KvPages | StateSlots | StepWorkspace | DeviceReserve)
    }

    /// The name in metrics, JSON and the printed plan.
    pub fn name(self) -> &'static str {
        match self {
            Component::Weights => "weights",
            Component::TableCache => "table_cache",
            Component::KvPages => "kv_pages",
            Component::StateSlots => "state_slots",
            Component::StepWorkspace => "step_workspace",
            Component::Transfers => "transfers",
            Component::DeviceReserve => "device_reserve",
            Component::EncoderOutputs => "encoder_outputs",
            Component::MediaStaging => "media_staging",
            Component::RequestTable => "request_table",
            Component::PrefixIndex => "prefix_index",
            Component::DiskCache => "disk_cache",
            Component::Tokenizer => "tokenizer",
            Component::HostHeap => "host_heap",
            Component::ProcessBaseline => "process_baseline",
            Component::EmergencyReserve => "emergency_reserve",
        }
    }
}

const COUNT: usize = Component::ALL.len();

/// One component's row of the ledger, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Row {
    /// The component.
    pub component: Component,
    /// Bytes that the plan allows.
    pub planned: u64,
    /// Bytes that are taken now.
    pub committed: u64,
    /// The most bytes that were ever taken.
    pub peak: u64,
}

/// Planned, committed and peak bytes per component, and the count of device allocations.
///
/// I2 (committed ≤ planned) is asserted in debug builds whenever a component grows.
#[derive(Debug, Default)]
pub struct Ledger {
    planned: [AtomicU64; COUNT],
    committed: [AtomicU64; COUNT],
    peak: [AtomicU64; COUNT],
    sealed: AtomicBool,
    /// Whether components on a device lie in the GPU's own memory.
    apart: AtomicBool,
    /// Bytes of `committed` that are pages of mapped files ([`crate::HeldFile`]).
    held_files: AtomicU64,
    allocations: AtomicU64,
    allocations_after_seal: AtomicU64,
    /// Elastic mappings, each with its component: their pages appear on first use and may be given back. The lock is taken when a mapping
    /// is added or removed and when pages are counted. No step takes it. The emergency reserve does not take it either, because it may have
    /// to be given up at any moment.
    elastic: Mutex<Vec<(Component, Range<u64>)>>,
}

impl Ledger {
    /// An empty ledger: nothing planned, nothing committed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the bytes that the plan allows for `component`. Fewer bytes than before are the plan of a smaller generation, so the peak
    /// starts again from the committed bytes.
    pub fn plan(&self, component: Component, bytes: u64) {
        let i = component as usize;
        let before = self.planned[i].swap(bytes, Relaxed);
        if bytes < before {
            self.peak[i].store(self.committed[i].load(Relaxed), Relaxed);
        }
    }

    /// Sets whether components on a device lie in the GPU's own memory instead of the machine's.
    pub fn set_apart(&self, apart: bool) {
        self.apart.store(apart, Relaxed);
    }

    /// Whether `component` lies in the memory of this machine.
    pub fn on_host(&self, component: Component) -> bool {
        !(component.on_device() && self.apart.load(Relaxed))
    }

    /// Records that `component` took `bytes` more.
    pub fn commit(&self, component: Component, bytes: u64) {
        let i = component as usize;
        let now = self.committed[i].fetch_add(bytes, Relaxed) + bytes;
        self.peak[i].fetch_max(now, Relaxed);
        debug_assert!(
            now <= self.planned[i].load(Relaxed),
            "I2: {} committed {now} bytes of {} planned",
            component.name(),
            self.planned[i].load(Relaxed)
        );
    }

    /// Records that `component` gave `bytes` back.
    pub fn release(&self, component: Component, bytes: u64) {
        let before = self.committed[component as usize].fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "{} released {bytes} bytes of {before} committed", component.name());
    }

    /// Sets the bytes that `component` holds now, for components that are measured rather than counted.
    pub fn observe(&self, component: Component, bytes: u64) {
        let i = component as usize;
        self.committed[i].store(bytes, Relaxed);
        self.peak[i].fetch_max(bytes, Relaxed);
    }

    /// Adds an elastic mapping of `component`. Its pages appear on first use; [`Self::look`] asks the system which of them exist.
    pub(crate) fn open(&self, component: Component, range: Range<u64>) {
        let bytes = range.end - range.start;
        let planned = self.planned[component as usize].load(Relaxed);
        debug_assert!(bytes <= planned, "I2: {} mapped {bytes} bytes of {planned} planned", component.name());
        self.elastic().push((component, range));
    }

    /// Removes an elastic mapping of `component`.
    pub(crate) fn close(&self, component: Component, range: &Range<u64>) {
        self.elastic().retain(|(_, open)| open != range);
        // Nothing is left of this mapping. `look` counts the other mappings of the component again.
        self.observe(component, 0);
        self.look();
    }

    /// Commits the pages of elastic mappings that exist now; where the system does not tell, all pages. Call it before reading rows.
    pub fn look(&self) {
        let elastic = self.elastic();
        for (at, (component, _)) in elastic.iter().enumerate() {
            // Once for each component.
            if elastic[..at].iter().any(|(earlier, _)| earlier == component) {
                continue;
            }
            let own = elastic.iter().filter(|(owner, _)| owner == component);
            let there = |range: &Range<u64>| {
                let bytes = range.end - range.start;
                touched_in(range).map_or(bytes, |touched| touched.min(bytes))
            };
            self.observe(*component, own.map(|(_, range)| there(range)).sum());
        }
    }

    /// Bytes that are mapped for `component`, whether or not their pages exist.
    pub fn mapped(&self, component: Component) -> u64 {
        let elastic = self.elastic();
        let own = || elastic.iter().filter(|(owner, _)| *owner == component);
        match own().next() {
            Some(_) => own().map(|(_, range)| range.end - range.start).sum(),
            None => self.committed[component as usize].load(Relaxed),
        }
    }

    /// Σ mapped over all components in the machine's memory, in bytes.
    pub fn mapped_total(&self) -> u64 {
        let here = Component::ALL.into_iter().filter(|component| self.on_host(*component));
        here.map(|component| self.mapped(component)).sum()
    }

    pub(crate) fn add_held_file(&self, bytes: u64) {
        self.held_files.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn remove_held_file(&self, bytes: u64) {
        self.held_files.fetch_sub(bytes, Relaxed);
    }

    /// Committed bytes that are pages of mapped files. Other processes see them as available.
    pub fn held_files(&self) -> u64 {
        self.held_files.load(Relaxed)
    }

    fn elastic(&self) -> MutexGuard<'_, Vec<(Component, Range<u64>)>> {
        // A panic cannot leave the list of mappings half changed.
        self.elastic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One component's row.
    pub fn row(&self, component: Component) -> Row {
        let i = component as usize;
        Row {
            component,
            planned: self.planned[i].load(Relaxed),
            committed: self.committed[i].load(Relaxed),
            peak: self.peak[i].load(Relaxed),
        }
    }

    /// Every row, in plan order.
    pub fn rows(&self) -> [Row; COUNT] {
        Component::ALL.map(|c| self.row(c))
    }

    /// Σ committed over all components in the machine's memory, in bytes.
    pub fn committed_total(&self) -> u64 {
        self.committed_where(true)
    }

    /// Σ committed over all components in a device's own memory, in bytes.
    pub fn committed_on_device(&self) -> u64 {
        self.committed_where(false)
    }

    fn committed_where(&self, on_host: bool) -> u64 {
        let there = Component::ALL.into_iter().filter(|component| self.on_host(*component) == on_host);
        there.map(|component| self.committed[component as usize].load(Relaxed)).sum()
    }

    /// Counts one device allocation. Returns false when the ledger is sealed: the caller must refuse.
    pub fn count_allocation(&self) -> bool {
        let sealed = self.sealed.load(Relaxed);
        if sealed {
            self.allocations_after_seal.fetch_add(1, Relaxed);
        } else {
            self.allocations.fetch_add(1, Relaxed);
        }
        !sealed
    }

    /// Seals the ledger ("ready"): from now on every device allocation is counted and refused.
    pub fn seal(&self) {
        self.sealed.store(true, Relaxed);
    }

    /// Allows device allocations until the next [`Self::seal`]: a lost device is built again.
    pub fn unseal(&self) {
        self.sealed.store(false, Relaxed);
    }

    /// Device allocations made before the seal, and attempts made after it.
    pub fn allocations(&self) -> (u64, u64) {
        (self.allocations.load(Relaxed), self.allocations_after_seal.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_device_is_none_of_the_machines() {
        let ledger = Ledger::new();
        for (component, bytes) in [(Component::Weights, 100), (Component::Transfers, 10)] {
            ledger.plan(component, bytes);
            ledger.commit(component, bytes);
        }
        let totals = || (ledger.committed_total(), ledger.mapped_total(), ledger.committed_on_device());
        assert_eq!(totals(), (110, 110, 0));
        ledger.set_apart(true);
        assert_eq!(totals(), (10, 10, 100));
    }

    #[test]
    fn the_peak_of_a_larger_generation_is_none_of_a_smaller_ones() {
        let ledger = Ledger::new();
        let peak = || ledger.row(Component::KvPages).peak;
        ledger.plan(Component::KvPages, 100);
        ledger.commit(Component::KvPages, 100);
        ledger.release(Component::KvPages, 10);
        ledger.plan(Component::KvPages, 100);
        assert_eq!(peak(), 100, "the same plan, the same generation");
        ledger.plan(Component::KvPages, 95);
        assert_eq!(peak(), 90);
        ledger.commit(Component::KvPages, 5);
        ledger.plan(Component::KvPages, 200);
        assert_eq!(peak(), 95);
    }
}
