//! [`HostNow`]: the room inside the limits at this moment, and the use of other processes.
//!
//! Every domain (machine, each cgroup level, rlimits, budget) has its own room, `limit - peers`; the tightest decides.
//! `used_by_others` is stated against the effective limit, so that `effective - used_by_others` is that tightest room
//! even when the crowding happens elsewhere: a 32 GiB cgroup on a machine with 4 GiB left has 28 GiB of peers.

use super::limits::{Domain, DomainKind};
use super::{HostLimits, MemInfo, OwnProcess, Psi, Root, cgroup, touched};

/// The state of the limits right now. All sizes are bytes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct HostNow {
    /// Bytes that this process could still allocate without crossing any limit.
    pub available: u64,
    /// Bytes that the whole machine could still give to any process; `None` where the system does not tell.
    pub machine_available: Option<u64>,
    /// Bytes that others take of the effective limit, never below zero. Kernel memory charged to the same cgroup (page tables, sockets)
    /// counts as others', since this process cannot give it back.
    pub used_by_others: u64,
    /// The lease name of the domain with the least room.
    pub tightest: String,
    /// Memory of this process; `rss_anon` and `vm_swap` are the numbers to watch.
    pub own: OwnProcess,
    /// Memory pressure; `None` where the kernel does not report it.
    pub psi: Option<Psi>,
    /// The room in every domain, as leases need it.
    pub rooms: Vec<Room>,
}

/// One limited domain as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Room {
    /// The name of the domain, equal for all processes that share it.
    pub domain: String,
    /// Whether other processes can share it; rlimits and the budget belong to this process alone.
    pub shared: bool,
    /// Its limit in bytes.
    pub limit: u64,
    /// Bytes used in it by anything but this process's own memory.
    pub used_by_others: u64,
}

impl Room {
    /// Bytes that this process may have here in total, the bytes that it holds included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.limit.saturating_sub(self.used_by_others)
    }
}

impl HostNow {
    /// Measures usage against `limits`, which were read from the same `root`.
    #[must_use]
    pub fn read(root: &Root, limits: &HostLimits) -> Self {
        let own = OwnProcess::read(root);
        let info = MemInfo::read(root);
        let to_come = stacks_to_come(root, limits);
        let measured: Vec<(Room, u64)> = limits.domains.iter().map(|d| measure(d, &info, &own, to_come)).collect();
        let tightest = measured.iter().min_by_key(|(room, _)| room.bytes());
        let room_bytes = tightest.map_or(limits.effective, |(room, _)| room.bytes());
        Self {
            available: measured.iter().map(|&(_, free)| free).min().unwrap_or(0),
            machine_available: info.available,
            used_by_others: limits.effective.saturating_sub(room_bytes),
            tightest: tightest.map_or_else(String::new, |(room, _)| room.domain.clone()),
            own,
            psi: Psi::read(root, &limits.memory_hierarchies),
            rooms: measured.into_iter().map(|(room, _)| room).collect(),
        }
    }
}

/// Address space of threads that have not started yet; 0 where nothing limits address space.
fn stacks_to_come(root: &Root, limits: &HostLimits) -> u64 {
    let limited =
        limits.domains.iter().any(|domain| matches!(domain.kind, DomainKind::AddressSpace | DomainKind::Data));
    if limited { limits.stacks.saturating_sub(touched::stacks_mapped(root)) } else { 0 }
}

/// Returns the room of one domain and its free bytes. `stacks` more bytes of address space count as taken.
fn measure(domain: &Domain, info: &MemInfo, own: &OwnProcess, stacks: u64) -> (Room, u64) {
    let resident = own.resident_owned();
    let swapped = resident.saturating_add(own.vm_swap);
    // Bytes used in the domain, and this process's part of them.
    let (used, mine) = match &domain.kind {
        // The system counts the pages of mapped files as available.
        DomainKind::Machine => {
            let used = info.available.map(|a| domain.limit.saturating_sub(a).saturating_add(own.held_file));
            (used.unwrap_or(resident), resident)
        }
        DomainKind::Cgroup { version, dir } => {
            let used = cgroup::level_usage(*version, dir).map(|used| used.saturating_add(own.held_file));
            (used.unwrap_or(resident), resident)
        }
        // Address space that is reserved but not resident (stacks, mapped files) also counts against the limit.
        DomainKind::AddressSpace => (own.vm_size.max(swapped).saturating_add(stacks), swapped),
        DomainKind::Data => (own.vm_data.max(own.rss_anon).saturating_add(stacks), own.rss_anon),
        DomainKind::Budget => (swapped, swapped),
    };
    let shared = matches!(domain.kind, DomainKind::Machine | DomainKind::Cgroup { .. });
    let room =
        Room { domain: domain.id.clone(), shared, limit: domain.limit, used_by_others: used.saturating_sub(mine) };
    (room, domain.limit.saturating_sub(used))
}
