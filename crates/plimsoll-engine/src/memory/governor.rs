//! The governor: when other processes take planned memory, it degrades the engine step by step, and recovers.
//!
//! Degradation levels, from the cheapest to the dearest, with hysteresis. One reading raises the level by one; several calm readings lower
//! it by one. Another thread takes a reading every half second; the engine thread reads the current level and acts. Pure arithmetic over
//! readings, which tests inject. What must not be in here: pages, sequences, clients.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

pub use crate::api::degradation::DegradationLevel;
use crate::metrics::Metrics;

/// Calm readings before the degradation level falls by one: three seconds.
const CALM_READINGS: u32 = 6;
/// Least free memory that a healthy machine keeps for a process that has touched all of its plan. Never more than
/// half of the distance between plan and limit: a limit that close to the plan is no reason to degrade.
const RESERVE_BYTES: u64 = 8 << 20;
/// Extra free memory beyond a level's threshold before the level ends. It is a quarter of the threshold if that is
/// less, and at most half of the distance between plan and limit. A larger margin could never be reached, so the
/// level would never fall (seen with a budget of 420 MiB around a plan of 418.9).
const MARGIN_BYTES: u64 = 4 << 20;

/// A reading of the machine's free memory and stalls at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MemoryReading {
    /// Bytes this process could still take before a limit is crossed.
    pub available: u64,
    /// Bytes of the plan that it has not touched yet.
    pub untouched: u64,
    /// Bytes by which the limit lies above the plan. Without other processes, exactly this much more is free than the
    /// plan has still to touch; with them, less.
    pub above_plan: u64,
    /// Bytes that are free where the stalls below were measured: on the machine, or in this process's cgroup.
    pub stall_room: u64,
    /// Percentage of the last ten seconds in which some task waited for memory.
    pub some_avg10: f32,
    /// Percentage of the last ten seconds in which every task waited for memory.
    pub full_avg10: f32,
}

impl MemoryReading {
    /// The degradation level that this reading alone calls for. Leaving a level requires a margin: `strictly`.
    fn calls_for(&self, strictly: bool) -> DegradationLevel {
        // Free memory must cover the bytes that the plan has still to touch. Each halving below that is one level.
        let spare = self.above_plan / 2;
        let due = self.untouched.max(RESERVE_BYTES.min(spare));
        let threshold = |level: usize| {
            let bytes = due >> level;
            if strictly { bytes.saturating_add(MARGIN_BYTES.min(bytes / 4).min(spare)) } else { bytes }
        };
        let by_room = (0..DegradationLevel::ALL.len()).filter(|level| self.available < threshold(*level)).count();
        // Twice as much is free there as `due`, so the stalls have another cause. Another cgroup is full, or a disk is slow; a higher level
        // would not help.
        if self.stall_room >= due.max(RESERVE_BYTES).saturating_mul(2) {
            return DegradationLevel::at(by_room);
        }
        let slack = if strictly { 2.0 } else { 1.0 };
        let by_stalls = match (self.some_avg10 * slack, self.full_avg10 * slack) {
            (_, full) if full >= 60.0 => 6,
            (_, full) if full >= 40.0 => 5,
            (_, full) if full >= 20.0 => 4,
            (some, _) if some >= 60.0 => 3,
            (some, _) if some >= 40.0 => 2,
            (some, _) if some >= 20.0 => 1,
            _ => 0,
        };
        DegradationLevel::at(by_room.max(by_stalls))
    }
}

/// The degradation level of the engine.
#[derive(Debug, Default)]
pub struct Governor {
    level: DegradationLevel,
    calm: u32,
}

impl Governor {
    /// The current level.
    pub fn level(&self) -> DegradationLevel {
        self.level
    }

    /// Takes one reading in. Returns the level that holds until the next.
    pub fn observe(&mut self, reading: &MemoryReading) -> DegradationLevel {
        let level = self.level as usize;
        if reading.calls_for(false) > self.level {
            (self.level, self.calm) = (DegradationLevel::at(level + 1), 0);
        } else if level > 0 && reading.calls_for(true) < self.level {
            self.calm += 1;
            if self.calm >= CALM_READINGS {
                (self.level, self.calm) = (DegradationLevel::at(level - 1), 0);
            }
        } else {
            self.calm = 0;
        }
        self.level
    }
}

