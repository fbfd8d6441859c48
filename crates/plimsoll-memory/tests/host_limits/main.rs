//! What the machine lets the process have, read from made-up `/proc` and `/sys` trees, and from the real ones.

use plimsoll_memory::host::{
    BudgetError, HostError, HostLimits, HostNow, MemoryBudget, Overcommit, OwnProcess, PsiScope, Root, Space,
};
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A directory that plays the root of a machine, removed at the end.
struct Fake {
    dir: PathBuf,
}

impl Fake {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("plimsoll-host-{}-{serial}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self { dir }
    }

    fn put(&self, path: &str, text: &str) -> &Self {
        let path = self.dir.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    /// A machine of `total` bytes, `available` of them, with this process using `rss` of anonymous memory.
    fn machine(&self, total: u64, available: u64, rss: u64) -> &Self {
        let (total, available, rss) = (total / 1024, available / 1024, rss / 1024);
        self.put("proc/meminfo", &format!("MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nSwapTotal: 2048 kB\nSwapFree: 1024 kB\n"));
        self.put("proc/self/status", &format!("Name: x\nVmHWM: 99 kB\nVmSize: {rss} kB\nVmData: {rss} kB\nRssAnon: {rss} kB\nRssFile: 7 kB\nRssShmem: 0 kB\nVmSwap: 0 kB\nThreads: 3\nCpus_allowed_list: 0-7\n"))
    }

    fn v2(&self, path: &str) -> &Self {
        self.put("proc/self/cgroup", &format!("0::{path}\n"));
        self.put(
            "proc/self/mountinfo",
            "22 1 0:5 / /proc rw - proc proc rw\n30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        )
    }

    fn v1(&self, path: &str, top: &str) -> &Self {
        self.put("proc/self/cgroup", &format!("11:cpu,cpuacct:{path}\n4:memory:{path}\n1:name=systemd:/\n"));
        self.put(
            "proc/self/mountinfo",
            &format!(
                "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n36 31 0:33 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            ),
        )
    }

    fn limits(&self) -> HostLimits {
        HostLimits::read(&Root::at(&self.dir), None).unwrap()
    }

    fn now(&self) -> HostNow {
        HostNow::read(&Root::at(&self.dir), &self.limits())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

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
    // 6 used, 3 of it cache, 1 of that not clean: 4 count. One of these four is ours.
    assert_eq!(now.available, 4 * GIB);
    assert_eq!(now.used_by_others, 3 * GIB);
    assert_eq!(now.own.rss_anon, GIB);
}

#[test]
fn the_tightest_room_decides_even_outside_the_tightest_limit() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 4 * GIB, 0).v2("/a");
    fake.put("sys/fs/cgroup/a/memory.max", &(32 * GIB).to_string()).put("sys/fs/cgroup/a/memory.current", "0");
    let (limits, now) = (fake.limits(), fake.now());
    assert_eq!(limits.effective, 32 * GIB);
    assert_eq!((now.available, now.used_by_others), (4 * GIB, 28 * GIB));
    assert_eq!(now.tightest, "machine");
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
    // Of the effective 9, only 10 - 6 = 4 can be ours.
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
        // A directory outside of the mount, which `..` must not reach.
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
fn rlimits_bind_by_what_they_count() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB);
    let line = |name: &str, soft: &str| format!("{name:<26}{soft:<21}unlimited            bytes\n");
    let text = line("Max data size", "unlimited")
        + &line("Max locked memory", "8388608")
        + &line("Max open files", "1024")
        + &line("Max address space", &(10 * GIB).to_string());
    fake.put("proc/self/limits", &text);
    // Three more GiB of address space are reserved than are resident.
    let status = std::fs::read_to_string(fake.dir.join("proc/self/status")).unwrap();
    fake.put("proc/self/status", &status.replace("VmSize: 1048576 kB", "VmSize: 4194304 kB"));
    let (limits, now) = (fake.limits(), fake.now());
    assert_eq!(limits.effective, 10 * GIB);
    assert_eq!(limits.binding().name, "RLIMIT_AS (ulimit -v)");
    assert_eq!(limits.memlock, Some(8 * MIB), "reported, but no bound on the whole");
    assert_eq!((now.available, now.used_by_others), (6 * GIB, 3 * GIB));

    // Threads that are to come take their stacks off it, each with a guard page; those that are there have taken them.
    let stack = 2 * MIB + 4096;
    let limits = limits.with_threads(10);
    let now = || HostNow::read(&Root::at(&fake.dir), &limits);
    assert_eq!((now().available, now().used_by_others), (6 * GIB - 10 * stack, 3 * GIB + 10 * stack));
    fake.put(
        "proc/self/maps",
        "7f1000000000-7f1000001000 ---p 00000000 00:00 0 \n7f1000001000-7f1000201000 rw-p 00000000 00:00 0 \n\
         7f2000000000-7f2000001000 ---p 00000000 00:00 0 \n7f2000001000-7f2000201000 rw-p 00000000 00:00 0 \n\
         7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]\n",
    );
    fake.put("proc/self/pagemap", "");
    assert_eq!(now().available, 6 * GIB - 8 * stack);
    assert_eq!(limits.again(&Root::at(&fake.dir)).stacks, limits.stacks, "a limit that is read again is for as many");
}

#[test]
fn a_budget_bounds_this_process_and_not_its_neighbours() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 44 * GIB, GIB);
    let root = Root::at(&fake.dir);
    let read = |text: &str| HostLimits::read(&root, Some(text.parse().unwrap())).unwrap();
    let limits = read("4GiB");
    assert_eq!((limits.effective, limits.binding().name.as_str()), (4 * GIB, "--memory-budget"));
    let now = HostNow::read(&root, &limits);
    assert_eq!((now.available, now.used_by_others), (3 * GIB, 0));
    assert_eq!(read("50%").effective, 32 * GIB);
    assert_eq!(read("1T").effective, 64 * GIB, "a budget never adds");
}

