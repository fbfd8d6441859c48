//! Saved names: a label, the data that its owner wants back, and the blobs that are pinned as long as the name is there.
//!
//! Each is a file in `DIR/names`, in the format of a blob and encrypted like one. Its file's name is a hash of the label.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use ring::digest::{SHA256, digest};
use thiserror::Error;

use crate::blob::{self, HEADER_BYTES};
use crate::budget::now;
use crate::dir::{Saved, hex, parse};
use crate::files::Files;
use crate::stats::Miss;
use crate::store::{Store, held};
use crate::{Name, Tag, tag_of};

/// Names in a directory.
pub const NAMES_MAX: usize = 64;
/// The folder of the names.
const NAMES: &str = "names";
/// Bytes of a file that is read as a name.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Why a name was not saved.
#[derive(Debug, Error)]
pub enum SaveError {
    /// There are too many.
    #[error("{NAMES_MAX} prefixes are saved, which is the limit: remove one")]
    Full,
    /// There is no room for its file.
    #[error("{0} bytes do not fit into the cache on disk, or into the bytes of the day")]
    NoRoom(u64),
    /// The system refused it.
    #[error("the disk failed: {0}")]
    Failed(#[from] io::Error),
}

/// What a name's file holds.
struct Record {
    label: String,
    created: u64,
    data: Vec<u8>,
    blobs: Vec<Name>,
}

impl Record {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(16 + self.label.len() + self.data.len() + self.blobs.len() * 32);
        bytes.extend((self.label.len() as u32).to_le_bytes());
        bytes.extend(self.label.as_bytes());
        bytes.extend(self.created.to_le_bytes());
        bytes.extend((self.data.len() as u32).to_le_bytes());
        bytes.extend(&self.data);
        self.blobs.iter().for_each(|name| bytes.extend(name));
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (label, bytes) = bytes.split_first_chunk()?;
        let (label, bytes) = bytes.split_at_checked(u32::from_le_bytes(*label) as usize)?;
        let label = std::str::from_utf8(label).ok()?.to_owned();
        let (created, bytes) = bytes.split_first_chunk()?;
        let created = u64::from_le_bytes(*created);
        let (data, bytes) = bytes.split_first_chunk()?;
        let (data, bytes) = bytes.split_at_checked(u32::from_le_bytes(*data) as usize)?;
        let data = data.to_vec();
        let (blobs, rest) = bytes.as_chunks::<32>();
        rest.is_empty().then(|| Self { label, created, data, blobs: blobs.to_vec() })
    }
}

