//! The memory of this process itself, from `/proc/self`; on macOS from its kernel.
//!
//! Growth is judged by anonymous memory plus swap. Resident size alone falls when the kernel swaps. It rises with mapped weights, which
//! cost nothing to drop.

use super::{Root, kib_field};
use crate::HeldFile;

/// The memory of this process in bytes; zeros where the system does not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct OwnProcess {
    /// Resident anonymous memory: heap, stacks, arenas.
    pub rss_anon: u64,
    /// Resident pages of mapped files, droppable unless dirty.
    pub rss_file: u64,
    /// Pages of mapped files that count as memory: packed weights of `--packed-cache`. Some of them may not be resident.
    pub held_file: u64,
    /// Resident shared memory.
    pub rss_shmem: u64,
    /// Bytes that the kernel has moved to swap.
    pub vm_swap: u64,
    /// The highest resident size so far.
    pub vm_hwm: u64,
    /// All address space, which `RLIMIT_AS` counts.
    pub vm_size: u64,
    /// Private writable address space, which `RLIMIT_DATA` counts.
    pub vm_data: u64,
    /// Number of threads.
    pub threads: u64,
    /// Number of open file descriptors.
    pub fds: u64,
}

impl OwnProcess {
    /// Reads the current numbers.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        #[cfg(target_os = "macos")]
        if root.is_system() {
            return super::macos::own();
        }
        let text = root.text("/proc/self/status").unwrap_or_default();
        let field = |key| kib_field(&text, key).unwrap_or(0);
        // Kernels before 4.5 do not split resident memory; all of it counts as anonymous then, the careful reading.
        let rss_anon = kib_field(&text, "RssAnon").unwrap_or_else(|| field("VmRSS"));
        let threads = text.lines().find_map(|line| line.strip_prefix("Threads:")?.trim().parse().ok());
        let fds = std::fs::read_dir(root.join("/proc/self/fd")).map_or(0, |entries| entries.count() as u64);
        Self {
            rss_anon,
            rss_file: field("RssFile"),
            held_file: if root.is_system() { HeldFile::in_process() } else { 0 },
            rss_shmem: field("RssShmem"),
            vm_swap: field("VmSwap"),
            vm_hwm: field("VmHWM"),
            vm_size: field("VmSize"),
            vm_data: field("VmData"),
            threads: threads.unwrap_or(0),
            fds,
        }
    }

    /// Whether this process ignores the loss of its terminal (`nohup`); `None` where the system does not tell.
    #[must_use]
    pub fn ignores_hangup(root: &Root) -> Option<bool> {
        let text = root.text("/proc/self/status")?;
        let mask = text.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
        // Signal 1 is the lowest bit.
        Some(u64::from_str_radix(mask.trim(), 16).ok()? & 1 == 1)
    }

    /// Resident memory that only this process could give back: anonymous and shared pages, and held files.
    #[must_use]
    pub fn resident_owned(&self) -> u64 {
        self.rss_anon.saturating_add(self.rss_shmem).saturating_add(self.held_file)
    }

    /// Anonymous memory, resident or swapped, and held files. If it keeps growing, there is a leak.
    #[must_use]
    pub fn leak_gauge(&self) -> u64 {
        self.rss_anon.saturating_add(self.vm_swap).saturating_add(self.held_file)
    }
}