#[test]
fn budgets_are_read_as_people_write_them() {
    for (text, bytes) in [
        ("4GiB", 4 * GIB),
        ("500M", 500 * MIB),
        ("1.5g", GIB + GIB / 2),
        (" 2 TiB ", 2048 * GIB),
        ("1GB", 1_000_000_000),
        ("12345", 12345),
        ("0.000000001G", 1),
        (".5k", 512),
        ("18446744073709551615", u64::MAX),
    ] {
        assert_eq!(text.parse::<MemoryBudget>(), Ok(MemoryBudget::Bytes(bytes)), "{text}");
    }
    for (text, ppm) in [("80%", 800_000), ("100%", 1_000_000), ("0.5 %", 5_000)] {
        assert_eq!(text.parse::<MemoryBudget>(), Ok(MemoryBudget::Share(ppm)), "{text}");
    }
    for text in ["", "G", "4X", "-4G", "4 4G", "1.2.3G", "1e9", "NaN", "inf", "1.0000000001G", "٤G"] {
        let error = text.parse::<MemoryBudget>().unwrap_err();
        assert!(matches!(error, BudgetError::Syntax(_)), "{text}: {error}");
        assert!(error.to_string().contains("such as 4GiB, 500M, 1.5g or 80%"), "{error}");
    }
    for text in ["0", "0%", "100.1%", "0.1", "99999999999999999999%"] {
        assert!(matches!(text.parse::<MemoryBudget>(), Err(BudgetError::Range(_))), "{text}");
    }
    for text in ["18446744073709551616", "99999999999T"] {
        assert!(matches!(text.parse::<MemoryBudget>(), Err(BudgetError::TooLarge(_))), "{text}");
    }
    assert_eq!("12.50%".parse::<MemoryBudget>().unwrap().to_string(), "12.5%");
    assert_eq!(MemoryBudget::Share(333_333).bytes(u64::MAX), 6_148_908_542_321_825_968);
}

#[test]
fn nothing_known_is_an_error_and_not_a_guess() {
    let fake = Fake::new();
    let root = Root::at(&fake.dir);
    assert!(matches!(HostLimits::read(&root, None), Err(HostError::NoLimit)));
    let share = HostLimits::read(&root, Some(MemoryBudget::Share(500_000))).unwrap_err();
    assert!(share.to_string().contains("50%"), "{share}");
    assert_eq!(HostLimits::read(&root, Some(MemoryBudget::Bytes(7))).unwrap().effective, 7);
}

