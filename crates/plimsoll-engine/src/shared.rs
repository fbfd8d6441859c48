//! The state that the handle, the engine thread and the watching thread share.

pub(crate) mod watchdog;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, OnceLock};

use plimsoll_memory::{Component, Ledger, Plan};

use crate::api::admission::Reservations;
use crate::api::limits::Limits;
use crate::api::options::STALL_LIMIT;
use crate::cache::stats::{CacheStats, ClearCalls};
use crate::cache::{KvEventLog, SavedPrefixes};
use crate::media::MediaSpec;
use crate::memory::footprint::Accounts;
use crate::memory::governor::Gauge;
use crate::metrics::Metrics;
use crate::shared::watchdog::Watchdog;
use crate::status::Status;

/// The flags of the engine's end: the handle sets them, the engine thread confirms.
#[derive(Default)]
pub(crate) struct Shutdown {
    /// New requests are refused.
    pub draining: AtomicBool,
    /// The engine thread is to stop.
    pub stop: AtomicBool,
    /// The engine thread has stopped.
    pub stopped: AtomicBool,
}

/// The results of start-up, each set once and then only read.
#[derive(Default)]
pub(crate) struct StartFacts {
    /// Sizes of the heap's measured parts; a scripted engine has none.
    pub accounts: OnceLock<Accounts>,
    /// The end-of-sequence tokens of the model and of its tokenizer.
    pub eos: OnceLock<Vec<u32>>,
    /// The media that the model takes, and their limits.
    pub media: OnceLock<MediaSpec>,
    /// The log of changes of the prefix cache, if routers follow it.
    pub kv_event_log: OnceLock<Arc<KvEventLog>>,
    /// Bytes of a page of the whole context and of a window page, as planned.
    pub page_bytes: OnceLock<[u64; 2]>,
    /// The parts of the disk cache that saved prefixes need; unset without a cache on disk.
    pub saved: OnceLock<SavedPrefixes>,
}

/// The results of the watching thread, and the engine thread's requests to it.
pub(crate) struct Monitor {
    /// The last memory reading, and the engine's degradation level.
    pub gauge: Gauge,
    /// Whether the engine makes progress.
    pub watchdog: Watchdog,
    /// Whether the watching thread runs, which restores the emergency reserve after refused allocations.
    pub reserve_kept: AtomicBool,
    /// Set by the engine thread to have the watching thread trim the heap.
    pub trim: AtomicBool,
}

/// The state of one engine that the handle, the engine thread and the watching thread share.
pub(crate) struct Shared {
    pub limits: Limits,
    pub plan: Plan,
    pub ledger: Arc<Ledger>,
    pub metrics: Metrics,
    pub status: Status,
    pub cache_stats: CacheStats,
    pub clear_calls: ClearCalls,
    /// Places and host bytes of requests in the system.
    pub reservations: Arc<Reservations>,
    pub shutdown: Shutdown,
    pub facts: StartFacts,
    pub monitor: Monitor,
}

impl Shared {
    pub fn new(limits: Limits, plan: Plan, ledger: Arc<Ledger>) -> Self {
        Self {
            limits,
            plan,
            ledger,
            metrics: Metrics::default(),
            status: Status::default(),
            cache_stats: CacheStats::default(),
            clear_calls: ClearCalls::default(),
            reservations: Arc::new(Reservations::new(limits.host_bytes)),
            shutdown: Shutdown::default(),
            facts: StartFacts::default(),
            monitor: Monitor {
                gauge: Gauge::default(),
                watchdog: Watchdog::new(STALL_LIMIT),
                reserve_kept: AtomicBool::new(false),
                trim: AtomicBool::new(false),
            },
        }
    }

    /// Updates the ledger's components that are measured rather than counted.
    pub fn observe_accounts(&self) {
        if let Some(accounts) = self.facts.accounts.get() {
            let staged = self.facts.media.get().map_or(0, |media| media.staging.used());
            accounts.observe(&self.ledger, self.reservations.held(), staged);
        }
    }

    /// Bytes of one page of the KV cache, as planned.
    pub fn page_bytes(&self) -> u64 {
        match self.facts.page_bytes.get() {
            Some([whole, _]) => *whole,
            None => self.each(Component::KvPages, self.status.pages_total.load(Acquire)),
        }
    }

    /// Bytes of one window page, as planned; 0 for models without sliding windows.
    pub fn window_page_bytes(&self) -> u64 {
        self.facts.page_bytes.get().map_or(0, |[_, window]| *window)
    }

    /// Bytes of one state slot, as planned; 0 for models without recurrent state.
    pub fn slot_bytes(&self) -> u64 {
        self.each(Component::StateSlots, self.status.slots_total.load(Acquire))
    }

    fn each(&self, component: Component, count: u64) -> u64 {
        let line = self.plan.lines.iter().find(|line| line.component == component);
        line.map_or(0, |line| line.bytes.checked_div(count).unwrap_or(0))
    }
}
