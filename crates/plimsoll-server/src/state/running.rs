//! The running requests by id, for the status page and for cancelling.
//!
//! An entry lives as long as its [`RunningGuard`], which the active request owns, so every end of a request removes it. There are no more
//! entries than connections and responses in the background: each further request of an HTTP/2 connection counts as a connection.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plimsoll_engine::{Snapshot, Watch};
use tokio::sync::Notify;

use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};

/// Heap bytes of one entry: the entry, its ids, its slot in the list. The engine's requests own the watched state.
pub(crate) const ENTRY_BYTES: u64 = 768;

/// One running request.
pub(crate) struct Entry {
    /// The id in its answer.
    pub id: String,
    pub caller: Caller,
    pub stream: bool,
    /// One for each choice of the request. A response with tool calls gets new ones for each turn of the model.
    watches: Mutex<Vec<Watch>>,
    pub started: Instant,
    pub model: RunningModel,
    cancelled: AtomicBool,
    wake: Notify,
}

/// The model of a request, and the bytes of its pages and slots.
pub(crate) struct RunningModel {
    /// The model's name, if there are several models.
    pub name: Option<Arc<str>>,
    pub page_bytes: u64,
    pub window_page_bytes: u64,
    pub slot_bytes: u64,
}

/// All running requests.
pub(crate) struct RunningRequests {
    limit: usize,
    entries: Mutex<Vec<Arc<Entry>>>,
}

/// Removes its entry on drop.
pub(crate) struct RunningGuard {
    running: Arc<RunningRequests>,
    entry: Arc<Entry>,
}

impl RunningRequests {
    pub fn new(limit: u32) -> Arc<Self> {
        let limit = limit as usize;
        Arc::new(Self { limit, entries: Mutex::new(Vec::with_capacity(limit)) })
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Arc<Entry>>> {
        // A panic cannot leave the list half changed, so a poisoned lock still guards a valid one.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request of the current caller.
    pub fn add(
        self: &Arc<Self>,
        id: &str,
        stream: bool,
        watches: Vec<Watch>,
        model: RunningModel,
    ) -> ApiResult<RunningGuard> {
        let caller = Caller::current();
        let entry = Arc::new(Entry {
            id: id.into(),
            started: caller.arrived(),
            caller,
            stream,
            watches: Mutex::new(watches),
            model,
            cancelled: AtomicBool::new(false),
            wake: Notify::new(),
        });
        let mut entries = self.entries();
        if entries.len() == self.limit {
            let message = format!("{} requests are being answered, which is the limit (--max-connections)", self.limit);
            return Err(ApiError::unavailable(message, 1));
        }
        entries.push(Arc::clone(&entry));
        Ok(RunningGuard { running: Arc::clone(self), entry })
    }

    /// All entries at this moment, oldest first.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.entries().clone()
    }

    /// Cancels every request of this key whose answer id or request id is `id`, and returns their number. Clients
    /// choose request ids, so several may share one.
    pub fn cancel(&self, id: &str, key: Option<usize>) -> usize {
        let mut all = self.all();
        all.retain(|entry| entry.caller.key == key && (entry.id == id || &*entry.caller.request_id == id));
        all.iter().for_each(|entry| entry.cancel());
        all.len()
    }
}

impl Entry {
    /// The engine ends the request in its next step, even if the client does not read. The answer ends when the client reads again.
    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.watches().iter().for_each(Watch::abort);
        self.wake.notify_one();
    }

    fn watches(&self) -> MutexGuard<'_, Vec<Watch>> {
        // The list is replaced as a whole.
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the present state of the choices.
    pub fn looks(&self) -> Vec<Snapshot> {
        self.watches().iter().map(Watch::snapshot).collect()
    }
}

impl RunningGuard {
    /// Replaces the request's choices with those of the next turn.
    pub fn watch(&self, watches: Vec<Watch>) {
        *self.entry.watches() = watches;
        // A cancel that came before has not reached these choices.
        if self.entry.cancelled.load(Ordering::Acquire) {
            self.entry.watches().iter().for_each(Watch::abort);
        }
    }

    /// Completes when the request is cancelled. Cancel-safe.
    pub async fn cancelled(&self) {
        // A cancel between the check and the wait leaves a permit, so it is not lost.
        while !self.entry.cancelled.load(Ordering::Acquire) {
            self.entry.wake.notified().await;
        }
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.running.entries().retain(|entry| !Arc::ptr_eq(entry, &self.entry));
    }
}
