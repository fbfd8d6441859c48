//! Calls in Python's notation: LFM2's list, `<|tool_call_start|>[name(key="text", n=1), other()]<|tool_call_end|>`, and
//! OLMo 3's lines, `<function_calls>name(key="text", n=1)` and further calls, each in a line of its own. Arguments are turned
//! into JSON as they come.

use super::tagged::escape;
use super::{Format, NAME_BYTES_MAX, broken_call_ends, is_name};
use crate::event::Outlet;
use crate::hold::{HELD_BYTES_MAX, hold};
use crate::watch::Watch;

/// The calls of one family.
#[derive(Debug)]
pub(crate) struct Calls {
    /// Opens the calls, and closes them.
    pub markers: &'static [&'static str; 2],
    /// A line break separates two calls, not a comma alone.
    lines: bool,
}

/// LFM2 and LFM2.5.
pub(crate) const LFM2: Calls = Calls { markers: &["<|tool_call_start|>", "<|tool_call_end|>"], lines: false };

/// OLMo 3.
pub(crate) const OLMO3: Calls = Calls { markers: &["<function_calls>", "</function_calls>"], lines: true };

/// The deepest nesting of arguments.
const DEPTH_MAX: usize = 128;

#[derive(Debug)]
pub(crate) struct Pythonic {
    calls: &'static Calls,
    watch: Watch,
    state: State,
    /// A call has ended, and the list may still end.
    closing: bool,
}

#[derive(Debug)]
enum State {
    Text,
    /// Up to the parenthesis; holds all that was read, with the opening marker, the comma or the line break before it.
    Head(String),
    Arguments(Notation),
    /// After a call, where a comma, a line break, a bracket or the closing marker may follow.
    After,
    /// Invalid arguments: they pass unchanged up to the closing marker.
    Broken,
}

impl Pythonic {
    pub fn new(calls: &'static Calls) -> Self {
        Self { calls, watch: Watch::new(calls.markers), state: State::Text, closing: false }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        self.state = State::Text;
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        out.content(&text);
        self.closing &= text.trim().is_empty();
        match marker {
            Some(marker) if marker == self.calls.markers[0] => self.state = State::Head(marker.into()),
            Some(marker) if !std::mem::take(&mut self.closing) => out.content(marker),
            Some(_) => out.skip(),
            None => {}
        }
    }

    fn head(&mut self, c: char, out: &mut Outlet) {
        let State::Head(held) = &mut self.state else { return };
        let start = self.calls.markers[0];
        let first = held.starts_with(start);
        let after = format!("{}{c}", &held[if first { start.len() } else { 1 }..]);
        let after = after.trim_start();
        // A single call may come without the list's bracket.
        let name = if first { after.strip_prefix('[').unwrap_or(after).trim_start() } else { after };
        if let Some(name) = name.strip_suffix('(').map(str::trim_end).filter(|name| is_name(name)) {
            out.begin(name.to_owned(), None);
            out.arguments("{");
            self.state = State::Arguments(Notation::new());
            return;
        }
        let fits = name.trim_end().is_empty() || is_name(name.trim_end());
        if fits && held.len() < 2 * NAME_BYTES_MAX {
            held.push(c);
        } else {
            let held = std::mem::take(held);
            out.content(&held);
            self.text(c, out);
        }
    }

    fn after(&mut self, c: char, out: &mut Outlet) {
        match c {
            ',' => self.state = State::Head(c.into()),
            '\n' if self.calls.lines => self.state = State::Head(c.into()),
            ']' => {
                out.skip();
                self.state = State::Text;
            }
            c if c.is_whitespace() => out.skip(),
            c => self.text(c, out),
        }
    }
}

impl Format for Pythonic {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Text => self.text(c, out),
            State::Head(_) => self.head(c, out),
            State::After => self.after(c, out),
            State::Arguments(notation) => match notation.step(c, out) {
                Some(false) => {}
                Some(true) => {
                    out.end();
                    self.closing = true;
                    self.state = State::After;
                }
                None => {
                    let rest = notation.take_held() + c.encode_utf8(&mut [0; 4]);
                    self.state = State::Broken;
                    rest.chars().for_each(|c| self.step(c, out));
                }
            },
            State::Broken => {
                if broken_call_ends(&mut self.watch, c, &self.calls.markers[1..], out) {
                    self.state = State::Text;
                }
            }
        }
    }

    fn in_call(&self) -> bool {
        match &self.state {
            State::Text | State::After => false,
            State::Head(held) => !held.trim().is_empty(),
            State::Arguments(_) | State::Broken => true,
        }
    }

    fn finish(&mut self, out: &mut Outlet) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => out.content(&self.watch.take_held()),
            State::Head(held) => out.content(&held),
            State::After => {}
            State::Arguments(mut notation) => {
                out.arguments(&notation.take_held());
                out.end();
            }
            State::Broken => {
                out.arguments(&self.watch.take_held());
                out.end();
            }
        }
    }
}

/// An open bracket: of a call's arguments, a dictionary, a list or a tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Call,
    Dict,
    List,
    Tuple,
}

impl Level {
    fn of(open: char) -> Option<Self> {
        match open {
            '{' => Some(Self::Dict),
            '[' => Some(Self::List),
            '(' => Some(Self::Tuple),
            _ => None,
        }
    }

    /// Its closing character.
    fn end(self) -> char {
        match self {
            Self::Call | Self::Tuple => ')',
            Self::Dict => '}',
            Self::List => ']',
        }
    }

    /// The separator of key and value. `None` if it has no keys.
    fn colon(self) -> Option<char> {
        match self {
            Self::Call => Some('='),
            Self::Dict => Some(':'),
            Self::List | Self::Tuple => None,
        }
    }

