//! The governor: when others take what was planned here, it gives way step by step, and climbs back.
//!
//! A ladder of rungs, from the cheapest to the dearest, with hysteresis: one rung up a reading, one rung down after several calm
//! ones. Readings come from a thread of their own, every half second; the engine thread asks which rung it stands on and
//! acts. Pure arithmetic over readings, so that tests inject them. What must not be in here: pages, sequences, clients.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use plimsoll_memory::heap;
use plimsoll_memory::host::{HostLimits, HostNow, Root};

use crate::handle::Shared;
use crate::metrics::Metrics;
use crate::report::LedgerReport;

/// Between two readings.
const INTERVAL: Duration = Duration::from_millis(500);
/// Calm readings before one rung is given up: three seconds.
const CALM_READINGS: u32 = 6;
/// The least room that a healthy machine keeps free for a process whose plan is all touched. Less than 3 % of any plan worth
/// the name: a limit that close around the plan is nothing to give way to.
const RESERVE_BYTES: u64 = 8 << 20;
/// Room beyond a rung's threshold that is asked for before the rung is given up; a quarter of the threshold where that is
/// less. More could not be had where the limit lies just above the plan, and the ladder would never be climbed down.
const MARGIN_BYTES: u64 = 4 << 20;

/// The heap may keep this much of what was freed before it is told to hand it back.
const KEPT_BYTES: u64 = 1 << 20;
/// Readings between two such orders: five seconds.
const TRIM_READINGS: u32 = 10;

/// How far up the ladder. The order is the order of cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rung {
    /// Nothing is wrong.
    #[default]
    Calm,
    /// Cached prefixes that nobody uses are forgotten and their pages given back to the system.
    EvictPrefix,
    /// Prefill chunks are small.
    SmallChunks,
    /// Nobody drafts: steps are small, and draft passes take no time.
    SpeculationOff,
    /// New requests are told 503.
    StopAdmitting,
    /// The newest running request goes back to the queue, one a reading.
    Preempt,
    /// The newest request fails, one a reading; the oldest never does.
    Fail,
}

impl Rung {
    /// Every rung but the first, from the cheapest to the dearest.
    pub const LADDER: [Rung; 6] =
        [Rung::EvictPrefix, Rung::SmallChunks, Rung::SpeculationOff, Rung::StopAdmitting, Rung::Preempt, Rung::Fail];

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Rung::Calm => "calm",
            Rung::EvictPrefix => "evict_prefix",
            Rung::SmallChunks => "small_chunks",
            Rung::SpeculationOff => "speculation_off",
            Rung::StopAdmitting => "stop_admitting",
            Rung::Preempt => "preempt",
            Rung::Fail => "fail",
        }
    }

    fn at(level: usize) -> Rung {
        if level == 0 { Rung::Calm } else { Self::LADDER[level.min(Self::LADDER.len()) - 1] }
    }
}

/// What the machine looks like at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Bytes this process could still take before a limit is crossed.
    pub available: u64,
    /// Bytes of the plan that it has not touched yet.
    pub untouched: u64,
    /// Percentage of the last ten seconds in which some task waited for memory.
    pub some_avg10: f32,
    /// Percentage in which every task did.
    pub full_avg10: f32,
}

impl Reading {
    /// The rung that this reading alone calls for. Who wants to come down asks more `strictly`.
    fn calls_for(&self, strictly: bool) -> Rung {
        // What is free must cover what is still to come; each halving of that is one rung.
        let due = self.untouched.max(RESERVE_BYTES);
        let threshold = |level: usize| {
            let bytes = due >> level;
            if strictly { bytes.saturating_add(MARGIN_BYTES.min(bytes / 4)) } else { bytes }
        };
        let by_room = (0..Rung::LADDER.len()).filter(|level| self.available < threshold(*level)).count();
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
        Rung::at(by_room.max(by_stalls))
    }
}

/// Where the engine stands on the ladder.
#[derive(Debug, Default)]
pub struct Governor {
    rung: Rung,
    calm: u32,
}

