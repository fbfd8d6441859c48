//! Stored responses, for `GET` and `previous_response_id`, and the events of streamed responses in the background. They are in memory,
//! bounded in bytes and count; the least recently used response is dropped first.

mod log;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::oneshot::{Receiver, Sender, channel};

use self::log::Logs;
pub(crate) use self::log::{LOG_KEPT, LogRead};
use crate::http::error::{ApiError, ApiResult};

/// The most responses that are kept.
const MAX_RESPONSES: usize = 4096;

/// Heap bytes of an entry besides its texts: two keys, its places in two maps that may have grown to twice their need.
const ENTRY_BYTES: u64 = 512;

/// One kept response.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    /// All items before the output, as the text between a list's brackets: the earlier conversation, then this request's input.
    pub items: Arc<str>,
    /// The response as it was sent.
    pub response: Bytes,
    /// The API key it was made with; requests with another key do not find it.
    pub key: Option<usize>,
}

impl Kept {
    /// Returns all items of the output as they were sent, in the form of `items`.
    pub fn output(&self) -> ApiResult<&str> {
        #[derive(Deserialize)]
        struct Ended<'a> {
            #[serde(borrow)]
            output: &'a RawValue,
        }
        let ended: Ended<'_> = serde_json::from_slice(&self.response)
            .map_err(|error| ApiError::internal(format!("a stored response cannot be read: {error}")))?;
        Ok(ended.output.get().trim_start_matches('[').trim_end_matches(']'))
    }
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    bytes: u64,
    used_at: u64,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<String, Entry>,
    /// Response ids by the time of their last use.
    order: BTreeMap<u64, String>,
    /// Responses that are being made and will be kept, in their first state. There are no more than connections and responses in the
    /// background. Their requests hold the memory.
    begun: Vec<(String, Option<usize>, Bytes)>,
    /// Requests that have cancelled a response and wait for its end; no more than connections.
    waiting: Vec<(String, Sender<Bytes>)>,
    /// Events of streamed responses in the background.
    logs: Logs,
    clock: u64,
    /// Bytes of entries and logs.
    used: u64,
    evicted: u64,
    logs_lost: u64,
}

/// Usage of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoreUsage {
    pub responses: u64,
    pub bytes: u64,
    pub limit: u64,
    /// Responses that were dropped to make room since start, or were too large for the whole store.
    pub evicted: u64,
    /// Logs of events that were dropped because they did not fit.
    pub logs_lost: u64,
}

/// The store of responses.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    limit: u64,
    state: Mutex<State>,
}

impl ResponseStore {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default() })
    }

    /// Whether responses can be kept.
    pub fn is_on(&self) -> bool {
        self.limit > 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing between two changes of a state can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a response that will be kept visible to [`Self::look`] while it is being made.
    pub fn begins(self: &Arc<Self>, id: &str, key: Option<usize>, response: Bytes) -> Begun {
        self.state().begun.push((id.to_owned(), key, response));
        Begun { store: Arc::clone(self), id: id.to_owned() }
    }

    /// Returns a response of this key in its present state: whole, or its first state.
    pub fn look(&self, id: &str, key: Option<usize>) -> Option<Bytes> {
        // Under one lock: a response that ends meanwhile moves from the begun responses to the kept ones.
        let mut state = self.state();
        if let Some(kept) = state.used(id, key) {
            return Some(kept.response.clone());
        }
        let begun = state.begun.iter().find(|(known, owner, _)| known == id && *owner == key);
        begun.map(|(.., response)| response.clone())
    }

    /// Keeps a response. Room is made before anything is added.
    pub fn insert(&self, id: &str, kept: Kept) {
        let bytes = (2 * id.len() + kept.items.len() + kept.response.len()) as u64 + ENTRY_BYTES;
        let mut state = self.state();
        state.remove(id);
        if bytes > self.limit || !state.make_room(bytes, 1, self.limit) {
            state.evicted += 1;
            return;
        }
        state.used += bytes;
        let used_at = state.tick();
        state.order.insert(used_at, id.to_owned());
        state.entries.insert(id.to_owned(), Entry { kept, bytes, used_at });
    }

    /// Returns a kept response of this key, and marks it as the last used one.
    pub fn get(&self, id: &str, key: Option<usize>) -> Option<Kept> {
        self.state().used(id, key).cloned()
    }

    /// Returns the kept response of this key with the last use before `at`, or the last use of all: the time of that use, the id and the
    /// response.
    pub fn before(&self, at: Option<u64>, key: Option<usize>) -> Option<(u64, String, Kept)> {
        let state = self.state();
        state.order.range(..at.unwrap_or(u64::MAX)).rev().find_map(|(used_at, id)| {
            let entry = state.entries.get(id).filter(|entry| entry.kept.key == key)?;
            Some((*used_at, id.clone(), entry.kept.clone()))
        })
    }

    /// Reports that a response failed without an object: requests that wait for it stop waiting.
    pub fn gone(&self, id: &str) {
        self.state().waiting.retain(|(known, _)| known != id);
    }

    /// Waits for the end of a response; dropping the receiver ends the waiting.
    pub fn wait(&self, id: &str) -> Receiver<Bytes> {
        let (sender, receiver) = channel();
        let mut state = self.state();
        state.waiting.retain(|(_, sender)| !sender.is_closed());
        state.waiting.push((id.to_owned(), sender));
        receiver
    }

    /// Sends the response that has ended to the requests that wait for it.
    pub fn ended(&self, id: &str, response: &Bytes) {
        let mut state = self.state();
        let waiting = std::mem::take(&mut state.waiting);
        let (those, others): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(known, _)| known == id);
        state.waiting = others;
        for (_, sender) in those {
            // The receiver is gone when the request has stopped waiting.
            let _ = sender.send(response.clone());
        }
    }

    /// Removes a response of this key. Returns false if there is none.
    pub fn remove(&self, id: &str, key: Option<usize>) -> bool {
        let mut state = self.state();
        state.entries.get(id).is_some_and(|entry| entry.kept.key == key) && state.remove(id)
    }

    pub fn usage(&self) -> StoreUsage {
        let state = self.state();
        let responses = state.entries.len() as u64;
        let (evicted, logs_lost) = (state.evicted, state.logs_lost);
        StoreUsage { responses, bytes: state.used, limit: self.limit, evicted, logs_lost }
    }
}

