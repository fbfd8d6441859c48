//! The process's account: heap bytes that belong to no table or request, memory that the system's allocator keeps,
//! stacks, libraries. The engine host owns the account; without a host the engine does.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use plimsoll_memory::host::{OwnProcess, Root, Touched};
use plimsoll_memory::{Component, Ledger, heap};

/// The process's memory beyond the bytes that are counted by owner.
#[derive(Debug, Default)]
pub(crate) struct ProcessAccount {
    /// Bytes of the process before it held anything of the plan, stacks excluded because they grow. 0 where not measured.
    baseline: AtomicU64,
}

impl ProcessAccount {
    /// Measures the process's baseline once: resident bytes that are neither the `mapped` bytes of regions nor heap nor stacks. Measures
    /// nothing where the heap is not counted, since the parts cannot be told apart then.
    pub fn measure(&self, mapped: u64) {
        if heap::calls() == 0 {
            return;
        }
        heap::trim();
        let resident = OwnProcess::read(&Root::system()).leak_gauge();
        let touched = Touched::read(&Root::system());
        let others = mapped + heap::resident(&touched) + touched.stacks;
        self.baseline.store(resident.saturating_sub(others), Relaxed);
    }

    /// Enters the bytes that are held now; `owned` bytes of the heap are in other rows. Freed memory that the system's allocator keeps
    /// counts as heap. Memory that was reserved and never touched is not counted.
    pub fn observe(&self, ledger: &Ledger, owned: u64) {
        let touched = Touched::read(&Root::system());
        ledger.observe(Component::HostHeap, heap::resident(&touched).saturating_sub(owned));
        // Without a measured baseline the stacks are not entered either.
        let baseline = match self.baseline.load(Relaxed) {
            0 => 0,
            own => own + touched.stacks,
        };
        ledger.observe(Component::ProcessBaseline, baseline);
    }
}
