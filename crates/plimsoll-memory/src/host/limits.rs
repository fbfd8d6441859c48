//! [`HostLimits`]: every memory limit that applies to this process, and the least of them.
//!
//! Swap is reported but never counted: a server that plans on swap would stall.

use super::cgroup::{self, CgroupEvents, CgroupVersion, Hierarchy, Mounts};
use super::{Cpus, HostError, MemInfo, MemoryBudget, Rlimits, Root, Space, touched};
use std::path::{Path, PathBuf};

/// One limit that was found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LimitSource {
    /// The limit's name and place, for example `memory.max of cgroup /a/b`.
    pub name: String,
    /// The limit in bytes.
    pub bytes: u64,
    /// Whether this source decides. Exactly one source is marked.
    pub binding: bool,
    /// The setting to change for a higher limit.
    pub remedy: Remedy,
}

/// The way to raise a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// By the operator's own flag.
    Budget,
    /// In the settings of the cgroup or container.
    Cgroup,
    /// `ulimit -v`, before the start.
    AddressSpace,
    /// `ulimit -d`, before the start.
    Data,
    /// No setting: the limit is the machine's memory.
    Machine,
    /// No setting: the limit is the memory of a GPU.
    Gpu,
    /// The system administrator's setting for the part of a Mac's memory that the GPU may use. A plan takes `beside` bytes outside that
    /// part.
    WorkingSet {
        /// Planned bytes beside the GPU's buffers.
        beside: u64,
    },
}

impl Remedy {
    /// Returns the change that makes the limit `bytes`, as text.
    #[must_use]
    pub fn words(self, bytes: u64) -> String {
        let kib = bytes.div_ceil(1024);
        match self {
            Self::Budget => format!("--memory-budget {bytes}"),
            Self::Cgroup => format!("a memory limit of {bytes} bytes for this cgroup (a container's --memory)"),
            Self::AddressSpace => {
                format!("RLIMIT_AS of {bytes} bytes (ulimit -v {kib}), or none (ulimit -v unlimited)")
            }
            Self::Data => format!("RLIMIT_DATA of {bytes} bytes (ulimit -d {kib}), or none (ulimit -d unlimited)"),
            Self::Gpu => format!("a GPU with {bytes} bytes free"),
            Self::WorkingSet { beside } => {
                let bytes = bytes.saturating_sub(beside);
                let mib = bytes.div_ceil(1 << 20);
                format!("{bytes} bytes that the GPU may use (on a Mac: sudo sysctl iogpu.wired_limit_mb={mib})")
            }
            Self::Machine => format!("a machine with {bytes} bytes free"),
        }
    }
}

impl DomainKind {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Machine => Remedy::Machine,
            Self::Cgroup { .. } => Remedy::Cgroup,
            Self::AddressSpace => Remedy::AddressSpace,
            Self::Data => Remedy::Data,
            Self::Budget => Remedy::Budget,
        }
    }
}

/// Everything that bounds this process, read once.
#[derive(Debug, Clone, serde::Serialize)]
pub struct HostLimits {
    /// The least of all limits, in bytes.
    pub effective: u64,
    /// Every limit seen, in the order looked at: the machine, cgroups from inner to outer, rlimits, the budget.
    pub sources: Vec<LimitSource>,
    /// All memory of the machine, if known.
    pub mem_total: Option<u64>,
    /// All swap of the machine, if known. Not part of `effective`.
    pub swap_total: Option<u64>,
    /// The most swap that the cgroups let this process's group use, if they say so.
    pub swap_limit: Option<u64>,
    /// `RLIMIT_MEMLOCK`: bytes that may be pinned; bounds pinned memory only.
    pub memlock: Option<u64>,
    /// The size of `/dev/shm`, if there is one.
    pub shm: Option<Space>,
    /// The cores that this process may keep busy.
    pub cpus: Cpus,
    /// Bytes of address space of the stacks of all threads that this process will start.
    pub stacks: u64,
    /// The operator's budget (`--memory-budget`), as given.
    #[serde(skip)]
    pub budget: Option<MemoryBudget>,
    #[serde(skip)]
    pub(super) domains: Vec<Domain>,
    #[serde(skip)]
    pub(super) memory_hierarchies: Vec<Hierarchy>,
}

/// A source with its own limit and usage: the machine, one cgroup level, an rlimit, the budget.
#[derive(Debug, Clone)]
pub(super) struct Domain {
    /// A name that is the same for every process in the domain, so that leases can be compared.
    pub(super) id: String,
    pub(super) limit: u64,
    pub(super) kind: DomainKind,
}

#[derive(Debug, Clone)]
pub(super) enum DomainKind {
    Machine,
    Cgroup { version: CgroupVersion, dir: PathBuf },
    AddressSpace,
    Data,
    Budget,
}

