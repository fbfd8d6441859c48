//! The engine's front door: submit, look, drain. Cheap to clone; everything else stays inside the engine thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use plimsoll_memory::{Ledger, Plan, broken, heap};

use crate::accounts::Accounts;
use crate::byte_reservation::ByteReservation;
use crate::cache::KvEventLog;
use crate::cache_stats::CacheStats;
use crate::engine_host::EngineHost;
use crate::governor::{DegradationLevel, Gauge};
use crate::media::MediaSpec;
use crate::metrics::Metrics;
use crate::outbox::{Outbox, Reader, outbox};
use crate::report::LedgerReport;
use crate::request::{Limits, Refusal, Request};
use crate::watchdog::{STALL_LIMIT, Watchdog};

/// A request on its way to the engine thread, with all it has reserved.
pub(crate) struct Arrival {
    pub request: Request,
    pub outbox: Outbox,
    pub timestamps: Timestamps,
    pub place: AdmissionPermit,
    pub room: ByteReservation,
}

/// Since when a request is on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timestamps {
    /// Its client asked.
    pub asked: Instant,
    /// It was submitted.
    pub arrived: Instant,
}

/// A request's place among those in the system; given back when the engine is done with it.
pub(crate) struct AdmissionPermit(Arc<Shared>);

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.0.in_system.fetch_sub(u64::from(!broken("V-3")), Ordering::AcqRel);
    }
}

/// Host bytes reserved for one request, and how many of them it holds; given back when neither engine nor client holds any
/// of its output.
pub(crate) struct HostBytes {
    shared: Arc<Shared>,
    reserved: AtomicU64,
    held: AtomicU64,
}

impl HostBytes {
    /// Reserves `more`. False when all bytes for requests are reserved.
    pub fn grow(&self, more: u64) -> bool {
        let taken = take(&self.shared.host_reserved, more, self.shared.limits.host_bytes);
        self.reserved.fetch_add(if taken { more } else { 0 }, Ordering::AcqRel);
        taken
    }

    /// Notes that `before` bytes of the heap have become `after`.
    pub fn hold(&self, before: u64, after: u64) {
        for sum in [&self.held, &self.shared.host_held] {
            sum.fetch_add(after.wrapping_sub(before), Ordering::AcqRel);
        }
    }

    /// How many of them are held.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }
}

impl std::fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} bytes", self.held.load(Ordering::Relaxed), self.reserved.load(Ordering::Relaxed))
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        let reserved = if broken("V-C") { 0 } else { *self.reserved.get_mut() };
        self.shared.host_reserved.fetch_sub(reserved, Ordering::AcqRel);
        self.shared.host_held.fetch_sub(*self.held.get_mut(), Ordering::AcqRel);
    }
}

/// Adds `more` to `sum` unless the result would exceed `limit`. Other threads never see a sum that was not granted.
fn take(sum: &AtomicU64, more: u64, limit: u64) -> bool {
    let granted = |sum: u64| sum.checked_add(more).filter(|sum| *sum <= limit);
    sum.fetch_update(Ordering::AcqRel, Ordering::Acquire, granted).is_ok()
}

