//! Parses chat's messages and template options, and bounds their size.

use plimsoll_text::Ending;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::tools;
use crate::conversation::content::{add_medium, add_text};
use crate::conversation::custom;
use crate::conversation::prompt::Conversation;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Arguments, Fields, MAX_NODES, cache_control, check_nodes};
use crate::media::MediaParser;
use crate::state::model::ModelState;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Takes the fields of a body that make up a conversation; shared with `/tokenize`.
pub(crate) fn conversation(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Conversation> {
    let raw = fields.raw("messages").ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    let mut media = MediaParser::new(state);
    media.processor(fields)?;
    let messages = messages(raw, &mut media)?;
    let documents = std::mem::take(&mut media.files.documents);
    let tools = tools::take(fields)?;
    let opens = fields.take::<bool>("add_generation_prompt")?;
    let continues = fields.take("continue_final_message")?.unwrap_or(false);
    if continues && opens == Some(true) {
        let message = "continue_final_message and add_generation_prompt: a prompt has one end";
        return Err(ApiError::invalid("continue_final_message", message));
    }
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
    let (thinking, effort) = thinking(fields)?;
    let given = [("enable_thinking", thinking.map(Value::from)), ("reasoning_effort", effort.clone().map(Value::from))];
    for (name, value) in given {
        let Some(value) = value else { continue };
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
    let mut conversation = Conversation::new("messages", messages, media.media, tools);
    conversation.documents = documents;
    if continues {
        conversation.continue_last()?;
    } else if opens == Some(false) {
        conversation.ending = Ending::Closed;
    }
    conversation.extra = extra;
    if let Some(effort) = effort {
        conversation.set_effort("reasoning_effort", &effort)?;
    }
    Ok(conversation)
}

/// Reads whether the model reasons and with which effort, from this server's fields, Ollama's `think` and OpenRouter's `reasoning`.
fn thinking(fields: &mut Fields<'_>) -> ApiResult<(Option<bool>, Option<String>)> {
    let mut on = fields.take::<bool>("enable_thinking")?;
    let mut effort = fields.take::<String>("reasoning_effort")?;
    let mut given = |param: &str, switch: Option<bool>, level: Option<String>| {
        let contradicts = |name| Err(ApiError::invalid(param, format!("{param} and {name} contradict each other")));
        match (switch, on) {
            (Some(switch), Some(on)) if switch != on => return contradicts("enable_thinking"),
            _ => on = on.or(switch),
        }
        match (&level, &effort) {
            (Some(level), Some(effort)) if level != effort => return contradicts("reasoning_effort"),
            _ => effort = effort.take().or(level),
        }
        Ok(())
    };
    match fields.raw("think").map(|raw| serde_json::from_str::<Value>(raw.get())) {
        None => {}
        Some(Ok(Value::Bool(switch))) => given("think", Some(switch), None)?,
        Some(Ok(Value::String(level))) => given("think", None, Some(level))?,
        Some(_) => return Err(ApiError::invalid("think", "think must be true, false or an effort")),
    }
    if let Some(raw) = fields.raw("reasoning") {
        let mut reasoning = Fields::of("reasoning".into(), raw)?;
        let (switch, level) = (reasoning.take("enabled")?, reasoning.take("effort")?);
        reasoning.finish()?;
        given("reasoning", switch, level)?;
    }
    Ok((on, effort))
}

fn messages(raw: &RawValue, media: &mut MediaParser<'_>) -> ApiResult<Vec<Value>> {
    check_nodes("messages", raw.get(), MAX_NODES)?;
    let list: Vec<&RawValue> =
        serde_json::from_str(raw.get()).map_err(|e| crate::http::fields::wrong("messages", &e))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty: at least one message is needed"));
    }
    let mut arguments = Arguments::default();
    let message =
        |(i, raw): (usize, &&RawValue)| message(Fields::of(format!("messages[{i}]"), raw)?, media, &mut arguments);
    list.iter().enumerate().map(message).collect()
}

fn message(mut fields: Fields<'_>, media: &mut MediaParser<'_>, arguments: &mut Arguments) -> ApiResult<Value> {
    let mut message = Map::new();
    let param = fields.param("role");
    let role =
        fields.take::<String>("role")?.ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
    if !ROLES.contains(&role.as_str()) {
        let text = format!("{param} is `{}`; known roles are {}", quote(&role), ROLES.join(", "));
        return Err(ApiError::invalid(param, text));
    }
    let calls = tool_calls(&mut fields, arguments)?;
    let content = content(&mut fields, media)?;
    // An answer may have been truncated before its first word.
    let nothing = (role == "assistant").then(|| if calls.is_some() { Value::Null } else { "".into() });
    let Some(content) = content.or(nothing) else {
        let param = fields.param("content");
        return Err(ApiError::invalid(&param, format!("{param} is missing")));
    };
    message.insert("role".into(), role.into());
    message.insert("content".into(), content);
    if let Some(calls) = calls {
        message.insert("tool_calls".into(), calls);
    }
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(text) = fields.take::<String>(name)? {
            message.insert(name.into(), text.into());
        }
    }
    // The same text under the name of newer servers; templates use the older name.
    if let Some(text) = fields.take::<String>("reasoning")? {
        message.entry("reasoning_content").or_insert_with(|| text.into());
    }
    cache_control(&mut fields)?;
    // OpenAI's client sends back parsed values with an answer's text. They and the sources of a text are not part of it.
    fields.hints(&["parsed", "annotations", "provider_specific_fields", "reasoning_details"]);
    // Fields that servers put into answers and clients send back unchanged: they have no effect when empty.
    for name in ["refusal", "audio", "function_call"] {
        fields.only(name, &["[]", "\"\""])?;
    }
    fields.finish()?;
    Ok(Value::Object(message))
}

