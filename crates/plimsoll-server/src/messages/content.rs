//! Converts Anthropic's `system` and `messages` to chat's: blocks become text, images, calls, results and reasoning of messages.
//!
//! Texts of one message are joined by line breaks, as chat's parts are. Adjacent messages of one role become one. Each
//! tool result becomes a message, in its place.

use plimsoll_media::Modality;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::conversation::cache_control::Marks;
use crate::conversation::content::{add_medium, add_text, reasoning_alone, wrap};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, MAX_NODES, Text, cache_control, check_nodes, wrong};
use crate::media::documents::{self, Document};
use crate::media::{MediaParser, Medium};
use crate::state::model::ModelState;

/// Takes the fields: the messages, their media and documents, and their cache marks after those of the tools.
pub(crate) fn take(fields: &mut Fields<'_>, state: &ModelState, marks: Marks) -> ApiResult<Content> {
    let mut builder = MessageBuilder { messages: Vec::new(), media: MediaParser::new(state), calls: Vec::new(), marks };
    if let Some(raw) = fields.raw("system") {
        let text = builder.texts("system", raw)?;
        builder.messages.push(json!({"role": "system", "content": text}));
    }
    let raw = fields.raw("messages").ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    check_nodes("messages", raw.get(), MAX_NODES)?;
    let list: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| wrong("messages", &e))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty: at least one message is needed"));
    }
    for (i, raw) in list.iter().enumerate() {
        builder.message(Fields::of(format!("messages[{i}]"), raw)?)?;
    }
    builder.messages.iter_mut().for_each(reasoning_alone);
    let MessageBuilder { messages, media, marks, .. } = builder;
    Ok(Content { messages, media: media.media, documents: media.files.documents, marks })
}

/// The parsed fields.
pub(crate) struct Content {
    pub messages: Vec<Value>,
    pub media: Vec<Medium>,
    pub documents: Vec<Document>,
    /// The cache marks.
    pub marks: Marks,
}

/// The messages read so far.
struct MessageBuilder<'a> {
    messages: Vec<Value>,
    media: MediaParser<'a>,
    /// Ids of calls, which results refer to.
    calls: Vec<String>,
    marks: Marks,
}

