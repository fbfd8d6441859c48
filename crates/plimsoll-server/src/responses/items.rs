//! Items, the pieces of a conversation in the Responses API: taken apart, written down for the store, and made into messages.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use plimsoll_media::Modality;

use super::object::Namespaced;
use super::references::{Stored, missing, refers};
use crate::conversation::content::{add_medium, add_text, thoughts_alone};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Arguments, Fields, MAX_NODES, Text, check_nodes, wrong};
use crate::media::MediaParser;
use crate::state::model::ModelState;

const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];

/// One item.
#[derive(Debug)]
pub(crate) struct Item {
    id: String,
    what: What,
}

#[derive(Debug)]
enum What {
    Message { role: String, said: Vec<Said> },
    Thoughts { said: Vec<Said> },
    Call { call_id: String, namespace: Option<String>, name: String, arguments: String },
    Result { call_id: String, said: Vec<Said> },
}

/// A part of what an item says.
#[derive(Debug)]
enum Said {
    Text(String),
    /// A picture: what stands for it in the template's message, and what was sent, if it is to be kept.
    Image {
        medium: Value,
        url: String,
        detail: Option<String>,
    },
    /// A sound, in the same way.
    Audio {
        medium: Value,
        data: String,
        format: String,
    },
}

/// Finds the pictures in items.
pub(crate) struct Shown<'a> {
    pub gallery: MediaParser<'a>,
    /// The items are to be written down as they came.
    pub kept: bool,
}

/// Takes `input`: a text or a list of items.
pub(crate) fn input(
    state: &ModelState,
    raw: &RawValue,
    stored: &Stored,
    shown: &mut Shown<'_>,
) -> ApiResult<Vec<Item>> {
    if raw.get().starts_with('"') {
        let text: String = serde_json::from_str(raw.get()).map_err(|e| wrong("input", &e))?;
        let what = What::Message { role: "user".into(), said: vec![Said::Text(text)] };
        return Ok(vec![Item { id: state.server.ids.named("msg"), what }]);
    }
    check_nodes("input", raw.get(), MAX_NODES)?;
    list(state, "input", raw.get(), stored, shown)
}

/// Takes a list of items, also one that was stored, and those that it refers to.
pub(crate) fn list(
    state: &ModelState,
    param: &str,
    text: &str,
    stored: &Stored,
    shown: &mut Shown<'_>,
) -> ApiResult<Vec<Item>> {
    let raw: Vec<&RawValue> = serde_json::from_str(text).map_err(|e| wrong(param, &e))?;
    if raw.is_empty() {
        return Err(ApiError::invalid(param, format!("{param} is empty: at least one item is needed")));
    }
    let item = |(i, raw): (usize, &&RawValue)| item(state, format!("{param}[{i}]"), raw, Some(stored), shown);
    raw.iter().enumerate().map(item).collect()
}

/// Takes an item, or the one that it refers to; what is stored refers to none.
fn item(
    state: &ModelState,
    path: String,
    raw: &RawValue,
    stored: Option<&Stored>,
    shown: &mut Shown<'_>,
) -> ApiResult<Item> {
    let mut fields = Fields::of(path.clone(), raw)?;
    let kind = fields.take::<String>("type")?;
    let id = fields.take::<String>("id")?;
    if let Some(stored) = stored.filter(|_| refers(kind.as_deref(), id.is_some(), fields.has("role"))) {
        let param = fields.param("id");
        fields.finish()?;
        let id = id.ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
        let raw = stored.get(&id).ok_or_else(|| missing(state, param, &id))?;
        return item(state, path, raw, None, shown);
    }
    fields.only("status", &["\"completed\"", "\"incomplete\"", "\"in_progress\""])?;
    let (prefix, what) = match kind.as_deref() {
        None | Some("message") => ("msg", message(&mut fields, shown)?),
        Some("reasoning") => {
            let summary = thoughts(&mut fields, "summary", shown)?;
            fields.never(&["encrypted_content"], "reasoning is sent as text here")?;
            let said = thoughts(&mut fields, "content", shown)?;
            // What is shown of thoughts that a client never had whole is what there is of them.
            let said = if said.is_empty() { summary } else { said };
            ("rs", What::Thoughts { said })
        }
        Some("function_call") => {
            let (call_id, name) = (fields.required("call_id")?, fields.required("name")?);
            let (namespace, arguments) = (fields.take("namespace")?, fields.required("arguments")?);
            direct(&mut fields)?;
            ("fc", What::Call { call_id, namespace, name, arguments })
        }
        Some("function_call_output") => {
            let call_id = fields.required("call_id")?;
            let at = fields.param("output");
            let said = parts(&mut fields, "output", shown)?;
            let said = said.ok_or_else(|| ApiError::invalid(&at, format!("{at} is missing")))?;
            // A result belongs to its call, which has the names.
            fields.take::<String>("namespace")?;
            fields.take::<String>("name")?;
            direct(&mut fields)?;
            ("fco", What::Result { call_id, said })
        }
        Some(other) => {
            let at = fields.param("type");
            let known = "message, reasoning, function_call, function_call_output and item_reference";
            let message = format!("{at} is `{}`; this server knows {known}", quote(other));
            return Err(ApiError::unsupported(at, message));
        }
    };
    fields.finish()?;
    Ok(Item { id: id.unwrap_or_else(|| state.server.ids.named(prefix)), what })
}

