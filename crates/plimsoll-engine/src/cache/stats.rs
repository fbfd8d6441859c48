//! The numbers of the prefix cache, and the calls that clear it. The engine thread serves these calls between two steps.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use serde::Serialize;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::cache::IndexStats;

/// Numbers of the prefix cache, which the engine thread writes after every step.
#[derive(Debug, Default)]
pub(crate) struct CacheStats {
    /// Pages in the prefix tree, held by sequences or by the tree alone.
    pub indexed: AtomicU64,
    pub hit_tokens: AtomicU64,
    pub miss_tokens: AtomicU64,
    pub inserted: AtomicU64,
    pub pinned: AtomicU64,
    pub evicted: AtomicU64,
}

/// Calls to [`crate::EngineHandle::clear_cache`], which the engine thread serves.
#[derive(Debug, Default)]
pub(crate) struct ClearCalls {
    asked: AtomicU64,
    done: AtomicU64,
    woken: Notify,
}

impl CacheStats {
    /// Takes over the index's numbers. Returns how many pages were evicted since the last time.
    pub fn refresh(&self, stats: &IndexStats) -> u64 {
        self.indexed.store(stats.nodes as u64, Release);
        self.inserted.store(stats.inserted_pages, Release);
        self.pinned.store(stats.pinned as u64, Release);
        stats.evicted_pages - self.evicted.swap(stats.evicted_pages, Release)
    }

    /// Called by the engine thread once a request, however often it is computed anew: `found` of its `of` prompt tokens were cached.
    pub fn looked_up(&self, found: usize, of: usize) {
        self.hit_tokens.fetch_add(found as u64, Release);
        self.miss_tokens.fetch_add(of.saturating_sub(found) as u64, Release);
    }
}

impl ClearCalls {
    /// Asks the engine thread to clear the cache. Returns the number of this call.
    pub fn ask(&self) -> u64 {
        self.asked.fetch_add(1, Release) + 1
    }

    /// Whether the clear call of this number is done.
    pub fn is_done(&self, asked: u64) -> bool {
        self.done.load(Acquire) >= asked
    }

    /// Resolves when waiting clear calls are woken after this call.
    pub fn woken(&self) -> Notified<'_> {
        self.woken.notified()
    }

    /// For the engine thread: the number of the newest clear call, if it is not done yet. [`Self::done`] takes this
    /// number.
    pub fn asked(&self) -> Option<u64> {
        let asked = self.asked.load(Acquire);
        (asked > self.done.load(Acquire)).then_some(asked)
    }

    /// Marks all clear calls up to `asked` as done. The counters must be up to date by then.
    pub fn done(&self, asked: u64) {
        self.done.store(asked, Release);
        self.wake();
    }

    /// Wakes all waiting clear calls so that they check again.
    pub fn wake(&self) {
        self.woken.notify_waiters();
    }
}

/// Content and counters of the prefix cache and of the encoder outputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CacheReport {
    /// Whether equal prefixes are shared at all.
    pub enabled: bool,
    /// Tokens of one page.
    pub page_tokens: u64,
    /// Bytes of one page of the KV cache.
    pub page_bytes: u64,
    /// Pages in the prefix tree, including pages that requests use.
    pub entries: u64,
    /// Pages that the tree alone holds; evicted as soon as a request needs them.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Pinned pages, which are evicted last.
    pub pinned_pages: u64,
    /// Window pages that the tree alone holds, in models with sliding windows.
    pub window_pages: u64,
    /// Bytes of these window pages.
    pub window_bytes: u64,
    /// Checkpoints of recurrent state beside the tree.
    pub state_checkpoints: u64,
    /// Bytes of these checkpoints.
    pub state_bytes: u64,
    /// Media items with stored encoder outputs, including those that requests use.
    pub encoder_entries: u64,
    /// Bytes of encoder outputs that no request uses; evicted as soon as other requests need the memory.
    pub encoder_bytes: u64,
    /// Prompt tokens found in the cache, since start.
    pub hit_tokens: u64,
    /// Prompt tokens not found in the cache.
    pub miss_tokens: u64,
    /// Pages that entered the tree.
    pub inserted_pages: u64,
    /// Pages that were evicted to make room.
    pub evicted_pages: u64,
    /// The cache on disk, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskReport>,
}

/// Content and counters of the prefix cache on disk, since start.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DiskReport {
    /// The most bytes of the disk that it takes.
    pub limit_bytes: u64,
    /// Bytes that it takes.
    pub bytes: u64,
    /// Its files.
    pub files: u64,
    /// Bytes of pinned files.
    pub pinned_bytes: u64,
    /// Parts of prefixes (pages, window pages, states) and of encoder outputs in memory that wait for a buffer of the disk's thread.
    pub waiting_parts: u64,
    /// Prompt tokens that were read from disk.
    pub hit_tokens: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes written for each byte of KV pages, states and encoder outputs that was kept.
    pub write_amplification: f64,
    /// Rate of the last reads.
    pub read_bytes_per_second: u64,
    /// Rate of the last writes.
    pub write_bytes_per_second: u64,
    /// Media with encoder outputs that were read back.
    pub hit_media: u64,
    /// The files of the cache by kind.
    pub kinds: DiskKinds,
    /// Files that were gone, damaged or not readable, and prefixes not read because that was slow, late, or had no room.
    pub misses: DiskMisses,
}

/// The files of the cache on disk, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DiskKinds {
    /// KV cache of whole pages.
    pub page: DiskKind,
    /// KV cache of pages in sliding-window layers.
    pub window_page: DiskKind,
    /// Recurrent states.
    pub state: DiskKind,
    /// Encoder outputs of images, videos and audio clips.
    pub encoder_output: DiskKind,
}

/// One kind of files on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DiskKind {
    /// Files.
    pub files: u64,
    /// Bytes of the disk that they take.
    pub bytes: u64,
    /// Files that were read, since start.
    pub hits: u64,
    /// Files that were gone, damaged or not readable. For encoder outputs also media that were not read, because reading was slower
    /// than encoding, took too long, or was paused.
    pub misses: u64,
}

/// Misses of the prefix cache on disk, by cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DiskMisses {
    /// Files that were gone.
    pub gone: u64,
    /// Files with a wrong length, header or checksum.
    pub damaged: u64,
    /// Files that the system could not read.
    pub failed: u64,
    /// Prefixes that were faster to compute.
    pub slow: u64,
    /// Prefixes that the disk took too long for.
    pub late: u64,
    /// Prefixes that had no room.
    pub room: u64,
    /// Prefixes not read because the disk took too long for another one shortly before.
    pub paused: u64,
}
