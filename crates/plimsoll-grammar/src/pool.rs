//! What all grammars of one vocabulary share: settings, trials, and the budget, for which idle grammars go.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use plimsoll_engine::constraint::Unfit;

use crate::budget::{Budget, Share, Usage};
use crate::error::GrammarError;
use crate::settings::Settings;
use crate::trial::Trials;

/// The grammars that are kept, `T` each, and what a walk needs besides its own.
pub(crate) struct Pool<T> {
    settings: Settings,
    pub budget: Arc<Budget>,
    pub trials: Trials,
    /// Set with the base.
    structural: OnceLock<Vec<u32>>,
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
    /// A pool without grammars.
    pub fn new(settings: Settings, trials: Trials) -> Self {
        Self {
            budget: Budget::new(settings.bytes),
            trials,
            settings,
            structural: OnceLock::new(),
            entries: Mutex::default(),
            clock: AtomicU64::new(0),
            compiled: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            invalid_answers: AtomicU64::new(0),
        }
    }

    /// What the budget holds.
    pub fn usage(&self) -> Usage {
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Usage {
            used: self.budget.used(),
            limit: self.budget.limit(),
            grammars: self.entries().len() as u64,
            compiled: load(&self.compiled),
            hits: load(&self.hits),
            evicted: load(&self.evicted),
            sandbox_starts: self.trials.starts(),
            invalid_answers: load(&self.invalid_answers),
        }
    }

    /// What this cache was made for.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry<T>>> {
        // A list of whole entries, whoever panicked.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of one use.
    pub fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// The grammar of that key, used `now`.
    pub fn find(&self, key: &str, now: u64) -> Option<Arc<T>> {
        let mut entries = self.entries();
        let entry = entries.iter_mut().find(|entry| entry.key == key)?;
        entry.used = now;
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(&entry.compiled))
    }

    /// Keeps a grammar that was compiled. Where another thread kept one of that key meanwhile, that one is returned.
    pub fn keep(&self, key: String, compiled: Arc<T>, now: u64) -> Arc<T> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let mut entries = self.entries();
        if let Some(entry) = entries.iter().find(|entry| entry.key == key) {
            return Arc::clone(&entry.compiled);
        }
        entries.push(Entry { key, compiled: Arc::clone(&compiled), used: now });
        compiled
    }

    /// An answer ends because of its checks, for this reason.
    pub fn invalid(&self, why: String) -> Unfit {
        self.invalid_answers.fetch_add(1, Ordering::Relaxed);
        Unfit::Grammar(why)
    }

    /// Tokens that may end something in JSON.
    pub fn structural(&self) -> &[u32] {
        self.structural.get().map_or(&[], Vec::as_slice)
    }

    /// Sets them, once.
    pub fn set_structural(&self, tokens: Vec<u32>) {
        self.structural.get_or_init(|| tokens);
    }

    /// A share of `bytes`, for which idle grammars go.
    pub fn room(&self, bytes: u64) -> Result<Share, GrammarError> {
        let mut share = self.budget.share();
        if self.grow(&mut share, bytes) { Ok(share) } else { Err(GrammarError::Full(self.budget.limit())) }
    }

    /// Grows a share to `bytes`, for which idle grammars go. False when those in use leave no room.
    pub fn grow(&self, share: &mut Share, bytes: u64) -> bool {
        while !share.grow_to(bytes) {
            if !self.evict_one() {
                return false;
            }
        }
        true
    }

    /// Drops the grammar that has been idle longest. False if all are in use.
    fn evict_one(&self) -> bool {
        let mut entries = self.entries();
        let idle = entries.iter().enumerate().filter(|(_, entry)| Arc::strong_count(&entry.compiled) == 1);
        let Some(index) = idle.min_by_key(|(_, entry)| entry.used).map(|(index, _)| index) else { return false };
        entries.swap_remove(index);
        self.evicted.fetch_add(1, Ordering::Relaxed);
        true
    }
}
