//! The filters in which Jinja2 differs from the library: filters that print values as Python does, and their options.

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};

use super::python::{self, Json, to_text};

/// Registers the filters.
pub(super) fn install(environment: &mut Environment<'static>) {
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => minijinja::filters::length(value),
        });
    }
    environment.add_filter("indent", indent);
    environment.add_filter("join", join);
    environment.add_filter("replace", replace);
    environment.add_filter("string", to_text);
    environment.add_filter("tojson", tojson);
}

fn wrong(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn default(value: &Value, fallback: Option<Value>, boolean: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let fallback: Option<Value> = fallback.or(options.get("default_value")?);
    let boolean: Option<Value> = boolean.or(options.get("boolean")?);
    options.assert_all_used()?;
    let falsy = boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true();
    Ok(if value.is_undefined() || falsy { fallback.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

/// `str(value).replace(str(from), str(to), count)`; a negative count means all.
fn replace(value: &Value, from: &Value, to: &Value, count: Option<i64>) -> Result<String, Error> {
    let (text, from, to) = (to_text(value)?, to_text(from)?, to_text(to)?);
    Ok(match usize::try_from(count.unwrap_or(-1)) {
        Ok(count) => text.replacen(&from, &to, count),
        Err(_) => text.replace(&from, &to),
    })
}

fn join(value: &Value, separator: Option<&Value>, attribute: Option<&str>, options: Kwargs) -> Result<String, Error> {
    let separator: Option<&Value> = separator.or(options.get("d")?);
    let separator = separator.map_or(Ok(String::new()), to_text)?;
    let attribute: Option<&str> = attribute.or(options.get("attribute")?);
    options.assert_all_used()?;
    let mut text = String::new();
    if value.is_undefined() {
        return Ok(text);
    }
    for (index, item) in value.try_iter()?.checked().enumerate() {
        if index > 0 {
            text.push_str(&separator);
        }
        let mut item = item?;
        if let Some(attribute) = attribute {
            item = item.get_attr(attribute)?;
        }
        python::write_str(&mut text, &item)?;
    }
    Ok(text)
}

fn indent(
    text: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let text = to_text(text)?;
    let width: Option<Value> = width.or(options.get("width")?);
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let prefix = indentation(width.as_ref(), 4)?;
    let mut out = String::new();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let indented = if index == 0 { first } else { blank || !line.is_empty() };
        if indented {
            out.push_str(&prefix);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// An indentation given as a number of spaces or as text.
fn indentation(width: Option<&Value>, default: usize) -> Result<String, Error> {
    let Some(width) = width else {
        return Ok(" ".repeat(default));
    };
    if let Some(text) = width.as_str() {
        return Ok(text.to_owned());
    }
    let spaces = width.as_i64().map(|n| usize::try_from(n).unwrap_or(0));
    let spaces = spaces.ok_or_else(|| wrong(format!("cannot indent by {}: use a number or a text", width.kind())))?;
    Ok(" ".repeat(spaces))
}

/// `json.dumps` with the signature of the reference's filter.
fn tojson(value: &Value, ensure_ascii: Option<Value>, options: Kwargs) -> Result<String, Error> {
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
    let mut text = String::new();
    json.write(&mut text, value, 0)?;
    Ok(text)
}
