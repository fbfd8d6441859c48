//! The content of the prefix tree, for external readers: routers that send a prompt to the server that caches its
//! beginning.
//!
//! The engine thread writes a row for each page that enters the tree, and a removal for each page that leaves it. One
//! lock guards both; a write of one page holds it only as long as copying a handful of rows takes. Both kinds of
//! change are numbered in one sequence.
//!
//! A row stays as long as its page is in the tree. Only removals are dropped, the oldest first. A reader gets a reset
//! if it has missed removals, or if finding its position takes too long. After a reset it receives all pages in the
//! tree in the order of their entry, as a new reader does.
//!
//! Pages of prompts with a salt are not reported, since requests with another salt cannot share them. Pages that
//! depend on media are not reported either, since their tokens alone do not identify them.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;

use super::hash::fold;
use super::pages::{PAGE_TOKENS, PageId};

/// Upper limit of the rows examined to find a reader's position again. The engine thread may wait for this search.
const LOOKED_AT_MAX: usize = 1024;

/// No page.
const NONE: u32 = u32::MAX;

/// A change of the tree. Names of pages are 63-bit hashes of all tokens up to a page's end, equal on all servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// All earlier events are void; events for all present pages follow.
    Reset,
    /// A page has entered the tree.
    Stored {
        /// Number of the change.
        seq: u64,
        /// The page's name.
        hash: u64,
        /// The name of the page before it; none for a prompt's first.
        parent: Option<u64>,
        /// The page's tokens.
        tokens: [u32; PAGE_TOKENS],
    },
    /// A page has left the tree.
    Removed {
        /// Number of the change.
        seq: u64,
        /// The page's name.
        hash: u64,
    },
}

/// The position of a reader.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvCursor {
    begun: bool,
    /// Number of the last `Stored` change that the reader has received.
    stored: u64,
    /// Number of the last `Removed` change that the reader has received, or can skip.
    removed: u64,
    /// The page of the last `Stored` change, if it is still in the tree.
    page: u32,
}

impl KvCursor {
    /// The cursor of a reader that has received all changes up to `seq`.
    #[must_use]
    pub fn after(seq: u64) -> Self {
        Self { begun: true, stored: seq, removed: seq, page: NONE }
    }
}

/// Sizes of the log itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvEventStats {
    /// Changes since start.
    pub changes: u64,
    /// Pages that are reported.
    pub pages: usize,
    /// Removals that are kept for slow readers.
    pub removals_kept: usize,
    /// The most removals that are kept.
    pub removals_max: usize,
}

/// The row of a page; `seq` is 0 for a page that is not reported.
#[derive(Clone, Copy, Debug)]
struct Row {
    seq: u64,
    hash: u64,
    parent: u64,
    tokens: [u32; PAGE_TOKENS],
    before: u32,
    after: u32,
}

#[derive(Clone, Copy, Debug)]
struct Removal {
    seq: u64,
    hash: u64,
}

#[derive(Debug)]
struct Log {
    /// One row for each page of the pool, linked in the order of entry.
    rows: Box<[Row]>,
    first: u32,
    last: u32,
    pages: usize,
    /// The last removals, at most one for each page of the pool.
    removals: VecDeque<Removal>,
    seq: u64,
    /// The newest removal that is no longer kept.
    forgotten: u64,
    /// The last change for which readers were woken.
    woken: u64,
}

/// The event log of one prefix tree.
#[derive(Debug)]
pub struct KvEventLog {
    log: Mutex<Log>,
    changed: Notify,
    /// Identifies this run of the server. A reader may still use numbers of an earlier run.
    epoch: u64,
}

impl KvEventLog {
    /// An empty log for a tree over `pages` pages; the only allocation. None if the host has no memory.
    #[must_use]
    pub fn new(pages: usize) -> Option<Self> {
        let (mut rows, mut removals) = (Vec::new(), VecDeque::new());
        rows.try_reserve_exact(pages).ok()?;
        removals.try_reserve_exact(pages).ok()?;
        rows.resize(pages, Row { seq: 0, hash: 0, parent: 0, tokens: [0; PAGE_TOKENS], before: NONE, after: NONE });
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let log = Log {
            rows: rows.into_boxed_slice(),
            first: NONE,
            last: NONE,
            pages: 0,
            removals,
            seq: 0,
            forgotten: 0,
            woken: 0,
        };
        let epoch = since_1970.as_micros() as u64;
        Some(Self { log: Mutex::new(log), changed: Notify::new(), epoch })
    }

    /// Bytes of host memory of the log for a tree over `pages` pages, without the allocator's overhead for its two blocks.
    #[must_use]
    pub const fn bytes_for(pages: usize) -> usize {
        pages * (size_of::<Row>() + size_of::<Removal>()) + size_of::<Self>()
    }

