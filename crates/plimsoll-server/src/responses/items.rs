//! Items, the pieces of a conversation in the Responses API: parsed, and written for the store.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use plimsoll_media::Modality;

use super::mcp_items::McpItem;
use super::references::{Stored, missing, refers};
use crate::conversation::content::{add_medium, add_text};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, MAX_NODES, Text, check_nodes, wrong};
use crate::media::MediaParser;
use crate::media::documents::SentFile;
use crate::state::model::ModelState;

const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];

/// One item.
#[derive(Debug)]
pub(crate) struct Item {
    pub(super) id: String,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Message { role: String, said: Vec<Said> },
    Reasoning { said: Vec<Said> },
    Call { call_id: String, namespace: Option<String>, name: String, arguments: String },
    Result { call_id: String, said: Vec<Said> },
    Custom { call_id: String, name: String, input: String },
    CustomResult { call_id: String, said: Vec<Said> },
    Mcp(McpItem),
}

/// A part of an item's content.
#[derive(Debug)]
pub(super) enum Said {
    Text(String),
    /// An image: the part of the template's message, and the URL and detail as sent, if they must be kept.
    Image {
        medium: Value,
        url: String,
        detail: Option<String>,
    },
    /// A document: its text in the template's message, and the file as sent.
    File {
        text: String,
        sent: SentFile,
    },
    /// An audio clip: the part of the template's message, and the data and format as sent.
    Audio {
        medium: Value,
        data: String,
        format: String,
    },
}

/// Collects the media and files in items while they are parsed.
pub(crate) struct Shown<'a> {
    pub media: MediaParser<'a>,
    /// Whether the items must be kept as they were sent, for the store.
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

/// Takes a list of items, which may be a stored one, and the items that it refers to.
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

/// Takes an item, or the item that it refers to. A stored item refers to no other.
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
    // Only a call of an MCP server has the last two statuses.
    let statuses = ["\"completed\"", "\"incomplete\"", "\"in_progress\"", "\"calling\"", "\"failed\""];
    fields.only("status", if kind.as_deref() == Some("mcp_call") { &statuses } else { &statuses[..3] })?;
    let (prefix, what) = match kind.as_deref() {
        None | Some("message") => ("msg", message(&mut fields, shown)?),
        Some("reasoning") => {
            let summary = reasoning(&mut fields, "summary", shown)?;
            fields.never(&["encrypted_content"], "reasoning is sent as text here")?;
            let said = reasoning(&mut fields, "content", shown)?;
            // A client that never had the whole reasoning sends its summary back; the summary then stands for it.
            let said = if said.is_empty() { summary } else { said };
            ("rs", What::Reasoning { said })
        }
        Some("function_call") => {
            let (call_id, name) = (fields.required("call_id")?, fields.required("name")?);
            let (namespace, arguments) = (fields.take("namespace")?, fields.required("arguments")?);
            direct(&mut fields)?;
            ("fc", What::Call { call_id, namespace, name, arguments })
        }
        Some("custom_tool_call") => {
            let (call_id, name) = (fields.required("call_id")?, fields.required("name")?);
            let input = fields.required("input")?;
            fields.never(&["namespace"], "custom tools have none here")?;
            direct(&mut fields)?;
            ("ctc", What::Custom { call_id, name, input })
        }
        Some(kind @ ("function_call_output" | "custom_tool_call_output")) => {
            let call_id = fields.required("call_id")?;
            let at = fields.param("output");
            let said = parts(&mut fields, "output", shown)?;
            let said = said.ok_or_else(|| ApiError::invalid(&at, format!("{at} is missing")))?;
            // A result belongs to its call, which has the names.
            fields.take::<String>("namespace")?;
            fields.take::<String>("name")?;
            direct(&mut fields)?;
            match kind {
                "function_call_output" => ("fco", What::Result { call_id, said }),
                _ => ("ctco", What::CustomResult { call_id, said }),
            }
        }
        Some(other) => {
            let (prefix, item) = McpItem::take(other, &mut fields)?.ok_or_else(|| unknown(&fields, other))?;
            (prefix, What::Mcp(item))
        }
    };
    fields.finish()?;
    Ok(Item { id: id.unwrap_or_else(|| state.server.ids.named(prefix)), what })
}

