//! Limits, usage, pressure and events of cgroups, version 1 and 2.

use plimsoll_memory::host::PsiScope;

use super::{Fake, GIB, MIB};

#[test]
fn v2_takes_the_least_of_max_and_high_up_the_tree() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB).v2("/a/b");
    fake.put("sys/fs/cgroup/a/memory.max", "max\n").put("sys/fs/cgroup/a/memory.high", &format!("{}\n", 4 * GIB));
    fake.put("sys/fs/cgroup/a/b/memory.max", &format!("{}\n", 8 * GIB)).put("sys/fs/cgroup/a/b/memory.high", "max\n");
    let limits = fake.limits();
    assert_eq!(limits.effective, 4 * GIB);
    assert_eq!(limits.binding().name, "memory.high of cgroup /a");
    let names: Vec<(&str, u64)> = limits.sources.iter().map(|s| (s.name.as_str(), s.bytes)).collect();
    assert_eq!(
        names,
        [
            ("MemTotal of this machine", 64 * GIB),
            ("memory.max of cgroup /a/b", 8 * GIB),
            ("memory.high of cgroup /a", 4 * GIB),
        ]
    );
    assert_eq!(limits.sources.iter().filter(|s| s.binding).count(), 1);
}

#[test]
fn v2_usage_leaves_out_clean_file_cache_only() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB).v2("/a");
    fake.put("sys/fs/cgroup/a/memory.max", &(8 * GIB).to_string());
    fake.put("sys/fs/cgroup/a/memory.current", &(6 * GIB).to_string());
    let stat = format!(
        "anon 1\nfile 2\ninactive_file {}\nactive_file {}\nfile_dirty {}\nfile_writeback {}\nslab_reclaimable {GIB}\n",
        2 * GIB,
        GIB,
        512 * MIB,
        512 * MIB
    );
    fake.put("sys/fs/cgroup/a/memory.stat", &stat);
    let now = fake.now();
    // 6 GiB are used, 3 of them cache, of which 1 is not clean: 4 count. One of these four is the process's.
    assert_eq!(now.available, 4 * GIB);
    assert_eq!(now.used_by_others, 3 * GIB);
    assert_eq!(now.own.rss_anon, GIB);
}

#[test]
fn usage_of_a_parent_counts_siblings() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB).v2("/a/b");
    fake.put("sys/fs/cgroup/a/memory.max", &(10 * GIB).to_string());
    fake.put("sys/fs/cgroup/a/memory.current", &(7 * GIB).to_string());
    fake.put("sys/fs/cgroup/a/b/memory.max", &(9 * GIB).to_string());
    fake.put("sys/fs/cgroup/a/b/memory.current", &GIB.to_string());
    let now = fake.now();
    assert_eq!(now.available, 3 * GIB);
    // Of the effective 9 GiB, only 10 - 6 = 4 can be the process's.
    assert_eq!(now.used_by_others, 5 * GIB);
}

#[test]
fn v1_reads_own_and_inherited_limits() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, 0).v1("/box", "/");
    fake.put("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712\n");
    fake.put("sys/fs/cgroup/memory/box/memory.usage_in_bytes", &(3 * GIB).to_string());
    let stat = format!(
        "inactive_file 5\nhierarchical_memory_limit {}\ntotal_inactive_file {}\ntotal_active_file {}\ntotal_dirty {}\n",
        5 * GIB,
        GIB,
        GIB,
        256 * MIB
    );
    fake.put("sys/fs/cgroup/memory/box/memory.stat", &stat);
    let (limits, now) = (fake.limits(), fake.now());
    assert_eq!(limits.effective, 5 * GIB);
    assert_eq!(limits.binding().name, "hierarchical_memory_limit of cgroup /box");
    assert_eq!(now.used_by_others, GIB + 256 * MIB);
    assert_eq!(now.available, 5 * GIB - GIB - 256 * MIB);
}

