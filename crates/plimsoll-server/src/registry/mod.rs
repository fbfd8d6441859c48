//! Several models in one process, by name: each is loaded when it is first asked for and unloaded when nobody has asked for long, or when
//! another needs its room. All of them stay inside the one line.
//!
//! A model has one size, which it is planned with alone under the line, so that its limits are the same at every load. It is loaded when
//! that much is left: models nobody uses give way, the one not used for longest first. One is loaded at a time; who asks meanwhile waits.
//! What must not be in here: how a model is found, planned and built ([`Loader`]), and what a request is (`app`).

mod dispatch;
mod pages;
mod waiting;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};
use plimsoll_engine::EngineHandle;
use plimsoll_engine::report::LedgerReport;
use plimsoll_memory::Bytes;
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tokio::time::{interval, timeout};

use crate::app::{App, behind_the_door, model_routes};
use crate::config::{Served, ServerConfig};
use crate::error::{ApiError, ApiResult, ServeError, quote};
use crate::front::Front;
use crate::serve::run;

/// Most models of one server.
const MODELS_MAX: usize = 64;

/// A load that has failed is not tried again for this long: its error is told at once.
const FAILED_FOR: Duration = Duration::from_secs(5);

/// Between two looks for models that nobody uses.
const LOOK: Duration = Duration::from_millis(500);

/// When a client who was told that others use the room may come back.
const RETRY_AFTER_S: u32 = 5;

/// A model that can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Names it answers to; the first is canonical.
    pub names: Vec<String>,
    /// It is unloaded when nobody has used it for this long; none: only when another needs its room.
    pub idle_after: Option<Duration>,
    /// Bytes that constrained output of this model may take.
    pub grammar_bytes: u64,
}

/// Why a model could not be loaded, in words for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// It does not fit under the line even alone.
    TooLarge(String),
    /// Not now: the machine has no room for it.
    NoRoom(String),
    /// It is broken, or cannot be found.
    Failed(String),
}

/// Who plans, builds and ends engines. All of it takes its time and is called on threads that may wait.
pub trait Loader: Send + Sync + 'static {
    /// Bytes that the `index`-th model plans.
    ///
    /// # Errors
    /// [`LoadError`] when it can never be loaded.
    fn needed(&self, index: usize) -> Result<u64, LoadError>;

    /// Bytes under the line that nobody has planned.
    fn room(&self) -> u64;

    /// Loads the `index`-th model.
    ///
    /// # Errors
    /// [`LoadError`]; nothing of it stays then.
    fn load(&self, index: usize) -> Result<Served, LoadError>;

    /// Ends an engine that nobody uses and gives its memory back. False when it did not end in time.
    fn unload(&self, engine: &EngineHandle) -> bool;

    /// What these engines and all that they share hold, as one.
    fn report(&self, engines: &[&EngineHandle]) -> LedgerReport;
}

/// A loaded model and its routes.
#[derive(Clone)]
struct Loaded {
    app: Arc<App>,
    routes: Router,
}

/// Where a model stands.
enum State {
    Unloaded,
    Loading,
    Loaded(Loaded),
    Unloading,
}

impl State {
    fn name(&self) -> &'static str {
        match self {
            Self::Unloaded => "unloaded",
            Self::Loading => "loading",
            Self::Loaded(_) => "loaded",
            Self::Unloading => "unloading",
        }
    }
}

struct Inner {
    state: State,
    /// Requests that are being answered by it.
    users: usize,
    /// When it was last used.
    used: Instant,
    /// What it plans, once that is known.
    needed: Option<u64>,
    /// The last load that failed.
    failed: Option<(Instant, LoadError)>,
    loads: u64,
}

struct Slot {
    listed: Listed,
    inner: Mutex<Inner>,
}

impl Slot {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every change is one assignment.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> &str {
        &self.listed.names[0]
    }
}

/// All of them.
pub(crate) struct Registry {
    front: Arc<Front>,
    slots: Vec<Slot>,
    loader: Arc<dyn Loader>,
    created_s: u64,
    /// Whoever loads or unloads holds it.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// A use of a loaded model; it is not unloaded before this is dropped.
struct InUse {
    registry: Arc<Registry>,
    index: usize,
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut inner = self.registry.slots[self.index].inner();
        inner.users -= 1;
        inner.used = Instant::now();
    }
}

