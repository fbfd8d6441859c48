//! Several models in one process, by name. The first request for a model loads it. It is unloaded when it has been idle
//! for long, or when another model needs its memory. All of them share one memory limit.
//!
//! A model has one size: the plan for it alone under the memory limit, so that its limits are the same at every load.
//! It is loaded when that much is left. To make room, idle models are unloaded, the one idle for longest first. One
//! model is loaded at a time; requests wait meanwhile.
//!
//! Not here: how a model is found, planned and built ([`Loader`]), and what a request is (`state`).

mod answer;
mod dispatch;
mod eviction;
mod load;
mod pages;
mod slot;
mod waiting;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};
use plimsoll_engine::report::LedgerReport;
use plimsoll_engine::{Cancel, EngineHandle};
use tokio::net::TcpListener;
use tokio::time::{interval, timeout};

use self::slot::{InUse, Loaded, Slot, State};
use crate::http::error::{ApiError, ApiResult, ServeError, quote};
use crate::serve::listen::{StopSignals, let_go, run};
use crate::serve::router::with_middleware;
use crate::state::config::{Served, ServerConfig, is_named};
use crate::state::model::ModelState;
use crate::state::server::ServerState;
use crate::transcriptions;

/// Most models of one server.
const MODELS_MAX: usize = 64;

/// Time between two searches for idle models.
const LOOK: Duration = Duration::from_millis(500);

/// A model that can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Names it answers to; the first is canonical.
    pub names: Vec<String>,
    /// It is unloaded when it has been idle for this long. None: only when another model needs its memory.
    pub idle_after: Option<Duration>,
    /// Bytes that constrained output of this model may take.
    pub grammar_bytes: u64,
}

/// Why a model could not be loaded, in words for clients.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// It does not fit under the line even alone.
    #[error("{0}")]
    TooLarge(String),
    /// Not now: the machine has no room for it.
    #[error("{0}")]
    NoRoom(String),
    /// It is broken, or cannot be found.
    #[error("{0}")]
    Failed(String),
    /// No request waited for it any more.
    #[error("the load was given up")]
    Cancelled,
}

/// Plans, builds and ends engines. All methods may block: they are called on threads that may wait.
pub trait Loader: Send + Sync + 'static {
    /// Bytes that the `index`-th model plans. Its files may have to be fetched first. Given up once `cancel` says that
    /// no request waits.
    ///
    /// # Errors
    /// [`LoadError`] when it can never be loaded.
    fn needed(&self, index: usize, cancel: &Cancel) -> Result<u64, LoadError>;

    /// Bytes under the memory limit that are not part of any plan.
    fn room(&self) -> u64;

    /// Loads the `index`-th model, until `cancel` says that no request waits for it any more.
    ///
    /// # Errors
    /// [`LoadError`]; nothing of it stays then.
    fn load(&self, index: usize, cancel: &Cancel) -> Result<Served, LoadError>;

    /// Ends an engine that no request uses and gives its memory back, with that of its last handle. False when it did
    /// not end in time.
    fn unload(&self, engine: EngineHandle) -> bool;

    /// What these engines, all that they share, and a model on its way in or out hold, as one.
    fn report(&self, engines: &[&EngineHandle]) -> LedgerReport;

    /// The same without these engines.
    fn shared_report(&self, engines: &[&EngineHandle]) -> LedgerReport;
}