    /// Identifies this run of the server.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the sizes of the log.
    #[must_use]
    pub fn stats(&self) -> KvEventStats {
        let log = self.lock();
        KvEventStats {
            changes: log.seq,
            pages: log.pages,
            removals_kept: log.removals.len(),
            removals_max: log.rows.len(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        // The order of the writes keeps numbers and links consistent even after a panic.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that `page` has entered the tree below `parent`.
    pub(super) fn stored(&self, page: PageId, parent: Option<PageId>, tokens: &[u32; PAGE_TOKENS]) {
        let mut log = self.lock();
        let above = parent.map(|parent| log.rows[parent.index()]);
        // A page below an unreported page is not reported.
        if above.is_some_and(|above| above.seq == 0) {
            return;
        }
        let parent = above.map_or(0, |above| above.hash);
        let (seq, before) = (log.seq + 1, log.last);
        let hash = name(parent, tokens);
        log.rows[page.index()] = Row { seq, hash, parent, tokens: *tokens, before, after: NONE };
        match log.rows.get_mut(before as usize) {
            Some(last) => last.after = page.0,
            None => log.first = page.0,
        }
        (log.last, log.seq) = (page.0, seq);
        log.pages += 1;
    }

    /// Records that `page` has left the tree.
    pub(super) fn removed(&self, page: PageId) {
        let mut log = self.lock();
        let Row { seq, hash, before, after, .. } = log.rows[page.index()];
        if seq == 0 {
            return;
        }
        log.rows[page.index()].seq = 0;
        match log.rows.get_mut(before as usize) {
            Some(row) => row.after = after,
            None => log.first = after,
        }
        match log.rows.get_mut(after as usize) {
            Some(row) => row.before = before,
            None => log.last = before,
        }
        log.pages -= 1;
        log.seq += 1;
        let seq = log.seq;
        if log.removals.len() == log.rows.len() {
            log.forgotten = log.removals.pop_front().map_or(seq, |oldest| oldest.seq);
        }
        log.removals.push_back(Removal { seq, hash });
    }

    /// Records that the tree is empty.
    pub(super) fn cleared(&self) {
        let mut log = self.lock();
        log.rows.iter_mut().for_each(|row| row.seq = 0);
        log.removals.clear();
        (log.first, log.last, log.pages) = (NONE, NONE, 0);
        log.seq += 1;
        log.forgotten = log.seq;
    }

    /// Wakes the waiting readers if there are changes since the last call.
    pub(crate) fn wake(&self) {
        let mut log = self.lock();
        if log.woken != log.seq {
            log.woken = log.seq;
            drop(log);
            self.changed.notify_waiters();
        }
    }

    /// Waits for changes after `cursor`. May return early.
    pub async fn changed(&self, cursor: &KvCursor) {
        let told = self.changed.notified();
        // Checked after the wait is registered, so that no change in between is missed.
        let news = {
            let log = self.lock();
            !cursor.begun || log.seq > cursor.stored.max(cursor.removed)
        };
        if !news {
            told.await;
        }
    }

    /// Adds the next changes to `events`, at most `most`, and moves the cursor past them.
    pub fn read(&self, cursor: &mut KvCursor, most: usize, events: &mut Vec<KvEvent>) {
        let log = self.lock();
        let end = events.len() + most;
        let lost = !cursor.begun || cursor.removed < log.forgotten || cursor.stored.max(cursor.removed) > log.seq;
        let place = if lost { None } else { log.next(cursor) };
        let mut page = place.unwrap_or_else(|| {
            // Earlier removals are of pages that this reader will not receive.
            *cursor = KvCursor { begun: true, stored: 0, removed: log.seq, page: NONE };
            events.push(KvEvent::Reset);
            log.first
        });
        let mut removal = log.removals.partition_point(|removal| removal.seq <= cursor.removed);
        while events.len() < end {
            let row = log.rows.get(page as usize);
            let gone = log.removals.get(removal);
            match (row, gone) {
                (Some(row), gone) if gone.is_none_or(|gone| row.seq < gone.seq) => {
                    let parent = (row.parent != 0).then_some(row.parent);
                    events.push(KvEvent::Stored { seq: row.seq, hash: row.hash, parent, tokens: row.tokens });
                    (cursor.stored, cursor.page, page) = (row.seq, page, row.after);
                }
                (_, Some(gone)) => {
                    events.push(KvEvent::Removed { seq: gone.seq, hash: gone.hash });
                    cursor.removed = gone.seq;
                    removal += 1;
                }
                (_, None) => break,
            }
        }
    }
}

impl Log {
    /// Returns the first page that entered after the cursor's last one. None if the search takes too long.
    fn next(&self, cursor: &KvCursor) -> Option<u32> {
        if cursor.stored == 0 {
            return Some(self.first);
        }
        if let Some(row) = self.rows.get(cursor.page as usize).filter(|row| row.seq == cursor.stored) {
            return Some(row.after);
        }
        // The page has left the tree: search backwards from the newest one.
        self.back_to(cursor.stored).0
    }

    /// Returns the first page that entered after change `seq`, or [`NONE`] if no page did, and how many rows were examined.
    fn back_to(&self, seq: u64) -> (Option<u32>, usize) {
        let (mut page, mut next) = (self.last, NONE);
        for looked_at in 1..=LOOKED_AT_MAX {
            match self.rows.get(page as usize).filter(|row| row.seq > seq) {
                Some(row) => (page, next) = (row.before, page),
                None => return (Some(next), looked_at),
            }
        }
        (None, LOOKED_AT_MAX)
    }
}

/// The name of a page: 63 bits, so that it is a number everywhere, and never 0.
fn name(parent: u64, tokens: &[u32; PAGE_TOKENS]) -> u64 {
    let mut hash = parent ^ 0x9e37_79b9_7f4a_7c15;
    for four in tokens.as_chunks::<4>().0 {
        let low = u64::from(four[0]) | u64::from(four[1]) << 32;
        let high = u64::from(four[2]) | u64::from(four[3]) << 32;
        hash = fold(low ^ hash, high ^ 0xd1b5_4a32_d192_ed03) ^ hash.rotate_left(23);
    }
    (hash >> 1).max(1)
}

#[cfg(test)]
#[path = "kv_event_log_tests.rs"]
mod tests;
