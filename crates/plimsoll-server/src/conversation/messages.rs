//! A conversation as a chat template expects it, and the prompt it becomes.

use std::sync::Arc;

use plimsoll_memory::faults::{self, Site};
use plimsoll_reply::{ReasoningFormat, Start};
use plimsoll_text::{Ending, TextError};
use serde_json::{Map, Value};

use super::adapt;
use super::tools::ToolUse;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::media::prompt::Placeholders;
use crate::media::{self, Measured, Medium};
use crate::state::model::ModelState;

/// What templates call the switch for thoughts.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];

/// What templates call the measure of thoughts.
const EFFORT: &str = "reasoning_effort";

/// What it may be.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// A prompt.
pub(crate) struct Prompt {
    pub text: String,
    pub ids: Vec<u32>,
    /// What its placeholders stand for.
    pub media: Vec<Measured>,
}

/// Heap bytes of a JSON value besides its text.
const VALUE_BYTES: u64 = 112;

/// Messages, tools and options, checked and bounded.
pub(crate) struct Conversation {
    /// The field that holds the messages, for errors.
    pub param: &'static str,
    /// In the form that templates know: OpenAI's chat messages, with text (or text and what stands for media) as content and
    /// objects as arguments.
    pub messages: Value,
    /// What the messages show, in order.
    pub media: Vec<Medium>,
    pub tools: Option<ToolUse>,
    pub ending: Ending,
    /// Variables of the template.
    pub extra: Map<String, Value>,
}

impl Conversation {
    /// A conversation without a template's own options. `param` is the field that holds it, for errors.
    pub fn new(param: &'static str, messages: Vec<Value>, media: Vec<Medium>, tools: Option<ToolUse>) -> Self {
        let messages = Value::Array(messages);
        Self { param, messages, media, tools, ending: Ending::Open, extra: Map::new() }
    }

    /// Heap bytes of it, about.
    pub fn bytes(&self) -> u64 {
        let tools = self.tools.iter().map(|tools| value_bytes(&tools.list));
        let media = self.media.iter().map(Medium::bytes);
        let extra = self.extra.values().map(value_bytes);
        value_bytes(&self.messages) + tools.chain(media).chain(extra).sum::<u64>()
    }

    /// Whether anything in it has to be got first.
    pub fn is_elsewhere(&self) -> bool {
        self.media.iter().any(Medium::is_elsewhere)
    }

    /// Gets what it names elsewhere; `held` grows with it, and with what reading the headers takes.
    pub async fn fetch(&mut self, state: &Arc<ModelState>, held: &mut Held) -> ApiResult<()> {
        media::fetch(state, &mut self.media, held).await?;
        // Of one file at a time a copy is made.
        held.grow(self.media.iter().map(Medium::bytes).max().unwrap_or(0))
    }

    /// How many tokens its prompt has.
    pub async fn count(mut self, state: &Arc<ModelState>, mut held: Held) -> ApiResult<usize> {
        self.fetch(state, &mut held).await?;
        let own = Arc::clone(state);
        let prompt = state.server.on_text_worker(move || self.prompt(&own, false)).await?;
        Ok(prompt.ids.len())
    }

    /// Sets whether the model shall think, where its template can be told.
    pub fn set_thinking(&mut self, on: bool) {
        for name in THINKING {
            self.extra.insert(name.into(), on.into());
        }
    }

    /// Sets how hard the model shall think; `param` is the field that asks for it. A template that has no such dial may have a switch, which
    /// stands as it was set by itself.
    ///
    /// # Errors
    /// With the words that there are.
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

    /// Whether the client wants no thoughts.
    pub fn thinking_off(&self) -> bool {
        THINKING.iter().any(|name| self.extra.get(*name) == Some(&Value::Bool(false)))
    }

