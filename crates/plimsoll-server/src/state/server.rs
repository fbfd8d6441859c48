//! What the server is whatever models it has: its limits and what is left of them, its clients, its phase.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_engine::EngineHandle;
use plimsoll_memory::broken;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;

use crate::http::access::Hosts;
use crate::http::budget::{ByteBudget, WorkBudget};
use crate::http::error::{ApiError, ApiResult, ServeError};
use crate::http::ids::Ids;
use crate::http::rates::Rates;
use crate::state::config::ServerConfig;
use crate::state::counters::Metrics;
use crate::state::record::Recorder;
use crate::state::response_store::ResponseStore;
use crate::state::running::Running;
use crate::state::threads::TextWorkers;

/// How far the server's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Accepting and answering.
    Serving,
    /// Accepting nothing new; what runs may finish.
    Draining,
    /// The drain deadline has passed, or a second signal came before it. Running requests end with an error now.
    Cut,
}

/// Waits until the server's life has come to `phase`, or beyond.
pub(crate) async fn reached(phases: &mut watch::Receiver<Phase>, phase: Phase) {
    // An error means that the sender is gone, and with it the server. No request waits here then.
    let _ = phases.wait_for(|now| *now >= phase).await;
}

/// What all models share.
pub(crate) struct ServerState {
    pub config: ServerConfig,
    /// There is more than one model to serve.
    pub several: bool,
    /// Most choices of a request; of several models, none takes more.
    pub choices_max: u32,
    pub ids: Ids,
    pub bytes: Arc<ByteBudget>,
    pub metrics: Metrics,
    pub phase: watch::Sender<Phase>,
    pub running: Arc<Running>,
    pub rates: Rates,
    pub started: Instant,
    pub responses: Arc<ResponseStore>,
    /// Where what is asked is written down.
    pub recorder: Option<Recorder>,
    /// The names of this server that a request may go to.
    pub hosts: Hosts,
    text_workers: TextWorkers,
    /// Heap bytes for bodies that are being parsed and tokenized. Lock order: a thread that holds a share of `parsing`
    /// may wait for a share of `tokenizing`, never the other way round.
    pub parsing: WorkBudget,
    pub tokenizing: WorkBudget,
    /// Panics that were caught on a request's way.
    panics: Counter,
    /// Requests that the only model's engine or HTTP refused as invalid; of several, each model's own counts.
    pub invalid: Option<Counter>,
}

impl ServerState {
    /// `engine`: the only one, which counts all panics; none where there are several.
    pub fn new(config: ServerConfig, engine: Option<&EngineHandle>) -> Result<Arc<Self>, ServeError> {
        config.check()?;
        let bytes = ByteBudget::new(config.max_bytes_in_flight);
        let kept = if broken("V-N") { u64::MAX } else { config.response_store_bytes };
        let responses = ResponseStore::new(kept);
        let recorder = config.record.as_ref().map(|record| Recorder::open(record, &bytes)).transpose()?;
        let panics = engine.map_or_else(Counter::default, |engine| engine.metrics().panics.clone());
        Ok(Arc::new(Self {
            several: engine.is_none(),
            choices_max: config
                .max_choices
                .min(engine.map_or(u32::MAX, |engine| engine.limits().running_max_req_size))
                .max(1),
            metrics: Metrics::new(engine.is_none().then(|| panics.clone())),
            panics,
            invalid: engine.map(|engine| engine.metrics().refused_invalid.clone()),
            responses,
            recorder,
            text_workers: TextWorkers::new(config.text_workers),
            parsing: WorkBudget::new(config.parsing_bytes_max()),
            tokenizing: WorkBudget::new(config.max_tokenizing_bytes),
            ids: Ids::default(),
            phase: watch::Sender::new(Phase::Serving),
            running: Running::new(config.max_connections),
            rates: Rates::new(config.rates),
            started: Instant::now(),
            hosts: Hosts::new(&config.host, &config.api_keys, &config.allowed_hosts),
            bytes,
            config,
        }))
    }

    /// Whether nothing new is taken.
    pub fn draining(&self) -> bool {
        *self.phase.borrow() != Phase::Serving
    }

    /// Runs work on text (parsing, templates, tokenizing) on a blocking thread, a bounded number at once. A panic in it
    /// is this request's error.
    pub async fn on_text_worker<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        match self.text_workers.run(work).await? {
            Some(result) => result,
            None => Err(self.panicked("reading the request, rendering its prompt or tokenizing it")),
        }
    }

    /// Counts a panic on a request's way, and what that client is told of what was being done then.
    pub fn panicked(&self, doing: &str) -> ApiError {
        self.panics.inc();
        ApiError::internal(format!("the server panicked while {doing}; this request has failed, the others go on"))
    }
}