/// Identifies a list of blobs by its last one. None of an empty list.
pub fn saved_id(blobs: &[Name]) -> Option<u64> {
    let [.., last] = blobs else { return None };
    last[8..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

fn name_of(tag: &Tag, label: &str) -> Name {
    let mut name = [0; 32];
    name[..8].copy_from_slice(tag);
    let hash = digest(&SHA256, label.as_bytes());
    // Not the last byte, which encryption leaves as it is.
    name[8..31].copy_from_slice(&hash.as_ref()[..23]);
    name
}

impl Saved {
    /// A saved name from its record; without a record it is encrypted, and there is no key.
    fn of(record: Option<Record>, file: Name, file_bytes: u64) -> Self {
        let tag = tag_of(&file);
        let Some(Record { label, created, data, blobs }) = record else {
            return Self { label: None, tag, created: 0, data_bytes: 0, blobs: 0, id: None, file, file_bytes };
        };
        let (data_bytes, id, blobs) = (data.len(), saved_id(&blobs), blobs.len());
        Self { label: Some(label), tag, created, data_bytes, blobs, id, file, file_bytes }
    }
}

impl Store {
    /// The names of the directory.
    pub fn saved(&self) -> Vec<Saved> {
        held(&self.saved).clone()
    }

    /// Saves data under a label of an owner, in place of what has it, and pins blobs: those that are there now. Those that are written
    /// later must be pinned then ([`Self::pin_saved_blob`]). What was saved under the label before is pinned no longer.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save_name(&self, tag: &Tag, label: &str, data: Vec<u8>, blobs: Vec<Name>) -> Result<(), SaveError> {
        let record = Record { label: label.to_owned(), created: now(), data, blobs };
        let (file, mut payload) = (self.stored(&name_of(tag, label)), record.bytes());
        let file_bytes = self.disk_bytes(payload.len());
        let others = held(&self.saved).iter().filter(|saved| saved.file != file).count();
        if others >= NAMES_MAX {
            return Err(SaveError::Full);
        }
        if !self.may_write(file_bytes) || !self.make_room(file_bytes) {
            return Err(SaveError::NoRoom(file_bytes));
        }
        let before = self.blobs_of(&file);
        self.write(&self.file_of(&file), &file, &mut payload)?;
        self.count_written(file_bytes);
        // Of the same label before: its file was replaced.
        self.forget_saved(&file);
        self.outside.fetch_add(file_bytes, Relaxed);
        let blobs = record.blobs.clone();
        held(&self.saved).push(Saved::of(Some(record), file, file_bytes));
        match before.is_empty() {
            true => blobs.iter().for_each(|name| _ = self.pin(name, None)),
            false => self.pin_saved_alone(before),
        }
        self.refresh();
        Ok(())
    }

    /// The names of a directory that a process may use. The labels of encrypted ones are not known.
    pub fn list_saved(dir: &Path, files: &dyn Files) -> Vec<Saved> {
        let (dir, mut all) = (dir.join(NAMES), Vec::new());
        let _ = files.list(&dir, &mut |found| {
            let Some(file) = parse(&found.name).filter(|_| found.bytes <= FILE_BYTES_MAX) else { return };
            let (mut header, mut payload) =
                ([0; HEADER_BYTES], vec![0; (found.bytes as usize).saturating_sub(HEADER_BYTES)]);
            let read = files.read(&dir.join(&found.name), &mut [&mut header, &mut payload]);
            let Some((encrypted, _)) = read.ok().and_then(|bytes| blob::parse(&header, &file, bytes)) else { return };
            let record = if encrypted { None } else { Record::read(&payload) };
            all.push(Saved::of(record, file, blob::blocks_of(found.bytes)));
        });
        all.sort_unstable_by(|a, b| a.label.cmp(&b.label));
        all
    }

    /// The data of a label.
    pub fn load_name(&self, tag: &Tag, label: &str) -> Option<Vec<u8>> {
        let file = self.stored(&name_of(tag, label));
        held(&self.saved).iter().find(|saved| saved.file == file)?;
        match self.read_record(&file) {
            Ok(record) => record.map(|record| record.data),
            Err(miss) => {
                self.counts.missed(&file, miss, &format_args!("{}", self.file_of(&file).display()));
                None
            }
        }
    }

    /// Removes a label; its blobs are pinned no longer, unless another label has them. False if there is none.
    pub fn remove_name(&self, tag: &Tag, label: &str) -> bool {
        let file = self.stored(&name_of(tag, label));
        let blobs = self.blobs_of(&file);
        let Some(file_bytes) = self.forget_saved(&file) else { return false };
        self.discard(&self.file_of(&file), file_bytes);
        self.pin_saved_alone(blobs);
        self.refresh();
        true
    }

    /// Pins a blob that was written after its name was saved; `id` is the name's. False if the name was removed meanwhile, or as
    /// [`Self::pin`].
    pub fn pin_saved_blob(&self, name: &Name, id: u64) -> bool {
        // Held until the blob is pinned: a name leaves the list before its blobs are pinned no longer.
        let saved = held(&self.saved);
        saved.iter().any(|saved| saved.id == Some(id)) && self.pin(name, None)
    }

    /// Pinned bytes that remain when a label gets these blobs in place of its own.
    pub fn pinned_bytes_beside(&self, tag: &Tag, label: &str, blobs: &[Name]) -> u64 {
        let file = self.stored(&name_of(tag, label));
        let mut own: HashSet<Name> = self.blobs_of(&file).into_iter().collect();
        let others = self.saved().into_iter().filter(|saved| saved.file != file && !own.is_empty());
        let others: Vec<Name> = others.flat_map(|saved| self.blobs_of(&saved.file)).collect();
        blobs.iter().chain(&others).for_each(|name| _ = own.remove(name));
        let index = held(&self.index);
        let own: u64 = own.iter().map(|name| index.pinned_bytes_of(&self.stored(name))).sum();
        index.pinned_bytes().saturating_sub(own)
    }

    /// Removes the labels of all owners, or of one.
    pub(crate) fn clear_saved(&self, tag: Option<Tag>) {
        for saved in self.saved().into_iter().filter(|saved| tag.is_none_or(|tag| saved.tag == tag)) {
            self.forget_saved(&saved.file);
            self.discard(&self.file_of(&saved.file), saved.file_bytes);
        }
    }

    /// Finds the names of the directory, and returns their blobs. Damaged names are removed.
    pub(crate) fn find_saved(&self) -> Vec<Name> {
        let (mut found, mut pinned) = (Vec::new(), Vec::new());
        let _ = self.files.list(&self.dir.join(NAMES), &mut |file| match parse(&file.name) {
            Some(name) => found.push((name, blob::blocks_of(file.bytes))),
            None => drop(self.files.remove(&self.dir.join(NAMES).join(&file.name))),
        });
        for (file, file_bytes) in found {
            let record = match self.read_record(&file) {
                Ok(record) => record,
                Err(miss) => {
                    self.counts.missed(&file, miss, &format_args!("{}", self.file_of(&file).display()));
                    if miss == Miss::Damaged {
                        self.discard(&self.file_of(&file), file_bytes);
                    }
                    continue;
                }
            };
            pinned.extend(record.iter().flat_map(|record| &record.blobs));
            self.outside.fetch_add(file_bytes, Relaxed);
            held(&self.saved).push(Saved::of(record, file, file_bytes));
        }
        pinned
    }

    /// Pins the blobs of all names, and unpins those of `blobs` that no name has.
    fn pin_saved_alone(&self, blobs: Vec<Name>) {
        let mut unsaved: HashSet<Name> = blobs.into_iter().collect();
        let mut kept = Vec::new();
        for saved in self.saved() {
            kept.extend(self.blobs_of(&saved.file));
        }
        kept.iter().for_each(|name| _ = unsaved.remove(name));
        // First, so that the bytes that can be pinned are free for the others.
        unsaved.iter().for_each(|name| self.unpin(name));
        kept.iter().for_each(|name| _ = self.pin(name, None));
    }

    /// The blobs of a name's file; none if it cannot be read.
    fn blobs_of(&self, file: &Name) -> Vec<Name> {
        self.read_record(file).ok().flatten().map_or_else(Vec::new, |record| record.blobs)
    }

    /// What a file holds; none if it is encrypted and there is no key.
    fn read_record(&self, file: &Name) -> Result<Option<Record>, Miss> {
        let mut payload = Vec::new();
        let closed = self.read_any(file, &self.file_of(file), FILE_BYTES_MAX, &mut payload)?;
        if closed {
            return Ok(None);
        }
        Record::read(&payload).map(Some).ok_or(Miss::Damaged)
    }

    /// Takes a name out of the list. Returns the bytes of its file; none if it is not there.
    fn forget_saved(&self, file: &Name) -> Option<u64> {
        let mut list = held(&self.saved);
        let at = list.iter().position(|saved| saved.file == *file)?;
        let file_bytes = list.swap_remove(at).file_bytes;
        self.outside.fetch_sub(file_bytes, Relaxed);
        Some(file_bytes)
    }

    fn file_of(&self, file: &Name) -> PathBuf {
        self.dir.join(NAMES).join(hex(file))
    }
}
