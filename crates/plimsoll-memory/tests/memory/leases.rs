//! Several servers on one machine: in any order of their starts, they stay inside the limit or are refused.
use plimsoll_memory::host::Room;
use plimsoll_memory::host::lease::{Answer, DirError, Holder, Lease, LeaseDir, LeaseError, decide};
use proptest::prelude::*;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const GIB: u64 = 1 << 30;

struct Temp(PathBuf);

impl Temp {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("plimsoll-lease-{}-{serial}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn leases(&self) -> PathBuf {
        self.0.join("leases")
    }

    fn dir(&self) -> LeaseDir {
        LeaseDir::at(&self.leases()).unwrap()
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn granted(answer: Answer) -> Lease {
    match answer {
        Answer::Granted(lease) => lease,
        Answer::Refused(refusal) => panic!("{refusal}"),
    }
}

fn machine(limit: u64, used_by_others: u64) -> Room {
    Room { domain: "machine".into(), shared: true, limit, used_by_others }
}

#[test]
fn the_second_server_gets_what_the_first_left_or_is_refused_with_numbers() {
    let temp = Temp::new();
    let mut first = granted(Lease::acquire(temp.dir(), 10 * GIB, 8 * GIB, GIB).unwrap());
    assert_eq!((first.bytes(), first.others().len()), (8 * GIB, 0));
    let second = granted(Lease::acquire(temp.dir(), 10 * GIB, 8 * GIB, GIB).unwrap());
    assert_eq!((second.bytes(), second.others().len()), (2 * GIB, 1));
    assert_eq!(second.others()[0].planned, 8 * GIB);
    let Answer::Refused(refusal) = Lease::acquire(temp.dir(), 10 * GIB, 8 * GIB, GIB).unwrap() else {
        panic!("three do not fit")
    };
    assert_eq!((refusal.free, refusal.leased, refusal.holders, refusal.missing), (0, 10 * GIB, 2, GIB));
    assert!(refusal.to_string().contains(&(10 * GIB).to_string()), "{refusal}");
    first.shrink_to(3 * GIB).unwrap();
    first.shrink_to(9 * GIB).unwrap();
    assert_eq!(first.bytes(), 3 * GIB, "a lease never grows");
    assert_eq!(granted(Lease::acquire(temp.dir(), 10 * GIB, u64::MAX, GIB).unwrap()).bytes(), 5 * GIB);
    drop((first, second));
    assert!(temp.dir().list().unwrap().is_empty(), "dropped leases are gone");
}

#[test]
fn committed_bytes_are_not_counted_twice() {
    let temp = Temp::new();
    let mut first = granted(temp.dir().acquire(6 * GIB, GIB, || vec![machine(20 * GIB, 5 * GIB)]).unwrap());
    first.set_committed(4 * GIB).unwrap();
    // 9 GiB are used now: four are the first lease's, five another program's. 20 - 5 - 6 = 9 are left.
    let second = granted(temp.dir().acquire(u64::MAX, GIB, || vec![machine(20 * GIB, 9 * GIB)]).unwrap());
    assert_eq!(second.bytes(), 9 * GIB);
}

#[test]
fn only_shared_domains_count_and_each_for_itself() {
    let temp = Temp::new();
    let room = |domain: &str, shared, limit| Room { domain: domain.into(), shared, limit, used_by_others: 0 };
    let one = vec![room("machine", true, 64), room("cgroup 1:7", true, 40), room("budget", false, 30)];
    let _first = granted(temp.dir().acquire(30, 1, || one).unwrap());
    // Another cgroup: the first lease counts on the machine, but not in this cgroup.
    let two = vec![room("machine", true, 64), room("cgroup 1:8", true, 32), room("budget", false, 33)];
    assert_eq!(granted(temp.dir().acquire(99, 1, || two).unwrap()).bytes(), 32);
    // In the same cgroup the first lease counts.
    let three = vec![room("machine", true, 64), room("cgroup 1:7", true, 40)];
    assert_eq!(granted(temp.dir().acquire(99, 1, || three).unwrap()).bytes(), 10);
}

#[test]
fn a_directory_that_others_could_have_prepared_is_refused() {
    let temp = Temp::new();
    let (real, link) = (temp.0.join("real"), temp.0.join("link"));
    std::fs::create_dir(&real).unwrap();
    std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o700)).unwrap();
    symlink(&real, &link).unwrap();
    assert!(matches!(LeaseDir::at(&link), Err(LeaseError::Dir(DirError::Open { .. }))));
    LeaseDir::at(&real).unwrap();
    std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o770)).unwrap();
    let error = LeaseDir::at(&real).unwrap_err();
    assert!(error.to_string().contains("770"), "{error}");
    std::fs::write(temp.0.join("file"), "").unwrap();
    assert!(matches!(LeaseDir::at(&temp.0.join("file")), Err(LeaseError::Dir(DirError::Open { .. }))));
    assert_eq!(
        std::fs::metadata({
            temp.dir();
            temp.leases()
        })
        .unwrap()
        .permissions()
        .mode()
            & 0o777,
        0o700
    );
}

