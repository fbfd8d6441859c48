//! Watching from outside while the crowd is there: the process, its ledger and its limits every second, health four
//! times a second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::faults::FaultLog;
use super::limits::Limits;
use super::memory::{Ledger, Page};
use crate::client::Target;
use crate::process::Sample;
use plimsoll_engine::simulate::percentile;

const LOOK_EVERY: Duration = Duration::from_secs(1);
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// One look at the process.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Look {
    /// Seconds since the start.
    pub at_s: f64,
    /// Memory, threads and descriptors of the process.
    pub sample: Sample,
    /// The server's own ledger; none if it did not answer in time.
    pub ledger: Option<Ledger>,
    /// Bytes that the process can still take below its tightest limit.
    pub free: Option<u64>,
    /// Whether no fault was active or just over, and the degradation level was 0.
    pub calm: bool,
}

/// All observations of the watch.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Watched {
    /// Samples of the process over time; empty when it was not watched.
    #[serde(skip)]
    pub looks: Vec<Look>,
    /// Whether the process went away.
    pub gone: bool,
    /// Health probes that were answered with 200.
    pub healthy: u64,
    /// Health probes that got another answer or none in time.
    pub unhealthy: u64,
    /// Health probes during which the soak itself kept clients from the server.
    pub hindered: u64,
    /// The 99th percentile of the probe times in milliseconds.
    pub health_p99_ms: f64,
}

/// A running watch.
pub struct Watch {
    stop: watch::Sender<bool>,
    looks: JoinHandle<(Vec<Look>, bool)>,
    probes: JoinHandle<(Watched, Vec<f64>)>,
}

impl Watch {
    /// Starts the watch. Health must answer within `at_once`.
    pub fn start(
        target: &Target,
        pid: Option<u32>,
        limits: Option<Limits>,
        fault_log: &Arc<FaultLog>,
        at_once: Duration,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let looks = tokio::spawn(look(target.clone(), pid, limits, (stopped.clone(), Arc::clone(fault_log))));
        let probes = tokio::spawn(probe(target.clone(), (stopped, Arc::clone(fault_log)), at_once));
        Self { stop, looks, probes }
    }

    /// Ends the watch.
    pub async fn stop(self) -> Watched {
        self.stop.send_replace(true);
        let (looks, gone) = self.looks.await.unwrap_or_default();
        let (probed, mut times) = self.probes.await.unwrap_or_default();
        Watched { looks, gone, health_p99_ms: percentile(&mut times, 99), ..probed }
    }
}

async fn look(
    target: Target,
    pid: Option<u32>,
    limits: Option<Limits>,
    (stopped, fault_log): (watch::Receiver<bool>, Arc<FaultLog>),
) -> (Vec<Look>, bool) {
    let Some(pid) = pid else {
        return (Vec::new(), false);
    };
    let mut looks = Vec::new();
    while !*stopped.borrow() {
        let Some(sample) = Sample::of(pid) else {
            return (looks, true);
        };
        let (at_s, free) = (fault_log.now_s(), limits.as_ref().map(Limits::free));
        // The probes report a server that is too busy for its memory page. Here the ledger is missing from one sample.
        let page = timeout(LOOK_EVERY, Page::read(&target)).await;
        let ledger = page.ok().and_then(Result::ok).and_then(|page| page.ledger());
        let calm = !fault_log.troubled() && ledger.is_none_or(|ledger| ledger.level == 0);
        looks.push(Look { at_s, sample, ledger, free, calm });
        sleep(LOOK_EVERY).await;
    }
    (looks, false)
}

async fn probe(
    target: Target,
    (stopped, fault_log): (watch::Receiver<bool>, Arc<FaultLog>),
    at_once: Duration,
) -> (Watched, Vec<f64>) {
    let (mut probed, mut times) = (Watched::default(), Vec::new());
    while !*stopped.borrow() {
        let start = Instant::now();
        let answer = timeout(at_once, target.get("/health", at_once)).await;
        let good = answer.is_ok_and(|answer| answer.is_ok_and(|answer| answer.status() == 200));
        // A probe that the soak itself held up is no evidence about the server, fast or slow.
        let counted = match fault_log.hindered(start) {
            true => &mut probed.hindered,
            false => {
                times.push(start.elapsed().as_secs_f64() * 1e3);
                if good { &mut probed.healthy } else { &mut probed.unhealthy }
            }
        };
        *counted += 1;
        sleep(PROBE_EVERY).await;
    }
    (probed, times)
}

/// With fewer samples than this, growth cannot be told.
const LOOKS_MIN: usize = 20;

/// A linear fit through the samples.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// Rise of the line from its beginning to its end.
    pub rise: f64,
    /// Rise or fall that chance alone explains.
    pub chance: f64,
}

/// Three standard errors, with sixteen samples in a row counted as one: requests take longer than a second.
const CHANCE: f64 = 12.0;