/// Serves several models until `shutdown` completes, then drains as [`crate::serve`] does.
///
/// # Errors
/// [`ServeError::Config`] when limits contradict each other or a name is there twice.
pub async fn serve_models(
    listener: TcpListener,
    listed: Vec<Listed>,
    loader: Arc<dyn Loader>,
    config: ServerConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    check(&listed)?;
    let front = Front::new(config, None)?;
    let registry = Registry::new(&front, listed, loader);
    let routes = routes(&registry);
    let looking = tokio::spawn(look_after(Arc::clone(&registry)));
    run(listener, &front, behind_the_door(Arc::clone(&front), routes), || registry.drain(), shutdown).await;
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
    let asked =
        ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"];
    let also = ["/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"];
    let routes =
        asked.iter().chain(&also).fold(Router::new(), |routes, path| routes.route(path, post(dispatch::handle)));
    routes
        .route("/v1/models", get(pages::list))
        .route("/v1/models/{*id}", get(pages::one))
        .route("/health", get(pages::health))
        .route("/ready", get(pages::ready))
        .route("/metrics", get(pages::metrics))
        .route("/v1/memory", get(pages::memory))
        .route("/v1/status", get(pages::status))
        .route("/v1/cache", get(pages::cache).delete(pages::clear))
        .route("/v1/cache/clear", post(pages::clear))
        .with_state(Arc::clone(registry))
}

