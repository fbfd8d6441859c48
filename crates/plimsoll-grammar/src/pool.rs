//! Settings, sandboxes and cache of all grammars of one vocabulary, and the budget that evicts idle grammars.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use plimsoll_engine::constraint::Unfit;

use crate::budget::{Budget, Reservation, Usage};
use crate::error::GrammarError;
use crate::sandboxes::Sandboxes;
use crate::settings::Settings;

/// The cached grammars, `T` each, and the data that all outputs share.
pub(crate) struct Pool<T> {
    settings: Settings,
    pub budget: Arc<Budget>,
    pub sandboxes: Sandboxes,
    /// Set when the compiler is created.
    value_end_tokens: OnceLock<Vec<u32>>,
    entries: Mutex<Vec<Entry<T>>>,
    clock: AtomicU64,
    compiled: AtomicU64,
    hits: AtomicU64,
    evicted: AtomicU64,
    invalid_answers: AtomicU64,
}

struct Entry<T> {
    key: String,
    compiled: Arc<T>,
    used: u64,
}

impl<T> Pool<T> {
    /// An empty pool.
    pub fn new(settings: Settings, sandboxes: Sandboxes) -> Self {
        Self {
            budget: Budget::new(settings.bytes),
            sandboxes,
            settings,
            value_end_tokens: OnceLock::new(),
            entries: Mutex::default(),
            clock: AtomicU64::new(0),
            compiled: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            invalid_answers: AtomicU64::new(0),
        }
    }

    /// State of the budget.
    pub fn usage(&self) -> Usage {
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Usage {
            used: self.budget.used(),
            limit: self.budget.limit(),
            grammars: self.entries().len() as u64,
            compiled: load(&self.compiled),
            hits: load(&self.hits),
            evicted: load(&self.evicted),
            sandbox_starts: self.sandboxes.starts(),
            invalid_answers: load(&self.invalid_answers),
        }
    }

    /// The settings of this pool.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry<T>>> {
        // Every update is one operation, so a panic leaves the list consistent.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A logical time for least-recently-used order.
    pub fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// The grammar with this key, last used at `now`.
    pub fn find(&self, key: &str, now: u64) -> Option<Arc<T>> {
        let mut entries = self.entries();
        let entry = entries.iter_mut().find(|entry| entry.key == key)?;
        entry.used = now;
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(&entry.compiled))
    }

    /// Adds a compiled grammar. If another thread added the same key meanwhile, returns that one.
    pub fn insert(&self, key: String, compiled: Arc<T>, now: u64) -> Arc<T> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let mut entries = self.entries();
        if let Some(entry) = entries.iter().find(|entry| entry.key == key) {
            return Arc::clone(&entry.compiled);
        }
        entries.push(Entry { key, compiled: Arc::clone(&compiled), used: now });
        compiled
    }

    /// Counts an answer that its checks end, and returns its error.
    pub fn invalid_answer(&self, why: String) -> Unfit {
        self.invalid_answers.fetch_add(1, Ordering::Relaxed);
        Unfit::Grammar(why)
    }

    /// Tokens that may end a JSON value.
    pub fn value_end_tokens(&self) -> &[u32] {
        self.value_end_tokens.get().map_or(&[], Vec::as_slice)
    }

    /// Sets the tokens that may end a JSON value; a second call has no effect.
    pub fn set_value_end_tokens(&self, tokens: Vec<u32>) {
        self.value_end_tokens.get_or_init(|| tokens);
    }

    /// Reserves `bytes`, and evicts idle grammars for them.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, GrammarError> {
        let mut reservation = self.budget.reservation();
        if self.grow(&mut reservation, bytes) { Ok(reservation) } else { Err(GrammarError::Full(self.budget.limit())) }
    }

    /// Grows a reservation to `bytes`, and evicts idle grammars for them. False if the grammars in use leave too
    /// little.
    pub fn grow(&self, reservation: &mut Reservation, bytes: u64) -> bool {
        while !reservation.grow_to(bytes) {
            if !self.evict_one() {
                return false;
            }
        }
        true
    }

    /// Evicts the least recently used idle grammar. False if all are in use.
    fn evict_one(&self) -> bool {
        let mut entries = self.entries();
        let idle = entries.iter().enumerate().filter(|(_, entry)| Arc::strong_count(&entry.compiled) == 1);
        let Some(index) = idle.min_by_key(|(_, entry)| entry.used).map(|(index, _)| index) else { return false };
        entries.swap_remove(index);
        self.evicted.fetch_add(1, Ordering::Relaxed);
        true
    }
}
