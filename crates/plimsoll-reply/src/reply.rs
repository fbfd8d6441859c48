//! The whole reply: reasoning first, then content and calls.

use std::ops::Range;
use std::sync::Arc;

use crate::event::{Event, Outlet};
use crate::formats::{Format, Harmony, Plain};
use crate::reasoning::Splitter;
use crate::written::Written;
use crate::{HELD_BYTES_MAX, ReasoningFormat, ToolFormat, Tools};

/// Where in its turn a reply starts: the prompt may have begun it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At its beginning.
    #[default]
    Turn,
    /// In its reasoning: all is reasoning up to the closing tag.
    Reasoning,
    /// In its answer: reasoning is over.
    Answer,
}

/// How to read one reply.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    /// How the model thinks; none if it does not, or must not.
    pub reasoning: Option<ReasoningFormat>,
    /// Where in its turn it starts.
    pub start: Start,
    /// How the model calls tools, and which there are; none if it has none.
    pub tools: Option<(ToolFormat, Arc<Tools>)>,
    /// An answer that as a whole is `{"name": …, "arguments": {…}}` of one of the tools, or a list of them, bare or in a fence, is calls
    /// whatever the format.
    pub written_calls: bool,
    /// A call is an event only when it is complete, so a call that a stop string cuts is none. A call with arguments
    /// longer than [`HELD_BYTES_MAX`](crate::HELD_BYTES_MAX) is streamed from there on.
    pub whole_calls: bool,
}

impl Spec {
    /// The most bytes that a parser of this reply holds back.
    pub fn held_bytes_max(&self) -> usize {
        let reads = self.reasoning.is_some() || self.tools.is_some();
        let holders = [reads, self.written_calls, self.whole_calls];
        holders.into_iter().filter(|holds| *holds).count() * HELD_BYTES_MAX
    }
}

/// Takes one reply apart.
#[derive(Debug)]
pub struct ReplyParser {
    splitter: Option<Splitter>,
    format: Box<dyn Format>,
    outlet: Outlet,
    rest: String,
    /// Bytes up to the last that was a thought.
    reasoning_end: usize,
}

impl ReplyParser {
    /// A parser before a reply's first character.
    pub fn new(spec: &Spec) -> Self {
        let calls = spec.tools.as_ref().map(|(format, tools)| format.machine(tools, spec.start));
        let harmony = spec.reasoning == Some(ReasoningFormat::Harmony);
        let block = spec.reasoning.and_then(ReasoningFormat::block).filter(|_| spec.start != Start::Answer);
        let (splitter, format) = match (block, calls) {
            (Some(block), format) => (Some(Splitter::new(block, spec.start == Start::Reasoning)), format),
            // One format for both.
            (None, None) if harmony => (None, Some(Box::new(Harmony::new(false, spec.start)) as Box<dyn Format>)),
            (None, format) => (None, format),
        };
        let written = spec.tools.as_ref().filter(|_| spec.written_calls);
        let written = written.map(|(_, tools)| Written::new(Arc::clone(tools)));
        let outlet = Outlet::new(spec.tools.is_some(), written, spec.whole_calls);
        Self {
            splitter,
            format: format.unwrap_or_else(|| Box::new(Plain)),
            outlet,
            rest: String::new(),
            reasoning_end: 0,
        }
    }

    /// Takes more of the reply and adds what is certain now to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<Event>) {
        self.outlet.forget_spans();
        for c in text.chars() {
            self.outlet.takes(c.len_utf8());
            match &mut self.splitter {
                None => self.format.step(c, &mut self.outlet),
                Some(splitter) => {
                    splitter.step(c, &mut self.outlet, &mut self.rest);
                    self.feed();
                }
            }
            if self.outlet.take_reasoning() {
                self.reasoning_end = self.outlet.taken();
            }
        }
        self.outlet.drain(out);
    }

    /// Where in the reply, in bytes, each [`Event::Content`] of the last [`Self::push`], and of the end, stands: from the end of what is
    /// something else, or of the content before it, to what was taken by then. Markers, reasoning and calls lie between.
    pub fn spans(&self) -> &[Range<usize>] {
        self.outlet.spans()
    }

    /// Bytes that were taken.
    pub fn taken(&self) -> usize {
        self.outlet.taken()
    }

    /// Bytes up to the last that came out as content, or certainly will not.
    pub fn past(&self) -> usize {
        self.outlet.past()
    }

    /// Where the last thought that is certain ends, in bytes of the reply; 0 if there is none.
    pub fn reasoning_end(&self) -> usize {
        self.reasoning_end
    }

    /// The reply has ended; adds what was held back.
    pub fn finish(&mut self, out: &mut Vec<Event>) {
        if let Some(splitter) = &mut self.splitter {
            splitter.finish(&mut self.outlet, &mut self.rest);
            self.feed();
        }
        self.format.finish(&mut self.outlet);
        self.outlet.finish();
        if self.outlet.take_reasoning() {
            self.reasoning_end = self.outlet.taken();
        }
        self.outlet.drain(out);
    }

    /// A stop string has ended the reply. A call that it cut is dropped; returns whether there was one.
    pub fn stop(&mut self, out: &mut Vec<Event>) -> bool {
        let cut = self.format.in_call() && self.outlet.drop_call();
        if cut {
            self.format = Box::new(Plain);
        }
        self.finish(out);
        cut
    }

    fn feed(&mut self) {
        for c in self.rest.chars() {
            self.format.step(c, &mut self.outlet);
        }
        self.rest.clear();
    }
}
