//! The metadata of a GGUF file: typed key → value, for the tokenizer and the chat template.
//!
//! Numbers are stored in a few wide types, and arrays in narrow ones. The strings of an array share one block of text, since a vocabulary
//! has a quarter of a million of them.

use crate::error::{FormatError, quote};

/// All metadata of a GGUF file.
#[derive(Debug, Default)]
pub struct GgufMeta {
    /// Sorted by key.
    entries: Vec<(Box<str>, GgufValue)>,
}

/// One metadata value. Scalars do not keep the width of their integer or float type.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// An unsigned integer of any width.
    U64(u64),
    /// A signed integer of any width.
    I64(i64),
    /// A float of any width.
    F64(f64),
    /// A boolean.
    Bool(bool),
    /// A text.
    Str(Box<str>),
    /// An array of bytes.
    Bytes(Box<[u8]>),
    /// An array of 16-bit or 32-bit unsigned integers.
    U32s(Box<[u32]>),
    /// An array of 8-, 16- or 32-bit signed integers.
    I32s(Box<[i32]>),
    /// An array of 64-bit unsigned integers.
    U64s(Box<[u64]>),
    /// An array of 64-bit signed integers.
    I64s(Box<[i64]>),
    /// An array of 32-bit floats.
    F32s(Box<[f32]>),
    /// An array of 64-bit floats.
    F64s(Box<[f64]>),
    /// An array of booleans.
    Bools(Box<[bool]>),
    /// An array of texts. Boxed, so that a file full of tiny keys does not grow in memory.
    Strings(Box<GgufStrings>),
}

/// An array of texts in one allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GgufStrings {
    text: String,
    /// The end of each string in `text`, in bytes.
    ends: Vec<u32>,
}

impl GgufStrings {
    pub(super) fn with_capacity(count: usize, text_bytes: usize) -> GgufStrings {
        GgufStrings { text: String::with_capacity(text_bytes), ends: Vec::with_capacity(count) }
    }

    /// Appends one string. The reader has checked that all strings together stay below 4 GiB.
    pub(super) fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len() as u32);
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`, or `None` beyond the end.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)? as usize;
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1] as usize,
        };
        Some(&self.text[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

impl GgufMeta {
    /// Sorts the entries. Refuses a key that occurs twice.
    pub(super) fn new(mut entries: Vec<(Box<str>, GgufValue)>) -> Result<GgufMeta, FormatError> {
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(FormatError::Gguf(format!("the key {} occurs twice", quote(&pair[0].0))));
        }
        Ok(GgufMeta { entries })
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        let at = self.entries.binary_search_by(|(entry, _)| (**entry).cmp(key)).ok()?;
        Some(&self.entries[at].1)
    }

    /// All keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// The text of a key, or `None` if it is absent or of another type.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            GgufValue::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The non-negative integer of a key, of any stored width and sign.
    pub fn u64(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            GgufValue::U64(value) => Some(*value),
            GgufValue::I64(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// The float of a key (an integer counts too), rounded to f32.
    pub fn f32(&self, key: &str) -> Option<f32> {
        match self.get(key)? {
            GgufValue::F64(value) => Some(*value as f32),
            GgufValue::U64(value) => Some(*value as f32),
            GgufValue::I64(value) => Some(*value as f32),
            _ => None,
        }
    }

    /// The boolean of a key.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            GgufValue::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The array of texts of a key, for example `tokenizer.ggml.tokens`.
    pub fn strings(&self, key: &str) -> Option<&GgufStrings> {
        match self.get(key)? {
            GgufValue::Strings(strings) => Some(strings),
            _ => None,
        }
    }

    /// The array of 32-bit floats of a key, for example `tokenizer.ggml.scores`.
    pub fn f32s(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            GgufValue::F32s(values) => Some(values),
            _ => None,
        }
    }

    /// The array of signed integers of a key, for example `tokenizer.ggml.token_type`.
    pub fn i32s(&self, key: &str) -> Option<&[i32]> {
        match self.get(key)? {
            GgufValue::I32s(values) => Some(values),
            _ => None,
        }
    }

    /// The unsigned integers of a key, stored as an array of any integer type or as a single number.
    pub fn integers(&self, key: &str) -> Option<Vec<u64>> {
        fn all<T: Copy>(values: &[T]) -> Option<Vec<u64>>
        where
            u64: TryFrom<T>,
        {
            values.iter().map(|&value| u64::try_from(value).ok()).collect()
        }
        match self.get(key)? {
            GgufValue::Bytes(values) => all(values),
            GgufValue::U32s(values) => all(values),
            GgufValue::I32s(values) => all(values),
            GgufValue::U64s(values) => all(values),
            GgufValue::I64s(values) => all(values),
            _ => Some(vec![self.u64(key)?]),
        }
    }
}