impl Governor {
    /// The rung it stands on.
    pub fn rung(&self) -> Rung {
        self.rung
    }

    /// Takes one reading in. Returns the rung to stand on until the next.
    pub fn observe(&mut self, reading: &Reading) -> Rung {
        let level = self.rung as usize;
        if reading.calls_for(false) > self.rung {
            (self.rung, self.calm) = (Rung::at(level + 1), 0);
        } else if level > 0 && reading.calls_for(true) < self.rung {
            self.calm += 1;
            if self.calm >= CALM_READINGS {
                (self.rung, self.calm) = (Rung::at(level - 1), 0);
            }
        } else {
            self.calm = 0;
        }
        self.rung
    }
}

/// The last reading, from the thread that takes them to the thread that acts.
#[derive(Debug, Default)]
pub struct Gauge {
    last: Mutex<Reading>,
    taken: AtomicU64,
    rung: AtomicU64,
}

impl Gauge {
    /// Enters a reading.
    pub fn set(&self, reading: Reading) {
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = reading;
        self.taken.fetch_add(1, Relaxed);
    }

    /// The last reading if it is newer than the `seen`-th, and notes that it was seen.
    pub fn newer(&self, seen: &mut u64) -> Option<Reading> {
        let taken = self.taken.load(Relaxed);
        (taken != std::mem::replace(seen, taken))
            .then(|| *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Notes the rung that the engine now stands on.
    pub fn stand(&self, rung: Rung, metrics: &Metrics) {
        let before = self.rung.swap(rung as u64, Relaxed);
        if rung as u64 > before {
            metrics.rungs[rung as usize - 1].inc();
            tracing::warn!(rung = rung.name(), "memory is short: giving way");
        } else if before > rung as u64 {
            tracing::info!(rung = rung.name(), "memory is back");
        }
    }

    /// The rung that the engine stands on.
    pub fn rung(&self) -> Rung {
        Rung::at(self.rung.load(Relaxed) as usize)
    }
}

/// Starts the thread that takes readings, trims the heap when asked and watches the engine's progress, until the engine has
/// stopped or nobody holds it any more. About every `log_every` steps it logs the ledger; never for 0.
///
/// Limits are read anew every time: a cgroup's may be moved while the server runs. What the ledger cannot account for is freed
/// memory that the heap keeps; it is handed back when it becomes much.
pub(crate) fn watch(
    shared: &Arc<Shared>,
    epoch: Instant,
    root: Root,
    mut limits: HostLimits,
    log_every: u64,
) -> std::io::Result<()> {
    let shared = Arc::downgrade(shared);
    let body = move || {
        let (mut since_trim, mut logged, mut looked) = (0, 0, false);
        while let Some(shared) = Weak::upgrade(&shared) {
            if shared.stopped.load(Relaxed) {
                break;
            }
            shared.watchdog.look(epoch.elapsed(), &shared.status, &shared.metrics);
            shared.observe_accounts();
            // The first time they have just been read.
            if looked {
                limits = limits.again(&root);
            }
            looked = true;
            let now = HostNow::read(&root, &limits);
            shared.gauge.set(Reading {
                available: now.available,
                untouched: shared.plan.total().saturating_sub(now.own.leak_gauge()),
                some_avg10: now.psi.map_or(0.0, |psi| psi.some_avg10),
                full_avg10: now.psi.map_or(0.0, |psi| psi.full_avg10),
            });
            since_trim += 1;
            let kept = now.own.leak_gauge().saturating_sub(shared.ledger.committed_total());
            let much = kept > KEPT_BYTES && since_trim >= TRIM_READINGS;
            if shared.trim.swap(false, Relaxed) || much {
                heap::trim();
                since_trim = 0;
            }
            let steps = shared.status.steps.load(Relaxed);
            if log_every > 0 && steps - logged >= log_every {
                logged = steps;
                tracing::info!("{}", LedgerReport::of(&shared).line());
            }
            drop(shared);
            std::thread::sleep(INTERVAL);
        }
    };
    std::thread::Builder::new().name("plimsoll-watch".into()).spawn(body).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn reading(available: u64, untouched: u64) -> Reading {
        Reading { available: available * MIB, untouched: untouched * MIB, ..Reading::default() }
    }

    #[test]
    fn a_plan_that_fits_is_calm_however_much_of_it_is_touched() {
        let mut governor = Governor::default();
        for (available, untouched) in [(1000, 1000), (300, 300), (64, 10), (40, 0)] {
            assert_eq!(
                governor.observe(&reading(available, untouched)),
                Rung::Calm,
                "{available} MiB, {untouched} untouched"
            );
        }
    }

    #[test]
    fn it_climbs_one_rung_a_reading_and_no_further_than_is_called_for() {
        let mut governor = Governor::default();
        let squeeze = reading(30, 100); // below a half, not below a quarter
        let rungs: Vec<Rung> = (0..4).map(|_| governor.observe(&squeeze)).collect();
        assert_eq!(rungs, [Rung::EvictPrefix, Rung::SmallChunks, Rung::SmallChunks, Rung::SmallChunks]);
        let worse = reading(1, 100);
        let rungs: Vec<Rung> = (0..4).map(|_| governor.observe(&worse)).collect();
        assert_eq!(rungs, [Rung::SpeculationOff, Rung::StopAdmitting, Rung::Preempt, Rung::Fail]);
    }

    #[test]
    fn it_climbs_back_slowly_and_does_not_flutter() {
        let mut governor = Governor::default();
        for _ in Rung::LADDER {
            governor.observe(&reading(0, 100));
        }
        assert_eq!(governor.rung, Rung::Fail);
        let calm = reading(1000, 100);
        let steps = (1..100).find(|_| governor.observe(&calm) == Rung::Calm).unwrap();
        assert_eq!(steps, 6 * CALM_READINGS);
        // Just above a threshold it stays where it is, however long.
        let mut governor = Governor::default();
        assert_eq!(governor.observe(&reading(99, 100)), Rung::EvictPrefix);
        assert!((0..100).all(|_| governor.observe(&reading(103, 100)) == Rung::EvictPrefix));
    }

    #[test]
    fn in_a_limit_three_percent_above_the_plan_it_comes_back_to_calm() {
        // Seen in a cgroup: 398 MiB planned, 233 of them untouched, 12 MiB of limit beyond the plan.
        let mut governor = Governor::default();
        for _ in 0..4 {
            governor.observe(&reading(20, 233));
        }
        assert_eq!(governor.rung, Rung::StopAdmitting);
        assert!((0..100).any(|_| governor.observe(&reading(244, 233)) == Rung::Calm), "{:?}", governor.rung);
        // All of it touched: what is left is the 3 %, and that is no shortage.
        assert_eq!(governor.observe(&reading(11, 0)), Rung::Calm);
    }

    #[test]
    fn one_bad_reading_starts_the_calm_anew() {
        let mut governor = Governor::default();
        governor.observe(&reading(99, 100));
        for _ in 0..10 {
            for _ in 1..CALM_READINGS {
                governor.observe(&reading(1000, 100));
            }
            assert_eq!(governor.observe(&reading(102, 100)), Rung::EvictPrefix);
        }
    }

    #[test]
    fn stalls_count_even_when_there_seems_to_be_room() {
        let stalled = |some, full| Reading { some_avg10: some, full_avg10: full, ..reading(1000, 0) };
        assert_eq!(stalled(5.0, 0.0).calls_for(false), Rung::Calm);
        assert_eq!(stalled(25.0, 0.0).calls_for(false), Rung::EvictPrefix);
        assert_eq!(stalled(90.0, 21.0).calls_for(false), Rung::StopAdmitting);
        assert_eq!(stalled(100.0, 90.0).calls_for(false), Rung::Fail);
    }
}
