//! The budget of one rendering: how many bytes of values a template may make or look through.
//!
//! Counting steps is not enough, since one step can double a string. Whatever creates a value proportional to its
//! operands is charged here first. The counter belongs to the thread, because the library gives its callbacks no other
//! place to keep one; a rendering never leaves its thread.

use std::cell::Cell;
use std::fmt;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The deepest nesting of lists and maps that a template may build or print.
const DEPTH_MAX: usize = 100;

thread_local! {
    static LEFT: Cell<u64> = const { Cell::new(0) };
    static EXHAUSTED: Cell<bool> = const { Cell::new(false) };
}

/// The running budget of this thread; while it lives, charges are counted.
pub(super) struct Budget(());

impl Budget {
    /// Starts a rendering that may do `bytes` of work.
    pub(super) fn start(bytes: u64) -> Self {
        LEFT.set(bytes);
        EXHAUSTED.set(false);
        Self(())
    }

    /// Whether a charge has been refused.
    pub(super) fn exhausted(&self) -> bool {
        EXHAUSTED.get()
    }
}

/// Takes `bytes` from the budget, or fails.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    match LEFT.get().checked_sub(bytes as u64) {
        Some(left) => {
            LEFT.set(left);
            Ok(())
        }
        None => {
            EXHAUSTED.set(true);
            Err(Error::new(ErrorKind::InvalidOperation, "the template does too much work"))
        }
    }
}

/// Charges for looking at the surface of a value: the bytes of a string, the items of a list.
pub(super) fn charge_shallow(value: &Value) -> Result<(), Error> {
    let size = match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(1).saturating_mul(8),
    };
    charge(size)
}

/// Charges for everything a value holds. A value that holds itself is too deep.
pub(super) fn charge_deep(value: &Value) -> Result<(), Error> {
    charge_to_depth(value, 0)
}

fn charge_to_depth(value: &Value, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    charge_shallow(value)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()?.checked() {
                charge_to_depth(&item?, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()?.checked() {
                let key = key?;
                charge_to_depth(&value.get_item(&key)?, depth + 1)?;
                charge_to_depth(&key, depth + 1)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Fails beyond the deepest nesting allowed.
pub(super) fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("values are nested more than {DEPTH_MAX} deep")));
    }
    Ok(())
}

/// Text under construction; every byte is charged before it is written.
#[derive(Default)]
pub(super) struct Text(String);

impl Text {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn into_value(self) -> Value {
        Value::from(self.0)
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        charge(text.len()).map_err(|_| fmt::Error)?;
        self.0.push_str(text);
        Ok(())
    }
}
