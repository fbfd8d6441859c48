//! The prefix cache through the handle: its report, and the call that clears it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use super::EngineHandle;
use crate::cache::stats::{CacheReport, DiskKind, DiskKinds, DiskMisses, DiskReport};
use crate::cache::{KvEventLog, PAGE_TOKENS};
use crate::shared::Shared;

fn report(shared: &Shared) -> CacheReport {
    let (cached, status) = (&shared.cache_stats, &shared.status);
    let (pages, kept) = (status.pages_cached.load(Acquire), status.slots_kept.load(Acquire));
    let windows = status.windows_cached.load(Acquire);
    let (page_bytes, slot_bytes) = (shared.page_bytes(), shared.slot_bytes());
    let encoder = shared.facts.media.get().map(|media| media.outputs.stats());
    CacheReport {
        enabled: status.prefix_cache.load(Acquire),
        page_tokens: PAGE_TOKENS as u64,
        page_bytes,
        entries: cached.indexed.load(Acquire),
        pages,
        bytes: pages * page_bytes,
        pinned_pages: cached.pinned.load(Acquire),
        window_pages: windows,
        window_bytes: windows * shared.window_page_bytes(),
        state_checkpoints: kept,
        state_bytes: kept * slot_bytes,
        encoder_entries: encoder.map_or(0, |stats| stats.entries as u64),
        encoder_bytes: encoder.map_or(0, |stats| stats.idle_bytes()),
        hit_tokens: cached.hit_tokens.load(Acquire),
        miss_tokens: cached.miss_tokens.load(Acquire),
        inserted_pages: cached.inserted.load(Acquire),
        evicted_pages: cached.evicted.load(Acquire),
        disk: shared.facts.saved.get().map(|saved| disk_report(shared, saved.store.limits().bytes)),
    }
}

fn disk_report(shared: &Shared, limit_bytes: u64) -> DiskReport {
    let disk = &shared.metrics.disk;
    let gauge = |gauge: &prometheus_client::metrics::gauge::Gauge| gauge.get() as u64;
    let written = disk.written_bytes.get();
    let kind = |kind: usize| {
        let [files, bytes] = disk.kinds.held(kind).map(|held| gauge(&held));
        DiskKind { files, bytes, hits: disk.kinds.hits(kind).get(), misses: disk.kinds.all_misses(kind) }
    };
    DiskReport {
        limit_bytes,
        bytes: gauge(&disk.bytes),
        files: gauge(&disk.files),
        pinned_bytes: gauge(&disk.pinned),
        waiting_parts: gauge(&disk.waiting),
        hit_tokens: disk.tokens.get(),
        read_bytes: disk.read_bytes.get(),
        written_bytes: written,
        write_amplification: written as f64 / disk.payload_bytes.get().max(1) as f64,
        read_bytes_per_second: gauge(&disk.read_rate),
        write_bytes_per_second: gauge(&disk.write_rate),
        hit_media: disk.media.get(),
        kinds: DiskKinds { page: kind(0), window_page: kind(1), state: kind(2), encoder_output: kind(3) },
        misses: DiskMisses {
            gone: disk.gone.get(),
            damaged: disk.damaged.get(),
            failed: disk.failed.get(),
            slow: disk.slow.get(),
            late: disk.late.get(),
            room: disk.room.get(),
            paused: disk.paused.get(),
        },
    }
}

impl EngineHandle {
    /// Returns content and counters of the prefix cache.
    pub fn cache_report(&self) -> CacheReport {
        report(&self.shared)
    }

    /// The log of changes of the prefix cache; none unless [`crate::Options::kv_events`].
    pub fn kv_event_log(&self) -> Option<&Arc<KvEventLog>> {
        self.shared.facts.kv_event_log.get()
    }

    /// Bytes of one page of the KV cache.
    pub fn page_bytes(&self) -> u64 {
        self.shared.page_bytes()
    }

    /// Bytes of one window page; 0 for a model without sliding windows.
    pub fn window_page_bytes(&self) -> u64 {
        self.shared.window_page_bytes()
    }

    /// Bytes of one state slot.
    pub fn slot_bytes(&self) -> u64 {
        self.shared.slot_bytes()
    }

    /// Drops every prefix and checkpoint between two steps; pages and slots without another holder are free
    /// afterwards. Returns the report before and after, or none when the engine has stopped. Cancel-safe: the engine
    /// clears the cache even if this call is dropped.
    pub async fn clear_cache(&self) -> Option<(CacheReport, CacheReport)> {
        let calls = &self.shared.clear_calls;
        let before = self.cache_report();
        let mine = calls.ask();
        loop {
            let told = calls.woken();
            if calls.is_done(mine) {
                return Some((before, self.cache_report()));
            }
            if self.stopped() {
                return None;
            }
            told.await;
        }
    }
}
