//! A clonable handle to the engine. `submit` runs on the caller's thread: it checks the request, reserves memory,
//! allocates the request's buffers and queues it. The engine thread does the rest.

mod cache;
mod hosted;
mod saved;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use plimsoll_memory::{Ledger, Plan, heap};

use crate::api::admission::{AdmissionPermit, HostBytes};
use crate::api::degradation::DegradationLevel;
use crate::api::error::Refusal;
use crate::api::limits::Limits;
use crate::media::MediaSpec;
use crate::metrics::Metrics;
use crate::request::Request;
use crate::request::outbox::Reader;
use crate::request::state::{Arrival, RequestState};
use crate::shared::Shared;
pub use crate::status::Status;
use crate::watch::host::EngineHost;
use crate::watch::ledger_report::LedgerReport;
pub use saved::{SavePrefixError, SavedPrefix};

/// The relation of a submission to earlier ones of the same client request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitKind {
    /// A new request: a draining server refuses it.
    New,
    /// A further turn of a request that has run one. A draining server lets it finish.
    Turn,
    /// A further input of a request that has run some. A draining server lets it finish. A full queue does not count as a refusal:
    /// the caller waits and tries again.
    Input {
        /// Other inputs of the request run: it leaves half of the queue to other requests.
        others_run: bool,
    },
}

/// A clonable handle to a running engine.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
    /// The host of several engines that share one memory limit; none of a single engine.
    pub(crate) engine_host: Option<Arc<EngineHost>>,
    pub(crate) arrivals: SyncSender<Arrival>,
    pub(crate) epoch: Instant,
}

impl EngineHandle {
    /// Checks a request, reserves its memory and queues it. Never blocks.
    pub fn submit(&self, request: Request) -> Result<Reader, Refusal> {
        self.submit_as(SubmitKind::New, request)
    }

    /// As [`Self::submit`]. `kind` says whether a draining or full server refuses it.
    pub fn submit_as(&self, kind: SubmitKind, mut request: Request) -> Result<Reader, Refusal> {
        if kind == SubmitKind::New && self.shared.shutdown.draining.load(Ordering::Acquire) {
            return Err(unavailable("the server is shutting down and accepts no new requests"));
        }
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
        if self.shared.monitor.reserve_kept.load(Ordering::Relaxed) && heap::reserve_blocks_missing() > 0 {
            self.shared.metrics.refused_memory.inc();
            return Err(unavailable(
                "the machine refused memory a moment ago: no new requests until the emergency reserve is whole again; try again in a few seconds",
            ));
        }
        if self.stopped() {
            return Err(unavailable("the engine has stopped"));
        }
        if self.shared.monitor.watchdog.stalled() {
            return Err(unavailable("the engine makes no progress: no new requests until it does"));
        }
        let (permit, bytes) = self.reserve(kind, &request)?;
        let constraint = request.grammar.take().map(|grammar| grammar.begin()).transpose();
        let constraint = constraint.map_err(|message| {
            self.shared.metrics.refused_memory.inc();
            unavailable(&message)
        })?;
        let vocab = limits.vocab_size as usize;
        let made = RequestState::new_seq(request, constraint, bytes, permit, vocab, self.media());
        let Some((new_seq, reader)) = made else {
            self.shared.metrics.refused_memory.inc();
            return Err(unavailable("memory ran short on this machine; try again later"));
        };
        match self.arrivals.try_send(Some(new_seq)) {
            Ok(()) => Ok(reader),
            Err(TrySendError::Full(_)) => Err(self.refuse_full(kind, "queue")),
            Err(TrySendError::Disconnected(_)) => Err(unavailable("the engine has stopped")),
        }
    }

    fn check_media(&self, request: &Request) -> Result<(), Refusal> {
        let invalid = |message: &str| Err(Refusal::Invalid { param: "messages", message: message.into() });
        self.media().map_or(Ok(()), |spec| spec.check_decoded(&request.media))?;
        match self.media() {
            _ if request.media.is_empty() => Ok(()),
            Some(_) if request.embed.is_some() => invalid("media are not embedded here: only text is"),
            Some(spec) if spec.image_in_one_step && request.prompt_logprobs.is_some() => {
                invalid("prompt_logprobs are not available beside images for this model: leave one of them out")
            }
            Some(spec) => spec.check(&request.prompt, &request.media),
            None => invalid("this model takes text only: no images, video or audio"),
        }
    }

