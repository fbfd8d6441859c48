//! The process's account: heap bytes that belong to no table or request, memory that the system's allocator keeps,
//! stacks, libraries. The engine host owns the account; without a host the engine does.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use plimsoll_memory::host::{OwnProcess, Root, Touched};
use plimsoll_memory::{Component, Ledger, heap};

/// What the process holds beyond what is counted by owner.
#[derive(Debug, Default)]
pub(crate) struct ProcessAccount {
    /// What it took before it held anything of the plan, but for stacks, which grow; 0 where it was not measured.
    baseline: AtomicU64,
}

impl ProcessAccount {
    /// Measures the process's own share once: what is resident and belongs neither to the `mapped` bytes of regions nor to the heap.
    /// Nothing where the heap is not counted, since then the two cannot be told apart.
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

    /// Enters what is held now; `owned` bytes of the heap are in rows of their own. Freed memory that the system's
    /// allocator keeps counts as heap. Memory that was reserved and never touched is not counted.
    pub fn observe(&self, ledger: &Ledger, owned: u64) {
        let touched = Touched::read(&Root::system());
        ledger.observe(Component::HostHeap, heap::resident(&touched).saturating_sub(owned));
        // Where the process's own share was not measured, its stacks say nothing either.
        let baseline = match self.baseline.load(Relaxed) {
            0 => 0,
            own => own + touched.stacks,
        };
        ledger.observe(Component::ProcessBaseline, baseline);
    }
}
