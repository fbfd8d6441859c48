//! The memory lease: this process's place beside other Plimsolls, held from before the first byte until the engine ends.
//!
//! Measuring what others use is not enough when two servers start at once; each therefore leases what it plans. What must not be
//! in here: sizing, and anything of the plan but its total.

use std::path::PathBuf;

use plimsoll_memory::host::lease::{Answer, Lease, LeaseDir, LeaseError};
use plimsoll_memory::host::{HostLimits, HostNow, Room, Root};

use crate::api::start_error::StartError;

/// A lease, or none where no directory for leases can be used.
#[derive(Debug)]
pub(crate) struct MemoryLease {
    lease: Option<Lease>,
    /// The same of a GPU's own memory.
    device: Option<Lease>,
}

impl MemoryLease {
    /// Leases `planned` bytes, in `dir` or where all of this user's processes agree to meet. `beside`: what this process holds already
    /// under other leases of its own.
    ///
    /// A directory that cannot be used costs the agreement, not the start: what others use is measured all the same.
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

    /// Leases `planned` bytes of a GPU's own memory as well. `room` asks its driver.
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

    /// Tells the others what was built: what is planned is kept, and how many bytes of it are touched. Both are given for the machine's
    /// memory and for a GPU's own.
    pub fn built(&mut self, host: [u64; 2], device: [u64; 2]) -> Result<(), StartError> {
        for (lease, [planned, committed]) in [(&mut self.lease, host), (&mut self.device, device)] {
            let Some(lease) = lease else { continue };
            let told = lease.set_committed(committed.min(planned)).and_then(|()| lease.shrink_to(planned));
            told.map_err(|error| StartError::Lease(Box::new(error)))?;
        }
        Ok(())
    }
}

/// A lease in `dir` or where all of this user's processes agree to meet.
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
