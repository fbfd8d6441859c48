//! I10: an engine without progress for too long reports that in the log, in a metric and at `/health`. It refuses
//! requests until it makes progress again.
//!
//! Progress is a delivered step, an ended request, or an idle engine. A step that returns late was a stall, which is
//! over. A kernel that never returns cannot be ended without the process, so it is only reported. An engine thread that
//! runs but makes no progress is another case: it requeues all requests and rebuilds the page tables
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
