//! The ledger for people and programs, as one value. `/v1/memory` sends it, the log prints it on a line, and a server that ends prints it
//! in full. All sizes are bytes.
//!
//! Decisions must not be in here: a report is read, and never acted upon.

mod components;
pub(crate) mod counts;
mod words;

use std::sync::atomic::Ordering::Relaxed;

use plimsoll_memory::host::{OwnProcess, Root, Touched};
use plimsoll_memory::{Ledger, Plan, heap};
use serde::Serialize;

use crate::api::degradation::DegradationLevel;
use crate::memory::governor::MemoryReading;
use crate::shared::Shared;
use crate::watch::host::{EngineHost, HostedEngine, ProcessSums};
pub use components::{ComponentRow, DeviceMemory};
pub(crate) use counts::Counts;
pub use counts::{DeviceAllocations, Requests, Tokens};

/// The use of every byte, the outcomes of requests, and the degradation level.
#[derive(Clone, Debug, Serialize)]
pub struct LedgerReport {
    /// The memory limit: the most bytes that this process may use.
    pub line_bytes: u64,
    /// Where the memory limit comes from.
    pub line_source: String,
    /// Σ planned over all components.
    pub planned_bytes: u64,
    /// Σ committed over all components.
    pub committed_bytes: u64,
    /// The memory of a GPU that has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceMemory>,
    /// Anonymous memory, resident or swapped, that is in no component. Negative where components hold less than they report.
    pub unaccounted_bytes: i64,
    /// Plan and ledger, row by row.
    pub components: Vec<ComponentRow>,
    /// The process's memory as the system reports it.
    pub process: OwnProcess,
    /// The heap as its counters report it.
    pub heap: Heap,
    /// Device allocations.
    pub device_allocations: DeviceAllocations,
    /// The pools, which must be full again at idle.
    pub pools: Pools,
    /// The degradation level.
    pub degradation: Degradation,
    /// The outcomes of requests since start.
    pub requests: Requests,
    /// Tokens since start, for `/v1/status`.
    #[serde(skip)]
    pub tokens: Tokens,
    /// Steps taken since start.
    pub steps: u64,
}

/// Engines that share a process, and the parts that they share.
pub(crate) struct Whole<'a> {
    /// The plan of the shared parts, under the limit of all engines.
    pub plan: &'a Plan,
    /// The ledger of the shared parts.
    pub ledger: &'a Ledger,
    /// The engines.
    pub engines: &'a [&'a Shared],
    /// The counts of engines that have ended.
    pub past: Counts,
    /// Models that are being loaded or unloaded.
    pub moving: &'a [HostedEngine],
    /// The process's memory, read beside the ledgers.
    pub process: OwnProcess,
}

/// The heap.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Heap {
    /// Bytes in use.
    pub in_use_bytes: u64,
    /// Bytes of it that are resident or in swap. Memory that was reserved and never touched does not count.
    pub resident_bytes: u64,
    /// Freed bytes that the system's allocator has not given back, and the unused ends of pages.
    pub kept_bytes: u64,
    /// The most bytes that were ever in use.
    pub peak_bytes: u64,
    /// Number of calls that allocated memory.
    pub calls: u64,
}

/// All resources that requests take and return.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pools {
    /// Pages of the key/value cache.
    pub kv_pages: Pages,
    /// Pages of sliding-window layers; zeros where the model has no such layers.
    pub kv_window_pages: Pages,
    /// Slots of recurrent state; zeros where the model has no such state.
    pub state_slots: Pages,
    /// Pages of encoder outputs; zeros where the model takes text only.
    pub encoder_outputs: Pages,
    /// Host bytes reserved for media.
    pub media_bytes: Share,
    /// Running and waiting requests, and their limits.
    pub requests: Places,
    /// Host bytes reserved by requests.
    pub host_bytes: Share,
    /// Bytes of bodies and unsent answers, where there is a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_bytes: Option<Share>,
}

/// A pool of pages or slots.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Pages {
    /// Number in use, by requests or cached for prefixes.
    pub used: u64,
    /// Number in total.
    pub total: u64,
    /// Number cached for prefixes alone; evicted as soon as a request needs them.
    pub cached: u64,
}

/// Requests in the system.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Places {
    /// Requests that hold a slot.
    pub running: u64,
    /// Requests that wait for one.
    pub waiting: u64,
    /// Requests accepted and not yet ended.
    pub in_system: u64,
    /// The most running requests.
    pub running_max: u64,
    /// The most waiting requests.
    pub waiting_max: u64,
}

/// The used part of a budget.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Share {
    /// Bytes taken.
    pub used: u64,
    /// Bytes of the budget.
    pub total: u64,
}

