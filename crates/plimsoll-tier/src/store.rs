//! The directory: blobs under their names, a lock, a random seed, the count of the day's bytes.
//!
//! ```text
//! DIR/lock          locked while a process uses the directory
//! DIR/seed          32 random bytes that names begin from, so that a name says nothing about its content
//! DIR/day           bytes written today
//! DIR/key           what tells whether a key is the one that the blobs are encrypted with, if they are
//! DIR/names/        saved names
//! DIR/blobs/xy/     blobs whose ninth byte of the name is 0xxy
//! ```
//!
//! A blob is written under a temporary name and renamed, so that a process killed at any byte leaves a temporary file at most. The next
//! [`Store::open`] removes it. Files are not synced: a blob that a power cut loses or truncates is found by its checksum.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use crate::blob;
use crate::budget::{DayBudget, now};
use crate::cipher::{Cipher, Key};
use crate::dir::{
    BLOBS, DirLock, OpenError, Saved, failed, mark_of, path_of, read_mark, read_seed, shard_of, write_mark,
};
use crate::files::Files;
use crate::index::Index;
use crate::stats::{Counts, Miss, Refused};
use crate::{Name, kind_of};

/// A used file is touched when its last touch is at least this many seconds old.
const TOUCH_SECONDS: u64 = 60;

/// A blob is removed when the system refused to read it this many times in a row.
const FAILURES_MAX: u8 = 3;
/// The most files that are tried, to find a removable one when a blob needs room.
const REMOVALS_MAX: usize = 4;

/// The bounds of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of the disk that its blobs take.
    pub bytes: u64,
    /// The most blobs.
    pub entries: usize,
    /// The most bytes that may be written in a day (UTC); `None`: no limit.
    pub write_bytes_per_day: Option<u64>,
}

/// The encryption of a directory's blobs.
#[derive(Clone, Copy, Debug)]
pub enum Access<'a> {
    /// Without encryption.
    Plain,
    /// Encrypted with this key.
    Key(&'a Key),
    /// Either encryption, for upkeep: blobs can be listed, checked and removed, but not read.
    Upkeep,
}

/// The result of writing a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It was written.
    Written,
    /// It was in the store already.
    Known,
    /// It was not written.
    Refused(Refused),
}

/// A directory of blobs.
pub struct Store {
    pub(crate) dir: PathBuf,
    pub(crate) files: Box<dyn Files>,
    pub(crate) limits: Limits,
    pub(crate) index: Mutex<Index>,
    day: Mutex<DayBudget>,
    seed: [u8; 32],
    pub(crate) cipher: Option<Cipher>,
    /// Bytes of files that could not be removed.
    pub(crate) stuck: AtomicU64,
    /// Bytes of files that are no blobs: saved names.
    pub(crate) outside: AtomicU64,
    pub(crate) saved: Mutex<Vec<Saved>>,
    pub(crate) counts: Counts,
    /// The directory's lock, held as long as the store lives.
    _lock: DirLock,
}

