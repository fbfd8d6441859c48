//! The arithmetic of leases: what each holder has, and how much the next one may be granted.
//!
//! Pure functions over numbers; files, locks and processes are the business of `lease`.

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
    /// Bytes of these that it said it has already touched.
    pub committed: u64,
    /// The shared domains it lives in.
    pub domains: Vec<String>,
}

/// Why a lease was not granted, with every number that went into it.
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
    /// How many other Plimsolls that is.
    pub holders: usize,
    /// Bytes used in it by anyone else.
    pub strangers: u64,
    /// What is left.
    pub free: u64,
    /// What was asked for at least.
    pub min: u64,
    /// `min - free`.
    pub missing: u64,
}

/// Decides how many bytes a process may plan, given the room in every domain it lives in and all other leases.
///
/// In a domain, others' plans are taken off the limit, and so is what strangers use: measured usage less what the
/// holders say they have committed. A holder that commits before it says so is counted twice for a moment, which errs on
/// the safe side; this is why [`super::lease::Lease::set_committed`] is called after memory is touched and before it is given back.
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
