//! Permits: the limits of encoder work at once, in bytes and in count.
//!
//! The first permit of a batch may wait; growing a batch never does, because a batcher that waits while it holds
//! permits may wait for itself. Waiters are served in order and no batch grows past them, so small items do not starve
//! a large one. Permits return on drop, on every path.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::MediaError;

/// The most encoder work at once: the amount that the self-test has run.
#[derive(Debug)]
pub struct Permits {
    count_limit: usize,
    bytes_limit: u64,
    book: Mutex<Book>,
    changed: Condvar,
}

/// Current and peak work in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Items.
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The most items at any instant.
    pub count_peak: usize,
    /// The most bytes at any instant.
    pub bytes_peak: u64,
}

/// The bookkeeping, without locks and clocks, so that a test can walk every state of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Book {
    used: InUse,
    waiting: VecDeque<u64>,
    next_ticket: u64,
    closed: bool,
}

impl Book {
    fn take_if_fits(&mut self, bytes: u64, limits: (usize, u64)) -> bool {
        let used = &mut self.used;
        if used.count >= limits.0 || bytes > limits.1 - used.bytes {
            return false;
        }
        used.count += 1;
        used.bytes += bytes;
        used.count_peak = used.count_peak.max(used.count);
        used.bytes_peak = used.bytes_peak.max(used.bytes);
        true
    }

    /// Grows a batch: only if it fits now, and never past a waiter.
    fn try_grow(&mut self, bytes: u64, limits: (usize, u64)) -> bool {
        !self.closed && self.waiting.is_empty() && self.take_if_fits(bytes, limits)
    }

    fn queue(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.push_back(ticket);
        ticket
    }

    /// Takes the permit of the first waiter, if it fits.
    fn poll(&mut self, ticket: u64, bytes: u64, limits: (usize, u64)) -> bool {
        let served = self.waiting.front() == Some(&ticket) && self.take_if_fits(bytes, limits);
        if served {
            self.waiting.pop_front();
        }
        served
    }

    fn leave(&mut self, ticket: u64) {
        self.waiting.retain(|&waiting| waiting != ticket);
    }

    fn give_back(&mut self, count: usize, bytes: u64) {
        debug_assert!(count <= self.used.count && bytes <= self.used.bytes, "permits given back that nobody took");
        self.used.count -= count;
        self.used.bytes -= bytes;
    }
}

impl Permits {
    /// Returns permits for `count_limit` items that together take `bytes_limit` bytes.
    pub fn new(count_limit: usize, bytes_limit: u64) -> Arc<Self> {
        Arc::new(Self { count_limit, bytes_limit, book: Mutex::default(), changed: Condvar::new() })
    }

    /// Takes the first permit of a batch. Waits for it at most until `deadline`, for ever without one.
    ///
    /// `Ok(None)`: the deadline has passed. Errors: an item that can never fit, or a stage that closes.
    pub fn first(self: &Arc<Self>, bytes: u64, deadline: Option<Instant>) -> Result<Option<Grant>, MediaError> {
        self.check(bytes)?;
        let mut book = self.lock();
        let ticket = book.queue();
        while !book.closed {
            if book.poll(ticket, bytes, self.limits()) {
                // The next waiter may fit as well.
                self.changed.notify_all();
                return Ok(Some(Grant { permits: Arc::clone(self), count: 1, bytes }));
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                book.leave(ticket);
                self.changed.notify_all();
                return Ok(None);
            }
            book = if deadline.is_some() {
                self.changed.wait_timeout(book, left).unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.changed.wait(book).unwrap_or_else(PoisonError::into_inner)
            };
        }
        book.leave(ticket);
        Err(MediaError::Closed)
    }

    /// Refuses an item that no batch can ever hold.
    pub fn check(&self, bytes: u64) -> Result<(), MediaError> {
        if bytes <= self.bytes_limit {
            return Ok(());
        }
        Err(MediaError::OverLimit {
            what: "an item",
            asked: bytes,
            limit: self.bytes_limit,
            unit: "bytes of encoder workspace",
            flag: "--visual-infer-batch-size",
        })
    }

    /// Ends every wait with an error, now and later. Held permits return as usual.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Returns the work in progress.
    pub fn in_use(&self) -> InUse {
        self.lock().used
    }

    /// Returns the limits: items and bytes.
    pub fn limits(&self) -> (usize, u64) {
        (self.count_limit, self.bytes_limit)
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        // No method leaves the book half written, so a poisoned lock holds a sound book.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Permits held by one batch. They return when it is dropped.
#[derive(Debug)]
pub struct Grant {
    permits: Arc<Permits>,
    count: usize,
    bytes: u64,
}

impl Grant {
    /// Takes a permit for one more item of `bytes` if that is possible at once.
    pub fn try_grow(&mut self, bytes: u64) -> bool {
        let grown = self.permits.lock().try_grow(bytes, self.permits.limits());
        if grown {
            self.count += 1;
            self.bytes += bytes;
        }
        grown
    }

    /// Returns the items and bytes held.
    pub fn held(&self) -> (usize, u64) {
        (self.count, self.bytes)
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.permits.lock().give_back(self.count, self.bytes);
        self.permits.changed.notify_all();
    }
}

#[cfg(test)]
#[path = "permits_tests.rs"]
mod tests;
