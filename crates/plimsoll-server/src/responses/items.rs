//! Items, the pieces of a conversation in the Responses API: taken apart, written down for the store, and made into messages.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::error::{ApiError, ApiResult, quote};
use crate::fields::{Fields, MAX_NODES, check_nodes, wrong};

const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];

/// One item.
#[derive(Debug)]
pub(crate) struct Item {
    id: String,
    what: What,
}

#[derive(Debug)]
enum What {
    Message { role: String, texts: Vec<String> },
    Thoughts { texts: Vec<String> },
    Call { call_id: String, name: String, arguments: String },
    Result { call_id: String, texts: Vec<String> },
}

/// Takes `input`: a text or a list of items.
pub(crate) fn input(app: &App, raw: &RawValue) -> ApiResult<Vec<Item>> {
    if raw.get().starts_with('"') {
        let text: String = serde_json::from_str(raw.get()).map_err(|e| wrong("input", &e))?;
        let what = What::Message { role: "user".into(), texts: vec![text] };
        return Ok(vec![Item { id: app.ids.named("msg"), what }]);
    }
    check_nodes("input", raw, MAX_NODES)?;
    list(app, "input", raw.get())
}

/// Takes a list of items, also one that was stored.
pub(crate) fn list(app: &App, param: &str, text: &str) -> ApiResult<Vec<Item>> {
    let raw: Vec<&RawValue> = serde_json::from_str(text).map_err(|e| wrong(param, &e))?;
    if raw.is_empty() {
        return Err(ApiError::invalid(param, format!("{param} is empty: at least one item is needed")));
    }
    let item = |(i, raw): (usize, &&RawValue)| item(app, Fields::of(format!("{param}[{i}]"), raw)?);
    raw.iter().enumerate().map(item).collect()
}

fn item(app: &App, mut fields: Fields<'_>) -> ApiResult<Item> {
    let kind = fields.take::<String>("type")?;
    let id = fields.take::<String>("id")?;
    fields.only("status", &["\"completed\"", "\"incomplete\"", "\"in_progress\""])?;
    let (prefix, what) = match kind.as_deref() {
        None | Some("message") => ("msg", message(&mut fields)?),
        Some("reasoning") => {
            fields.only("summary", &["[]"])?;
            fields.never(&["encrypted_content"], "thoughts come as text here")?;
            ("rs", What::Thoughts { texts: texts(&mut fields, "content")?.unwrap_or_default() })
        }
        Some("function_call") => {
            let (call_id, name) = (fields.required("call_id")?, fields.required("name")?);
            let at = fields.param("arguments");
            let arguments: String = fields.required("arguments")?;
            if !arguments.trim().is_empty() {
                serde_json::from_str::<serde::de::IgnoredAny>(&arguments)
                    .map_err(|e| ApiError::invalid(&at, format!("{at} is not JSON: {e}")))?;
            }
            direct(&mut fields)?;
            ("fc", What::Call { call_id, name, arguments })
        }
        Some("function_call_output") => {
            let call_id = fields.required("call_id")?;
            let at = fields.param("output");
            let texts = texts(&mut fields, "output")?;
            let texts = texts.ok_or_else(|| ApiError::invalid(&at, format!("{at} is missing")))?;
            // A result belongs to its call, which has the name.
            fields.take::<String>("name")?;
            direct(&mut fields)?;
            ("fco", What::Result { call_id, texts })
        }
        Some(other) => {
            let at = fields.param("type");
            let known = "message, reasoning, function_call and function_call_output";
            let message = format!("{at} is `{}`; this server knows {known}", quote(other));
            return Err(ApiError::unsupported(at, message));
        }
    };
    fields.finish()?;
    Ok(Item { id: id.unwrap_or_else(|| app.ids.named(prefix)), what })
}

fn message(fields: &mut Fields<'_>) -> ApiResult<What> {
    let at = fields.param("role");
    let role: String = fields.required("role")?;
    if !ROLES.contains(&role.as_str()) {
        let message = format!("{at} is `{}`; known roles are {}", quote(&role), ROLES.join(", "));
        return Err(ApiError::invalid(at, message));
    }
    let at = fields.param("content");
    let texts = texts(fields, "content")?;
    let texts = texts.ok_or_else(|| ApiError::invalid(&at, format!("{at} is missing")))?;
    fields.never(&["phase"], "models here know no phases")?;
    Ok(What::Message { role, texts })
}

fn direct(fields: &mut Fields<'_>) -> ApiResult<()> {
    fields.never(&["namespace"], "tools have no namespaces here")?;
    fields.only("async", &["false"])?;
    let path = fields.param("caller");
    let Some(raw) = fields.raw("caller") else { return Ok(()) };
    let mut caller = Fields::of(path, raw)?;
    caller.only("type", &["\"direct\""])?;
    caller.finish()
}

