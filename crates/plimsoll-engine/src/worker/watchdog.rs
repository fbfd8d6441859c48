//! I10: an engine that makes no progress for too long says so, in the log, in a metric and at `/health`, and takes no more requests
//! until it moves again.
//!
//! Progress is a step that was delivered, a request that ended, or having nothing to do. A step that returns late has been a
//! stall and is over; a kernel that never returns cannot be killed without the process, so it is said and that is
//! all. An engine thread that goes round without getting anywhere is another matter: it ends what it has and starts over
//! (`worker/upkeep.rs`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::metrics::Metrics;
use crate::status::Status;

/// Watches one engine's progress.
#[derive(Debug)]
pub(crate) struct Watchdog {
    limit_ms: AtomicU64,
    stalled: AtomicBool,
    /// Progress when the stall was noticed.
    since_ms: AtomicU64,
}

impl Watchdog {
    pub fn new(limit: Duration) -> Self {
        let watchdog =
            Self { limit_ms: AtomicU64::new(0), stalled: AtomicBool::new(false), since_ms: AtomicU64::new(0) };
        watchdog.set_limit(limit);
        watchdog
    }

    pub fn limit(&self) -> Duration {
        Duration::from_millis(self.limit_ms.load(Relaxed))
    }

    pub fn set_limit(&self, limit: Duration) {
        self.limit_ms.store(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Whether the last look found the engine stalled.
    pub fn stalled(&self) -> bool {
        self.stalled.load(Relaxed)
    }

    /// Looks at the engine `now` (since its epoch) and says what has changed.
    pub fn look(&self, now: Duration, status: &Status, metrics: &Metrics) {
        let progress = Duration::from_millis(status.progress_ms.load(Relaxed));
        let (silent, limit) = (now.saturating_sub(progress), self.limit());
        let (running, waiting) = (status.running.load(Relaxed), status.waiting.load(Relaxed));
        if silent > limit {
            if !self.stalled.swap(true, Relaxed) {
                self.since_ms.store(status.progress_ms.load(Relaxed), Relaxed);
                metrics.stalls.inc();
                let seconds = (silent.as_secs_f64() * 10.0).round() / 10.0;
                tracing::error!(
                    seconds,
                    running,
                    waiting,
                    "the engine makes no progress; a kernel that does not return cannot be ended without the process"
                );
            }
        } else if self.stalled.swap(false, Relaxed) {
            let silent = progress.saturating_sub(Duration::from_millis(self.since_ms.load(Relaxed)));
            let seconds = (silent.as_secs_f64() * 10.0).round() / 10.0;
            tracing::warn!(seconds, running, waiting, "the engine makes progress again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_counted_once_and_ends_with_progress() {
        let (watchdog, status, metrics) =
            (Watchdog::new(Duration::from_secs(2)), Status::default(), Metrics::default());
        let look = |ms| watchdog.look(Duration::from_millis(ms), &status, &metrics);
        look(2000);
        assert!(!watchdog.stalled(), "not longer than the limit");
        look(2001);
        look(9000);
        assert!(watchdog.stalled());
        assert_eq!(metrics.stalls.get(), 1);
        status.progress_ms.store(9000, Relaxed);
        look(9100);
        assert!(!watchdog.stalled());
        look(11_001);
        assert!(watchdog.stalled());
        assert_eq!(metrics.stalls.get(), 2);
    }
}
