//! Loading: one model at a time, and only while requests wait for it.
//!
//! A load stops at its next checkpoint and releases everything when no request has waited for a while. A load also stops when the server
//! shuts down and the drain's time is up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use plimsoll_engine::Cancel;
use tokio::time::{sleep, timeout};

use super::slot::{InUse, Loaded, State, Waiting};
use super::{LoadError, Loader, Registry};
use crate::http::error::{ApiError, ApiResult, cut};
use crate::serve::router::model_routes;
use crate::state::model::ModelState;
use crate::state::request_log::tenths;
use crate::state::server::{ServerPhase, reached};
use crate::state::threads::spawn_thread;

/// For this long after a failed load, requests get its error at once and the load is not repeated.
const FAILED_FOR: Duration = Duration::from_secs(5);

/// Seconds after which a client should retry when other models use the memory.
pub(super) const RETRY_AFTER_S: u32 = 5;

impl Registry {
    /// Begins a use of a model that is loaded.
    pub(super) fn enter(self: &Arc<Self>, index: usize) -> Option<(Loaded, InUse)> {
        let mut inner = self.slots[index].inner();
        let State::Loaded(loaded) = &inner.state else { return None };
        let loaded = loaded.clone();
        Some((loaded, InUse::begin(self, index, &mut inner)))
    }

    /// Begins a use of a model, and loads the model if necessary.
    pub(super) async fn ensure(self: Arc<Self>, index: usize) -> ApiResult<(Loaded, InUse)> {
        if let Some(found) = self.enter(index) {
            return Ok(found);
        }
        let _waiting = Waiting::new(&self, index);
        let limit = self.server.config.silence_timeout;
        let mut phase = self.server.phase.subscribe();
        tokio::select! {
            biased;
            entered = timeout(limit, self.entered(index)) => entered.unwrap_or_else(|_| {
                let message = format!("`{}` was not loaded within {} s", self.slots[index].name(), limit.as_secs());
                Err(ApiError::unavailable(message, RETRY_AFTER_S))
            }),
            () = reached(&mut phase, ServerPhase::Cut) => Err(cut()),
        }
    }

