//! Hermes and Qwen: `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`.

use super::call::{JsonCall, Progress};
use super::{Format, broken_call_ends};
use crate::event::Outlet;
use crate::watch::Watch;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Debug)]
pub(crate) struct Hermes {
    watch: Watch,
    state: State,
    /// A call has ended, but its closing marker has not come.
    closing: bool,
}

#[derive(Debug)]
enum State {
    Text,
    /// After the marker, before the object; holds both.
    Gap(String),
    Call(JsonCall),
    /// Arguments that are not JSON: they pass unchanged up to the closing marker.
    Broken,
}

impl Hermes {
    pub fn new() -> Self {
        Self { watch: Watch::new(&[OPEN, CLOSE]), state: State::Text, closing: false }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        out.content(&text);
        self.closing &= text.trim().is_empty();
        match marker {
            Some(OPEN) => self.state = State::Gap(OPEN.into()),
            Some(marker) if !std::mem::take(&mut self.closing) => out.content(marker),
            Some(_) => out.skip(),
            None => {}
        }
    }

    /// The held text was not a call. It and the next character are content.
    fn give_back(&mut self, held: &str, c: char, out: &mut Outlet) {
        out.content(held);
        self.state = State::Text;
        self.text(c, out);
    }
}

impl Format for Hermes {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Text => self.text(c, out),
            State::Gap(held) => {
                let held_now = std::mem::take(held);
                if c == '{' {
                    let mut call = JsonCall::marked(held_now);
                    call.step(c, out);
                    self.state = State::Call(call);
                } else if c.is_whitespace() && held_now.len() < OPEN.len() + 64 {
                    *held = held_now;
                    held.push(c);
                } else {
                    self.give_back(&held_now, c, out);
                }
            }
            State::Call(call) => match call.step(c, out) {
                Progress::More => {}
                Progress::Done => {
                    out.skip();
                    self.state = State::Text;
                    self.closing = true;
                }
                Progress::Not => {
                    let State::Call(call) = std::mem::replace(&mut self.state, State::Text) else { return };
                    self.give_back(&call.into_text(), c, out);
                }
                Progress::Broken => {
                    self.state = State::Broken;
                    self.step(c, out);
                }
            },
            State::Broken => {
                if broken_call_ends(&mut self.watch, c, CLOSE, out) {
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
            State::Text => {
                let held = self.watch.take_held();
                // After a complete call, the start of its closing marker is not text.
                if !self.closing || !CLOSE.starts_with(&held) {
                    out.content(&held);
                }
            }
            State::Gap(held) => out.content(&held),
            State::Call(call) => call.finish(out),
            State::Broken => {
                out.arguments(&self.watch.take_held());
                out.end();
            }
        }
    }
}