/// The degradation level, and how often each level was entered.
#[derive(Clone, Debug, Serialize)]
pub struct Degradation {
    /// The current level.
    pub level: &'static str,
    /// Every level, from the cheapest to the dearest.
    pub entered: Vec<LevelCount>,
    /// The governor's last reading, which explains the level.
    pub reading: MemoryReading,
    /// Number of refused allocations that have used a block of the emergency reserve.
    pub reserve_blocks_released: u64,
    /// Blocks that are not restored yet; no request is admitted meanwhile.
    pub reserve_blocks_missing: u64,
}

/// One level.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LevelCount {
    /// Its name.
    pub level: &'static str,
    /// How often it was entered.
    pub times: u64,
}

/// The most readings of the process, each between two readings of the ledger, until these agree within [`STILL_BYTES`]. Without repetition
/// a thread could allocate or free a body of megabytes between the two readings.
const LOOKS: usize = 16;
const STILL_BYTES: u64 = 64 << 10;

/// Reads the process's memory, and `committed` at the same moment, as far as a few readings can ensure this.
pub(crate) fn looked_at(committed: impl Fn() -> u64) -> (OwnProcess, u64) {
    let mut before = committed();
    for _ in 1..LOOKS {
        let (process, after) = (OwnProcess::read(&Root::system()), committed());
        if before.abs_diff(after) <= STILL_BYTES {
            return (process, after);
        }
        before = after;
    }
    (OwnProcess::read(&Root::system()), committed())
}

impl LedgerReport {
    /// Reads everything now.
    pub(crate) fn of(shared: &Shared, engine_host: Option<&EngineHost>) -> Self {
        let sums = ProcessSums { engine: shared, engine_host };
        let (process, committed) = looked_at(|| {
            shared.observe_accounts();
            sums.committed()
        });
        let unaccounted_bytes = difference(process.leak_gauge(), committed);
        Self { unaccounted_bytes, ..Self::rows_of(shared, process, Heap::now()) }
    }

    /// The same from rows that are up to date, without the unaccounted bytes, which belong to the process.
    fn rows_of(shared: &Shared, process: OwnProcess, heap: Heap) -> Self {
        let (plan, ledger) = (&shared.plan, &shared.ledger);
        let committed_bytes = ledger.committed_total();
        let counts = Counts::of(shared);
        Self {
            line_bytes: plan.limit,
            line_source: plan.limit_source.clone(),
            planned_bytes: plan.total(),
            committed_bytes,
            device: DeviceMemory::of(plan, ledger),
            unaccounted_bytes: 0,
            components: ledger.rows().into_iter().map(|row| ComponentRow::of(row, plan)).collect(),
            process,
            heap,
            device_allocations: counts.allocations,
            pools: Pools::of(shared),
            degradation: Degradation::of(shared, &counts),
            requests: counts.requests,
            tokens: counts.tokens,
            steps: counts.steps,
        }
    }

    /// Reports several engines and their shared parts as one.
    pub(crate) fn whole(whole: &Whole<'_>) -> Self {
        let Whole { plan, ledger, engines, moving, past, process } = *whole;
        let heap = Heap::now();
        let mut report = Self {
            line_bytes: plan.limit,
            line_source: plan.limit_source.clone(),
            planned_bytes: plan.total(),
            committed_bytes: ledger.committed_total(),
            device: None,
            unaccounted_bytes: 0,
            components: ledger.rows().into_iter().map(|row| ComponentRow::of(row, plan)).collect(),
            process,
            heap,
            device_allocations: DeviceAllocations::default(),
            pools: Pools::default(),
            degradation: Degradation::default(),
            requests: Requests::default(),
            tokens: Tokens::default(),
            steps: 0,
        };
        let mut counts = past;
        for shared in engines {
            report.add(&Self::rows_of(shared, process, heap));
            counts.add(&Counts::of(shared));
        }
        for hosted_engine in moving {
            report.add_moving(&hosted_engine.ledger);
            hosted_engine.engine.iter().for_each(|shared| counts.add(&Counts::of(shared)));
        }
        report.count(&counts);
        report.unaccounted_bytes = difference(report.process.leak_gauge(), report.committed_bytes);
        report
    }

    /// Adds the planned and held bytes of a model that is being loaded or unloaded.
    fn add_moving(&mut self, ledger: &Ledger) {
        for (row, more) in self.components.iter_mut().zip(ledger.rows()) {
            row.planned_bytes += more.planned;
            row.committed_bytes += more.committed;
            row.peak_bytes += more.peak;
            self.planned_bytes += more.planned;
            self.committed_bytes += more.committed;
        }
    }

    /// Adds the bytes of another engine of the same process; [`Self::count`] enters its counts.
    fn add(&mut self, other: &Self) {
        self.planned_bytes += other.planned_bytes;
        self.committed_bytes += other.committed_bytes;
        for (row, more) in self.components.iter_mut().zip(&other.components) {
            row.planned_bytes += more.planned_bytes;
            row.committed_bytes += more.committed_bytes;
            row.peak_bytes += more.peak_bytes;
            // A detail explains the bytes of one engine only.
            row.detail = match (row.detail.is_empty(), more.detail.is_empty()) {
                (true, _) => more.detail.clone(),
                (false, true) => std::mem::take(&mut row.detail),
                (false, false) => "of all models".into(),
            };
        }
        self.pools.add(&other.pools);
        self.degradation.add(&other.degradation);
    }

