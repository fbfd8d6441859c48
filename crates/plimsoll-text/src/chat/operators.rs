//! The operators in which Python differs from the library: `+`, `~`, `*`, `in` and slices.
//!
//! The operators are functions under names that no template can contain; `program` calls them instead of the library's. Lists are built
//! completely, whereas the library stacks lazy views, one level for each message that a template appends.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::python::{self, to_text};

/// The names under which programs call the operators.
pub(super) mod name {
    pub(in super::super) const ADD: &str = "operator +";
    pub(in super::super) const CONCAT: &str = "operator ~";
    pub(in super::super) const MULTIPLY: &str = "operator *";
    pub(in super::super) const IN: &str = "operator in";
    pub(in super::super) const SLICE: &str = "operator [:]";
}

/// Registers the operators, and the function and tests that the library lacks or that differ there.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function(name::ADD, add);
    environment.add_function(name::CONCAT, |a: &Value, b: &Value| Ok::<_, Error>(to_text(a)? + &to_text(b)?));
    environment.add_function(name::MULTIPLY, multiply);
    environment.add_function(name::IN, contains);
    environment.add_function(name::SLICE, slice);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_test("iterable", |value: &Value| match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => true,
        // In Jinja2 undefined is iterable and Python's `None` is not; in the library it is the reverse.
        kind => kind == ValueKind::Undefined,
    });
    // Any value with a length and items, including strings and maps.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)
    });
}

fn wrong(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn items(value: &Value) -> Result<Vec<Value>, Error> {
    value.try_iter()?.checked().collect()
}

/// Returns a list, or a tuple if `like` is one.
fn list_like(like: &Value, items: Vec<Value>) -> Value {
    if like.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) }
}

fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(a) && is_list(b) && a.is_tuple() == b.is_tuple() {
        let mut out = items(a)?;
        out.extend(items(b)?);
        return Ok(list_like(a, out));
    }
    number(a, b, i128::checked_add, |x, y| x + y)
        .ok_or_else(|| wrong(format!("cannot add {} and {}", a.kind(), b.kind())))
}

/// Computes arithmetic on two numbers. `None` if they are not numbers or the result does not fit.
fn number(
    a: &Value,
    b: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Option<Value> {
    let numeric = |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool);
    if !numeric(a) || !numeric(b) {
        return None;
    }
    let integer = |v: &Value| v.is_integer() || !v.is_number();
    if integer(a) && integer(b) {
        let result = integers(i128::try_from(a.clone()).ok()?, i128::try_from(b.clone()).ok()?)?;
        return Some(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    let float = |v: &Value| f64::try_from(v.clone()).ok();
    Some(Value::from(floats(float(a)?, float(b)?)))
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    let (sequence, count) = if b.as_str().is_some() || is_list(b) { (b, a) } else { (a, b) };
    let integer = count.is_integer() || !count.is_number();
    let times = || count.as_i64().filter(|_| integer).map(|n| usize::try_from(n).unwrap_or(0));
    if let (Some(text), Some(times)) = (sequence.as_str(), times()) {
        return Ok(Value::from(text.repeat(times)));
    }
    if let (true, Some(times)) = (is_list(sequence), times()) {
        let once = items(sequence)?;
        return Ok(list_like(sequence, std::iter::repeat_n(&once, times).flatten().cloned().collect()));
    }
    number(a, b, i128::checked_mul, |x, y| x * y)
        .ok_or_else(|| wrong(format!("cannot multiply {} and {}", a.kind(), b.kind())))
}

fn contains(state: &mut State<'_, '_>, needle: &Value, haystack: &Value) -> Result<bool, Error> {
    if haystack.as_str().is_some() && needle.as_str().is_none() {
        return Err(wrong(format!("'in <string>' requires string as left operand, not {}", needle.kind())));
    }
    if matches!(haystack.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number) {
        return Err(wrong(format!("a value of type {} is not iterable", haystack.kind())));
    }
    minijinja::tests::is_in(state, needle, haystack)
}

fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |v: &Value| -> Result<Option<i64>, Error> {
        if v.is_none() || v.is_undefined() {
            return Ok(None);
        }
        let message = || wrong(format!("a slice needs integers, not {}", v.kind()));
        v.as_i64().map(Some).ok_or_else(message)
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(wrong("slice step cannot be zero".to_owned()));
    }
    if let Some(text) = value.as_str() {
        let characters: Vec<char> = text.chars().collect();
        let picked = python::slice_indices(characters.len(), start, stop, step);
        return Ok(Value::from(picked.map(|i| characters[i]).collect::<String>()));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let all = items(value)?;
            let picked = python::slice_indices(all.len(), start, stop, step).map(|i| all[i].clone());
            Ok(list_like(value, picked.collect()))
        }
        kind => Err(wrong(format!("cannot slice a value of type {kind}"))),
    }
}
