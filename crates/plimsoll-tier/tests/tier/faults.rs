//! Stores over files that fail. With any fault at any operation, a blob that is read is the one that was written. The disk limit holds, and
//! the next process continues.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, SystemTime};

use plimsoll_tier::{Class, Files, Found, Limits, Miss, OpenError, Put, Refused, Store, System, Tier};

use crate::common::{LIMITS, blob, name, read};

/// The fault at one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The process is killed: half of a write is there, and later operations fail.
    Killed,
    /// The system reports an I/O error, once.
    Error,
    /// The disk is full from here on: writes are cut short.
    Full,
    /// A write is cut short and not reported, as after a power cut.
    Short,
    /// One bit of the written or read bytes is flipped.
    Flip,
    /// The directory is removed.
    Gone,
}

struct Faulty {
    dir: PathBuf,
    fault: Fault,
    at: u64,
    done: Arc<AtomicU64>,
}

impl Faulty {
    /// Counts an operation. Returns whether the fault occurs now, and whether it has occurred before.
    fn strikes(&self) -> (bool, bool) {
        let now = self.done.fetch_add(1, SeqCst);
        if now == self.at && self.fault == Fault::Gone {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
        (now == self.at, now > self.at)
    }

    fn simple(&self, run: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match (self.strikes(), self.fault) {
            ((true, _), Fault::Killed | Fault::Error) => Err(io::Error::other("injected")),
            ((_, true), Fault::Killed) => Err(io::Error::other("dead")),
            _ => run(),
        }
    }
}

impl Files for Faulty {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        self.simple(|| System.make_dir(dir))
    }

    fn list(&self, dir: &Path, each: &mut dyn FnMut(Found)) -> io::Result<()> {
        // A start makes 256 of these calls: they are not counted.
        match self.fault == Fault::Killed && self.done.load(SeqCst) > self.at {
            true => Err(io::Error::other("dead")),
            false => System.list(dir, each),
        }
    }

    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        let whole = parts.concat();
        let half = &whole[..whole.len() / 2];
        match (self.strikes(), self.fault) {
            ((true, _), Fault::Killed) => System.write(path, &[half]).and(Err(io::Error::other("killed"))),
            ((true, _), Fault::Error) => Err(io::Error::other("injected")),
            ((_, true), Fault::Killed) => Err(io::Error::other("dead")),
            ((true, _) | (_, true), Fault::Full) => {
                System.write(path, &[half]).and(Err(io::ErrorKind::StorageFull.into()))
            }
            ((true, _), Fault::Short) => System.write(path, &[half]),
            ((true, _), Fault::Flip) => {
                let mut flipped = whole.clone();
                flipped[whole.len() / 3] ^= 4;
                System.write(path, &[&flipped])
            }
            _ => System.write(path, parts),
        }
    }

    fn read(&self, path: &Path, parts: &mut [&mut [u8]]) -> io::Result<u64> {
        let strikes = self.strikes();
        let bytes = match (strikes, self.fault) {
            ((true, _), Fault::Error | Fault::Killed) => return Err(io::Error::other("injected")),
            ((_, true), Fault::Killed) => return Err(io::Error::other("dead")),
            _ => System.read(path, parts)?,
        };
        if let (true, Fault::Flip, Some(last)) = (strikes.0, self.fault, parts.last_mut()) {
            last.first_mut().into_iter().for_each(|byte| *byte ^= 1);
        }
        Ok(bytes)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.simple(|| System.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.simple(|| System.remove(path))
    }

    fn touch(&self, path: &Path, time: SystemTime) -> io::Result<()> {
        self.simple(|| System.touch(path, time))
    }
}

/// Number of blobs of a process's life.
const BLOBS: u8 = 10;

/// Writes and reads blobs as one process does. Returns the number of hits.
fn life(store: &Store) -> usize {
    let mut hits = 0;
    for n in 0..BLOBS {
        store.put(&name(n), &blob(n));
        hits += usize::from(read(store, n).is_none());
        hits += usize::from(read(store, n / 2).is_none());
    }
    hits
}

