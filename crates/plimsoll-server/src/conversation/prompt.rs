//! A conversation in the form that chat templates expect, and its prompt.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_engine::TRANSCRIBES_ONLY;
use plimsoll_memory::faults::{self, Site};
use plimsoll_reply::{ReasoningFormat, Start};
use plimsoll_text::{Ending, TextError};
use serde_json::{Map, Value};

use super::adapt;
use super::tools::ToolUse;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, CONTEXT_LENGTH, quote};
use crate::media::documents::{self, Document};
use crate::media::prompt::Placeholders;
use crate::media::{self, Measured, Medium};
use crate::state::model::ModelState;

/// Template variables of the reasoning switch.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];

/// Template variable of the reasoning effort.
const EFFORT: &str = "reasoning_effort";

/// Known reasoning efforts.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// A conversation's prompt, as text and as token ids.
pub(crate) struct RenderedPrompt {
    pub text: String,
    pub ids: Vec<u32>,
    /// The media of its placeholders.
    pub media: Vec<Measured>,
}

/// Heap bytes of a JSON value besides its text.
const VALUE_BYTES: u64 = 112;

/// Messages, tools and options, checked and bounded.
#[derive(Clone)]
pub(crate) struct Conversation {
    /// The field that holds the messages, for errors.
    pub param: &'static str,
    /// The messages in the form that templates expect: OpenAI's chat messages. Contents are text (or text and placeholders of media),
    /// arguments are objects.
    pub messages: Value,
    /// The media of the messages, in order.
    pub media: Vec<Medium>,
    /// Documents with text that is still to be read.
    pub documents: Vec<Document>,
    pub tools: Option<ToolUse>,
    pub ending: Ending,
    /// Variables of the template.
    pub extra: Map<String, Value>,
    /// The prompt, if no template writes it: token ids with a placeholder for each medium.
    pub tokens: Option<Vec<u32>>,
}

impl Conversation {
    /// A conversation without a template's own options. `param` is the field that holds it, for errors.
    pub fn new(param: &'static str, messages: Vec<Value>, media: Vec<Medium>, tools: Option<ToolUse>) -> Self {
        let messages = Value::Array(messages);
        let documents = Vec::new();
        Self { param, messages, media, documents, tools, ending: Ending::Open, extra: Map::new(), tokens: None }
    }

    /// Returns about the heap bytes of the conversation.
    pub fn bytes(&self) -> u64 {
        let tools = self.tools.iter().map(|tools| value_bytes(&tools.list));
        let media = self.media.iter().map(Medium::bytes).chain(self.documents.iter().map(Document::bytes));
        let extra = self.extra.values().map(value_bytes);
        value_bytes(&self.messages) + tools.chain(media).chain(extra).sum::<u64>()
    }

    /// Returns whether any of its media must be fetched, or a document read.
    pub fn needs_fetch(&self) -> bool {
        !self.documents.is_empty() || self.media.iter().any(Medium::needs_fetch)
    }

    /// Fetches media and reads documents. `held` grows by their bytes, and by the bytes for reading media headers.
    pub async fn fetch(&mut self, state: &Arc<ModelState>, held: &mut Held) -> ApiResult<()> {
        media::fetch(state, &mut self.media, held).await?;
        documents::read(state, &mut self.messages, std::mem::take(&mut self.documents), held).await?;
        // Only one file at a time is copied.
        held.grow(self.media.iter().map(Medium::bytes).max().unwrap_or(0))
    }

    /// Returns the number of its prompt's tokens.
    pub async fn count(mut self, state: &Arc<ModelState>, mut held: Held) -> ApiResult<usize> {
        self.fetch(state, &mut held).await?;
        let own = Arc::clone(state);
        let prompt = state.server.on_text_worker(move || self.prompt(&own, false)).await?;
        Ok(prompt.ids.len())
    }

    /// Switches reasoning on or off, if the template has a switch.
    pub fn set_thinking(&mut self, on: bool) {
        for name in THINKING {
            self.extra.insert(name.into(), on.into());
        }
    }

    /// Sets the reasoning effort. `param` is its field. Turns the template's reasoning switch on or off too, unless the
    /// client set it.
    ///
    /// # Errors
    /// Lists the known efforts.
    pub fn set_effort(&mut self, param: &str, effort: &str) -> ApiResult<()> {
        if !EFFORTS.contains(&effort) {
            let message = format!("{param} is `{}`; known are {}", quote(effort), EFFORTS.join(", "));
            return Err(ApiError::invalid(param, message));
        }
        if !THINKING.iter().any(|name| self.extra.contains_key(*name)) {
            self.set_thinking(effort != "none");
        }
        self.extra.insert(EFFORT.into(), effort.into());
        Ok(())
    }

    /// Returns whether the client switches reasoning off.
    pub fn thinking_off(&self) -> bool {
        THINKING.iter().any(|name| self.extra.get(*name) == Some(&Value::Bool(false)))
    }

