//! Byte budgets: one for everything in flight, one for work on blocking threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::http::error::{ApiError, ApiResult};

/// Bytes that bodies, their parsed forms and unsent answers hold together.
#[derive(Debug)]
pub(crate) struct ByteBudget {
    limit: u64,
    used: AtomicU64,
}

impl ByteBudget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Refuses more bytes than the whole budget: a retry would not help. `param` is the field at fault.
    pub fn ever_holds(&self, param: &str, bytes: u64) -> ApiResult<()> {
        if bytes > self.limit {
            let limit = self.limit;
            let message = format!(
                "{param}: this takes {bytes} bytes, more than this server's limit of {limit} (--max-bytes-in-flight)"
            );
            return Err(ApiError::invalid(param, message));
        }
        Ok(())
    }

    /// Takes `bytes` from the budget.
    ///
    /// # Errors
    /// 503 if they are not free.
    pub fn hold(self: &Arc<Self>, bytes: u64) -> ApiResult<Held> {
        let mut held = Held { budget: Arc::clone(self), bytes: 0 };
        held.grow(bytes)?;
        Ok(held)
    }
}

/// A share of the budget, given back on drop.
#[derive(Debug)]
pub(crate) struct Held {
    budget: Arc<ByteBudget>,
    bytes: u64,
}

impl Held {
    /// Like [`Self::grow`]. Refuses more than the whole budget as an error of the field `param`.
    pub fn grow_for(&mut self, param: &str, bytes: u64) -> ApiResult<()> {
        self.budget.ever_holds(param, bytes)?;
        self.grow(bytes)
    }

    /// Takes `more` bytes.
    pub fn grow(&mut self, more: u64) -> ApiResult<()> {
        let limit = self.budget.limit;
        let take = |used: u64| used.checked_add(more).filter(|sum| *sum <= limit);
        let taken = self.budget.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
        if taken.is_err() {
            let message = format!("the {limit} bytes for requests in flight are all taken; try again later");
            return Err(ApiError { close: true, ..ApiError::unavailable(message, 1) });
        }
        self.bytes += more;
        Ok(())
    }
}

impl Held {
    /// Returns the bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds another share of the same budget to this one.
    pub fn join(&mut self, mut other: Held) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Splits `bytes` off into a separate share.
    pub fn split(&mut self, bytes: u64) -> Held {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Held { budget: Arc::clone(&self.budget), bytes }
    }

    /// Grows or shrinks to exactly `bytes`.
    pub fn become_bytes(&mut self, bytes: u64) -> ApiResult<()> {
        self.grow(bytes.saturating_sub(self.bytes))?;
        self.shrink_to(bytes);
        Ok(())
    }

    /// Gives back all but `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let back = self.bytes.saturating_sub(bytes);
        self.bytes -= back;
        self.budget.used.fetch_sub(back, Ordering::AcqRel);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// A budget of heap bytes for work on blocking threads. A thread blocks until its share is free.
///
/// Each piece of work holds one share at a time, at most the whole budget, so one piece can always proceed. Shares are
/// given in order of arrival, so that a stream of small pieces does not starve a large one.
#[derive(Debug)]
pub(crate) struct WorkBudget {
    limit: u64,
    shares: Mutex<Shares>,
    /// Notified when a share was taken or given back.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Shares {
    used: u64,
    /// The number of pieces of work that have arrived, and of those that have started.
    arrived: u64,
    started: u64,
}

impl WorkBudget {
    pub fn new(limit: u64) -> Self {
        Self { limit, shares: Mutex::default(), changed: Condvar::new() }
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn shares(&self) -> MutexGuard<'_, Shares> {
        // No code panics while the lock is held.
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` while holding `bytes`, which are at most the limit.
    pub fn with<T>(&self, bytes: u64, work: impl FnOnce() -> T) -> T {
        let bytes = bytes.min(self.limit);
        let mut shares = self.shares();
        let number = shares.arrived;
        shares.arrived += 1;
        let not_yet = |shares: &mut Shares| shares.started < number || shares.used + bytes > self.limit;
        shares = self.changed.wait_while(shares, not_yet).unwrap_or_else(PoisonError::into_inner);
        shares.used += bytes;
        shares.started += 1;
        drop(shares);
        // The next waiting thread's share may fit beside this one.
        self.changed.notify_all();
        let _share = Share { budget: self, bytes };
        work()
    }
}

/// Gives the bytes back on drop, also when the work panics.
struct Share<'a> {
    budget: &'a WorkBudget,
    bytes: u64,
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.budget.shares().used -= self.bytes;
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn work_never_holds_more_than_its_budget() {
        let budget = WorkBudget::new(10);
        let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for i in 0..8u64 {
                let (budget, now, most) = (&budget, &now, &most);
                scope.spawn(move || {
                    for _ in 0..50 {
                        let bytes = 1 + i;
                        budget.with(bytes, || {
                            let held = now.fetch_add(bytes, Ordering::SeqCst) + bytes;
                            most.fetch_max(held, Ordering::SeqCst);
                            std::thread::yield_now();
                            now.fetch_sub(bytes, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert!((8..=10).contains(&most.load(Ordering::SeqCst)));
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| budget.with(10, || panic!("on purpose"))));
        assert!(panicked.is_err());
        assert_eq!(budget.with(10, || 7), 7);
    }

    #[test]
    fn large_work_is_not_starved_by_small_work() {
        let budget = WorkBudget::new(10);
        let (done, arrived) = (Mutex::new(Vec::new()), |count| {
            while budget.shares().arrived < count {
                std::thread::yield_now();
            }
        });
        std::thread::scope(|scope| {
            let work = |bytes| {
                scope.spawn({
                    let (budget, done) = (&budget, &done);
                    move || budget.with(bytes, || done.lock().unwrap().push(bytes))
                })
            };
            budget.with(5, || {
                work(10);
                arrived(2);
                work(1);
                arrived(3);
                // By then, work that did not have to wait would have finished.
                std::thread::sleep(Duration::from_millis(50));
                assert!(done.lock().unwrap().is_empty(), "small work waits behind large work");
            });
        });
        assert_eq!(*done.lock().unwrap(), [10, 1]);
    }

    #[test]
    fn budget_is_exact_and_shares_return_on_drop() {
        let budget = ByteBudget::new(100);
        let mut held = budget.hold(60).unwrap();
        assert!(budget.hold(41).is_err());
        assert_eq!(budget.used(), 60);
        held.grow(40).unwrap();
        assert!(held.grow(1).is_err());
        assert!(held.grow(u64::MAX).is_err());
        assert_eq!(budget.used(), 100);
        held.shrink_to(200);
        assert_eq!(budget.used(), 100, "it never grows by shrinking");
        held.shrink_to(30);
        assert_eq!(budget.used(), 30);
        let part = held.split(10);
        held.become_bytes(15).unwrap();
        assert_eq!(budget.used(), 25);
        drop(part);
        assert_eq!(budget.used(), 15);
        drop(held);
        assert_eq!(budget.used(), 0);
    }
}