    /// Takes a place among the running and waiting requests, and reserves the request's host bytes.
    ///
    /// # Errors
    /// [`Refusal::Full`] if there are no places or bytes left; [`Refusal::Invalid`] if the request needs more than all
    /// bytes.
    fn reserve(&self, kind: SubmitKind, request: &Request) -> Result<(AdmissionPermit, HostBytes), Refusal> {
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
        let halved = matches!(kind, SubmitKind::Input { others_run: true });
        let waiting_max = if halved { limits.max_waiting / 2 } else { limits.max_waiting };
        let places = u64::from(limits.running_max_req_size) + u64::from(waiting_max);
        let Some(permit) = self.shared.reservations.take_place(places) else {
            return Err(self.refuse_full(kind, "queue"));
        };
        let Some(bytes) = self.shared.reservations.reserve(bytes) else { return Err(self.refuse_full(kind, "host")) };
        Ok((permit, bytes))
    }

    /// Counts the refusal, except of an input that is tried again.
    fn refuse_full(&self, kind: SubmitKind, what: &str) -> Refusal {
        let limits = &self.shared.limits;
        if !matches!(kind, SubmitKind::Input { .. }) {
            self.shared.metrics.refused_full.inc();
        }
        let message = match what {
            "host" => format!("all {} bytes for requests on the host are reserved; try again later", limits.host_bytes),
            // Disconnected clients hold their places until the engine's next step.
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
        self.shared.facts.eos.get().map_or(&[], Vec::as_slice)
    }

    /// The media that the model takes, and their limits; none for a text-only model.
    pub fn media(&self) -> Option<&MediaSpec> {
        self.shared.facts.media.get()
    }

    /// The plan this engine was built from.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// The ledger, with its measured components up to date.
    pub fn ledger(&self) -> &Ledger {
        self.shared.observe_accounts();
        &self.shared.ledger
    }

    /// A report of memory and requests at this moment.
    pub fn report(&self) -> LedgerReport {
        LedgerReport::of(&self.shared, self.engine_host.as_deref())
    }

    /// Bytes of the step workspace that the self-test used; none for a scripted engine.
    pub fn measured_workspace_bytes(&self) -> Option<u64> {
        self.shared.facts.accounts.get().map(|accounts| accounts.workspace_peak)
    }

    /// Counters and histograms.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// The degradation level, which is higher when memory is short on the machine.
    pub fn level(&self) -> DegradationLevel {
        self.shared.monitor.gauge.level()
    }

    /// Gauges, refreshed every step.
    pub fn status(&self) -> &Status {
        &self.shared.status
    }

    /// Host bytes reserved by requests in the system, and how many requests those are.
    pub fn reserved(&self) -> (u64, u64) {
        let reservations = &self.shared.reservations;
        (reservations.reserved(), reservations.in_system())
    }

    /// Host bytes that requests hold at this moment, of their reserved bytes.
    pub fn held(&self) -> u64 {
        self.shared.reservations.held()
    }

    /// Whether the engine is alive and has made progress lately (or had nothing to do): within [`Self::stall_limit`].
    pub fn healthy(&self) -> bool {
        let progress = Duration::from_millis(self.shared.status.progress_ms.load(Ordering::Acquire));
        !self.stopped() && self.epoch.elapsed().saturating_sub(progress) <= self.stall_limit()
    }

    /// The longest time without progress before the engine counts as stalled.
    pub fn stall_limit(&self) -> Duration {
        self.shared.monitor.watchdog.limit()
    }

    /// Sets [`Self::stall_limit`].
    pub fn set_stall_limit(&self, limit: Duration) {
        self.shared.monitor.watchdog.set_limit(limit);
    }

    /// Whether new requests are refused because of shutdown.
    pub fn draining(&self) -> bool {
        self.shared.shutdown.draining.load(Ordering::Acquire)
    }

    /// Stops admitting; requests already accepted are finished.
    pub fn drain(&self) {
        self.shared.shutdown.draining.store(true, Ordering::Release);
    }

    /// Ends every request with an error and the engine thread with them.
    pub fn stop(&self) {
        self.drain();
        self.shared.shutdown.stop.store(true, Ordering::Release);
        // An idle engine would see the flag only in its next iteration. A full queue means that it is not idle.
        let _ = self.arrivals.try_send(None);
    }

    /// Waits until the engine thread has ended and has written its data to disk. False when that takes longer than `within`.
    pub fn wait_stopped(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        while !self.stopped() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stopped()
    }

    /// Whether the engine thread has ended.
    pub fn stopped(&self) -> bool {
        self.shared.shutdown.stopped.load(Ordering::Acquire)
    }

    /// Whether nothing is running or waiting.
    pub fn idle(&self) -> bool {
        self.shared.reservations.in_system() == 0
    }
}

fn unavailable(message: &str) -> Refusal {
    Refusal::Unavailable { message: message.into(), retry_after_s: 5 }
}
