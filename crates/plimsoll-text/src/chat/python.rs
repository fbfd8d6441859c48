//! Python's forms of values as text: `str`, `repr` and `json.dumps`, and the arithmetic of its slices.
//!
//! Templates print lists, floats and JSON, and models were trained on Python's output. Text is written through [`fmt::Write`], so the
//! writer limits its length.

use std::fmt::{self, Write};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::numbers::is_digits;

/// The deepest nesting of lists and maps that is printed. JSON from a client has at most 128 levels.
const DEPTH_MAX: usize = 150;

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        let message = format!("the template prints a value of more than {DEPTH_MAX} nested lists and maps");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(())
}

fn failed(_: fmt::Error) -> Error {
    Error::new(ErrorKind::WriteFailure, "the text is too long")
}

/// Writes `str(value)`. An undefined value is empty, as in Jinja2.
pub(super) fn write_str(out: &mut impl Write, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(failed),
        None => write_repr(out, value, 0),
    }
}

/// `str(value)`.
pub(super) fn to_text(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_str(&mut text, value)?;
    Ok(text)
}

fn write_repr(out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::None => out.write_str("None").map_err(failed),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }).map_err(failed),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()).map_err(failed),
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            out.write_char(if tuple { '(' } else { '[' }).map_err(failed)?;
            let mut count = 0;
            for item in value.try_iter()?.checked() {
                if count > 0 {
                    out.write_str(", ").map_err(failed)?;
                }
                write_repr(out, &item?, depth + 1)?;
                count += 1;
            }
            let end = match (tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            };
            out.write_str(end).map_err(failed)
        }
        ValueKind::Map => {
            out.write_char('{').map_err(failed)?;
            for (index, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                if index > 0 {
                    out.write_str(", ").map_err(failed)?;
                }
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ").map_err(failed)?;
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.write_char('}').map_err(failed)
        }
        _ => write!(out, "{value}").map_err(failed),
    }
}

fn write_number(out: &mut impl Write, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        return write!(out, "{value}").map_err(failed);
    }
    let float = f64::try_from(value.clone())?;
    out.write_str(&float_repr(float)).map_err(failed)
}

/// `repr` of a float: the shortest digits that parse to the same float, in scientific notation from 1e16 up and below 1e-4.
fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let magnitude = float.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{float:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = match exponent.strip_prefix('-') {
            Some(digits) => ('-', digits),
            None => ('+', exponent),
        };
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    let text = format!("{float}");
    if text.contains('.') { text } else { text + ".0" }
}

