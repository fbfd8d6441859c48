//! Operations on all blobs of a directory: find, list, check and remove them.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

use crate::blob;
use crate::dir::{parse, shard_of};
use crate::files::{Files, Found};
use crate::stats::Miss;
use crate::store::{Store, held};
use crate::{Name, Tag, tag_of};

/// The result of checking every blob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Blobs that are intact.
    pub whole: u64,
    /// Blobs that are not intact; they were removed.
    pub damaged: u64,
    /// Intact blobs that are encrypted, without a key to decrypt them: their checksums are right.
    pub closed: u64,
    /// Blobs that the system could not read; they stay.
    pub unreadable: u64,
    /// Bytes read.
    pub bytes: u64,
}

impl Store {
    /// Removes every blob, or the blobs of one owner. Afterwards none of these is in the index, even if the disk fails.
    pub fn clear(&self, tag: Option<Tag>) {
        let wanted = |name: &Name| tag.is_none_or(|tag| tag_of(name) == tag);
        let (mut names, mut next) = (Vec::new(), Some(0));
        while let Some(from) = next {
            names.clear();
            next = held(&self.index).batch(from, &mut names);
            for name in names.iter().filter(|name| wanted(name)) {
                let bytes = held(&self.index).remove(name).unwrap_or(0);
                self.discard(&self.path(name), bytes);
            }
        }
        self.clear_saved(tag);
        if self.stuck.load(Relaxed) > 0 {
            self.remove_stuck(wanted);
        }
        self.refresh();
    }

    /// Tries again to remove files that could not be removed before.
    fn remove_stuck(&self, wanted: impl Fn(&Name) -> bool) {
        Self::each(&self.dir, &*self.files, |name, bytes, _| {
            if wanted(name) && !held(&self.index).contains(name) && self.remove_file(&self.path(name)) {
                let less = |stuck: u64| Some(stuck.saturating_sub(bytes));
                let _ = self.stuck.fetch_update(Relaxed, Relaxed, less);
            }
        });
    }

    /// Calls `each` with every blob of a directory: its name, its bytes of the disk, and the time of its last use. A process may use the
    /// directory meanwhile.
    pub fn each(dir: &Path, files: &dyn Files, mut each: impl FnMut(&Name, u64, SystemTime)) {
        for shard in 0..=u8::MAX {
            let _ = files.list(&shard_of(dir, shard), &mut |found| {
                if let Some(name) = parse(&found.name) {
                    each(&name, blob::blocks_of(found.bytes), found.used);
                }
            });
        }
    }

    /// Reads every blob and removes those that are not intact.
    pub fn verify(&self) -> Checked {
        let (mut checked, mut payload) = (Checked::default(), Vec::new());
        let mut names = Vec::new();
        Self::each(&self.dir, &*self.files, |name, bytes, _| names.push((*name, bytes)));
        for (name, bytes) in names {
            let path = self.path(&name);
            checked.bytes += bytes;
            match self.read_any(&name, &path, u64::MAX, &mut payload) {
                Ok(closed) => {
                    checked.whole += 1;
                    checked.closed += u64::from(closed);
                }
                Err(Miss::Failed) => checked.unreadable += 1,
                Err(_) => {
                    checked.damaged += 1;
                    held(&self.index).remove(&name);
                    self.discard(&path, bytes);
                }
            }
        }
        self.refresh();
        checked
    }

    /// Finds the blobs of the directory, in the order of their last use, and removes files of unfinished writes.
    pub(crate) fn scan(&self) {
        let mut found: Vec<(SystemTime, Name, u64)> = Vec::new();
        for shard in 0..=u8::MAX {
            let dir = self.shard(shard);
            let _ = self.files.list(&dir, &mut |Found { name, bytes, used }| match name.strip_suffix(".tmp") {
                Some(stem) if parse(stem).is_some() => self.discard(&dir.join(&name), blob::blocks_of(bytes)),
                Some(_) => {}
                None => found.extend(parse(&name).map(|name| (used, name, blob::blocks_of(bytes)))),
            });
        }
        found.sort_unstable();
        for (used, name, bytes) in found {
            let touched = used.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
            if bytes > self.limits.bytes || !self.make_room(bytes) {
                self.discard(&self.path(&name), bytes);
            } else {
                held(&self.index).insert(&name, bytes, touched);
            }
        }
        self.refresh();
    }
}
