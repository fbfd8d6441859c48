//! Reading and writing a blob's file: header, encryption, temporary name.

use std::io;
use std::path::Path;

use crate::Name;
use crate::blob::{self, HEADER_BYTES};
use crate::cipher::{LEAD_BYTES, lead_bytes};
use crate::stats::Miss;
use crate::store::Store;

/// Returns the kind of miss for an error of a read.
pub(crate) fn miss_of(error: &io::Error) -> Miss {
    match error.kind() {
        io::ErrorKind::NotFound => Miss::Gone,
        io::ErrorKind::UnexpectedEof => Miss::Damaged,
        _ => Miss::Failed,
    }
}

impl Store {
    /// Reads a blob, and decrypts it if there is a key.
    pub(crate) fn read(
        &self,
        name: &Name,
        path: &Path,
        encrypted: bool,
        payload: &mut [u8],
    ) -> Result<(), (Miss, io::Error)> {
        let (mut header, mut lead) = ([0; HEADER_BYTES], [0; LEAD_BYTES]);
        let damaged = |what: &str| Err((Miss::Damaged, io::Error::new(io::ErrorKind::InvalidData, what)));
        let before = &mut lead[..lead_bytes(encrypted)];
        let read = self.files.read(path, &mut [&mut header, &mut *before, &mut *payload]);
        let bytes = read.map_err(|error| (miss_of(&error), error))?;
        if blob::parse(&header, name, bytes) != Some((encrypted, payload.len() as u64)) {
            return damaged("the header is not that of this blob");
        }
        if !blob::is_whole(&header, before, payload) {
            return damaged("the checksum is wrong");
        }
        match &self.cipher {
            Some(cipher) if encrypted && !cipher.open(name, &header[..blob::ABOUT_BYTES], &lead, payload) => {
                damaged("it was not encrypted with this key")
            }
            _ => Ok(()),
        }
    }

    /// Reads a file of any length up to a limit, and decrypts it if there is a key. Returns true if it is encrypted and there is no key.
    pub(crate) fn read_any(&self, name: &Name, path: &Path, most: u64, payload: &mut Vec<u8>) -> Result<bool, Miss> {
        let mut header = [0; HEADER_BYTES];
        let bytes = self.files.read(path, &mut [&mut header]).map_err(|error| miss_of(&error))?;
        let (encrypted, length) =
            blob::parse(&header, name, bytes).filter(|(_, length)| *length <= most).ok_or(Miss::Damaged)?;
        payload.resize(length as usize, 0);
        self.read(name, path, encrypted, payload).map_err(|(miss, _)| miss)?;
        Ok(encrypted && self.cipher.is_none())
    }

    /// Writes a blob under a temporary name beside `path`, and renames it. With a key `payload` is encrypted in place.
    pub(crate) fn write(&self, path: &Path, name: &Name, payload: &mut [u8]) -> io::Result<()> {
        let temporary = path.with_extension("tmp");
        let (bytes, about) = (payload.len(), blob::about(name, self.cipher.is_some(), payload.len()));
        let sealed = match &self.cipher {
            None => None,
            Some(cipher) => {
                let sealed = cipher.seal(name, &about, payload);
                Some(sealed.ok_or_else(|| io::Error::other("the system gave no random numbers"))?)
            }
        };
        let (lead, payload): (&[u8], &[u8]) = (sealed.as_ref().map_or(&[], |lead| lead), payload);
        let header = blob::header(&about, lead, payload);
        let parts: [&[u8]; 3] = [&header, lead, payload];
        let written = match self.files.write(&temporary, &parts) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let dir = path.parent().unwrap_or(path);
                self.files.make_dir(dir).and_then(|()| self.files.write(&temporary, &parts))
            }
            written => written,
        };
        let done = written.and_then(|()| self.files.rename(&temporary, path));
        if done.is_err() {
            self.discard(&temporary, blob::disk_bytes(bytes, self.cipher.is_some()));
        }
        done
    }
}