fn message(fields: &mut Fields<'_>, shown: &mut Shown<'_>) -> ApiResult<What> {
    let at = fields.param("role");
    let role: String = fields.required("role")?;
    if !ROLES.contains(&role.as_str()) {
        let message = format!("{at} is `{}`; known roles are {}", quote(&role), ROLES.join(", "));
        return Err(ApiError::invalid(at, message));
    }
    let at = fields.param("content");
    let said = parts(fields, "content", shown)?;
    let said = said.ok_or_else(|| ApiError::invalid(&at, format!("{at} is missing")))?;
    fields.never(&["phase"], "models here know no phases")?;
    Ok(What::Message { role, said })
}

/// Parts that are texts alone.
fn thoughts(fields: &mut Fields<'_>, name: &str, shown: &mut Shown<'_>) -> ApiResult<Vec<Said>> {
    let at = fields.param(name);
    let said = parts(fields, name, shown)?.unwrap_or_default();
    match said.iter().all(|part| matches!(part, Said::Text(_))) {
        true => Ok(said),
        false => Err(ApiError::unsupported(&at, format!("{at}: reasoning is text"))),
    }
}

fn direct(fields: &mut Fields<'_>) -> ApiResult<()> {
    fields.only("async", &["false"])?;
    let path = fields.param("caller");
    let Some(raw) = fields.raw("caller") else { return Ok(()) };
    let mut caller = Fields::of(path, raw)?;
    caller.only("type", &["\"direct\""])?;
    caller.finish()
}

/// A text, or parts that are texts, pictures and sounds.
fn parts(fields: &mut Fields<'_>, name: &str, shown: &mut Shown<'_>) -> ApiResult<Option<Vec<Said>>> {
    let path = fields.param(name);
    let Some(raw) = fields.raw(name) else { return Ok(None) };
    if !raw.get().starts_with('[') {
        return serde_json::from_str(raw.get()).map(|text| Some(vec![Said::Text(text)])).map_err(|e| wrong(&path, &e));
    }
    let parts: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| wrong(&path, &e))?;
    let part = |(i, raw): (usize, &&RawValue)| part(Fields::of(format!("{path}[{i}]"), raw)?, shown);
    parts.iter().enumerate().map(part).collect::<ApiResult<_>>().map(Some)
}

