//! The arithmetic of leases: the bytes of each holder, and the bytes that the next process may be granted.
//!
//! Pure functions over numbers; `lease` deals with files, locks and processes.

use super::Room;
use std::fmt::Write as _;

const HEADER: &str = "plimsoll-lease 1";

/// Another process's lease.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Holder {
    /// Its process id, as seen in its own namespace.
    pub pid: u32,
    /// Its start time in clock ticks since boot, zero where unknown; with the id it names a process for good.
    pub start_ticks: u64,
    /// Bytes it may use in all.
    pub planned: u64,
    /// Bytes of these that it has reported as touched.
    pub committed: u64,
    /// The shared domains it lives in.
    pub domains: Vec<String>,
}

/// The refusal of a lease, with every number that went into it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, thiserror::Error)]
#[error(
    "{free} bytes are free in '{domain}', {missing} fewer than the {min} this server needs at least: \
     of its limit of {limit}, {leased} are leased to {holders} other Plimsoll process(es) and {strangers} are used by \
     others"
)]
pub struct Refusal {
    /// The domain that has too little room.
    pub domain: String,
    /// Its limit.
    pub limit: u64,
    /// Bytes planned by other Plimsolls in it.
    pub leased: u64,
    /// Number of other Plimsolls in it.
    pub holders: usize,
    /// Bytes used in it by other programs.
    pub strangers: u64,
    /// Bytes left.
    pub free: u64,
    /// The least bytes that were asked for.
    pub min: u64,
    /// `min - free`.
    pub missing: u64,
}

/// Decides how many bytes a process may plan. Inputs are the room in each of its domains and all other leases.
///
/// In a domain, the limit is reduced by other holders' plans and by strangers' use. Strangers' use is the measured usage less the bytes
/// that the holders have reported as committed. A holder that touches memory before it reports it is counted twice for a moment, which errs
/// on the safe side. Therefore [`super::lease::Lease::set_committed`] is called after memory is touched and before it is given back.
///
/// # Errors
/// The refusal names the tightest domain. `want` below `min` is taken as `min`.
pub fn decide(rooms: &[Room], others: &[Holder], want: u64, min: u64) -> Result<u64, Refusal> {
    let assess = |room: &Room| {
        let here = || others.iter().filter(|h| room.shared && h.domains.contains(&room.domain));
        let sum = |of: fn(&Holder) -> u64| here().map(of).fold(0, u64::saturating_add);
        let leased = sum(|h| h.planned.max(h.committed));
        let strangers = room.used_by_others.saturating_sub(sum(|h| h.committed));
        let free = room.limit.saturating_sub(strangers).saturating_sub(leased);
        Refusal {
            domain: room.domain.clone(),
            limit: room.limit,
            leased,
            holders: here().count(),
            strangers,
            free,
            min,
            missing: min.saturating_sub(free),
        }
    };
    match rooms.iter().map(assess).min_by_key(|r| r.free) {
        None => Ok(want.max(min)),
        Some(tightest) if tightest.free < min => Err(tightest),
        Some(tightest) => Ok(want.max(min).min(tightest.free)),
    }
}

impl Holder {
    pub(super) fn text(&self) -> String {
        let Self { pid, start_ticks, planned, committed, domains } = self;
        let mut text = format!("{HEADER}\npid {pid}\nstart {start_ticks}\nplanned {planned}\ncommitted {committed}\n");
        for domain in domains {
            let _ = writeln!(text, "domain {domain}");
        }
        text
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let header = lines.next()? == HEADER;
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        let holder = Self {
            pid: value("pid")?.parse().ok()?,
            start_ticks: value("start")?.parse().ok()?,
            planned: value("planned")?.parse().ok()?,
            committed: value("committed")?.parse().ok()?,
            domains: lines.filter_map(|line| line.strip_prefix("domain ").map(str::to_owned)).collect(),
        };
        header.then_some(holder)
    }
}