    /// Does the same after waiting for the lock on loading.
    async fn entered(self: &Arc<Self>, index: usize) -> ApiResult<(Loaded, InUse)> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if let Some(found) = self.enter(index) {
            return Ok(found);
        }
        // A separate task: the load completes or stops by itself, even when this request stops waiting.
        let this = Arc::clone(self);
        let loading = tokio::spawn(async move {
            let result = this.load(index).await;
            drop(turn);
            result
        });
        loading.await.unwrap_or_else(|_| Err(self.server.panicked("loading the model")))
    }

    /// Loads a model. The caller holds [`Registry::turn`].
    async fn load(self: &Arc<Self>, index: usize) -> ApiResult<(Loaded, InUse)> {
        if self.server.draining() {
            return Err(ApiError::shutting_down());
        }
        let slot = &self.slots[index];
        let failed = slot.inner().failed.clone().filter(|(at, _)| at.elapsed() < FAILED_FOR);
        if let Some((_, error)) = failed {
            return Err(told(slot.name(), &error));
        }
        let result = self.try_load(index).await;
        let mut inner = slot.inner();
        let models = &self.server.metrics.models;
        match result {
            Ok(loaded) => {
                inner.state = State::Loaded(loaded.clone());
                (inner.failed, inner.loads) = (None, inner.loads + 1);
                models.loaded.inc();
                Ok((loaded, InUse::begin(self, index, &mut inner)))
            }
            Err(NotLoaded::Crowded(error)) => Err(error),
            Err(NotLoaded::Failed(error)) => {
                inner.state = State::Unloaded;
                // The loader may report the cancellation before the waiting requests see that the drain's time is up.
                let cut_off = error == LoadError::Cancelled && self.server.draining();
                let answer = if cut_off { cut() } else { told(slot.name(), &error) };
                if error == LoadError::Cancelled {
                    models.cancelled.inc();
                } else {
                    models.failed.inc();
                    inner.failed = Some((Instant::now(), error));
                }
                Err(answer)
            }
        }
    }

    async fn try_load(&self, index: usize) -> Result<Loaded, NotLoaded> {
        let slot = &self.slots[index];
        // Computed for each load: the model's files may have been replaced.
        let needed = self.needed(index).await;
        let needed = needed.inspect_err(|error| report(slot.name(), 0, 0.0, error)).map_err(NotLoaded::Failed)?;
        slot.inner().needed = Some(needed);
        self.make_room(index, needed).await.map_err(NotLoaded::Crowded)?;
        slot.inner().state = State::Loading;
        let began = Instant::now();
        tracing::info!(model = slot.name(), planned_bytes = needed, "loading");
        let built = self.build(index).await;
        let seconds = tenths(began.elapsed().as_secs_f64());
        let state =
            built.inspect_err(|error| report(slot.name(), needed, seconds, error)).map_err(NotLoaded::Failed)?;
        tracing::info!(model = slot.name(), planned_bytes = needed, seconds, "loaded");
        Ok(Loaded { routes: model_routes(Arc::clone(&state)), state })
    }

    /// Gets the bytes that a model plans from the loader, while requests wait for it. If they stop waiting, a fetch that hangs ends by
    /// itself and leaves nothing behind: the next model need not wait for it.
    async fn needed(&self, index: usize) -> Result<u64, LoadError> {
        let cancel = Cancel::new();
        let looked_at = cancel.clone();
        tokio::select! {
            needed = self.blocking(move |loader| loader.needed(index, &looked_at)) => needed,
            () = self.given_up(index) => {
                cancel.cancel();
                Err(LoadError::Cancelled)
            }
        }
    }

    /// Has the loader build a model, while requests wait for it.
    async fn build(&self, index: usize) -> Result<Arc<ModelState>, LoadError> {
        let listed = &self.slots[index].listed;
        let (server, label) = (Arc::clone(&self.server), Arc::from(listed.names[0].as_str()));
        let (grammar_bytes, cancel) = (listed.grammar_bytes, Cancel::new());
        let looked_at = cancel.clone();
        let building = self.blocking(move |loader| {
            let served = loader.load(index, &looked_at)?;
            let engine = served.engine.clone();
            ModelState::of(&server, served, grammar_bytes, Some(label)).map_err(|error| {
                loader.unload(engine);
                LoadError::Failed(error.to_string())
            })
        });
        tokio::pin!(building);
        tokio::select! {
            built = &mut building => built,
            () = self.given_up(index) => {
                cancel.cancel();
                building.await
            }
        }
    }

    /// Completes when no request has waited for a model for [`load_linger`](crate::state::config::ServerConfig::load_linger), when none
    /// waits while the server drains, or when the drain's time is up.
    async fn given_up(&self, index: usize) {
        let mut waiting = self.slots[index].waiting.subscribe();
        let [mut draining, mut cut] = [(); 2].map(|()| self.server.phase.subscribe());
        let alone = async {
            loop {
                // The sender lives as long as the slot.
                let _ = waiting.wait_for(|waiting| *waiting == 0).await;
                tokio::select! {
                    biased;
                    _ = waiting.wait_for(|waiting| *waiting > 0) => {}
                    () = reached(&mut draining, ServerPhase::Draining) => return,
                    () = sleep(self.server.config.load_linger) => return,
                }
            }
        };
        tokio::select! {
            () = alone => {}
            () = reached(&mut cut, ServerPhase::Cut) => {}
        }
    }

    /// Runs the loader's work on a separate thread.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Loader) -> Result<T, LoadError> + Send + 'static,
    ) -> Result<T, LoadError> {
        let loader = Arc::clone(&self.loader);
        let refused = |error| LoadError::Failed(format!("the system has no thread left: {error}"));
        let done = spawn_thread("plimsoll-load", move || work(&*loader)).map_err(refused)?.await;
        done.unwrap_or_else(|_| Err(LoadError::Failed("it panicked".into())))
    }
}

/// Logs one line for a load that did not succeed.
fn report(model: &str, planned_bytes: u64, seconds: f64, error: &LoadError) {
    match error {
        LoadError::Cancelled => {
            tracing::info!(model, planned_bytes, seconds, "load cancelled: no request waits for it")
        }
        error => tracing::error!(model, planned_bytes, seconds, %error, "not loaded"),
    }
}

/// The reason why a model was not loaded.
enum NotLoaded {
    /// There is no room at the moment; no load was tried.
    Crowded(ApiError),
    Failed(LoadError),
}

/// Returns the error for the client.
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
        LoadError::Cancelled => {
            ApiError::unavailable(format!("`{name}` was not loaded: the load was given up"), RETRY_AFTER_S)
        }
        LoadError::Failed(message) => {
            let error = ApiError::internal(format!("`{name}` could not be loaded: {message}"));
            named(ApiError { code: Some("model_load_failed"), ..error })
        }
    }
}
