//! Numbers of requests for templates: Python's integers have any size, and integers in the history must reach the prompt unchanged.

use std::fmt;

use minijinja::value::{Object, ObjectRepr, Value};
use serde_json::Number;

/// An integer beyond 128 bits, as its digits. Templates can print it; arithmetic refuses it.
#[derive(Debug)]
pub(super) struct Digits(String);

impl Object for Digits {
    fn repr(self: &std::sync::Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &std::sync::Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the number that Python's `json.loads` makes of the same text: an integer if there is no point or exponent, else a float.
pub(super) fn from_json(number: &Number) -> Value {
    let text = number.as_str();
    if text.contains(['.', 'e', 'E']) {
        // A float beyond the largest is infinite, as in Python.
        return Value::from(text.parse().unwrap_or(f64::NAN));
    }
    match (number.as_i64(), number.as_i128()) {
        (Some(small), _) => Value::from(small),
        (None, Some(large)) => Value::from(large),
        (None, None) => Value::from_object(Digits(text.to_owned())),
    }
}

/// Whether a value is an integer of [`Digits`].
pub(super) fn is_digits(value: &Value) -> bool {
    value.downcast_object_ref::<Digits>().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_python_reads() {
        let read = |text: &str| from_json(&serde_json::from_str(text).unwrap()).to_string();
        for integer in
            ["0", "-9223372036854775808", "18446744073709551615", "12345678901234567890123", "9007199254740993"]
        {
            assert_eq!(read(integer), integer);
        }
        let beyond = "1".repeat(60);
        assert_eq!(read(&beyond), beyond);
        assert_eq!(read(&format!("-{beyond}")), format!("-{beyond}"));
        assert_eq!((read("-0").as_str(), read("1e400").as_str(), read("2.50").as_str()), ("0", "inf", "2.5"));
    }
}
