//! Calls that a model writes as plain JSON instead of its trained format. The whole answer is `{"name": …, "arguments":
//! {…}}`, or a list of them, bare or in one fence.
//!
//! The text is held back while it can still become such calls. A character that rules them out turns all of it into
//! content.

use std::ops::Range;
use std::sync::Arc;

use crate::Tools;
use crate::hold::{HELD_BYTES_MAX, hold};
use crate::json::{Scanner, Step};

/// Most calls of one answer; more are content.
const CALLS_MAX: usize = 128;

/// The optional language of a fence.
const LANGUAGE: &str = "json";

#[derive(Debug)]
pub(crate) struct Written {
    tools: Arc<Tools>,
    /// All of the answer so far, less than [`HELD_BYTES_MAX`].
    held: String,
    place: Place,
    fenced: bool,
    listed: bool,
    /// Ranges of the current object's name and arguments in the held text.
    name: Option<Range<usize>>,
    arguments: Option<Range<usize>>,
    /// The same ranges of the complete objects.
    calls: Vec<[Range<usize>; 2]>,
}

#[derive(Clone, Debug)]
enum Place {
    /// Before the fence or the JSON.
    Start,
    /// In the ticks that open the fence; how many have come.
    Opening(u8),
    /// In the fence's language; what is left of it.
    Language(&'static str),
    /// Before the JSON, in the fence.
    Fenced,
    /// In the list, before an object.
    Item,
    /// Before a key.
    Key,
    /// In a key that begins at this place.
    InKey(usize),
    Colon(Role),
    /// Before a value.
    Value(Role),
    /// In a name that begins at this place.
    Name(usize),
    Arguments {
        scanner: Scanner,
        start: usize,
    },
    /// After a value.
    Next,
    /// In the list, after an object.
    Between,
    /// After the JSON.
    After,
    /// In the ticks that close the fence; how many have come.
    Closing(u8),
    /// After the fence.
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Name,
    Arguments,
}

const KEYS: [(&str, Role); 3] = [("name", Role::Name), ("arguments", Role::Arguments), ("parameters", Role::Arguments)];

impl Written {
    /// A reader before an answer's first character.
    pub fn new(tools: Arc<Tools>) -> Self {
        Self {
            tools,
            held: String::new(),
            place: Place::Start,
            fenced: false,
            listed: false,
            name: None,
            arguments: None,
            calls: Vec::new(),
        }
    }

    /// Takes a character. False if it rules calls out; then it was not taken, and [`Self::into_text`] is content.
    pub fn step(&mut self, c: char) -> bool {
        let can_be = self.held.len() < HELD_BYTES_MAX - c.len_utf8() && self.advance(c);
        if can_be {
            hold(&mut self.held, c);
        }
        can_be
    }

    /// Whether no text is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The held text.
    pub fn into_text(self) -> String {
        self.held
    }

    /// The names and arguments of the calls that the answer is, if it ends here.
    pub fn calls(&self) -> impl Iterator<Item = (&str, &str)> {
        let whole = matches!(self.place, Place::End) || !self.fenced && matches!(self.place, Place::After);
        let calls = if whole { &self.calls[..] } else { &[] };
        calls.iter().map(|[name, arguments]| (&self.held[name.clone()], &self.held[arguments.clone()]))
    }

    fn advance(&mut self, c: char) -> bool {
        let at = self.held.len();
        let space = c.is_ascii_whitespace();
        let next = match &mut self.place {
            Place::Language(_) if self.held.ends_with('`') && space => Place::Fenced,
            Place::Opening(_) | Place::Closing(_) | Place::InKey(_) | Place::Name(_) | Place::Language(_) if space => {
                return false;
            }
            Place::Arguments { scanner, start } => match scanner.step(c) {
                Step::More => return true,
                Step::Last => {
                    self.arguments = Some(*start..at + 1);
                    Place::Next
                }
                Step::Past | Step::Bad => return false,
            },
            _ if space => return true,
            Place::Start | Place::Closing(_) | Place::Opening(_) | Place::After if c == '`' => return self.tick(),
            Place::Language(left) if left.starts_with(c) => match &left[1..] {
                "" => Place::Fenced,
                left => Place::Language(left),
            },
            Place::Language(LANGUAGE) | Place::Start | Place::Fenced if c == '{' => Place::Key,
            Place::Language(LANGUAGE) | Place::Start | Place::Fenced if c == '[' => {
                self.listed = true;
                Place::Item
            }
            Place::Item if c == '{' => Place::Key,
            Place::Key if c == '"' => Place::InKey(at + 1),
            &mut Place::InKey(start) => return self.key(start, c),
            Place::Colon(role) if c == ':' => Place::Value(*role),
            Place::Value(Role::Name) if c == '"' => Place::Name(at + 1),
            Place::Value(Role::Arguments) if c == '{' => {
                let mut scanner = Scanner::new();
                scanner.step(c);
                Place::Arguments { scanner, start: at }
            }
            &mut Place::Name(start) => return self.name(start, c),
            Place::Next if c == ',' => Place::Key,
            Place::Next if c == '}' => return self.end(),
            Place::Between if c == ',' => Place::Item,
            Place::Between if c == ']' => Place::After,
            _ => return false,
        };
        self.place = next;
        true
    }

    fn tick(&mut self) -> bool {
        self.place = match self.place {
            Place::Start => Place::Opening(1),
            Place::Opening(1) => Place::Opening(2),
            Place::Opening(_) => {
                self.fenced = true;
                Place::Language(LANGUAGE)
            }
            Place::After if self.fenced => Place::Closing(1),
            Place::Closing(1) => Place::Closing(2),
            Place::Closing(_) => Place::End,
            _ => return false,
        };
        true
    }

    fn key(&mut self, start: usize, c: char) -> bool {
        let seen = &self.held[start..];
        if c != '"' {
            return KEYS.iter().any(|(key, _)| key.strip_prefix(seen).is_some_and(|left| left.starts_with(c)));
        }
        let role = KEYS.iter().find(|(key, _)| *key == seen).map(|(_, role)| *role);
        match role.filter(|role| if *role == Role::Name { self.name.is_none() } else { self.arguments.is_none() }) {
            Some(role) => {
                self.place = Place::Colon(role);
                true
            }
            None => false,
        }
    }

    fn name(&mut self, start: usize, c: char) -> bool {
        let seen = &self.held[start..];
        if c != '"' {
            return self.tools.begins(seen, c);
        }
        if self.tools.has(seen) {
            self.name = Some(start..self.held.len());
            self.place = Place::Next;
        }
        self.name.is_some()
    }

    /// The running object has ended.
    fn end(&mut self) -> bool {
        let (Some(name), Some(arguments)) = (self.name.take(), self.arguments.take()) else { return false };
        if self.calls.len() == CALLS_MAX {
            return false;
        }
        self.calls.push([name, arguments]);
        self.place = if self.listed { Place::Between } else { Place::After };
        true
    }
}