impl HostLimits {
    /// Reads every limit. `budget` is the operator's (`--memory-budget`); a share is taken of the least other limit.
    ///
    /// # Errors
    /// [`HostError::NoLimit`] if no limit bounds this process. [`HostError::ShareOfUnknown`] if the budget is a share and no other limit is
    /// known.
    pub fn read(root: &Root, budget: Option<MemoryBudget>) -> Result<Self, HostError> {
        let info = MemInfo::read(root);
        let rlimits = Rlimits::read(root);
        let mounts = Mounts::read(root);
        let memory_hierarchies = mounts.hierarchies("memory");

        let mut found = Found::default();
        if let Some(total) = info.total {
            found.limit("MemTotal of this machine".to_owned(), "machine".to_owned(), total, DomainKind::Machine);
        }
        let mut swap_limit = None;
        for hierarchy in &memory_hierarchies {
            found.cgroup(hierarchy);
            let levels = hierarchy.levels().into_iter();
            let swap = levels.filter_map(|dir| cgroup::level_swap(hierarchy.version, &dir)).min();
            swap_limit = [swap_limit, swap].into_iter().flatten().min();
        }
        if let Some(bytes) = rlimits.address_space {
            found.limit(
                "RLIMIT_AS (ulimit -v)".to_owned(),
                "address space".to_owned(),
                bytes,
                DomainKind::AddressSpace,
            );
        }
        if let Some(bytes) = rlimits.data {
            found.limit("RLIMIT_DATA (ulimit -d)".to_owned(), "data".to_owned(), bytes, DomainKind::Data);
        }
        found.budget(budget)?;

        let binding = found.least().ok_or(HostError::NoLimit)?;
        found.sources[binding].binding = true;
        Ok(Self {
            effective: found.sources[binding].bytes,
            sources: found.sources,
            mem_total: info.total,
            swap_total: info.swap_total,
            swap_limit,
            memlock: rlimits.memlock,
            shm: Space::of_shm(root),
            cpus: Cpus::read(root, &mounts),
            stacks: 0,
            budget,
            domains: found.domains,
            memory_hierarchies,
        })
    }

    /// Returns the same limits for a process that will have started `threads` threads beside its first. Where address space is limited,
    /// their stacks count in full, however little of them is touched.
    #[must_use]
    pub fn with_threads(mut self, threads: u64) -> Self {
        self.stacks = threads.saturating_mul(touched::STACK_BYTES + touched::GUARD_BYTES);
        self
    }

    /// Reads every limit again, because an operator may have changed one. If reading fails, returns the limits unchanged.
    #[must_use]
    pub fn again(&self, root: &Root) -> Self {
        Self::read(root, self.budget).map_or_else(|_| self.clone(), |limits| Self { stacks: self.stacks, ..limits })
    }

    /// The limit that decides.
    ///
    /// # Panics
    /// Never for a value made by [`HostLimits::read`], which marks one.
    #[must_use]
    pub fn binding(&self) -> &LimitSource {
        self.sources.iter().find(|s| s.binding).expect("read() marks the least source")
    }

    /// Counts of the kernel's actions in this process's own cgroup because memory was full; `None` without a cgroup. Can still be read
    /// after the process has ended.
    #[must_use]
    pub fn cgroup_events(&self) -> Option<CgroupEvents> {
        self.memory_hierarchies.iter().find_map(|h| cgroup::level_events(h.version, &h.leaf))
    }

    /// The directory of the innermost cgroup that has a memory limit, and that limit. Processes in this cgroup compete with this process
    /// for memory.
    #[must_use]
    pub fn innermost_limited_cgroup(&self) -> Option<(&Path, u64)> {
        self.domains.iter().find_map(|domain| match &domain.kind {
            DomainKind::Cgroup { dir, .. } => Some((dir.as_path(), domain.limit)),
            _ => None,
        })
    }
}

#[derive(Default)]
struct Found {
    sources: Vec<LimitSource>,
    domains: Vec<Domain>,
}

impl Found {
    fn limit(&mut self, name: String, id: String, bytes: u64, kind: DomainKind) {
        self.sources.push(LimitSource { name, bytes, binding: false, remedy: kind.remedy() });
        self.domains.push(Domain { id, limit: bytes, kind });
    }

    /// Adds every level of one hierarchy; a level with two limits (`max` and `high`) is one domain with the lesser.
    fn cgroup(&mut self, hierarchy: &Hierarchy) {
        for dir in hierarchy.levels() {
            let label = hierarchy.label(&dir);
            let limits = cgroup::level_limits(hierarchy.version, &dir);
            let Some(least) = limits.iter().map(|&(_, bytes)| bytes).min() else {
                continue;
            };
            for (file, bytes) in limits {
                let name = format!("{file} of cgroup {label}");
                self.sources.push(LimitSource { name, bytes, binding: false, remedy: Remedy::Cgroup });
            }
            let id = domain_id(&dir, &label);
            let kind = DomainKind::Cgroup { version: hierarchy.version, dir };
            self.domains.push(Domain { id, limit: least, kind });
        }
    }

    fn budget(&mut self, budget: Option<MemoryBudget>) -> Result<(), HostError> {
        let Some(budget) = budget else { return Ok(()) };
        let others = self.least().map(|i| self.sources[i].bytes);
        let bytes = match (budget, others) {
            (MemoryBudget::Share(_), None) => return Err(HostError::ShareOfUnknown(budget)),
            (budget, others) => budget.bytes(others.unwrap_or(0)),
        };
        self.limit("--memory-budget".to_owned(), "budget".to_owned(), bytes, DomainKind::Budget);
        Ok(())
    }

    /// The index of the least source, the first of equals.
    fn least(&self) -> Option<usize> {
        (0..self.sources.len()).min_by_key(|&i| self.sources[i].bytes)
    }
}

/// Returns a cgroup's name across namespaces: its directory's inode. Two containers both call their own cgroup `/`.
fn domain_id(dir: &std::path::Path, label: &str) -> String {
    #[cfg(unix)]
    if let Ok(meta) = std::fs::metadata(dir) {
        use std::os::unix::fs::MetadataExt;
        return format!("cgroup {}:{}", meta.dev(), meta.ino());
    }
    format!("cgroup {label}")
}
