//! What comes out, and the outlet that all formats write to: it joins neighbours and drops the white space that only
//! sets calls apart.

use std::ops::Range;

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
    /// A thought has gone out since somebody asked.
    thought: bool,
    /// Bytes of the reply that were taken, and those up to the last that is surely no content, or surely in an event.
    taken: usize,
    past: usize,
    /// Where in the reply each [`Event::Content`] stands, as [`Self::forget_spans`] left it.
    spans: Vec<Range<usize>>,
}

impl Outlet {
    /// An outlet; with `trims`, white space that only sets calls apart is dropped.
    pub fn new(trims: bool) -> Self {
        Self { trims, ..Self::default() }
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
        self.past = self.taken;
    }

    pub fn reasoning(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.thought = true;
        self.skip();
        match self.events.last_mut() {
            Some(Event::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(Event::Reasoning(text.to_owned())),
        }
    }

    /// Whether a thought has gone out since the last time.
    pub fn take_thought(&mut self) -> bool {
        std::mem::take(&mut self.thought)
    }

    pub fn content(&mut self, text: &str) {
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
        self.space.clear();
        self.skip();
        self.events.push(Event::CallBegin { name, id });
    }

    pub fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.skip();
        match self.events.last_mut() {
            Some(Event::Arguments(last)) => last.push_str(text),
            _ => self.events.push(Event::Arguments(text.to_owned())),
        }
    }

    pub fn argument(&mut self, c: char) {
        self.arguments(c.encode_utf8(&mut [0; 4]));
    }

    pub fn end(&mut self) {
        self.after_call = true;
        self.events.push(Event::CallEnd);
    }

    /// The reply has ended: white space that no call followed is content.
    pub fn finish(&mut self) {
        let space = std::mem::take(&mut self.space);
        if !self.after_call {
            self.write(&space);
        }
    }
}