/// Takes the content. Text parts become one text, joined by line breaks as in vLLM. With media, the content stays a list of parts.
fn content(fields: &mut Fields<'_>, media: &mut MediaParser<'_>) -> ApiResult<Option<Value>> {
    let path = fields.param("content");
    let Some(raw) = fields.raw("content") else {
        return Ok(None);
    };
    if !raw.get().starts_with('[') {
        let text: String = serde_json::from_str(raw.get()).map_err(|e| crate::http::fields::wrong(&path, &e))?;
        return Ok(Some(text.into()));
    }
    let parts: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| crate::http::fields::wrong(&path, &e))?;
    let mut content = Value::from("");
    for (i, raw) in parts.iter().enumerate() {
        let mut part = Fields::of(format!("{path}[{i}]"), raw)?;
        let kind = part.take::<String>("type")?.unwrap_or_else(|| "text".into());
        if i == 0 {
            content = Value::Null;
        }
        if kind == "text" {
            add_text(&mut content, &part.required::<String>("text")?);
        } else if kind == "file" {
            let (param, raw) = part.needed("file")?;
            let mut file = Fields::of(param, raw)?;
            let (text, _) = media.files.take(&mut file, false)?;
            file.finish()?;
            add_text(&mut content, &text);
        } else {
            media.part(&kind, &mut part)?.into_iter().for_each(|medium| add_medium(&mut content, medium));
        }
        cache_control(&mut part)?;
        part.finish()?;
    }
    Ok(Some(content))
}

/// Takes tool calls of an earlier answer, with their arguments as objects, as templates expect them.
pub(crate) fn tool_calls(fields: &mut Fields<'_>, parsed: &mut Arguments) -> ApiResult<Option<Value>> {
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
    for (i, call) in list.iter_mut().enumerate() {
        tool_call(&format!("{param}[{i}]"), call, parsed)?;
    }
    Ok(Some(calls))
}

/// Checks the fields of a call on which templates rely.
fn tool_call(param: &str, call: &mut Value, parsed: &mut Arguments) -> ApiResult<()> {
    let wrong = |name: &str, what: &str| {
        let param = format!("{param}{name}");
        Err(ApiError::invalid(&param, format!("{param} {what}")))
    };
    if call["type"] == "custom" {
        // Templates only support functions.
        let Some(input) = call["custom"]["input"].as_str() else {
            return wrong(".custom.input", "must be a text");
        };
        let (arguments, name) = (custom::arguments(input), call["custom"]["name"].clone());
        if let Some(call) = call.as_object_mut() {
            call.remove("custom");
        }
        call["type"] = "function".into();
        call["function"] = json!({"name": name, "arguments": arguments});
        if call["function"]["name"].as_str().is_none_or(str::is_empty) {
            return wrong(".custom.name", "must be a tool's name");
        }
    }
    if call["function"]["name"].as_str().is_none_or(str::is_empty) {
        return wrong(".function.name", "must be a function's name");
    }
    if !matches!(call["id"], Value::Null | Value::String(_)) {
        return wrong(".id", "must be a string");
    }
    if !(call["type"].is_null() || call["type"] == "function") {
        return wrong(".type", "must be `function` or `custom`");
    }
    if let Some(call) = call.as_object_mut() {
        // A field of streams that templates do not use.
        call.remove("index");
    }
    let arguments = &mut call["function"]["arguments"];
    *arguments = match arguments.take() {
        Value::String(text) => parsed.parse(param, &text)?,
        Value::Null => json!({}),
        object @ Value::Object(_) => object,
        _ => return wrong(".function.arguments", "must be a text with a JSON object in it, or the object"),
    };
    Ok(())
}
