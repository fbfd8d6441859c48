//! The bytes that grammars may take together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the budget holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub used: u64,
    /// Bytes at most.
    pub limit: u64,
    /// Compiled grammars.
    pub grammars: u64,
    /// Grammars compiled since the start.
    pub compiled: u64,
    /// Requests that found theirs compiled.
    pub hits: u64,
    /// Grammars dropped to make room.
    pub evicted: u64,
    /// Processes started as sandboxes: more than two where jobs broke a limit.
    pub sandbox_starts: u64,
    /// Answers that ended with an error because nothing valid could follow, or because they broke their schema.
    pub invalid_answers: u64,
}

/// A limit and what is taken of it.
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

    /// A share of nothing yet.
    pub fn share(self: &Arc<Self>) -> Share {
        Share { budget: Arc::clone(self), bytes: 0 }
    }
}

/// Bytes taken; given back on drop.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Share {
    /// Bytes taken.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Grows to `bytes` (never shrinks). False where they are not there.
    pub fn grow_to(&mut self, bytes: u64) -> bool {
        let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) else { return true };
        let limit = self.budget.limit;
        let take = |used: u64| used.checked_add(more).filter(|sum| *sum <= limit);
        let taken = self.budget.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok();
        self.bytes += if taken { more } else { 0 };
        taken
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_exact_and_come_back() {
        let budget = Budget::new(100);
        let mut share = budget.share();
        assert!(share.grow_to(60) && !budget.share().grow_to(41));
        assert!(share.grow_to(100) && share.grow_to(50) && !share.grow_to(101));
        assert_eq!((share.bytes, budget.used()), (100, 100));
        drop(share);
        assert_eq!(budget.used(), 0);
    }
}
