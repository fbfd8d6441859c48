//! The shape of a JSON document that is being written: which containers are open, and what each byte ends.
//!
//! A grammar has let every byte in, so nothing is checked here. What must not be in here: schemas.

/// What a byte brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Nothing that matters here.
    Inside,
    /// A key begins with the next byte.
    KeyBegins,
    /// A key has ended with the byte before.
    KeyEnds,
    /// A value in a container has ended with the byte before: this one is the comma behind it.
    ValueEnds,
    /// A container, or a string that is a value, has ended with this byte; others are open.
    Closes,
    /// The document has ended with this byte.
    Ends,
}

/// The containers that are open, and where in the innermost one the document stands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shape {
    /// `{` or `[` of each open container, the outermost first.
    open: Vec<u8>,
    text: Text,
    /// The next string of an object is a key.
    key: bool,
    ended: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Text {
    #[default]
    Outside,
    Key,
    Value,
    /// Behind a backslash in a key or a value.
    Escape {
        key: bool,
    },
}

impl Shape {
    /// Containers that are open.
    pub fn depth(&self) -> usize {
        self.open.len()
    }

    /// Whether the document stands behind a byte of a number or a word, which may go on or be whole.
    pub fn may_end_value(&self, last: u8) -> bool {
        self.text == Text::Outside && !self.open.is_empty() && last.is_ascii_alphanumeric()
    }

    /// Whether a key is being written, or comes next.
    pub fn expects_key(&self) -> bool {
        self.key
    }

    /// The document has ended. One that is a number or a word never says so.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// The bytes that would close what is open, the innermost first.
    pub fn closers(&self) -> impl Iterator<Item = u8> {
        self.open.iter().rev().map(|open| if *open == b'{' { b'}' } else { b']' })
    }

    /// Takes the next byte.
    pub fn step(&mut self, byte: u8) -> Event {
        match self.text {
            Text::Escape { key } => self.text = if key { Text::Key } else { Text::Value },
            Text::Key | Text::Value => match byte {
                b'\\' => self.text = Text::Escape { key: self.text == Text::Key },
                b'"' => return self.string_ends(),
                _ => {}
            },
            Text::Outside => return self.between(byte),
        }
        Event::Inside
    }

    fn string_ends(&mut self) -> Event {
        let key = std::mem::take(&mut self.text) == Text::Key;
        match key {
            true => {
                self.key = false;
                Event::KeyEnds
            }
            false if self.open.is_empty() => self.ends(),
            false => Event::Closes,
        }
    }

    /// A byte outside of strings.
    fn between(&mut self, byte: u8) -> Event {
        match byte {
            b'"' if self.key => {
                self.text = Text::Key;
                return Event::KeyBegins;
            }
            b'"' => self.text = Text::Value,
            b'{' | b'[' => {
                self.open.push(byte);
                self.key = byte == b'{';
            }
            b'}' | b']' => {
                self.open.pop();
                self.key = false;
                return if self.open.is_empty() { self.ends() } else { Event::Closes };
            }
            b',' => {
                self.key = self.open.last() == Some(&b'{');
                return Event::ValueEnds;
            }
            _ => {}
        }
        Event::Inside
    }

    fn ends(&mut self) -> Event {
        self.ended = true;
        Event::Ends
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, Shape};

    fn events(text: &str) -> Vec<(usize, Event)> {
        let mut shape = Shape::default();
        let all = text.bytes().enumerate().map(|(at, byte)| (at, shape.step(byte)));
        all.filter(|(_, event)| *event != Event::Inside).collect()
    }

    #[test]
    fn keys_values_and_ends_are_told_apart() {
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
    fn what_is_open_can_be_closed() {
        let mut shape = Shape::default();
        for byte in r#"{"a":[{"b":[1"#.bytes() {
            assert_ne!(shape.step(byte), Event::Ends);
        }
        assert_eq!((shape.depth(), shape.closers().collect::<Vec<_>>()), (4, b"]}]}".to_vec()));
    }
}
