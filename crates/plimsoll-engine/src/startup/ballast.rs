//! What pays for a refused allocation while an engine is built.

use std::sync::{Arc, LazyLock};

use plimsoll_memory::{Canary, Component, Ledger, heap};

/// Bytes that a start holds back for a refused allocation before the plan's own canary stands. They are part of what the plan
/// allows the host heap, which is nearly empty then.
const BALLAST_BYTES: u64 = 1 << 20;

/// The ballast of a start: in the heap's keeping until the canary takes its place. Dropped, it leaves the heap without
/// either, so that a start that fails leaves nothing behind.
pub(super) struct Ballast {
    /// What the heap keeps is this start's.
    own: bool,
}

impl Ballast {
    /// Sets it aside, unless the heap keeps a canary already.
    pub fn set_aside() -> Self {
        // Made once, by the first start: the one call that nothing can pay for. It has no plan of its own: several starts may
        // share it.
        static LEDGER: LazyLock<Arc<Ledger>> = LazyLock::new(|| {
            let ledger = Ledger::new();
            ledger.plan(Component::Canary, u64::MAX);
            Arc::new(ledger)
        });
        // Another engine of this process has a canary, which does as well.
        let own = !heap::armed();
        if own {
            match Canary::map(&LEDGER, BALLAST_BYTES) {
                Ok(canary) => drop(heap::arm(canary)),
                Err(error) => tracing::debug!(%error, "no ballast for this start"),
            }
        }
        Self { own }
    }

    /// The engine stands: from here on `canary` is what the heap keeps, unless that is the house's.
    pub fn replace(mut self, canary: Option<Canary>) -> Self {
        if let Some(canary) = canary {
            drop(heap::arm(canary));
            self.own = true;
        }
        self
    }

    /// The start is over.
    pub fn keep(mut self) {
        self.own = false;
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        if self.own {
            drop(heap::disarm());
        }
    }
}