#[test]
fn swap_is_reported_and_never_counted() {
    let fake = Fake::new();
    fake.machine(GIB, GIB, 0).v2("/a");
    fake.put("sys/fs/cgroup/a/memory.swap.max", &(5 * GIB).to_string()).put("sys/fs/cgroup/memory.swap.max", "max");
    let limits = fake.limits();
    assert_eq!(limits.effective, GIB);
    assert_eq!((limits.swap_total, limits.swap_limit), (Some(2 * MIB), Some(5 * GIB)));
}

#[test]
fn cores_are_the_lesser_of_affinity_and_quota() {
    let fake = Fake::new();
    fake.machine(GIB, GIB, 0).v2("/a/b");
    assert_eq!((fake.limits().cpus.allowed, fake.limits().cpus.usable), (8, 8));
    fake.put("sys/fs/cgroup/a/b/cpu.max", "max 100000\n").put("sys/fs/cgroup/a/cpu.max", "250000 100000\n");
    let cpus = fake.limits().cpus;
    assert_eq!((cpus.quota_millicores, cpus.usable), (Some(2500), 2));
    fake.put("sys/fs/cgroup/a/b/cpu.max", "50000 100000\n");
    assert_eq!(fake.limits().cpus.usable, 1, "half a core still needs a thread");

    let fake = Fake::new();
    fake.machine(GIB, GIB, 0).v1("/x", "/");
    fake.put("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "300000\n");
    fake.put("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n");
    fake.put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    fake.put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    assert_eq!(fake.limits().cpus.usable, 3);

    for list in ["0-18446744073709551615", "5-2", "x", ""] {
        fake.put("proc/self/status", &format!("Cpus_allowed_list: {list}\n"));
        assert_eq!(fake.limits().cpus.usable, 1, "{list}");
    }
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
fn shared_memory_of_a_container_is_seen() {
    let fake = Fake::new();
    fake.machine(GIB, GIB, 0);
    let root = Root::at(&fake.dir).with_shm(Space { total: 64 * MIB, free: MIB });
    assert_eq!(HostLimits::read(&root, None).unwrap().shm, Some(Space { total: 64 * MIB, free: MIB }));
    assert_eq!(fake.limits().shm, None, "a made-up root does not show the real one's");
}

#[test]
fn old_kernels_without_a_split_count_all_resident_memory() {
    let fake = Fake::new();
    fake.put("proc/self/status", "VmRSS: 100 kB\nVmSwap: 3 kB\nThreads: 12\n");
    fake.put("proc/self/fd/0", "").put("proc/self/fd/1", "");
    let own = OwnProcess::read(&Root::at(&fake.dir));
    assert_eq!((own.rss_anon, own.vm_swap, own.threads, own.fds), (100 * 1024, 3 * 1024, 12, 2));
    assert_eq!(own.leak_gauge(), 103 * 1024);
}

#[test]
#[cfg(target_os = "linux")]
fn this_machine_is_read_and_follows_what_we_allocate() {
    let root = Root::system();
    let limits = HostLimits::read(&root, None).unwrap();
    assert!(limits.effective > 0 && limits.effective <= limits.mem_total.unwrap());
    assert!(limits.cpus.usable >= 1 && limits.cpus.usable <= limits.cpus.allowed);
    let before = HostNow::read(&root, &limits);
    let mut block = vec![0u8; 64 << 20];
    for page in block.chunks_mut(4096) {
        page[0] = 1;
    }
    let after = HostNow::read(&root, &limits);
    std::hint::black_box(&block);
    assert!(after.own.rss_anon >= before.own.rss_anon + (60 << 20));
    assert!(after.own.threads >= 1 && after.own.fds >= 1);
    assert!(after.available <= limits.effective && after.used_by_others <= limits.effective);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the files say, nothing panics, and what is reported hangs together.
    #[test]
    fn nonsense_in_any_file_is_survived(
        texts in prop::collection::vec("[ -~\n]{0,60}|[0-9]{1,25}|max|-1|memory.max 5|some avg10=1 total=99", 16),
        path in "/[a-z./]{0,6}",
    ) {
        let fake = Fake::new();
        fake.machine(64 * GIB, 60 * GIB, GIB).v2(&path);
        let names = [
            "proc/self/limits", "proc/self/status", "proc/pressure/memory", "sys/fs/cgroup/memory.max",
            "sys/fs/cgroup/memory.high", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat",
            "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.swap.max", "sys/fs/cgroup/memory.pressure",
        ];
        for (name, text) in names.iter().zip(&texts) {
            fake.put(name, text);
        }
        let (limits, now) = (fake.limits(), fake.now());
        prop_assert!(limits.effective <= 64 * GIB);
        prop_assert!(limits.sources.iter().all(|s| s.bytes >= limits.effective));
        prop_assert!(now.used_by_others <= limits.effective);
        fake.put("proc/self/cgroup", &texts[10]).put("proc/self/mountinfo", &texts[11]).put("proc/meminfo", &texts[12]);
        let _ = HostLimits::read(&Root::at(&fake.dir), None).map(|l| HostNow::read(&Root::at(&fake.dir), &l));
    }
}

#[test]
fn another_process_is_read_with_its_own_limits_and_events() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB).v1("/mine", "/");
    fake.put("proc/77/cgroup", "4:memory:/cage\n").put("proc/77/status", "RssAnon: 2048 kB\nThreads: 5\n");
    fake.put("proc/77/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
    fake.put("sys/fs/cgroup/memory/mine/memory.limit_in_bytes", "9223372036854771712\n");
    let cage = "sys/fs/cgroup/memory/cage";
    fake.put(&format!("{cage}/memory.limit_in_bytes"), &format!("{}\n", 10 * MIB));
    fake.put(&format!("{cage}/memory.usage_in_bytes"), &format!("{}\n", 3 * MIB));
    fake.put(&format!("{cage}/memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n");
    fake.put(&format!("{cage}/memory.failcnt"), "41\n");
    let root = Root::at(&fake.dir).of_process(77);
    let limits = HostLimits::read(&root, None).unwrap();
    assert_eq!(limits.effective, 10 * MIB);
    assert_eq!(limits.innermost_limited_cgroup(), Some((fake.dir.join(cage).as_path(), 10 * MIB)));
    let now = HostNow::read(&root, &limits);
    assert_eq!((now.own.rss_anon, now.own.threads, now.available), (2 * MIB, 5, 7 * MIB));
    let events = limits.cgroup_events().unwrap();
    assert_eq!((events.oom_kills, events.limit_hits), (2, 41));
    // The process itself is somewhere else, without a limit of its own.
    assert_eq!(fake.limits().innermost_limited_cgroup(), None);
    assert_eq!(fake.limits().cgroup_events(), None, "its cgroup does not tell");
}

#[test]
fn limits_that_an_operator_moves_are_seen_when_they_are_read_again() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB).v2("/a");
    fake.put("sys/fs/cgroup/a/memory.max", &format!("{}\n", 8 * GIB));
    let root = Root::at(&fake.dir);
    let limits = HostLimits::read(&root, Some(MemoryBudget::Share(500_000))).unwrap();
    assert_eq!(limits.effective, 4 * GIB);
    fake.put("sys/fs/cgroup/a/memory.max", &format!("{}\n", 2 * GIB));
    let again = limits.again(&root);
    assert_eq!(again.effective, GIB, "a share follows");
    // A world that cannot be read any more changes nothing.
    assert_eq!(again.again(&Root::at(fake.dir.join("absent"))).effective, GIB);
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

#[test]
fn only_strict_accounting_bounds_what_may_be_reserved() {
    let fake = Fake::new();
    let room = || Overcommit::read(&Root::at(&fake.dir)).room();
    assert_eq!(room(), None, "a system without the files");
    fake.put("proc/meminfo", "MemTotal: 100 kB\nCommitLimit: 64 kB\nCommitted_AS: 24 kB\n");
    for (mode, bytes) in [("0\n", None), ("1\n", None), ("2\n", Some(40 << 10))] {
        fake.put("proc/sys/vm/overcommit_memory", mode);
        assert_eq!(room(), bytes, "mode {mode}");
    }
}
