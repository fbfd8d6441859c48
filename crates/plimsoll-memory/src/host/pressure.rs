//! PSI: the share of time in which tasks waited because memory was short.
//!
//! The cgroup's own file is preferred, since this process cannot relieve the pressure of other cgroups.

use super::cgroup::{CgroupVersion, Hierarchy};
use super::{Root, read_text};

/// The place where pressure was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PsiScope {
    /// The cgroup of this process.
    Cgroup,
    /// The whole machine.
    Host,
}

/// Memory pressure. Averages are percentages of the last ten seconds, totals are microseconds since boot.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Psi {
    /// Where this pressure was read.
    pub scope: PsiScope,
    /// Percentage of time in which at least one task waited for memory.
    pub some_avg10: f32,
    /// Percentage of time in which every task waited for memory.
    pub full_avg10: f32,
    /// Microseconds in which at least one task waited.
    pub some_total_us: u64,
    /// Microseconds in which every task waited.
    pub full_total_us: u64,
}

impl Psi {
    /// Reads the pressure of the cgroup, else of the machine. `None` on old kernels, with PSI switched off, or outside Linux.
    pub(super) fn read(root: &Root, hierarchies: &[Hierarchy]) -> Option<Self> {
        let own = hierarchies
            .iter()
            .filter(|h| h.version == CgroupVersion::V2)
            .find_map(|h| Self::parse(&read_text(&h.leaf.join("memory.pressure"))?, PsiScope::Cgroup));
        own.or_else(|| Self::parse(&root.text("/proc/pressure/memory")?, PsiScope::Host))
    }

    fn parse(text: &str, scope: PsiScope) -> Option<Self> {
        let (some_avg10, some_total_us) = line(text, "some")?;
        let (full_avg10, full_total_us) = line(text, "full").unwrap_or((0.0, 0));
        Some(Self { scope, some_avg10, full_avg10, some_total_us, full_total_us })
    }
}

fn line(text: &str, kind: &str) -> Option<(f32, u64)> {
    let rest = text.lines().find_map(|line| line.strip_prefix(kind))?;
    let value = |key: &str| rest.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    let avg10: f32 = value("avg10")?.parse().ok()?;
    avg10.is_finite().then_some((avg10, value("total")?.parse().ok()?))
}