/// What the handle and the engine thread both see.
pub(crate) struct Shared {
    pub limits: Limits,
    pub plan: Plan,
    pub ledger: Arc<Ledger>,
    pub metrics: Metrics,
    pub status: Status,
    pub cached: CacheStats,
    pub draining: AtomicBool,
    pub stop: AtomicBool,
    pub stopped: AtomicBool,
    /// What is held on the heap, once start-up has measured it; a scripted engine has none.
    pub accounts: OnceLock<Accounts>,
    /// Where the engine lives with others; none where it is alone.
    pub engine_host: OnceLock<Arc<EngineHost>>,
    /// The last look at the machine, and the level the engine stands on.
    pub gauge: Gauge,
    /// Whether the engine gets anywhere.
    pub watchdog: Watchdog,
    /// The tokens that end output, the model's and its tokenizer's.
    pub eos: OnceLock<Vec<u32>>,
    /// What the model takes besides text.
    pub media: OnceLock<MediaSpec>,
    /// What the prefix cache holds, where others are to know.
    pub kv_event_log: OnceLock<Arc<KvEventLog>>,
    /// Whether the watching thread runs, which restores the emergency reserve after refused allocations.
    pub reserve_kept: AtomicBool,
    /// The engine thread asks for the heap to be trimmed; the watching thread does it.
    pub trim: AtomicBool,
    host_reserved: AtomicU64,
    /// What requests really hold of it.
    host_held: AtomicU64,
    in_system: AtomicU64,
}

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
    /// Whether equal prefixes are shared.
    pub prefix_cache: AtomicBool,
    /// Steps taken since start.
    pub steps: AtomicU64,
    /// Looks around since start, those of an idle engine included.
    pub turns: AtomicU64,
    /// Milliseconds since the engine's epoch at which the last step ended (or the engine was idle).
    pub progress_ms: AtomicU64,
}

impl Shared {
    pub fn new(limits: Limits, plan: Plan, ledger: Arc<Ledger>) -> Self {
        Self {
            limits,
            plan,
            ledger,
            metrics: Metrics::default(),
            status: Status::default(),
            cached: CacheStats::default(),
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            accounts: OnceLock::new(),
            engine_host: OnceLock::new(),
            gauge: Gauge::default(),
            watchdog: Watchdog::new(STALL_LIMIT),
            eos: OnceLock::new(),
            media: OnceLock::new(),
            kv_event_log: OnceLock::new(),
            reserve_kept: AtomicBool::new(false),
            trim: AtomicBool::new(false),
            host_reserved: AtomicU64::new(0),
            host_held: AtomicU64::new(0),
            in_system: AtomicU64::new(0),
        }
    }
}

impl Shared {
    /// Host bytes reserved by requests in the system, and how many requests those are.
    pub fn reserved(&self) -> (u64, u64) {
        (self.host_reserved.load(Ordering::Acquire), self.in_system.load(Ordering::Acquire))
    }

    /// Planned bytes of the whole process.
    pub fn process_planned(&self) -> u64 {
        self.engine_host.get().map_or_else(|| self.plan.total(), |engine_host| engine_host.planned_total())
    }

    /// Committed bytes of the whole process.
    pub fn process_committed(&self) -> u64 {
        self.engine_host
            .get()
            .map_or_else(|| self.ledger.committed_total(), |engine_host| engine_host.committed_total())
    }

    /// The same with what is mapped and not there yet.
    pub fn process_mapped(&self) -> u64 {
        self.engine_host.get().map_or_else(|| self.ledger.mapped_total(), |engine_host| engine_host.mapped_total())
    }

    /// The most the whole process may use.
    pub fn process_line(&self) -> u64 {
        self.engine_host.get().map_or(self.plan.limit, |engine_host| engine_host.plan().limit)
    }

    /// Enters in the ledger what is measured rather than counted.
    pub fn observe_accounts(&self) {
        if let Some(accounts) = self.accounts.get() {
            let staged = self.media.get().map_or(0, |media| media.staging.used());
            accounts.observe(&self.ledger, self.host_held.load(Ordering::Acquire), staged);
        }
    }
}

/// A clonable handle to a running engine.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) arrivals: SyncSender<Arrival>,
    pub(crate) epoch: Instant,
}

impl EngineHandle {
    /// Checks, prices and queues a request. Never blocks.
    pub fn submit(&self, request: Request) -> Result<Reader, Refusal> {
        self.submit_since(request, Instant::now())
    }

    /// As [`Self::submit`], for a client that has waited since `asked`: the time to first token counts from there.
    pub fn submit_since(&self, request: Request, asked: Instant) -> Result<Reader, Refusal> {
        if self.shared.draining.load(Ordering::Acquire) {
            return Err(unavailable("the server is shutting down and accepts no new requests"));
        }
        self.queue(request, asked, self.shared.limits.max_waiting).inspect_err(|refusal| {
            if let Refusal::Full { .. } = refusal {
                self.shared.metrics.refused_full.inc();
            }
        })
    }

