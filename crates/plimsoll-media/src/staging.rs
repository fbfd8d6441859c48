//! Host bytes of media on their way: what decoding takes, and resized pixels until their request has ended.
//!
//! One budget for all requests, planned as a line of its own. Reserving never waits: who finds it full tells its client to come
//! again. What is reserved goes back on drop, whatever the path.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};

use plimsoll_memory::broken;

use crate::MediaError;

/// The budget.
#[derive(Clone, Debug)]
pub struct Staging(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

impl Staging {
    /// A budget of `limit` bytes, all of them free.
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Inner { limit, used: AtomicU64::new(0), peak: AtomicU64::new(0) }))
    }

    /// Reserves `bytes`: more than there are is the request's fault, more than are free is nobody's.
    pub fn reserve(&self, bytes: u64) -> Result<Staged, MediaError> {
        let Inner { limit, used, peak } = &*self.0;
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

    /// Bytes there are.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes that are reserved now.
    pub fn used(&self) -> u64 {
        self.0.used.load(Acquire)
    }

    /// The most that were at any instant.
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
    /// Gives back all but `bytes`: an item is decoded, and only its pixels stay.
    pub fn shrink(&mut self, bytes: u64) {
        let back = self.bytes.saturating_sub(bytes);
        self.bytes -= back;
        self.staging.0.used.fetch_sub(back, AcqRel);
    }

    /// Bytes that are reserved.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.staging.0.used.fetch_sub(if broken("T-29") { 0 } else { self.bytes }, AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::Staging;
    use crate::MediaError;

    #[test]
    fn what_is_reserved_is_bounded_and_goes_back() {
        let staging = Staging::new(100);
        let mut first = staging.reserve(60).unwrap();
        assert_eq!(staging.reserve(41).unwrap_err(), MediaError::StagingBusy { asked: 41, used: 60, total: 100 });
        first.shrink(10);
        first.shrink(20);
        assert_eq!((first.bytes(), staging.used()), (10, 10));
        drop((first, staging.reserve(90).unwrap()));
        assert_eq!((staging.used(), staging.peak()), (0, 100));
        let error = staging.reserve(101).unwrap_err();
        assert!(error.is_the_clients() && error.to_string().contains("--media-bytes"), "{error}");
    }
}