/// Returns the bytes of all files under the directory of blobs, in whole blocks, and the number of temporary files.
fn on_disk(dir: &Path) -> (u64, usize) {
    let (mut bytes, mut temporary) = (0, 0);
    for shard in std::fs::read_dir(dir.join("blobs")).into_iter().flatten() {
        for file in std::fs::read_dir(shard.unwrap().path()).unwrap() {
            let file = file.unwrap();
            bytes += file.metadata().unwrap().len().next_multiple_of(4096);
            temporary += usize::from(file.path().extension().is_some());
        }
    }
    (bytes, temporary)
}

fn sweep(fault: Fault) -> u64 {
    let mut met = 0;
    for at in 0.. {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("cache");
        let done = Arc::new(AtomicU64::new(0));
        let files = Faulty { dir: dir.clone(), fault, at, done: Arc::clone(&done) };
        if let Ok(store) = Store::open(&dir, LIMITS, Box::new(files)) {
            life(&store);
            assert!(store.counts().bytes.load(SeqCst) <= LIMITS.bytes, "{fault:?} at {at}");
        }
        // A file that could not be removed is still there and is counted.
        assert!(on_disk(&dir).0 <= LIMITS.bytes, "{fault:?} at {at}: {:?}", on_disk(&dir));
        let store = Store::open(&dir, LIMITS, Box::new(System)).unwrap_or_else(|e| panic!("{fault:?} at {at}: {e}"));
        assert_eq!(on_disk(&dir).1, 0, "{fault:?} at {at}: temporary files stay");
        for n in 0..BLOBS {
            read(&store, n);
        }
        assert!(life(&store) >= usize::from(BLOBS), "{fault:?} at {at}: what is written is not found");
        assert_eq!(store.verify().damaged, 0);
        assert!(on_disk(&dir).0 <= LIMITS.bytes);
        if done.load(SeqCst) <= at {
            break;
        }
        met += 1;
    }
    met
}

#[test]
fn killed_at_any_operation_it_goes_on() {
    assert!(sweep(Fault::Killed) > 40);
}

#[test]
fn an_error_of_any_operation_costs_a_miss() {
    assert!(sweep(Fault::Error) > 40);
}

#[test]
fn a_full_disk_costs_misses() {
    assert!(sweep(Fault::Full) > 10);
}

#[test]
fn short_writes_and_flipped_bits_are_noticed() {
    assert!(sweep(Fault::Short) > 40);
    assert!(sweep(Fault::Flip) > 40);
}

#[test]
fn a_directory_that_goes_away_costs_misses() {
    assert!(sweep(Fault::Gone) > 10);
}

#[test]
fn a_restart_finds_what_was_used_last() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let store = Store::open(&dir, LIMITS, Box::new(System)).unwrap();
    let seed = *store.seed();
    assert!(matches!(Store::open(&dir, LIMITS, Box::new(System)), Err(OpenError::Locked(_))) && !Store::is_free(&dir));
    for n in [0, 3, 6, 9] {
        assert_eq!(store.put(&name(n), &blob(n)), Put::Written);
        assert_eq!(store.put(&name(n), &blob(n)), Put::Known);
    }
    drop(store);
    // The blobs were last used an hour ago; blob 0 was used most recently.
    for (n, age) in [(0, 10), (3, 40), (6, 30), (9, 20)] {
        let shard = dir.join("blobs").join(format!("{:02x}", n % 2));
        let file: String = name(n).iter().map(|byte| format!("{byte:02x}")).collect();
        let used = SystemTime::now() - Duration::from_secs(3600 + age);
        std::fs::File::options().append(true).open(shard.join(file)).unwrap().set_modified(used).unwrap();
    }
    let store = Store::open(&dir, Limits { bytes: 3 * 4096, ..LIMITS }, Box::new(System)).unwrap();
    assert_eq!(store.seed(), &seed);
    assert_eq!([0, 3, 6, 9].map(|n| store.contains(&name(n))), [true, false, true, true], "the coldest went");
    assert_eq!(read(&store, 6), None);
    assert_eq!(store.put(&name(12), &blob(12)), Put::Written);
    assert_eq!([0, 6, 9, 12].map(|n| store.contains(&name(n))), [true, true, false, true], "6 was used");
    let large = vec![1; 4 * 4096];
    assert_eq!(store.put(&name(13), &large), Put::Refused(Refused::TooLarge));
    store.clear(Some([6; 8]));
    assert_eq!([0, 6, 12].map(|n| store.contains(&name(n))), [true, false, true]);
    store.clear(None);
    assert_eq!((on_disk(&dir).0, read(&store, 0)), (0, Some(Miss::Absent)));
}

