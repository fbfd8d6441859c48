//! Gemma's own notation: FunctionGemma's `<start_function_call>call:name{key:<escape>text<escape>,n:1}<end_function_call>`
//! and Gemma 4's `<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>`. Arguments are turned into JSON as they come.

use super::tagged::escape;
use super::{Format, NAME_BYTES_MAX, broken_call_ends, is_name};
use crate::event::Outlet;
use crate::hold::{HELD_BYTES_MAX, hold};
use crate::watch::Watch;

/// The deepest nesting of arguments.
const DEPTH_MAX: usize = 128;

#[derive(Debug)]
pub(crate) struct Gemma {
    /// Opening marker, closing marker.
    markers: &'static [&'static str; 2],
    quote: &'static [&'static str; 1],
    watch: Watch,
    state: State,
    closing: bool,
}

#[derive(Debug)]
enum State {
    Text,
    /// Up to the brace; holds all that was read.
    Head(String),
    Arguments(Notation),
    /// Invalid arguments: they pass unchanged up to the closing marker.
    Broken,
}

impl Gemma {
    /// The notation of FunctionGemma.
    pub fn function() -> Self {
        Self::new(&["<start_function_call>", "<end_function_call>"], &["<escape>"])
    }

    /// The notation of Gemma 4.
    pub fn four() -> Self {
        Self::new(&["<|tool_call>", "<tool_call|>"], &["<|\"|>"])
    }

    fn new(markers: &'static [&'static str; 2], quote: &'static [&'static str; 1]) -> Self {
        Self { markers, quote, watch: Watch::new(markers), state: State::Text, closing: false }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        self.state = State::Text;
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        out.content(&text);
        self.closing &= text.trim().is_empty();
        match marker {
            Some(marker) if marker == self.markers[0] => self.state = State::Head(marker.into()),
            Some(marker) if !std::mem::take(&mut self.closing) => out.content(marker),
            Some(_) => out.skip(),
            None => {}
        }
    }

    fn head(&mut self, c: char, out: &mut Outlet) {
        let State::Head(held) = &mut self.state else { return };
        let after = format!("{}{c}", &held[self.markers[0].len()..]);
        let after = after.trim_start();
        let named = after.strip_prefix("call:").and_then(|name| name.strip_suffix('{')).map(str::trim);
        if let Some(name) = named.filter(|name| is_name(name)) {
            out.begin(name.to_owned(), None);
            out.arguments("{");
            self.state = State::Arguments(Notation::new(self.quote));
            return;
        }
        let fits = match after.strip_prefix("call:") {
            Some(name) => name.trim().is_empty() || is_name(name.trim()),
            None => "call:".starts_with(after),
        };
        if fits && held.len() < 2 * NAME_BYTES_MAX {
            held.push(c);
        } else {
            let held = std::mem::take(held);
            out.content(&held);
            self.text(c, out);
        }
    }
}

impl Format for Gemma {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Text => self.text(c, out),
            State::Head(_) => self.head(c, out),
            State::Arguments(notation) => match notation.step(c, out) {
                Ok(false) => {}
                Ok(true) => {
                    out.end();
                    self.closing = true;
                    self.state = State::Text;
                }
                Err(rest) => {
                    self.state = State::Broken;
                    rest.chars().for_each(|c| self.step(c, out));
                }
            },
            State::Broken => {
                if broken_call_ends(&mut self.watch, c, &self.markers[1..2], out) {
                    self.state = State::Text;
                }
            }
        }
    }

    fn in_call(&self) -> bool {
        !matches!(self.state, State::Text)
    }

    fn finish(&mut self, out: &mut Outlet) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => out.content(&self.watch.take_held()),
            State::Head(held) => out.content(&held),
            State::Arguments(mut notation) => {
                out.arguments(&notation.word);
                out.arguments(&notation.watch.take_held());
                out.end();
            }
            State::Broken => {
                out.arguments(&self.watch.take_held());
                out.end();
            }
        }
    }
}