/// A text, or parts that are texts.
fn texts(fields: &mut Fields<'_>, name: &str) -> ApiResult<Option<Vec<String>>> {
    let path = fields.param(name);
    let Some(raw) = fields.raw(name) else { return Ok(None) };
    if !raw.get().starts_with('[') {
        return serde_json::from_str(raw.get()).map(|text| Some(vec![text])).map_err(|e| wrong(&path, &e));
    }
    let parts: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| wrong(&path, &e))?;
    let part = |(i, raw): (usize, &&RawValue)| part(Fields::of(format!("{path}[{i}]"), raw)?);
    parts.iter().enumerate().map(part).collect::<ApiResult<_>>().map(Some)
}

fn part(mut fields: Fields<'_>) -> ApiResult<String> {
    let at = fields.param("type");
    let kind: String = fields.required("type")?;
    let text = match kind.as_str() {
        "input_text" | "reasoning_text" => fields.required("text")?,
        "output_text" => {
            fields.only("annotations", &["[]"])?;
            // What was reported with an answer says nothing when it comes back.
            fields.json("logprobs")?;
            fields.required("text")?
        }
        "refusal" => fields.required("refusal")?,
        "input_image" => {
            return Err(ApiError::unsupported(&at, format!("{at} is `input_image`: the served model takes no images")));
        }
        other => {
            let message = format!("{at} is `{}`; the served model takes text only", quote(other));
            return Err(ApiError::unsupported(at, message));
        }
    };
    fields.finish()?;
    Ok(text)
}

/// Items as chat's messages. What an answer was in items (thoughts, text, calls) is one message again.
pub(crate) fn messages(param: &str, instructions: Option<&str>, items: &[Item]) -> ApiResult<Vec<Value>> {
    let mut told = Told::default();
    if let Some(text) = instructions {
        told.messages.push(json!({"role": "system", "content": text}));
    }
    for item in items {
        match &item.what {
            What::Message { role, texts } => told.message(role, &texts.join("\n")),
            What::Thoughts { texts } => told.thoughts(&texts.join("\n")),
            What::Call { call_id, name, arguments } => told.call(param, call_id, name, arguments)?,
            What::Result { call_id, texts } => told.result(param, call_id, &texts.join("\n"))?,
        }
    }
    Ok(told.messages)
}

#[derive(Default)]
struct Told {
    messages: Vec<Value>,
    calls: Vec<String>,
}

impl Told {
    /// The last message, if it is an assistant's that `more` can still be added to.
    fn open(&mut self, more: fn(&Map<String, Value>) -> bool) -> Option<&mut Map<String, Value>> {
        let last = self.messages.last_mut().and_then(Value::as_object_mut)?;
        (last["role"] == "assistant" && more(last)).then_some(last)
    }

    fn message(&mut self, role: &str, text: &str) {
        // Thoughts that stand alone are those of the text after them.
        let open = self.open(|last| last["content"].is_null() && !last.contains_key("tool_calls"));
        match open.filter(|_| role == "assistant") {
            Some(message) => drop(message.insert("content".into(), text.into())),
            None => self.messages.push(json!({"role": role, "content": text})),
        }
    }

    fn thoughts(&mut self, text: &str) {
        self.messages.push(json!({"role": "assistant", "content": null, "reasoning_content": text}));
    }

    fn call(&mut self, param: &str, id: &str, name: &str, arguments: &str) -> ApiResult<()> {
        let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
        let arguments: Value = serde_json::from_str(arguments).map_err(|e| wrong(param, &e))?;
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        self.calls.push(id.into());
        match self.open(|_| true) {
            Some(message) => {
                if let Value::Array(calls) = message.entry("tool_calls").or_insert_with(|| json!([])) {
                    calls.push(call);
                }
            }
            None => self.messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
        }
        Ok(())
    }

    fn result(&mut self, param: &str, id: &str, text: &str) -> ApiResult<()> {
        if !self.calls.iter().any(|known| known == id) {
            let message = format!("{param}: no function_call before its output has the call_id `{}`", quote(id));
            return Err(ApiError::invalid(param, message));
        }
        self.messages.push(json!({"role": "tool", "content": text, "tool_call_id": id}));
        Ok(())
    }
}

impl Item {
    /// The item as the API shows it.
    pub fn shown(&self) -> Value {
        let (id, status) = (&self.id, "completed");
        let parts = |kind: &str, texts: &[String]| -> Vec<Value> {
            texts.iter().map(|text| json!({"type": kind, "text": text})).collect()
        };
        match &self.what {
            What::Message { role, texts } => {
                let own = role == "assistant";
                let mut content = parts(if own { "output_text" } else { "input_text" }, texts);
                if own {
                    content.iter_mut().for_each(|part| part["annotations"] = json!([]));
                }
                json!({"id": id, "type": "message", "role": role, "status": status, "content": content})
            }
            What::Thoughts { texts } => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": parts("reasoning_text", texts)})
            }
            What::Call { call_id, name, arguments } => {
                json!({"id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments,
                       "status": status})
            }
            What::Result { call_id, texts } => {
                let output = texts.join("\n");
                json!({"id": id, "type": "function_call_output", "call_id": call_id, "output": output, "status": status})
            }
        }
    }
}

/// Items as the text between a list's brackets.
pub(crate) fn written(items: &[Item]) -> String {
    let all: Vec<String> = items.iter().map(|item| item.shown().to_string()).collect();
    all.join(",")
}
