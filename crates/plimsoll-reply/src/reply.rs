//! The whole reply: reasoning first, then content and calls.

use std::ops::Range;
use std::sync::Arc;

use crate::event::{Event, Outlet};
use crate::formats::{Format, Harmony, Plain};
use crate::reasoning::Splitter;
use crate::written::Written;
use crate::{HELD_BYTES_MAX, ReasoningFormat, ToolFormat, Tools};

/// The position in its turn where a reply starts. The prompt may contain the first part of the turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At its beginning.
    #[default]
    Turn,
    /// In its reasoning, which ends at the closing tag.
    Reasoning,
    /// In its answer, after the reasoning.
    Answer,
}

/// How to read one reply.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    /// The format of the reasoning. `None` if the model has none, or must not reason.
    pub reasoning: Option<ReasoningFormat>,
    /// The position in its turn where it starts.
    pub start: Start,
    /// The format of tool calls, and the tools. `None` without tools.
    pub tools: Option<(ToolFormat, Arc<Tools>)>,
    /// In every format, an answer is calls if all of it is `{"name": …, "arguments": {…}}` of one of the tools, or a
    /// list of them, bare or in a fence.
    pub written_calls: bool,
    /// Emit a call only when it is complete, so a call cut by a stop string is dropped. A call with arguments longer
    /// than [`HELD_BYTES_MAX`](crate::HELD_BYTES_MAX) is streamed from there on.
    pub whole_calls: bool,
}

impl Spec {
    /// Most bytes that a parser of this reply holds back.
    pub fn held_bytes_max(&self) -> usize {
        let reads = self.reasoning.is_some() || self.tools.is_some();
        let holders = [reads, self.written_calls, self.whole_calls];
        holders.into_iter().filter(|holds| *holds).count() * HELD_BYTES_MAX
    }
}

/// Parses one reply.
#[derive(Debug)]
pub struct ReplyParser {
    splitter: Option<Splitter>,
    format: Box<dyn Format>,
    outlet: Outlet,
    rest: String,
    /// Bytes up to the last one of reasoning.
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

    /// Takes more of the reply, and adds the events that are certain to `out`.
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

    /// Byte ranges in the reply of each [`Event::Content`] from the last [`Self::push`] or the end. A range starts
    /// where the previous event or content ends, and ends at the bytes taken so far. Markers, reasoning and calls lie
    /// between the ranges.
    pub fn spans(&self) -> &[Range<usize>] {
        self.outlet.spans()
    }

    /// Bytes taken so far.
    pub fn taken(&self) -> usize {
        self.outlet.taken()
    }

    /// Bytes up to the last that was emitted as content, or that cannot become content.
    pub fn past(&self) -> usize {
        self.outlet.past()
    }

    /// End of the last certain reasoning, in bytes of the reply; 0 without reasoning.
    pub fn reasoning_end(&self) -> usize {
        self.reasoning_end
    }

    /// Ends the reply and adds the held text.
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

    /// Ends the reply at a stop string. Drops a call that it cut, and returns whether there was one.
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
