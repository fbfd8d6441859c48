//! What comes out, and the outlet that all formats write to: it joins neighbours and drops the white space that only
//! sets calls apart.

use std::ops::Range;

use serde::de::IgnoredAny;

use crate::hold::HELD_BYTES_MAX;
use crate::written::Written;

/// A piece of a reply. Calls are numbered from 0 in the order they begin; their events never interleave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Text the model thought.
    Reasoning(String),
    /// Text for the reader.
    Content(String),
    /// A tool call begins.
    CallBegin {
        /// The tool's name.
        name: String,
        /// The id the model gave the call, if its format has one.
        id: Option<String>,
    },
    /// More of the running call's arguments, as JSON text.
    Arguments(String),
    /// The running call has ended.
    CallEnd,
}

/// The longest run of white space that is held back until it is known what follows.
const SPACE_BYTES_MAX: usize = 1024;

/// Where formats write to.
#[derive(Debug, Default)]
pub(crate) struct Outlet {
    events: Vec<Event>,
    /// White space around calls is dropped; without tools, content goes out as it is.
    trims: bool,
    /// White space that is content unless a call follows.
    space: String,
    after_call: bool,
    /// Reasoning has been sent since the last [`Self::take_reasoning`].
    reasoning: bool,
    /// Bytes of the reply that were taken, and those up to the last that is surely no content, or surely in an event.
    taken: usize,
    past: usize,
    /// Where in the reply each [`Event::Content`] stands, as [`Self::forget_spans`] left it.
    spans: Vec<Range<usize>>,
    /// Content that as a whole may still be calls written as plain JSON.
    written: Option<Written>,
    /// A call goes out when it is complete.
    whole_calls: bool,
    /// The running call, where it goes out when it is complete.
    pending: Option<Pending>,
    /// A call has gone out without its end.
    open: bool,
}

/// A call that has not gone out yet.
#[derive(Debug)]
struct Pending {
    name: String,
    id: Option<String>,
    /// At most [`HELD_BYTES_MAX`].
    arguments: String,
}

impl Outlet {
    /// An outlet; with `trims`, white space that only sets calls apart is dropped. `written` reads content that as a whole is calls;
    /// with `whole_calls`, a call goes out when it is complete.
    pub fn new(trims: bool, written: Option<Written>, whole_calls: bool) -> Self {
        Self { trims, written, whole_calls, ..Self::default() }
    }

    /// Hands over what has come.
    pub fn drain(&mut self, out: &mut Vec<Event>) {
        out.append(&mut self.events);
    }

    pub fn forget_spans(&mut self) {
        self.spans.clear();
    }

    pub fn spans(&self) -> &[Range<usize>] {
        &self.spans
    }

    pub fn past(&self) -> usize {
        self.past
    }

    /// So many bytes of the reply have been taken.
    pub fn takes(&mut self, bytes: usize) {
        self.taken += bytes;
    }

    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Nothing that was taken so far becomes content any more.
    pub fn skip(&mut self) {
        if self.written.as_ref().is_none_or(Written::is_empty) {
            self.past = self.taken;
        }
    }

    pub fn reasoning(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.reasoning = true;
        if self.written.as_ref().is_some_and(|written| !written.is_empty()) {
            self.release();
        }
        self.skip();
        match self.events.last_mut() {
            Some(Event::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(Event::Reasoning(text.to_owned())),
        }
    }

    /// Whether a thought has gone out since the last time.
    pub fn take_reasoning(&mut self) -> bool {
        std::mem::take(&mut self.reasoning)
    }

    pub fn content(&mut self, text: &str) {
        let Some(written) = &mut self.written else { return self.solid(text) };
        if let Some((at, _)) = text.char_indices().find(|(_, c)| !written.step(*c)) {
            self.release();
            self.solid(&text[at..]);
        }
    }

    /// What is held of an answer that might have been calls is content.
    fn release(&mut self) {
        if let Some(written) = self.written.take() {
            self.solid(&written.into_text());
        }
    }

    /// Content that is certainly content.
    fn solid(&mut self, text: &str) {
        if !self.trims {
            return self.write(text);
        }
        let solid = text.trim_end();
        if solid.is_empty() && self.after_call {
            self.skip();
        }
        if !solid.is_empty() {
            let start = if std::mem::take(&mut self.after_call) {
                self.space.clear();
                solid.trim_start()
            } else {
                solid
            };
            let space = std::mem::take(&mut self.space);
            self.write(&space);
            self.write(start);
        }
        self.space.push_str(&text[solid.len()..]);
        if self.space.len() > SPACE_BYTES_MAX {
            let space = std::mem::take(&mut self.space);
            if !self.after_call {
                self.write(&space);
            }
        }
    }

    fn write(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match (self.events.last_mut(), self.spans.last_mut()) {
            (Some(Event::Content(last)), Some(span)) => {
                last.push_str(text);
                span.end = self.taken;
            }
            _ => {
                self.events.push(Event::Content(text.to_owned()));
                self.spans.push(self.past..self.taken);
            }
        }
        self.past = self.taken;
    }

    pub fn begin(&mut self, name: String, id: Option<String>) {
        self.release();
        self.space.clear();
        self.skip();
        if self.whole_calls {
            self.pending = Some(Pending { name, id, arguments: String::new() });
        } else {
            self.open = true;
            self.events.push(Event::CallBegin { name, id });
        }
    }

    /// The pending call goes out as far as it has come.
    fn send_pending(&mut self) {
        if let Some(Pending { name, id, arguments }) = self.pending.take() {
            self.open = true;
            self.events.push(Event::CallBegin { name, id });
            self.arguments(&arguments);
        }
    }

    /// Drops the running call, unless its arguments are complete, and says whether it did.
    pub fn drop_call(&mut self) -> bool {
        let whole = |pending: &Pending| {
            let arguments = pending.arguments.trim_start();
            arguments.starts_with('{') && serde_json::from_str::<IgnoredAny>(arguments).is_ok()
        };
        if self.pending.as_ref().is_some_and(whole) {
            return false;
        }
        self.pending = None;
        self.space.clear();
        if std::mem::take(&mut self.open) {
            self.events.push(Event::CallEnd);
        }
        true
    }

    pub fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.skip();
        if let Some(pending) = &mut self.pending {
            if pending.arguments.len() + text.len() <= HELD_BYTES_MAX {
                return pending.arguments.push_str(text);
            }
            self.send_pending();
        }
        match self.events.last_mut() {
            Some(Event::Arguments(last)) => last.push_str(text),
            _ => self.events.push(Event::Arguments(text.to_owned())),
        }
    }

    pub fn argument(&mut self, c: char) {
        self.arguments(c.encode_utf8(&mut [0; 4]));
    }

    pub fn end(&mut self) {
        self.send_pending();
        self.open = false;
        self.after_call = true;
        self.events.push(Event::CallEnd);
    }

    /// The reply has ended: an answer that is calls as a whole becomes them; white space that no call followed is content.
    pub fn finish(&mut self) {
        if let Some(written) = self.written.take() {
            for (name, arguments) in written.calls() {
                self.begin(name.to_owned(), None);
                self.arguments(arguments);
                self.end();
            }
            if !self.after_call {
                self.solid(&written.into_text());
            }
        }
        let space = std::mem::take(&mut self.space);
        if !self.after_call {
            self.write(&space);
        }
    }
}
