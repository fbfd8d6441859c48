//! What a store has done, counted where other threads can read it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::{KINDS, Name, kind_of};

/// Why a blob was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// There is none of this name.
    Absent,
    /// Its file is gone.
    Gone,
    /// Its file is not what was written: too short, of another version, or with a wrong checksum.
    Damaged,
    /// The system reported an error.
    Failed,
}

/// Why a blob was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is larger than the whole store may be.
    TooLarge,
    /// The day's bytes are written.
    DayLimit,
    /// The system reported an error.
    Failed,
    /// What could not be removed fills the store.
    Stuck,
}

/// Counters of one kind of blobs.
#[derive(Debug, Default)]
pub struct KindCounts {
    /// Blobs read.
    pub hits: AtomicU64,
    /// Blobs that were not read, by [`Miss`].
    pub misses: [AtomicU64; 4],
    /// Blobs on disk.
    pub blobs: AtomicU64,
    /// Bytes of the disk that they take.
    pub bytes: AtomicU64,
}

/// Counters of one store.
#[derive(Debug, Default)]
pub struct Counts {
    /// By kind ([`crate::kind_of`]).
    pub kinds: [KindCounts; KINDS],
    /// Bytes of blobs read.
    pub hit_bytes: AtomicU64,
    /// Blobs written.
    pub written: AtomicU64,
    /// Bytes of their payloads.
    pub payload_bytes: AtomicU64,
    /// Bytes of the disk that writing took, those of failed attempts included.
    pub written_bytes: AtomicU64,
    /// Blobs that were not written, by [`Refused`].
    pub refused: [AtomicU64; 4],
    /// Blobs removed to make room.
    pub collected: AtomicU64,
    /// Blobs there are.
    pub blobs: AtomicU64,
    /// Bytes of the disk they take.
    pub bytes: AtomicU64,
    /// Bytes of those that are pinned.
    pub pinned_bytes: AtomicU64,
    /// Bytes a second of the last reads, and of the last writes; 0: none yet.
    pub read_rate: AtomicU64,
    /// See [`Self::read_rate`].
    pub write_rate: AtomicU64,
    spoken: [Spoken; 2],
}

/// When a fault was last logged.
#[derive(Debug, Default)]
struct Spoken(Mutex<Option<Instant>>);

/// Faults of one kind are logged so often at most.
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
    /// Blobs of all kinds that were not read for this reason.
    pub fn misses(&self, miss: Miss) -> u64 {
        self.kinds.iter().map(|kind| kind.misses[miss as usize].load(Relaxed)).sum()
    }

    /// Counts a blob that was not read, and logs it now and then unless there was none.
    pub(crate) fn missed(&self, name: &Name, miss: Miss, why: &dyn std::fmt::Display) {
        self.kinds[kind_of(name)].misses[miss as usize].fetch_add(1, Relaxed);
        if miss != Miss::Absent && self.spoken[0].due() {
            tracing::warn!("a file of the cache on disk could not be read, its content is computed again: {why}");
        }
    }

    /// The same for one that was not written.
    pub(crate) fn refuse(&self, refused: Refused, why: &dyn std::fmt::Display) {
        self.refused[refused as usize].fetch_add(1, Relaxed);
        if self.spoken[1].due() {
            tracing::warn!("a part of the cache was not written to disk: {why}");
        }
    }

    /// Takes one more measurement into a rate: an eighth of it.
    pub(crate) fn rate(rate: &AtomicU64, bytes: u64, took: Duration) {
        let now = (bytes as f64 / took.as_secs_f64().max(1e-6)) as u64;
        let before = rate.load(Relaxed);
        rate.store(if before == 0 { now } else { before - before / 8 + now / 8 }.max(1), Relaxed);
    }
}
