//! The kernel's limits on this one process (`ulimit`), and the size of `/dev/shm`.
//!
//! They are read from `/proc/self/limits`, so a test can supply them. Other modules decide whether a limit binds the plan.

use super::Root;

/// The soft limits of this process in bytes; `None` means unlimited or unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Rlimits {
    /// `RLIMIT_AS` (`ulimit -v`): all address space, resident or not.
    pub address_space: Option<u64>,
    /// `RLIMIT_DATA` (`ulimit -d`): private writable memory.
    pub data: Option<u64>,
    /// `RLIMIT_MEMLOCK` (`ulimit -l`): memory that may be pinned; it limits `mlock`, not the plan as a whole.
    pub memlock: Option<u64>,
    /// `RLIMIT_NOFILE`: open files and sockets, a count and not bytes.
    pub open_files: Option<u64>,
}

impl Rlimits {
    /// Reads the soft limits; all are `None` where `/proc/self/limits` does not exist.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        let text = root.text("/proc/self/limits").unwrap_or_default();
        let soft = |name: &str| -> Option<u64> {
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
            rest.split_ascii_whitespace().next()?.parse().ok()
        };
        Self {
            address_space: soft("Max address space"),
            data: soft("Max data size"),
            memlock: soft("Max locked memory"),
            open_files: soft("Max open files"),
        }
    }
}

/// The size of a file system in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Space {
    /// All bytes of it.
    pub total: u64,
    /// Bytes that an unprivileged process may still write.
    pub free: u64,
}

impl Space {
    /// The size of `/dev/shm`, which containers keep at 64 MiB unless told otherwise.
    #[must_use]
    pub fn of_shm(root: &Root) -> Option<Self> {
        if root.shm.is_some() || !root.is_system() {
            return root.shm;
        }
        Self::of_shm_mount()
    }

    #[cfg(target_os = "linux")]
    fn of_shm_mount() -> Option<Self> {
        let stat = rustix::fs::statvfs("/dev/shm").ok()?;
        Some(Self { total: stat.f_blocks.checked_mul(stat.f_frsize)?, free: stat.f_bavail.checked_mul(stat.f_frsize)? })
    }

    #[cfg(not(target_os = "linux"))]
    fn of_shm_mount() -> Option<Self> {
        None
    }
}