#[test]
fn links_and_leftovers_hold_nothing() {
    let temp = Temp::new();
    drop(temp.dir());
    let victim = temp.0.join("victim");
    std::fs::write(&victim, "precious").unwrap();
    symlink(&victim, temp.leases().join("1-1-0.lease")).unwrap();
    // A leftover file with the id of a living process (this one), as after a reused process id. No process holds its lock.
    let text =
        format!("plimsoll-lease 1\npid {}\nstart 1\nplanned 999\ncommitted 0\ndomain machine\n", std::process::id());
    std::fs::write(temp.leases().join("2-2-0.lease"), text).unwrap();
    std::fs::write(temp.leases().join("3-3-0.lease"), [0xff, 0xfe, 0]).unwrap();
    std::fs::write(temp.leases().join("notes.txt"), "not ours").unwrap();
    assert_eq!(granted(Lease::acquire(temp.dir(), 10, 10, 10).unwrap()).bytes(), 10);
    assert!(!temp.leases().join("2-2-0.lease").exists() && !temp.leases().join("3-3-0.lease").exists());
    assert!(temp.leases().join("notes.txt").exists());
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
#[cfg(target_os = "linux")]
fn a_link_in_place_of_our_own_lease_is_not_written_through() {
    let temp = Temp::new();
    drop(temp.dir());
    let victim = temp.0.join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    let name = format!("{}-{start}-0.lease", std::process::id());
    symlink(&victim, temp.leases().join(name)).unwrap();
    assert!(matches!(Lease::acquire(temp.dir(), 10, 10, 10), Err(LeaseError::Io { .. })));
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn a_lock_that_was_removed_locks_nothing() {
    let temp = Temp::new();
    temp.dir();
    let path = temp.leases().join("lock");
    let create = || std::fs::File::options().write(true).create(true).truncate(false).open(&path).unwrap();
    let old = create();
    old.lock().unwrap();
    std::thread::scope(|threads| {
        let waits = threads.spawn(|| temp.dir().list().unwrap());
        // The other thread has opened the old file by now, or opens the new one later.
        std::thread::sleep(Duration::from_millis(100));
        std::fs::remove_file(&path).unwrap();
        let new = create();
        new.lock().unwrap();
        drop(old);
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waits.is_finished(), "two hold the directory");
        drop(new);
        assert_eq!(waits.join().unwrap(), []);
    });
}

#[test]
fn a_living_lease_that_cannot_be_read_stops_the_start() {
    let temp = Temp::new();
    drop(temp.dir());
    let path = temp.leases().join("4-4-0.lease");
    for text in
        ["plimsoll-lease 9\npid 1\nstart 1\nplanned 1\ncommitted 1\n", "plimsoll-lease 1\npid 1\nplanned -5\n", ""]
    {
        std::fs::write(&path, text).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        file.lock().unwrap();
        let error = Lease::acquire(temp.dir(), 10, 10, 1).unwrap_err();
        assert!(matches!(&error, LeaseError::Unreadable { path: p } if *p == path), "{error}");
    }
}

#[test]
fn threads_that_start_together_share_the_limit() {
    let temp = Temp::new();
    let barrier = std::sync::Barrier::new(12);
    let bytes: Vec<u64> = std::thread::scope(|scope| {
        let start = |i: u64| {
            let (temp, barrier) = (&temp, &barrier);
            scope.spawn(move || {
                barrier.wait();
                std::thread::sleep(Duration::from_micros(i * 137 % 900));
                let answer = Lease::acquire(temp.dir(), 100, 30, 15).unwrap();
                // Leases are held until every thread has an answer.
                barrier.wait();
                if let Answer::Granted(lease) = &answer { lease.bytes() } else { 0 }
            })
        };
        let threads: Vec<_> = (0..12).map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(bytes.iter().sum::<u64>(), 90, "three times 30; the last 10 are below anybody's minimum: {bytes:?}");
}

/// Not a separate test: the process that the next test starts several times.
#[test]
fn child_process() {
    let Some(dir) = std::env::var_os("PLIMSOLL_TEST_LEASE_DIR") else {
        return;
    };
    let answer = Lease::acquire(LeaseDir::at(Path::new(&dir)).unwrap(), 100, 30, 15).unwrap();
    let bytes = if let Answer::Granted(lease) = &answer { lease.bytes() } else { 0 };
    println!("\ngranted {bytes}");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn spawn(dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["leases::child_process", "--exact", "--nocapture"])
        .env("PLIMSOLL_TEST_LEASE_DIR", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn granted_to(child: &mut Child) -> u64 {
    // Borrowed, so that the pipe stays open for the child's last output.
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let line = lines.map(Result::unwrap).find(|line| line.starts_with("granted ")).expect("the child answers");
    line["granted ".len()..].parse().unwrap()
}

#[test]
fn processes_that_start_together_share_the_limit_and_the_dead_hold_nothing() {
    let temp = Temp::new();
    let mut children: Vec<Child> = (0..5).map(|_| spawn(&temp.leases())).collect();
    let bytes: Vec<u64> = children.iter_mut().map(granted_to).collect();
    assert_eq!(bytes.iter().sum::<u64>(), 90, "{bytes:?}");
    let holders = temp.dir().list().unwrap();
    assert_eq!(holders.len(), 3);
    assert!(holders.iter().all(|h| h.start_ticks > 0 || !cfg!(target_os = "linux")));
    // Killed without a chance to clean up.
    let victim = bytes.iter().position(|&b| b > 0).unwrap();
    children[victim].kill().unwrap();
    children[victim].wait().unwrap();
    assert_eq!(granted(Lease::acquire(temp.dir(), 100, 99, 40).unwrap()).bytes(), 40);
    for child in &mut children {
        drop(child.stdin.take());
        child.wait().unwrap();
    }
    assert!(temp.dir().list().unwrap().is_empty());
}

/// A small random generator with a fixed sequence for each seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

struct Server {
    starts: u64,
    dies: u64,
    want: u64,
    min: u64,
    /// Bytes of its lease.
    planned: Option<u64>,
    /// Bytes that the server uses.
    used: u64,
    /// Used bytes in its lease, which lag behind `used`.
    told: u64,
}

/// Runs one machine for 400 ticks and returns the highest usage. `with_leases` off: servers only measure.
fn simulate(seed: u64, with_leases: bool) -> (u64, u64) {
    let mut dice = Dice(seed ^ 0x9e37_79b9_7f4a_7c15);
    let limit = 1000 + dice.roll(1000);
    let strangers = dice.roll(300);
    let mut servers: Vec<Server> = (0..2 + dice.roll(5))
        .map(|_| {
            let starts = dice.roll(60);
            let dies = if dice.roll(3) == 0 { starts + dice.roll(200) } else { u64::MAX };
            Server {
                starts,
                dies,
                want: 100 + dice.roll(900),
                min: 50 + dice.roll(100),
                planned: None,
                used: 0,
                told: 0,
            }
        })
        .collect();
    let mut peak = 0;
    for tick in 0..400 {
        for i in 0..servers.len() {
            if servers[i].starts == tick {
                let others: Vec<Holder> = (0..servers.len())
                    .filter(|&j| j != i && with_leases)
                    .filter_map(|j| {
                        let planned = servers[j].planned?;
                        let domains = vec!["machine".to_owned()];
                        Some(Holder { pid: j as u32, start_ticks: 0, planned, committed: servers[j].told, domains })
                    })
                    .collect();
                let measured = strangers + servers.iter().map(|s| s.used).sum::<u64>();
                let room = machine(limit, measured);
                servers[i].planned = decide(&[room], &others, servers[i].want, servers[i].min).ok();
            }
            let server = &mut servers[i];
            if server.dies == tick {
                (server.planned, server.used, server.told) = (None, 0, 0);
            }
            if let Some(planned) = server.planned {
                server.used = planned.min(server.used + dice.roll(40));
                if dice.roll(4) == 0 {
                    server.told = server.used;
                }
            }
        }
        peak = peak.max(strangers + servers.iter().map(|s| s.used).sum::<u64>());
    }
    (peak, limit)
}

#[test]
fn a_thousand_jittered_starts_stay_inside_the_limit() {
    let mut crossed_without = 0;
    for seed in 0..1000 {
        let (peak, limit) = simulate(seed, true);
        assert!(peak <= limit, "seed {seed}: {peak} of {limit}");
        let (peak, limit) = simulate(seed, false);
        crossed_without += u32::from(peak > limit);
    }
    assert!(crossed_without > 100, "measuring alone must fail often, or this test proves nothing: {crossed_without}");
}

proptest! {
    /// A granted lease fits beside all plans and other programs, and is at least the minimum. A refusal's numbers add up.
    #[test]
    fn grants_fit(
        limit in 0u64..10_000, used in 0u64..10_000, want in 0u64..10_000, min in 0u64..3_000,
        holders in prop::collection::vec((0u64..2_000, 0u64..2_000), 0..5),
    ) {
        let holder = |&(planned, committed): &(u64, u64)| Holder {
            pid: 1, start_ticks: 1, planned, committed, domains: vec!["machine".into()],
        };
        let others: Vec<Holder> = holders.iter().map(holder).collect();
        let leased: u64 = others.iter().map(|h| h.planned.max(h.committed)).sum();
        let strangers = used.saturating_sub(others.iter().map(|h| h.committed).sum());
        match decide(&[machine(limit, used)], &others, want, min) {
            Ok(bytes) => {
                prop_assert!(bytes >= min && bytes <= want.max(min));
                prop_assert!(bytes + leased + strangers <= limit || bytes == 0);
            }
            Err(refusal) => {
                prop_assert_eq!(refusal.free + refusal.missing, min);
                prop_assert!(refusal.free < min);
                prop_assert_eq!(refusal.free, limit.saturating_sub(leased + strangers));
            }
        }
    }
}
