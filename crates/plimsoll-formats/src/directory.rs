//! The tensor directory: canonical name → shape, encoding and where the bytes lie.
//!
//! Both readers fill it, the checkpoint looks things up in it. It knows no file format.

use crate::encoding::{Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::ggml_type::GgmlType;
use std::ops::Range;

/// A run of bytes in one of the checkpoint's files. Checked against the file when it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    /// Index into the checkpoint's mappings.
    pub(crate) file: usize,
    /// Byte range in that file.
    pub(crate) range: Range<usize>,
}

/// How the stored bytes of a tensor are laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Storage {
    /// Rows of little-endian floats of the tensor's encoding.
    Float(Span),
    /// Rows of GGUF blocks.
    Blocks(Span, GgmlType),
    /// MLX: packed codes, scales and biases as three tensors.
    Affine { codes: Span, scales: Span, biases: Span },
}

impl Storage {
    /// The spans that make up the tensor.
    pub(crate) fn spans(&self) -> impl Iterator<Item = &Span> {
        let parts: [Option<&Span>; 3] = match self {
            Storage::Float(span) | Storage::Blocks(span, _) => [Some(span), None, None],
            Storage::Affine { codes, scales, biases } => [Some(codes), Some(scales), Some(biases)],
        };
        parts.into_iter().flatten()
    }
}

/// One tensor of the directory.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) info: TensorInfo,
    pub(crate) storage: Storage,
}

/// All tensors of a checkpoint, in file order, with an index by name.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    entries: Vec<Entry>,
    by_name: Vec<u32>,
}

impl Directory {
    /// Sorts `entries` into file order and indexes them. Two tensors that map to one name are refused.
    pub(crate) fn new(mut entries: Vec<Entry>) -> Result<Directory, FormatError> {
        entries.sort_by_key(|entry| entry.storage.spans().next().map(|span| (span.file, span.range.start)));
        let count = u32::try_from(entries.len())
            .map_err(|_| FormatError::Unsupported(format!("{} tensors in one checkpoint", entries.len())))?;
        let mut by_name: Vec<u32> = (0..count).collect();
        by_name.sort_by(|&a, &b| entries[a as usize].name.cmp(&entries[b as usize].name));
        for pair in by_name.windows(2) {
            let name = &entries[pair[0] as usize].name;
            if *name == entries[pair[1] as usize].name {
                return Err(FormatError::DuplicateTensor(quote(name)));
            }
        }
        Ok(Directory { entries, by_name })
    }

    /// The entry of this canonical name.
    pub(crate) fn get(&self, name: &str) -> Option<&Entry> {
        let at = self.by_name.binary_search_by(|&index| self.entries[index as usize].name.as_str().cmp(name)).ok()?;
        Some(&self.entries[self.by_name[at] as usize])
    }

    /// All entries in file order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    /// Whether there is no tensor at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// The stored size in bytes of `shape` floats of `encoding`, or `None` on overflow or for a quantized encoding.
pub(crate) fn float_bytes(shape: &[usize], encoding: Encoding) -> Option<usize> {
    let width = match encoding {
        Encoding::F32 => 4,
        Encoding::F16 | Encoding::BF16 => 2,
        Encoding::Quant(_) => return None,
    };
    shape.iter().try_fold(width, |bytes: usize, &dim| bytes.checked_mul(dim))
}
