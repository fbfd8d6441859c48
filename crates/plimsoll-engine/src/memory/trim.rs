//! When unused memory goes back to the system.
//!
//! Freed heap memory stays with the system's allocator, and in elastic mode pages that were touched stay resident. Both are given
//! back after a number of requests have ended, the sooner the more run at once, and once more when nothing is left to do. Pure
//! arithmetic: the engine thread gives pages back, the watching thread trims the heap, since that takes locks and
//! milliseconds. What must not be in here: pages, sequences, system calls.

use std::time::{Duration, Instant};

/// Requests that end before memory is given back while few run.
const BASE: u64 = 32;
/// Running requests at which the interval begins to shrink.
const FEW: u64 = 8;
/// How long an engine must have nothing to do before it counts as idle: pauses between the turns of a conversation are no
/// reason to forget its prefix.
const IDLE: Duration = Duration::from_secs(3);

/// After how many ended requests memory is given back when `running` run at once: each of them leaves its share behind, so the
/// interval is inverse to their number. At least 1.
pub fn interval(base: u64, running: u64) -> u64 {
    (base.saturating_mul(FEW) / running.max(FEW)).max(1)
}

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing.
    Nothing,
    /// What is free goes back; what is cached stays.
    Free,
    /// No request is left: cached pages go back too where memory is elastic.
    All,
}

/// Keeps count.
#[derive(Debug)]
pub(crate) struct Trim {
    /// Requests that had ended at the last trim.
    ended: u64,
    /// Since when there has been nothing to do.
    idle_since: Option<Instant>,
    /// Something has run since everything was given back.
    used: bool,
}

impl Trim {
    /// Nothing has been used yet.
    pub fn new() -> Self {
        Self { ended: 0, idle_since: None, used: false }
    }

    /// What is due `now`, with `running` requests in the running set, `ended` in all since start, and nothing to do if `idle`.
    pub fn due(&mut self, now: Instant, running: usize, ended: u64, idle: bool) -> Due {
        if !idle {
            (self.used, self.idle_since) = (true, None);
            // The one that has just ended ran too.
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
            // Inverse: what they leave behind between two trims is bounded whatever their number.
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
