//! Calls as JSON between markers: one object, as Hermes and Qwen write it
//! (`<tool_call>{"name": …, "arguments": {…}}</tool_call>`), or a list of them, as Nemotron Nano 2, Granite 3, Phi-4-mini
//! and Hunyuan write it (`<TOOLCALL>[{…}, {…}]</TOOLCALL>`). Both are read in each of these formats.

use super::call::{JsonCall, Progress};
use super::{Format, broken_call_ends};
use crate::event::Outlet;
use crate::watch::Watch;

/// Most white space and commas between a marker and an object, in bytes.
const GAP_BYTES_MAX: usize = 64;

/// The markers of one family.
#[derive(Debug)]
pub(crate) struct Markers {
    open: &'static [&'static str],
    /// May be missing after a call.
    close: &'static [&'static str],
    /// All of them.
    all: &'static [&'static str],
}

/// Hermes, Qwen 2.5 and 3, SmolLM3, ERNIE 4.5, Granite 4.
pub(crate) const HERMES: Markers =
    Markers { open: &["<tool_call>"], close: &["</tool_call>"], all: &["<tool_call>", "</tool_call>"] };

/// Nemotron Nano 2 and the Llama Nemotron models.
pub(crate) const NEMOTRON: Markers =
    Markers { open: &["<TOOLCALL>"], close: &["</TOOLCALL>"], all: &["<TOOLCALL>", "</TOOLCALL>"] };

/// Granite 3. Its list has no closing marker. Granite 3.1 begins some of its calls with `<tool_call>`.
pub(crate) const GRANITE: Markers = Markers {
    open: &["<|tool_call|>", "<tool_call>"],
    close: &["</tool_call>"],
    all: &["<|tool_call|>", "<tool_call>", "</tool_call>"],
};

/// Phi-4-mini. It begins some of its lists with the word `functools`, or writes calls as Hermes does.
pub(crate) const PHI4: Markers = Markers {
    open: &["<|tool_call|>", "<tool_call>", "functools"],
    close: &["<|/tool_call|>", "</tool_call>"],
    all: &["<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>", "functools"],
};

/// Hunyuan A13B and the dense models of its time.
pub(crate) const HUNYUAN: Markers =
    Markers { open: &["<tool_calls>"], close: &["</tool_calls>"], all: &["<tool_calls>", "</tool_calls>"] };

impl Markers {
    pub fn all(&self) -> &'static [&'static str] {
        self.all
    }
}

#[derive(Debug)]
pub(crate) struct Marked {
    markers: &'static Markers,
    watch: Watch,
    state: State,
    /// The call that runs, or the last one, stands in a list.
    listed: bool,
    /// A call has ended, but its closing marker has not come.
    closing: bool,
}

#[derive(Debug)]
enum State {
    Text,
    /// After the marker, before the object or the list; holds both.
    Gap(String),
    /// In the list, before an object or the bracket; holds what came since the last object, or since the marker.
    List(String),
    Call(JsonCall),
    /// Arguments that are not JSON: they pass unchanged up to the closing marker.
    Broken,
}

impl Marked {
    pub fn new(markers: &'static Markers) -> Self {
        Self { markers, watch: Watch::new(markers.all), state: State::Text, listed: false, closing: false }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        out.content(&text);
        self.closing &= text.trim().is_empty();
        match marker {
            Some(marker) if self.markers.open.contains(&marker) => self.state = State::Gap(marker.into()),
            Some(marker) if !std::mem::take(&mut self.closing) => out.content(marker),
            Some(_) => out.skip(),
            None => {}
        }
    }

    /// The held text was not a call. It and the next character are content.
    fn give_back(&mut self, held: &str, c: char, out: &mut Outlet) {
        out.content(held);
        self.closing &= held.chars().all(|c| c.is_whitespace() || c == ',');
        self.state = State::Text;
        self.text(c, out);
    }

    fn open(&mut self, before: String, c: char, out: &mut Outlet) {
        let mut call = JsonCall::marked(before);
        call.step(c, out);
        self.state = State::Call(call);
    }

    fn gap(&mut self, mut held: String, c: char, out: &mut Outlet) {
        match c {
            '{' => {
                self.listed = false;
                self.open(held, c, out);
            }
            '[' => {
                self.listed = true;
                held.push(c);
                self.state = State::List(held);
            }
            _ if c.is_whitespace() && held.trim_end().len() + GAP_BYTES_MAX > held.len() => {
                held.push(c);
                self.state = State::Gap(held);
            }
            _ => self.give_back(&held, c, out),
        }
    }

    fn list(&mut self, mut held: String, c: char, out: &mut Outlet) {
        let first = held.contains('[');
        match c {
            '{' => self.open(held, c, out),
            // A list without a call is text.
            ']' if !first => {
                out.skip();
                self.state = State::Text;
            }
            _ if (c.is_whitespace() || c == ',' && !first) && held.len() < 2 * GAP_BYTES_MAX => {
                held.push(c);
                self.state = State::List(held);
            }
            _ => self.give_back(&held, c, out),
        }
    }

    fn call(&mut self, c: char, out: &mut Outlet) {
        let State::Call(call) = &mut self.state else { return };
        match call.step(c, out) {
            Progress::More => {}
            Progress::Done => {
                out.skip();
                self.closing = true;
                self.state = if self.listed { State::List(String::new()) } else { State::Text };
            }
            Progress::Not => {
                let State::Call(call) = std::mem::replace(&mut self.state, State::Text) else { return };
                self.give_back(&call.into_text(), c, out);
            }
            Progress::Broken => {
                self.state = State::Broken;
                self.step(c, out);
            }
        }
    }
}

impl Format for Marked {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Text => self.text(c, out),
            State::Gap(held) => {
                let held = std::mem::take(held);
                self.gap(held, c, out);
            }
            State::List(held) => {
                let held = std::mem::take(held);
                self.list(held, c, out);
            }
            State::Call(_) => self.call(c, out),
            State::Broken => {
                if broken_call_ends(&mut self.watch, c, self.markers.close, out) {
                    self.state = State::Text;
                }
            }
        }
    }

    fn in_call(&self) -> bool {
        match &self.state {
            State::Text => false,
            // After a call of a list, a stop string cuts no call.
            State::List(held) => held.contains('['),
            State::Gap(_) | State::Call(_) | State::Broken => true,
        }
    }

    fn finish(&mut self, out: &mut Outlet) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => {
                let held = self.watch.take_held();
                // After a complete call, the start of its closing marker is not text.
                if !self.closing || !self.markers.close.iter().any(|close| close.starts_with(&held)) {
                    out.content(&held);
                }
            }
            // A comma after the last call of a list is not text.
            State::List(held) if !held.contains('[') => out.skip(),
            State::Gap(held) | State::List(held) => out.content(&held),
            State::Call(call) => call.finish(out),
            State::Broken => {
                out.arguments(&self.watch.take_held());
                out.end();
            }
        }
    }
}
