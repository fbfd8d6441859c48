//! Fields of a request that this server does not know: refused, named in a response header, or ignored.
//!
//! [`crate::http::fields::Fields::finish`] reports them. Bodies are read on text workers, so the list is set for the thread that reads one.
//! A thread without a list refuses unknown fields.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::{HeaderName, HeaderValue};

use crate::http::thread_value;

/// The response header that names the unknown fields.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-plimsoll-unknown-fields");

/// The most names in the header, and characters of each. Further names are only counted.
const NAMES_MAX: usize = 8;
const NAME_CHARS_MAX: usize = 64;

/// The treatment of a field that this server does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownFields {
    /// The request gets a 400.
    Refuse,
    /// The request is served; a response header names the field, a metric counts it.
    #[default]
    Warn,
    /// The request is served; the metric counts the field.
    Ignore,
}

/// The unknown fields of one request.
#[derive(Debug)]
pub(crate) struct Unknown {
    policy: UnknownFields,
    found: Mutex<Found>,
}

#[derive(Debug, Default)]
struct Found {
    names: Vec<String>,
    count: u64,
}

thread_local! {
    static READING: RefCell<Option<Arc<Unknown>>> = const { RefCell::new(None) };
}

impl Unknown {
    pub fn new(policy: UnknownFields) -> Arc<Self> {
        Arc::new(Self { policy, found: Mutex::default() })
    }

    /// Does `work` on this thread, and collects the unknown fields that it finds for this request.
    pub fn during<T>(this: Option<Arc<Self>>, work: impl FnOnce() -> T) -> T {
        thread_value::during(&READING, this, work)
    }

    /// Returns the number of unknown fields, and the header's value if there is one.
    pub fn told(&self) -> (u64, Option<HeaderValue>) {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let header = (self.policy == UnknownFields::Warn && !found.names.is_empty()).then(|| found.names.join(", "));
        (found.count, header.and_then(|names| HeaderValue::try_from(names).ok()))
    }
}

/// Notes an unknown field. Returns false if it must be refused.
pub(crate) fn passes(name: &str) -> bool {
    READING.with_borrow(|reading| {
        let Some(unknown) = reading.as_ref().filter(|unknown| unknown.policy != UnknownFields::Refuse) else {
            return false;
        };
        let mut found = unknown.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.count += 1;
        if found.names.len() < NAMES_MAX {
            let visible = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
            let name: String = name.chars().take(NAME_CHARS_MAX).map(visible).collect();
            if !found.names.contains(&name) {
                found.names.push(name);
            }
        }
        true
    })
}

#[cfg(test)]
mod tests {
    use super::{Unknown, UnknownFields, passes};

    #[test]
    fn names_are_bounded_and_every_field_is_counted() {
        assert!(!passes("a"), "nobody reads a body here");
        let unknown = Unknown::new(UnknownFields::Warn);
        Unknown::during(Some(unknown.clone()), || {
            for i in 0..20 {
                assert!(passes(&format!("ä, {i}{}", "x".repeat(100))));
            }
        });
        let (count, header) = unknown.told();
        let header = header.unwrap().to_str().unwrap().to_owned();
        assert_eq!((count, header.split(", ").count()), (20, 8));
        assert!(header.starts_with("???0xxx") && header.len() < 8 * 66, "{header}");
        assert!(!passes("a"), "the request is over");
    }

    #[test]
    fn the_policy_decides() {
        for (policy, goes_on, told) in [
            (UnknownFields::Refuse, false, (0, false)),
            (UnknownFields::Warn, true, (1, true)),
            (UnknownFields::Ignore, true, (1, false)),
        ] {
            let unknown = Unknown::new(policy);
            assert_eq!(Unknown::during(Some(unknown.clone()), || passes("a")), goes_on, "{policy:?}");
            let (count, header) = unknown.told();
            assert_eq!((count, header.is_some()), told, "{policy:?}");
        }
    }
}
