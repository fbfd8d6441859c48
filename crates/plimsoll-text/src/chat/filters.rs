//! The filters of templates, each charged before it works.
//!
//! The library's own filters do the work where they mean what Python means; programs reach them through a guard.
//! Filters with a result that can be much longer than their input (`join`, `replace`, `indent`, `format`, `tojson`,
//! `string`) are written here. A list that a filter returns lazily is made in full. Filters that are not in these
//! tables do not exist.

use std::fmt::Write;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::budget::{Text, charge, charge_deep, charge_shallow};
use super::operators::items;
use super::python::{self, Json};

/// What a filter reads of its operands.
#[derive(Clone, Copy)]
enum Reads {
    /// The bytes of strings, the items of lists.
    Surface,
    /// Everything inside.
    All,
    /// What it charges for itself.
    Itself,
}

/// Every filter: its name, the name of the guarded function, and what it reads.
const FILTERS: &[(&str, &str, Reads)] = &[
    ("abs", "filter abs", Reads::Surface),
    ("attr", "filter attr", Reads::Surface),
    ("bool", "filter bool", Reads::Surface),
    ("capitalize", "filter capitalize", Reads::Surface),
    ("count", "filter count", Reads::Surface),
    ("d", "filter d", Reads::Surface),
    ("default", "filter default", Reads::Surface),
    ("dictsort", "filter dictsort", Reads::All),
    ("e", "filter e", Reads::Surface),
    ("escape", "filter escape", Reads::Surface),
    ("first", "filter first", Reads::Surface),
    ("float", "filter float", Reads::Surface),
    ("format", "filter format", Reads::Itself),
    ("groupby", "filter groupby", Reads::All),
    ("indent", "filter indent", Reads::Itself),
    ("int", "filter int", Reads::Surface),
    ("items", "filter items", Reads::Surface),
    ("join", "filter join", Reads::Itself),
    ("last", "filter last", Reads::Surface),
    ("length", "filter length", Reads::Surface),
    ("lines", "filter lines", Reads::Surface),
    ("list", "filter list", Reads::Surface),
    ("lower", "filter lower", Reads::Surface),
    ("map", "filter map", Reads::All),
    ("max", "filter max", Reads::All),
    ("min", "filter min", Reads::All),
    ("reject", "filter reject", Reads::All),
    ("rejectattr", "filter rejectattr", Reads::All),
    ("replace", "filter replace", Reads::Itself),
    ("reverse", "filter reverse", Reads::Surface),
    ("round", "filter round", Reads::Surface),
    ("safe", "filter safe", Reads::Surface),
    ("select", "filter select", Reads::All),
    ("selectattr", "filter selectattr", Reads::All),
    ("sort", "filter sort", Reads::All),
    ("split", "filter split", Reads::Surface),
    ("string", "filter string", Reads::Itself),
    ("sum", "filter sum", Reads::All),
    ("title", "filter title", Reads::Surface),
    ("tojson", "filter tojson", Reads::Itself),
    ("trim", "filter trim", Reads::Surface),
    ("unique", "filter unique", Reads::All),
    ("upper", "filter upper", Reads::Surface),
    ("urlencode", "filter urlencode", Reads::Surface),
];
/// Filters of the library that could be reached by name through `map`, and may not.
const REMOVED: &[&str] = &["pprint", "batch", "slice", "zip", "chain"];

/// The guarded function that stands for a filter.
pub(super) fn guarded_name(filter: &str) -> Option<&'static str> {
    FILTERS.iter().find(|(name, _, _)| *name == filter).map(|(_, guarded, _)| *guarded)
}

/// Registers all filters and their guards.
pub(super) fn install(environment: &mut Environment<'static>) {
    for name in REMOVED {
        environment.remove_filter(name);
    }
    environment.add_filter("format", |text: &str, arguments: Rest<Value>| {
        checked_format(FormatStyle::Printf, text, &arguments)
    });
    environment.add_filter("indent", indent);
    environment.add_filter("join", join);
    environment.add_filter("replace", |text: &Value, from: &str, to: &Value, count: Option<i64>| {
        replace(&to_text(text)?, from, &to_text(to)?, count.unwrap_or(-1))
    });
    environment.add_filter("string", |value: &Value| {
        let mut text = Text::default();
        python::write_str(&mut text, value)?;
        Ok::<_, Error>(text.into_value())
    });
    environment.add_filter("tojson", tojson);
    for &(name, guarded, reads) in FILTERS {
        environment.add_function(guarded, move |state: &mut State<'_, '_>, mut args: Rest<Value>, named: Kwargs| {
            if named.args().next().is_some() {
                args.push(Value::from(named));
            }
            apply(state, name, reads, &args)
        });
    }
}

