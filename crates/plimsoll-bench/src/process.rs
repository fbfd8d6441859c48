//! Memory, threads and descriptors of another process.

use plimsoll_memory::host::{OwnProcess, Root};
use serde::Serialize;

/// A sample of a process. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Everything resident, mapped files included.
    pub resident: u64,
    /// Memory that only this process can free: anonymous, shared, swapped.
    pub owned: u64,
    /// Threads.
    pub threads: u64,
    /// Open descriptors; 0 where they may not be seen.
    pub fds: u64,
}

impl Sample {
    /// Samples process `pid`; none when it is gone.
    pub fn of(pid: u32) -> Option<Self> {
        let process = OwnProcess::read(&Root::system().of_process(pid));
        // A process that has ended has no threads, even while its parent has not yet waited for it.
        (process.threads > 0 && process.vm_size > 0).then(|| Self::from(&process))
    }
}

impl From<&OwnProcess> for Sample {
    fn from(process: &OwnProcess) -> Self {
        Self {
            resident: process.rss_anon + process.rss_file + process.rss_shmem,
            owned: process.resident_owned() + process.vm_swap,
            threads: process.threads,
            fds: process.fds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_seen_while_it_runs() {
        let own = Sample::of(std::process::id()).unwrap();
        assert!(own.owned > 0 && own.resident >= own.owned && own.threads > 0 && own.fds > 2, "{own:?}");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(Sample::of(child.id()), None);
    }
}
