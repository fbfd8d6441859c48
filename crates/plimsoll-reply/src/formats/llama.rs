//! Llama 3 and 4: `{"name": …, "parameters": {…}}` as the whole answer, or after `<|python_tag|>`; several are set
//! apart by semicolons.

use std::sync::Arc;

use super::Format;
use super::call::{JsonCall, Progress};
use crate::Tools;
use crate::event::Outlet;
use crate::watch::Watch;

const TAG: &str = "<|python_tag|>";

#[derive(Debug)]
pub(crate) struct Llama {
    tools: Arc<Tools>,
    watch: Watch,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Nothing but white space has come; an object may be a call.
    Start,
    Text,
    /// After the tag or between calls; holds what stands there.
    Gap(String),
    Call(JsonCall),
    /// Arguments that are not JSON: they pass unchanged to the end.
    Broken,
}

impl Llama {
    pub fn new(tools: Arc<Tools>) -> Self {
        Self { tools, watch: Watch::new(&[TAG]), state: State::Start }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        self.state = State::Text;
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        out.content(&text);
        if let Some(tag) = marker {
            self.state = State::Gap(tag.into());
        }
    }

    fn open(&mut self, before: String, c: char, out: &mut Outlet) {
        let tagged = before.starts_with(TAG);
        let mut call = if tagged { JsonCall::marked(before) } else { JsonCall::among(&self.tools, before) };
        call.step(c, out);
        self.state = State::Call(call);
    }
}

impl Format for Llama {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Start if c.is_whitespace() => out.content(c.encode_utf8(&mut [0; 4])),
            State::Start if c == '{' => self.open(String::new(), c, out),
            State::Start | State::Text => self.text(c, out),
            State::Gap(held) => {
                let held_now = std::mem::take(held);
                if c == '{' {
                    self.open(held_now, c, out);
                } else if (c.is_whitespace() || c == ';') && held_now.len() < TAG.len() + 64 {
                    *held = held_now;
                    held.push(c);
                } else {
                    out.content(&held_now);
                    self.text(c, out);
                }
            }
            State::Call(call) => match call.step(c, out) {
                Progress::More => {}
                Progress::Done => {
                    out.skip();
                    self.state = State::Gap(String::new());
                }
                Progress::Not => {
                    if let State::Call(call) = std::mem::replace(&mut self.state, State::Text) {
                        out.content(&call.into_text());
                    }
                    self.text(c, out);
                }
                Progress::Broken => {
                    out.argument(c);
                    self.state = State::Broken;
                }
            },
            State::Broken => out.argument(c),
        }
    }

    fn in_call(&self) -> bool {
        match &self.state {
            State::Start | State::Text => false,
            State::Gap(held) => held.starts_with(TAG),
            State::Call(call) => call.is_call(),
            State::Broken => true,
        }
    }

    fn finish(&mut self, out: &mut Outlet) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start => {}
            State::Text => out.content(&self.watch.take_held()),
            State::Gap(held) => out.content(&held),
            State::Call(call) => call.finish(out),
            State::Broken => out.end(),
        }
    }
}
