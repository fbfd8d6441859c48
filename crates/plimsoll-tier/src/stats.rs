//! The counters of a store, which other threads can read.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::{KINDS, Name, kind_of};

/// The reason why a blob was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// No blob has this name.
    Absent,
    /// Its file is gone.
    Gone,
    /// Its file differs from the written one: it is too short, has another version, or a wrong checksum.
    Damaged,
    /// The system reported an error.
    Failed,
}

/// The reason why a blob was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is larger than the limit of the whole store.
    TooLarge,
    /// It exceeds the day's limit of written bytes.
    DayLimit,
    /// The system reported an error.
    Failed,
    /// Files that could not be removed fill the store.
    Stuck,
}

/// Counters of one kind of blobs.
#[derive(Debug, Default)]
pub struct KindCounts {
    /// Number of blobs read.
    pub hits: AtomicU64,
    /// Number of blobs that were not read, by [`Miss`].
    pub misses: [AtomicU64; 4],
    /// Number of blobs on disk.
    pub blobs: AtomicU64,
    /// Bytes of the disk that these blobs take.
    pub bytes: AtomicU64,
}

/// Counters of one store.
#[derive(Debug, Default)]
pub struct Counts {
    /// Counters by kind ([`crate::kind_of`]).
    pub kinds: [KindCounts; KINDS],
    /// Bytes of blobs read.
    pub hit_bytes: AtomicU64,
    /// Number of blobs written.
    pub written: AtomicU64,
    /// Bytes of the written payloads.
    pub payload_bytes: AtomicU64,
    /// Bytes of the disk that writing took, failed attempts included.
    pub written_bytes: AtomicU64,
    /// Number of blobs that were not written, by [`Refused`].
    pub refused: [AtomicU64; 4],
    /// Number of blobs removed to make room.
    pub collected: AtomicU64,
    /// Number of blobs in the store.
    pub blobs: AtomicU64,
    /// Bytes of the disk that the store takes.
    pub bytes: AtomicU64,
    /// Bytes of the pinned blobs.
    pub pinned_bytes: AtomicU64,
    /// Rate of the last reads in bytes a second, as a moving average; 0 before the first.
    pub read_rate: AtomicU64,
    /// The same for writes.
    pub write_rate: AtomicU64,
    spoken: [Spoken; 2],
}

/// The time at which a fault was last logged.
#[derive(Debug, Default)]
struct Spoken(Mutex<Option<Instant>>);

/// The least time between two log lines about faults of one kind.
const LOG_EVERY: Duration = Duration::from_secs(60);

impl Spoken {
    /// Whether it is time to log again.
    fn due(&self) -> bool {
        let Ok(mut last) = self.0.lock() else { return false };
        let due = last.is_none_or(|last| last.elapsed() >= LOG_EVERY);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

impl Counts {
    /// Number of blobs of all kinds that were not read for this reason.
    pub fn misses(&self, miss: Miss) -> u64 {
        self.kinds.iter().map(|kind| kind.misses[miss as usize].load(Relaxed)).sum()
    }

    /// Counts a blob that was not read. Logs it at most once a minute, and never if it is absent.
    pub(crate) fn missed(&self, name: &Name, miss: Miss, why: &dyn std::fmt::Display) {
        self.kinds[kind_of(name)].misses[miss as usize].fetch_add(1, Relaxed);
        if miss != Miss::Absent && self.spoken[0].due() {
            tracing::warn!("a file of the cache on disk could not be read, its content is computed again: {why}");
        }
    }

    /// The same for a blob that was not written.
    pub(crate) fn refuse(&self, refused: Refused, why: &dyn std::fmt::Display) {
        self.refused[refused as usize].fetch_add(1, Relaxed);
        if self.spoken[1].due() {
            tracing::warn!("a part of the cache was not written to disk: {why}");
        }
    }

    /// Adds one measurement to a moving average, with a weight of one eighth.
    pub(crate) fn rate(rate: &AtomicU64, bytes: u64, took: Duration) {
        let now = (bytes as f64 / took.as_secs_f64().max(1e-6)) as u64;
        let before = rate.load(Relaxed);
        rate.store(if before == 0 { now } else { before - before / 8 + now / 8 }.max(1), Relaxed);
    }
}