fn part(mut fields: Fields<'_>, shown: &mut Shown<'_>) -> ApiResult<Said> {
    let at = fields.param("type");
    let kind: String = fields.required("type")?;
    let text = match kind.as_str() {
        "input_text" | "reasoning_text" | "summary_text" => fields.required("text")?,
        "output_text" => {
            // What was reported with an answer, where it comes from, and what OpenAI's client has read in it say nothing when they come back.
            for name in ["annotations", "logprobs", "parsed"] {
                fields.raw(name);
            }
            fields.required("text")?
        }
        "refusal" => fields.required("refusal")?,
        "input_image" => {
            shown.gallery.takes(&at, &kind, Modality::Image)?;
            fields.never(&["file_id"], "this server keeps no files; send image_url")?;
            let param = fields.param("image_url");
            let (url, detail) = (fields.required::<Text<'_>>("image_url")?, fields.take::<String>("detail")?);
            let medium = shown.gallery.image(param, &url.0, detail.as_deref())?;
            let url = if shown.kept { url.0.into_owned() } else { String::new() };
            fields.finish()?;
            return Ok(Said::Image { medium, url, detail });
        }
        "input_audio" => {
            shown.gallery.takes(&at, &kind, Modality::Audio)?;
            let param = fields.param("input_audio");
            let raw =
                fields.raw("input_audio").ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
            fields.finish()?;
            let mut inner = Fields::of(param.clone(), raw)?;
            let (data, format) = (inner.required::<Text<'_>>("data")?, inner.required::<String>("format")?);
            inner.finish()?;
            let medium = shown.gallery.sound(param, &data.0, &format)?;
            let data = if shown.kept { data.0.into_owned() } else { String::new() };
            return Ok(Said::Audio { medium, data, format });
        }
        other => {
            let message =
                format!("{at} is `{}`; this server knows input_text, input_image and input_audio", quote(other));
            return Err(ApiError::unsupported(at, message));
        }
    };
    fields.finish()?;
    Ok(Said::Text(text))
}

/// Items as chat's messages. What an answer was in items (thoughts, text, calls) is one message again.
pub(crate) fn messages(param: &str, instructions: Option<&str>, items: &[Item]) -> ApiResult<Vec<Value>> {
    let mut told = Told::default();
    if let Some(text) = instructions {
        told.messages.push(json!({"role": "system", "content": text}));
    }
    for item in items {
        match &item.what {
            What::Message { role, said } => told.message(role, content(said)),
            What::Thoughts { said } => told.thoughts(content(said)),
            What::Call { call_id, namespace, name, arguments } => {
                let full = namespace.as_ref().map(|namespace| Namespaced::new(namespace, name));
                told.call(param, call_id, full.as_ref().map_or(name, |of| of.full()), arguments)?;
            }
            What::Result { call_id, said } => told.result(param, call_id, content(said))?,
        }
    }
    told.messages.iter_mut().for_each(thoughts_alone);
    Ok(told.messages)
}

/// What was said, as templates know it.
fn content(said: &[Said]) -> Value {
    let mut content = Value::Null;
    for part in said {
        match part {
            Said::Text(text) => add_text(&mut content, text),
            Said::Image { medium, .. } | Said::Audio { medium, .. } => add_medium(&mut content, medium.clone()),
        }
    }
    if content.is_null() { "".into() } else { content }
}

#[derive(Default)]
struct Told {
    messages: Vec<Value>,
    calls: Vec<String>,
    arguments: Arguments,
}

impl Told {
    /// The last message, if it is an assistant's that `more` can still be added to.
    fn open(&mut self, more: fn(&Map<String, Value>) -> bool) -> Option<&mut Map<String, Value>> {
        let last = self.messages.last_mut().and_then(Value::as_object_mut)?;
        (last["role"] == "assistant" && more(last)).then_some(last)
    }

    fn message(&mut self, role: &str, content: Value) {
        // Thoughts that stand alone are those of the text after them.
        let open = self.open(|last| last["content"].is_null() && !last.contains_key("tool_calls"));
        match open.filter(|_| role == "assistant") {
            Some(message) => drop(message.insert("content".into(), content)),
            None => self.messages.push(json!({"role": role, "content": content})),
        }
    }

    fn thoughts(&mut self, content: Value) {
        self.messages.push(json!({"role": "assistant", "content": null, "reasoning_content": content}));
    }

    fn call(&mut self, param: &str, id: &str, name: &str, arguments: &str) -> ApiResult<()> {
        let mut call = json!({"id": id, "type": "function", "function": {"name": name}});
        call["function"]["arguments"] = self.arguments.parse(param, arguments)?;
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

    fn result(&mut self, param: &str, id: &str, content: Value) -> ApiResult<()> {
        if !self.calls.iter().any(|known| known == id) {
            let message = format!("{param}: no function_call before its output has the call_id `{}`", quote(id));
            return Err(ApiError::invalid(param, message));
        }
        self.messages.push(json!({"role": "tool", "content": content, "tool_call_id": id}));
        Ok(())
    }
}

impl Item {
    /// Heap bytes of what it says.
    pub fn bytes(&self) -> u64 {
        let said = |said: &[Said]| -> u64 {
            let own = |part: &Said| match part {
                Said::Text(text) => text.capacity(),
                Said::Image { url, .. } => url.capacity(),
                Said::Audio { data, format, .. } => data.capacity() + format.capacity(),
            };
            said.iter().map(|part| (own(part) + size_of::<Said>()) as u64).sum()
        };
        size_of::<Self>() as u64
            + match &self.what {
                What::Message { said: parts, .. }
                | What::Thoughts { said: parts }
                | What::Result { said: parts, .. } => said(parts),
                What::Call { call_id, namespace, name, arguments } => {
                    let names = name.len() + namespace.as_ref().map_or(0, String::len);
                    (call_id.len() + names + arguments.capacity()) as u64
                }
            }
    }

    /// The item as the API shows it.
    pub fn shown(&self) -> Value {
        let (id, status) = (&self.id, "completed");
        let parts = |kind: &str, said: &[Said]| -> Vec<Value> {
            let part = |part: &Said| match part {
                Said::Text(text) => json!({"type": kind, "text": text}),
                Said::Image { url, detail, .. } => {
                    json!({"type": "input_image", "image_url": url, "detail": detail.as_deref().unwrap_or("auto")})
                }
                Said::Audio { data, format, .. } => {
                    json!({"type": "input_audio", "input_audio": {"data": data, "format": format}})
                }
            };
            said.iter().map(part).collect()
        };
        match &self.what {
            What::Message { role, said } => {
                let own = role == "assistant";
                let mut content = parts(if own { "output_text" } else { "input_text" }, said);
                if own {
                    content.iter_mut().for_each(|part| part["annotations"] = json!([]));
                }
                json!({"id": id, "type": "message", "role": role, "status": status, "content": content})
            }
            What::Thoughts { said } => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": parts("reasoning_text", said)})
            }
            What::Call { call_id, namespace, name, arguments } => {
                let mut call = json!({"id": id, "type": "function_call", "call_id": call_id, "name": name,
                                      "arguments": arguments, "status": status});
                if let Some(namespace) = namespace {
                    call["namespace"] = namespace.as_str().into();
                }
                call
            }
            What::Result { call_id, said } => {
                let output = match content(said) {
                    Value::Array(_) => Value::Array(parts("input_text", said)),
                    text => text,
                };
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