    /// Lets the model continue the last message, which must be the assistant's and end with text.
    pub fn continue_last(&mut self) -> ApiResult<()> {
        let last = self.messages.as_array().and_then(|list| list.last()).unwrap_or(&Value::Null);
        let problem = match () {
            () if last["role"] != "assistant" => format!("has role {}", last["role"]),
            () if last.get("tool_calls").is_some() => "has tool calls, and the results come next".into(),
            () if last_text(last).is_none() => "does not end with text".into(),
            () => {
                self.ending = Ending::Within;
                return Ok(());
            }
        };
        let message = format!(
            "the last of `{}` {problem}; to be continued, it must be an assistant message that ends with text",
            self.param
        );
        Err(ApiError::invalid(self.param, message))
    }

    /// Returns where the reply to a prompt starts: in reasoning, at the beginning, or in the answer.
    pub fn start(&self, reasoning: Option<ReasoningFormat>, prompt: &str) -> Start {
        let last = self.messages.as_array().and_then(|list| list.last()).and_then(last_text).unwrap_or_default();
        match self.ending {
            Ending::Open if reasoning.is_some_and(|format| format.opened_by(prompt)) => Start::Reasoning,
            Ending::Open | Ending::Closed => Start::Turn,
            Ending::Within if reasoning.is_some_and(|format| format.opened_in(last)) => Start::Reasoning,
            Ending::Within => Start::Answer,
        }
    }

    /// Renders and tokenizes the prompt. Its media have been fetched. Runs on a text worker.
    pub fn prompt(&mut self, state: &ModelState, add_special: bool) -> ApiResult<RenderedPrompt> {
        self.prompt_within(state, add_special, None)
    }

    /// Renders and tokenizes the prompt. If it has more than `room` tokens, the oldest turns are left out. A conversation with media is not
    /// shortened.
    pub fn prompt_within(
        &mut self,
        state: &ModelState,
        add_special: bool,
        room: Option<usize>,
    ) -> ApiResult<RenderedPrompt> {
        if let Some(tokens) = self.tokens.take() {
            return self.of_tokens(state, tokens);
        }
        let template = state.served.template.as_ref().ok_or_else(|| {
            ApiError::unsupported(self.param, "the served model has no chat template; use /v1/completions")
        })?;
        self.check_extra(template.when(self.tools.is_some()).source())?;
        let Some(spec) = state.served.engine.media() else {
            let (text, ids) = self.fitting(room, |own| {
                let text = own.render(state, &own.messages, own.tools.as_ref().map(|tools| &tools.list))?;
                let ids = state.encode(own.param, &[&text], add_special)?;
                Ok((text, ids))
            })?;
            return Ok(RenderedPrompt { text, ids, media: Vec::new() });
        };
        let room = room.filter(|_| self.media.is_empty());
        let mut media = media::measure_all(state, spec, std::mem::take(&mut self.media))?;
        let placeholders = Placeholders::new(spec, &state.served.tokenizer);
        // A copy: the reply parser needs the tools unchanged.
        let mut tools = self.tools.as_ref().map(|tools| tools.list.clone());
        let values: Vec<&mut Value> = std::iter::once(&mut self.messages).chain(&mut tools).collect();
        let guarded = placeholders.guard(self.param, values, &mut self.extra)?;
        let (text, ids) = self.fitting(room, |own| {
            let rendered = match media.is_empty() {
                true => own.render(state, &own.messages, tools.as_ref())?,
                false => own.render_media(state, tools.as_ref(), &placeholders)?,
            };
            let text = placeholders.spell(rendered, &media);
            let ids = state.encode(own.param, &guarded.pieces(&text), add_special)?;
            Ok((text, ids))
        })?;
        let context = state.served.engine.limits().max_req_total_len;
        let ids = placeholders.expand(self.param, ids, &mut media, context)?;
        Ok(RenderedPrompt { text: guarded.plain(text), ids, media })
    }

    /// Returns the prompt from given tokens.
    fn of_tokens(&mut self, state: &ModelState, ids: Vec<u32>) -> ApiResult<RenderedPrompt> {
        let spec = state.served.engine.media().ok_or_else(|| ApiError::unsupported("model", TRANSCRIBES_ONLY))?;
        let mut media = media::measure_all(state, spec, std::mem::take(&mut self.media))?;
        let context = state.served.engine.limits().max_req_total_len;
        let placeholders = Placeholders::new(spec, &state.served.tokenizer);
        let ids = placeholders.expand(self.param, ids, &mut media, context)?;
        Ok(RenderedPrompt { text: String::new(), ids, media })
    }

