//! Events, and the outlet that all formats write to. It joins adjacent events, and drops white space that only
//! separates calls.

use std::ops::Range;

use serde::de::IgnoredAny;

use crate::hold::HELD_BYTES_MAX;
use crate::written::Written;

/// A part of a reply. Calls are numbered from 0 in order of their start. Events of two calls never interleave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Text of the model's reasoning.
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

/// Most white space that is held back until the next text is known.
const SPACE_BYTES_MAX: usize = 1024;

/// The output of all formats.
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
    /// `taken`: bytes of the reply so far. `past`: bytes up to the last that is in an event, or that cannot become
    /// content.
    taken: usize,
    past: usize,
    /// Byte ranges in the reply of each [`Event::Content`] since [`Self::forget_spans`].
    spans: Vec<Range<usize>>,
    /// Content that may turn out to be calls written as plain JSON.
    written: Option<Written>,
    /// Emit a call only when it is complete.
    whole_calls: bool,
    /// The current call, if calls are emitted when complete.
    pending: Option<Pending>,
    /// A call was emitted and its end was not.
    open: bool,
}

/// A call that is not emitted yet.
#[derive(Debug)]
struct Pending {
    name: String,
    id: Option<String>,
    /// At most [`HELD_BYTES_MAX`].
    arguments: String,
}

impl Outlet {
    /// With `trims`, white space that only separates calls is dropped. `written` reads answers that consist of calls.
    /// With `whole_calls`, a call is emitted only when it is complete.
    pub fn new(trims: bool, written: Option<Written>, whole_calls: bool) -> Self {
        Self { trims, written, whole_calls, ..Self::default() }
    }

    /// Moves all events to `out`.
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

    /// Counts bytes taken from the reply.
    pub fn takes(&mut self, bytes: usize) {
        self.taken += bytes;
    }

    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Nothing taken so far can become content any more.
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

    /// Whether reasoning was emitted since the last time.
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

    /// Emits held text that turned out not to be calls.
    fn release(&mut self) {
        if let Some(written) = self.written.take() {
            self.solid(&written.into_text());
        }
    }

    /// Emits text that is certainly content.
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

    /// Emits the pending call as far as it has arrived.
    fn send_pending(&mut self) {
        if let Some(Pending { name, id, arguments }) = self.pending.take() {
            self.open = true;
            self.events.push(Event::CallBegin { name, id });
            self.arguments(&arguments);
        }
    }

    /// Drops the current call unless its arguments are complete. Returns whether it dropped one.
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

    /// Ends the reply. An answer that consists of calls is emitted as calls. White space without a call after it is
    /// content.
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
