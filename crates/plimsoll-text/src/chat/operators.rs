//! The operators of templates, with Python's meaning and a charge for what they make.
//!
//! They are ordinary functions under names that no template can spell. Lists are always made in full: the lazy
//! views that the library would build can be stacked until walking them overflows the stack.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

use super::budget::{Text, charge, charge_deep, charge_shallow};
use super::python;

/// The names under which programs call the operators.
pub(super) mod name {
    pub(in super::super) const ADD: &str = "operator +";
    pub(in super::super) const CONCAT: &str = "operator ~";
    pub(in super::super) const MULTIPLY: &str = "operator *";
    pub(in super::super) const EQUAL: &str = "operator ==";
    pub(in super::super) const NOT_EQUAL: &str = "operator !=";
    pub(in super::super) const IN: &str = "operator in";
    pub(in super::super) const SLICE: &str = "operator [:]";
    pub(in super::super) const LIST: &str = "operator []";
    pub(in super::super) const TUPLE: &str = "operator ()";
    pub(in super::super) const MAP: &str = "operator {}";
}

/// Registers the operators and the functions that build values.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function(name::ADD, add);
    environment.add_function(name::CONCAT, concat);
    environment.add_function(name::MULTIPLY, multiply);
    environment.add_function(name::EQUAL, |a: &Value, b: &Value| equal(a, b));
    environment.add_function(name::NOT_EQUAL, |a: &Value, b: &Value| equal(a, b).map(|same| !same));
    environment.add_function(name::IN, contains);
    environment.add_function(name::SLICE, slice);
    environment.add_function(name::LIST, |items: Rest<Value>| finished(Value::from(items.0)));
    environment.add_function(name::TUPLE, |items: Rest<Value>| finished(Value::from(Tuple::from(items.0))));
    environment.add_function(name::MAP, |parts: Rest<Value>| {
        let pairs = parts.0.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
        finished(Value::from_pairs(pairs))
    });
    environment.add_function("dict", |value: Option<Value>, update: Kwargs| {
        finished(minijinja::functions::dict(value, update)?)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_test("iterable", |value: &Value| match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => true,
        // Jinja2's undefined is iterable, Python's `None` is not; the library has it the other way round.
        kind => kind == ValueKind::Undefined,
    });
    environment.remove_global("debug");
}

/// A new value, once it is paid for and known not to be too deep.
fn finished(value: Value) -> Result<Value, Error> {
    charge_deep(&value)?;
    Ok(value)
}

fn wrong(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// The items of a list, charged.
pub(super) fn items(value: &Value) -> Result<Vec<Value>, Error> {
    charge_shallow(value)?;
    let mut out = Vec::new();
    for item in value.try_iter()?.checked() {
        charge(8)?;
        out.push(item?);
    }
    Ok(out)
}

fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        charge(left.len() + right.len())?;
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(a) && is_list(b) {
        let mut out = items(a)?;
        out.extend(items(b)?);
        return Ok(Value::from(out));
    }
    number(a, b, i128::checked_add, |x, y| x + y)
        .ok_or_else(|| wrong(format!("cannot add {} and {}", a.kind(), b.kind())))
}

/// Arithmetic on two numbers; `None` if they are not numbers or the result does not fit.
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
    match (i128::try_from(a.clone()), i128::try_from(b.clone())) {
        (Ok(x), Ok(y)) if a.is_integer() == b.is_integer() || !a.is_number() || !b.is_number() => {
            let result = integers(x, y)?;
            Some(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from))
        }
        _ => {
            let float = |v: &Value| f64::try_from(v.clone()).ok();
            Some(Value::from(floats(float(a)?, float(b)?)))
        }
    }
}

fn concat(a: &Value, b: &Value) -> Result<Value, Error> {
    let mut text = Text::default();
    python::write_str(&mut text, a)?;
    python::write_str(&mut text, b)?;
    Ok(text.into_value())
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    let (sequence, count) = if b.as_str().is_some() || is_list(b) { (b, a) } else { (a, b) };
    let times = || count.as_i64().map(|n| usize::try_from(n).unwrap_or(0));
    if let (Some(text), Some(times)) = (sequence.as_str(), times()) {
        charge(text.len().saturating_mul(times))?;
        return Ok(Value::from(text.repeat(times)));
    }
    if let (true, Some(times)) = (is_list(sequence), times()) {
        let once = items(sequence)?;
        charge(once.len().saturating_mul(times).saturating_mul(size_of::<Value>()))?;
        let all: Vec<Value> = std::iter::repeat_n(&once, times).flatten().cloned().collect();
        return Ok(Value::from(all));
    }
    number(a, b, i128::checked_mul, |x, y| x * y)
        .ok_or_else(|| wrong(format!("cannot multiply {} and {}", a.kind(), b.kind())))
}

fn equal(a: &Value, b: &Value) -> Result<bool, Error> {
    match (a.as_str(), b.as_str()) {
        (Some(left), Some(right)) => charge(left.len().min(right.len()))?,
        _ if a.as_object().is_some() && b.as_object().is_some() => charge_deep(a)?,
        _ => {}
    }
    Ok(a == b)
}

fn contains(needle: &Value, haystack: &Value) -> Result<bool, Error> {
    match haystack.kind() {
        ValueKind::String => {
            charge_shallow(haystack)?;
            let (Some(text), Some(part)) = (haystack.as_str(), needle.as_str()) else {
                let kind = needle.kind();
                return Err(wrong(format!("'in <string>' requires string as left operand, not {kind}")));
            };
            Ok(text.contains(part))
        }
        ValueKind::Map => Ok(!haystack.get_item(needle)?.is_undefined() || has_key(haystack, needle)?),
        ValueKind::Seq | ValueKind::Iterable => {
            for item in haystack.try_iter()?.checked() {
                charge(8)?;
                if equal(&item?, needle)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        ValueKind::Undefined => Ok(false),
        kind => Err(wrong(format!("cannot look for something in {kind}"))),
    }
}

/// Whether a map has a key, even one with an undefined value.
fn has_key(map: &Value, key: &Value) -> Result<bool, Error> {
    for found in map.try_iter()?.checked() {
        charge(8)?;
        if equal(&found?, key)? {
            return Ok(true);
        }
    }
    Ok(false)
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
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::String => {
            charge_shallow(value)?;
            let text = value.as_str().unwrap_or_default();
            let characters: Vec<char> = text.chars().collect();
            let picked = python::slice_indices(characters.len(), start, stop, step);
            Ok(Value::from(picked.map(|i| characters[i]).collect::<String>()))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let all = items(value)?;
            let picked: Vec<Value> =
                python::slice_indices(all.len(), start, stop, step).map(|i| all[i].clone()).collect();
            Ok(if value.is_tuple() { Value::from(Tuple::from(picked)) } else { Value::from(picked) })
        }
        kind => Err(wrong(format!("cannot slice {kind}"))),
    }
}
