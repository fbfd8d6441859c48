//! Messages, tools and template options as a chat template expects them: checked, bounded, text only.

use plimsoll_memory::faults::{self, Site};
use plimsoll_text::TextError;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::adapt;
use super::tools::ToolUse;
use crate::app::App;
use crate::error::{ApiError, ApiResult, quote};
use crate::fields::{Fields, MAX_NODES, check_nodes};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The fields of a body that make up a conversation; shared with `/tokenize`.
pub(crate) struct Conversation {
    messages: Value,
    pub tools: Option<ToolUse>,
    add_generation_prompt: bool,
    extra: Map<String, Value>,
}

impl Conversation {
    /// Takes the conversation's fields.
    pub fn take(fields: &mut Fields<'_>) -> ApiResult<Self> {
        let raw = fields.raw("messages").ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
        let messages = messages(raw)?;
        let tools = ToolUse::take(fields)?;
        let add_generation_prompt = fields.take("add_generation_prompt")?.unwrap_or(true);
        fields.only("continue_final_message", &["false"])?;
        let mut extra = match fields.json("chat_template_kwargs")? {
            None => Map::new(),
            Some(Value::Object(extra)) => extra,
            Some(_) => {
                return Err(ApiError::invalid("chat_template_kwargs", "chat_template_kwargs must be an object"));
            }
        };
        for taken in ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"] {
            if extra.contains_key(taken) {
                let message = format!("chat_template_kwargs must not contain `{taken}`");
                return Err(ApiError::invalid("chat_template_kwargs", message));
            }
        }
        for name in ["enable_thinking", "reasoning_effort"] {
            let Some(value) = fields.json(name)? else { continue };
            let fits = if name == "enable_thinking" { value.is_boolean() } else { value.is_string() };
            if !fits {
                return Err(ApiError::invalid(name, format!("{name} has the wrong type")));
            }
            if extra.insert(name.into(), value.clone()).is_some_and(|other| other != value) {
                let message = format!("{name} and chat_template_kwargs.{name} contradict each other");
                return Err(ApiError::invalid(name, message));
            }
        }
        if let Some(documents) = fields.json("documents")? {
            if !documents.is_array() {
                return Err(ApiError::invalid("documents", "documents must be a list"));
            }
            extra.insert("documents".into(), documents);
        }
        fields.never(&["chat_template"], "the server's own template is used")?;
        Ok(Self { messages, tools, add_generation_prompt, extra })
    }

    /// Whether the client wants no thoughts.
    pub fn thinking_off(&self) -> bool {
        ["enable_thinking", "thinking"].iter().any(|name| self.extra.get(*name) == Some(&Value::Bool(false)))
    }

    /// Whether the prompt ends where the assistant begins.
    pub fn ends_open(&self) -> bool {
        self.add_generation_prompt
    }

    /// The prompt. Runs on a text worker.
    pub fn render(&self, app: &App) -> ApiResult<String> {
        let template = app.served.template.as_ref().ok_or_else(|| {
            ApiError::unsupported("messages", "the served model has no chat template; use /v1/completions")
        })?;
        if self.extra.contains_key("reasoning_effort") && !template.source().contains("reasoning_effort") {
            let message = "reasoning_effort has no effect: the served model's chat template does not know it";
            return Err(ApiError::unsupported("reasoning_effort", message));
        }
        faults::site(Site::Template);
        let tools = self.tools.as_ref().map(|tools| &tools.list);
        let rendered = if template.knows_tools() {
            template.render(&self.messages, tools, self.add_generation_prompt, &self.extra)
        } else {
            let messages = adapt::without_tools(&self.messages, tools);
            template.render(&messages, None, self.add_generation_prompt, &self.extra)
        };
        // A template refuses conversations it cannot express (roles out of order, say): the client's to mend.
        rendered.map_err(|error| match error {
            TextError::Panicked(_) => ApiError::internal(error.to_string()),
            _ => ApiError::invalid("messages", error.to_string()),
        })
    }

    /// The prompt as ids. Runs on a text worker.
    pub fn tokens(&self, app: &App, add_special: bool) -> ApiResult<Vec<u32>> {
        app.encode("messages", &self.render(app)?, add_special)
    }
}

