//! Reads replies: a choice's text becomes reasoning, content and tool calls.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_engine::{FinishReason, TokenOut};
use plimsoll_reply::{Event, ReasoningFormat, ReplyParser, Spec, Start, ToolFormat};

use super::custom::{self, InputReader};
use super::prompt::Conversation;
use super::tools::{Custom, ToolChoice, forced_format};
use crate::http::ids::Ids;
use crate::state::model::ModelState;

/// The rules by which the replies of one request are read and shown.
#[derive(Clone, Debug)]
pub(crate) struct ReplyRules {
    pub spec: Spec,
    pub include_reasoning: bool,
    /// Whether there is at most one call. Text after it is dropped.
    one_call: bool,
    /// Whether the grammar allows calls only: other text is then a call that was cut before its name.
    only_calls: bool,
    /// The beginning of call ids. None: short ids without a prefix.
    call_prefix: Option<&'static str>,
    /// Tools with plain-text input.
    custom: Arc<[Custom]>,
}

impl ReplyRules {
    /// The rules for a conversation that was rendered as `prompt`. `structured`: the reply is structured output.
    /// `stops`: a stop string may end it.
    pub fn new(
        state: &ModelState,
        conversation: &Conversation,
        prompt: &str,
        structured: bool,
        stops: bool,
        include_reasoning: bool,
        call_prefix: &'static str,
    ) -> Self {
        let formats = &state.served.formats;
        // A model whose reasoning cannot be switched off reasons anyway, and its reply is parsed accordingly.
        let thinks = |format: &ReasoningFormat| *format == ReasoningFormat::Harmony || format.opened_by(prompt);
        let reasoning = formats.reasoning(conversation.tools.is_some());
        let reasoning = reasoning.filter(|format| !conversation.thinking_off() || thinks(format));
        let start = conversation.start(reasoning, prompt);
        let tools = conversation.tools.as_ref().zip(formats.tools);
        // Under a grammar, calls are written in a format that a grammar can hold.
        let forced = structured || conversation.tools.as_ref().is_some_and(|tools| tools.choice != ToolChoice::Auto);
        let tools = tools
            .map(|(tools, format)| (if forced { forced_format(format) } else { format }, Arc::clone(&tools.known)));
        // A continued answer is not a whole answer.
        let written_calls = tools.is_some() && !forced && start != Start::Answer;
        let whole_calls = tools.is_some() && stops;
        let one_call = conversation.tools.as_ref().is_some_and(|tools| !tools.parallel);
        let only_calls = conversation.tools.as_ref().is_some_and(|tools| tools.choice != ToolChoice::Auto);
        // Mistral's templates accept ids of nine characters only.
        let short = matches!(tools, Some((ToolFormat::Mistral, _)));
        let call_prefix = (!short).then_some(call_prefix);
        let spec = Spec { reasoning, start, tools, written_calls, whole_calls };
        let custom = conversation.tools.as_ref().map_or_else(|| Arc::from([]), |tools| Arc::clone(&tools.custom));
        Self { spec, include_reasoning, one_call, only_calls, call_prefix, custom }
    }

    /// The rules for text that is shown as it arrives: no reasoning, no calls.
    pub fn plain() -> Self {
        Self {
            spec: Spec::default(),
            include_reasoning: true,
            one_call: false,
            only_calls: false,
            call_prefix: None,
            custom: Arc::from([]),
        }
    }

    /// Returns the model's special tokens that the reply parser needs as text.
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

    /// Returns the bytes that reading one reply may hold back.
    pub fn reading_bytes(&self) -> u64 {
        let input = if self.custom.is_empty() { 0 } else { custom::HELD_BYTES_MAX };
        (self.spec.held_bytes_max() + input) as u64
    }

    fn reads(&self) -> bool {
        self.spec.reasoning.is_some() || self.spec.tools.is_some()
    }
}

