//! Several models in one process, by name. The first request for a model loads it. A model is unloaded when it has been idle for long, or
//! when another model needs its memory. All models share one memory limit.
//!
//! A model has one size: the plan for it alone under the memory limit, so that its limits are the same at every load. It is loaded when
//! that much is left. To make room, idle models are unloaded, the one idle for longest first. One model is loaded at a time; requests wait
//! meanwhile.
//!
//! Not here: finding, planning and building a model ([`Loader`]), and the state of requests (`state`).

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

/// The most models of one server.
const MODELS_MAX: usize = 64;

/// Time between two searches for idle models.
const LOOK: Duration = Duration::from_millis(500);

/// A model that can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The model's names; the first is canonical.
    pub names: Vec<String>,
    /// The idle time after which the model is unloaded. None: only when another model needs its memory.
    pub idle_after: Option<Duration>,
    /// Bytes that structured output of this model may take.
    pub grammar_bytes: u64,
}

/// Why a model could not be loaded, in words for clients.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The model does not fit under the memory limit even alone.
    #[error("{0}")]
    TooLarge(String),
    /// The machine has no room for the model at the moment.
    #[error("{0}")]
    NoRoom(String),
    /// The model is broken, or cannot be found.
    #[error("{0}")]
    Failed(String),
    /// No request waited for the model any more, or the server shut down.
    #[error("the load was given up")]
    Cancelled,
}

/// Plans, builds and ends engines. All methods may block: they are called on threads that may wait.
pub trait Loader: Send + Sync + 'static {
    /// Returns the bytes that the `index`-th model plans. Its files may have to be fetched first. Stops once `cancel` is set, because no
    /// request waits.
    ///
    /// # Errors
    /// [`LoadError`] when it can never be loaded.
    fn needed(&self, index: usize, cancel: &Cancel) -> Result<u64, LoadError>;

    /// Bytes under the memory limit that are not part of any plan.
    fn room(&self) -> u64;

    /// Loads the `index`-th model. Stops once `cancel` is set, because no request waits for it any more.
    ///
    /// # Errors
    /// [`LoadError`]; no part of the model then stays in memory.
    fn load(&self, index: usize, cancel: &Cancel) -> Result<Served, LoadError>;

    /// Ends an engine that no request uses and frees its memory, together with its last handle. Returns false when the engine did not end
    /// in time.
    fn unload(&self, engine: EngineHandle) -> bool;

    /// Returns one report over these engines, all that they share, and a model that is being loaded or unloaded.
    fn report(&self, engines: &[&EngineHandle]) -> LedgerReport;

    /// Returns the same report without these engines.
    fn shared_report(&self, engines: &[&EngineHandle]) -> LedgerReport;
}

/// All models of a server.
pub(crate) struct Registry {
    server: Arc<ServerState>,
    slots: Vec<Slot>,
    loader: Arc<dyn Loader>,
    created_s: u64,
    /// Held while a model is loaded or unloaded.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// Serves several models until it is told to stop, then drains as `serve` does.
///
/// # Errors
/// [`ServeError::Config`] when limits contradict each other or a name occurs twice.
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

    /// Returns the index of the model with this name; without a name, of the first model.
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

    /// Returns the loaded models, in their listed order.
    fn loaded(&self) -> Vec<Arc<ModelState>> {
        self.slots.iter().filter_map(Slot::loaded).collect()
    }

    /// Refuses new requests in every loaded engine.
    fn drain(&self) {
        self.loaded().iter().for_each(|state| state.served.engine.drain());
    }

    /// Ends every engine at the end of the server.
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
