//! The methods of strings that the library's Python compatibility lacks.

use minijinja::value::{Tuple, Value, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Registers the methods.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(call);
}

fn call(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return unknown_method_callback(state, value, method, args) };
    match method {
        "join" => {
            let (items,): (Value,) = from_args(args)?;
            state.apply_filter("join", &[items, value.clone()])
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            partition(text, separator, method == "rpartition")
        }
        "rsplit" => {
            let (separator, times): (&str, Option<i64>) = from_args(args)?;
            rsplit(text, separator, times.unwrap_or(-1))
        }
        _ => unknown_method_callback(state, value, method, args),
    }
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
