//! Scans a JSON document while it is written: which containers are open, and what each byte ends.
//!
//! The grammar has accepted every byte, so the scanner checks nothing. Out of scope: schemas.

/// The effect of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// None that callers need.
    Inside,
    /// A key starts with the next byte.
    KeyBegins,
    /// A key ended with the previous byte.
    KeyEnds,
    /// A value in a container ended with the previous byte; this byte is the comma after it.
    ValueEnds,
    /// A container or a string value ended with this byte, inside an open container.
    Closes,
    /// The document ended with this byte.
    Ends,
}

/// The open containers, and the position in the innermost one.
#[derive(Clone, Debug, Default)]
pub(crate) struct JsonScanner {
    /// `{` or `[` of each open container, the outermost first.
    open: Vec<u8>,
    position: Position,
    /// The next string of an object is a key.
    next_is_key: bool,
    ended: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Position {
    #[default]
    Outside,
    Key,
    Value,
    /// After a backslash, in a key or a string value.
    Escape {
        key: bool,
    },
}

impl JsonScanner {
    /// Number of open containers.
    pub fn depth(&self) -> usize {
        self.open.len()
    }

    /// Whether `last` is part of a number or word that may be complete or continue.
    pub fn may_end_value(&self, last: u8) -> bool {
        self.position == Position::Outside && !self.open.is_empty() && last.is_ascii_alphanumeric()
    }

    /// Whether the current or next string is a key.
    pub fn expects_key(&self) -> bool {
        self.next_is_key
    }

    /// Whether the document has ended. Never true for a number or word: their end is not visible.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The bytes that would close all open containers, the innermost first.
    pub fn closers(&self) -> impl Iterator<Item = u8> {
        self.open.iter().rev().map(|open| if *open == b'{' { b'}' } else { b']' })
    }

    /// Advances by one byte.
    pub fn step(&mut self, byte: u8) -> Event {
        match self.position {
            Position::Escape { key } => self.position = if key { Position::Key } else { Position::Value },
            Position::Key | Position::Value => match byte {
                b'\\' => self.position = Position::Escape { key: self.position == Position::Key },
                b'"' => return self.end_string(),
                _ => {}
            },
            Position::Outside => return self.step_outside_strings(byte),
        }
        Event::Inside
    }

    fn end_string(&mut self) -> Event {
        let key = std::mem::take(&mut self.position) == Position::Key;
        match key {
            true => {
                self.next_is_key = false;
                Event::KeyEnds
            }
            false if self.open.is_empty() => self.end_document(),
            false => Event::Closes,
        }
    }

    /// Advances by a byte outside of strings.
    fn step_outside_strings(&mut self, byte: u8) -> Event {
        match byte {
            b'"' if self.next_is_key => {
                self.position = Position::Key;
                return Event::KeyBegins;
            }
            b'"' => self.position = Position::Value,
            b'{' | b'[' => {
                self.open.push(byte);
                self.next_is_key = byte == b'{';
            }
            b'}' | b']' => {
                self.open.pop();
                self.next_is_key = false;
                return if self.open.is_empty() { self.end_document() } else { Event::Closes };
            }
            b',' => {
                self.next_is_key = self.open.last() == Some(&b'{');
                return Event::ValueEnds;
            }
            _ => {}
        }
        Event::Inside
    }

    fn end_document(&mut self) -> Event {
        self.ended = true;
        Event::Ends
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, JsonScanner};

    fn events(text: &str) -> Vec<(usize, Event)> {
        let mut scanner = JsonScanner::default();
        let all = text.bytes().enumerate().map(|(at, byte)| (at, scanner.step(byte)));
        all.filter(|(_, event)| *event != Event::Inside).collect()
    }

    #[test]
    fn events_distinguish_keys_values_and_ends() {
        use Event::{Closes, Ends, KeyBegins, KeyEnds, ValueEnds};
        let text = r#"{"a\"": [1, "x,]"], "b":{}}"#;
        let expected = [
            (1, KeyBegins),
            (5, KeyEnds),
            (10, ValueEnds),
            (16, Closes),
            (17, Closes),
            (18, ValueEnds),
            (20, KeyBegins),
            (22, KeyEnds),
            (25, Closes),
            (26, Ends),
        ];
        assert_eq!(events(text), expected);
        assert_eq!(events(r#""a""#), [(2, Ends)]);
        assert_eq!(events("12"), []);
    }

    #[test]
    fn closers_match_open_containers() {
        let mut scanner = JsonScanner::default();
        for byte in r#"{"a":[{"b":[1"#.bytes() {
            assert_ne!(scanner.step(byte), Event::Ends);
        }
        assert_eq!((scanner.depth(), scanner.closers().collect::<Vec<_>>()), (4, b"]}]}".to_vec()));
    }
}