    /// Its brackets in JSON.
    fn json(self) -> [&'static str; 2] {
        if self.colon().is_some() { ["{", "}"] } else { ["[", "]"] }
    }

    /// The first place inside it.
    fn next(self) -> Place {
        if self.colon().is_some() { Place::Key } else { Place::Value }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Key,
    Value,
    /// In text between such quotes; `key` where a colon must follow.
    Quoted {
        key: bool,
        quote: char,
    },
    /// After quoted text or a bracket.
    After {
        key: bool,
    },
}

/// The notation, after a call's parenthesis.
#[derive(Debug)]
struct Notation {
    stack: Vec<Level>,
    /// A key or a bare value so far, or an escape in quoted text from its backslash on.
    word: String,
    place: Place,
    /// A comma has come, and what follows it has not.
    comma: bool,
}

impl Notation {
    fn new() -> Self {
        Self { stack: vec![Level::Call], word: String::new(), place: Place::Key, comma: false }
    }

    /// Takes the text that was not emitted.
    fn take_held(&mut self) -> String {
        std::mem::take(&mut self.word)
    }

    /// Takes a character. True once the call is closed. `None` if it is invalid here; then it was not taken.
    fn step(&mut self, c: char, out: &mut Outlet) -> Option<bool> {
        let level = *self.stack.last()?;
        let empty = self.word.trim().is_empty();
        match self.place {
            Place::Quoted { key, quote } => self.quoted(c, (key, quote), out),
            Place::Key if level.colon() == Some(c) => {
                self.word(true, out)?;
                out.arguments(": ");
                self.place = Place::Value;
            }
            Place::After { key: true } if level.colon() == Some(c) => {
                out.arguments(": ");
                self.place = Place::Value;
            }
            // A call's keys are no texts.
            Place::Key | Place::Value if matches!(c, '"' | '\'') && empty => {
                let key = self.place == Place::Key;
                if key && level == Level::Call {
                    return None;
                }
                self.begin(out);
                out.arguments("\"");
                self.place = Place::Quoted { key, quote: c };
            }
            Place::Value if empty && Level::of(c).is_some() => {
                let inner = Level::of(c).filter(|_| self.stack.len() < DEPTH_MAX)?;
                self.begin(out);
                out.arguments(inner.json()[0]);
                self.stack.push(inner);
                self.place = inner.next();
            }
            Place::Key | Place::Value if c == level.end() && empty && (self.place == level.next()) => {
                return Some(self.close(level, out));
            }
            Place::Value | Place::After { key: false } if c == ',' || c == level.end() => {
                if self.place == Place::Value {
                    self.word(false, out)?;
                }
                if c != ',' {
                    return Some(self.close(level, out));
                }
                (self.comma, self.place) = (true, level.next());
            }
            Place::After { .. } if c.is_whitespace() => {}
            Place::Key | Place::Value if !matches!(c, ')' | ']' | '}') && self.word.len() < HELD_BYTES_MAX => {
                hold(&mut self.word, c);
            }
            _ => return None,
        }
        Some(false)
    }

    /// A part begins: the comma before it goes out.
    fn begin(&mut self, out: &mut Outlet) {
        self.word.clear();
        if std::mem::take(&mut self.comma) {
            out.arguments(", ");
        }
    }

    fn close(&mut self, level: Level, out: &mut Outlet) -> bool {
        // JSON has no comma before a bracket.
        (self.comma, self.place) = (false, Place::After { key: false });
        self.word.clear();
        self.stack.pop();
        out.arguments(level.json()[1]);
        self.stack.is_empty()
    }

    /// A key, or a value without quotes, has ended.
    fn word(&mut self, key: bool, out: &mut Outlet) -> Option<()> {
        let word = self.take_held();
        let word = word.trim();
        if word.is_empty() {
            return None;
        }
        self.begin(out);
        match word {
            "True" if !key => out.arguments("true"),
            "False" if !key => out.arguments("false"),
            "None" if !key => out.arguments("null"),
            word if !key && serde_json::from_str::<serde_json::Value>(word).is_ok() => out.arguments(word),
            word => out.arguments(&serde_json::Value::from(word).to_string()),
        }
        Some(())
    }

    /// A character of quoted text.
    fn quoted(&mut self, c: char, (key, quote): (bool, char), out: &mut Outlet) {
        if self.word.is_empty() {
            match c {
                '\\' => self.word.push(c),
                c if c == quote => {
                    out.arguments("\"");
                    self.place = Place::After { key };
                }
                c => escape(c, out),
            }
            return;
        }
        self.word.push(c);
        let kind = self.word.chars().nth(1).unwrap_or(c);
        let digits = match kind {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        let have = &self.word[1 + kind.len_utf8()..];
        if have.len() < digits && have.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return;
        }
        let code = u32::from_str_radix(have, 16).ok().filter(|_| digits > 0);
        match (kind, code) {
            ('n', _) => escape('\n', out),
            ('t', _) => escape('\t', out),
            ('r', _) => escape('\r', out),
            ('b' | 'f', _) => out.arguments(&self.word),
            // The line goes on.
            ('\n', _) => {}
            ('\\' | '\'' | '"', _) => escape(kind, out),
            // Two of these may be one character.
            ('u', Some(_)) => out.arguments(&self.word),
            (_, Some(code)) if char::from_u32(code).is_some() => escape(char::from_u32(code).unwrap_or(c), out),
            // Any other backslash stands for itself.
            _ => self.word.chars().for_each(|c| escape(c, out)),
        }
        self.word.clear();
    }
}