/// One reply being read.
#[derive(Debug)]
pub(crate) struct ReplyReader {
    parser: Option<ReplyParser>,
    include_reasoning: bool,
    one_call: bool,
    only_calls: bool,
    call_prefix: Option<&'static str>,
    custom: Arc<[Custom]>,
    /// Extracts the text of the running call, if its tool takes plain text.
    input: Option<InputReader>,
    /// The number of calls that have begun.
    calls: usize,
    /// Whether a stop string has cut a call.
    cut: bool,
    over: bool,
    reasoning_tokens: u64,
    /// Text offsets of tokens that may still turn out to be reasoning.
    undecided: VecDeque<u32>,
}

/// Tokens that the parser may hold back while it waits for the end of a marker.
const UNDECIDED_MAX: usize = 64;

/// The span of a reply without a parser: all of it is content.
const WHOLE: Range<usize> = 0..usize::MAX;

/// Whether and how a reply has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyEnd {
    /// More may come.
    No,
    /// The reply has ended.
    Yes,
    /// A stop string has ended the reply.
    Stopped,
}

impl ReplyEnd {
    /// Converts the finish reason, if there is one, and the stop string that ended the reply.
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
    /// The beginning of a call. `custom`: its arguments are a text.
    Call {
        index: usize,
        id: String,
        name: String,
        custom: bool,
    },
    Arguments {
        index: usize,
        text: String,
        custom: bool,
    },
}

impl ReplyReader {
    pub fn new(rules: &ReplyRules) -> Self {
        Self {
            parser: rules.reads().then(|| ReplyParser::new(&rules.spec)),
            include_reasoning: rules.include_reasoning,
            one_call: rules.one_call,
            only_calls: rules.only_calls,
            call_prefix: rules.call_prefix,
            custom: Arc::clone(&rules.custom),
            input: None,
            calls: 0,
            cut: false,
            over: false,
            reasoning_tokens: 0,
            undecided: VecDeque::new(),
        }
    }

    /// Parses more of the reply. `end`: whether it ends there.
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
                let custom = self.custom.iter().any(|custom| custom.name == name);
                self.input = custom.then(InputReader::default);
                Some(Part::Call { index: self.calls - 1, id, name, custom })
            }
            Event::Arguments(text) => {
                let custom = self.input.is_some();
                let text = match &mut self.input {
                    Some(input) => input.push(&text),
                    None => text,
                };
                let index = self.calls.saturating_sub(1);
                (!custom || !text.is_empty()).then_some(Part::Arguments { index, text, custom })
            }
            Event::CallEnd => {
                self.over = self.one_call;
                let text = self.input.take().map(|mut input| input.finish()).filter(|text| !text.is_empty());
                text.map(|text| Part::Arguments { index: self.calls.saturating_sub(1), text, custom: true })
            }
        }
    }

    /// Returns the byte span in the reply of each [`Part::Content`] of the last read.
    pub fn spans(&self) -> &[Range<usize>] {
        self.parser.as_ref().map_or(std::slice::from_ref(&WHOLE), ReplyParser::spans)
    }

    /// Returns the number of bytes of the reply that were read, and of those already assigned to content or to something else.
    pub fn taken_and_past(&self) -> (usize, usize) {
        self.parser.as_ref().map_or((usize::MAX, 0), |parser| (parser.taken(), parser.past()))
    }

    /// Counts the reasoning tokens among `tokens`: those that begin before the end of the last reasoning block.
    pub fn count_reasoning(&mut self, tokens: &[TokenOut]) {
        let Some(end) = self.parser.as_ref().map(ReplyParser::reasoning_end) else { return };
        for token in tokens {
            self.undecided.push_back(token.text_offset);
            while self.undecided.front().is_some_and(|at| (*at as usize) < end) {
                self.undecided.pop_front();
                self.reasoning_tokens += 1;
            }
            if self.undecided.len() > UNDECIDED_MAX {
                self.undecided.pop_front();
            }
        }
    }

    /// Returns the number of reasoning tokens.
    pub fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }

    /// Returns whether the reply has called a tool.
    pub fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// Returns OpenAI's finish reason.
    pub fn finish_name(&self, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::Stop if self.has_called() && !self.cut => "tool_calls",
            reason => reason.name(),
        }
    }
}
