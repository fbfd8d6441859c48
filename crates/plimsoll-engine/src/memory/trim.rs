//! Decides when unused memory goes back to the system.
//!
//! Freed heap memory stays with the system's allocator, and in elastic mode touched pages stay resident. Both are given back after a number
//! of requests have ended: the more requests run at once, the sooner. Both are given back once more when the engine is idle. Pure
//! arithmetic: the engine thread gives pages back, and the watching thread trims the heap, which takes locks and milliseconds. What must
//! not be in here: pages, sequences, system calls.
//! milliseconds. What must not be in here: pages, sequences, system calls.

use std::time::{Duration, Instant};

/// Requests that end before memory is given back while few run.
const BASE: u64 = 32;
/// Running requests at which the interval begins to shrink.
const FEW: u64 = 8;
/// How long an engine must have nothing to do before it counts as idle: pauses between the turns of a conversation are no
/// reason to forget its prefix.
const IDLE: Duration = Duration::from_secs(3);

/// Returns the number of ended requests after which memory is given back while `running` requests run. Each running request leaves its
/// share behind, so the number is inverse to `running`. At least 1.
pub fn interval(base: u64, running: u64) -> u64 {
    (base.saturating_mul(FEW) / running.max(FEW)).max(1)
}

/// The memory to give back now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing.
    Nothing,
    /// Free memory goes back; cached pages stay.
    Free,
    /// No request is left: where memory is elastic, cached pages go back as well.
    All,
}

/// The counts since memory was last given back.
#[derive(Debug)]
pub(crate) struct Trim {
    /// Requests that had ended at the last trim.
    ended: u64,
    /// The time since which there has been nothing to do.
    idle_since: Option<Instant>,
    /// Whether a request has run since everything was given back.
    used: bool,
}

impl Trim {
    /// Returns the counts of an engine that has run no request.
    pub fn new() -> Self {
        Self { ended: 0, idle_since: None, used: false }
    }

    /// Returns the memory to give back at `now`. `running` requests run, `ended` requests have ended since start, and `idle` is true if
    /// none runs or waits.
    pub fn due(&mut self, now: Instant, running: usize, ended: u64, idle: bool) -> Due {
        if !idle {
            (self.used, self.idle_since) = (true, None);
            // The request that has just ended ran as well.
            if ended - self.ended >= interval(BASE, running as u64 + 1) {
                self.ended = ended;
                return Due::Free;
            }
            return Due::Nothing;
        }
        let since = *self.idle_since.get_or_insert(now);
        if (self.used || ended > self.ended) && now.duration_since(since) >= IDLE {
            (self.ended, self.used) = (ended, false);
            return Due::All;
        }
        Due::Nothing
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_golden_intervals() {
        assert_eq!([1, 16, 24, 32].map(|running| interval(32, running)), [32, 16, 10, 8]);
    }

    proptest! {
        #[test]
        fn more_requests_never_wait_longer(base in 1u64..1000, running in 0u64..10_000, more in 0u64..100) {
            let here = interval(base, running);
            prop_assert!((1..=base).contains(&here));
            prop_assert!(interval(base, running + more) <= here);
            prop_assert!(running > FEW || here == base, "few requests: the whole interval");
            // Inverse: the memory left behind between two trims is bounded for any number of requests.
            prop_assert!(here == 1 || here * running.max(FEW) <= base * FEW);
        }

        #[test]
        fn nothing_is_left_behind_for_ever(ends in proptest::collection::vec((0u64..5, 1usize..40), 1..200)) {
            let (mut trim, mut ended, mut last, now) = (Trim::new(), 0, 0, Instant::now());
            for (more, running) in ends {
                ended += more;
                match trim.due(now, running, ended, false) {
                    Due::Free => last = ended,
                    due => prop_assert_eq!(due, Due::Nothing),
                }
                prop_assert!(ended - last < interval(BASE, running as u64 + 1));
            }
            prop_assert_eq!(trim.due(now, 0, ended, true), Due::Nothing, "not idle for long");
            prop_assert_eq!(trim.due(now + IDLE, 0, ended, true), Due::All);
            prop_assert_eq!(trim.due(now + 2 * IDLE, 0, ended, true), Due::Nothing, "once");
        }
    }

    #[test]
    fn an_arrival_starts_the_wait_anew() {
        let (mut trim, start) = (Trim::new(), Instant::now());
        assert_eq!(trim.due(start + IDLE, 0, 0, true), Due::Nothing, "nothing was used");
        assert_eq!(trim.due(start, 1, 0, false), Due::Nothing);
        assert_eq!(trim.due(start + IDLE / 2, 0, 1, true), Due::Nothing);
        assert_eq!(trim.due(start + IDLE, 1, 1, false), Due::Nothing);
        assert_eq!(trim.due(start + 2 * IDLE, 0, 2, true), Due::Nothing);
        assert_eq!(trim.due(start + 3 * IDLE, 0, 2, true), Due::All);
    }
}