    /// Returns the result of `write` for the messages. If it has more than `room` tokens, the fewest possible of the oldest turns are
    /// removed so that it fits. A turn begins with a user message; the last turn and the system messages at the beginning stay. The number
    /// of calls of `write` is logarithmic in the number of turns.
    fn fitting(
        &mut self,
        room: Option<usize>,
        write: impl Fn(&Self) -> ApiResult<(String, Vec<u32>)>,
    ) -> ApiResult<(String, Vec<u32>)> {
        let whole = write(self);
        let fits = |written: &ApiResult<(String, Vec<u32>)>| match (written, room) {
            (Ok((_, ids)), Some(room)) => ids.len() <= room,
            (Err(error), Some(_)) => error.code != Some(CONTEXT_LENGTH),
            (_, None) => true,
        };
        if fits(&whole) {
            return whole;
        }
        drop(whole);
        let role = |message: &Value, role: &str| message["role"] == role;
        let list = self.messages.as_array().map_or(&[][..], Vec::as_slice);
        let leads = |message: &&Value| role(message, "system") || role(message, "developer");
        let head = list.iter().take_while(leads).count();
        let turns: Vec<usize> = (head + 1..list.len()).filter(|at| role(&list[*at], "user")).collect();
        let (mut too_few, mut enough, mut shortest) = (0, turns.len(), None);
        while too_few < enough {
            let middle = usize::midpoint(too_few, enough);
            let written = self.without(head..turns[middle], &write);
            match fits(&written) {
                true => (enough, shortest) = (middle, Some(written)),
                false => too_few = middle + 1,
            }
        }
        // A conversation that still does not fit gets its error here or from the caller.
        let (Some(written), Value::Array(list)) = (shortest, &mut self.messages) else { return write(self) };
        let cut = turns[enough];
        list.drain(head..cut);
        tracing::info!(messages = cut - head, "the oldest messages are left out: the context is full");
        written
    }

    /// Returns the result of `write` for the messages without those in the range.
    fn without<T>(&mut self, range: Range<usize>, write: impl Fn(&Self) -> T) -> T {
        let start = range.start;
        let dropped: Vec<Value> =
            self.messages.as_array_mut().map_or_else(Vec::new, |list| list.drain(range).collect());
        let written = write(self);
        if let Value::Array(list) = &mut self.messages {
            list.splice(start..start, dropped);
        }
        written
    }

    /// Refuses options that the template does not know: they would have no effect. The reasoning switch and effort are always accepted.
    /// They have no effect on a model without them.
    fn check_extra(&self, template: &str) -> ApiResult<()> {
        let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        let known = |name: &str| name == EFFORT || THINKING.contains(&name) || template.contains(name);
        let Some((name, _)) = self.extra.iter().find(|(name, value)| !known(name) && !empty(value)) else {
            return Ok(());
        };
        let param = match name.as_str() {
            "documents" => name.clone(),
            _ => format!("chat_template_kwargs.{name}"),
        };
        let message = format!("{param} has no effect: the served model's chat template does not know it");
        Err(ApiError::unsupported(param, message))
    }

    /// Renders the template of a conversation with media. A template that writes none of their placeholders gets the placeholders as text:
    /// it was made for text alone.
    fn render_media(
        &self,
        state: &ModelState,
        tools: Option<&Value>,
        placeholders: &Placeholders<'_>,
    ) -> ApiResult<String> {
        let rendered = self.render(state, &self.messages, tools);
        if rendered.as_ref().is_ok_and(|prompt| placeholders.any_in(prompt)) {
            return rendered;
        }
        match placeholders.as_text(&self.messages) {
            Some(messages) => self.render(state, &messages, tools).or(rendered),
            None => rendered,
        }
    }

    /// Renders the template.
    fn render(&self, state: &ModelState, messages: &Value, tools: Option<&Value>) -> ApiResult<String> {
        let Some(template) = &state.served.template else { return Ok(String::new()) };
        let template = template.when(tools.is_some());
        faults::site(Site::Template);
        let messages = adapt::roles(messages, template.source());
        let render = |messages: &Value| match template.knows_tools() {
            true => template.render(messages, tools, self.ending, &self.extra),
            false => template.render(&adapt::without_tools(messages, tools), None, self.ending, &self.extra),
        };
        let mut rendered = render(&messages);
        // Some templates accept a system message only at the beginning, and agents send further ones.
        if let (Err(TextError::Render(_)), Some(folded)) = (&rendered, adapt::system_first(&messages)) {
            rendered = render(&folded).or(rendered);
        }
        // A template refuses conversations that it cannot express, for example roles out of order: a 400.
        rendered.map_err(|error| match error {
            TextError::Panicked(_) => ApiError::internal(error.to_string()),
            _ => ApiError::invalid(self.param, error.to_string()),
        })
    }
}

/// Returns the text at the end of a message.
fn last_text(message: &Value) -> Option<&str> {
    let content = &message["content"];
    content.as_str().or_else(|| content.as_array()?.last()?["text"].as_str())
}

/// Returns about the heap bytes of a JSON value.
pub(crate) fn value_bytes(value: &Value) -> u64 {
    VALUE_BYTES
        + match value {
            Value::String(text) => text.capacity() as u64,
            Value::Array(list) => list.iter().map(value_bytes).sum(),
            Value::Object(map) => map.iter().map(|(key, value)| key.capacity() as u64 + value_bytes(value)).sum(),
            Value::Number(number) => number.as_str().len() as u64,
            _ => 0,
        }
}
