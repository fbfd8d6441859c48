//! The bodies of `/api/chat` and `/api/generate`, field by field.

use plimsoll_grammar::Source;
use serde_json::{Value, json};

use super::messages::MessageBuilder;
use super::options::Options;
use crate::chat::tools;
use crate::conversation::ChatRequest;
use crate::conversation::cache_control::Marks;
use crate::conversation::infill::{self, Gap};
use crate::conversation::output_format::{OutputFormat, schema};
use crate::conversation::params::{Common, model_name, top_logprobs};
use crate::conversation::prompt::Conversation;
use crate::conversation::submission::Submission;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::state::model::ModelState;

/// The field that holds the number of tokens to generate.
const LENGTH: &str = "options.num_predict";

/// The work that a request asks for.
pub(crate) enum Work {
    /// Only load the model.
    Load { model: String, stream: bool },
    /// Answer a turn of a conversation.
    Turn(Box<ChatRequest>),
    /// Continue a text.
    Text(Box<Submission>),
}

impl Work {
    /// Returns about the heap bytes of the work.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Load { model, .. } => model.len() as u64,
            Self::Turn(turn) => turn.bytes(),
            Self::Text(submission) => submission.bytes(),
        }
    }
}

/// The fields that both routes have.
struct Shared {
    common: Common,
    logprobs: Option<u32>,
    think: Option<Value>,
    /// Whether `keep_alive` asks to unload the model afterwards.
    unloads: bool,
    /// The field `truncate`, true by default.
    drops_oldest: bool,
}

