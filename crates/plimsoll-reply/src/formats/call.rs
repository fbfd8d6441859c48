//! A call as one JSON object, `{"name": …, "arguments": {…}}`. Its arguments are streamed once the name is known.

use std::ops::Range;
use std::sync::Arc;

use super::is_name;
use crate::Tools;
use crate::event::Outlet;
use crate::hold::{HELD_BYTES_MAX, hold};
use crate::json::{Scanner, Step};

/// The progress of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// More must follow.
    More,
    /// It is complete, and its call has ended.
    Done,
    /// It is not a call, or no longer one. The character was not taken. [`JsonCall::into_text`] is content.
    Not,
    /// The streamed arguments are not JSON. The character was not taken.
    Broken,
}

#[derive(Debug)]
pub(super) struct JsonCall {
    /// Text that becomes content if this is not a call: all of it, or the text after the arguments.
    text: String,
    place: Place,
    name: Option<String>,
    id: Option<String>,
    /// Range in `text` of arguments that came before the name.
    early: Option<Range<usize>>,
    begun: bool,
    /// Without a marker, only the name of one of these tools makes it a call.
    among: Option<Arc<Tools>>,
}

#[derive(Debug)]
enum Place {
    Open,
    /// Before a key; `first` where the object may end.
    Key {
        first: bool,
    },
    /// In a key that begins at `start` in what is held.
    InKey {
        scanner: Scanner,
        start: usize,
    },
    Colon(Role),
    /// In a value that begins at `start` in what is held, or has not begun.
    Value {
        role: Role,
        scanner: Scanner,
        start: Option<usize>,
    },
    /// In streamed arguments.
    Stream(Scanner),
    Next,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Name,
    Id,
    Arguments,
    Other,
}

impl JsonCall {
    /// An object after a marker. `before` is the text before it, which is returned with it if this is not a call.
    pub fn marked(before: String) -> Self {
        Self { text: before, place: Place::Open, name: None, id: None, early: None, begun: false, among: None }
    }

    /// An object that is a call only if it has arguments and the name of a tool.
    pub fn among(tools: &Arc<Tools>, before: String) -> Self {
        Self { among: Some(Arc::clone(tools)), ..Self::marked(before) }
    }

    /// Whether this is certainly a call: it follows a marker, or its start was emitted.
    pub fn is_call(&self) -> bool {
        self.begun || self.among.is_none()
    }

    /// The text that is content after [`Progress::Not`].
    pub fn into_text(self) -> String {
        self.text
    }

    /// The reply ends here.
    pub fn finish(self, out: &mut Outlet) {
        if self.begun {
            out.end();
        }
        out.content(&self.text);
    }

    /// Takes a character.
    pub fn step(&mut self, c: char, out: &mut Outlet) -> Progress {
        if let Place::Stream(scanner) = &mut self.place {
            return match scanner.step(c) {
                Step::Bad | Step::Past => Progress::Broken,
                step => {
                    out.argument(c);
                    if step == Step::Last {
                        self.place = Place::Next;
                    }
                    Progress::More
                }
            };
        }
        let begun = self.begun;
        match self.advance(c, out) {
            Progress::More if self.text.len() < HELD_BYTES_MAX => {
                // The character with which a call begins belongs to it.
                if self.begun == begun {
                    hold(&mut self.text, c);
                }
                Progress::More
            }
            Progress::Done => Progress::Done,
            _ => {
                if self.begun {
                    out.end();
                }
                Progress::Not
            }
        }
    }

    fn advance(&mut self, c: char, out: &mut Outlet) -> Progress {
        match &mut self.place {
            Place::Open if c == '{' => self.place = Place::Key { first: true },
            Place::Key { .. } | Place::Next | Place::Colon(_) | Place::Open if c.is_ascii_whitespace() => {}
            Place::Key { .. } if c == '"' => {
                let mut scanner = Scanner::new();
                scanner.step(c);
                self.place = Place::InKey { scanner, start: self.text.len() };
            }
            Place::InKey { scanner, start } => match scanner.step(c) {
                Step::More => {}
                Step::Last => self.place = Place::Colon(role(&self.text[*start..])),
                Step::Past | Step::Bad => return Progress::Not,
            },
            Place::Colon(role) if c == ':' => {
                self.place = Place::Value { role: *role, scanner: Scanner::new(), start: None };
            }
            Place::Value { .. } => return self.value(c, out),
            Place::Next if c == ',' => self.place = Place::Key { first: false },
            Place::Next | Place::Key { first: true } if c == '}' => return self.end(out),
            _ => return Progress::Not,
        }
        Progress::More
    }

