//! The memory lease: this process's place beside other Plimsolls, held from before the first byte until the engine ends.
//!
//! Measuring what others use is not enough when two servers start at once; each therefore leases what it plans. What must not be
//! in here: sizing, and anything of the plan but its total.

use std::path::PathBuf;

use plimsoll_memory::host::lease::{Answer, Lease, LeaseDir, LeaseError};
use plimsoll_memory::host::{HostLimits, HostNow, Root};

use crate::api::start_error::StartError;

/// A lease, or none where no directory for leases can be used.
#[derive(Debug)]
pub(crate) struct MemoryLease {
    lease: Option<Lease>,
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
        let open = dir.map_or_else(LeaseDir::of_user, |dir| LeaseDir::at(&dir));
        let rooms = || {
            let mut rooms = HostNow::read(root, limits).rooms;
            rooms.iter_mut().for_each(|room| room.used_by_others = room.used_by_others.saturating_add(beside));
            rooms
        };
        let answer = open.and_then(|dir| dir.acquire(planned, planned, rooms));
        match answer {
            Ok(Answer::Granted(lease)) => Ok(Self { lease: Some(lease) }),
            Ok(Answer::Refused(refusal)) => Err(StartError::Refused(Box::new(refusal))),
            Err(error @ (LeaseError::Busy(_) | LeaseError::Unreadable { .. })) => {
                Err(StartError::Lease(Box::new(error)))
            }
            Err(error @ (LeaseError::Dir(_) | LeaseError::Io { .. })) => {
                tracing::warn!(%error, "no lease: other Plimsolls of this user are seen by what they use only");
                Ok(Self { lease: None })
            }
        }
    }

    /// Tells the others what was built: what is planned is kept, `committed` bytes of it are touched.
    pub fn built(&mut self, planned: u64, committed: u64) -> Result<(), StartError> {
        let Some(lease) = &mut self.lease else { return Ok(()) };
        let told = lease.set_committed(committed.min(planned)).and_then(|()| lease.shrink_to(planned));
        told.map_err(|error| StartError::Lease(Box::new(error)))
    }
}
