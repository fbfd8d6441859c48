//! Saved names: a label, its owner's data, and the blobs that are pinned as long as the name exists.
//!
//! Each name is a file in `DIR/names`, in the format of a blob and encrypted like one. The file's name is a hash of the label.

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

/// The most names in a directory.
pub const NAMES_MAX: usize = 64;
/// The folder of the names.
const NAMES: &str = "names";
/// The most bytes of a file that is read as a name.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The reason why a name was not saved.
#[derive(Debug, Error)]
pub enum SaveError {
    /// The directory has [`NAMES_MAX`] names already.
    #[error("{NAMES_MAX} prefixes are saved, which is the limit: remove one")]
    Full,
    /// Its file exceeds the room of the cache or the day's limit.
    #[error("{0} bytes do not fit into the cache on disk, or into the bytes of the day")]
    NoRoom(u64),
    /// The system reported an error.
    #[error("the disk failed: {0}")]
    Failed(#[from] io::Error),
}

/// The content of a name's file.
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

/// Returns an id for a list of blobs, from the last one; `None` for an empty list.
pub fn saved_id(blobs: &[Name]) -> Option<u64> {
    let [.., last] = blobs else { return None };
    last[8..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

fn name_of(tag: &Tag, label: &str) -> Name {
    let mut name = [0; 32];
    name[..8].copy_from_slice(tag);
    let hash = digest(&SHA256, label.as_bytes());
    // The last byte stays 0, because encryption leaves it as it is.
    name[8..31].copy_from_slice(&hash.as_ref()[..23]);
    name
}

impl Saved {
    /// Makes a saved name from its record. Without a record it is encrypted, and there is no key.
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

    /// Saves data under a label of an owner, in place of the label's previous data, and pins its blobs that exist now. Blobs that are
    /// written later must be pinned after writing ([`Self::pin_saved_blob`]). Blobs of the label's previous data are unpinned.
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
        // Removes the list entry of the same label: its file was replaced.
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

    /// Lists the names of a directory, which a process may be using. The labels of encrypted names are not known.
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

    /// Returns the data of a label.
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

    /// Removes a label. Its blobs are unpinned, unless another label has them. False if there is no such label.
    pub fn remove_name(&self, tag: &Tag, label: &str) -> bool {
        let file = self.stored(&name_of(tag, label));
        let blobs = self.blobs_of(&file);
        let Some(file_bytes) = self.forget_saved(&file) else { return false };
        self.discard(&self.file_of(&file), file_bytes);
        self.pin_saved_alone(blobs);
        self.refresh();
        true
    }

    /// Pins a blob that was written after its name was saved; `id` is the name's id. False if the name was removed meanwhile, or as for
    /// [`Self::pin`].
    pub fn pin_saved_blob(&self, name: &Name, id: u64) -> bool {
        // Held until the blob is pinned: a name is removed from the list before its blobs are unpinned.
        let saved = held(&self.saved);
        saved.iter().any(|saved| saved.id == Some(id)) && self.pin(name, None)
    }

    /// Pinned bytes that remain when a label gets these blobs in place of its previous ones.
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

    /// Removes the labels of one owner, or of all owners.
    pub(crate) fn clear_saved(&self, tag: Option<Tag>) {
        for saved in self.saved().into_iter().filter(|saved| tag.is_none_or(|tag| saved.tag == tag)) {
            self.forget_saved(&saved.file);
            self.discard(&self.file_of(&saved.file), saved.file_bytes);
        }
    }

    /// Reads the names of the directory, and returns their blobs. Damaged names are removed.
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

    /// Pins the blobs of all names, and unpins the blobs in `blobs` that no name has.
    fn pin_saved_alone(&self, blobs: Vec<Name>) {
        let mut unsaved: HashSet<Name> = blobs.into_iter().collect();
        let mut kept = Vec::new();
        for saved in self.saved() {
            kept.extend(self.blobs_of(&saved.file));
        }
        kept.iter().for_each(|name| _ = unsaved.remove(name));
        // Unpinned first, so that more bytes can be pinned for the others.
        unsaved.iter().for_each(|name| self.unpin(name));
        kept.iter().for_each(|name| _ = self.pin(name, None));
    }

    /// The blobs of a name's file; empty if it cannot be read.
    fn blobs_of(&self, file: &Name) -> Vec<Name> {
        self.read_record(file).ok().flatten().map_or_else(Vec::new, |record| record.blobs)
    }

    /// Reads the record of a name's file; `None` if it is encrypted and there is no key.
    fn read_record(&self, file: &Name) -> Result<Option<Record>, Miss> {
        let mut payload = Vec::new();
        let closed = self.read_any(file, &self.file_of(file), FILE_BYTES_MAX, &mut payload)?;
        if closed {
            return Ok(None);
        }
        Record::read(&payload).map(Some).ok_or(Miss::Damaged)
    }

    /// Removes a name from the list. Returns the bytes of its file; `None` if it is not in the list.
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
