//! Leases: several Plimsoll processes of one user agree on how many bytes each may plan, before any of them allocates.
//!
//! Measuring other processes' use is not enough when two servers start at once: both measure an empty machine. So each server writes its
//! *plan* into a private directory, under a lock, and the next server counts plans rather than usage. A lease lives exactly as long as its
//! process holds the lock on its file. The kernel drops that lock when the process ends, however it ends. So no stale lease stays in force,
//! and a reused process id does not matter.
//!
//! Other users are not covered, nor are containers that do not share the directory: they share nothing that can be trusted. Their memory
//! counts once it is used, as `used_by_others`.

use super::Room;
use super::dir::{self, PrivateDir};
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use super::dir::DirError;
pub use super::share::{Holder, Refusal, decide};

/// The longest wait for another process that reads or writes leases; such a process holds the lock for milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(10);
const FILE_BYTES_MAX: u64 = 16 << 10;
const FILES_MAX: usize = 4096;
const LOCK_NAME: &str = "lock";

/// Errors of the lease directory. A refusal is not an error: see [`Answer`].
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The directory is not safe to use.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// Another process holds the directory's lock and does not release it, for instance because it is stopped.
    #[error("another process has held the lease lock in {0} for {wait} seconds", wait = LOCK_WAIT.as_secs())]
    Busy(PathBuf),
    /// A living process holds a lease that cannot be read, so its plan is unknown.
    #[error("{path} belongs to a running process but is not a lease this version can read")]
    Unreadable {
        /// The file.
        path: PathBuf,
    },
    /// Reading or writing failed.
    #[error("leases in {path}: {source}")]
    Io {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The answer to a request for a lease.
#[derive(Debug)]
pub enum Answer {
    /// The lease; it is given back when dropped.
    Granted(Lease),
    /// Too few bytes are left.
    Refused(Refusal),
}

/// The directory of all leases of this user's Plimsolls.
#[derive(Debug)]
pub struct LeaseDir {
    dir: PrivateDir,
}

impl LeaseDir {
    /// Opens the directory that all of this user's processes share: in the user's run-time directory, else in `/tmp`.
    ///
    /// # Errors
    /// [`LeaseError::Dir`] if that directory belongs to another user or is open to others.
    pub fn of_user() -> Result<Self, LeaseError> {
        let user = rustix::process::geteuid().as_raw();
        // The variable can differ between a service and a login shell; the usual place is the same for both.
        let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|p| p.is_absolute());
        let usual = PathBuf::from(format!("/run/user/{user}"));
        for base in named.into_iter().chain([usual]).filter(|base| base.is_dir()) {
            if let Ok(dir) = PrivateDir::open(&base.join("plimsoll")) {
                return Ok(Self { dir });
            }
        }
        Self::at(&Path::new("/tmp").join(format!("plimsoll-{user}")))
    }

    /// A given directory, created with mode 0700 if it does not exist.
    ///
    /// # Errors
    /// [`LeaseError::Dir`] if it is a symbolic link, belongs to another user or is open to others.
    pub fn at(path: &Path) -> Result<Self, LeaseError> {
        Ok(Self { dir: PrivateDir::open(path)? })
    }

    /// Asks for at least `min` and up to `want` bytes, for all memory of this process, in each of its domains.
    ///
    /// `measure` returns the rooms (see [`super::HostNow::rooms`]). It is called with the directory locked, so no lease
    /// is granted between the measurement and the decision. A process with several leases counts the memory that it
    /// holds under the others as used.
    ///
    /// # Errors
    /// [`LeaseError`] if the directory cannot be used; a refusal is an [`Answer`].
    pub fn acquire(self, want: u64, min: u64, measure: impl FnOnce() -> Vec<Room>) -> Result<Answer, LeaseError> {
        let guard = self.lock()?;
        let others = self.holders()?;
        let rooms = measure();
        let bytes = match decide(&rooms, &others, want, min) {
            Ok(bytes) => bytes,
            Err(refusal) => return Ok(Answer::Refused(refusal)),
        };
        let mine = Holder {
            pid: std::process::id(),
            start_ticks: start_ticks(std::process::id()).unwrap_or(0),
            planned: bytes,
            committed: 0,
            domains: rooms.into_iter().filter(|r| r.shared).map(|r| r.domain).collect(),
        };
        let (name, file) = self.claim(&mine).map_err(|e| self.io(e))?;
        drop(guard);
        Ok(Answer::Granted(Lease { dir: self, name, file, mine, others }))
    }

    /// The living leases. Files of dead processes are removed on the way.
    ///
    /// # Errors
    /// [`LeaseError`] if the directory cannot be read, or a living lease cannot be parsed.
    pub fn list(&self) -> Result<Vec<Holder>, LeaseError> {
        let _guard = self.lock()?;
        self.holders()
    }

    /// Locks the whole directory until the file is dropped.
    fn lock(&self) -> Result<File, LeaseError> {
        let deadline = Instant::now() + LOCK_WAIT;
        loop {
            // Opened each time: a clean-up of temporary files may have removed the lock file.
            let file = self.dir.file(LOCK_NAME, true).map_err(|e| self.io(e))?;
            if let Some(file) = self.locked(LOCK_NAME, file).map_err(|e| self.io(e))? {
                return Ok(file);
            }
            if Instant::now() >= deadline {
                return Err(LeaseError::Busy(self.dir.path().to_owned()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The file, opened under `name`, with its lock. None if another process holds the lock, or if the file was
    /// removed.
    fn locked(&self, name: &str, file: File) -> io::Result<Option<File>> {
        match file.try_lock() {
            // A lease's holder removes its file and drops the lock without holding the directory's lock.
            Ok(()) => Ok(self.dir.has(name, &file)?.then_some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Reads all leases; the directory must be locked.
    fn holders(&self) -> Result<Vec<Holder>, LeaseError> {
        let mut holders = Vec::new();
        for name in self.dir.names(FILES_MAX).map_err(|e| self.io(e))? {
            if !name.ends_with(".lease") {
                continue;
            }
            // A link or a pipe can be here, but only this user can have put it here. It is no lease and stays as it is.
            let Ok(mut file) = self.dir.file(&name, false) else {
                continue;
            };
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => {
                    let text = dir::content(&mut file, FILE_BYTES_MAX).unwrap_or_default();
                    let path = self.dir.path().join(&name);
                    holders.push(Holder::parse(&text).ok_or(LeaseError::Unreadable { path })?);
                }
                // The lock is free: its process has ended.
                Ok(()) => self.dir.remove(&name).map_err(|e| self.io(e))?,
                Err(TryLockError::Error(error)) => return Err(self.io(error)),
            }
        }
        Ok(holders)
    }

    /// Writes a new lease file and locks it; the directory must be locked.
    fn claim(&self, mine: &Holder) -> io::Result<(String, File)> {
        for serial in 0..FILES_MAX {
            let name = format!("{}-{}-{serial}.lease", mine.pid, mine.start_ticks);
            let file = self.dir.file(&name, true)?;
            // The same process holds another lease, or has just dropped it, or a namespace reuses the id.
            let Some(mut file) = self.locked(&name, file)? else { continue };
            return match dir::rewrite(&mut file, &mine.text()) {
                Ok(()) => Ok((name, file)),
                Err(error) => self.dir.remove(&name).and(Err(error)),
            };
        }
        Err(io::Error::other(format!("{FILES_MAX} leases of one process")))
    }

    fn io(&self, source: io::Error) -> LeaseError {
        LeaseError::Io { path: self.dir.path().to_owned(), source }
    }
}

/// A granted lease. It ends when it is dropped or when the process ends, whichever comes first.
#[derive(Debug)]
pub struct Lease {
    dir: LeaseDir,
    name: String,
    file: File,
    mine: Holder,
    others: Vec<Holder>,
}

impl Lease {
    /// Asks for part of one limit that every process calls by the same name, without measuring. The sum of all such leases never exceeds
    /// `total_limit`.
    ///
    /// # Errors
    /// As [`LeaseDir::acquire`].
    pub fn acquire(dir: LeaseDir, total_limit: u64, want: u64, min: u64) -> Result<Answer, LeaseError> {
        let room = Room { domain: "machine".to_owned(), shared: true, limit: total_limit, used_by_others: 0 };
        dir.acquire(want, min, || vec![room])
    }

    /// Bytes this process may use in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.mine.planned
    }

    /// The other processes' leases at the time this one was granted.
    #[must_use]
    pub fn others(&self) -> &[Holder] {
        &self.others
    }

    /// Tells the other processes how many bytes of the lease are in use. Call it after memory was touched and before it is given back, so
    /// that other processes never see too little.
    ///
    /// # Errors
    /// [`LeaseError`] if the file cannot be written; the previous number stays in force here.
    pub fn set_committed(&mut self, committed: u64) -> Result<(), LeaseError> {
        self.update(Holder { committed, ..self.mine.clone() })
    }

    /// Gives the bytes back that sizing did not need. A lease never grows: `planned` above [`Lease::bytes`] changes nothing.
    ///
    /// # Errors
    /// [`LeaseError`] if the file cannot be written.
    pub fn shrink_to(&mut self, planned: u64) -> Result<(), LeaseError> {
        let planned = planned.min(self.mine.planned);
        self.update(Holder { planned, ..self.mine.clone() })
    }

    fn update(&mut self, new: Holder) -> Result<(), LeaseError> {
        let _guard = self.dir.lock()?;
        dir::rewrite(&mut self.file, &new.text()).map_err(|e| self.dir.io(e))?;
        self.mine = new;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // If this fails, the kernel still drops the lock with the file, and the next reader removes the file.
        let _ = self.dir.dir.remove(&self.name);
    }
}

/// Returns the start time of a process in clock ticks since boot. It is field 22 of `stat`, counted after the name, which can contain any
/// character.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_is_dropped_while_another_is_claimed_leaves_no_lock_on_a_file_without_a_name() {
        let path = std::env::temp_dir().join(format!("plimsoll-claims-{}", std::process::id()));
        let dir = LeaseDir::at(&path).unwrap();
        let granted = |dir| match Lease::acquire(dir, 100, 10, 10).unwrap() {
            Answer::Granted(lease) => lease,
            Answer::Refused(refusal) => panic!("{refusal}"),
        };
        let first = granted(LeaseDir::at(&path).unwrap());
        // The state of a claim at the time the first lease is dropped.
        let opened = || dir.dir.file(&first.name, true).unwrap();
        assert!(dir.locked(&first.name, opened()).unwrap().is_none(), "it is held");
        let (name, opened) = (first.name.clone(), opened());
        drop(first);
        assert!(dir.locked(&name, opened).unwrap().is_none(), "nobody would ever read what is written there");
        let second = granted(LeaseDir::at(&path).unwrap());
        assert_eq!(dir.list().unwrap().len(), 1);
        drop(second);
        std::fs::remove_dir_all(&path).unwrap();
    }
}