/// The last reading and level, shared by the thread that takes readings and the thread that acts.
#[derive(Debug, Default)]
pub struct Gauge {
    last: Mutex<MemoryReading>,
    taken: AtomicU64,
    level: AtomicU64,
}

impl Gauge {
    /// Enters a reading.
    pub fn set(&self, reading: MemoryReading) {
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = reading;
        self.taken.fetch_add(1, Relaxed);
    }

    /// Returns the last reading if it is newer than the `seen`-th, and updates `seen`.
    pub fn newer(&self, seen: &mut u64) -> Option<MemoryReading> {
        let taken = self.taken.load(Relaxed);
        (taken != std::mem::replace(seen, taken)).then(|| self.last())
    }

    /// The last reading.
    pub fn last(&self) -> MemoryReading {
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Enters a level and logs `reading` if the level has changed.
    pub fn stand(&self, level: DegradationLevel, reading: &MemoryReading, metrics: &Metrics) {
        let before = self.level.swap(level as u64, Relaxed);
        let (now, MemoryReading { available, untouched, some_avg10, full_avg10, .. }) = (level.name(), *reading);
        if level as u64 > before {
            metrics.levels[level as usize - 1].inc();
            tracing::warn!(
                degradation = now,
                available,
                untouched,
                some_avg10,
                full_avg10,
                "memory is short: giving way"
            );
        } else if before > level as u64 {
            tracing::info!(degradation = now, available, untouched, some_avg10, full_avg10, "memory is back");
        }
    }

    /// The current level.
    pub fn level(&self) -> DegradationLevel {
        DegradationLevel::at(self.level.load(Relaxed) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn reading(available: u64, untouched: u64) -> MemoryReading {
        let (available, untouched) = (available * MIB, untouched * MIB);
        MemoryReading { available, untouched, above_plan: 64 * MIB, ..MemoryReading::default() }
    }

    #[test]
    fn a_plan_that_fits_is_calm_however_much_of_it_is_touched() {
        let mut governor = Governor::default();
        for (available, untouched) in [(1000, 1000), (300, 300), (64, 10), (40, 0)] {
            assert_eq!(
                governor.observe(&reading(available, untouched)),
                DegradationLevel::Calm,
                "{available} MiB, {untouched} untouched"
            );
        }
    }

    #[test]
    fn the_level_rises_by_one_for_each_reading_and_no_further_than_needed() {
        let mut governor = Governor::default();
        let squeeze = reading(30, 100); // below a half, not below a quarter
        let levels: Vec<DegradationLevel> = (0..4).map(|_| governor.observe(&squeeze)).collect();
        assert_eq!(
            levels,
            [
                DegradationLevel::EvictPrefix,
                DegradationLevel::SmallChunks,
                DegradationLevel::SmallChunks,
                DegradationLevel::SmallChunks
            ]
        );
        let worse = reading(1, 100);
        let levels: Vec<DegradationLevel> = (0..4).map(|_| governor.observe(&worse)).collect();
        assert_eq!(
            levels,
            [
                DegradationLevel::SpeculationOff,
                DegradationLevel::StopAdmitting,
                DegradationLevel::Preempt,
                DegradationLevel::Fail
            ]
        );
    }

    #[test]
    fn the_level_falls_slowly_and_does_not_flutter() {
        let mut governor = Governor::default();
        for _ in DegradationLevel::ALL {
            governor.observe(&reading(0, 100));
        }
        assert_eq!(governor.level, DegradationLevel::Fail);
        let calm = reading(1000, 100);
        let steps = (1..100).find(|_| governor.observe(&calm) == DegradationLevel::Calm).unwrap();
        assert_eq!(steps, 6 * CALM_READINGS);
        // Just above a threshold the level does not change, however long that lasts.
        let mut governor = Governor::default();
        assert_eq!(governor.observe(&reading(99, 100)), DegradationLevel::EvictPrefix);
        assert!((0..100).all(|_| governor.observe(&reading(103, 100)) == DegradationLevel::EvictPrefix));
    }

    /// A process of `planned` MiB under a limit that lies `above` MiB higher. Others take `others` MiB, and the process has touched
    /// `touched` MiB.
    fn inside(planned: f64, above: f64, touched: f64, others: f64) -> MemoryReading {
        let bytes = |mib: f64| (mib.max(0.0) * MIB as f64) as u64;
        let untouched = planned - touched;
        MemoryReading {
            available: bytes(untouched + above - others),
            untouched: bytes(untouched),
            above_plan: bytes(above),
            ..MemoryReading::default()
        }
    }

    #[test]
    fn however_close_the_limit_lies_around_the_plan_it_comes_back_to_calm() {
        // Seen: 3 % above a plan in a cgroup, and budgets of 420 and 480 MiB around plans of 418.9 and 473.6.
        for (planned, above) in [(398.0, 12.0), (418.9, 1.1), (473.6, 6.4), (476.0, 4.0), (400.0, 0.0), (100.0, 0.01)] {
            for touched in [0.1 * planned, 0.4 * planned, 0.99 * planned, planned] {
                let mut governor = Governor::default();
                let alone = inside(planned, above, touched, 0.0);
                assert_eq!(governor.observe(&alone), DegradationLevel::Calm, "{planned} + {above}, {touched} touched");
                let squeezed = inside(planned, above, touched, planned);
                let stood = (0..4).fold(DegradationLevel::Calm, |_, _| governor.observe(&squeezed));
                assert!(
                    stood > DegradationLevel::Calm || planned - touched + above < 0.1,
                    "{planned} + {above}, {touched} touched"
                );
                let back = (0..100).any(|_| governor.observe(&alone) == DegradationLevel::Calm);
                assert!(back, "{planned} + {above}, {touched} touched: from {stood:?} to {:?}", governor.level);
            }
        }
    }

    #[test]
    fn one_bad_reading_starts_the_calm_anew() {
        let mut governor = Governor::default();
        governor.observe(&reading(99, 100));
        for _ in 0..10 {
            for _ in 1..CALM_READINGS {
                governor.observe(&reading(1000, 100));
            }
            assert_eq!(governor.observe(&reading(102, 100)), DegradationLevel::EvictPrefix);
        }
    }

    #[test]
    fn stalls_count_where_room_is_short_and_a_neighbours_do_not() {
        let stalled = |some, full, room: u64| {
            let stalls =
                MemoryReading { some_avg10: some, full_avg10: full, stall_room: room * MIB, ..reading(1000, 100) };
            [stalls.calls_for(false), stalls.calls_for(true)]
        };
        assert_eq!(stalled(5.0, 0.0, 150), [DegradationLevel::Calm; 2]);
        assert_eq!(stalled(15.0, 0.0, 150), [DegradationLevel::Calm, DegradationLevel::EvictPrefix]);
        assert_eq!(stalled(25.0, 0.0, 150)[0], DegradationLevel::EvictPrefix);
        assert_eq!(stalled(90.0, 21.0, 150)[0], DegradationLevel::StopAdmitting);
        assert_eq!(stalled(100.0, 90.0, 150)[0], DegradationLevel::Fail);
        // Twice as much is free on the machine as this process can take: the stalls have another cause.
        assert_eq!(stalled(100.0, 90.0, 200), [DegradationLevel::Calm; 2]);
        // Continued stalls do not hold a level once enough memory is free.
        let mut governor = Governor::default();
        governor.observe(&reading(60, 100));
        let busy = MemoryReading { some_avg10: 99.0, full_avg10: 99.0, stall_room: 9000 * MIB, ..reading(1000, 100) };
        assert!((0..CALM_READINGS).any(|_| governor.observe(&busy) == DegradationLevel::Calm));
    }
}