    /// As [`Self::submit`], for a further input of a request that has run some of its inputs. A draining server lets
    /// it finish. While other inputs still run (`beside`), it leaves half of the queue to other requests. A full
    /// queue does not count as a refusal: the caller waits and tries again.
    pub fn submit_next(&self, request: Request, beside: bool) -> Result<Reader, Refusal> {
        let waiting = self.shared.limits.max_waiting;
        self.queue(request, Instant::now(), if beside { waiting / 2 } else { waiting })
    }

    fn queue(&self, mut request: Request, asked: Instant, waiting: u32) -> Result<Reader, Refusal> {
        let limits = &self.shared.limits;
        request.embed.iter_mut().for_each(|embed| limits.complete(embed));
        request.check(limits).inspect_err(|_| {
            self.shared.metrics.refused_invalid.inc();
        })?;
        self.check_media(&request).inspect_err(|_| {
            self.shared.metrics.refused_invalid.inc();
        })?;
        if self.level() >= DegradationLevel::StopAdmitting {
            self.shared.metrics.refused_memory.inc();
            return Err(unavailable("memory is short on this machine: no new requests until it is back"));
        }
        if self.shared.reserve_kept.load(Ordering::Relaxed) && heap::reserve_blocks_missing() > 0 {
            self.shared.metrics.refused_memory.inc();
            return Err(unavailable(
                "memory was refused a moment ago: no new requests until the reserve is whole again",
            ));
        }
        if self.shared.watchdog.stalled() {
            return Err(unavailable("the engine makes no progress: no new requests until it does"));
        }
        let (place, bytes) = self.reserve(&request, waiting)?;
        let constraint = request.grammar.take().map(|grammar| grammar.begin()).transpose();
        let constraint = constraint.map_err(|message| {
            self.shared.metrics.refused_memory.inc();
            unavailable(&message)
        })?;
        let room =
            ByteReservation::reserve(&mut request, self.media()).map(|room| ByteReservation { constraint, ..room });
        let Some((room, (outbox, reader))) = room.and_then(|room| Some((room, outbox(bytes, &request)?))) else {
            self.shared.metrics.refused_memory.inc();
            return Err(unavailable("memory ran short on this machine; try again later"));
        };
        let arrival =
            Arrival { request, outbox, timestamps: Timestamps { asked, arrived: Instant::now() }, place, room };
        match self.arrivals.try_send(arrival) {
            Ok(()) => Ok(reader),
            Err(TrySendError::Full(_)) => Err(self.full("queue")),
            Err(TrySendError::Disconnected(_)) => Err(unavailable("the engine has stopped")),
        }
    }

    fn check_media(&self, request: &Request) -> Result<(), Refusal> {
        let invalid = |message: &str| Err(Refusal::Invalid { param: "messages", message: message.into() });
        match self.media() {
            _ if request.media.is_empty() => Ok(()),
            Some(_) if request.embed.is_some() => invalid("media are not embedded here: only text is"),
            Some(spec) => spec.check(&request.prompt, &request.media),
            None => invalid("this model takes text only: no images, video or sound"),
        }
    }

    /// Reserves the request's place among those that run and `waiting` more, and its host bytes, or says what is full.
    fn reserve(&self, request: &Request, waiting: u32) -> Result<(AdmissionPermit, HostBytes), Refusal> {
        let limits = &self.shared.limits;
        let bytes = request.host_bytes();
        if bytes > limits.host_bytes {
            self.shared.metrics.refused_invalid.inc();
            return Err(Refusal::Invalid {
                param: "max_tokens",
                message: format!(
                    "the request may hold {bytes} bytes on the host (ids, output, log-probabilities); the limit is {}",
                    limits.host_bytes
                ),
            });
        }
        let places = u64::from(limits.running_max_req_size) + u64::from(waiting);
        if !take(&self.shared.in_system, 1, if broken("V-AB") { u64::MAX } else { places }) {
            return Err(self.full("queue"));
        }
        let place = AdmissionPermit(Arc::clone(&self.shared));
        if !take(&self.shared.host_reserved, bytes, if broken("V-O") { u64::MAX } else { limits.host_bytes }) {
            return Err(self.full("host"));
        }
        Ok((place, HostBytes { shared: Arc::clone(&self.shared), reserved: bytes.into(), held: 0.into() }))
    }

