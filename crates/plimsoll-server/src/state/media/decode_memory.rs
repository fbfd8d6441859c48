//! Staging memory for a request's media. A request gets all its memory at once or none. Requests get it one at a time, in order of arrival.
//! This way no request waits while it holds memory that another one needs. A waiting request tries again only after memory has been freed.

use std::sync::Arc;
use std::time::Duration;

use plimsoll_media::{MediaError, Staged, Staging};
use tokio::sync::{Mutex, Notify};
use tokio::time::{Instant, timeout_at};

/// Memory for a request's media while they are prepared.
#[derive(Debug)]
pub(crate) struct DecodeMemory {
    /// Memory for each item's pixels.
    pub pixels: Vec<Staged>,
    /// Memory for decoding, one item after the other.
    pub work: Staged,
}

/// The queue for staging memory.
#[derive(Debug)]
pub(crate) struct DecodeBudget {
    staging: Staging,
    /// The request that holds this lock is the next to get memory.
    next: Mutex<()>,
    /// Notified when memory has been freed. Only the request that holds `next` waits for it.
    freed: Arc<Notify>,
}

impl DecodeBudget {
    /// None if `staging` already notifies another listener: a request that waits here would never be woken.
    pub fn of(staging: &Staging) -> Option<Self> {
        let freed = Arc::new(Notify::new());
        let told = Arc::clone(&freed);
        let heard = staging.when_freed(move || told.notify_one());
        heard.then(|| Self { staging: staging.clone(), next: Mutex::new(()), freed })
    }

    /// Waits for memory for `work` bytes of decoding and for each item's pixels, no longer than `within`.
    pub async fn take(&self, work: u64, pixels: &[u64], within: Duration) -> Result<DecodeMemory, MediaError> {
        let staging = &self.staging;
        let asked = pixels.iter().fold(work, |sum, bytes| sum.saturating_add(*bytes));
        if asked > staging.limit() {
            return Err(MediaError::OverLimit {
                what: "the request's media",
                asked,
                limit: staging.limit(),
                unit: "bytes on the host while they are prepared",
                flag: "--media-bytes",
            });
        }
        let deadline = Instant::now() + within;
        let busy = |_| MediaError::StagingBusy { asked, used: staging.used(), total: staging.limit() };
        let _next = timeout_at(deadline, self.next.lock()).await.map_err(busy)?;
        loop {
            // In one piece: a part that is reserved and freed again would wake this loop.
            match staging.reserve(asked) {
                Ok(mut work) => {
                    let pixels = pixels.iter().map(|bytes| work.split(*bytes)).collect();
                    return Ok(DecodeMemory { pixels, work });
                }
                Err(MediaError::StagingBusy { .. }) if Instant::now() < deadline => {
                    // The next attempt decides, after a timeout as after a notice. Memory freed since the last attempt has left a
                    // notification.
                    let _ = timeout_at(deadline, self.freed.notified()).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};

    use super::*;

    /// Counts how often the waiting request is woken: each time it would try again.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }
    }

    #[tokio::test]
    async fn partial_fit_is_tried_again_only_after_bytes_return() {
        let staging = Staging::new(100);
        let budget = DecodeBudget::of(&staging).unwrap();
        assert!(DecodeBudget::of(&staging).is_none(), "one is told, not two");
        let (first, second) = (staging.reserve(30).unwrap(), staging.reserve(20).unwrap());
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        let looks = || woken.0.load(Ordering::Acquire);
        // 50 bytes are free: enough for the work and one of the images.
        let mut waiting = pin!(budget.take(35, &[15, 25], Duration::from_secs(60)));
        let began = Instant::now();
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        assert_eq!((looks(), staging.used(), staging.peak()), (0, 50, 50), "nothing was taken and given back");
        drop(second);
        assert_eq!(looks(), 1);
        assert!(waiting.as_mut().poll(&mut context).is_pending(), "70 are free");
        assert_eq!(looks(), 1);
        drop(first);
        let reserved = waiting.await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(30));
        let pixels: Vec<u64> = reserved.pixels.iter().map(Staged::bytes).collect();
        assert_eq!((reserved.work.bytes(), pixels, staging.used()), (35, vec![15, 25], 75));
        let late = budget.take(0, &[26], Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(late, MediaError::StagingBusy { asked: 26, used: 75, total: 100 });
        let never = budget.take(1, &[100], Duration::from_secs(9)).await.unwrap_err();
        assert!(never.is_the_clients(), "{never}");
        drop(reserved);
        assert_eq!(staging.used(), 0);
    }
}
