//! The requests that are being answered, by the ids their clients know, and the means to end one.
//!
//! An entry lives as long as its [`Ticket`], which the generation owns: however a request ends, its entry goes with it. There
//! are no more entries than connections, since a connection answers one request at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plimsoll_engine::Watch;
use plimsoll_memory::broken;
use tokio::sync::Notify;

use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};

/// Heap bytes of one entry: itself, its ids, a place in the list. What it watches belongs to the engine's requests.
pub(crate) const ENTRY_BYTES: u64 = 768;

/// One request that is being answered.
pub(crate) struct Entry {
    /// The id in its answer.
    pub id: String,
    pub caller: Caller,
    pub stream: bool,
    /// One for each of its choices.
    pub watches: Vec<Watch>,
    pub started: Instant,
    pub model: Priced,
    cancelled: AtomicBool,
    wake: Notify,
}

/// The model that answers, and what its pages and slots take.
pub(crate) struct Priced {
    /// Its name, where there are several.
    pub name: Option<Arc<str>>,
    pub page_bytes: u64,
    pub slot_bytes: u64,
}

/// All of them.
pub(crate) struct Running {
    limit: usize,
    entries: Mutex<Vec<Arc<Entry>>>,
}

/// Holds an entry's place; gone, the entry is gone.
pub(crate) struct Ticket {
    running: Arc<Running>,
    entry: Arc<Entry>,
}

impl Running {
    pub fn new(limit: u32) -> Arc<Self> {
        let limit = limit as usize;
        Arc::new(Self { limit, entries: Mutex::new(Vec::with_capacity(limit)) })
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Arc<Entry>>> {
        // A panic cannot leave the list half changed, so a poisoned lock still guards a valid one.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a request of the current caller.
    pub fn enter(self: &Arc<Self>, id: &str, stream: bool, watches: Vec<Watch>, model: Priced) -> ApiResult<Ticket> {
        let caller = Caller::current();
        let entry = Arc::new(Entry {
            id: id.into(),
            started: caller.arrived(),
            caller,
            stream,
            watches,
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
        Ok(Ticket { running: Arc::clone(self), entry })
    }

    /// All entries at this moment, oldest first.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.entries().clone()
    }

    /// Ends every request of this key that goes by `id`: the one in its answer or the one in its head, which clients choose as they
    /// like. Returns how many those are.
    pub fn cancel(&self, id: &str, key: Option<usize>) -> usize {
        let mut all = self.all();
        all.retain(|entry| entry.caller.key == key && (entry.id == id || &*entry.caller.request_id == id));
        all.iter().filter(|_| !broken("V-I")).for_each(|entry| entry.cancel());
        all.len()
    }
}

impl Entry {
    /// The engine lets go in its next step, whether or not the client is reading; the answer ends when it is read on.
    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.watches.iter().for_each(Watch::abort);
        self.wake.notify_one();
    }
}

impl Ticket {
    /// Completes when the request is cancelled. Cancel-safe.
    pub async fn cancelled(&self) {
        // A cancel between the check and the wait leaves a permit, so it is not lost.
        while !self.entry.cancelled.load(Ordering::Acquire) {
            self.entry.wake.notified().await;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.running.entries().retain(|entry| broken("T-47") || !Arc::ptr_eq(entry, &self.entry));
    }
}