pub(crate) fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Opens a directory, and creates it if it does not exist. Finds its blobs and removes the coldest ones beyond the limits.
    ///
    /// # Errors
    /// [`OpenError`] if it is in use, open to other users, or not writable, or if its blobs are encrypted.
    pub fn open(dir: &Path, limits: Limits, files: Box<dyn Files>) -> Result<Self, OpenError> {
        Self::open_with(dir, limits, files, Access::Plain)
    }

    /// The same for blobs that can be encrypted. A directory without blobs accepts any key.
    ///
    /// # Errors
    /// As [`Self::open`], and [`OpenError::OtherKey`].
    pub fn open_with(dir: &Path, limits: Limits, files: Box<dyn Files>, access: Access<'_>) -> Result<Self, OpenError> {
        let lock = DirLock::take(dir, &*files)?;
        let blobs = dir.join(BLOBS);
        files.make_dir(&blobs).map_err(failed("create", &blobs))?;
        let seed = read_seed(&*files, dir).map_err(failed("write", &dir.join("seed")))?;
        let cipher = match access {
            Access::Key(key) => Some(Cipher::new(key, &seed)),
            Access::Plain | Access::Upkeep => None,
        };
        if !matches!(access, Access::Upkeep) {
            Self::check_key(dir, &*files, cipher.as_ref())?;
        }
        let day = DayBudget::open(&*files, dir, limits.write_bytes_per_day, now());
        let store = Self {
            dir: dir.to_owned(),
            files,
            limits,
            index: Mutex::new(Index::new(limits.entries)),
            day: Mutex::new(day),
            seed,
            cipher,
            stuck: AtomicU64::new(0),
            outside: AtomicU64::new(0),
            saved: Mutex::new(Vec::new()),
            counts: Counts::default(),
            _lock: lock,
        };
        let pinned = store.find_saved();
        store.scan();
        pinned.iter().for_each(|name| _ = store.pin(name, None));
        Ok(store)
    }

    /// Compares a directory's mark with the mark of a key. A directory without blobs gets the key's mark.
    fn check_key(dir: &Path, files: &dyn Files, cipher: Option<&Cipher>) -> Result<(), OpenError> {
        let failed = |what, error| OpenError::Io { what, path: mark_of(dir), error };
        let own = cipher.map(Cipher::mark);
        let mark = read_mark(files, dir).map_err(|error| failed("read", error))?;
        if mark == own {
            return Ok(());
        }
        let mut blobs = 0;
        Self::each(dir, files, |_, _, _| blobs += 1);
        match (mark, own) {
            (_, own) if blobs == 0 => write_mark(files, dir, own.as_ref()).map_err(|error| failed("write", error)),
            (_, None) => Err(OpenError::NeedsKey(dir.to_owned())),
            (None, _) => Err(OpenError::OtherKey { dir: dir.to_owned(), how: "not encrypted" }),
            (Some(_), _) => Err(OpenError::OtherKey { dir: dir.to_owned(), how: "encrypted with another key" }),
        }
    }

    /// The name of a blob's file.
    pub(crate) fn stored(&self, name: &Name) -> Name {
        self.cipher.as_ref().map_or(*name, |cipher| cipher.name(name))
    }

    /// Whether no process uses a directory.
    pub fn is_free(dir: &Path) -> bool {
        File::open(dir.join("lock")).is_ok_and(|lock| lock.try_lock().is_ok())
    }

    /// Random bytes that belong to the directory.
    pub fn seed(&self) -> &[u8; 32] {
        &self.seed
    }

    /// Returns the limits of the store.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The most bytes of blobs that can be pinned: a quarter of the limit.
    pub fn pinned_bytes_max(&self) -> u64 {
        self.limits.bytes / 4
    }

    /// Returns the counters of the store.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Whether the store has a blob. This takes one lookup in a table; with a key also a hash of the name.
    pub fn contains(&self, name: &Name) -> bool {
        held(&self.index).contains(&self.stored(name))
    }

    /// The same for a blob that is needed now. It counts as used, whether it is read from disk or found in memory.
    pub fn touch(&self, name: &Name) -> bool {
        held(&self.index).warm(&self.stored(name)).is_some()
    }

    /// Pins a blob for this many minutes, or until it is removed, so that other blobs are removed before it. False if there is no such
    /// blob, or if more than a quarter of the store would be pinned.
    pub fn pin(&self, name: &Name, minutes: Option<u32>) -> bool {
        let (name, mut index) = (self.stored(name), held(&self.index));
        index.advance((now() / 60) as u32);
        let pinned = index.pin(&name, minutes, self.pinned_bytes_max());
        self.counts.pinned_bytes.store(index.pinned_bytes(), Relaxed);
        pinned
    }

    /// Ends the pin of a blob.
    pub fn unpin(&self, name: &Name) {
        let (name, mut index) = (self.stored(name), held(&self.index));
        index.unpin(&name);
        self.counts.pinned_bytes.store(index.pinned_bytes(), Relaxed);
    }

    /// Whether the store has a blob and it is pinned.
    pub fn is_pinned(&self, name: &Name) -> bool {
        held(&self.index).pinned_bytes_of(&self.stored(name)) > 0
    }

    /// Bytes of the disk that a blob with a payload of this size takes.
    pub fn disk_bytes(&self, payload: usize) -> u64 {
        blob::disk_bytes(payload, self.cipher.is_some())
    }

    /// Writes a blob unless the store has it.
    pub fn put(&self, name: &Name, payload: &[u8]) -> Put {
        self.put_in_place(name, &mut payload.to_vec())
    }

    /// The same without a copy. The content of `payload` is unspecified afterwards.
    pub fn put_in_place(&self, name: &Name, payload: &mut [u8]) -> Put {
        let name = &self.stored(name);
        if held(&self.index).contains(name) {
            return Put::Known;
        }
        let bytes = self.disk_bytes(payload.len());
        if bytes > self.limits.bytes {
            return self.refuse(Refused::TooLarge, &"it is larger than the bound of the cache on disk");
        }
        if !self.may_write(bytes) {
            return self.refuse(Refused::DayLimit, &"the bytes of the day are written");
        }
        if !self.make_room(bytes) {
            return self.refuse(Refused::Stuck, &"files that cannot be removed take the room");
        }
        let began = Instant::now();
        let written = self.write(&self.path(name), name, payload);
        self.count_written(bytes);
        if let Err(error) = written {
            return self.refuse(Refused::Failed, &error);
        }
        Counts::rate(&self.counts.write_rate, bytes, began.elapsed());
        held(&self.index).insert(name, bytes, now());
        self.counts.written.fetch_add(1, Relaxed);
        self.counts.payload_bytes.fetch_add(payload.len() as u64, Relaxed);
        self.refresh();
        Put::Written
    }

    /// Whether the day's limit allows this many more bytes.
    pub(crate) fn may_write(&self, bytes: u64) -> bool {
        held(&self.day).allows(bytes, now())
    }

    /// Counts bytes that were written, or that a failed write may have written.
    pub(crate) fn count_written(&self, bytes: u64) {
        held(&self.day).count(bytes, &*self.files);
        self.counts.written_bytes.fetch_add(bytes, Relaxed);
    }

    /// Reads a blob of exactly this many bytes.
    ///
    /// # Errors
    /// [`Miss`]; the content of `payload` is then unspecified. A damaged blob is removed, and so is a blob that the system refused to read
    /// several times in a row.
    pub fn get(&self, name: &Name, payload: &mut [u8]) -> Result<(), Miss> {
        let name = &self.stored(name);
        let Some(touched) = held(&self.index).warm(name) else {
            self.counts.missed(name, Miss::Absent, &"");
            return Err(Miss::Absent);
        };
        let (path, began) = (self.path(name), Instant::now());
        if let Err((miss, error)) = self.read(name, &path, self.cipher.is_some(), payload) {
            // The system can be at fault rather than the file: descriptors run out, or a network disk is away for a moment.
            let keep = miss == Miss::Failed && held(&self.index).was_read(name, false) < FAILURES_MAX;
            if !keep {
                held(&self.index).remove(name);
                if miss != Miss::Gone {
                    self.discard(&path, self.disk_bytes(payload.len()));
                }
                self.refresh();
            }
            self.counts.missed(name, miss, &format_args!("{}: {error}", path.display()));
            return Err(miss);
        }
        Counts::rate(&self.counts.read_rate, payload.len() as u64, began.elapsed());
        self.counts.kinds[kind_of(name)].hits.fetch_add(1, Relaxed);
        self.counts.hit_bytes.fetch_add(payload.len() as u64, Relaxed);
        held(&self.index).was_read(name, true);
        let time = now();
        if time.saturating_sub(touched) >= TOUCH_SECONDS && self.files.touch(&path, SystemTime::now()).is_ok() {
            held(&self.index).touched(name, time);
        }
        Ok(())
    }

    /// Saves the day's count for a restart.
    pub fn save(&self) {
        held(&self.day).save(&*self.files);
    }

    /// Removes the coldest blobs until this many more bytes fit. False if files that cannot be removed leave too little room; these stay in
    /// the index.
    pub(crate) fn make_room(&self, bytes: u64) -> bool {
        let mut refused = 0;
        while refused < REMOVALS_MAX {
            let stuck = self.unindexed();
            let mut index = held(&self.index);
            if !index.is_full() && index.bytes() + stuck + bytes <= self.limits.bytes {
                return true;
            }
            index.advance((now() / 60) as u32);
            let Some(name) = index.coldest() else { return false };
            index.warm(&name);
            drop(index);
            if self.remove_file(&self.path(&name)) {
                held(&self.index).remove(&name);
                self.counts.collected.fetch_add(1, Relaxed);
            } else {
                refused += 1;
            }
        }
        false
    }

    /// Bytes of the disk of files that are not in the index.
    fn unindexed(&self) -> u64 {
        self.stuck.load(Relaxed) + self.outside.load(Relaxed)
    }

    /// Removes a file. If that fails, its bytes still count as taken.
    pub(crate) fn discard(&self, path: &Path, bytes: u64) {
        if !self.remove_file(path) {
            self.stuck.fetch_add(bytes, Relaxed);
        }
    }

    /// Removes a file. Returns whether it is gone.
    pub(crate) fn remove_file(&self, path: &Path) -> bool {
        self.files.remove(path).err().is_none_or(|error| error.kind() == io::ErrorKind::NotFound)
    }

    pub(crate) fn refresh(&self) {
        let index = held(&self.index);
        self.counts.blobs.store(index.len() as u64, Relaxed);
        self.counts.pinned_bytes.store(index.pinned_bytes(), Relaxed);
        self.counts.bytes.store(index.bytes() + self.unindexed(), Relaxed);
        for (counts, sum) in self.counts.kinds.iter().zip(index.kinds()) {
            counts.blobs.store(sum.blobs, Relaxed);
            counts.bytes.store(sum.bytes, Relaxed);
        }
    }

    fn refuse(&self, refused: Refused, why: &dyn std::fmt::Display) -> Put {
        self.counts.refuse(refused, why);
        Put::Refused(refused)
    }

    pub(crate) fn shard(&self, shard: u8) -> PathBuf {
        shard_of(&self.dir, shard)
    }

    pub(crate) fn path(&self, name: &Name) -> PathBuf {
        path_of(&self.dir, name)
    }
}
