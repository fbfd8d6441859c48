//! The memory lease: this process's claim beside other Plimsolls, held from before the first byte until the engine ends.
//!
//! Measuring other processes' use is not enough when two servers start at once. Each server therefore leases its planned bytes. What must
//! not be in here: sizing, and anything of the plan but its total.

use std::path::PathBuf;

use plimsoll_memory::host::lease::{Answer, Lease, LeaseDir, LeaseError};
use plimsoll_memory::host::{HostLimits, HostNow, Room, Root};

use crate::api::start_error::StartError;

/// A lease; `None` where no directory for leases can be used.
#[derive(Debug)]
pub(crate) struct MemoryLease {
    lease: Option<Lease>,
    /// The lease on a GPU's own memory.
    device: Option<Lease>,
}

impl MemoryLease {
    /// Leases `planned` bytes, in `dir` or in the directory that all of this user's processes share. `beside` bytes are already held under
    /// this process's other leases.
    ///
    /// Without a usable directory there is no lease, and the start continues: the use of other processes is measured all the same.
    pub fn take(
        planned: u64,
        beside: u64,
        dir: Option<PathBuf>,
        root: &Root,
        limits: &HostLimits,
    ) -> Result<Self, StartError> {
        let rooms = || {
            let mut rooms = HostNow::read(root, limits).rooms;
            rooms.iter_mut().for_each(|room| room.used_by_others = room.used_by_others.saturating_add(beside));
            rooms
        };
        Ok(Self { lease: acquire(planned, dir, rooms)?, device: None })
    }

    /// Leases `planned` bytes of a GPU's own memory as well. `room` reads the free memory from its driver.
    #[cfg(feature = "gpu")]
    pub fn take_on_device(
        &mut self,
        planned: u64,
        dir: Option<PathBuf>,
        room: impl FnOnce() -> Room,
    ) -> Result<(), StartError> {
        self.device = acquire(planned, dir, || vec![room()])?;
        Ok(())
    }

    /// Tells other processes what was built: planned bytes to keep leased, and bytes of these that are touched. The first pair is the
    /// machine's memory, the second a GPU's own.
    pub fn built(&mut self, host: [u64; 2], device: [u64; 2]) -> Result<(), StartError> {
        for (lease, [planned, committed]) in [(&mut self.lease, host), (&mut self.device, device)] {
            let Some(lease) = lease else { continue };
            let told = lease.set_committed(committed.min(planned)).and_then(|()| lease.shrink_to(planned));
            told.map_err(|error| StartError::Lease(Box::new(error)))?;
        }
        Ok(())
    }
}

/// Acquires a lease in `dir` or in the directory that all of this user's processes share.
fn acquire(planned: u64, dir: Option<PathBuf>, rooms: impl FnOnce() -> Vec<Room>) -> Result<Option<Lease>, StartError> {
    let open = dir.map_or_else(LeaseDir::of_user, |dir| LeaseDir::at(&dir));
    let answer = open.and_then(|dir| dir.acquire(planned, planned, rooms));
    match answer {
        Ok(Answer::Granted(lease)) => Ok(Some(lease)),
        Ok(Answer::Refused(refusal)) => Err(StartError::Refused(Box::new(refusal))),
        Err(error @ (LeaseError::Busy(_) | LeaseError::Unreadable { .. })) => Err(StartError::Lease(Box::new(error))),
        Err(error @ (LeaseError::Dir(_) | LeaseError::Io { .. })) => {
            tracing::warn!(%error, "no lease: other Plimsolls of this user are seen by what they use only");
            Ok(None)
        }
    }
}
