//! Messages, tools and template options as a chat template expects them: checked, bounded, text only.

use plimsoll_memory::faults::{self, Site};
use plimsoll_text::TextError;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::{ApiError, ApiResult, quote};
use crate::fields::{Fields, check_nodes};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The fields of a body that make up a conversation; shared with `/tokenize`.
pub(crate) struct Conversation {
    messages: Value,
    tools: Option<Value>,
    add_generation_prompt: bool,
    extra: Map<String, Value>,
}

impl Conversation {
    /// Takes the conversation's fields.
    pub fn take(fields: &mut Fields<'_>) -> ApiResult<Self> {
        let raw = fields.raw("messages").ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
        let messages = messages(raw)?;
        let tools = tools(fields)?;
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
        if let Some(documents) = fields.json("documents")? {
            extra.insert("documents".into(), documents);
        }
        fields.never(&["chat_template"], "the server's own template is used")?;
        Ok(Self { messages, tools, add_generation_prompt, extra })
    }

    /// Renders and tokenizes. Runs on a text worker.
    pub fn tokens(&self, app: &App, add_special: bool) -> ApiResult<Vec<u32>> {
        let template = app.served.template.as_ref().ok_or_else(|| {
            ApiError::unsupported("messages", "the served model has no chat template; use /v1/completions")
        })?;
        faults::site(Site::Template);
        let rendered = template.render(&self.messages, self.tools.as_ref(), self.add_generation_prompt, &self.extra);
        // A template refuses conversations it cannot express (roles out of order, say): the client's to mend.
        let text = rendered.map_err(|error| match error {
            TextError::Panicked(_) => ApiError::internal(error.to_string()),
            _ => ApiError::invalid("messages", error.to_string()),
        })?;
        app.encode("messages", &text, add_special)
    }
}

fn messages(raw: &RawValue) -> ApiResult<Value> {
    check_nodes("messages", raw)?;
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

/// Tools for the template. The model's calls come back as text: nothing here parses them, so they cannot be forced.
fn tools(fields: &mut Fields<'_>) -> ApiResult<Option<Value>> {
    let tools = fields.json("tools")?;
    let choice = fields.take::<Value>("tool_choice")?;
    let parallel = fields.take::<bool>("parallel_tool_calls")?;
    fields.never(&["functions", "function_call"], "use tools")?;
    let tools = match tools {
        Some(Value::Array(list)) if list.is_empty() => None,
        Some(Value::Array(list)) => Some(list),
        Some(_) => return Err(ApiError::invalid("tools", "tools must be a list")),
        None => None,
    };
    for (i, tool) in tools.iter().flatten().enumerate() {
        let named = tool.pointer("/function/name").is_some_and(Value::is_string);
        if tool.get("type").and_then(Value::as_str) != Some("function") || !named {
            let param = format!("tools[{i}]");
            return Err(ApiError::invalid(&param, format!("{param} must be a function with a name")));
        }
    }
    match choice.as_ref().map(|choice| choice.as_str()) {
        // The tools are kept from the model: it then calls none.
        Some(Some("none")) => return Ok(None),
        None | Some(Some("auto")) => {}
        _ => {
            return Err(ApiError::unsupported("tool_choice", "tool_choice is supported only as auto or none"));
        }
    }
    if parallel == Some(false) && tools.is_some() {
        return Err(ApiError::unsupported("parallel_tool_calls", "parallel_tool_calls cannot be switched off here"));
    }
    Ok(tools.map(Value::Array))
}
