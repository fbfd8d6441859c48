//! Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}`, in some with
//! `[CALL_ID]…` between the two.

use super::call::{JsonCall, Progress};
use super::{Format, JsonArguments, NAME_BYTES_MAX, is_name};
use crate::event::Outlet;
use crate::json::Step;
use crate::watch::Watch;

const CALLS: &str = "[TOOL_CALLS]";
const ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

#[derive(Debug)]
pub(crate) struct Mistral {
    watch: Watch,
    state: State,
}

#[derive(Debug)]
enum State {
    Text,
    /// After the marker; holds it and white space.
    Gap(String),
    /// In the list, between calls; holds what came since the last.
    List(String),
    Listed(JsonCall),
    Head(Head),
    Arguments(JsonArguments),
    /// Arguments that are not JSON: they pass unchanged up to the next marker.
    Broken,
}

/// The head of a call that is not JSON.
#[derive(Debug)]
struct Head {
    /// All that was read.
    text: String,
    watch: Watch,
    name: String,
    id: Option<String>,
    /// Only the object may follow.
    ended: bool,
}

impl Head {
    fn new(text: String) -> Self {
        Self { text, watch: Watch::new(&[ID, ARGUMENTS, "{"]), name: String::new(), id: None, ended: false }
    }

    /// Takes a character. True if the arguments start with it. False if this is not a head; then it was not taken.
    fn step(&mut self, c: char) -> Option<bool> {
        let mut more = String::new();
        let marker = self.watch.step(c, &mut more);
        let part = self.id.as_mut().unwrap_or(&mut self.name);
        part.push_str(&more);
        let name_legal = is_name(&self.name) || self.name.is_empty() && marker.is_none();
        let id_legal = self.id.as_ref().is_none_or(|id| id.is_empty() || is_name(id));
        if !name_legal || !id_legal || (self.ended && !more.is_empty()) || self.text.len() > 4 * NAME_BYTES_MAX {
            return Some(false);
        }
        match marker {
            Some("{") => return Some(true),
            Some(ID) if self.id.is_none() && !self.ended => self.id = Some(String::new()),
            Some(ARGUMENTS) if !self.ended => self.ended = true,
            Some(_) => return Some(false),
            None => {}
        }
        self.text.push(c);
        None
    }
}

impl Mistral {
    pub fn new() -> Self {
        Self { watch: Watch::new(&[CALLS]), state: State::Text }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        self.state = State::Text;
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        out.content(&text);
        if let Some(marker) = marker {
            self.state = State::Gap(marker.into());
        }
    }

    fn give_back(&mut self, held: &str, c: char, out: &mut Outlet) {
        out.content(held);
        self.text(c, out);
    }

    fn gap(&mut self, mut held: String, c: char, out: &mut Outlet) {
        match c {
            '[' => {
                held.push(c);
                self.state = State::List(held);
            }
            '{' => self.open(held, c, out),
            _ if c.is_whitespace() && held.len() < CALLS.len() + 64 => {
                held.push(c);
                self.state = State::Gap(held);
            }
            _ => {
                self.state = State::Head(Head::new(held));
                self.step(c, out);
            }
        }
    }

    fn open(&mut self, before: String, c: char, out: &mut Outlet) {
        let mut call = JsonCall::marked(before);
        call.step(c, out);
        self.state = State::Listed(call);
    }

    fn listed(&mut self, c: char, out: &mut Outlet) {
        let State::Listed(call) = &mut self.state else { return };
        match call.step(c, out) {
            Progress::More => {}
            Progress::Done => {
                out.skip();
                self.state = State::List(String::new());
            }
            Progress::Not => {
                if let State::Listed(call) = std::mem::replace(&mut self.state, State::Text) {
                    self.give_back(&call.into_text(), c, out);
                }
            }
            Progress::Broken => {
                self.state = State::Broken;
                self.step(c, out);
            }
        }
    }
}

impl Format for Mistral {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Text => self.text(c, out),
            State::Gap(held) => {
                let held = std::mem::take(held);
                self.gap(held, c, out);
            }
            State::List(held) => {
                let mut held = std::mem::take(held);
                match c {
                    '{' => self.open(held, c, out),
                    // A list without a call is text.
                    ']' if !held.starts_with(CALLS) => {
                        out.skip();
                        self.state = State::Text;
                    }
                    _ if (c.is_whitespace() || c == ',') && held.len() < CALLS.len() + 64 => {
                        held.push(c);
                        self.state = State::List(held);
                    }
                    _ => self.give_back(&held, c, out),
                }
            }
            State::Listed(_) => self.listed(c, out),
            State::Head(head) => match head.step(c) {
                None => {}
                Some(true) => {
                    out.begin(std::mem::take(&mut head.name), head.id.take().filter(|id| !id.is_empty()));
                    self.state = JsonArguments::open(c, out).map_or(State::Broken, State::Arguments);
                }
                Some(false) => {
                    let text = std::mem::take(&mut head.text);
                    self.give_back(&text, c, out);
                }
            },
            State::Arguments(arguments) => match arguments.step(c, out) {
                Step::More => {}
                Step::Last | Step::Past => {
                    out.end();
                    self.state = State::Text;
                }
                Step::Bad => {
                    self.state = State::Broken;
                    self.step(c, out);
                }
            },
            State::Broken => {
                let mut text = String::new();
                let marker = self.watch.step(c, &mut text);
                out.arguments(&text);
                if let Some(marker) = marker {
                    out.end();
                    self.state = State::Gap(marker.into());
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
            State::Gap(held) | State::List(held) => out.content(&held),
            State::Head(head) => out.content(&head.text),
            State::Listed(call) => call.finish(out),
            State::Arguments(_) => out.end(),
            State::Broken => {
                out.arguments(&self.watch.take_held());
                out.end();
            }
        }
    }
}
