//! The head of a GGUF file: version, metadata, tensor infos, and the byte range of each tensor.
//!
//! This module checks every range against the file's size and against its neighbours, so that later code need not check.

use super::cursor::{Cursor, in_key};
use super::meta::GgufMeta;
use super::{MAGIC, architecture_of, names};
use crate::architecture::Architecture;
use crate::directory::{Entry, Span, Storage};
use crate::encoding::{Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::ggml_type::GgmlType;

/// Most metadata keys; real files have dozens.
const KEYS_MAX: usize = 65_536;
/// Most dimensions of a tensor, as in ggml.
const DIMS_MAX: u32 = 4;
/// Alignment of tensor data in bytes, if the metadata has no value.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Largest alignment accepted. Real files use 32.
const ALIGNMENT_MAX: u64 = 65_536;
/// Least bytes of a metadata entry: key length, one byte of key, type, one byte of value.
const KEY_BYTES_MIN: usize = 8 + 1 + 4 + 1;
/// Least bytes of a tensor info: name length, one byte of name, dimension count, one dimension, type, offset.
const INFO_BYTES_MIN: usize = 8 + 1 + 4 + 8 + 4 + 8;

/// Matrices that may have one row. llama.cpp's tools store them as vectors then.
const ONE_ROW: [&str; 3] =
    [".mlp.shared_expert_gate.weight", "embeddings.token_type_embeddings.weight", "classifier.out_proj.weight"];

/// The parsed head of one file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) architecture: Architecture,
    pub(super) meta: GgufMeta,
    pub(super) entries: Vec<Entry>,
    /// Bytes of the file up to the padding before the data.
    pub(super) head_bytes: usize,
}

/// Parses the bytes of file number `file`. Later parts of a split checkpoint have no architecture key and get the first part's as
/// `inherited`.
pub(super) fn parse(bytes: &[u8], file: usize, inherited: Option<&Architecture>) -> Result<Header, FormatError> {
    let mut cursor = Cursor::new(bytes);
    check_version(&mut cursor)?;
    let tensors = cursor.count("tensors", INFO_BYTES_MIN)?;
    let keys = cursor.count("metadata keys", KEY_BYTES_MIN)?;
    let meta = parse_meta(&mut cursor, keys)?;
    if meta.str("general.type") == Some("adapter") {
        return Err(FormatError::adapter("general.type is \"adapter\""));
    }
    let architecture = match (inherited, meta.str("general.architecture")) {
        (Some(architecture), _) => architecture.clone(),
        (None, Some(name)) => architecture_of(name),
        (None, None) => {
            return Err(FormatError::Gguf("general.architecture is missing".to_owned()));
        }
    };
    let alignment = alignment(&meta)?;
    let mut infos = Vec::with_capacity(tensors);
    for _ in 0..tensors {
        infos.push(parse_info(&mut cursor, &architecture, file)?);
    }
    let head_bytes = cursor.position();
    place(&mut infos, head_bytes, bytes.len(), alignment)?;
    Ok(Header { architecture, meta, entries: infos, head_bytes })
}

/// Reads magic and version.
fn check_version(cursor: &mut Cursor) -> Result<(), FormatError> {
    if cursor.take(4)? != MAGIC {
        return Err(FormatError::Gguf("the file does not begin with \"GGUF\"".to_owned()));
    }
    let version = cursor.u32()?;
    match version {
        2 | 3 => Ok(()),
        _ if version.swap_bytes() <= 3 => Err(FormatError::Unsupported("a big-endian GGUF file".to_owned())),
        _ => Err(FormatError::Unsupported(format!("GGUF version {version}, readable are 2 and 3"))),
    }
}

/// Reads the metadata.
fn parse_meta(cursor: &mut Cursor, keys: usize) -> Result<GgufMeta, FormatError> {
    if keys > KEYS_MAX {
        return Err(FormatError::Gguf(format!("{keys} metadata keys, allowed are {KEYS_MAX}")));
    }
    let mut entries = Vec::with_capacity(keys);
    for _ in 0..keys {
        let key = cursor.key()?;
        let kind = cursor.u32()?;
        let value = cursor.value(kind).map_err(|error| in_key(key, error))?;
        entries.push((key.into(), value));
    }
    GgufMeta::new(entries)
}

/// The alignment of tensor data.
fn alignment(meta: &GgufMeta) -> Result<u64, FormatError> {
    let key = "general.alignment";
    if meta.get(key).is_none() {
        return Ok(ALIGNMENT_DEFAULT);
    }
    match meta.u64(key) {
        Some(alignment) if alignment.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&alignment) => Ok(alignment),
        // The value may be a list as long as the file, so the message omits it.
        other => {
            let other = other.map_or_else(|| "no whole number".to_owned(), |number| number.to_string());
            let allowed = format!("allowed are powers of two from 8 to {ALIGNMENT_MAX}");
            Err(FormatError::Gguf(format!("{key} is {other}, {allowed}")))
        }
    }
}

