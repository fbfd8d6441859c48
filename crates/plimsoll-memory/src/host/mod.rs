//! The memory that the machine gives this process: limits, usage, pressure, and leases shared with other Plimsolls.
//!
//! [`HostLimits`] is read once at start, and again when an operator changes a cgroup. [`HostNow`] is read as often as the governor needs
//! it. Both read through a [`Root`], so that tests can supply a fake `/proc` and `/sys`. This module plans and allocates nothing: it only
//! reports numbers, each with the file that it came from.

mod budget;
mod cgroup;
mod cpu;
#[cfg(unix)]
mod dir;
mod kernel;
#[cfg(unix)]
pub mod lease;
mod limits;
#[cfg(any(target_os = "macos", test))]
mod macos;
mod meminfo;
mod now;
mod pressure;
mod process;
mod rlimit;
#[cfg(unix)]
mod share;
mod touched;

pub(crate) use budget::ExactBytes;
pub use budget::{BudgetError, MemoryBudget};
pub use cgroup::{CgroupEvents, CgroupVersion};
pub use cpu::Cpus;
pub use kernel::Overcommit;
pub use limits::{HostLimits, LimitSource, Remedy};
pub use meminfo::MemInfo;
pub use now::{HostNow, Room};
pub use pressure::{Psi, PsiScope};
pub use process::OwnProcess;
pub use rlimit::{Rlimits, Space};
pub use touched::Touched;
pub(crate) use touched::touched_in;

use std::io::Read;
use std::path::{Path, PathBuf};

/// A path at which this same program can be started again, even after its file was replaced by another version.
#[must_use]
pub fn own_program() -> PathBuf {
    let link = Path::new("/proc/self/exe");
    if link.exists() { link.into() } else { std::env::current_exe().unwrap_or_else(|_| link.into()) }
}

/// Errors while the limits are read.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// No source named a limit: neither a cgroup, nor an rlimit, nor the total of the machine.
    #[error(
        "no memory limit could be read on this system (no cgroup, no rlimit, no total); give --memory-budget in bytes"
    )]
    NoLimit,
    /// The budget is a percentage, but no other limit is known.
    #[error("--memory-budget {0} is a share, but the size of this machine could not be read; give it in bytes")]
    ShareOfUnknown(MemoryBudget),
}

/// The place of `/proc`, `/sys` and `/dev`: the system itself, or a directory that a test supplies.
#[derive(Debug, Clone)]
pub struct Root {
    prefix: PathBuf,
    shm: Option<Space>,
    /// The process to read in place of `/proc/self`; `None`: this process.
    pid: Option<u32>,
}

impl Root {
    /// The longest pseudo-file that is read; the longest real ones (`mountinfo` on busy hosts) stay well below it.
    const FILE_BYTES_MAX: u64 = 4 << 20;

    /// The machine this process runs on.
    #[must_use]
    pub fn system() -> Self {
        Self { prefix: PathBuf::from("/"), shm: None, pid: None }
    }

    /// A directory that holds `proc/`, `sys/` and so on, in place of the machine's own.
    #[must_use]
    pub fn at(prefix: impl Into<PathBuf>) -> Self {
        Self { prefix: prefix.into(), shm: None, pid: None }
    }

    /// The same machine as process `pid` sees it: its memory, its limits, its cgroups.
    #[must_use]
    pub fn of_process(mut self, pid: u32) -> Self {
        self.pid = Some(pid);
        self
    }

    /// Pretends that `/dev/shm` has this size, since a file system cannot be faked by files.
    #[must_use]
    pub fn with_shm(mut self, shm: Space) -> Self {
        self.shm = Some(shm);
        self
    }

    /// Whether this is the machine itself, so that system calls and files report the same machine.
    #[must_use]
    pub fn is_system(&self) -> bool {
        self.prefix == Path::new("/")
    }

    fn join(&self, absolute: &str) -> PathBuf {
        match (self.pid, absolute.strip_prefix("/proc/self/")) {
            (Some(pid), Some(rest)) => self.prefix.join(format!("proc/{pid}/{rest}")),
            _ => self.prefix.join(absolute.trim_start_matches('/')),
        }
    }

    /// The text of a pseudo-file, or `None` if it is missing or unreadable: absence of a limit is not an error.
    fn text(&self, absolute: &str) -> Option<String> {
        read_text(&self.join(absolute))
    }
}

/// Reads a whole pseudo-file, up to the cap. Bytes that are not UTF-8 are replaced.
fn read_text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(Root::FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The value of `key` in a file of `key value` lines, such as `memory.stat`.
fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == key).then(|| words.next()?.parse().ok())?
    })
}

/// The value of `Key:   123 kB` in bytes, as `/proc/meminfo` and `/proc/self/status` write it.
fn kib_field(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kib: u64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}
