//! The watching thread. Twice a second it reads the machine's state for the governor. It trims the heap when asked, watches the engine's
//! progress, restores the emergency reserve, and writes the ledger to the log. It ends with the engine.
//!
//! Decisions about requests must not be in here; the engine thread makes them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use plimsoll_memory::heap;
use plimsoll_memory::host::{HostLimits, HostNow, PsiScope, Remedy, Root, Touched};

use crate::memory::governor::MemoryReading;
use crate::shared::Shared;
use crate::watch::host::{EngineHost, ProcessSums};
use crate::watch::ledger_report::LedgerReport;
use crate::watch::reserve::{Keeper, RETRY};

/// The time between two readings.
const INTERVAL: Duration = Duration::from_millis(500);
/// The most freed bytes that the heap may keep before it is trimmed.
const KEPT_BYTES: u64 = 1 << 20;
/// Readings between two such trims: five seconds.
const TRIM_READINGS: u32 = 10;

/// The thread's state between two readings.
struct Watcher {
    root: Root,
    limits: HostLimits,
    /// Whether the limits have been used since they were read.
    used: bool,
    /// Readings since the heap's kept bytes were last checked.
    since_trim: u32,
    /// Steps at the last line in the log. A line is written about every `log_every` steps, none for 0.
    logged: u64,
    log_every: u64,
    keeper: Keeper,
    /// The engine host, where several engines share one limit. The host outlives the engine thread, which has an entry in it.
    engine_host: Option<Weak<EngineHost>>,
}

/// Starts the thread.
///
/// Limits are read again every time, because a cgroup's limit can change while the server runs. Freed memory that the heap keeps is given
/// back when it exceeds [`KEPT_BYTES`].
pub(crate) fn watch(
    shared: &Arc<Shared>,
    engine_host: Option<&Arc<EngineHost>>,
    epoch: Instant,
    root: Root,
    limits: HostLimits,
    log_every: u64,
) -> std::io::Result<()> {
    // From here on the watcher refills the emergency reserve, so admission may wait for it.
    shared.monitor.reserve_kept.store(true, Relaxed);
    let shared = Arc::downgrade(shared);
    let (engine_host, keeper) = (engine_host.map(Arc::downgrade), Keeper::new());
    let mut watcher = Watcher { root, limits, used: false, since_trim: 0, logged: 0, log_every, keeper, engine_host };
    let body = move || {
        let _woken = heap::wake_me();
        let mut due = Instant::now();
        while let Some(shared) = Weak::upgrade(&shared) {
            if shared.shutdown.stopped.load(Relaxed) {
                break;
            }
            if Instant::now() >= due {
                due = Instant::now() + INTERVAL;
                guarded(&shared, || watcher.look(&shared, epoch));
            }
            guarded(&shared, || watcher.keep_reserve(&shared));
            drop(shared);
            // The thread is woken early when a refused allocation has used the emergency reserve.
            let rest = due.saturating_duration_since(Instant::now());
            std::thread::park_timeout(if heap::reserve_blocks_missing() > 0 { rest.min(RETRY) } else { rest });
        }
    };
    std::thread::Builder::new().name("plimsoll-watch".into()).spawn(body).map(drop)
}

impl Watcher {
    fn look(&mut self, shared: &Shared, epoch: Instant) {
        shared.monitor.watchdog.look(epoch.elapsed(), &shared.status, &shared.metrics);
        shared.observe_accounts();
        // On the first call the limits have just been read.
        if std::mem::replace(&mut self.used, true) {
            self.limits = self.limits.again(&self.root);
        }
        let now = HostNow::read(&self.root, &self.limits);
        let engine_host = self.engine_host.as_ref().and_then(Weak::upgrade);
        let sums = ProcessSums { engine: shared, engine_host: engine_host.as_deref() };
        shared.monitor.gauge.set(reading(&sums, &self.limits, &now));
        // This check costs as much as all the rest, so it is not made every time.
        self.since_trim = (self.since_trim + 1) % TRIM_READINGS;
        let much = self.since_trim == 0 && heap::kept(&Touched::read(&Root::system())) > KEPT_BYTES;
        if shared.monitor.trim.swap(false, Relaxed) || much {
            heap::trim();
            self.since_trim = 0;
        }
        let steps = shared.status.steps.load(Relaxed);
        if self.log_every > 0 && steps - self.logged >= self.log_every {
            self.logged = steps;
            tracing::info!("{}", LedgerReport::of(shared, engine_host.as_deref()).line());
        }
    }

    fn keep_reserve(&mut self, shared: &Shared) {
        let Self { keeper, root, limits, .. } = self;
        keeper.look(shared, || HostNow::read(root, limits).available);
    }
}

/// One panic must not end the watcher: without it, the emergency reserve is not refilled and the degradation level does
/// not fall.
fn guarded(shared: &Shared, look: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(look)).is_err() {
        shared.metrics.panics.inc();
        tracing::error!("a look at the machine panicked");
    }
}

/// Returns the governor's reading.
fn reading(sums: &ProcessSums<'_>, limits: &HostLimits, now: &HostNow) -> MemoryReading {
    let planned = sums.planned();
    let psi = now.psi.as_ref();
    // A limit of address space counts memory when it is mapped, before it is touched. So mapped memory is not still to come.
    let mapped = match limits.binding().remedy {
        Remedy::AddressSpace | Remedy::Data => sums.mapped(),
        _ => 0,
    };
    MemoryReading {
        available: now.available,
        untouched: planned.saturating_sub(now.own.leak_gauge().max(mapped)),
        above_plan: limits.effective.min(sums.limit()).saturating_sub(planned),
        // The machine's stalls depend on the machine's free memory, whatever a cgroup allows.
        stall_room: match psi.map(|psi| psi.scope) {
            Some(PsiScope::Host) => now.machine_available.unwrap_or(now.available),
            _ => now.available,
        },
        some_avg10: psi.map_or(0.0, |psi| psi.some_avg10),
        full_avg10: psi.map_or(0.0, |psi| psi.full_avg10),
    }
}