/// Unloads what nobody has used for as long as it says.
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
    fn new(front: &Arc<Front>, listed: Vec<Listed>, loader: Arc<dyn Loader>) -> Arc<Self> {
        let inner =
            || Inner { state: State::Unloaded, users: 0, used: Instant::now(), needed: None, failed: None, loads: 0 };
        let slots = listed.into_iter().map(|listed| Slot { listed, inner: Mutex::new(inner()) }).collect();
        let (front, created_s) = (Arc::clone(front), crate::models::now_s());
        Arc::new(Self { front, slots, loader, created_s, turn: Arc::default() })
    }

    /// Which model goes by a name; the first where none is named.
    fn find(&self, name: Option<&str>) -> ApiResult<usize> {
        let Some(name) = name.filter(|name| *name != "default") else { return Ok(0) };
        let known = |slot: &Slot| slot.listed.names.iter().any(|known| known == name);
        self.slots.iter().position(known).ok_or_else(|| {
            let names: Vec<&str> = self.slots.iter().map(Slot::name).collect();
            let names = names.join("`, `");
            let message = format!("the model `{}` does not exist here; this server has `{names}`", quote(name));
            let error = ApiError::new(StatusCode::NOT_FOUND, message);
            ApiError { code: Some("model_not_found"), param: Some("model".into()), ..error }
        })
    }

    /// Those that are loaded, in the order in which they are listed.
    fn loaded(&self) -> Vec<Arc<App>> {
        let app = |slot: &Slot| match &slot.inner().state {
            State::Loaded(loaded) => Some(Arc::clone(&loaded.app)),
            _ => None,
        };
        self.slots.iter().filter_map(app).collect()
    }

    /// Begins a use of a model that is loaded.
    fn enter(self: &Arc<Self>, index: usize) -> Option<(Loaded, InUse)> {
        let mut inner = self.slots[index].inner();
        let State::Loaded(loaded) = &inner.state else { return None };
        let loaded = loaded.clone();
        inner.users += 1;
        inner.used = Instant::now();
        Some((loaded, InUse { registry: Arc::clone(self), index }))
    }

    /// Begins a use of a model, which is loaded if it is not. A client that goes meanwhile does not stop what has begun.
    async fn ensure(self: Arc<Self>, index: usize) -> ApiResult<(Loaded, InUse)> {
        if let Some(found) = self.enter(index) {
            return Ok(found);
        }
        let limit = self.front.config.silence_timeout;
        let late = || {
            let message = format!("`{}` was not loaded within {} s", self.slots[index].name(), limit.as_secs());
            ApiError::unavailable(message, RETRY_AFTER_S)
        };
        let turn = timeout(limit, Arc::clone(&self.turn).lock_owned()).await.map_err(|_| late())?;
        if let Some(found) = self.enter(index) {
            return Ok(found);
        }
        let this = Arc::clone(&self);
        let loading = tokio::spawn(async move {
            let result = this.load(index).await;
            drop(turn);
            result
        });
        match timeout(limit, loading).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(self.front.panicked()),
            Err(_) => Err(late()),
        }
    }

    /// Loads a model. Only in turn.
    async fn load(self: &Arc<Self>, index: usize) -> ApiResult<(Loaded, InUse)> {
        if self.front.draining() {
            return Err(ApiError::unavailable("the server is shutting down", 5));
        }
        let slot = &self.slots[index];
        let failed = slot.inner().failed.clone().filter(|(at, _)| at.elapsed() < FAILED_FOR);
        if let Some((_, error)) = failed {
            return Err(told(slot.name(), &error));
        }
        let result = self.try_load(index).await;
        let mut inner = slot.inner();
        match result {
            Ok(loaded) => {
                inner.state = State::Loaded(loaded.clone());
                (inner.failed, inner.loads) = (None, inner.loads + 1);
                inner.users += 1;
                inner.used = Instant::now();
                self.front.metrics.loads[0].inc();
                Ok((loaded, InUse { registry: Arc::clone(self), index }))
            }
            Err(NotLoaded::Crowded(error)) => Err(error),
            Err(NotLoaded::Failed(error)) => {
                inner.state = State::Unloaded;
                self.front.metrics.loads[2].inc();
                tracing::error!(model = slot.name(), ?error, "a model could not be loaded");
                let answer = told(slot.name(), &error);
                inner.failed = Some((Instant::now(), error));
                Err(answer)
            }
        }
    }

    async fn try_load(&self, index: usize) -> Result<Loaded, NotLoaded> {
        let slot = &self.slots[index];
        let known = slot.inner().needed;
        let needed = match known {
            Some(needed) => needed,
            None => self.blocking(move |loader| loader.needed(index)).await.map_err(NotLoaded::Failed)?,
        };
        slot.inner().needed = Some(needed);
        self.make_room(index, needed).await.map_err(NotLoaded::Crowded)?;
        slot.inner().state = State::Loading;
        let began = Instant::now();
        let (front, label, grammar_bytes) =
            (Arc::clone(&self.front), Arc::from(slot.name()), slot.listed.grammar_bytes);
        let app = self.blocking(move |loader| {
            let served = loader.load(index)?;
            let engine = served.engine.clone();
            App::of(&front, served, grammar_bytes, Some(label)).map_err(|error| {
                loader.unload(&engine);
                LoadError::Failed(error.to_string())
            })
        });
        let app = app.await.map_err(NotLoaded::Failed)?;
        let seconds = began.elapsed().as_secs_f32();
        tracing::info!(model = slot.name(), planned = needed, seconds, "loaded");
        Ok(Loaded { routes: model_routes(Arc::clone(&app)), app })
    }

    /// Has the loader do something on a thread that may wait.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Loader) -> Result<T, LoadError> + Send + 'static,
    ) -> Result<T, LoadError> {
        let loader = Arc::clone(&self.loader);
        let done = spawn_blocking(move || work(&*loader)).await;
        done.unwrap_or_else(|_| Err(LoadError::Failed("it panicked".into())))
    }

    /// Unloads models that nobody uses until `needed` bytes are left, those not used for longest first; nobody goes in vain.
    async fn make_room(&self, index: usize, needed: u64) -> ApiResult<()> {
        loop {
            let room = self.loader.room();
            if needed <= room {
                return Ok(());
            }
            let (mut idle, mut busy) = (Vec::new(), Vec::new());
            for (other, slot) in self.slots.iter().enumerate() {
                let inner = slot.inner();
                let (State::Loaded(_), Some(planned)) = (&inner.state, inner.needed) else { continue };
                if inner.users == 0 {
                    idle.push((inner.used, other, planned));
                } else {
                    busy.push(format!("`{}` ({})", slot.name(), Bytes(planned)));
                }
            }
            let gain: u64 = idle.iter().map(|(.., planned)| planned).sum();
            let Some(goes) = first_to_go(idle, needed - room) else {
                let name = self.slots[index].name();
                let users = if busy.is_empty() { "others".into() } else { busy.join(", ") };
                let message = format!(
                    "`{name}` needs {}, of which {} are left under the line while {users} are in use; try again later",
                    Bytes(needed),
                    Bytes(room + gain)
                );
                return Err(ApiError {
                    code: Some("model_has_no_room"),
                    ..ApiError::unavailable(message, RETRY_AFTER_S)
                });
            };
            self.unload(goes, None).await;
        }
    }

    fn idle_too_long(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        let inner = slot.inner();
        let idle = matches!(inner.state, State::Loaded(_)) && inner.users == 0;
        idle && slot.listed.idle_after.is_some_and(|after| inner.used.elapsed() >= after)
    }

    /// Unloads a model unless somebody uses it or has used it within `idle`. Only in turn.
    async fn unload(&self, index: usize, idle: Option<Duration>) {
        let slot = &self.slots[index];
        let engine = {
            let mut inner = slot.inner();
            let used = inner.users > 0 || idle.is_some_and(|idle| inner.used.elapsed() < idle);
            let State::Loaded(loaded) = &inner.state else { return };
            if used {
                return;
            }
            let engine = loaded.app.served.engine.clone();
            inner.state = State::Unloading;
            engine
        };
        let gone = self.blocking(move |loader| Ok(loader.unload(&engine))).await;
        if !matches!(gone, Ok(true)) {
            tracing::error!(model = slot.name(), "the engine has not ended; its memory is not back");
        }
        tracing::info!(model = slot.name(), "unloaded");
        self.front.metrics.loads[1].inc();
        slot.inner().state = State::Unloaded;
    }

    /// Nothing new is taken.
    fn drain(&self) {
        self.loaded().iter().for_each(|app| app.served.engine.drain());
    }

    /// The server is over: every engine ends.
    async fn end(&self) {
        let _turn = self.turn.lock().await;
        let engines: Vec<EngineHandle> = self.loaded().iter().map(|app| app.served.engine.clone()).collect();
        let engines: Vec<&EngineHandle> = engines.iter().collect();
        tracing::info!("drained; the ledger at the end:\n{}", self.loader.report(&engines));
        for index in 0..self.slots.len() {
            self.unload(index, None).await;
        }
    }
}

