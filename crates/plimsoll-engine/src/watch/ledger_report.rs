//! The ledger for people and programs: one value that `/v1/memory` sends, the log prints on a line and the end of a server prints
//! whole. All sizes are bytes.
//!
//! What must not be in here: decisions. A report is read, never acted upon.

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

/// Where every byte is, what requests have come to, how far the engine gives way.
#[derive(Clone, Debug, Serialize)]
pub struct LedgerReport {
    /// The most this process may use.
    pub line_bytes: u64,
    /// Where the line comes from.
    pub line_source: String,
    /// Σ planned over all components.
    pub planned_bytes: u64,
    /// Σ committed over all components.
    pub committed_bytes: u64,
    /// The memory of a GPU that has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceMemory>,
    /// Anonymous memory, resident or swapped, that is in no component; negative where components hold less than they say.
    pub unaccounted_bytes: i64,
    /// Plan and ledger, row by row.
    pub components: Vec<ComponentRow>,
    /// The process as the system sees it.
    pub process: OwnProcess,
    /// The heap as its counter sees it.
    pub heap: Heap,
    /// Device allocations.
    pub device_allocations: DeviceAllocations,
    /// What must be full again at idle.
    pub pools: Pools,
    /// The degradation level.
    pub degradation: Degradation,
    /// What has become of requests since start.
    pub requests: Requests,
    /// Tokens since start, which `/v1/status` tells.
    #[serde(skip)]
    pub tokens: Tokens,
    /// Steps taken since start.
    pub steps: u64,
}

/// Engines that share a process, and what they share.
pub(crate) struct Whole<'a> {
    /// Of what they share, under the line of all.
    pub plan: &'a Plan,
    /// Its ledger.
    pub ledger: &'a Ledger,
    /// The engines.
    pub engines: &'a [&'a Shared],
    /// What engines that are gone had counted.
    pub past: Counts,
    /// Models on their way in or out.
    pub moving: &'a [HostedEngine],
    /// The process, looked at beside their ledgers.
    pub process: OwnProcess,
}

/// The heap.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Heap {
    /// Bytes in use.
    pub in_use_bytes: u64,
    /// What it has of the process's memory, resident or in swap: not what was reserved and never touched.
    pub resident_bytes: u64,
    /// Bytes that were freed and that the system's allocator has not given back, with the rests of pages.
    pub kept_bytes: u64,
    /// The most that were ever in use.
    pub peak_bytes: u64,
    /// Calls that took memory.
    pub calls: u64,
}

/// Everything that is lent out and comes back.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pools {
    /// Pages of the key/value cache.
    pub kv_pages: Pages,
    /// Pages of sliding-window layers; none where the model has no such layers.
    pub kv_window_pages: Pages,
    /// Slots of recurrent state; none where the model has no such state.
    pub state_slots: Pages,
    /// Pages of encoder outputs; none where the model takes text only.
    pub encoder_outputs: Pages,
    /// Host bytes reserved for media.
    pub media_bytes: Share,
    /// Places of requests.
    pub requests: Places,
    /// Host bytes reserved by requests.
    pub host_bytes: Share,
    /// Bodies and unsent answers, where there is a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_bytes: Option<Share>,
}

/// A pool of pages or slots.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Pages {
    /// In use, by requests or kept for prefixes.
    pub used: u64,
    /// All of them.
    pub total: u64,
    /// Kept for prefixes alone; given up as soon as a request needs them.
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
    /// Slots.
    pub running_max: u64,
    /// Places in the queue.
    pub waiting_max: u64,
}

/// A part of a budget.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Share {
    /// Taken.
    pub used: u64,
    /// There are.
    pub total: u64,
}

/// The degradation level, and how often each was entered.
#[derive(Clone, Debug, Serialize)]
pub struct Degradation {
    /// The current level.
    pub level: &'static str,
    /// Every level, from the cheapest to the dearest.
    pub entered: Vec<LevelCount>,
    /// What the machine looked like last: why it stands there.
    pub reading: MemoryReading,
    /// How often a refused allocation has cost a block of the emergency reserve.
    pub reserve_blocks_released: u64,
    /// Slices that are not back yet; nothing is admitted meanwhile.
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

/// The process is looked at between two looks at the ledger, and so often until these agree to so many bytes: a thread may take or free a
/// body of megabytes while another is kept from the processor between its looks.
const LOOKS: usize = 16;
const STILL_BYTES: u64 = 64 << 10;

/// The process, and what `committed` says of it at that moment, as far as a few looks can tell.
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

    /// The same of rows that are fresh, but for what is unaccounted, which is the process's.
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

    /// Several engines and what they share, as one.
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

    /// Adds what a model plans and holds already, or still.
    fn add_moving(&mut self, ledger: &Ledger) {
        for (row, more) in self.components.iter_mut().zip(ledger.rows()) {
            row.planned_bytes += more.planned;
            row.committed_bytes += more.committed;
            row.peak_bytes += more.peak;
            self.planned_bytes += more.planned;
            self.committed_bytes += more.committed;
        }
    }

    /// Adds what another engine of the same process holds; [`Self::count`] knows what it has counted.
    fn add(&mut self, other: &Self) {
        self.planned_bytes += other.planned_bytes;
        self.committed_bytes += other.committed_bytes;
        for (row, more) in self.components.iter_mut().zip(&other.components) {
            row.planned_bytes += more.planned_bytes;
            row.committed_bytes += more.committed_bytes;
            row.peak_bytes += more.peak_bytes;
            // Of one alone it can be said how it comes about.
            row.detail = match (row.detail.is_empty(), more.detail.is_empty()) {
                (true, _) => more.detail.clone(),
                (false, true) => std::mem::take(&mut row.detail),
                (false, false) => "of all models".into(),
            };
        }
        self.pools.add(&other.pools);
        self.degradation.add(&other.degradation);
    }

    /// Enters what all engines together have counted.
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
    /// The higher level counts.
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
