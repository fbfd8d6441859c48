//! The server's memory page, and the wait until all pools are free again.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;
use tokio::time::sleep;

use crate::client::Target;
use crate::process::Sample;

/// Threads and descriptors may differ by this many between two idle moments (worker threads come and go).
pub const IDLE_SLACK: u64 = 6;

/// The server's own account at one moment. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ledger {
    /// Bytes that all components hold.
    pub committed: i64,
    /// Bytes of it for the KV cache and the states: their whole plan, or the pages in use if pages are allocated on demand.
    pub pages: i64,
    /// Bytes that the process holds beyond `committed`; negative when components hold less than they report.
    pub unaccounted: i64,
    /// Whether the governor has ever raised its level. Memory that it released is still counted in its component's row.
    pub gave_way: bool,
    /// The degradation level; 0 is calm.
    pub level: u64,
    /// Units in use in each pool, without cached ones, in the order of [`POOLS`].
    pub lent: [u64; POOLS.len()],
}

/// Pools: name, path of the amount in use on the memory page, and path of the part that is cached on purpose.
pub const POOLS: [(&str, &str, Option<&str>); 7] = [
    ("requests", "/pools/requests/in_system", None),
    ("pages", "/pools/kv_pages/used", Some("/pools/kv_pages/cached")),
    ("state slots", "/pools/state_slots/used", Some("/pools/state_slots/cached")),
    ("encoder outputs", "/pools/encoder_outputs/used", Some("/pools/encoder_outputs/cached")),
    ("bytes of media", "/pools/media_bytes/used", None),
    ("bytes of requests", "/pools/host_bytes/used", None),
    ("bytes of bodies", "/pools/http_bytes/used", None),
];

/// The degradation levels.
pub const LEVELS: [&str; 7] =
    [CALM, "evict_prefix", "small_chunks", "speculation_off", "stop_admitting", "preempt", "fail"];

impl Ledger {
    /// Returns the error of the components' sum as a share of the process's memory.
    pub fn error(&self) -> f64 {
        let wrong = if self.gave_way { self.unaccounted.max(0) } else { self.unaccounted };
        wrong.unsigned_abs() as f64 / (self.committed + self.unaccounted).max(1) as f64
    }
}

/// The memory page as JSON, with a sample of the process.
#[derive(Clone, Debug, Serialize)]
pub struct Page {
    /// `/v1/memory`; null where the server has none.
    pub memory: Value,
    /// The process, when it is watched.
    pub sample: Option<Sample>,
}

/// The degradation level when nothing is wrong.
const CALM: &str = "calm";

impl Page {
    /// Reads the page. A server without one is no error.
    pub async fn read(target: &Target) -> Result<Self> {
        let answer = target.get("/v1/memory", Duration::from_secs(10)).await?;
        let memory = if answer.status() == 200 { answer.json().await? } else { Value::Null };
        Ok(Self { memory, sample: None })
    }

    fn number(&self, path: &str) -> Option<i64> {
        self.memory.pointer(path).and_then(Value::as_i64)
    }

    /// Returns the units in use in each pool, without cached ones.
    fn pools(&self) -> [u64; POOLS.len()] {
        POOLS.map(|(_, used, cached)| {
            let kept = cached.and_then(|path| self.number(path)).unwrap_or(0);
            self.number(used).map_or(0, |used| (used - kept).max(0).unsigned_abs())
        })
    }

    /// Describes each pool that is in use, and a degradation level that is not calm.
    pub fn lent(&self) -> Vec<String> {
        let out = POOLS.iter().zip(self.pools()).filter(|(_, lent)| *lent > 0);
        let mut lent: Vec<String> = out.map(|((name, ..), lent)| format!("{lent} {name} are lent out")).collect();
        if let Some(level) = self.level().filter(|level| *level != CALM) {
            lent.push(format!("the degradation level is {level}"));
        }
        lent
    }

    /// Describes the components whose peak exceeds their plan.
    pub fn over_plan(&self) -> Vec<String> {
        let rows = self.memory.pointer("/components").and_then(Value::as_array);
        let over = |row: &Value| {
            let number = |key: &str| row.get(key).and_then(Value::as_u64);
            let (planned, peak) = (number("planned_bytes")?, number("peak_bytes")?);
            (peak > planned).then(|| format!("{}: peak {peak} of {planned} planned", row["component"]))
        };
        rows.into_iter().flatten().filter_map(over).collect()
    }

    /// Returns the bytes that a component holds; 0 without a row.
    fn held(&self, component: &str) -> i64 {
        let rows = self.memory.pointer("/components").and_then(Value::as_array);
        let row = rows.into_iter().flatten().find(|row| row["component"] == component);
        row.and_then(|row| row["committed_bytes"].as_i64()).unwrap_or(0)
    }