/// Writes a string as Python prints it inside a list.
fn write_quoted(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if !is_printable(c) => match u32::from(c) {
                code @ ..=0xff => write!(out, "\\x{code:02x}")?,
                code @ ..=0xffff => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}

/// Whether Python prints a character without escaping it. Exact for controls, spaces, format characters and private use. Unassigned code
/// points count as printable here.
fn is_printable(c: char) -> bool {
    let format = matches!(u32::from(c),
        0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x180e | 0x200b..=0x200f | 0x2028..=0x202e | 0x2060..=0x206f
        | 0xfeff | 0xfff9..=0xfffb | 0xe000..=0xf8ff | 0xe0001..=0xe007f | 0xf0000..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || format)
}

/// The options of `json.dumps` that templates use.
pub(super) struct Json {
    /// Whether to escape all characters beyond ASCII.
    pub(super) ensure_ascii: bool,
    /// The indentation of items on separate lines; none for a single line.
    pub(super) indent: Option<String>,
    /// The separator between items, and between a key and its value.
    pub(super) separators: (String, String),
    /// Whether to order maps by key.
    pub(super) sort_keys: bool,
}

impl Json {
    /// Writes a value. Undefined values and functions are errors, as in Python.
    pub(super) fn write(&self, out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => out.write_str("null").map_err(failed),
            ValueKind::Bool => out.write_str(if value.is_true() { "true" } else { "false" }).map_err(failed),
            ValueKind::Number => self.write_number(out, value),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()).map_err(failed),
            ValueKind::Seq | ValueKind::Iterable => self.write_list(out, value, depth),
            ValueKind::Map => self.write_map(out, value, depth),
            _ if is_digits(value) => write!(out, "{value}").map_err(failed),
            kind => {
                Err(Error::new(ErrorKind::BadSerialization, format!("a value of type {kind} is not JSON serializable")))
            }
        }
    }

    fn write_list(&self, out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
        out.write_char('[').map_err(failed)?;
        let mut empty = true;
        for item in value.try_iter()?.checked() {
            self.write_gap(out, empty, depth + 1).map_err(failed)?;
            empty = false;
            self.write(out, &item?, depth + 1)?;
        }
        self.write_end(out, empty, depth, ']').map_err(failed)
    }

    fn write_map(&self, out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
        if self.sort_keys {
            keys.sort();
        }
        out.write_char('{').map_err(failed)?;
        let empty = keys.is_empty();
        for (index, key) in keys.iter().enumerate() {
            self.write_gap(out, index == 0, depth + 1).map_err(failed)?;
            match key.as_str() {
                Some(text) => self.write_string(out, text).map_err(failed)?,
                None => {
                    out.write_char('"').map_err(failed)?;
                    self.write(out, key, depth + 1)?;
                    out.write_char('"').map_err(failed)?;
                }
            }
            out.write_str(&self.separators.1).map_err(failed)?;
            self.write(out, &value.get_item(key)?, depth + 1)?;
        }
        self.write_end(out, empty, depth, '}').map_err(failed)
    }

    fn write_gap(&self, out: &mut impl Write, first: bool, depth: usize) -> fmt::Result {
        if !first {
            out.write_str(&self.separators.0)?;
        }
        self.write_line(out, depth)
    }

    fn write_end(&self, out: &mut impl Write, empty: bool, depth: usize, end: char) -> fmt::Result {
        if !empty {
            self.write_line(out, depth)?;
        }
        out.write_char(end)
    }

    fn write_line(&self, out: &mut impl Write, depth: usize) -> fmt::Result {
        if let Some(indent) = &self.indent {
            out.write_char('\n')?;
            for _ in 0..depth {
                out.write_str(indent)?;
            }
        }
        Ok(())
    }

    fn write_number(&self, out: &mut impl Write, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            return write!(out, "{value}").map_err(failed);
        }
        let float = f64::try_from(value.clone())?;
        let text = match float_repr(float).as_str() {
            "nan" => "NaN".to_owned(),
            "inf" => "Infinity".to_owned(),
            "-inf" => "-Infinity".to_owned(),
            text => text.to_owned(),
        };
        out.write_str(&text).map_err(failed)
    }

    fn write_string(&self, out: &mut impl Write, text: &str) -> fmt::Result {
        out.write_char('"')?;
        for c in text.chars() {
            match c {
                '"' => out.write_str("\\\"")?,
                '\\' => out.write_str("\\\\")?,
                '\n' => out.write_str("\\n")?,
                '\r' => out.write_str("\\r")?,
                '\t' => out.write_str("\\t")?,
                '\u{8}' => out.write_str("\\b")?,
                '\u{c}' => out.write_str("\\f")?,
                c if u32::from(c) < 0x20 || self.ensure_ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}")?;
                    }
                }
                c => out.write_char(c)?,
            }
        }
        out.write_char('"')
    }
}

/// The indexes that `[start:stop:step]` selects from a sequence of `len` items; `step` is not zero.
pub(super) fn slice_indices(
    len: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i64| {
        let from_start = if bound < 0 { bound.saturating_add(len) } else { bound };
        from_start.clamp(low, high)
    };
    let first = start.map_or(if step > 0 { low } else { high }, clamp);
    let end = stop.map_or(if step > 0 { high } else { low }, clamp);
    let mut next = Some(first);
    std::iter::from_fn(move || {
        let index = next.filter(|&i| if step > 0 { i < end } else { i > end })?;
        next = index.checked_add(step);
        usize::try_from(index).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_look_as_in_python() {
        for (float, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (1e-4, "0.0001"),
            (2.5e-10, "2.5e-10"),
            (-0.0, "-0.0"),
            (1e100, "1e+100"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_repr(float), text);
        }
    }

    #[test]
    fn slices_pick_as_in_python() {
        let pick = |start, stop, step| slice_indices(5, start, stop, step).collect::<Vec<_>>();
        assert_eq!(pick(None, None, 1), [0, 1, 2, 3, 4]);
        assert_eq!(pick(None, None, -1), [4, 3, 2, 1, 0]);
        assert_eq!(pick(Some(-2), None, 1), [3, 4]);
        assert_eq!(pick(Some(1), Some(-1), 2), [1, 3]);
        assert_eq!(pick(Some(10), Some(0), -3), [4, 1]);
        assert_eq!(pick(Some(i64::MIN), Some(i64::MAX), i64::MAX), [0]);
        assert!(pick(Some(3), Some(1), 1).is_empty());
    }
}
