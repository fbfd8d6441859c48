//! Watching from outside while the crowd is there: the process, its ledger and its limits every second, health four
//! times a second.

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::limits::Limits;
use super::memory::{Ledger, Page};
use crate::bench::client::Target;
use crate::bench::load::percentile;
use crate::bench::process::Sample;

const LOOK_EVERY: Duration = Duration::from_secs(1);
const PROBE_EVERY: Duration = Duration::from_millis(250);
const PROBE_WITHIN: Duration = Duration::from_secs(5);

/// One look at the process.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Look {
    /// Seconds since the start.
    pub at_s: f64,
    /// What was seen.
    pub sample: Sample,
    /// What the process says itself, if it was there to say it.
    pub ledger: Option<Ledger>,
    /// Bytes it could still take before the tightest of its limits.
    pub free: Option<u64>,
}

/// Everything that was seen.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Watched {
    /// The process over time; empty when it was not watched.
    pub looks: Vec<Look>,
    /// Whether the process went away.
    pub gone: bool,
    /// Health probes that were answered with 200.
    pub healthy: u64,
    /// Health probes that were not.
    pub unhealthy: u64,
    /// The slowest hundredth of probes, in milliseconds.
    pub health_p99_ms: f64,
}

/// A running watch.
pub struct Watch {
    stop: watch::Sender<bool>,
    looks: JoinHandle<(Vec<Look>, bool)>,
    probes: JoinHandle<(u64, u64, Vec<f64>)>,
}

impl Watch {
    /// Begins to watch.
    pub fn start(target: &Target, pid: Option<u32>, limits: Option<Limits>) -> Self {
        let (stop, stopped) = watch::channel(false);
        let looks = tokio::spawn(look(target.clone(), pid, limits, stopped.clone()));
        let probes = tokio::spawn(probe(target.clone(), stopped));
        Self { stop, looks, probes }
    }

    /// Ends the watch.
    pub async fn stop(self) -> Watched {
        self.stop.send_replace(true);
        let (looks, gone) = self.looks.await.unwrap_or_default();
        let (healthy, unhealthy, mut times) = self.probes.await.unwrap_or_default();
        Watched { looks, gone, healthy, unhealthy, health_p99_ms: percentile(&mut times, 99) }
    }
}

async fn look(
    target: Target,
    pid: Option<u32>,
    limits: Option<Limits>,
    stopped: watch::Receiver<bool>,
) -> (Vec<Look>, bool) {
    let Some(pid) = pid else {
        return (Vec::new(), false);
    };
    let start = Instant::now();
    let mut looks = Vec::new();
    while !*stopped.borrow() {
        let Some(sample) = Sample::of(pid) else {
            return (looks, true);
        };
        let (at_s, free) = (start.elapsed().as_secs_f64(), limits.as_ref().map(Limits::free));
        // A server that is too busy for its page is seen by the probes; here it only leaves a gap.
        let page = timeout(LOOK_EVERY, Page::read(&target)).await;
        let ledger = page.ok().and_then(Result::ok).and_then(|page| page.ledger());
        looks.push(Look { at_s, sample, ledger, free });
        sleep(LOOK_EVERY).await;
    }
    (looks, false)
}

async fn probe(target: Target, stopped: watch::Receiver<bool>) -> (u64, u64, Vec<f64>) {
    let (mut healthy, mut unhealthy, mut times) = (0, 0, Vec::new());
    while !*stopped.borrow() {
        let start = Instant::now();
        let answer = timeout(PROBE_WITHIN, target.get("/health", PROBE_WITHIN)).await;
        if answer.is_ok_and(|answer| answer.is_ok_and(|answer| answer.status() == 200)) {
            healthy += 1;
        } else {
            unhealthy += 1;
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
        sleep(PROBE_EVERY).await;
    }
    (healthy, unhealthy, times)
}

/// By how much the fitted line through `of` rises over the second half of all looks; none of fewer than 20.
pub fn growth(looks: &[Look], of: fn(&Sample) -> u64) -> Option<f64> {
    if looks.len() < 20 {
        return None;
    }
    let late = &looks[looks.len() / 2..];
    let n = late.len() as f64;
    let mean_t = late.iter().map(|l| l.at_s).sum::<f64>() / n;
    let mean_v = late.iter().map(|l| of(&l.sample) as f64).sum::<f64>() / n;
    let spread: f64 = late.iter().map(|l| (l.at_s - mean_t).powi(2)).sum();
    let together: f64 = late.iter().map(|l| (l.at_s - mean_t) * (of(&l.sample) as f64 - mean_v)).sum();
    let span = late[late.len() - 1].at_s - late[0].at_s;
    (spread > 0.0).then(|| together / spread * span)
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
        };
        // Warming up, then flat: no growth. Then the same with a leak of 10 a second.
        let flat: Vec<Look> = (0..100).map(|i| at(i, if i < 50 { u64::from(i) * 100 } else { 5000 })).collect();
        assert!(growth(&flat, |s| s.owned).unwrap().abs() < 1e-6);
        let leak: Vec<Look> = (0..100).map(|i| at(i, 1000 + u64::from(i) * 10)).collect();
        assert!((growth(&leak, |s| s.owned).unwrap() - 490.0).abs() < 1e-6);
        assert!(growth(&flat[..19], |s| s.owned).is_none());
    }
}