    fn value(&mut self, c: char, out: &mut Outlet) -> Progress {
        let Place::Value { role, scanner, start } = &mut self.place else { return Progress::Not };
        let role = *role;
        let step = scanner.step(c);
        match step {
            Step::Bad => return Progress::Not,
            Step::More if start.is_none() && c.is_ascii_whitespace() => return Progress::More,
            Step::More if start.is_none() && c == '{' && role == Role::Arguments && !self.begun => {
                if let Some(name) = self.name.clone() {
                    let scanner = scanner.clone();
                    self.begin(name, out);
                    out.argument(c);
                    self.place = Place::Stream(scanner);
                    return Progress::More;
                }
            }
            _ => {}
        }
        let start = *start.get_or_insert(self.text.len());
        if step == Step::More {
            return Progress::More;
        }
        self.place = Place::Next;
        let last = (step == Step::Last).then_some(c);
        if !self.take(role, start, last, out) {
            return Progress::Not;
        }
        if step == Step::Past { self.advance(c, out) } else { Progress::More }
    }

    /// Emits the start of the call. The held text belongs to it.
    fn begin(&mut self, name: String, out: &mut Outlet) {
        self.begun = true;
        self.text.clear();
        out.begin(name, self.id.take());
    }

    /// Takes a value that has ended, and starts at `start` in the held text. `last` is its last character, if that is
    /// not held yet. False if the value does not fit its key.
    fn take(&mut self, role: Role, start: usize, last: Option<char>, out: &mut Outlet) -> bool {
        // A call that has begun has its name and its arguments.
        if role == Role::Other || self.begun {
            return true;
        }
        let mut text = self.text[start..].to_owned();
        text.extend(last);
        match role {
            Role::Other => {}
            Role::Id => self.id = serde_json::from_str(&text).ok(),
            Role::Name => {
                let known = |name: &String| self.among.as_ref().is_none_or(|tools| tools.has(name));
                self.name = serde_json::from_str(&text).ok().filter(|name: &String| is_name(name) && known(name));
                if self.name.is_none() {
                    return false;
                }
                if let Some(early) = self.early.take().and_then(|early| arguments(&self.text[early])) {
                    self.call(&early, out);
                }
            }
            Role::Arguments => {
                let Some(said) = arguments(&text) else { return false };
                if self.name.is_some() {
                    self.call(&said, out);
                } else {
                    self.early = Some(start..start + text.len());
                }
            }
        }
        true
    }

    /// Emits the whole call.
    fn call(&mut self, arguments: &str, out: &mut Outlet) {
        if let Some(name) = self.name.clone() {
            self.begin(name, out);
            out.arguments(arguments);
        }
    }

    fn end(&mut self, out: &mut Outlet) -> Progress {
        if !self.begun {
            let Some(name) = self.name.take().filter(|_| self.among.is_none()) else { return Progress::Not };
            self.begin(name, out);
            out.arguments("{}");
        }
        out.end();
        Progress::Done
    }
}

/// The role of a key, given with its opening quote.
fn role(key: &str) -> Role {
    match key {
        "\"name" => Role::Name,
        "\"id" => Role::Id,
        "\"arguments" | "\"parameters" => Role::Arguments,
        _ => Role::Other,
    }
}

/// The arguments in a value. `None` if it is not an object.
fn arguments(value: &str) -> Option<String> {
    match value.as_bytes().first()? {
        b'{' => Some(value.to_owned()),
        b'n' => Some("{}".into()),
        // As a string that holds JSON: OpenAI's own spelling. Any other is one: a tool may take a string.
        b'"' => serde_json::from_str(value).ok().map(|text: String| match text.trim_start().as_bytes().first() {
            None => "{}".into(),
            Some(b'{') => text,
            Some(_) => value.to_owned(),
        }),
        _ => None,
    }
}
