//! Host bytes of media in preparation: those of decoding, and resized pixels until their request has ended.
//!
//! One budget for all requests, planned as a component of its own. Reserving never waits: if the budget is full, the client
//! gets an error that allows another try. Reserved bytes return on drop, on every path.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};
use std::sync::{Arc, OnceLock};

use crate::MediaError;

/// The budget of host bytes.
#[derive(Clone, Debug)]
pub struct Staging(Arc<Inner>);

struct Inner {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
    freed: OnceLock<Freed>,
}

/// Called when bytes become free.
type Freed = Box<dyn Fn() + Send + Sync>;

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.used.load(Acquire), self.limit)
    }
}

impl Inner {
    fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, AcqRel);
        if let Some(freed) = self.freed.get().filter(|_| bytes > 0) {
            freed();
        }
    }
}

impl Staging {
    /// Returns a budget of `limit` bytes, all of them free.
    pub fn new(limit: u64) -> Self {
        let (used, peak) = (AtomicU64::new(0), AtomicU64::new(0));
        Self(Arc::new(Inner { limit, used, peak, freed: OnceLock::new() }))
    }

    /// Sets the function that is called whenever bytes are returned, on the thread that returns them. It must not
    /// wait. False if one is already set.
    pub fn when_freed(&self, freed: impl Fn() + Send + Sync + 'static) -> bool {
        self.0.freed.set(Box::new(freed)).is_ok()
    }

    /// Reserves `bytes`. More than the budget is the request's error; more than the free bytes is
    /// [`MediaError::StagingBusy`].
    pub fn reserve(&self, bytes: u64) -> Result<Staged, MediaError> {
        let Inner { limit, used, peak, .. } = &*self.0;
        if bytes > *limit {
            return Err(MediaError::OverLimit {
                what: "an item",
                asked: bytes,
                limit: *limit,
                unit: "bytes on the host while it is prepared",
                flag: "--media-bytes",
            });
        }
        let take = |used: u64| used.checked_add(bytes).filter(|sum| sum <= limit);
        match used.fetch_update(AcqRel, Acquire, take) {
            Ok(before) => {
                peak.fetch_max(before + bytes, AcqRel);
                Ok(Staged { staging: self.clone(), bytes })
            }
            Err(used) => Err(MediaError::StagingBusy { asked: bytes, used, total: *limit }),
        }
    }

    /// Returns the budget in bytes.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Returns the bytes that are reserved now.
    pub fn used(&self) -> u64 {
        self.0.used.load(Acquire)
    }

    /// Returns the most reserved bytes at any instant.
    pub fn peak(&self) -> u64 {
        self.0.peak.load(Acquire)
    }
}

/// Reserved bytes.
#[derive(Debug)]
pub struct Staged {
    staging: Staging,
    bytes: u64,
}

impl Staged {
    /// Splits off `bytes` bytes, or all if there are fewer. They return on their own.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { staging: self.staging.clone(), bytes }
    }

    /// Returns the reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.staging.0.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::{AcqRel, Acquire};

    use super::Staging;
    use crate::MediaError;

    #[test]
    fn what_is_reserved_is_bounded_and_goes_back() {
        let staging = Staging::new(100);
        let mut first = staging.reserve(60).unwrap();
        assert_eq!(staging.reserve(41).unwrap_err(), MediaError::StagingBusy { asked: 41, used: 60, total: 100 });
        let part = first.split(50);
        assert_eq!((first.bytes(), part.bytes(), staging.used()), (10, 50, 60));
        drop(part);
        let rest = first.split(11);
        assert_eq!((first.bytes(), rest.bytes(), staging.used()), (0, 10, 10));
        drop((first, rest, staging.reserve(90).unwrap()));
        assert_eq!((staging.used(), staging.peak()), (0, 100));
        let error = staging.reserve(101).unwrap_err();
        assert!(error.is_the_clients() && error.to_string().contains("--media-bytes"), "{error}");
    }

    #[test]
    fn waiting_request_is_told_when_bytes_are_free() {
        let (staging, told) = (Staging::new(100), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&told);
        let tell = move || {
            count.fetch_add(1, AcqRel);
        };
        assert!(staging.when_freed(tell));
        assert!(!staging.when_freed(|| {}), "somebody is told already");
        let mut held = staging.reserve(60).unwrap();
        let part = held.split(50);
        drop(held.split(0));
        assert_eq!(told.load(Acquire), 0, "nothing came back");
        drop(part);
        assert_eq!(told.load(Acquire), 1);
        drop(held);
        assert_eq!((told.load(Acquire), staging.used()), (2, 0));
    }
}
