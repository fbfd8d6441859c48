//! The methods of strings, lists and maps, as Python has them.
//!
//! Most come from the library's Python compatibility. Here are those that it lacks, and those that need a bounded
//! result.

use minijinja::formatting::FormatStyle;
use minijinja::value::{Tuple, Value, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::budget::{charge_deep, charge_shallow};
use super::filters::{checked_format, replace};

/// Registers the methods.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(call);
}

fn call(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    charge_shallow(value)?;
    for argument in args {
        charge_shallow(argument)?;
    }
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(state, value, text, method, args)?
    {
        return Ok(result);
    }
    if method == "count" {
        charge_deep(value)?;
    }
    unknown_method_callback(state, value, method, args)
}

/// The methods of strings that are not left to the library; `None` for all others.
fn string_method(
    state: &mut State<'_, '_>,
    value: &Value,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "join" => {
            let (items,): (Value,) = from_args(args)?;
            state.apply_filter("join", &[items, value.clone()])?
        }
        "replace" => {
            let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(text, from, to, count.unwrap_or(-1))?
        }
        "format" => checked_format(FormatStyle::StrFormat, text, args)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            partition(text, separator, method == "rpartition")?
        }
        "rsplit" => {
            let (separator, times): (&str, Option<i64>) = from_args(args)?;
            rsplit(text, separator, times.unwrap_or(-1))?
        }
        _ => return Ok(None),
    }))
}

fn check_separator(separator: &str) -> Result<(), Error> {
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    Ok(())
}

fn partition(text: &str, separator: &str, from_end: bool) -> Result<Value, Error> {
    check_separator(separator)?;
    let found = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match (found, from_end) {
        (Some((before, after)), _) => [before, separator, after],
        (None, false) => [text, "", ""],
        (None, true) => ["", "", text],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from).to_vec())))
}

fn rsplit(text: &str, separator: &str, times: i64) -> Result<Value, Error> {
    check_separator(separator)?;
    let pieces = usize::try_from(times).map_or(usize::MAX, |times| times.saturating_add(1));
    let mut parts: Vec<Value> = text.rsplitn(pieces, separator).map(Value::from).collect();
    parts.reverse();
    Ok(Value::from(parts))
}
