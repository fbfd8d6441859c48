//! Finds this process's cgroups, version 1, 2 or both, with the limits and usage of each level of the tree.
//!
//! Reclaimable file cache does not count as usage: active and inactive file pages, less dirty pages and pages being written. The kernel
//! frees clean pages at once but must wait for a disk before it can free the others. Reclaimable slab counts as usage: the kernel gives it
//! back late and only in part. The callers decide whether a level binds, and what peers use.

use super::{Root, keyed, read_text};
use std::path::{Component, Path, PathBuf};

/// The cgroup interface of a hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupVersion {
    /// One hierarchy per controller (`memory.limit_in_bytes`).
    V1,
    /// The unified hierarchy (`memory.max`, `memory.high`).
    V2,
}

/// One mounted hierarchy and this process's place in it.
#[derive(Debug, Clone)]
pub(super) struct Hierarchy {
    pub(super) version: CgroupVersion,
    /// The mount point: the topmost level that can be seen.
    pub(super) mount: PathBuf,
    /// The directory of this process's cgroup; the mount point if that directory is not visible.
    pub(super) leaf: PathBuf,
}

impl Hierarchy {
    /// No real tree is deeper; the bound ends a loop of symbolic links.
    const DEPTH_MAX: usize = 64;

    /// The directories from this process's cgroup up to the mount, both included.
    pub(super) fn levels(&self) -> Vec<PathBuf> {
        let upwards = self.leaf.ancestors().take(Self::DEPTH_MAX);
        upwards.take_while(|dir| dir.starts_with(&self.mount)).map(Path::to_path_buf).collect()
    }

    /// The name of a level in messages: its path below the mount.
    pub(super) fn label(&self, level: &Path) -> String {
        format!("/{}", level.strip_prefix(&self.mount).unwrap_or(Path::new("")).display())
    }
}

/// The cgroup mounts of this machine and the paths of this process, as the kernel reports them.
pub(super) struct Mounts {
    mounts: Vec<Mount>,
    memberships: Vec<Membership>,
}

struct Mount {
    version: CgroupVersion,
    /// The cgroup that the mount shows as its top.
    top: String,
    dir: PathBuf,
    controllers: Vec<String>,
}

struct Membership {
    version: CgroupVersion,
    controllers: Vec<String>,
    path: String,
}

impl Mounts {
    pub(super) fn read(root: &Root) -> Self {
        let mut mounts: Vec<Mount> = root
            .text("/proc/self/mountinfo")
            .map(|text| text.lines().filter_map(|line| parse_mount(root, line)).collect())
            .unwrap_or_default();
        if mounts.is_empty() {
            mounts = usual_mounts(root);
        }
        let text = root.text("/proc/self/cgroup").unwrap_or_default();
        Self { mounts, memberships: text.lines().filter_map(parse_membership).collect() }
    }

    /// Every hierarchy that can have `controller` for this process: version 1's own, and the unified one. In a hybrid setup both are
    /// returned, and the one without the controller has no files.
    pub(super) fn hierarchies(&self, controller: &str) -> Vec<Hierarchy> {
        let carries = |version: CgroupVersion, controllers: &[String]| {
            version == CgroupVersion::V2 || controllers.iter().any(|c| c == controller)
        };
        let mut found: Vec<Hierarchy> = Vec::new();
        for member in self.memberships.iter().filter(|m| carries(m.version, &m.controllers)) {
            let candidates = self.mounts.iter().filter(|m| m.version == member.version);
            let candidates = candidates.filter(|m| carries(m.version, &m.controllers));
            let mut best: Option<Hierarchy> = None;
            for mount in candidates {
                let inside = below(&mount.top, &member.path).map(|rest| mount.dir.join(rest)).filter(|d| d.is_dir());
                let exact = inside.is_some();
                if best.is_none() || exact {
                    let leaf = inside.unwrap_or_else(|| mount.dir.clone());
                    best = Some(Hierarchy { version: mount.version, mount: mount.dir.clone(), leaf });
                }
                if exact {
                    break;
                }
            }
            found.extend(best);
        }
        found
    }
}

/// `path` relative to `top`. `None` if it lies outside, as can happen across cgroup namespaces (`/../other`).
fn below(top: &str, path: &str) -> Option<PathBuf> {
    let rest = Path::new(path).strip_prefix(Path::new(top)).ok()?;
    rest.components().all(|c| matches!(c, Component::Normal(_))).then(|| rest.to_path_buf())
}

/// A line such as `35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory`.
fn parse_mount(root: &Root, line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut words = left.split(' ').skip(3);
    let (top, dir) = (unescape(words.next()?), unescape(words.next()?));
    let mut words = right.split(' ');
    let version = match words.next()? {
        "cgroup2" => CgroupVersion::V2,
        "cgroup" => CgroupVersion::V1,
        _ => return None,
    };
    let controllers = words.nth(1)?.split(',').map(str::to_owned).collect();
    Some(Mount { version, top, dir: root.join(&dir), controllers })
}

