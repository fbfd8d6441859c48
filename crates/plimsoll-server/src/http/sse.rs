//! Server-sent events, and lines of JSON.

use std::fmt::Arguments;
use std::io;

use axum::http::{HeaderName, HeaderValue, header};
use bytes::Bytes;
use plimsoll_memory::faults::{self, Site};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

use crate::http::error::ApiError;

/// The headers of a stream of events.
pub(crate) const HEADERS: [(HeaderName, HeaderValue); 3] = headers("text/event-stream; charset=utf-8");

/// The headers of a stream of lines.
pub(crate) const LINE_HEADERS: [(HeaderName, HeaderValue); 3] = headers("application/x-ndjson");

const fn headers(content_type: &'static str) -> [(HeaderName, HeaderValue); 3] {
    [
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // A buffering proxy would defeat streaming.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ]
}

/// Events that are ready to be sent.
#[derive(Default)]
pub(crate) struct Events(Vec<u8>);

/// JSON without any character that some clients treat as a line end: JSON itself allows three of them in strings.
struct OneLine;

impl Formatter for OneLine {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut rest = fragment;
        while let Some((at, end)) = rest.char_indices().find(|(_, c)| matches!(c, '\u{85}' | '\u{2028}' | '\u{2029}')) {
            writer.write_all(&rest.as_bytes()[..at])?;
            write!(writer, "\\u{:04x}", u32::from(end))?;
            rest = &rest[at + end.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }

    /// In finished JSON these characters occur only in strings.
    fn write_raw_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        self.write_string_fragment(writer, fragment)
    }
}

/// Removes an unfinished event when its writing fails, also by a panic.
struct Unfinished<'a> {
    bytes: &'a mut Vec<u8>,
    start: usize,
    whole: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.whole {
            self.bytes.truncate(self.start);
        }
    }
}

impl Events {
    /// Returns whole events, to be sent.
    pub fn into_bytes(self) -> Bytes {
        self.0.into()
    }

    /// Returns whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds one event.
    pub fn push(&mut self, data: &impl Serialize) {
        self.write(format_args!(""), data);
    }

    /// Adds an event with an id, from which a reader can resume the stream.
    pub fn push_numbered(&mut self, id: Arguments<'_>, data: &impl Serialize) {
        self.write(format_args!("id: {id}\n"), data);
    }

    /// Adds an event that has a name.
    pub fn push_named(&mut self, name: &str, data: &impl Serialize) {
        self.write(format_args!("event: {name}\n"), data);
    }

    /// Adds a line of JSON.
    pub fn push_line(&mut self, data: &impl Serialize) {
        let start = self.0.len();
        let mut line = Unfinished { bytes: &mut self.0, start, whole: false };
        faults::site(Site::Shape);
        // As in `write`.
        let mut serializer = Serializer::with_formatter(&mut *line.bytes, OneLine);
        if data.serialize(&mut serializer).is_ok() {
            line.bytes.push(b'\n');
            line.whole = true;
        }
    }

    /// Adds a blank, which readers of JSON skip at the start of a line.
    pub fn blank(&mut self) {
        self.0.push(b' ');
    }

    /// `head`: the event's lines above its data.
    fn write(&mut self, head: Arguments<'_>, data: &impl Serialize) {
        let start = self.0.len();
        let mut event = Unfinished { bytes: &mut self.0, start, whole: false };
        // Writing into memory cannot fail.
        let _ = io::Write::write_fmt(&mut *event.bytes, format_args!("{head}data: "));
        faults::site(Site::Shape);
        // Serializing plain structs into memory cannot fail; if it did, half an event must not be sent.
        if serde_json::to_writer(&mut *event.bytes, data).is_ok() {
            event.bytes.extend_from_slice(b"\n\n");
            event.whole = true;
        }
    }

    pub fn comment(&mut self) {
        self.0.extend_from_slice(b": waiting\n\n");
    }

    /// Adds an event that has a name and finished data.
    pub fn push_text(&mut self, name: &str, data: &[u8]) {
        let parts: [&[u8]; 5] = [b"event: ", name.as_bytes(), b"\ndata: ", data, b"\n\n"];
        parts.iter().for_each(|part| self.0.extend_from_slice(part));
    }

    pub fn error(&mut self, error: &ApiError) {
        self.0.extend_from_slice(b"data: ");
        self.0.extend_from_slice(&error.body());
        self.0.extend_from_slice(b"\n\n");
    }

    pub fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use serde::Serializer;

    use super::*;

    struct Panics;

    impl Serialize for Panics {
        fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("a test panics")
        }
    }

    #[test]
    fn half_an_event_is_taken_back() {
        let mut events = Events::default();
        events.push_numbered(format_args!("{}-{}", 1, 2), &"whole");
        let ways: [fn(&mut Events); 4] = [
            |events| events.push(&Panics),
            |events| events.push_named("name", &Panics),
            |events| events.push_numbered(format_args!("3"), &Panics),
            |events| events.push_line(&Panics),
        ];
        for way in ways {
            assert!(catch_unwind(AssertUnwindSafe(|| way(&mut events))).is_err());
        }
        events.push_named("end", &0);
        assert_eq!(events.0, b"id: 1-2\ndata: \"whole\"\n\nevent: end\ndata: 0\n\n");
    }
}