    /// Enters the counts of all engines together.
    fn count(&mut self, counts: &Counts) {
        (self.requests, self.tokens, self.steps) = (counts.requests, counts.tokens, counts.steps);
        self.device_allocations = counts.allocations;
        self.degradation.count(counts);
    }
}

impl Heap {
    fn now() -> Self {
        let touched = Touched::read(&Root::system());
        Self {
            in_use_bytes: heap::in_use(),
            resident_bytes: heap::resident(&touched),
            kept_bytes: heap::kept(&touched),
            peak_bytes: heap::peak(),
            calls: heap::calls(),
        }
    }
}

impl Pages {
    fn add(&mut self, other: Self) {
        self.used += other.used;
        self.total += other.total;
        self.cached += other.cached;
    }
}

impl Pools {
    fn add(&mut self, other: &Self) {
        self.kv_pages.add(other.kv_pages);
        self.kv_window_pages.add(other.kv_window_pages);
        self.state_slots.add(other.state_slots);
        self.encoder_outputs.add(other.encoder_outputs);
        self.media_bytes.used += other.media_bytes.used;
        self.media_bytes.total += other.media_bytes.total;
        self.requests.running += other.requests.running;
        self.requests.waiting += other.requests.waiting;
        self.requests.in_system += other.requests.in_system;
        self.requests.running_max += other.requests.running_max;
        self.requests.waiting_max += other.requests.waiting_max;
        self.host_bytes.used += other.host_bytes.used;
        self.host_bytes.total += other.host_bytes.total;
    }

    fn of(shared: &Shared) -> Self {
        let (status, limits) = (&shared.status, &shared.limits);
        let (reserved, in_system) = (shared.reservations.reserved(), shared.reservations.in_system());
        Self {
            kv_pages: Pages {
                used: status.pages_used.load(Relaxed),
                total: status.pages_total.load(Relaxed),
                cached: status.pages_cached.load(Relaxed),
            },
            kv_window_pages: Pages {
                used: status.windows_used.load(Relaxed),
                total: status.windows_total.load(Relaxed),
                cached: status.windows_cached.load(Relaxed),
            },
            state_slots: Pages {
                used: status.slots_used.load(Relaxed),
                total: status.slots_total.load(Relaxed),
                cached: status.slots_kept.load(Relaxed),
            },
            encoder_outputs: shared.facts.media.get().map_or(Pages { used: 0, total: 0, cached: 0 }, |media| {
                let stats = media.outputs.stats();
                let (total, cached) = (stats.pages as u64, stats.pages_idle as u64);
                Pages { used: total - stats.pages_free as u64, total, cached }
            }),
            media_bytes: shared.facts.media.get().map_or(Share { used: 0, total: 0 }, |media| Share {
                used: media.staging.used(),
                total: media.staging.limit(),
            }),
            requests: Places {
                running: status.running.load(Relaxed),
                waiting: status.waiting.load(Relaxed),
                in_system,
                running_max: limits.running_max_req_size.into(),
                waiting_max: limits.max_waiting.into(),
            },
            host_bytes: Share { used: reserved, total: limits.host_bytes },
            http_bytes: None,
        }
    }
}

impl Default for Degradation {
    fn default() -> Self {
        Self {
            level: DegradationLevel::default().name(),
            entered: DegradationLevel::ALL.iter().map(|level| LevelCount { level: level.name(), times: 0 }).collect(),
            reading: MemoryReading::default(),
            reserve_blocks_released: 0,
            reserve_blocks_missing: heap::reserve_blocks_missing() as u64,
        }
    }
}

impl Degradation {
    /// Keeps the higher of two levels.
    fn add(&mut self, other: &Self) {
        let height = |name: &str| DegradationLevel::ALL.iter().position(|level| level.name() == name);
        if height(other.level) >= height(self.level) {
            (self.level, self.reading) = (other.level, other.reading);
        }
    }

    fn count(&mut self, counts: &Counts) {
        self.entered.iter_mut().zip(counts.entered).for_each(|(mine, times)| mine.times = times);
        self.reserve_blocks_released = counts.reserve_releases;
    }

    fn of(shared: &Shared, counts: &Counts) -> Self {
        let (level, reading) = (shared.monitor.gauge.level().name(), shared.monitor.gauge.last());
        let mut degradation = Self { level, reading, ..Self::default() };
        degradation.count(counts);
        degradation
    }
}

fn difference(a: u64, b: u64) -> i64 {
    let clamp = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    clamp(a).saturating_sub(clamp(b))
}
