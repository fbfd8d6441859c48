//! The head of a safetensors file: names, types, shapes and byte ranges, all checked.
//!
//! The parser reads a stream of events, not a tree, so that memory stays in proportion to the file. It enforces the format's rule that
//! tensors fill the data without holes or overlaps.

use crate::directory::{Span, float_bytes};
use crate::encoding::Encoding;
use crate::error::{FormatError, quote};
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Longest head in bytes, from the reference implementation.
const HEAD_BYTES_MAX: u64 = 100_000_000;
/// Most dimensions of a tensor.
const DIMS_MAX: usize = 8;

/// A tensor as the file lists it, under its stored name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) name: String,
    pub(super) dtype: Kind,
    pub(super) shape: Vec<usize>,
    pub(super) span: Span,
}

/// The element types that the readers distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A float type that can be decoded.
    Float(Encoding),
    /// 32-bit words, the form of MLX's packed codes.
    U32,
    /// Bytes.
    U8,
    /// Signed 32-bit words, the form of other packed codes.
    I32,
    /// Signed bytes.
    I8,
    /// FP8 floats of the form E4M3.
    F8,
    /// Signed 64-bit words: a stored shape.
    I64,
    /// Any other type, by the width in bits of an element.
    Other(usize),
}

impl Kind {
    fn from_name(name: &str) -> Option<Kind> {
        Some(match name {
            "F32" => Kind::Float(Encoding::F32),
            "F16" => Kind::Float(Encoding::F16),
            "BF16" => Kind::Float(Encoding::BF16),
            "U32" => Kind::U32,
            "I32" => Kind::I32,
            "I8" => Kind::I8,
            "F8_E4M3" => Kind::F8,
            "I64" => Kind::I64,
            "F4" => Kind::Other(4),
            "F6_E2M3" | "F6_E3M2" => Kind::Other(6),
            "U8" => Kind::U8,
            "BOOL" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => Kind::Other(8),
            "U16" | "I16" => Kind::Other(16),
            "U64" | "F64" | "C64" => Kind::Other(64),
            _ => return None,
        })
    }

    /// Bytes of a tensor of this shape, or `None` on overflow or for a fraction of a byte.
    fn bytes(self, shape: &[usize]) -> Option<usize> {
        let bits = match self {
            Kind::Float(encoding) => return float_bytes(shape, encoding),
            Kind::U8 | Kind::I8 | Kind::F8 => 8,
            Kind::U32 | Kind::I32 => 32,
            Kind::I64 => 64,
            Kind::Other(bits) => bits,
        };
        let bits = shape.iter().try_fold(bits, |bits: usize, &dim| bits.checked_mul(dim))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Parses the bytes of file number `file`. The returned tensors are sorted by offset.
pub(super) fn parse(bytes: &[u8], file: usize) -> Result<Vec<Found>, FormatError> {
    let wrong = |what: String| FormatError::Safetensors(what);
    let prefix = bytes.first_chunk::<8>().ok_or_else(|| wrong(format!("a file of {} bytes", bytes.len())))?;
    let head_bytes = u64::from_le_bytes(*prefix);
    let rest = &bytes[8..];
    if head_bytes > HEAD_BYTES_MAX || head_bytes > rest.len() as u64 {
        return Err(wrong(format!(
            "the head claims {head_bytes} bytes, the file has {} (and {HEAD_BYTES_MAX} are allowed)",
            rest.len()
        )));
    }
    let (head, data) = rest.split_at(head_bytes as usize);
    let mut json = serde_json::Deserializer::from_slice(head);
    let mut raws = json.deserialize_map(HeadVisitor).map_err(|error| wrong(format!("head: {error}")))?;
    json.end().map_err(|error| wrong(format!("head: {error}")))?;
    raws.sort_unstable_by(|a, b| a.offsets.cmp(&b.offsets).then_with(|| a.name.cmp(&b.name)));
    let data_start = 8 + head.len();
    let mut free_from = 0;
    let mut found = Vec::with_capacity(raws.len());
    for raw in raws {
        let tensor = raw.place(file, data_start, data.len(), free_from)?;
        free_from = tensor.span.range.end - data_start;
        found.push(tensor);
    }
    if free_from != data.len() {
        return Err(wrong(format!("{} bytes of data, of which tensors cover {free_from}", data.len())));
    }
    Ok(found)
}

/// One entry of the head, not yet checked against the file.
struct Raw {
    name: String,
    dtype: Kind,
    shape: Vec<u64>,
    offsets: (u64, u64),
}

impl Raw {
    /// Checks shape and range, and returns the tensor with its byte range in the file.
    fn place(self, file: usize, data_start: usize, data: usize, free_from: usize) -> Result<Found, FormatError> {
        let wrong = |what: String| FormatError::Safetensors(format!("tensor {}: {what}", quote(&self.name)));
        let (begin, end) = self.offsets;
        let shape: Option<Vec<usize>> =
            self.shape.iter().map(|&dim| usize::try_from(dim).ok().filter(|&dim| dim > 0)).collect();
        let shape = shape.ok_or_else(|| wrong(format!("shape {:?}", self.shape)))?;
        let bytes = self.dtype.bytes(&shape).ok_or_else(|| wrong(format!("shape {shape:?} overflows")))?;
        if begin != free_from as u64 {
            return Err(wrong(format!("begins at byte {begin} of the data where {free_from} is next")));
        }
        if end > data as u64 || end.checked_sub(begin) != Some(bytes as u64) {
            return Err(wrong(format!("range {begin}..{end} of {data} bytes for a shape of {bytes} bytes")));
        }
        // `end` is within the data, hence within memory.
        let range = begin as usize + data_start..end as usize + data_start;
        Ok(Found { name: self.name, dtype: self.dtype, shape, span: Span { file, range } })
    }
}

/// Visits the head: a map from name to entry. One name is special.
struct HeadVisitor;

impl<'de> Visitor<'de> for HeadVisitor {
    type Value = Vec<Raw>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<Raw>, A::Error> {
        let mut raws = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let entry: RawEntry = map.next_value()?;
            let dtype = Kind::from_name(&entry.dtype)
                .ok_or_else(|| A::Error::custom(format!("tensor {} has type {}", quote(&name), quote(&entry.dtype))))?;
            let offsets = (entry.data_offsets[0], entry.data_offsets[1]);
            raws.push(Raw { name, dtype, shape: entry.shape.0, offsets });
        }
        Ok(raws)
    }
}

/// The fields of an entry.
#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Dims,
    data_offsets: [u64; 2],
}

/// A list of at most [`DIMS_MAX`] dimensions.
struct Dims(Vec<u64>);

impl<'de> serde::Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Dims, D::Error> {
        deserializer.deserialize_seq(DimsVisitor)
    }
}

struct DimsVisitor;

impl<'de> Visitor<'de> for DimsVisitor {
    type Value = Dims;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "at most {DIMS_MAX} dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
        let mut dims = Vec::new();
        while let Some(dim) = seq.next_element()? {
            if dims.len() == DIMS_MAX {
                return Err(A::Error::custom(format!("more than {DIMS_MAX} dimensions")));
            }
            dims.push(dim);
        }
        Ok(Dims(dims))
    }
}