/// Who goes first of those that are idle since when and would give up how much, so that `missing` bytes come together: the oldest of the
/// oldest that do, without those who would go in vain. None where all of them are not enough.
fn first_to_go(mut idle: Vec<(Instant, usize, u64)>, missing: u64) -> Option<usize> {
    idle.sort_unstable();
    let mut gain = 0;
    let enough = idle.iter().position(|(.., planned)| {
        gain += planned;
        gain >= missing
    });
    idle.truncate(enough? + 1);
    // Of those, whoever is not needed stays, the one used last before the others.
    for at in (0..idle.len()).rev() {
        if gain - idle[at].2 >= missing {
            gain -= idle.remove(at).2;
        }
    }
    idle.first().map(|(_, index, _)| *index)
}

/// Why a load came to nothing.
enum NotLoaded {
    /// There is no room at the moment; nothing was tried.
    Crowded(ApiError),
    Failed(LoadError),
}

/// What a client is told.
fn told(name: &str, error: &LoadError) -> ApiError {
    let named = |error: ApiError| ApiError { param: Some("model".into()), ..error };
    match error {
        LoadError::TooLarge(message) => {
            let error = ApiError::new(StatusCode::BAD_REQUEST, format!("`{name}` can never be loaded here: {message}"));
            named(ApiError { code: Some("model_does_not_fit"), ..error })
        }
        LoadError::NoRoom(message) => {
            let message = format!("`{name}` could not be loaded: {message}");
            ApiError { code: Some("model_has_no_room"), ..ApiError::unavailable(message, RETRY_AFTER_S) }
        }
        LoadError::Failed(message) => {
            let error = ApiError::internal(format!("`{name}` could not be loaded: {message}"));
            named(ApiError { code: Some("model_load_failed"), ..error })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_nobody_in_vain() {
        let now = Instant::now();
        let idle = |sizes: &[u64]| {
            let ages = sizes.iter().enumerate();
            ages.map(|(i, size)| (now + Duration::from_secs(i as u64), i, *size)).collect::<Vec<_>>()
        };
        for (sizes, missing, goes) in [
            (&[4, 5][..], 4, Some(0)),
            (&[4, 5], 5, Some(1)),
            (&[4, 5], 6, Some(0)),
            (&[4, 5], 9, Some(0)),
            (&[4, 5], 10, None),
            (&[1, 1, 6, 9], 6, Some(2)),
            (&[], 1, None),
        ] {
            assert_eq!(first_to_go(idle(sizes), missing), goes, "{sizes:?} {missing}");
        }
    }
}