/// All of them.
pub(crate) struct Registry {
    server: Arc<ServerState>,
    slots: Vec<Slot>,
    loader: Arc<dyn Loader>,
    created_s: u64,
    /// Held while a model is loaded or unloaded.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// Serves several models until it is told to end, then drains as `serve` does.
///
/// # Errors
/// [`ServeError::Config`] when limits contradict each other or a name is there twice.
pub async fn serve_models(
    listener: TcpListener,
    listed: Vec<Listed>,
    loader: Arc<dyn Loader>,
    config: ServerConfig,
    told: StopSignals,
) -> Result<(), ServeError> {
    check(&listed)?;
    let server = ServerState::new(config, None)?;
    let registry = Registry::new(&server, listed, loader);
    let routes = routes(&registry);
    let looking = tokio::spawn(look_after(Arc::clone(&registry)));
    run(listener, &server, with_middleware(Arc::clone(&server), routes), || registry.drain(), told).await;
    looking.abort();
    registry.end().await;
    Ok(())
}

fn check(listed: &[Listed]) -> Result<(), ServeError> {
    let wrong = |message: String| Err(ServeError::Config(message));
    if !(1..=MODELS_MAX).contains(&listed.len()) {
        return wrong(format!("there are {} models; 1 to {MODELS_MAX} are allowed", listed.len()));
    }
    let mut seen = HashSet::from(["default"]);
    for name in listed.iter().flat_map(|listed| &listed.names) {
        if !seen.insert(name) {
            return wrong(format!("`{name}` names two models"));
        }
    }
    match listed.iter().all(|listed| !listed.names.is_empty()) {
        true => Ok(()),
        false => wrong("a model has no name".into()),
    }
}

fn routes(registry: &Arc<Registry>) -> Router {
    let asked = [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        transcriptions::PATH,
        transcriptions::TRANSLATIONS,
    ];
    let also = [
        "/v1/embeddings",
        "/v2/embed",
        "/score",
        "/infill",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/tokenize",
        "/detokenize",
    ];
    let ollamas = ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull"];
    let routes = asked
        .iter()
        .chain(&also)
        .chain(&ollamas)
        .fold(Router::new(), |routes, path| routes.route(path, post(dispatch::handle)));
    routes
        .route("/v1", get(pages::index))
        .route("/v1/", get(pages::index))
        .route("/v1/models", get(pages::list))
        .route("/v1/models/{*id}", get(pages::one))
        .route("/api/tags", get(pages::tags))
        .route("/api/ps", get(pages::ps))
        .route("/health", get(pages::health))
        .route("/ready", get(pages::ready))
        .route("/metrics", get(pages::metrics))
        .route("/v1/memory", get(pages::memory))
        .route("/v1/status", get(pages::status))
        .route("/v1/cache", get(pages::cache).delete(pages::clear))
        .with_state(Arc::clone(registry))
}

/// Unloads each model that has been idle for its `idle_after`.
async fn look_after(registry: Arc<Registry>) {
    let mut look = interval(LOOK);
    loop {
        look.tick().await;
        for index in 0..registry.slots.len() {
            if registry.idle_too_long(index) {
                let _turn = registry.turn.lock().await;
                registry.unload(index, registry.slots[index].listed.idle_after).await;
            }
        }
    }
}

impl Registry {
    fn new(server: &Arc<ServerState>, listed: Vec<Listed>, loader: Arc<dyn Loader>) -> Arc<Self> {
        let slots = listed.into_iter().map(Slot::new).collect();
        let (server, created_s) = (Arc::clone(server), crate::http::ids::now_s());
        Arc::new(Self { server, slots, loader, created_s, turn: Arc::default() })
    }

    /// Which model goes by a name; the first where none is named.
    fn find(&self, name: Option<&str>) -> ApiResult<usize> {
        let Some(name) = name.filter(|name| *name != "default") else { return Ok(0) };
        let known = |slot: &Slot| is_named(&slot.listed.names, name);
        self.slots.iter().position(known).ok_or_else(|| {
            let names: Vec<&str> = self.slots.iter().map(Slot::name).collect();
            let names = names.join("`, `");
            let message = format!("the model `{}` does not exist here; this server has `{names}`", quote(name));
            let error = ApiError::new(StatusCode::NOT_FOUND, message);
            ApiError { code: Some("model_not_found"), param: Some("model".into()), ..error }
        })
    }

    /// Those that are loaded, in the order in which they are listed.
    fn loaded(&self) -> Vec<Arc<ModelState>> {
        self.slots.iter().filter_map(Slot::loaded).collect()
    }

    /// Nothing new is taken.
    fn drain(&self) {
        self.loaded().iter().for_each(|state| state.served.engine.drain());
    }

    /// The server is over: every engine ends.
    async fn end(&self) {
        // A load that is under way has been told to stop.
        let load_checkpoint_timeout = self.server.config.load_checkpoint_timeout;
        let Ok(_turn) = timeout(load_checkpoint_timeout, self.turn.lock()).await else {
            tracing::error!(
                "a load goes on after {} s; the process ends without it",
                load_checkpoint_timeout.as_secs()
            );
            return;
        };
        let engines: Vec<EngineHandle> = self.loaded().iter().map(|state| state.served.engine.clone()).collect();
        let handles: Vec<&EngineHandle> = engines.iter().collect();
        let_go(&handles).await;
        tracing::info!("drained; the ledger at the end:\n{}", self.loader.report(&handles));
        drop(engines);
        for index in 0..self.slots.len() {
            self.unload(index, None).await;
        }
    }
}