#[test]
fn the_day_s_bytes_are_a_bound() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let limits = Limits { write_bytes_per_day: Some(2 * 4096), ..LIMITS };
    let store = Store::open(&dir, limits, Box::new(System)).unwrap();
    let put = |store: &Store, n| store.put(&name(n), &blob(n));
    assert_eq!(
        [put(&store, 0), put(&store, 3), put(&store, 6)],
        [Put::Written, Put::Written, Put::Refused(Refused::DayLimit)]
    );
    store.save();
    drop(store);
    let store = Store::open(&dir, limits, Box::new(System)).unwrap();
    assert_eq!((put(&store, 6), read(&store, 3)), (Put::Refused(Refused::DayLimit), None));
}

/// The machine's files; some operations fail while a flag is set.
#[derive(Clone, Default)]
struct Stubborn {
    /// While set, files cannot be removed.
    keeps: Arc<AtomicBool>,
    /// While set, files cannot be read and directories cannot be listed.
    unread: Arc<AtomicBool>,
}

impl Stubborn {
    fn unless(switch: &AtomicBool) -> io::Result<()> {
        if switch.load(SeqCst) { Err(io::Error::from_raw_os_error(24)) } else { Ok(()) }
    }
}

impl Files for Stubborn {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        System.make_dir(dir)
    }
    fn list(&self, dir: &Path, each: &mut dyn FnMut(Found)) -> io::Result<()> {
        Self::unless(&self.unread).and_then(|()| System.list(dir, each))
    }
    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        System.write(path, parts)
    }
    fn read(&self, path: &Path, parts: &mut [&mut [u8]]) -> io::Result<u64> {
        Self::unless(&self.unread).and_then(|()| System.read(path, parts))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        System.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        Self::unless(&self.keeps).and_then(|()| System.remove(path))
    }
    fn touch(&self, path: &Path, time: SystemTime) -> io::Result<()> {
        System.touch(path, time)
    }
}

fn stubborn() -> (tempfile::TempDir, Stubborn, Store) {
    let temp = tempfile::tempdir().unwrap();
    let files = Stubborn::default();
    let store = Store::open(&temp.path().join("cache"), LIMITS, Box::new(files.clone())).unwrap();
    for n in [0, 3, 6, 9, 12] {
        assert_eq!(store.put(&name(n), &blob(n)), Put::Written);
    }
    (temp, files, store)
}

#[test]
fn files_that_cannot_be_removed_stay_in_the_index() {
    let (_temp, files, store) = stubborn();
    files.keeps.store(true, SeqCst);
    for n in 15..30 {
        assert_eq!(store.put(&name(n), &blob(n)), Put::Refused(Refused::Stuck));
    }
    assert_eq!([0, 3, 6, 9, 12].map(|n| read(&store, n)), [None; 5], "all are still found");
    files.keeps.store(false, SeqCst);
    assert_eq!(store.put(&name(15), &blob(15)), Put::Written);
    assert_eq!(store.counts().collected.load(SeqCst), 1);
}

#[test]
fn a_read_that_the_system_refuses_does_not_delete_the_blob() {
    let (_temp, files, store) = stubborn();
    files.unread.store(true, SeqCst);
    assert_eq!([read(&store, 0), read(&store, 0), read(&store, 3)], [Some(Miss::Failed); 3]);
    assert_eq!(store.verify().unreadable, 0, "it has no list of files either");
    files.unread.store(false, SeqCst);
    assert_eq!([read(&store, 0), read(&store, 3)], [None, None]);
    files.unread.store(true, SeqCst);
    assert_eq!(
        [(); 4].map(|()| read(&store, 0)),
        [Some(Miss::Failed), Some(Miss::Failed), Some(Miss::Failed), Some(Miss::Absent)]
    );
    files.unread.store(false, SeqCst);
    assert_eq!((read(&store, 0), store.put(&name(0), &blob(0))), (Some(Miss::Absent), Put::Written));
}