/// A response that is being made, until this value is dropped.
#[derive(Debug)]
pub(crate) struct Begun {
    store: Arc<ResponseStore>,
    id: String,
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.store.state().begun.retain(|(id, ..)| *id != self.id);
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Returns a kept response of this key, and marks it as the last used one.
    fn used(&mut self, id: &str, key: Option<usize>) -> Option<&Kept> {
        let now = self.tick();
        let entry = self.entries.get_mut(id).filter(|entry| entry.kept.key == key)?;
        let name = self.order.remove(&entry.used_at)?;
        self.order.insert(now, name);
        entry.used_at = now;
        Some(&entry.kept)
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some(entry) = self.entries.remove(id) else { return false };
        self.order.remove(&entry.used_at);
        self.used -= entry.bytes;
        true
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    fn kept(bytes: usize) -> Kept {
        Kept { items: "x".repeat(bytes).into(), response: Bytes::from_static(b"{}"), key: None }
    }

    #[test]
    fn the_one_not_used_for_longest_goes_first_and_bytes_come_back() {
        let store = ResponseStore::new(4000);
        for id in ["a", "b", "c"] {
            store.insert(id, kept(700));
        }
        assert_eq!(store.usage(), StoreUsage { responses: 3, bytes: 3 * 1216, limit: 4000, evicted: 0, logs_lost: 0 });
        assert!(store.get("a", None).is_some());
        store.insert("d", kept(700));
        assert!(store.get("b", None).is_none() && store.get("a", None).is_some() && store.get("c", None).is_some());
        assert_eq!(store.usage().evicted, 1);
        // A second response with the same id replaces the first.
        store.insert("d", kept(100));
        assert_eq!(store.usage().bytes, 2 * 1216 + 616);
        // A response that is too large for the whole store evicts nothing.
        store.insert("e", kept(4000));
        assert_eq!((store.usage().responses, store.usage().evicted), (3, 2));
        assert!(!store.remove("a", Some(0)) && store.get("a", Some(0)).is_none(), "another key's");
        assert!(store.remove("a", None) && !store.remove("a", None));
        store.remove("c", None);
        store.remove("d", None);
        assert_eq!(store.usage(), StoreUsage { responses: 0, bytes: 0, limit: 4000, evicted: 2, logs_lost: 0 });
    }

    #[test]
    fn a_response_is_found_while_it_ends() {
        let store = ResponseStore::new(u64::MAX);
        store.insert("a", kept(0));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (0..20_000).all(|_| store.look("a", None).is_some()));
            while !reader.is_finished() {
                let begun = store.begins("a", None, Bytes::new());
                store.insert("a", kept(0));
                drop(begun);
            }
            assert!(reader.join().unwrap());
        });
    }

    #[test]
    fn the_number_of_responses_is_bounded_too() {
        let store = ResponseStore::new(u64::MAX);
        for i in 0..MAX_RESPONSES + 10 {
            store.insert(&format!("{i}"), kept(0));
        }
        assert_eq!((store.usage().responses, store.usage().evicted), (MAX_RESPONSES as u64, 10));
        assert!(store.get("9", None).is_none() && store.get("10", None).is_some());
        let none = ResponseStore::new(0);
        none.insert("a", kept(0));
        assert!(!none.is_on() && none.get("a", None).is_none());
    }
}
