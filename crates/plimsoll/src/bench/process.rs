//! What another process holds, from `/proc`: memory, threads, descriptors.

use std::fs;

use serde::Serialize;

/// One look at a process. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Everything resident, mapped files included.
    pub resident: u64,
    /// Memory only this process can give back: anonymous, shared, swapped.
    pub owned: u64,
    /// Threads.
    pub threads: u64,
    /// Open descriptors; 0 where they may not be seen.
    pub fds: u64,
}

impl Sample {
    /// Looks at process `pid`; none when it is gone.
    pub fn of(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |entries| entries.count() as u64);
        Some(Self { fds, ..Self::from_status(&status) })
    }

    fn from_status(status: &str) -> Self {
        let number = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let kib = |key: &str| number(key) * 1024;
        Self {
            resident: kib("VmRSS"),
            owned: kib("RssAnon") + kib("RssShmem") + kib("VmSwap"),
            threads: number("Threads"),
            fds: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_read_in_bytes() {
        let status = "Name:\tx\nVmRSS:\t  100 kB\nRssAnon:\t 60 kB\nRssShmem:\t 4 kB\nVmSwap:\t 1 kB\nThreads:\t7\n";
        let sample = Sample::from_status(status);
        assert_eq!(sample, Sample { resident: 102_400, owned: 66_560, threads: 7, fds: 0 });
    }
}