    /// Reads the ledger; none if the page lacks its sums.
    pub fn ledger(&self) -> Option<Ledger> {
        let (committed, unaccounted) = self.number("/committed_bytes").zip(self.unaccounted())?;
        let pages = self.held("kv_pages") + self.held("state_slots");
        let level = self.level().and_then(|level| LEVELS.iter().position(|known| *known == level)).unwrap_or(0) as u64;
        let gave_way = self.entries().is_some_and(|entries| entries > 0);
        Some(Ledger { committed, pages, unaccounted, gave_way, level, lent: self.pools() })
    }

    /// Bytes that all components may take.
    pub fn planned(&self) -> Option<u64> {
        self.memory.pointer("/planned_bytes").and_then(Value::as_u64)
    }

    /// The degradation level.
    pub fn level(&self) -> Option<&str> {
        self.memory.pointer("/degradation/level").and_then(Value::as_str)
    }

    /// How often the governor has raised its level since the server started, over all levels.
    pub fn entries(&self) -> Option<u64> {
        let entered = self.memory.pointer("/degradation/entered").and_then(Value::as_array)?;
        Some(entered.iter().filter_map(|level| level.get("times")?.as_u64()).sum())
    }

    /// Attempts to allocate device memory after the server was ready.
    pub fn late_allocations(&self) -> Option<i64> {
        self.number("/device_allocations/after_ready")
    }

    /// Process memory that no component accounts for.
    pub fn unaccounted(&self) -> Option<i64> {
        self.number("/unaccounted_bytes")
    }
}

/// Waits until all pools are free and the process is as it was, or until time is up. Returns the last page read.
pub async fn wait_for_idle(
    target: &Target,
    pid: Option<u32>,
    before: Option<Sample>,
    within: Duration,
) -> Result<Page, String> {
    let until = Instant::now() + within;
    loop {
        let page = Page::read(target).await.map(|page| Page { sample: pid.and_then(Sample::of), ..page });
        let idle = page.as_ref().is_ok_and(|page| page.lent().is_empty() && settled(before, page.sample));
        if idle || Instant::now() >= until {
            return page.map_err(|error| format!("{error:#}"));
        }
        sleep(Duration::from_millis(500)).await;
    }
}

/// Whether threads and descriptors are back to about what they were.
pub fn settled(before: Option<Sample>, now: Option<Sample>) -> bool {
    let Some((before, now)) = before.zip(now) else {
        return true;
    };
    now.threads <= before.threads + IDLE_SLACK && now.fds <= before.fds + IDLE_SLACK
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_lent_or_over_plan_is_named() {
        let page = |memory| Page { memory, sample: None };
        let full = json!({
            "pools": {
                "kv_pages": {"used": 5, "total": 9, "cached": 5},
                "requests": {"running": 0, "waiting": 0, "in_system": 0},
                "host_bytes": {"used": 0, "total": 1}, "http_bytes": {"used": 0, "total": 1}
            },
            "components": [{"component": "a", "planned_bytes": 4, "peak_bytes": 4}]
        });
        assert!(page(full.clone()).lent().is_empty() && page(full.clone()).over_plan().is_empty());
        let mut bad = full;
        bad["pools"]["kv_pages"]["used"] = 6.into();
        bad["pools"]["requests"]["in_system"] = 1.into();
        bad["components"][0]["peak_bytes"] = 5.into();
        bad["degradation"] =
            json!({"level": "preempt", "entered": [{"level": "a", "times": 2}, {"level": "b", "times": 1}]});
        assert_eq!(page(bad.clone()).entries(), Some(3));
        assert_eq!(page(bad.clone()).lent().len(), 3);
        bad["committed_bytes"] = 7.into();
        bad["unaccounted_bytes"] = 1.into();
        let ledger = page(bad.clone()).ledger().unwrap();
        assert_eq!((ledger.level, ledger.lent), (5, [1, 1, 0, 0, 0, 0, 0]));
        assert_eq!(page(bad).over_plan().len(), 1);
        assert!(page(Value::Null).lent().is_empty());
    }

    #[test]
    fn the_ledgers_error_is_a_share_of_the_process() {
        let ledger = |committed, unaccounted| Ledger {
            committed,
            pages: 0,
            unaccounted,
            gave_way: false,
            level: 0,
            lent: Default::default(),
        };
        assert!((ledger(198, 2).error() - 0.01).abs() < 1e-9);
        assert!((ledger(202, -2).error() - 0.01).abs() < 1e-9);
        assert!(ledger(0, 0).error().abs() < 1e-9);
        let gave_way = |unaccounted| Ledger { gave_way: true, ..ledger(99, unaccounted) };
        assert!(gave_way(-50).error().abs() < 1e-9 && gave_way(1).error() > 0.0);
    }
}
