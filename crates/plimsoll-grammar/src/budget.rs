//! The byte budget of all grammars.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// State of the budget, and counters since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub used: u64,
    /// Limit in bytes.
    pub limit: u64,
    /// Compiled grammars in the cache.
    pub grammars: u64,
    /// Grammars compiled since the start.
    pub compiled: u64,
    /// Requests that found their grammar in the cache.
    pub hits: u64,
    /// Grammars evicted from the cache.
    pub evicted: u64,
    /// Sandbox processes started. More than two if jobs exceeded a limit.
    pub sandbox_starts: u64,
    /// Answers that ended with an error: no valid token was left, or the answer violates its schema.
    pub invalid_answers: u64,
}

/// A limit in bytes, and the bytes in use.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    used: AtomicU64,
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// A reservation of 0 bytes.
    pub fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation { budget: Arc::clone(self), bytes: 0 }
    }
}

/// Bytes of the budget, released on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Reservation {
    /// Reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Grows to `bytes`; never shrinks. False if the budget has too few bytes left.
    pub fn grow_to(&mut self, bytes: u64) -> bool {
        let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) else { return true };
        let limit = self.budget.limit;
        let take = |used: u64| used.checked_add(more).filter(|sum| *sum <= limit);
        let taken = self.budget.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok();
        self.bytes += if taken { more } else { 0 };
        taken
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_are_exact_and_released() {
        let budget = Budget::new(100);
        let mut reservation = budget.reservation();
        assert!(reservation.grow_to(60) && !budget.reservation().grow_to(41));
        assert!(reservation.grow_to(100) && reservation.grow_to(50) && !reservation.grow_to(101));
        assert_eq!((reservation.bytes, budget.used()), (100, 100));
        drop(reservation);
        assert_eq!(budget.used(), 0);
    }
}
