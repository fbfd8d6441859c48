//! The cores that this process may keep busy: affinity (which includes cpusets) and the cgroup's CPU quota.
//!
//! More threads than this compute no faster; under a quota the kernel stops all of them together.

use super::cgroup::{CgroupVersion, Hierarchy, Mounts};
use super::{Root, read_text};

/// The cores this process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Cpus {
    /// Cores in the affinity mask, which the kernel keeps inside the cpuset.
    pub allowed: u64,
    /// The tightest quota up the cgroup tree in thousandths of a core, if there is one.
    pub quota_millicores: Option<u64>,
    /// Cores that each justify a compute thread: the lesser of both, the quota rounded down, at least one.
    pub usable: u64,
}

impl Cpus {
    pub(super) fn read(root: &Root, mounts: &Mounts) -> Self {
        let status = root.text("/proc/self/status").unwrap_or_default();
        let listed = status.lines().find_map(|line| count_list(line.strip_prefix("Cpus_allowed_list:")?));
        let allowed = listed.unwrap_or_else(|| match std::thread::available_parallelism() {
            Ok(count) if root.is_system() => count.get() as u64,
            _ => 1,
        });
        let quota_millicores = mounts.hierarchies("cpu").iter().filter_map(tightest_quota).min();
        let whole = quota_millicores.map_or(u64::MAX, |q| q / 1000);
        Self { allowed, quota_millicores, usable: allowed.min(whole).max(1) }
    }
}

/// Counts the cores in a list such as `0-3,8`; `None` if it is no such list. It expands no range, so a huge range costs nothing.
fn count_list(list: &str) -> Option<u64> {
    let mut count = 0u64;
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u64>().ok()?, last.trim().parse::<u64>().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    (count > 0).then_some(count)
}

fn tightest_quota(hierarchy: &Hierarchy) -> Option<u64> {
    let at = |dir: std::path::PathBuf| -> Option<u64> {
        let (quota, period) = match hierarchy.version {
            CgroupVersion::V2 => {
                let text = read_text(&dir.join("cpu.max"))?;
                let (quota, period) = text.trim().split_once(' ')?;
                (quota.to_owned(), period.to_owned())
            }
            CgroupVersion::V1 => {
                (read_text(&dir.join("cpu.cfs_quota_us"))?, read_text(&dir.join("cpu.cfs_period_us"))?)
            }
        };
        // "max" and -1 do not parse, so they give no quota.
        let (quota, period) = (quota.trim().parse::<u64>().ok()?, period.trim().parse::<u64>().ok()?);
        quota.checked_mul(1000)?.checked_div(period)
    };
    hierarchy.levels().into_iter().filter_map(at).min()
}
