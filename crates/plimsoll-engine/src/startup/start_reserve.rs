//! What pays for a refused allocation while an engine is built.

use std::sync::{Arc, LazyLock};

use plimsoll_memory::{Component, EmergencyReserve, Ledger, heap};

/// Bytes that a start holds back for a refused allocation before the plan's own emergency reserve stands. They are part of what the plan
/// allows the host heap, which is nearly empty then.
const START_RESERVE_BYTES: u64 = 1 << 20;

/// The start reserve of a start: in the heap's keeping until the emergency reserve takes its place. Dropped, it leaves the heap without
/// either, so that a start that fails leaves nothing behind.
pub(super) struct StartReserve {
    /// What the heap keeps is this start's.
    own: bool,
}

impl StartReserve {
    /// Sets it aside, unless the heap keeps a emergency reserve already.
    pub fn set_aside() -> Self {
        // Made once, by the first start: the one call that nothing can pay for. It has no plan of its own: several starts may
        // share it.
        static LEDGER: LazyLock<Arc<Ledger>> = LazyLock::new(|| {
            let ledger = Ledger::new();
            ledger.plan(Component::EmergencyReserve, u64::MAX);
            Arc::new(ledger)
        });
        // Another engine of this process has a emergency reserve, which does as well.
        let own = !heap::armed();
        if own {
            match EmergencyReserve::map(&LEDGER, START_RESERVE_BYTES) {
                Ok(emergency_reserve) => drop(heap::arm(emergency_reserve)),
                Err(error) => tracing::debug!(%error, "no reserve for this start"),
            }
        }
        Self { own }
    }

    /// The engine stands: from here on `emergency_reserve` is what the heap keeps, unless that is the engine host's.
    pub fn replace(mut self, emergency_reserve: Option<EmergencyReserve>) -> Self {
        if let Some(emergency_reserve) = emergency_reserve {
            drop(heap::arm(emergency_reserve));
            self.own = true;
        }
        self
    }

    /// The start is over.
    pub fn keep(mut self) {
        self.own = false;
    }
}

impl Drop for StartReserve {
    fn drop(&mut self) {
        if self.own {
            drop(heap::disarm());
        }
    }
}
