//! The limits that were set around the server from outside, and what the kernel did to keep them.

use plimsoll_memory::host::{CgroupEvents, HostLimits, HostNow, Root};
use serde::Serialize;

/// The limits of a process, read once, and its room inside them.
#[derive(Clone, Debug)]
pub struct Limits {
    root: Root,
    found: HostLimits,
    before: Option<CgroupEvents>,
}

/// What became of the limits.
#[derive(Clone, Debug, Serialize)]
pub struct Kept {
    /// The tightest limit, by its own name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// What the kernel did in the cgroup since the watch began; none where it does not tell.
    pub events: Option<CgroupEvents>,
}

impl Limits {
    /// The limits of process `pid`; none where nothing is known about it.
    pub fn of(pid: u32) -> Option<Self> {
        let root = Root::system().of_process(pid);
        let found = HostLimits::read(&root, None).ok()?;
        let before = found.cgroup_events();
        Some(Self { root, found, before })
    }

    /// Bytes the process could take now before the tightest limit.
    pub fn free(&self) -> u64 {
        HostNow::read(&self.root, &self.found).available
    }

    /// What became of them until now.
    pub fn kept(&self) -> Kept {
        let binding = self.found.binding();
        let since = |(before, now): (CgroupEvents, CgroupEvents)| CgroupEvents {
            oom_kills: now.oom_kills - before.oom_kills,
            limit_hits: now.limit_hits - before.limit_hits,
        };
        let events = self.before.zip(self.found.cgroup_events()).map(since);
        Kept { name: binding.name.clone(), bytes: binding.bytes, events }
    }
}