    /// Lets the model go on with the last message, which must be the assistant's and end with text.
    pub fn go_on(&mut self) -> ApiResult<()> {
        let last = self.messages.as_array().and_then(|list| list.last()).unwrap_or(&Value::Null);
        let problem = match () {
            () if last["role"] != "assistant" => "it is not the assistant's",
            () if last.get("tool_calls").is_some() => "it has called, and the results come next",
            () if last_text(last).is_none() => "it does not end with a text",
            () => {
                self.ending = Ending::Within;
                return Ok(());
            }
        };
        let message = format!("the last of the {} cannot be gone on with: {problem}", self.param);
        Err(ApiError::invalid(self.param, message))
    }

    /// Where in its turn the reply to a prompt starts, if the model thinks like this.
    pub fn start(&self, reasoning: Option<ReasoningFormat>, prompt: &str) -> Start {
        let last = self.messages.as_array().and_then(|list| list.last()).and_then(last_text).unwrap_or_default();
        match self.ending {
            Ending::Open if reasoning.is_some_and(|format| format.opened_by(prompt)) => Start::Thoughts,
            Ending::Open | Ending::Closed => Start::Turn,
            Ending::Within if reasoning.is_some_and(|format| format.opened_in(last)) => Start::Thoughts,
            Ending::Within => Start::Answer,
        }
    }

    /// The prompt. What its media name elsewhere has been fetched. Runs on a text worker.
    pub fn prompt(&mut self, state: &ModelState, add_special: bool) -> ApiResult<Prompt> {
        let template = state.served.template.as_ref().ok_or_else(|| {
            ApiError::unsupported(self.param, "the served model has no chat template; use /v1/completions")
        })?;
        self.check_extra(template.when(self.tools.is_some()).source())?;
        let Some(spec) = state.served.engine.media() else {
            let tools = self.tools.as_ref().map(|tools| &tools.list);
            let text = self.render(state, tools)?;
            let ids = state.encode(self.param, &[&text], add_special)?;
            return Ok(Prompt { text, ids, media: Vec::new() });
        };
        let mut media = media::measure_all(state, spec, std::mem::take(&mut self.media))?;
        let placeholders = Placeholders::new(spec, &state.served.tokenizer);
        // The tools themselves stay as they are: replies are read by them.
        let mut tools = self.tools.as_ref().map(|tools| tools.list.clone());
        let values: Vec<&mut Value> = std::iter::once(&mut self.messages).chain(&mut tools).collect();
        let guarded = placeholders.guard(self.param, values, &mut self.extra)?;
        let text = placeholders.spell(self.render(state, tools.as_ref())?, &media);
        let ids = state.encode(self.param, &guarded.pieces(&text), add_special)?;
        let context = state.served.engine.limits().max_req_total_len;
        let ids = placeholders.expand(self.param, ids, &mut media, context)?;
        Ok(Prompt { text: guarded.plain(text), ids, media })
    }

    /// What a template does not know would change nothing. Whether a model shall think, and how hard, is taken in any case: one that cannot does
    /// not, and one that has no such dial thinks as it does.
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

    /// The text that the template makes of it.
    fn render(&self, state: &ModelState, tools: Option<&Value>) -> ApiResult<String> {
        let Some(template) = &state.served.template else { return Ok(String::new()) };
        let template = template.when(tools.is_some());
        faults::site(Site::Template);
        let messages = adapt::roles(&self.messages, template.source());
        let render = |messages: &Value| match template.knows_tools() {
            true => template.render(messages, tools, self.ending, &self.extra),
            false => template.render(&adapt::without_tools(messages, tools), None, self.ending, &self.extra),
        };
        let mut rendered = render(&messages);
        // Some templates take a system message at the beginning alone, and agents send further ones.
        if let (Err(TextError::Render(_)), Some(folded)) = (&rendered, adapt::system_first(&messages)) {
            rendered = render(&folded).or(rendered);
        }
        // A template refuses conversations it cannot express (roles out of order, say): the client's to mend.
        rendered.map_err(|error| match error {
            TextError::Panicked(_) => ApiError::internal(error.to_string()),
            _ => ApiError::invalid(self.param, error.to_string()),
        })
    }
}

/// The text that a message ends with.
fn last_text(message: &Value) -> Option<&str> {
    let content = &message["content"];
    content.as_str().or_else(|| content.as_array()?.last()?["text"].as_str())
}

/// Heap bytes of a JSON value, about.
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
