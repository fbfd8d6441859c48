//! A bounds-checked reader over the bytes of a GGUF file: numbers, strings, arrays.
//!
//! It allocates only for data that it has already seen in the file, and never more than the file could hold.

use super::meta::{GgufStrings, GgufValue};
use crate::error::{FormatError, quote};

/// Longest metadata key or tensor name, from the GGUF specification.
const KEY_BYTES_MAX: usize = 65_535;

/// A position in a file's bytes.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes left.
    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], FormatError> {
        if count > self.remaining() {
            return Err(FormatError::Gguf(format!(
                "the file ends after {} bytes where {count} more were expected at byte {}",
                self.bytes.len(),
                self.at
            )));
        }
        let slice = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(slice)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a count of items that take at least `least_bytes` each. Refuses it if the rest of the file cannot hold them.
    pub(super) fn count(&mut self, what: &str, least_bytes: usize) -> Result<usize, FormatError> {
        let count = self.u64()?;
        let possible = self.remaining() / least_bytes.max(1);
        match usize::try_from(count) {
            Ok(count) if count <= possible => Ok(count),
            _ => Err(FormatError::Gguf(format!(
                "{count} {what} are announced at byte {}, the {} bytes that follow hold at most {possible}",
                self.at,
                self.remaining()
            ))),
        }
    }

    /// A length-prefixed UTF-8 string, borrowed from the file.
    pub(super) fn str(&mut self) -> Result<&'a str, FormatError> {
        let length = self.count("bytes of text", 1)?;
        let start = self.at;
        std::str::from_utf8(self.take(length)?)
            .map_err(|_| FormatError::Gguf(format!("the text at byte {start} is not UTF-8")))
    }

    /// A metadata key or a tensor name.
    pub(super) fn key(&mut self) -> Result<&'a str, FormatError> {
        let key = self.str()?;
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(FormatError::Gguf(format!("a name has {} bytes, allowed are 1 to {KEY_BYTES_MAX}", key.len())));
        }
        Ok(key)
    }

    /// A metadata value of the given type number.
    pub(super) fn value(&mut self, kind: u32) -> Result<GgufValue, FormatError> {
        Ok(match kind {
            0 => GgufValue::U64(u8::from_le_bytes(self.array()?).into()),
            1 => GgufValue::I64(i8::from_le_bytes(self.array()?).into()),
            2 => GgufValue::U64(u16::from_le_bytes(self.array()?).into()),
            3 => GgufValue::I64(i16::from_le_bytes(self.array()?).into()),
            4 => GgufValue::U64(self.u32()?.into()),
            5 => GgufValue::I64(i32::from_le_bytes(self.array()?).into()),
            6 => GgufValue::F64(f32::from_le_bytes(self.array()?).into()),
            7 => GgufValue::Bool(self.bool()?),
            8 => GgufValue::Str(self.str()?.into()),
            9 => self.array_value()?,
            10 => GgufValue::U64(self.u64()?),
            11 => GgufValue::I64(i64::from_le_bytes(self.array()?)),
            12 => GgufValue::F64(f64::from_le_bytes(self.array()?)),
            _ => {
                return Err(FormatError::Gguf(format!("metadata type number {kind} does not exist")));
            }
        })
    }

    fn bool(&mut self) -> Result<bool, FormatError> {
        match self.take(1)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            byte => Err(FormatError::Gguf(format!("a boolean has the value {byte}"))),
        }
    }

    /// An array: element type, count, elements. Arrays of arrays are refused; no model metadata uses them.
    fn array_value(&mut self) -> Result<GgufValue, FormatError> {
        let kind = self.u32()?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => {
                return Err(FormatError::Gguf("an array of arrays in the metadata".to_owned()));
            }
            _ => {
                return Err(FormatError::Gguf(format!("metadata type number {kind} does not exist")));
            }
        };
        let count = self.count("array elements", width)?;
        if kind == 8 {
            return Ok(GgufValue::Strings(Box::new(self.strings(count)?)));
        }
        let bytes = self.take(count * width)?;
        Ok(numbers(kind, bytes))
    }

    /// Reads `count` strings into one block of text. The first pass adds up their lengths, so that the text is allocated once.
    fn strings(&mut self, count: usize) -> Result<GgufStrings, FormatError> {
        let start = self.at;
        let mut text_bytes = 0;
        for _ in 0..count {
            text_bytes += self.str()?.len();
        }
        if u32::try_from(text_bytes).is_err() {
            return Err(FormatError::Gguf(format!(
                "{text_bytes} bytes of text in one array, allowed are {}",
                u32::MAX
            )));
        }
        self.at = start;
        let mut strings = GgufStrings::with_capacity(count, text_bytes);
        for _ in 0..count {
            strings.push(self.str()?);
        }
        Ok(strings)
    }
}

/// A numeric array in the narrowest of the [`GgufValue`] forms, so that memory stays in proportion to the file.
fn numbers(kind: u32, bytes: &[u8]) -> GgufValue {
    match kind {
        0 => GgufValue::Bytes(bytes.into()),
        1 => GgufValue::I32s(bytes.iter().map(|&b| i32::from(b as i8)).collect()),
        2 => GgufValue::U32s(words(bytes, |b| u32::from(u16::from_le_bytes(b)))),
        3 => GgufValue::I32s(words(bytes, |b| i32::from(i16::from_le_bytes(b)))),
        4 => GgufValue::U32s(words(bytes, u32::from_le_bytes)),
        5 => GgufValue::I32s(words(bytes, i32::from_le_bytes)),
        6 => GgufValue::F32s(words(bytes, f32::from_le_bytes)),
        7 => GgufValue::Bools(bytes.iter().map(|&b| b != 0).collect()),
        10 => GgufValue::U64s(words(bytes, u64::from_le_bytes)),
        11 => GgufValue::I64s(words(bytes, i64::from_le_bytes)),
        _ => GgufValue::F64s(words(bytes, f64::from_le_bytes)),
    }
}

/// Converts the `N`-byte little-endian words of `bytes`.
fn words<const N: usize, T>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Box<[T]> {
    bytes
        .chunks_exact(N)
        .map(|chunk| {
            let mut word = [0; N];
            word.copy_from_slice(chunk);
            convert(word)
        })
        .collect()
}

/// Names a key in an error message.
pub(super) fn in_key(key: &str, error: FormatError) -> FormatError {
    match error {
        FormatError::Gguf(message) => FormatError::Gguf(format!("in {}: {message}", quote(key))),
        other => other,
    }
}
