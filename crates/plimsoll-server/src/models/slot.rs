//! The slot of one model: its state, the requests that use it and those that wait for it.

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

/// Where a model stands.
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

/// What changes of a model.
pub(super) struct Inner {
    pub state: State,
    /// Requests that are being answered by it.
    pub users: usize,
    /// When it was last used.
    pub used: Instant,
    /// What it plans, once that is known.
    pub needed: Option<u64>,
    /// The last load that failed.
    pub failed: Option<(Instant, LoadError)>,
    pub loads: u64,
}

/// A model and where it stands.
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

    /// The model, if it is loaded.
    pub fn loaded(&self) -> Option<Arc<ModelState>> {
        match &self.inner().state {
            State::Loaded(loaded) => Some(Arc::clone(&loaded.state)),
            _ => None,
        }
    }
}

/// A use of a loaded model; it is not unloaded before this is dropped.
pub(super) struct InUse {
    registry: Arc<Registry>,
    index: usize,
}

impl InUse {
    /// Begins a use of the `index`-th model, which `inner` says is loaded.
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

/// A request that waits until a model is loaded; a load for which there is none any more is given up.
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
