//! The reserve for refused allocations while an engine is built.

use std::sync::{Arc, LazyLock};

use plimsoll_memory::{Component, EmergencyReserve, Ledger, heap};

/// Bytes that a start reserves for a refused allocation before the plan's emergency reserve is mapped. They are part of the host heap's
/// plan, and the heap is nearly empty then.
const START_RESERVE_BYTES: u64 = 1 << 20;

/// The start reserve: armed in the heap until the emergency reserve replaces it. Dropping it disarms the heap, so that a failed start
/// leaves nothing behind.
pub(super) struct StartReserve {
    /// Whether the heap's reserve belongs to this start.
    own: bool,
}

impl StartReserve {
    /// Sets the reserve aside, unless the heap has an emergency reserve already.
    pub fn set_aside() -> Self {
        // The ledger is made once, by the first start: no reserve covers this call. It has no plan of its own, because several starts can
        // share it.
        static LEDGER: LazyLock<Arc<Ledger>> = LazyLock::new(|| {
            let ledger = Ledger::new();
            ledger.plan(Component::EmergencyReserve, u64::MAX);
            Arc::new(ledger)
        });
        // Another engine of this process has an emergency reserve, which serves this start as well.
        let own = !heap::armed();
        if own {
            match EmergencyReserve::map(&LEDGER, START_RESERVE_BYTES) {
                Ok(emergency_reserve) => drop(heap::arm(emergency_reserve)),
                Err(error) => tracing::debug!(%error, "no reserve for this start"),
            }
        }
        Self { own }
    }

    /// Replaces the start reserve by the engine's `emergency_reserve`. `None`: the heap keeps the engine host's.
    pub fn replace(mut self, emergency_reserve: Option<EmergencyReserve>) -> Self {
        if let Some(emergency_reserve) = emergency_reserve {
            drop(heap::arm(emergency_reserve));
            self.own = true;
        }
        self
    }

    /// Ends the start successfully: the heap keeps its reserve.
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
