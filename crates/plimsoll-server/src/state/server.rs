//! The server's state that does not belong to one model: limits, budgets, clients, phase.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_engine::{EngineHandle, Limits};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;

use crate::http::access::Hosts;
use crate::http::budget::{ByteBudget, WorkBudget};
use crate::http::error::{ApiError, ApiResult, ServeError};
use crate::http::ids::Ids;
use crate::http::rates::Rates;
use crate::mcp::McpServers;
use crate::otlp::Tracer;
use crate::state::background::{BACKGROUND_MAX, Background};
use crate::state::config::ServerConfig;
use crate::state::counters::Metrics;
use crate::state::documents::Documents;
use crate::state::record::Recorder;
use crate::state::response_store::ResponseStore;
use crate::state::running::RunningRequests;
use crate::state::threads::TextWorkers;

/// The phases of a server's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ServerPhase {
    /// Accepting and answering.
    Serving,
    /// New requests are refused; running requests may finish.
    Draining,
    /// The drain deadline has passed, or a second signal came before it. Running requests now end with an error.
    Cut,
}

/// Waits for `phase`, or a later one.
pub(crate) async fn reached(phases: &mut watch::Receiver<ServerPhase>, phase: ServerPhase) {
    // An error means that the sender, and with it the server, was dropped. No request waits here then.
    let _ = phases.wait_for(|now| *now >= phase).await;
}

/// The most choices of one request to a model with these limits. Choices beyond the running limit wait.
pub(crate) fn choices_max(config: &ServerConfig, limits: &Limits) -> u32 {
    config.max_choices.min(limits.running_max_req_size.saturating_add(limits.max_waiting)).max(1)
}

/// The state that all models share.
pub(crate) struct ServerState {
    pub config: ServerConfig,
    /// Whether there is more than one model to serve.
    pub several: bool,
    /// The most choices of a request, for the OpenAPI document. With several models this is the upper limit of all.
    pub choices_max: u32,
    pub ids: Ids,
    pub bytes: Arc<ByteBudget>,
    pub metrics: Metrics,
    pub phase: watch::Sender<ServerPhase>,
    pub running: Arc<RunningRequests>,
    pub rates: Rates,
    pub started: Instant,
    pub responses: Arc<ResponseStore>,
    /// Responses that are made without a connection.
    pub background: Background,
    /// None where no PDF is read.
    pub documents: Option<Documents>,
    /// None where the operator allows no MCP server.
    pub mcp: Option<Arc<McpServers>>,
    /// The trace of requests, if it is recorded.
    pub recorder: Option<Recorder>,
    /// The exporter of traces, if there is one.
    pub tracer: Option<Tracer>,
    /// The host names that requests may use.
    pub hosts: Hosts,
    text_workers: TextWorkers,
    /// Heap bytes for bodies that are being parsed and tokenized. Lock order: a thread that holds a share of `parsing`
    /// may wait for a share of `tokenizing`, never the other way round.
    pub parsing: WorkBudget,
    pub tokenizing: WorkBudget,
    /// Panics that were caught while requests were handled.
    panics: Counter,
    /// Requests that the engine or the HTTP side refused as invalid, for the only model. With several, each model counts its own.
    pub invalid: Option<Counter>,
}

impl ServerState {
    /// `engine`: the only model's engine, which counts all panics; none where there are several models.
    pub fn new(config: ServerConfig, engine: Option<&EngineHandle>) -> Result<Arc<Self>, ServeError> {
        config.check()?;
        let bytes = ByteBudget::new(config.max_bytes_in_flight);
        let responses = ResponseStore::new(config.response_store_bytes);
        let recorder = config.record.as_ref().map(|record| Recorder::open(record, &bytes)).transpose()?;
        let tracer = config.otlp.as_ref().map(Tracer::open).transpose()?;
        let panics = engine.map_or_else(Counter::default, |engine| engine.metrics().panics.clone());
        Ok(Arc::new(Self {
            several: engine.is_none(),
            choices_max: engine.map_or(config.max_choices.max(1), |engine| choices_max(&config, engine.limits())),
            metrics: Metrics::new(engine.is_none().then(|| panics.clone())),
            panics,
            invalid: engine.map(|engine| engine.metrics().refused_invalid.clone()),
            responses,
            documents: Documents::new(&config),
            mcp: McpServers::new(&config.mcp).map_err(ServeError::Config)?,
            background: Background::new(),
            recorder,
            tracer,
            text_workers: TextWorkers::new(config.text_workers),
            parsing: WorkBudget::new(config.parsing_bytes_max()),
            tokenizing: WorkBudget::new(config.max_tokenizing_bytes),
            ids: Ids::default(),
            phase: watch::Sender::new(ServerPhase::Serving),
            running: RunningRequests::new(config.max_connections + BACKGROUND_MAX),
            rates: Rates::new(config.rates),
            started: Instant::now(),
            hosts: Hosts::new(&config.host, &config.api_keys, &config.allowed_hosts),
            bytes,
            config,
        }))
    }

    /// Whether new requests are refused.
    pub fn draining(&self) -> bool {
        *self.phase.borrow() != ServerPhase::Serving
    }

    /// Runs work on text (parsing, templates, tokenizing) on a text worker. A panic in it becomes this request's error.
    pub async fn on_text_worker<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        match self.text_workers.run(work).await? {
            Some(result) => result,
            None => Err(self.panicked("reading the request, rendering its prompt or tokenizing it")),
        }
    }

    /// Counts a panic, and returns its request's error. `doing`: the work that panicked.
    pub fn panicked(&self, doing: &str) -> ApiError {
        self.panics.inc();
        ApiError::internal(format!("the server panicked while {doing}; this request has failed, the others go on"))
    }
}
