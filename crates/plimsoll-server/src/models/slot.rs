//! The slot of one model: its state, the requests that use it and the requests that wait for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::Router;
use tokio::sync::watch;

use super::{Listed, LoadError, Registry};
use crate::state::model::ModelState;

/// A loaded model and its routes.
#[derive(Clone)]
pub(super) struct Loaded {
    pub state: Arc<ModelState>,
    pub routes: Router,
}

/// The state of a model.
pub(super) enum State {
    Unloaded,
    Loading,
    Loaded(Loaded),
    Unloading,
}

impl State {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unloaded => "unloaded",
            Self::Loading => "loading",
            Self::Loaded(_) => "loaded",
            Self::Unloading => "unloading",
        }
    }
}

/// The mutable state of a slot.
pub(super) struct Inner {
    pub state: State,
    /// Requests that the model is answering.
    pub users: usize,
    /// The time of its last use.
    pub used: Instant,
    /// The bytes that it plans, once they are known.
    pub needed: Option<u64>,
    /// The time and the error of its last failed load.
    pub failed: Option<(Instant, LoadError)>,
    pub loads: u64,
}

/// A model and its state.
pub(super) struct Slot {
    pub listed: Listed,
    inner: Mutex<Inner>,
    /// Requests that wait until it is loaded.
    pub waiting: watch::Sender<usize>,
}

impl Slot {
    pub fn new(listed: Listed) -> Self {
        let (state, used) = (State::Unloaded, Instant::now());
        let inner = Inner { state, users: 0, used, needed: None, failed: None, loads: 0 };
        Self { listed, inner: inner.into(), waiting: watch::Sender::new(0) }
    }

    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every change is one assignment.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> &str {
        &self.listed.names[0]
    }

    /// Returns the model's state if it is loaded.
    pub fn loaded(&self) -> Option<Arc<ModelState>> {
        match &self.inner().state {
            State::Loaded(loaded) => Some(Arc::clone(&loaded.state)),
            _ => None,
        }
    }
}

/// A use of a loaded model, which is not unloaded before this is dropped.
pub(super) struct InUse {
    registry: Arc<Registry>,
    index: usize,
}

impl InUse {
    /// Begins a use of the `index`-th model, which must be loaded according to `inner`.
    pub fn begin(registry: &Arc<Registry>, index: usize, inner: &mut Inner) -> Self {
        inner.users += 1;
        inner.used = Instant::now();
        Self { registry: Arc::clone(registry), index }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut inner = self.registry.slots[self.index].inner();
        inner.users -= 1;
        inner.used = Instant::now();
    }
}

/// A request that waits until a model is loaded; a load that no request waits for is cancelled.
pub(super) struct Waiting {
    registry: Arc<Registry>,
    index: usize,
}

impl Waiting {
    pub fn new(registry: &Arc<Registry>, index: usize) -> Self {
        registry.slots[index].waiting.send_modify(|waiting| *waiting += 1);
        Self { registry: Arc::clone(registry), index }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.registry.slots[self.index].waiting.send_modify(|waiting| *waiting -= 1);
    }
}