/// The notation, after its first brace.
#[derive(Debug)]
struct Notation {
    watch: Watch,
    /// Open brackets: true for objects.
    stack: Vec<bool>,
    /// A key or a bare value so far.
    word: String,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Key,
    Value,
    /// In quoted text; `key` where a colon must follow.
    Quoted {
        key: bool,
    },
    /// After quoted text or a bracket.
    After {
        key: bool,
    },
}

impl Notation {
    fn new(quote: &'static [&'static str]) -> Self {
        Self { watch: Watch::new(quote), stack: vec![true], word: String::new(), place: Place::Key }
    }

    /// Takes a character. True once the outermost bracket is closed. An error returns the text that is invalid.
    fn step(&mut self, c: char, out: &mut Outlet) -> Result<bool, String> {
        let mut text = String::new();
        let quote = self.watch.step(c, &mut text).is_some();
        let mut left = text.chars();
        while let Some(c) = left.next() {
            match self.character(c, out) {
                Some(false) => {}
                Some(true) => return Ok(true),
                None => {
                    let word = std::mem::take(&mut self.word);
                    return Err(format!("{word}{c}{}{}", left.as_str(), self.watch.take_held()));
                }
            }
        }
        if quote {
            self.place = match self.place {
                Place::Quoted { key } => {
                    out.arguments("\"");
                    Place::After { key }
                }
                Place::Key | Place::Value if self.word.trim().is_empty() => {
                    self.word.clear();
                    out.arguments("\"");
                    Place::Quoted { key: self.place == Place::Key }
                }
                _ => return Err(std::mem::take(&mut self.word)),
            };
        }
        Ok(false)
    }

    /// Takes a character. `None` if it is invalid here.
    fn character(&mut self, c: char, out: &mut Outlet) -> Option<bool> {
        match self.place {
            Place::Quoted { .. } => escape(c, out),
            Place::Key if c == ':' => {
                self.word(true, out)?;
                out.arguments(": ");
                self.place = Place::Value;
            }
            Place::After { key: true } if c == ':' => {
                out.arguments(": ");
                self.place = Place::Value;
            }
            Place::Key if c == '}' && self.word.trim().is_empty() => return self.close(c, out),
            Place::Value if matches!(c, '{' | '[') && self.word.trim().is_empty() => {
                self.word.clear();
                if self.stack.len() == DEPTH_MAX {
                    return None;
                }
                self.stack.push(c == '{');
                out.argument(c);
                self.place = if c == '{' { Place::Key } else { Place::Value };
            }
            Place::Value if c == ']' && self.word.trim().is_empty() => return self.close(c, out),
            Place::Value | Place::After { key: false } if matches!(c, ',' | '}' | ']') => {
                if self.place == Place::Value {
                    self.word(false, out)?;
                }
                if c != ',' {
                    return self.close(c, out);
                }
                out.arguments(", ");
                self.place = if *self.stack.last()? { Place::Key } else { Place::Value };
            }
            Place::After { .. } if c.is_whitespace() => {}
            Place::Key | Place::Value if self.word.len() < HELD_BYTES_MAX => hold(&mut self.word, c),
            _ => return None,
        }
        Some(false)
    }

    fn close(&mut self, c: char, out: &mut Outlet) -> Option<bool> {
        if *self.stack.last()? != (c == '}') {
            return None;
        }
        self.word.clear();
        self.stack.pop();
        out.argument(c);
        self.place = Place::After { key: false };
        Some(self.stack.is_empty())
    }

    /// A key, or a value without quotes, has ended.
    fn word(&mut self, key: bool, out: &mut Outlet) -> Option<()> {
        let word = self.word.trim();
        if word.is_empty() {
            return None;
        }
        let json = serde_json::from_str::<serde_json::Value>(word).ok();
        match json.filter(|json| !key || json.is_string()) {
            Some(_) => out.arguments(word),
            None => out.arguments(&serde_json::Value::from(word).to_string()),
        }
        self.word.clear();
        Some(())
    }
}
