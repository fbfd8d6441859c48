//! The machine's memory on macOS, where there is no `/proc`: asked from `sysctl` and `vm_stat`.
//!
//! Two short-lived tools at start instead of foreign calls keep this crate free of `unsafe` here. Parsing is separate
//! so that it is tested on every system.

use super::MemInfo;

#[cfg(target_os = "macos")]
pub(super) fn read() -> MemInfo {
    let run = |tool: &str, args: &[&str]| {
        let output = std::process::Command::new(tool).args(args).output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    let total = run("/usr/sbin/sysctl", &["-n", "hw.memsize"]).unwrap_or_default();
    let pages = run("/usr/bin/vm_stat", &[]).unwrap_or_default();
    parse(&total, &pages)
}

/// Combines `sysctl -n hw.memsize` with the page counts of `vm_stat`.
///
/// Swap grows with the disk on macOS, so its size stays unknown.
pub(super) fn parse(memsize: &str, vm_stat: &str) -> MemInfo {
    let total = memsize.trim().parse::<u64>().ok();
    MemInfo { total, available: available(vm_stat).map(|a| a.min(total.unwrap_or(u64::MAX))), ..MemInfo::default() }
}

/// Free, speculative, purgeable and inactive pages: what the kernel gives without compressing anything.
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
