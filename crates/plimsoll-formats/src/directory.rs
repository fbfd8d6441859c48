//! The tensor directory: canonical name → shape, encoding and where the bytes lie.
//!
//! Both readers fill it, the checkpoint looks things up in it. It knows no file format.

use std::sync::Arc;

use crate::decode::grouped::{Cells, Scales};
use crate::encoding::{Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::ggml_type::GgmlType;
use crate::row_form::RowForm;
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
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Storage {
    /// Rows of little-endian floats of the tensor's encoding.
    Float(Span),
    /// Rows as in `Float`, from two tensors in turns: `run` rows of the first, then `run` rows of the second.
    Turns { parts: [Span; 2], run: usize },
    /// Rows of GGUF blocks.
    Blocks(Span, GgmlType),
    /// MLX: packed codes, scales and biases as three tensors.
    Affine { codes: Span, scales: Span, biases: Span },
    /// Small floats and bytes of scales, as two tensors: codes where the encoding is quantized, else numbers of 8 bits.
    Micro { codes: Span, scales: Span },
    /// AWQ, GPTQ, compressed-tensors: codes, scales and perhaps zero points, each in a different order.
    Grouped(Box<Grouped>),
    /// FP8: numbers, and the scales of their blocks.
    F8(Box<F8>),
    /// Rows of another storage with a second scale.
    Scaled(Box<Scaled>),
}

/// The parts of a tensor of FP8 numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct F8 {
    /// One byte an element.
    pub(crate) numbers: Span,
    /// One scale a block.
    pub(crate) scales: (Span, Scales),
    /// Rows of a block.
    pub(crate) block_rows: usize,
}

/// A tensor with a second scale.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scaled {
    /// The storage without the second scale.
    pub(crate) storage: Storage,
    /// The decoder of that storage's rows.
    pub(crate) form: RowForm,
    /// One factor for each of several equal runs of rows.
    pub(crate) factors: Arc<[f32]>,
    /// Whether scales are divided by the factors: compressed-tensors stores the reciprocal. A quotient and a product with the
    /// reciprocal differ in their last bit.
    pub(crate) divides: bool,
}

/// The parts of a tensor of integer codes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grouped {
    /// One code an element.
    pub(crate) codes: (Span, Cells),
    /// One scale a group.
    pub(crate) scales: (Span, Scales),
    /// One zero point a group. None if the tensor has one zero point for all groups.
    pub(crate) zeros: Option<(Span, Cells)>,
    /// The stored column of each column in the order of groups, where a group's columns are not neighbours (act-order).
    pub(crate) order: Option<Arc<[u32]>>,
}

impl Storage {
    /// The spans that make up the tensor.
    pub(crate) fn spans(&self) -> impl Iterator<Item = &Span> {
        let parts: [Option<&Span>; 3] = match self {
            Storage::Float(span) | Storage::Blocks(span, _) => [Some(span), None, None],
            Storage::Turns { parts: [even, odd], .. } => [Some(even), Some(odd), None],
            Storage::Affine { codes, scales, biases } => [Some(codes), Some(scales), Some(biases)],
            Storage::Micro { codes, scales } => [Some(codes), Some(scales), None],
            Storage::Grouped(parts) => {
                [Some(&parts.codes.0), Some(&parts.scales.0), parts.zeros.as_ref().map(|(span, _)| span)]
            }
            Storage::F8(parts) => [Some(&parts.numbers), Some(&parts.scales.0), None],
            Storage::Scaled(scaled) => {
                let mut inner = scaled.storage.spans();
                std::array::from_fn(|_| inner.next())
            }
        };
        parts.into_iter().flatten()
    }

    /// Returns the decoder that makes a row from the rows of the spans. None if a row needs more than its own bytes.
    pub(crate) fn row_form(&self, encoding: Encoding) -> Option<RowForm> {
        match (self, encoding) {
            (Storage::Float(_), _) => Some(RowForm::Float(encoding)),
            (Storage::Blocks(_, kind), _) => Some(RowForm::Blocks(*kind)),
            (Storage::Affine { .. }, Encoding::Quant(layout)) => Some(RowForm::Affine(layout)),
            (Storage::Micro { .. }, _) => Some(RowForm::Micro(encoding)),
            (
                Storage::Affine { .. }
                | Storage::Turns { .. }
                | Storage::Grouped(_)
                | Storage::F8(_)
                | Storage::Scaled(_),
                _,
            ) => None,
        }
    }

    /// The spans that make up the tensor, to be changed.
    pub(crate) fn spans_mut(&mut self) -> impl Iterator<Item = &mut Span> {
        let parts: [Option<&mut Span>; 3] = match self {
            Storage::Float(span) | Storage::Blocks(span, _) => [Some(span), None, None],
            Storage::Turns { parts: [even, odd], .. } => [Some(even), Some(odd), None],
            Storage::Affine { codes, scales, biases } => [Some(codes), Some(scales), Some(biases)],
            Storage::Micro { codes, scales } => [Some(codes), Some(scales), None],
            Storage::Grouped(parts) => {
                let Grouped { codes, scales, zeros, .. } = &mut **parts;
                [Some(&mut codes.0), Some(&mut scales.0), zeros.as_mut().map(|(span, _)| span)]
            }
            Storage::F8(parts) => [Some(&mut parts.numbers), Some(&mut parts.scales.0), None],
            Storage::Scaled(scaled) => {
                let mut inner = scaled.storage.spans_mut();
                std::array::from_fn(|_| inner.next())
            }
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

    /// Returns the directory with these entries added.
    pub(crate) fn with(mut self, more: Vec<Entry>) -> Result<Directory, FormatError> {
        self.entries.extend(more);
        Directory::new(self.entries)
    }

    /// Returns the entries without the index.
    pub(crate) fn into_entries(self) -> Vec<Entry> {
        self.entries
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

    /// Whether there are no tensors.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// The stored size in bytes of `shape` floats of `encoding`, or `None` on overflow or for a quantized encoding.
pub(crate) fn float_bytes(shape: &[usize], encoding: Encoding) -> Option<usize> {
    let width = match encoding {
        Encoding::F32 => 4,
        Encoding::F16 | Encoding::BF16 => 2,
        Encoding::F8 { .. } | Encoding::Quant(_) => return None,
    };
    shape.iter().try_fold(width, |bytes: usize, &dim| bytes.checked_mul(dim))
}