impl MessageBuilder<'_> {
    fn message(&mut self, mut fields: Fields<'_>) -> ApiResult<()> {
        let role = fields.required::<String>("role")?;
        let path = fields.param("content");
        let raw = fields.raw("content");
        let raw = raw.ok_or_else(|| ApiError::invalid(&path, format!("{path} is missing")))?;
        let at = fields.param("role");
        fields.finish()?;
        match role.as_str() {
            "system" => {
                let text = self.texts(&path, raw)?;
                self.messages.push(json!({"role": "system", "content": text}));
                Ok(())
            }
            "user" | "assistant" if raw.get().starts_with('"') => {
                let text: String = serde_json::from_str(raw.get()).map_err(|e| wrong(&path, &e))?;
                self.text(&role, &text);
                Ok(())
            }
            "user" | "assistant" => {
                let blocks: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| wrong(&path, &e))?;
                if blocks.is_empty() {
                    return Err(ApiError::invalid(&path, format!("{path} is empty: at least one block is needed")));
                }
                for (i, raw) in blocks.iter().enumerate() {
                    self.block(&role, Fields::of(format!("{path}[{i}]"), raw)?)?;
                }
                Ok(())
            }
            other => {
                let message = format!("{at} is `{}`; known roles are user, assistant and system", quote(other));
                Err(ApiError::invalid(at, message))
            }
        }
    }

    fn block(&mut self, role: &str, mut fields: Fields<'_>) -> ApiResult<()> {
        let at = fields.param("type");
        let kind = fields.required::<String>("type")?;
        match (kind.as_str(), role) {
            ("text", _) => {
                let text = self.text_block(&mut fields)?;
                self.text(role, &text);
            }
            ("image", "user") => {
                let medium = self.image(&at, &mut fields)?;
                if let Some(content) = self.turn(role).get_mut("content") {
                    add_medium(content, medium);
                }
            }
            ("document", "user") => {
                let text = self.document(&mut fields)?;
                self.text(role, &text);
            }
            ("tool_result", "user") => self.result(&mut fields)?,
            ("tool_use", "assistant") => self.call(&mut fields)?,
            ("thinking", "assistant") => {
                let reasoning = fields.required::<String>("thinking")?;
                // This server signs no reasoning, and reads reasoning from other servers like its own.
                fields.take::<String>("signature")?;
                let message = self.turn("assistant");
                match message.get_mut("reasoning_content") {
                    Some(Value::String(text)) => {
                        text.push('\n');
                        text.push_str(&reasoning);
                    }
                    _ => drop(message.insert("reasoning_content".into(), reasoning.into())),
                }
            }
            (other, _) => return Err(unknown(at, other, role)),
        }
        fields.finish()
    }

    /// Returns the message for a block of this role.
    fn turn(&mut self, role: &str) -> &mut Map<String, Value> {
        if !self.messages.last().is_some_and(|last| last["role"] == role) {
            self.messages.push(json!({"role": role, "content": null}));
        }
        match self.messages.last_mut() {
            Some(Value::Object(message)) => message,
            _ => unreachable!("a message was pushed above, and all are objects"),
        }
    }

    fn text(&mut self, role: &str, text: &str) {
        if let Some(content) = self.turn(role).get_mut("content") {
            add_text(content, text);
        }
    }

    /// Takes an image. `at`: the path of its type in the body.
    fn image(&mut self, at: &str, fields: &mut Fields<'_>) -> ApiResult<Value> {
        self.media.takes(at, "image", Modality::Image)?;
        let path = fields.param("source");
        let raw = fields.raw("source");
        let raw = raw.ok_or_else(|| ApiError::invalid(&path, format!("{path} is missing")))?;
        let mut source = Fields::of(path.clone(), raw)?;
        let kind: String = source.required("type")?;
        let medium = match kind.as_str() {
            "base64" => {
                let media_type: String = source.required("media_type")?;
                let (param, data) = (source.param("data"), source.required::<Text<'_>>("data")?);
                self.media.base64(param, &media_type, &data.0)?
            }
            "url" => {
                let (param, url) = (source.param("url"), source.required::<Text<'_>>("url")?);
                self.media.image(param, &url.0, None)?
            }
            other => {
                let at = source.param("type");
                let message = format!("{at} is `{}`; this server has base64 and url", quote(other));
                return Err(ApiError::unsupported(at, message));
            }
        };
        source.finish()?;
        self.marks.add(cache_control(fields)?, "");
        Ok(medium)
    }

    /// Takes a document, and returns the text for the message.
    fn document(&mut self, fields: &mut Fields<'_>) -> ApiResult<String> {
        let (at, raw) = fields.needed("source")?;
        let title = fields.take::<String>("title")?;
        let context = fields.take::<String>("context")?;
        let path = fields.param("citations");
        if let Some(raw) = fields.raw("citations") {
            let mut citations = Fields::of(path, raw)?;
            citations.only("enabled", &["false"])?;
            citations.finish()?;
        }
        self.marks.add(cache_control(fields)?, "");
        let mut source = Fields::of(at, raw)?;
        let kind: String = source.required("type")?;
        let text = match kind.as_str() {
            "base64" => {
                source.only("media_type", &["\"application/pdf\"", "\"text/plain\""])?;
                let (param, data) = (source.param("data"), source.required::<Text<'_>>("data")?);
                self.media.files.base64(param, title, &data.0)?
            }
            "text" => {
                source.only("media_type", &["\"text/plain\""])?;
                documents::shown(title.as_deref(), &source.required::<String>("data")?)
            }
            "url" => {
                let (param, url) = (source.param("url"), source.required::<Text<'_>>("url")?);
                self.media.files.url(param, title, &url.0)?
            }
            other => {
                let at = source.param("type");
                let message = format!("{at} is `{}`; this server has base64, text and url", quote(other));
                return Err(ApiError::unsupported(at, message));
            }
        };
        source.finish()?;
        Ok(match context {
            Some(context) => format!("{context}\n{text}"),
            None => text,
        })
    }

    /// Takes a tool's result: text, images and documents.
    fn shown(&mut self, path: &str, raw: &RawValue) -> ApiResult<Value> {
        if !raw.get().starts_with('[') {
            return serde_json::from_str::<String>(raw.get()).map(Value::String).map_err(|e| wrong(path, &e));
        }
        let blocks: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| wrong(path, &e))?;
        let mut content = Value::Null;
        for (i, raw) in blocks.iter().enumerate() {
            let mut block = Fields::of(format!("{path}[{i}]"), raw)?;
            let at = block.param("type");
            let kind = block.required::<String>("type")?;
            match kind.as_str() {
                "text" => add_text(&mut content, &self.text_block(&mut block)?),
                "image" => add_medium(&mut content, self.image(&at, &mut block)?),
                "document" => add_text(&mut content, &self.document(&mut block)?),
                other => return Err(unknown(at, other, "tool_result")),
            }
            block.finish()?;
        }
        Ok(if content.is_null() { "".into() } else { content })
    }

    /// Takes a text, or blocks that may only be texts.
    fn texts(&mut self, path: &str, raw: &RawValue) -> ApiResult<String> {
        if !raw.get().starts_with('[') {
            return serde_json::from_str(raw.get()).map_err(|e| wrong(path, &e));
        }
        check_nodes(path, raw.get(), MAX_NODES)?;
        let blocks: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| wrong(path, &e))?;
        let mut texts = Vec::with_capacity(blocks.len());
        for (i, raw) in blocks.iter().enumerate() {
            let mut block = Fields::of(format!("{path}[{i}]"), raw)?;
            let at = block.param("type");
            let kind = block.required::<String>("type")?;
            if kind != "text" {
                return Err(unknown(at, &kind, "system"));
            }
            texts.push(self.text_block(&mut block)?);
            block.finish()?;
        }
        Ok(texts.join("\n"))
    }

    fn text_block(&mut self, fields: &mut Fields<'_>) -> ApiResult<String> {
        let text: String = fields.required("text")?;
        self.marks.add(cache_control(fields)?, &text);
        fields.only("citations", &["[]"])?;
        Ok(text)
    }

    fn call(&mut self, fields: &mut Fields<'_>) -> ApiResult<()> {
        let id = fields.required::<String>("id")?;
        let name = fields.required::<String>("name")?;
        let at = fields.param("input");
        let input = fields.json("input")?.unwrap_or_else(|| json!({}));
        if !input.is_object() {
            return Err(ApiError::invalid(&at, format!("{at} must be an object")));
        }
        self.marks.add(cache_control(fields)?, "");
        only_direct(fields)?;
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}});
        let message = self.turn("assistant");
        if let Value::Array(calls) = message.entry("tool_calls").or_insert_with(|| json!([])) {
            calls.push(call);
        }
        self.calls.push(id);
        Ok(())
    }

    fn result(&mut self, fields: &mut Fields<'_>) -> ApiResult<()> {
        let at = fields.param("tool_use_id");
        let id = fields.required::<String>("tool_use_id")?;
        if !self.calls.contains(&id) {
            let message = format!("{at} is `{}`, but no tool_use before it has this id", quote(&id));
            return Err(ApiError::invalid(at, message));
        }
        let path = fields.param("content");
        let mut content = match fields.raw("content") {
            None => "".into(),
            Some(raw) => self.shown(&path, raw)?,
        };
        // Templates have no other place for this flag.
        if fields.take("is_error")?.unwrap_or(false) {
            wrap(&mut content, "Error: ", "");
        }
        self.marks.add(cache_control(fields)?, content.as_str().unwrap_or_default());
        fields.never(&["toolset_name"], "this server has no toolsets")?;
        self.messages.push(json!({"role": "tool", "content": content, "tool_call_id": id}));
        Ok(())
    }
}

fn only_direct(fields: &mut Fields<'_>) -> ApiResult<()> {
    fields.never(&["toolset_name"], "this server has no toolsets")?;
    let path = fields.param("caller");
    let Some(raw) = fields.raw("caller") else { return Ok(()) };
    let mut caller = Fields::of(path, raw)?;
    caller.only("type", &["\"direct\""])?;
    caller.finish()
}

fn unknown(at: String, kind: &str, role: &str) -> ApiError {
    let message = format!("{at} is `{}`, which this server does not know in a {role} message", quote(kind));
    ApiError::unsupported(at, message)
}
