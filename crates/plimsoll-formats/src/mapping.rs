//! A read-only memory map of one file, and the only `unsafe` code of this crate.
//!
//! Nothing here interprets bytes.

use crate::error::FormatError;
use memmap2::Mmap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

/// A whole file mapped read-only.
pub(crate) struct Mapping {
    map: Mmap,
}

impl Mapping {
    /// Maps the file at `path`. An empty file or a directory is refused, since neither can hold a checkpoint.
    pub(crate) fn open(path: &Path) -> Result<Mapping, FormatError> {
        let file = File::open(path).map_err(FormatError::io(path))?;
        let status = file.metadata().map_err(FormatError::io(path))?;
        if !status.is_file() || status.len() == 0 {
            return Err(FormatError::NotACheckpoint {
                path: path.to_path_buf(),
                reason: format!("expected a file with contents, found {} bytes", status.len()),
            });
        }
        // SAFETY: the mapping is private to this value and only ever read. As with every memory map, a process
        // that truncates the file while it is mapped makes later reads fault; weights are installed files that
        // nobody rewrites in place, and the engine documents that they must stay untouched while it runs.
        let map = unsafe { Mmap::map(&file) }.map_err(FormatError::io(path))?;
        Ok(Mapping { map })
    }

    /// All bytes of the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Lets the resident pages behind `range` go. Their contents come back from the file when read again.
    ///
    /// Pages shared with a neighbouring tensor go too, which costs at most one page read.
    pub(crate) fn release(&self, range: Range<usize>) {
        if range.start >= range.end || range.end > self.map.len() {
            return;
        }
        #[cfg(unix)]
        {
            // SAFETY: the mapping is file-backed, read-only and never written, so dropping its pages loses
            // nothing: the next access faults the same bytes in from the file. The range lies within the map.
            let advised = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    range.end - range.start,
                )
            };
            // A kernel that declines the advice keeps clean pages, which it can still reclaim by itself.
            drop(advised);
        }
    }
}
