//! Rows that stay in their file. Each row is read when it is needed, and decoded from its own bytes.
//!
//! Files are opened for reading, not mapped: rows that were read take no memory of this process.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::directory::Directory;
use crate::error::{FormatError, quote};
use crate::mapping::{Mapping, Stamp};
use crate::row::RowBuf;
use crate::row_form::RowForm;

/// An open file from which rows are read.
struct RowFile {
    file: File,
    path: PathBuf,
    opened: Stamp,
}

impl RowFile {
    /// Opens the file of a mapping.
    ///
    /// # Errors
    /// [`FormatError::Io`], or [`FormatError::Changed`] if another file has its name by now.
    fn of(mapping: &Mapping) -> Result<Arc<RowFile>, FormatError> {
        let path = mapping.path();
        let file = File::open(path).map_err(FormatError::io(path))?;
        let opened = Stamp::of(&file.metadata().map_err(FormatError::io(path))?);
        if opened != *mapping.stamp() {
            let reason = "it is another file than the one that was opened".to_owned();
            return Err(FormatError::Changed { path: path.to_path_buf(), reason });
        }
        // Only a hint: rows lie at random places, so the kernel need not read ahead.
        #[cfg(target_os = "linux")]
        // SAFETY: the descriptor is open.
        let _ = unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&file), 0, 0, libc::POSIX_FADV_RANDOM) };
        Ok(Arc::new(RowFile { file, path: path.to_path_buf(), opened }))
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> std::io::Result<()> {
        #[cfg(unix)]
        return std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, at);
        #[cfg(windows)]
        {
            let (mut bytes, mut at) = (bytes, at);
            while !bytes.is_empty() {
                match std::os::windows::fs::FileExt::seek_read(&self.file, bytes, at)? {
                    0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                    read => (bytes, at) = (&mut bytes[read..], at + read as u64),
                }
            }
            Ok(())
        }
    }

    /// The file's path.
    fn path(&self) -> &Path {
        &self.path
    }

    /// Checks the file as [`StoredTensors::unchanged`] does.
    fn unchanged(&self) -> Result<(), FormatError> {
        let now = Stamp::of(&self.file.metadata().map_err(FormatError::io(&self.path))?);
        if now == self.opened {
            return Ok(());
        }
        let reason = "it was written to or cut".to_owned();
        Err(FormatError::Changed { path: self.path.clone(), reason })
    }
}

/// One part of each row: the offset of row 0's part in the file, and the bytes of one row's part.
struct RowPart {
    file: Arc<RowFile>,
    start: u64,
    bytes: usize,
}

/// The rows of one tensor, read from its file.
pub struct StoredRows {
    form: RowForm,
    parts: Box<[RowPart]>,
    rows: usize,
}

impl StoredRows {
    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of a row, as it is stored.
    pub fn row_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// Reads a row's bytes.
    ///
    /// # Errors
    /// [`FormatError::Io`].
    ///
    /// # Panics
    /// When there is no such row, or `bytes` is not [`Self::row_bytes`] long.
    pub fn read(&self, row: usize, bytes: &mut [u8]) -> Result<(), FormatError> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(bytes.len(), self.row_bytes(), "bytes of a row");
        let mut rest = bytes;
        for part in &self.parts {
            let (own, after) = rest.split_at_mut(part.bytes);
            let at = part.start + row as u64 * part.bytes as u64;
            part.file.read(own, at).map_err(FormatError::io(part.file.path()))?;
            rest = after;
        }
        Ok(())
    }

    /// Decodes a row from its bytes.
    pub fn decode(&self, bytes: &[u8], out: &mut RowBuf) {
        let part = |number: usize| {
            let before: usize = self.parts[..number].iter().map(|part| part.bytes).sum();
            &bytes[before..][..self.parts[number].bytes]
        };
        self.form.decode(part, out);
    }
}

/// The rows of some tensors, read from their files.
pub struct StoredTensors {
    tensors: Box<[StoredRows]>,
    files: Box<[Arc<RowFile>]>,
}

impl StoredTensors {
    /// Opens the files of these tensors.
    pub(crate) fn open<'a>(
        directory: &Directory,
        mapped: &[Mapping],
        names: impl Iterator<Item = &'a str>,
    ) -> Result<StoredTensors, FormatError> {
        let mut files: Vec<Option<Arc<RowFile>>> = vec![None; mapped.len()];
        let mut tensors = Vec::new();
        for name in names {
            let entry = directory.get(name).ok_or_else(|| FormatError::NoSuchTensor(name.to_owned()))?;
            let form = entry.storage.row_form(entry.info.encoding).ok_or_else(|| {
                FormatError::Unsupported(format!("tensor {}: its rows cannot be read one by one", quote(name)))
            })?;
            let rows = entry.info.rows();
            let mut parts = Vec::with_capacity(3);
            for span in entry.storage.spans() {
                let file = match &files[span.file] {
                    Some(file) => Arc::clone(file),
                    None => Arc::clone(files[span.file].insert(RowFile::of(&mapped[span.file])?)),
                };
                parts.push(RowPart { file, start: span.range.start as u64, bytes: span.range.len() / rows });
            }
            tensors.push(StoredRows { form, parts: parts.into(), rows });
        }
        Ok(StoredTensors { tensors: tensors.into(), files: files.into_iter().flatten().collect() })
    }

    /// The tensors, in the order of the names given to `open`.
    pub fn tensors(&self) -> &[StoredRows] {
        &self.tensors
    }

    /// Checks that no file was written to or cut since the checkpoint was opened, so that all rows read are the original ones. A file that
    /// was removed or replaced can still be read. The check takes one system call a file.
    ///
    /// # Errors
    /// [`FormatError::Changed`].
    pub fn unchanged(&self) -> Result<(), FormatError> {
        self.files.iter().try_for_each(|file| file.unchanged())
    }
}
