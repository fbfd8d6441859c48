//! OpenAI's harmony: every message has a header and a body, `<|channel|>analysis<|message|>…<|end|>`. The channel says
//! what the body is: `analysis` is reasoning, `final` and a `commentary` without a recipient are content, one to
//! `functions.name` is a call.

use super::{Format, NAME_BYTES_MAX, is_name};
use crate::Start;
use crate::event::Outlet;
use crate::watch::Watch;

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// Markers that end a body.
const ENDS: &[&str] = &["<|end|>", "<|return|>", "<|call|>", "<|start|>"];
/// The longest header, in bytes.
const HEADER_BYTES_MAX: usize = 4 * NAME_BYTES_MAX;

#[derive(Debug)]
pub(crate) struct Harmony {
    state: State,
    /// Emit calls. Without tools they are content.
    calls: bool,
}

#[derive(Debug)]
enum State {
    /// Inside a header. If the prompt ends in one, it has no start here.
    Header {
        text: String,
        watch: Watch,
    },
    Body {
        kind: Kind,
        watch: Watch,
    },
    /// After a body, before `<|start|>`.
    Between(Watch),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
    Call,
}

impl Harmony {
    pub fn new(calls: bool, start: Start) -> Self {
        let within = |kind| State::Body { kind, watch: Watch::new(ENDS) };
        let state = match start {
            Start::Turn => header(),
            Start::Reasoning => within(Kind::Reasoning),
            Start::Answer => within(Kind::Content),
        };
        Self { state, calls }
    }

    fn open(&mut self, header: &str, out: &mut Outlet) {
        let channel = header.split_once(CHANNEL).map_or("", |(_, after)| after.trim_start());
        let recipient = header.split_once("to=").map(|(_, after)| {
            let end = after.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(after.len());
            &after[..end]
        });
        let name = recipient.map(|name| name.strip_prefix("functions.").unwrap_or(name));
        let kind = match name.filter(|name| self.calls && is_name(name)) {
            Some(name) => {
                out.begin(name.to_owned(), None);
                Kind::Call
            }
            None if channel.starts_with("analysis") => Kind::Reasoning,
            None => Kind::Content,
        };
        self.state = State::Body { kind, watch: Watch::new(ENDS) };
    }
}

fn header() -> State {
    State::Header { text: String::new(), watch: Watch::new(&[MESSAGE]) }
}

fn body(kind: Kind, text: &str, out: &mut Outlet) {
    match kind {
        Kind::Reasoning => out.reasoning(text),
        Kind::Content => out.content(text),
        Kind::Call => out.arguments(text),
    }
}

impl Format for Harmony {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Header { text, watch } => {
                if watch.step(c, text).is_some() {
                    let text = std::mem::take(text);
                    out.skip();
                    self.open(&text, out);
                } else if text.len() > HEADER_BYTES_MAX {
                    // This is not a header: the model writes text without one.
                    let text = format!("{text}{}", watch.take_held());
                    out.content(&text);
                    self.state = State::Body { kind: Kind::Content, watch: Watch::new(ENDS) };
                }
            }
            State::Body { kind, watch } => {
                let kind = *kind;
                let mut text = String::new();
                let marker = watch.step(c, &mut text);
                body(kind, &text, out);
                let Some(marker) = marker else { return };
                if kind == Kind::Call {
                    out.end();
                }
                self.state = if marker == "<|start|>" { header() } else { State::Between(Watch::new(&["<|start|>"])) };
            }
            State::Between(watch) => {
                let mut text = String::new();
                let marker = watch.step(c, &mut text);
                out.content(&text);
                if marker.is_some() {
                    self.state = header();
                }
            }
        }
    }

    fn in_call(&self) -> bool {
        match &self.state {
            State::Header { text, .. } => self.calls && text.contains("to="),
            State::Body { kind, .. } => *kind == Kind::Call,
            State::Between(_) => false,
        }
    }

    fn finish(&mut self, out: &mut Outlet) {
        match std::mem::replace(&mut self.state, header()) {
            State::Header { text, mut watch } => out.content(&format!("{text}{}", watch.take_held())),
            State::Body { kind, mut watch } => {
                body(kind, &watch.take_held(), out);
                if kind == Kind::Call {
                    out.end();
                }
            }
            State::Between(mut watch) => out.content(&watch.take_held()),
        }
    }
}
