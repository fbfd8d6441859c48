//! The keeper of the emergency reserve: brings back what refused allocations have cost, as soon as there is room, and says what happened.
//!
//! It runs on the watching thread, which the heap wakes when a slice was given up. Where several engines share an emergency reserve,
//! each has a keeper and all are woken. Until the reserve is whole again no request is admitted (`handle.rs`): the slices that are left
//! serve what runs. What an engine gave up on purpose stays given up until that engine's degradation level falls
//! ([`heap::GivenUp`]), whatever the others' levels are.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use plimsoll_memory::heap;

use crate::api::degradation::DegradationLevel;
use crate::shared::Shared;

/// Between two attempts to bring a slice back.
pub(crate) const RETRY: Duration = Duration::from_millis(50);

/// Slices that refused allocations have cost and that a keeper has counted. The heap is the process's: where several engines keep the
/// emergency reserve, one of them counts what is lost.
static COUNTED: OnceLock<AtomicU64> = OnceLock::new();

/// One engine's.
#[derive(Debug)]
pub(crate) struct Keeper {
    counted: &'static AtomicU64,
}

impl Keeper {
    /// From here on it says what is lost.
    pub fn new() -> Self {
        Self { counted: COUNTED.get_or_init(|| heap::blocks_released().into()) }
    }

    /// Counts what was given up, and brings back what there is `room` for.
    pub fn look(&self, shared: &Shared, room: impl Fn() -> u64) {
        let released = heap::blocks_released();
        let refused = released.saturating_sub(self.counted.fetch_max(released, Relaxed));
        if refused > 0 {
            let (missing, blocks) = (heap::reserve_blocks_missing(), plimsoll_memory::emergency_reserve::BLOCKS);
            tracing::error!(
                refused,
                missing,
                blocks,
                "allocations were refused; blocks of the emergency reserve were given up for them"
            );
            shared.metrics.reserve_releases.inc_by(refused);
        }
        // An engine that preempts its own has no room for it. What the last level gave up on purpose the heap does not take back.
        if heap::reserve_blocks_missing() == 0 || shared.monitor.gauge.level() >= DegradationLevel::Preempt {
            return;
        }
        let mut whole = false;
        while heap::reserve_blocks_missing() > 0 && !whole {
            let before = heap::reserve_blocks_missing();
            match heap::restore_reserve(room()) {
                Ok(all) => whole = all,
                Err(error) => {
                    tracing::debug!(%error, "no room for the emergency reserve yet");
                    break;
                }
            }
            if heap::reserve_blocks_missing() >= before {
                break;
            }
        }
        if whole {
            tracing::info!("the emergency reserve is whole again");
        }
    }
}
