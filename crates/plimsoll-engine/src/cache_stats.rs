//! The prefix cache from outside: what it holds and has done, and the request to forget it all, which the engine thread serves
//! between two steps.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use plimsoll_memory::Component;
use serde::Serialize;
use tokio::sync::Notify;

use crate::cache::{IndexStats, KvEventLog, PAGE_TOKENS};
use crate::handle::{EngineHandle, Shared};

/// What the engine thread tells about the prefix cache after every step.
#[derive(Debug, Default)]
pub(crate) struct CacheStats {
    /// Pages in the prefix tree, held by sequences or by the tree alone.
    indexed: AtomicU64,
    hit_tokens: AtomicU64,
    miss_tokens: AtomicU64,
    inserted: AtomicU64,
    evicted: AtomicU64,
    /// Number of calls to [`EngineHandle::clear_cache`], and how many of them are done.
    clears_asked: AtomicU64,
    clears_done: AtomicU64,
    cleared: Notify,
}

impl CacheStats {
    /// Takes over the index's numbers. Returns how many pages were evicted since the last time.
    pub fn refresh(&self, stats: &IndexStats) -> u64 {
        self.indexed.store(stats.nodes as u64, Release);
        self.inserted.store(stats.inserted_pages, Release);
        stats.evicted_pages - self.evicted.swap(stats.evicted_pages, Release)
    }

    /// For the engine thread: so many tokens of a prompt were found, of so many. Said once a request, however often it is computed anew.
    pub fn looked_up(&self, found: usize, of: usize) {
        self.hit_tokens.fetch_add(found as u64, Release);
        self.miss_tokens.fetch_add(of.saturating_sub(found) as u64, Release);
    }

    /// For the engine thread: the number of the newest clear call, if it is not done yet. [`Self::done`] takes this
    /// number.
    pub fn asked(&self) -> Option<u64> {
        let asked = self.clears_asked.load(Acquire);
        (asked > self.clears_done.load(Acquire)).then_some(asked)
    }

    /// Marks all clear calls up to `asked` as done. The counters must be up to date by then.
    pub fn done(&self, asked: u64) {
        self.clears_done.store(asked, Release);
        self.wake();
    }

    /// Wakes all waiting clear calls so that they check again.
    pub fn wake(&self) {
        self.cleared.notify_waiters();
    }
}

/// What the prefix cache holds and has done, and what is kept of media.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CacheReport {
    /// Whether equal prefixes are shared at all.
    pub enabled: bool,
    /// Tokens of one page.
    pub page_tokens: u64,
    /// Bytes of one page of keys and values.
    pub page_bytes: u64,
    /// Pages that the prefix tree knows, those that requests are using included: one entry each.
    pub entries: u64,
    /// Pages that it alone holds; given up as soon as a request needs them.
    pub pages: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Checkpoints of recurrent state beside the tree.
    pub state_checkpoints: u64,
    /// Bytes of those.
    pub state_bytes: u64,
    /// Media items with stored encoder outputs, including those that requests use.
    pub encoder_entries: u64,
    /// Bytes of outputs that no request is using; given up as soon as others need the room.
    pub encoder_bytes: u64,
    /// Prompt tokens that were found, since start.
    pub hit_tokens: u64,
    /// Prompt tokens that were looked for and not found.
    pub miss_tokens: u64,
    /// Pages that entered the tree.
    pub inserted_pages: u64,
    /// Pages that were evicted to make room.
    pub evicted_pages: u64,
}

impl CacheReport {
    fn of(shared: &Shared) -> Self {
        let (cached, status) = (&shared.cached, &shared.status);
        let (pages, kept) = (status.pages_cached.load(Acquire), status.slots_kept.load(Acquire));
        let (page_bytes, slot_bytes) = (shared.page_bytes(), shared.slot_bytes());
        let encoder = shared.media.get().map(|media| media.outputs.stats());
        Self {
            enabled: status.prefix_cache.load(Acquire),
            page_tokens: PAGE_TOKENS as u64,
            page_bytes,
            entries: cached.indexed.load(Acquire),
            pages,
            bytes: pages * page_bytes,
            state_checkpoints: kept,
            state_bytes: kept * slot_bytes,
            encoder_entries: encoder.map_or(0, |stats| stats.entries as u64),
            encoder_bytes: encoder.map_or(0, |stats| stats.idle_bytes()),
            hit_tokens: cached.hit_tokens.load(Acquire),
            miss_tokens: cached.miss_tokens.load(Acquire),
            inserted_pages: cached.inserted.load(Acquire),
            evicted_pages: cached.evicted.load(Acquire),
        }
    }
}

impl Shared {
    /// Bytes of one page of keys and values, as planned.
    pub fn page_bytes(&self) -> u64 {
        self.each(Component::KvPages, self.status.pages_total.load(Acquire))
    }

    /// Bytes of one state slot, as planned; 0 for models without recurrent state.
    pub fn slot_bytes(&self) -> u64 {
        self.each(Component::StateSlots, self.status.slots_total.load(Acquire))
    }

    fn each(&self, component: Component, count: u64) -> u64 {
        let line = self.plan.lines.iter().find(|line| line.component == component);
        line.map_or(0, |line| line.bytes.checked_div(count).unwrap_or(0))
    }
}

impl EngineHandle {
    /// What the prefix cache holds and has done.
    pub fn cache_report(&self) -> CacheReport {
        CacheReport::of(&self.shared)
    }

    /// What the prefix cache holds, for others to follow; none unless [`crate::Options::kv_events`].
    pub fn kv_event_log(&self) -> Option<&Arc<KvEventLog>> {
        self.shared.kv_event_log.get()
    }

    /// Bytes of one page of keys and values.
    pub fn page_bytes(&self) -> u64 {
        self.shared.page_bytes()
    }

    /// Bytes of one state slot.
    pub fn slot_bytes(&self) -> u64 {
        self.shared.slot_bytes()
    }

    /// Drops every prefix and checkpoint between two steps; pages and slots without another holder are free
    /// afterwards. Returns the report before and after, or none when the engine has stopped. Cancel-safe: the engine
    /// clears the cache even if this call is dropped.
    pub async fn clear_cache(&self) -> Option<(CacheReport, CacheReport)> {
        let cached = &self.shared.cached;
        let before = self.cache_report();
        let mine = cached.clears_asked.fetch_add(1, Release) + 1;
        loop {
            let told = cached.cleared.notified();
            if cached.clears_done.load(Acquire) >= mine {
                return Some((before, self.cache_report()));
            }
            if self.stopped() {
                return None;
            }
            told.await;
        }
    }
}
