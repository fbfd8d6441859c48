//! The gauges of an engine: the engine thread writes them, other threads read them.

use std::sync::atomic::{AtomicBool, AtomicU64};

/// Numbers the engine thread refreshes every step.
#[derive(Debug, Default)]
pub struct Status {
    /// Requests that hold a slot.
    pub running: AtomicU64,
    /// Requests that wait for one.
    pub waiting: AtomicU64,
    /// Pages in use, by requests or by the prefix index.
    pub pages_used: AtomicU64,
    /// The most pages in use at once since start, whatever became of the pool.
    pub pages_peak: AtomicU64,
    /// Pages of the pool.
    pub pages_total: AtomicU64,
    /// Pages held by the prefix index alone.
    pub pages_cached: AtomicU64,
    /// State slots in use: by sequences, or kept as checkpoints.
    pub slots_used: AtomicU64,
    /// State slots of the pool; 0 for models without recurrent state.
    pub slots_total: AtomicU64,
    /// State slots kept as checkpoints.
    pub slots_kept: AtomicU64,
    /// Window pages in use, by requests or by the prefix index.
    pub windows_used: AtomicU64,
    /// Window pages of the pool; 0 for models without sliding windows.
    pub windows_total: AtomicU64,
    /// Window pages held by the prefix index alone.
    pub windows_cached: AtomicU64,
    /// Whether equal prefixes are shared.
    pub prefix_cache: AtomicBool,
    /// Steps taken since start.
    pub steps: AtomicU64,
    /// Looks around since start, those of an idle engine included.
    pub iterations: AtomicU64,
    /// Milliseconds since the engine's epoch at which the last step ended (or the engine was idle).
    pub progress_ms: AtomicU64,
}