/// Reads one tensor info. The returned span is relative to the start of the data.
fn parse_info(cursor: &mut Cursor, architecture: &Architecture, file: usize) -> Result<Entry, FormatError> {
    let name = cursor.key()?;
    let wrong = |what: String| FormatError::Gguf(format!("tensor {}: {what}", quote(name)));
    let dims = cursor.u32()?;
    if !(1..=DIMS_MAX).contains(&dims) {
        return Err(wrong(format!("{dims} dimensions, allowed are 1 to {DIMS_MAX}")));
    }
    let mut shape = Vec::with_capacity(dims as usize);
    for _ in 0..dims {
        let dim = cursor.u64()?;
        let dim = usize::try_from(dim).ok().filter(|&dim| dim > 0);
        shape.push(dim.ok_or_else(|| wrong("a dimension is 0 or too large".to_owned()))?);
    }
    // ggml lists the fastest-moving dimension first.
    shape.reverse();
    let kind = GgmlType::from_id(cursor.u32()?)
        .map_err(|kind| FormatError::Unsupported(format!("tensor {} has type {kind}", quote(name))))?;
    let cols = shape[shape.len() - 1];
    let row_bytes = kind.row_bytes(cols).ok_or_else(|| {
        wrong(format!("rows of {cols} elements are not whole {} blocks of {}", kind.name(), kind.block().0))
    })?;
    let bytes = shape[..shape.len() - 1].iter().try_fold(row_bytes, |bytes, &dim| bytes.checked_mul(dim));
    let bytes = bytes.ok_or_else(|| wrong(format!("shape {shape:?} overflows")))?;
    let start = usize::try_from(cursor.u64()?).map_err(|_| wrong("its offset is too large".to_owned()))?;
    let end = start.checked_add(bytes).ok_or_else(|| wrong("its offset is too large".to_owned()))?;
    let span = Span { file, range: start..end };
    let encoding = kind.encoding();
    let storage = match encoding {
        Encoding::Quant(_) => Storage::Blocks(span, kind),
        _ => Storage::Float(span),
    };
    let name = names::canonical(name, architecture);
    if ONE_ROW.iter().any(|matrix| name.ends_with(matrix)) && shape.len() == 1 {
        shape.insert(0, 1);
    }
    let info = TensorInfo { shape, encoding, bytes: bytes as u64 };
    Ok(Entry { name, info, storage })
}

/// Moves the spans of `entries` to the start of the data, and checks alignment, ends and overlaps.
fn place(entries: &mut [Entry], head_end: usize, file_bytes: usize, alignment: u64) -> Result<(), FormatError> {
    let alignment = alignment as usize;
    let data_start = head_end
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| FormatError::Gguf("the head is too long".to_owned()))?;
    let data_bytes = file_bytes.saturating_sub(data_start);
    entries.sort_unstable_by_key(|entry| span_of(&entry.storage).range.start);
    let mut free_from = 0;
    for entry in entries {
        let span = span_of_mut(&mut entry.storage);
        let wrong = |what: String| FormatError::Gguf(format!("tensor {}: {what}", quote(&entry.name)));
        if span.range.end > data_bytes {
            return Err(wrong(format!(
                "bytes {}..{} of the data, which has only {data_bytes}",
                span.range.start, span.range.end
            )));
        }
        if !span.range.start.is_multiple_of(alignment) {
            return Err(wrong(format!("offset {} is not aligned to {alignment}", span.range.start)));
        }
        if span.range.start < free_from {
            return Err(wrong(format!(
                "begins at byte {} of the data, inside a tensor that ends at {free_from}",
                span.range.start
            )));
        }
        free_from = span.range.end;
        // Cannot overflow: both ends are within the data, and the data within the file.
        span.range = span.range.start + data_start..span.range.end + data_start;
    }
    Ok(())
}

/// The one span of a GGUF tensor.
fn span_of(storage: &Storage) -> &Span {
    match storage {
        Storage::Float(span)
        | Storage::Blocks(span, _)
        | Storage::Affine { codes: span, .. }
        | Storage::Micro { codes: span, .. }
        | Storage::Turns { parts: [span, _], .. } => span,
        Storage::Grouped(parts) => &parts.codes.0,
        Storage::F8(parts) => &parts.numbers,
        Storage::Scaled(scaled) => span_of(&scaled.storage),
    }
}

/// The one span of a GGUF tensor, mutable.
fn span_of_mut(storage: &mut Storage) -> &mut Span {
    match storage {
        Storage::Float(span)
        | Storage::Blocks(span, _)
        | Storage::Affine { codes: span, .. }
        | Storage::Micro { codes: span, .. }
        | Storage::Turns { parts: [span, _], .. } => span,
        Storage::Grouped(parts) => &mut parts.codes.0,
        Storage::F8(parts) => &mut parts.numbers,
        Storage::Scaled(scaled) => span_of_mut(&mut scaled.storage),
    }
}