fn unknown(fields: &Fields<'_>, kind: &str) -> ApiError {
    let at = fields.param("type");
    let known = "message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output, mcp_list_tools, mcp_call, mcp_approval_request, mcp_approval_response and item_reference";
    let message = format!("{at} is `{}`; this server knows {known}", quote(kind));
    ApiError::unsupported(at, message)
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

/// Takes parts that may only be texts.
fn reasoning(fields: &mut Fields<'_>, name: &str, shown: &mut Shown<'_>) -> ApiResult<Vec<Said>> {
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

/// Takes a text, or parts that are texts, images and audio clips.
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
            // These fields have no effect when a client sends them back: log-probabilities, sources of a text, and the text as parsed by
            // OpenAI's client.
            for name in ["annotations", "logprobs", "parsed"] {
                fields.raw(name);
            }
            fields.required("text")?
        }
        "refusal" => fields.required("refusal")?,
        "input_image" => {
            shown.media.takes(&at, &kind, Modality::Image)?;
            fields.never(&["file_id"], "this server keeps no files; send image_url")?;
            let param = fields.param("image_url");
            let (url, detail) = (fields.required::<Text<'_>>("image_url")?, fields.take::<String>("detail")?);
            let medium = shown.media.image(param, &url.0, detail.as_deref())?;
            let url = if shown.kept { url.0.into_owned() } else { String::new() };
            fields.finish()?;
            return Ok(Said::Image { medium, url, detail });
        }
        "input_audio" => {
            shown.media.takes(&at, &kind, Modality::Audio)?;
            let (param, raw) = fields.needed("input_audio")?;
            fields.finish()?;
            let mut inner = Fields::of(param.clone(), raw)?;
            let (data, format) = (inner.required::<Text<'_>>("data")?, inner.required::<String>("format")?);
            inner.finish()?;
            let medium = shown.media.audio(param, &data.0, &format)?;
            let data = if shown.kept { data.0.into_owned() } else { String::new() };
            return Ok(Said::Audio { medium, data, format });
        }
        "input_file" => {
            let (text, sent) = shown.media.files.take(&mut fields, shown.kept)?;
            fields.finish()?;
            return Ok(Said::File { text, sent });
        }
        other => {
            let known = "input_text, input_image, input_audio and input_file";
            let message = format!("{at} is `{}`; this server knows {known}", quote(other));
            return Err(ApiError::unsupported(at, message));
        }
    };
    fields.finish()?;
    Ok(Said::Text(text))
}

/// Returns an item's content in the form that templates expect.
pub(super) fn content(said: &[Said]) -> Value {
    let mut content = Value::Null;
    for part in said {
        match part {
            Said::Text(text) | Said::File { text, .. } => add_text(&mut content, text),
            Said::Image { medium, .. } | Said::Audio { medium, .. } => add_medium(&mut content, medium.clone()),
        }
    }
    if content.is_null() { "".into() } else { content }
}

impl Item {
    /// Returns the heap bytes of the item's content.
    pub fn bytes(&self) -> u64 {
        let said = |said: &[Said]| -> u64 {
            let own = |part: &Said| match part {
                Said::Text(text) => text.capacity(),
                Said::Image { url, .. } => url.capacity(),
                Said::File { text, sent } => text.capacity() + sent.data.capacity(),
                Said::Audio { data, format, .. } => data.capacity() + format.capacity(),
            };
            said.iter().map(|part| (own(part) + size_of::<Said>()) as u64).sum()
        };
        size_of::<Self>() as u64
            + match &self.what {
                What::Message { said: parts, .. }
                | What::Reasoning { said: parts }
                | What::Result { said: parts, .. }
                | What::CustomResult { said: parts, .. } => said(parts),
                What::Custom { call_id, name, input } => (call_id.len() + name.len() + input.capacity()) as u64,
                What::Call { call_id, namespace, name, arguments } => {
                    let names = name.len() + namespace.as_ref().map_or(0, String::len);
                    (call_id.len() + names + arguments.capacity()) as u64
                }
                What::Mcp(item) => item.bytes(),
            }
    }

    /// Returns the item in the form of the API.
    pub fn shown(&self) -> Value {
        let (id, status) = (&self.id, "completed");
        let parts = |kind: &str, said: &[Said]| -> Vec<Value> {
            let part = |part: &Said| match part {
                Said::Text(text) => json!({"type": kind, "text": text}),
                Said::Image { url, detail, .. } => {
                    json!({"type": "input_image", "image_url": url, "detail": detail.as_deref().unwrap_or("auto")})
                }
                Said::File { sent, .. } => {
                    let from = if sent.is_url { "file_url" } else { "file_data" };
                    json!({"type": "input_file", "filename": sent.name, from: sent.data})
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
            What::Reasoning { said } => {
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
            What::Custom { call_id, name, input } => {
                json!({"id": id, "type": "custom_tool_call", "call_id": call_id, "name": name, "input": input,
                       "status": status})
            }
            What::Mcp(item) => item.shown(id),
            What::Result { call_id, said } | What::CustomResult { call_id, said } => {
                let plain = said.iter().all(|part| matches!(part, Said::Text(_)));
                let output = match content(said) {
                    _ if !plain => Value::Array(parts("input_text", said)),
                    Value::Array(_) => Value::Array(parts("input_text", said)),
                    text => text,
                };
                let kind = match &self.what {
                    What::CustomResult { .. } => "custom_tool_call_output",
                    _ => "function_call_output",
                };
                json!({"id": id, "type": kind, "call_id": call_id, "output": output, "status": status})
            }
        }
    }
}

/// Returns items as the text between a list's brackets.
pub(crate) fn written(items: &[Item]) -> String {
    let all: Vec<String> = items.iter().map(|item| item.shown().to_string()).collect();
    all.join(",")
}
