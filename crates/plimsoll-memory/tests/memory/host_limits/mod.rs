//! The process's memory limits and readings, from simulated `/proc` and `/sys` trees and from the real ones.

mod cgroups;

use plimsoll_memory::host::{
    BudgetError, HostError, HostLimits, HostNow, MemoryBudget, Overcommit, OwnProcess, Root, Space,
};
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A directory that simulates the root of a machine, removed at the end.
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

    /// A machine of `total` bytes, of which `available` are available. This process uses `rss` bytes of anonymous memory.
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
fn rlimits_bind_by_what_they_count() {
    let fake = Fake::new();
    fake.machine(64 * GIB, 60 * GIB, GIB);
    let line = |name: &str, soft: &str| format!("{name:<26}{soft:<21}unlimited            bytes\n");
    let text = line("Max data size", "unlimited")
        + &line("Max locked memory", "8388608")
        + &line("Max open files", "1024")
        + &line("Max address space", &(10 * GIB).to_string());
    fake.put("proc/self/limits", &text);
    // Three more GiB of address space are reserved than resident.
    let status = std::fs::read_to_string(fake.dir.join("proc/self/status")).unwrap();
    fake.put("proc/self/status", &status.replace("VmSize: 1048576 kB", "VmSize: 4194304 kB"));
    let (limits, now) = (fake.limits(), fake.now());
    assert_eq!(limits.effective, 10 * GIB);
    assert_eq!(limits.binding().name, "RLIMIT_AS (ulimit -v)");
    assert_eq!(limits.memlock, Some(8 * MIB), "reported, but no bound on the whole");
    assert_eq!((now.available, now.used_by_others), (6 * GIB, 3 * GIB));

    // Future threads reduce the available memory by their stacks, each with a guard page. Existing threads have theirs already.
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

    /// Whatever the files contain, nothing panics, and the reported numbers are consistent.
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
    // The process itself is in another cgroup, without a limit.
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
    // If the files cannot be read any more, nothing changes.
    assert_eq!(again.again(&Root::at(fake.dir.join("absent"))).effective, GIB);
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
