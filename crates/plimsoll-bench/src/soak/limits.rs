//! The memory limits around the server, and the kernel's actions to enforce them.

use plimsoll_memory::host::{CgroupEvents, HostLimits, HostNow, Root};
use serde::Serialize;

/// The memory limits of a process, read once.
#[derive(Clone, Debug)]
pub struct Limits {
    root: Root,
    found: HostLimits,
    before: Option<CgroupEvents>,
}

/// The tightest limit and the kernel's actions to enforce it.
#[derive(Clone, Debug, Serialize)]
pub struct Kept {
    /// The name of the tightest limit.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Events in the cgroup since the watch began; none where the kernel reports none.
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

    /// Returns the bytes that the process can still take below the tightest limit.
    pub fn free(&self) -> u64 {
        HostNow::read(&self.root, &self.found).available
    }

    /// Returns the tightest limit and the events until now.
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