#[test]
fn v1_without_a_limit_is_no_limit() {
    let fake = Fake::new();
    fake.machine(GIB, GIB, 0).v1("/", "/");
    fake.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854710272\n");
    fake.put("sys/fs/cgroup/memory/memory.stat", "hierarchical_memory_limit 9223372036854771712\n");
    assert_eq!(fake.limits().sources.len(), 1);
}

#[test]
fn a_mount_that_shows_only_our_part_of_the_tree_is_its_own_root() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, 0).v1("/docker/abc/inner", "/docker/abc");
    fake.put("sys/fs/cgroup/memory/memory.limit_in_bytes", &(2 * GIB).to_string());
    fake.put("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", &(3 * GIB).to_string());
    let limits = fake.limits();
    assert_eq!(limits.effective, 2 * GIB);
    assert_eq!(limits.sources.len(), 3);
}

#[test]
fn a_path_outside_of_the_namespace_falls_back_to_the_mount() {
    for path in ["/not/here", "/../elsewhere", "/.."] {
        let fake = Fake::new();
        fake.machine(64 * GIB, 60 * GIB, 0).v2(path);
        fake.put("sys/fs/cgroup/memory.max", &GIB.to_string());
        // A directory outside the mount, which `..` must not reach.
        fake.put("sys/fs/elsewhere/memory.max", "1");
        assert_eq!(fake.limits().effective, GIB, "{path}");
    }
}

#[test]
fn hybrid_reads_whichever_hierarchy_has_the_controller() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, 0);
    fake.put("proc/self/cgroup", "4:memory:/svc\n1:name=systemd:/svc\n0::/svc\n");
    fake.put(
        "proc/self/mountinfo",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    );
    fake.put("sys/fs/cgroup/unified/svc/cgroup.controllers", "");
    fake.put("sys/fs/cgroup/memory/svc/memory.limit_in_bytes", &(6 * GIB).to_string());
    assert_eq!(fake.limits().binding().name, "memory.limit_in_bytes of cgroup /svc");
}

#[test]
fn hidden_mountinfo_and_escaped_paths_are_survived() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, 0).put("proc/self/cgroup", "0::/\n");
    fake.put("sys/fs/cgroup/cgroup.controllers", "memory").put("sys/fs/cgroup/memory.max", &GIB.to_string());
    assert_eq!(fake.limits().effective, GIB, "usual mount points");

    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, 0).put("proc/self/cgroup", "0::/\n");
    fake.put("proc/self/mountinfo", "30 23 0:26 / /odd\\040place rw - cgroup2 cgroup2 rw\n");
    fake.put("odd place/memory.max", &GIB.to_string());
    assert_eq!(fake.limits().effective, GIB, "octal escapes");
}

#[test]
fn pressure_is_the_cgroups_before_the_machines() {
    let fake = Fake::new();
    fake.machine(GIB, GIB, 0).v2("/a");
    assert_eq!(fake.now().psi, None);
    let text = |avg: &str| {
        format!("some avg10={avg} avg60=0.00 avg300=0.00 total=17\nfull avg10=0.50 avg60=0 avg300=0 total=5\n")
    };
    fake.put("proc/pressure/memory", &text("9.00"));
    assert_eq!(fake.now().psi.unwrap().scope, PsiScope::Host);
    fake.put("sys/fs/cgroup/a/memory.pressure", &text("1.25"));
    let psi = fake.now().psi.unwrap();
    assert_eq!((psi.scope, psi.some_avg10, psi.full_avg10), (PsiScope::Cgroup, 1.25, 0.5));
    assert_eq!((psi.some_total_us, psi.full_total_us), (17, 5));
    fake.put("sys/fs/cgroup/a/memory.pressure", &text("NaN"));
    assert_eq!(fake.now().psi.unwrap().scope, PsiScope::Host, "nonsense is no measurement");
}

#[test]
fn version_two_tells_its_events_in_one_file() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB).v2("/a");
    fake.put("sys/fs/cgroup/a/memory.max", &format!("{GIB}\n"));
    fake.put("sys/fs/cgroup/a/memory.events", "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n");
    let events = fake.limits().cgroup_events().unwrap();
    assert_eq!((events.oom_kills, events.limit_hits), (1, 7));
}
