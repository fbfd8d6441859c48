//! Reading replies: a choice's text becomes reasoning, content and calls as the client is to see them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_engine::{FinishReason, TokenOut};
use plimsoll_reply::{Event, ReasoningFormat, ReplyParser, Spec, Start, ToolFormat};

use super::messages::Conversation;
use super::tools::{ToolChoice, forced_format};
use crate::conversation::choices::finish_name;
use crate::http::ids::Ids;
use crate::state::model::ModelState;

/// How the replies of one request are read and shown.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub spec: Spec,
    pub include_reasoning: bool,
    /// At most one call; what follows it is not shown.
    one_call: bool,
    /// A grammar asks for calls and nothing else: what is no call is one that was cut before its name was out.
    only_calls: bool,
    /// How ids of calls begin; none for short ones without a beginning.
    call_prefix: Option<&'static str>,
}

impl Rules {
    /// The rules for a conversation that was rendered as `prompt`. `formed`: the reply is structured output. `stops`:
    /// a stop string may end it.
    pub fn new(
        state: &ModelState,
        conversation: &Conversation,
        prompt: &str,
        formed: bool,
        stops: bool,
        include_reasoning: bool,
        call_prefix: &'static str,
    ) -> Self {
        let formats = &state.served.formats;
        // A model that cannot be switched off thinks all the same, and its reply is read so.
        let thinks = |format: &ReasoningFormat| *format == ReasoningFormat::Harmony || format.opened_by(prompt);
        let reasoning = formats.thoughts(conversation.tools.is_some());
        let reasoning = reasoning.filter(|format| !conversation.thinking_off() || thinks(format));
        let start = conversation.start(reasoning, prompt);
        let tools = conversation.tools.as_ref().zip(formats.tools);
        // Under a grammar, calls are written in a format that a grammar can hold.
        let forced = formed || conversation.tools.as_ref().is_some_and(|tools| tools.choice != ToolChoice::Auto);
        let tools = tools
            .map(|(tools, format)| (if forced { forced_format(format) } else { format }, Arc::clone(&tools.known)));
        // An answer that goes on with the prompt's is no whole answer.
        let written_calls = tools.is_some() && !forced && start != Start::Answer;
        let whole_calls = tools.is_some() && stops;
        let one_call = conversation.tools.as_ref().is_some_and(|tools| !tools.parallel);
        let only_calls = conversation.tools.as_ref().is_some_and(|tools| tools.choice != ToolChoice::Auto);
        // Mistral's templates accept ids of nine characters only.
        let short = matches!(tools, Some((ToolFormat::Mistral, _)));
        let call_prefix = (!short).then_some(call_prefix);
        let spec = Spec { reasoning, start, tools, written_calls, whole_calls };
        Self { spec, include_reasoning, one_call, only_calls, call_prefix }
    }

    /// Special tokens of the model that the reply parser needs as text.
    pub fn kept_special_ids(&self, state: &ModelState) -> Vec<u32> {
        let tokenizer = &state.served.tokenizer;
        let tools = self.spec.tools.iter().flat_map(|(format, _)| format.markers());
        let markers = tools.chain(self.spec.reasoning.iter().flat_map(|format| format.markers()));
        let ids = markers.filter_map(|marker| tokenizer.token_to_id(marker)).filter(|id| tokenizer.is_special(*id));
        let mut ids: Vec<u32> = ids.collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Bytes that reading one reply may hold back.
    pub fn reading_bytes(&self) -> u64 {
        self.spec.held_bytes_max() as u64
    }

    fn reads(&self) -> bool {
        self.spec.reasoning.is_some() || self.spec.tools.is_some()
    }
}

/// One reply being read.
#[derive(Debug)]
pub(crate) struct Reading {
    parser: Option<ReplyParser>,
    include_reasoning: bool,
    one_call: bool,
    only_calls: bool,
    call_prefix: Option<&'static str>,
    /// Calls that have begun.
    calls: usize,
    /// A stop string has cut a call.
    cut: bool,
    over: bool,
    thought_tokens: u64,
    /// Where tokens begin of which it is not certain yet that they are no thoughts.
    undecided: VecDeque<u32>,
}

/// Tokens that the parser may hold back while it waits for the end of a marker.
const UNDECIDED_MAX: usize = 64;

/// Where the content of a reply stands that is nothing else.
const WHOLE: Range<usize> = 0..usize::MAX;

/// Whether a reply goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyEnd {
    /// More may come.
    No,
    /// It has ended.
    Yes,
    /// A stop string has ended it.
    Stopped,
}

