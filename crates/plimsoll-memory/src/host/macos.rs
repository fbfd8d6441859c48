//! Memory on macOS, which has no `/proc`. The machine's memory comes from `sysctl` and `vm_stat`, because no stable call of the C library
//! counts its pages. This process's memory comes from the kernel. Parsing is separate, so it is tested on every system.

use super::MemInfo;
#[cfg(target_os = "macos")]
use super::OwnProcess;
#[cfg(target_os = "macos")]
use crate::HeldFile;

#[cfg(target_os = "macos")]
pub(super) fn read() -> MemInfo {
    let run = |tool: &str, args: &[&str]| {
        let output = std::process::Command::new(tool).args(args).output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    // The machine's size is read only once: this function runs twice a second.
    static TOTAL: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let total = TOTAL.get_or_init(|| run("/usr/sbin/sysctl", &["-n", "hw.memsize"]).unwrap_or_default());
    let pages = run("/usr/bin/vm_stat", &[]).unwrap_or_default();
    parse(total, &pages)
}

/// The memory that this process has written and not given back, compressed or not. macOS uses the same number to judge a process. Clean
/// pages of mapped files do not count.
#[cfg(target_os = "macos")]
pub(super) fn own() -> OwnProcess {
    let mut usage = std::mem::MaybeUninit::<libc::rusage_info_v4>::zeroed();
    // SAFETY: the place is as large as this version of the structure.
    let status = unsafe { libc::proc_pid_rusage(libc::getpid(), libc::RUSAGE_INFO_V4, usage.as_mut_ptr().cast()) };
    // SAFETY: zeros are a value of it, and the kernel has written no more than that.
    let usage = unsafe { usage.assume_init() };
    if status != 0 {
        return OwnProcess::default();
    }
    let (rss_anon, vm_hwm) = (usage.ri_phys_footprint, usage.ri_lifetime_max_phys_footprint);
    OwnProcess { rss_anon, vm_hwm, held_file: HeldFile::in_process(), ..OwnProcess::default() }
}

/// Combines `sysctl -n hw.memsize` with the page counts of `vm_stat`.
///
/// Swap grows with the disk on macOS, so its size stays unknown.
pub(super) fn parse(memsize: &str, vm_stat: &str) -> MemInfo {
    let total = memsize.trim().parse::<u64>().ok();
    MemInfo { total, available: available(vm_stat).map(|a| a.min(total.unwrap_or(u64::MAX))), ..MemInfo::default() }
}

/// Bytes of free, speculative, purgeable and inactive pages: the kernel can give these without compressing any.
fn available(vm_stat: &str) -> Option<u64> {
    let page_bytes: u64 = vm_stat.split_once("page size of ")?.1.split(' ').next()?.parse().ok()?;
    let pages = |name: &str| -> Option<u64> {
        let line = vm_stat.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches('.').parse().ok()
    };
    let free = pages("Pages free:")?;
    let soft = ["Pages speculative:", "Pages purgeable:", "Pages inactive:"].map(|name| pages(name).unwrap_or(0));
    soft.into_iter().fold(free, u64::saturating_add).checked_mul(page_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_stat_is_read_in_its_own_page_size() {
        let text = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n\
                    Pages free:                               10.\n\
                    Pages active:                           9999.\n\
                    Pages inactive:                           20.\n\
                    Pages speculative:                         3.\n\
                    Pages purgeable:                           4.\n";
        let info = parse("17179869184\n", text);
        assert_eq!(info.total, Some(16 << 30));
        assert_eq!(info.available, Some(37 * 16384));
    }

    #[test]
    fn missing_tools_mean_unknown() {
        assert_eq!(parse("", ""), MemInfo::default());
    }
}