#[test]
fn a_cleared_store_finds_nothing_even_if_its_directories_cannot_be_read() {
    let (temp, files, store) = stubborn();
    files.unread.store(true, SeqCst);
    store.clear(Some([3; 8]));
    assert_eq!([0, 3, 6].map(|n| store.contains(&name(n))), [true, false, true]);
    files.keeps.store(true, SeqCst);
    store.clear(None);
    assert!([0, 6, 9, 12].iter().all(|n| !store.contains(&name(*n))));
    let left = || store.counts().bytes.load(SeqCst);
    assert!(left() > 0, "files that could not be removed count");
    files.unread.store(false, SeqCst);
    files.keeps.store(false, SeqCst);
    store.clear(None);
    assert_eq!((on_disk(&temp.path().join("cache")).0, left()), (0, 0), "the next time they go");
}

#[test]
fn a_store_of_many_blobs_is_cleared_whole() {
    let temp = tempfile::tempdir().unwrap();
    let limits = Limits { bytes: 1 << 30, entries: 2000, write_bytes_per_day: None };
    let store = Store::open(&temp.path().join("cache"), limits, Box::new(System)).unwrap();
    let name = |n: u16| {
        let mut name = [0; 32];
        name[0] = (n % 3) as u8;
        name[8] = (n % 2) as u8;
        name[16..18].copy_from_slice(&n.to_le_bytes());
        name
    };
    (0..1000).for_each(|n| assert_eq!(store.put(&name(n), &[1; 10]), Put::Written));
    store.clear(Some([1, 0, 0, 0, 0, 0, 0, 0]));
    assert!((0..1000).all(|n| store.contains(&name(n)) == (n % 3 != 1)));
    store.clear(None);
    assert_eq!(store.counts().blobs.load(SeqCst), 0);
}

#[cfg(unix)]
#[test]
fn other_users_read_nothing() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let store = Store::open(&dir, LIMITS, Box::new(System)).unwrap();
    store.put(&name(1), &blob(1));
    let file = std::fs::read_dir(dir.join("blobs/01")).unwrap().next().unwrap().unwrap().path();
    assert_eq!([&dir, &dir.join("blobs/01")].map(|path| mode(path)), [0o700; 2]);
    assert_eq!([&file, &dir.join("lock"), &dir.join("seed")].map(|path| mode(path)), [0o600; 3]);
    drop(store);
    std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o750)).unwrap();
    let error = Store::open(&dir, LIMITS, Box::new(System)).err().unwrap();
    assert!(matches!(error, OpenError::Exposed(_)) && error.to_string().contains("chmod 700"), "{error}");
}

#[test]
fn a_tier_hands_out_its_buffers_and_waits_for_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let class = Class { bytes: 3000, writes: 2, reads: 2 };
    let limits = Limits { bytes: 1 << 20, entries: 100, write_bytes_per_day: None };
    let open = || Tier::start(Store::open(&dir, limits, Box::new(System)).unwrap(), &[class]).unwrap();
    let mut tier = open();
    let (mut written, mut refused) = (0, 0);
    while written < 30 {
        let n = written as u8 * 3;
        match tier.write(0, &name(n), |bytes| bytes.copy_from_slice(&blob(n))) {
            true => written += 1,
            false => refused += 1,
        }
    }
    drop(tier);
    println!("{refused} refused");
    let mut tier = open();
    let mut next = 0;
    for n in 0..30_u64 {
        while next < 30 && tier.read(0, next, &name(next as u8 * 3)) {
            next += 1;
        }
        let read = tier.next_read(Duration::from_secs(20)).unwrap();
        assert_eq!((read.ticket, read.outcome, read.bytes()), (n, Ok(()), &blob(n as u8 * 3)[..]), "in order");
        tier.give_back(read);
    }
    tier.clear(None);
    assert!(!tier.contains(&name(3)));
    assert!(tier.read(0, 7, &name(3)));
    let read = tier.next_read(Duration::from_secs(20)).unwrap();
    assert_eq!(read.outcome, Err(Miss::Absent));
    tier.give_back(read);
    assert_eq!((tier.writing(), tier.is_dead()), (0, false));
}