impl ReplyEnd {
    /// From the reason for which a reply ended, if it has, and the stop string that did it.
    pub fn of(finish: Option<FinishReason>, stop_string: Option<&str>) -> Self {
        match (finish, stop_string) {
            (None, _) => Self::No,
            (Some(FinishReason::Stop), Some(_)) => Self::Stopped,
            (Some(_), _) => Self::Yes,
        }
    }
}

/// A piece of a reply as clients see it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Reasoning(String),
    Content(String),
    Call { index: usize, id: String, name: String },
    Arguments { index: usize, text: String },
}

impl Reading {
    pub fn new(rules: &Rules) -> Self {
        Self {
            parser: rules.reads().then(|| ReplyParser::new(&rules.spec)),
            include_reasoning: rules.include_reasoning,
            one_call: rules.one_call,
            only_calls: rules.only_calls,
            call_prefix: rules.call_prefix,
            calls: 0,
            cut: false,
            over: false,
            thought_tokens: 0,
            undecided: VecDeque::new(),
        }
    }

    /// Takes more of the reply, and its end.
    pub fn read(&mut self, text: String, end: ReplyEnd, ids: &Ids) -> Vec<Part> {
        let Some(parser) = &mut self.parser else {
            return if text.is_empty() { Vec::new() } else { vec![Part::Content(text)] };
        };
        let mut events = Vec::new();
        parser.push(&text, &mut events);
        match end {
            ReplyEnd::No => {}
            ReplyEnd::Yes => parser.finish(&mut events),
            ReplyEnd::Stopped => self.cut = parser.stop(&mut events),
        }
        events.into_iter().filter_map(|event| self.part(event, ids)).collect()
    }

    fn part(&mut self, event: Event, ids: &Ids) -> Option<Part> {
        if self.over {
            return None;
        }
        match event {
            Event::Reasoning(text) => self.include_reasoning.then_some(Part::Reasoning(text)),
            Event::Content(text) => (!self.only_calls).then_some(Part::Content(text)),
            Event::CallBegin { name, id } => {
                self.calls += 1;
                let id = id.unwrap_or_else(|| ids.call(self.call_prefix));
                Some(Part::Call { index: self.calls - 1, id, name })
            }
            Event::Arguments(text) => Some(Part::Arguments { index: self.calls.saturating_sub(1), text }),
            Event::CallEnd => {
                self.over = self.one_call;
                None
            }
        }
    }

    /// Where in the reply, in bytes, each [`Part::Content`] stands that was read last.
    pub fn spans(&self) -> &[Range<usize>] {
        self.parser.as_ref().map_or(std::slice::from_ref(&WHOLE), ReplyParser::spans)
    }

    /// Bytes of the reply that were read, and those up to the last that was content, or certainly will not be.
    pub fn taken_and_past(&self) -> (usize, usize) {
        self.parser.as_ref().map_or((usize::MAX, 0), |parser| (parser.taken(), parser.past()))
    }

    /// Counts those of the tokens that were read last that begin before the last thought's end.
    pub fn count_thoughts(&mut self, tokens: &[TokenOut]) {
        let Some(end) = self.parser.as_ref().map(ReplyParser::thoughts_end) else { return };
        for token in tokens {
            self.undecided.push_back(token.text_offset);
            while self.undecided.front().is_some_and(|at| (*at as usize) < end) {
                self.undecided.pop_front();
                self.thought_tokens += 1;
            }
            if self.undecided.len() > UNDECIDED_MAX {
                self.undecided.pop_front();
            }
        }
    }

    /// Tokens that were thoughts.
    pub fn thought_tokens(&self) -> u64 {
        self.thought_tokens
    }

    /// Whether the reply has called a tool.
    pub fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// Why the reply ended, in OpenAI's chat's words.
    pub fn finish_name(&self, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Stop if self.has_called() && !self.cut => "tool_calls",
            reason => finish_name(reason),
        }
    }
}