/// Replaces the kernel's octal escapes, such as `\040` for a space.
fn unescape(word: &str) -> String {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|d| first == b'\\' && d.iter().all(|c| (b'0'..b'8').contains(c)));
        if let Some(digits) = octal {
            bytes.push(digits.iter().fold(0u8, |acc, d| acc.wrapping_mul(8).wrapping_add(d - b'0')));
            rest = &tail[3..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Where distributions mount cgroups, for sandboxes that hide `mountinfo`.
fn usual_mounts(root: &Root) -> Vec<Mount> {
    let v2 = |dir: &str| Mount {
        version: CgroupVersion::V2,
        top: "/".to_owned(),
        dir: root.join(dir),
        controllers: Vec::new(),
    };
    let v1 = |dir: &str, controller: &str| Mount {
        version: CgroupVersion::V1,
        top: "/".to_owned(),
        dir: root.join(dir),
        controllers: vec![controller.to_owned()],
    };
    let all = [
        v2("/sys/fs/cgroup"),
        v2("/sys/fs/cgroup/unified"),
        v1("/sys/fs/cgroup/memory", "memory"),
        v1("/sys/fs/cgroup/cpu", "cpu"),
    ];
    let marked = |m: &Mount| m.version == CgroupVersion::V1 || m.dir.join("cgroup.controllers").is_file();
    all.into_iter().filter(|m| m.dir.is_dir() && marked(m)).collect()
}

/// A line such as `4:memory:/a/b` (version 1) or `0::/a/b` (version 2).
fn parse_membership(line: &str) -> Option<Membership> {
    let mut parts = line.splitn(3, ':');
    let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let version = if id == "0" && controllers.is_empty() { CgroupVersion::V2 } else { CgroupVersion::V1 };
    let controllers = controllers.split(',').map(str::to_owned).collect();
    Some(Membership { version, controllers, path: path.to_owned() })
}

/// The limits of one level, with the file each came from. Soft goals (`memory.low`, `soft_limit`) are no limits.
pub(super) fn level_limits(version: CgroupVersion, dir: &Path) -> Vec<(&'static str, u64)> {
    let file = |name: &'static str| Some((name, number(&read_text(&dir.join(name))?)?));
    match version {
        CgroupVersion::V2 => ["memory.max", "memory.high"].into_iter().filter_map(file).collect(),
        CgroupVersion::V1 => {
            let stat = read_text(&dir.join("memory.stat")).unwrap_or_default();
            let inherited = keyed(&stat, "hierarchical_memory_limit").filter(|&bytes| bytes < V1_UNLIMITED);
            let own = file("memory.limit_in_bytes");
            own.into_iter().chain(inherited.map(|bytes| ("hierarchical_memory_limit", bytes))).collect()
        }
    }
}

/// Version 1 writes "no limit" as the largest signed number, rounded down to a page; pages are at most 64 KiB.
const V1_UNLIMITED: u64 = 0x7fff_ffff_ffff_0000;

/// A size file's content; `max` and version 1's huge number mean no limit.
fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&bytes| bytes < V1_UNLIMITED)
}

/// The most swap that this level allows its members; `None` if it has no such limit.
pub(super) fn level_swap(version: CgroupVersion, dir: &Path) -> Option<u64> {
    match version {
        CgroupVersion::V2 => number(&read_text(&dir.join("memory.swap.max"))?),
        CgroupVersion::V1 => {
            let both = number(&read_text(&dir.join("memory.memsw.limit_in_bytes"))?)?;
            let memory = number(&read_text(&dir.join("memory.limit_in_bytes"))?)?;
            Some(both.saturating_sub(memory))
        }
    }
}

/// Counts of the kernel's actions on a cgroup whose memory was full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct CgroupEvents {
    /// Processes in it that the kernel has killed.
    pub oom_kills: u64,
    /// Number of allocations that reached its limit; the kernel may then have found memory to reclaim.
    pub limit_hits: u64,
}

/// The events of one level, or `None` if it does not count memory.
pub(super) fn level_events(version: CgroupVersion, dir: &Path) -> Option<CgroupEvents> {
    let (kills, hits) = match version {
        CgroupVersion::V2 => {
            let events = read_text(&dir.join("memory.events"))?;
            (keyed(&events, "oom_kill"), keyed(&events, "max"))
        }
        CgroupVersion::V1 => {
            let control = read_text(&dir.join("memory.oom_control"))?;
            (keyed(&control, "oom_kill"), read_text(&dir.join("memory.failcnt"))?.trim().parse().ok())
        }
    };
    Some(CgroupEvents { oom_kills: kills.unwrap_or(0), limit_hits: hits.unwrap_or(0) })
}

/// Bytes of this level that could not be reclaimed at once, or `None` if it does not count memory.
pub(super) fn level_usage(version: CgroupVersion, dir: &Path) -> Option<u64> {
    let (usage_file, prefix, dirty, writeback) = match version {
        CgroupVersion::V2 => ("memory.current", "", "file_dirty", "file_writeback"),
        CgroupVersion::V1 => ("memory.usage_in_bytes", "total_", "dirty", "writeback"),
    };
    let usage: u64 = read_text(&dir.join(usage_file))?.trim().parse().ok()?;
    let stat = read_text(&dir.join("memory.stat")).unwrap_or_default();
    let field = |key: &str| keyed(&stat, &format!("{prefix}{key}")).unwrap_or(0);
    let cache = field("inactive_file").saturating_add(field("active_file"));
    let busy = field(dirty).saturating_add(field(writeback));
    Some(usage.saturating_sub(cache.saturating_sub(busy)))
}