fn messages(raw: &RawValue) -> ApiResult<Value> {
    check_nodes("messages", raw, MAX_NODES)?;
    let list: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| crate::fields::wrong("messages", &e))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty: at least one message is needed"));
    }
    let message = |(i, raw): (usize, &&RawValue)| message(Fields::of(format!("messages[{i}]"), raw)?);
    list.iter().enumerate().map(message).collect::<ApiResult<Vec<Value>>>().map(Value::Array)
}

fn message(mut fields: Fields<'_>) -> ApiResult<Value> {
    let mut message = Map::new();
    let param = fields.param("role");
    let role =
        fields.take::<String>("role")?.ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
    if !ROLES.contains(&role.as_str()) {
        let text = format!("{param} is `{}`; known roles are {}", quote(&role), ROLES.join(", "));
        return Err(ApiError::invalid(param, text));
    }
    let calls = tool_calls(&mut fields)?;
    let content = content(&mut fields)?;
    if content.is_none() && (role != "assistant" || calls.is_none()) {
        let param = fields.param("content");
        return Err(ApiError::invalid(&param, format!("{param} is missing")));
    }
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.map_or(Value::Null, Value::String));
    if let Some(calls) = calls {
        message.insert("tool_calls".into(), calls);
    }
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(text) = fields.take::<String>(name)? {
            message.insert(name.into(), text.into());
        }
    }
    // The same under the name that newer servers give it; templates know the older one.
    if let Some(text) = fields.take::<String>("reasoning")? {
        message.entry("reasoning_content").or_insert_with(|| text.into());
    }
    // What servers put into answers and clients send back unchanged: empty, these say nothing.
    for name in ["refusal", "annotations", "audio", "function_call"] {
        fields.only(name, &["[]", "\"\""])?;
    }
    fields.finish()?;
    Ok(Value::Object(message))
}

/// Content as one text; parts are joined by line breaks, as vLLM joins them.
fn content(fields: &mut Fields<'_>) -> ApiResult<Option<String>> {
    let path = fields.param("content");
    let Some(raw) = fields.raw("content") else {
        return Ok(None);
    };
    if !raw.get().starts_with('[') {
        return serde_json::from_str(raw.get()).map(Some).map_err(|e| crate::fields::wrong(&path, &e));
    }
    let parts: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| crate::fields::wrong(&path, &e))?;
    let mut text = String::new();
    for (i, raw) in parts.iter().enumerate() {
        let mut part = Fields::of(format!("{path}[{i}]"), raw)?;
        part.only("type", &["\"text\""])?;
        let param = part.param("text");
        let piece = part.take::<String>("text")?;
        let piece = piece.ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
        part.finish()?;
        if i > 0 {
            text.push('\n');
        }
        text.push_str(&piece);
    }
    Ok(Some(text))
}

/// Tool calls of an earlier answer, with their arguments as objects, which is what templates expect.
fn tool_calls(fields: &mut Fields<'_>) -> ApiResult<Option<Value>> {
    let param = fields.param("tool_calls");
    let Some(mut calls) = fields.json("tool_calls")? else {
        return Ok(None);
    };
    let Value::Array(list) = &mut calls else {
        return Err(ApiError::invalid(&param, format!("{param} must be a list")));
    };
    if list.is_empty() {
        return Ok(None);
    }
    for call in list {
        if let Some(call) = call.as_object_mut() {
            // What streams carry and templates do not know.
            call.remove("index");
        }
        let Some(arguments) = call.pointer_mut("/function/arguments") else {
            return Err(ApiError::invalid(&param, format!("{param}: a call has no function.arguments")));
        };
        if let Value::String(text) = arguments {
            let text = if text.trim().is_empty() { "{}" } else { text.as_str() };
            let parsed: Value = serde_json::from_str(text)
                .map_err(|e| ApiError::invalid(&param, format!("{param}: function.arguments is not JSON: {e}")))?;
            *arguments = parsed;
        }
    }
    Ok(Some(calls))
}
