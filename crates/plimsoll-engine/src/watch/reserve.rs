//! The keeper of the emergency reserve: it restores the blocks that refused allocations have used, as soon as there is room, and logs the
//! loss.
//!
//! It runs on the watching thread, which the heap wakes when a block was given up. Where several engines share an emergency reserve, each
//! has a keeper and all are woken. Until the reserve is whole again no request is admitted (`handle.rs`); the blocks that are left serve
//! running requests. A reserve that an engine gave up on purpose is not restored until that engine's degradation level falls
//! ([`heap::GivenUp`]), whatever the other engines' levels are.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use plimsoll_memory::heap;

use crate::api::degradation::DegradationLevel;
use crate::shared::Shared;

/// The time between two attempts to restore a block.
pub(crate) const RETRY: Duration = Duration::from_millis(50);

/// Blocks that refused allocations have used and that a keeper has counted. The heap belongs to the process: where several engines keep the
/// emergency reserve, one of them counts each loss.
static COUNTED: OnceLock<AtomicU64> = OnceLock::new();

/// The keeper of one engine.
#[derive(Debug)]
pub(crate) struct Keeper {
    counted: &'static AtomicU64,
}

impl Keeper {
    /// Returns a keeper that counts losses from now on.
    pub fn new() -> Self {
        Self { counted: COUNTED.get_or_init(|| heap::blocks_released().into()) }
    }

    /// Counts blocks that were given up, and restores those for which there is `room`.
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
        // An engine that preempts its requests has no room for the reserve. The heap does not restore a reserve that the last level gave up
        // on purpose.
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