    fn full(&self, what: &str) -> Refusal {
        let limits = &self.shared.limits;
        let message = match what {
            "host" => format!("all {} bytes for requests on the host are reserved; try again later", limits.host_bytes),
            // Not all need be alive: those that hung up hold their places until the engine's next step.
            _ => format!(
                "all {} places are taken ({} may run and {} wait); try again later",
                u64::from(limits.running_max_req_size) + u64::from(limits.max_waiting),
                limits.running_max_req_size,
                limits.max_waiting
            ),
        };
        Refusal::Full { message, retry_after_s: 1 }
    }

    /// The bounds requests are checked against.
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// The tokens that end output; none for an engine without a model.
    pub fn eos(&self) -> &[u32] {
        self.shared.eos.get().map_or(&[], Vec::as_slice)
    }

    /// What the model takes besides text, and within which limits; none for a model of text alone.
    pub fn media(&self) -> Option<&MediaSpec> {
        self.shared.media.get()
    }

    /// The plan this engine was built from.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// The ledger, live: what is measured rather than counted is measured now.
    pub fn ledger(&self) -> &Ledger {
        self.shared.observe_accounts();
        &self.shared.ledger
    }

    /// Everything there is to say about memory and requests at this moment.
    pub fn report(&self) -> LedgerReport {
        LedgerReport::of(&self.shared)
    }

    /// What the largest steps really took of the step workspace when they were proven; none for a scripted engine.
    pub fn proven_workspace_bytes(&self) -> Option<u64> {
        self.shared.accounts.get().map(|accounts| accounts.workspace_peak)
    }

    /// Counters and histograms.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// How far the engine gives way because memory is short on the machine.
    pub fn level(&self) -> DegradationLevel {
        self.shared.gauge.level()
    }

    /// Gauges, refreshed every step.
    pub fn status(&self) -> &Status {
        &self.shared.status
    }

    /// Host bytes reserved by requests in the system, and how many requests those are.
    pub fn reserved(&self) -> (u64, u64) {
        self.shared.reserved()
    }

    /// Host bytes that requests hold at this moment, of those that are reserved.
    pub fn held(&self) -> u64 {
        self.shared.host_held.load(Ordering::Acquire)
    }

    /// Whether the engine is alive and has made progress lately (or had nothing to do): within [`Self::stall_limit`].
    pub fn healthy(&self) -> bool {
        let progress = Duration::from_millis(self.shared.status.progress_ms.load(Ordering::Acquire));
        !self.stopped() && self.epoch.elapsed().saturating_sub(progress) <= self.stall_limit()
    }

    /// How long the engine may make no progress before it counts as stalled.
    pub fn stall_limit(&self) -> Duration {
        self.shared.watchdog.limit()
    }

    /// Sets [`Self::stall_limit`].
    pub fn set_stall_limit(&self, limit: Duration) {
        self.shared.watchdog.set_limit(limit);
    }

    /// Whether new requests are refused because of shutdown.
    pub fn draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// Stops admitting; requests already accepted are finished.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Ends every request with an error and the engine thread with them.
    pub fn stop(&self) {
        self.drain();
        self.shared.stop.store(true, Ordering::Release);
    }

    /// Whether the engine thread has ended.
    pub fn stopped(&self) -> bool {
        self.shared.stopped.load(Ordering::Acquire)
    }

    /// Whether nothing is running or waiting.
    pub fn idle(&self) -> bool {
        self.shared.in_system.load(Ordering::Acquire) == 0
    }
}

fn unavailable(message: &str) -> Refusal {
    Refusal::Unavailable { message: message.into(), retry_after_s: 5 }
}