fn apply(state: &mut State<'_, '_>, name: &str, reads: Reads, args: &[Value]) -> Result<Value, Error> {
    for argument in args {
        match reads {
            Reads::Surface => charge_shallow(argument)?,
            Reads::All => charge_deep(argument)?,
            Reads::Itself => {}
        }
    }
    let result = state.apply_filter(name, args)?;
    let maybe_lazy = matches!(result.kind(), ValueKind::Iterable | ValueKind::Seq);
    if maybe_lazy && !result.is_tuple() {
        return items(&result).map(Value::from);
    }
    Ok(result)
}

fn wrong(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// The value as Python's `str` would have it, charged.
pub(super) fn to_text(value: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    python::write_str(&mut text, value)?;
    Ok(text.as_str().to_owned())
}

/// `text.replace(from, to, count)`; a negative count means all.
pub(super) fn replace(text: &str, from: &str, to: &str, count: i64) -> Result<Value, Error> {
    let found = if from.is_empty() { text.len() + 1 } else { text.matches(from).count() };
    charge(text.len().saturating_add(found.saturating_mul(to.len())))?;
    Ok(Value::from(match usize::try_from(count) {
        Ok(count) => text.replacen(from, to, count),
        Err(_) => text.replace(from, to),
    }))
}

/// Formats with a check on widths: a number in the format is a number of bytes in the result.
pub(super) fn checked_format(style: FormatStyle, text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let widest = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    if widest > 3 {
        return Err(wrong("a number in a format has more than 3 digits".to_owned()));
    }
    let mut longest = 1000;
    for argument in arguments {
        longest = longest.max(to_text(argument)?.len());
    }
    charge(text.len().saturating_mul(longest))?;
    format(style, text, arguments).map(Value::from)
}

fn join(value: &Value, separator: Option<&str>, attribute: Option<&str>, options: Kwargs) -> Result<Value, Error> {
    let separator = separator.or(options.get("d")?).unwrap_or_default();
    let attribute: Option<&str> = attribute.or(options.get("attribute")?);
    options.assert_all_used()?;
    let mut text = Text::default();
    if value.is_undefined() {
        return Ok(text.into_value());
    }
    for (index, item) in value.try_iter()?.checked().enumerate() {
        if index > 0 {
            text.write_str(separator).map_err(|_| too_long())?;
        }
        let mut item = item?;
        if let Some(attribute) = attribute {
            item = item.get_attr(attribute)?;
        }
        python::write_str(&mut text, &item)?;
    }
    Ok(text.into_value())
}

fn too_long() -> Error {
    Error::new(ErrorKind::WriteFailure, "the text is too long")
}

fn indent(
    text: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let text = to_text(text)?;
    let width: Option<Value> = width.or(options.get("width")?);
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let prefix = indentation(width.as_ref(), 4)?;
    let mut out = Text::default();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.write_char('\n').map_err(|_| too_long())?;
        }
        let indented = if index == 0 { first } else { blank || !line.is_empty() };
        if indented {
            out.write_str(&prefix).map_err(|_| too_long())?;
        }
        out.write_str(line).map_err(|_| too_long())?;
    }
    Ok(out.into_value())
}

/// An indentation given as a number of spaces or as text.
fn indentation(width: Option<&Value>, default: usize) -> Result<String, Error> {
    let Some(width) = width else {
        return Ok(" ".repeat(default));
    };
    if let Some(text) = width.as_str() {
        charge(text.len())?;
        return Ok(text.to_owned());
    }
    let spaces = width.as_i64().map(|n| usize::try_from(n).unwrap_or(0));
    let spaces = spaces.ok_or_else(|| wrong(format!("cannot indent by {}", width.kind())))?;
    charge(spaces)?;
    Ok(" ".repeat(spaces))
}

/// `json.dumps` with the signature that the reference gives the filter.
fn tojson(value: &Value, ensure_ascii: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let ensure_ascii: Option<Value> = ensure_ascii.or(options.get("ensure_ascii")?);
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        Some(width) => Some(indentation(Some(&width), 0)?),
        None => None,
    };
    let separators = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(wrong("separators must be a pair".to_owned())),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let json = Json {
        ensure_ascii: ensure_ascii.is_some_and(|value| value.is_true()),
        indent,
        separators,
        sort_keys: sort_keys.unwrap_or(false),
    };
    let mut text = Text::default();
    json.write(&mut text, value, 0)?;
    Ok(text.into_value())
}