impl Shared {
    fn take(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let model = model_name(fields, state)?;
        state.check_generates()?;
        let stream = fields.take("stream")?.unwrap_or(true);
        let Options { sampling, max_tokens, stop } = Options::take(fields, state)?;
        let common =
            Common { max_tokens, stop, output_format: format(fields)?, ..Common::new(model, stream, sampling) };
        let wanted = fields.take("logprobs")?.unwrap_or(false);
        let top = fields.take::<u32>("top_logprobs")?;
        if !wanted && top.is_some_and(|n| n > 0) {
            let message = "top_logprobs is only allowed when logprobs is true";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        let logprobs = if wanted { Some(top_logprobs(top)?) } else { None };
        let think = fields.json("think")?;
        let unloads = keep_alive(fields)?;
        let drops_oldest = fields.take::<bool>("truncate")?.unwrap_or(true);
        // The output always ends at the end of the context.
        fields.take::<bool>("shift")?;
        Ok(Self { common, logprobs, think, unloads, drops_oldest })
    }

    /// The work of a request without a prompt.
    fn load(self) -> ApiResult<Work> {
        if self.unloads {
            let message = "keep_alive 0 without a prompt asks to unload the model: this server unloads models by its own settings";
            return Err(ApiError::unsupported("keep_alive", message));
        }
        let Common { model, stream, .. } = self.common;
        Ok(Work::Load { model, stream })
    }

    fn turn(self, mut conversation: Conversation) -> ApiResult<Work> {
        match &self.think {
            None => {}
            Some(Value::Bool(on)) => conversation.set_thinking(*on),
            Some(Value::String(effort)) => conversation.set_effort("think", effort)?,
            Some(_) => return Err(ApiError::invalid("think", "think must be true, false, low, medium or high")),
        }
        // A stream collects a call's arguments until they are complete.
        let repeats_output = self.common.stream && conversation.tools.is_some();
        let turn = ChatRequest {
            conversation,
            common: self.common,
            logprobs: self.logprobs,
            add_special: false,
            include_reasoning: true,
            budget: None,
            call_prefix: "call",
            length_param: LENGTH,
            clamps_max_tokens: true,
            repeats_output,
            drops_oldest: self.drops_oldest,
            marks: Marks::default(),
        };
        Ok(Work::Turn(Box::new(turn)))
    }

    /// The work of filling a gap between two texts, without a template.
    fn gap(mut self, prefix: &str, suffix: &str, state: &ModelState) -> ApiResult<Work> {
        self.common.stop_token_ids.extend(&infill::tokens(state, "suffix")?.ends);
        let gap = Gap { suffix, suffix_param: "suffix", ..Gap::default() };
        let prefix = state.encode_plain("prompt", &[prefix])?;
        let ids = gap.frame(state)?.ids(state, &prefix)?;
        self.text(ids, state)
    }

    fn text(self, ids: Vec<u32>, state: &ModelState) -> ApiResult<Work> {
        let mut submission = Submission::of_text(self.common, ids, state)?;
        (submission.logprobs, submission.length_param, submission.clamps_max_tokens) = (self.logprobs, LENGTH, true);
        Ok(Work::Text(Box::new(submission)))
    }
}

/// Parses the body of `/api/chat`. Runs on a text worker.
pub(crate) fn chat(body: &[u8], state: &ModelState) -> ApiResult<Work> {
    let mut fields = Fields::of_body(body)?;
    let shared = Shared::take(&mut fields, state)?;
    let mut builder = MessageBuilder::new(state);
    builder.take(&mut fields)?;
    let tools = tools::take(&mut fields)?;
    fields.finish()?;
    let (messages, media) = builder.into_parts();
    let Some(last) = messages.last() else { return shared.load() };
    let prefilled = last["role"] == "assistant" && last["content"] != "" && last.get("tool_calls").is_none();
    let mut conversation = Conversation::new("messages", messages, media, tools);
    if prefilled {
        conversation.continue_last()?;
    }
    shared.turn(conversation)
}

/// Parses the body of `/api/generate`. Runs on a text worker.
pub(crate) fn generate(body: &[u8], state: &ModelState) -> ApiResult<Work> {
    let mut fields = Fields::of_body(body)?;
    let shared = Shared::take(&mut fields, state)?;
    let mut text = |name: &str| fields.take::<String>(name).map(Option::unwrap_or_default);
    let (prompt, suffix, system) = (text("prompt")?, text("suffix")?, text("system")?);
    let template = text("template")?;
    let raw = fields.take("raw")?.unwrap_or(false);
    let mut builder = MessageBuilder::new(state);
    let content = builder.content(&mut fields, &prompt)?;
    let shows = content.is_array();
    if !template.is_empty() {
        let message =
            "template is not supported: the model's own chat template is used; send a formatted prompt with `raw`";
        return Err(ApiError::unsupported("template", message));
    }
    if fields.take::<Vec<u32>>("context")?.is_some_and(|ids| !ids.is_empty()) {
        let message = "context is not supported: send the conversation to /api/chat";
        return Err(ApiError::unsupported("context", message));
    }
    fields.never(&["width", "height", "steps"], "this server makes no images")?;
    fields.finish()?;
    if prompt.is_empty() && suffix.is_empty() && !shows {
        return shared.load();
    }
    if !suffix.is_empty() {
        for (name, given) in [("system", !system.is_empty()), ("images", shows), ("raw", raw)] {
            if given {
                return Err(ApiError::unsupported(name, format!("{name} is not supported with suffix")));
            }
        }
        return shared.gap(&prompt, &suffix, state);
    }
    if !raw {
        if !system.is_empty() {
            builder.messages.push(json!({"role": "system", "content": system}));
        }
        builder.messages.push(json!({"role": "user", "content": content}));
        let (messages, media) = builder.into_parts();
        return shared.turn(Conversation::new("prompt", messages, media, None));
    }
    for (name, given) in [("system", !system.is_empty()), ("images", shows), ("think", shared.think.is_some())] {
        if given {
            let message = format!("{name} is not supported with raw: the prompt is taken as it is");
            return Err(ApiError::unsupported(name, message));
        }
    }
    let ids = state.encode("prompt", &[&prompt], true)?;
    shared.text(ids, state)
}

/// Takes `format`: `json`, or a schema.
fn format(fields: &mut Fields<'_>) -> ApiResult<Option<OutputFormat>> {
    let unknown = || ApiError::unsupported("format", "format must be `json` or a JSON schema");
    let form = |source| Some(OutputFormat { param: "format", source });
    if fields.is_text("format") {
        return match fields.take::<String>("format")?.as_deref() {
            None | Some("") => Ok(None),
            Some("json") => Ok(form(Source::JsonObject)),
            Some(_) => Err(unknown()),
        };
    }
    match schema(fields, "format")? {
        Some(schema) if !schema.starts_with('{') => Err(unknown()),
        schema => Ok(schema.and_then(|schema| form(Source::JsonSchema(schema)))),
    }
}

/// Takes `keep_alive`, the time for which the model stays loaded; the server's settings apply instead. Returns true for an immediate
/// unload.
pub(crate) fn keep_alive(fields: &mut Fields<'_>) -> ApiResult<bool> {
    let asked = fields.json("keep_alive")?;
    let text = match &asked {
        None => return Ok(false),
        Some(Value::Number(seconds)) => seconds.to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(_) => {
            return Err(ApiError::invalid("keep_alive", "keep_alive must be seconds, or a duration such as `5m`"));
        }
    };
    Ok(text.trim_end_matches(char::is_alphabetic).parse::<f64>().is_ok_and(|time| time == 0.0))
}