/// Fits a line through `of` over the second half of all samples; none if there are too few. Only calm samples count: a fault takes
/// memory and gives it back, which is no growth.
pub fn growth(looks: &[Look], of: impl Fn(&Look) -> Option<f64>) -> Option<Growth> {
    let half = looks.get(looks.len() / 2)?.at_s;
    let calm = looks.iter().filter(|look| look.calm && look.at_s >= half);
    let late: Vec<(f64, f64)> = calm.filter_map(|look| Some((look.at_s, of(look)?))).collect();
    if late.len() < LOOKS_MIN / 2 || looks.len() < LOOKS_MIN {
        return None;
    }
    let n = late.len() as f64;
    let mean_t = late.iter().map(|(t, _)| t).sum::<f64>() / n;
    let mean_v = late.iter().map(|(_, v)| v).sum::<f64>() / n;
    let spread: f64 = late.iter().map(|(t, _)| (t - mean_t).powi(2)).sum();
    let together: f64 = late.iter().map(|(t, v)| (t - mean_t) * (v - mean_v)).sum();
    let span = late[late.len() - 1].0 - late[0].0;
    let slope = (spread > 0.0).then(|| together / spread)?;
    let left: f64 = late.iter().map(|(t, v)| (v - mean_v - slope * (t - mean_t)).powi(2)).sum();
    Some(Growth { rise: slope * span, chance: CHANCE * (left / n / spread).sqrt() * span })
}

/// Returns a function for the process's owned bytes without the KV cache and the states. Pages that are allocated on demand may grow up
/// to their plan, which another check covers; no other memory may grow. If any sample has a ledger, samples without one are left out.
pub fn beside_pages(looks: &[Look]) -> impl Fn(&Look) -> Option<f64> {
    let told = looks.iter().any(|look| look.ledger.is_some());
    move |look| match look.ledger {
        Some(ledger) => Some(look.sample.owned as f64 - ledger.pages as f64),
        None => (!told).then_some(look.sample.owned as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_that_of_the_second_half() {
        let at = |i: u32, owned: u64| Look {
            at_s: f64::from(i),
            sample: Sample { owned, ..Sample::default() },
            ledger: None,
            free: None,
            calm: true,
        };
        let owned = |look: &Look| Some(look.sample.owned as f64);
        // Growth during warm-up, then flat: no growth. Then a leak of 10 a second all the time.
        let flat: Vec<Look> = (0..100).map(|i| at(i, if i < 50 { u64::from(i) * 100 } else { 5000 })).collect();
        let rise = |looks: &[Look]| growth(looks, owned).unwrap().rise;
        assert!(rise(&flat).abs() < 1e-6);
        let leak: Vec<Look> = (0..100).map(|i| at(i, 1000 + u64::from(i) * 10)).collect();
        assert!((rise(&leak) - 490.0).abs() < 1e-6 && growth(&leak, owned).unwrap().chance < 1e-3);
        assert!(growth(&flat[..19], owned).is_none());
        // A fault at the end is no growth. With faults all the time, growth cannot be told.
        let troubled = |from: usize| {
            let shaken = |(i, look): (usize, &Look)| match i >= from {
                true => Look { sample: Sample { owned: 9_000_000, ..Sample::default() }, calm: false, ..*look },
                false => *look,
            };
            flat.iter().enumerate().map(shaken).collect::<Vec<_>>()
        };
        assert!(rise(&troubled(80)).abs() < 1e-6);
        assert!(growth(&troubled(0), owned).is_none());
        assert!(growth(&leak, |_| None).is_none());
        // A value that goes up and down does not grow beyond chance; with a slope added, it does.
        let shaken =
            |each: u64| (0..600).map(|i| at(i, u64::from(i) * each + u64::from(i * 37 % 100))).collect::<Vec<_>>();
        let beyond_chance = |looks: &[Look]| growth(looks, owned).is_some_and(|grown| grown.rise > grown.chance);
        assert!(!beyond_chance(&shaken(0)) && beyond_chance(&shaken(1)));
    }

    #[test]
    fn pages_that_come_as_they_are_needed_are_no_growth_and_a_leak_beside_them_is() {
        let look = |i: u32, leak: u64, told: bool| {
            let pages = 1000 * u64::from(i);
            let ledger = Ledger {
                committed: 500 + pages as i64,
                pages: pages as i64,
                unaccounted: 0,
                gave_way: false,
                level: 0,
                lent: Default::default(),
            };
            Look {
                at_s: f64::from(i),
                sample: Sample { owned: 500 + pages + leak * u64::from(i), ..Sample::default() },
                ledger: told.then_some(ledger),
                free: None,
                calm: true,
            }
        };
        let rise = |leak: u64, told: &dyn Fn(u32) -> bool| {
            let looks: Vec<Look> = (0..100).map(|i| look(i, leak, told(i))).collect();
            growth(&looks, beside_pages(&looks)).unwrap().rise
        };
        assert!(rise(0, &|_| true).abs() < 1e-6 && (rise(10, &|_| true) - 490.0).abs() < 1e-6);
        assert!(rise(0, &|i| i % 3 != 0).abs() < 1e-6, "a gap is no growth");
        assert!((rise(0, &|_| false) - 49_000.0).abs() < 1e-6, "without an account all there is counts");
    }
}
