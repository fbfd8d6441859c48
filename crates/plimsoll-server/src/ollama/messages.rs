//! Converts Ollama's `messages` to chat's: images become parts of the content, calls get the ids that some templates require.

use plimsoll_media::Modality;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::chat::messages::tool_calls;
use crate::conversation::content::{add_medium, add_text};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Arguments, Fields, MAX_NODES, Text, check_nodes, wrong};
use crate::media::{MediaParser, Medium};
use crate::state::model::ModelState;

const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// The messages read so far.
pub(super) struct MessageBuilder<'a> {
    pub messages: Vec<Value>,
    parser: MediaParser<'a>,
    arguments: Arguments,
    /// Name and id of each call without a result yet.
    open: Vec<(String, String)>,
    calls: usize,
}

impl<'a> MessageBuilder<'a> {
    pub fn new(state: &'a ModelState) -> Self {
        let parser = MediaParser::new(state);
        Self { messages: Vec::new(), parser, arguments: Arguments::default(), open: Vec::new(), calls: 0 }
    }

    /// Returns the messages and their media.
    pub fn into_parts(self) -> (Vec<Value>, Vec<Medium>) {
        (self.messages, self.parser.media)
    }

    /// Takes the field `messages`; an absent field is empty.
    pub fn take(&mut self, fields: &mut Fields<'_>) -> ApiResult<()> {
        let Some(raw) = fields.raw("messages") else { return Ok(()) };
        check_nodes("messages", raw.get(), MAX_NODES)?;
        let list: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|e| wrong("messages", &e))?;
        for (i, raw) in list.iter().enumerate() {
            self.message(Fields::of(format!("messages[{i}]"), raw)?)?;
        }
        Ok(())
    }

    /// Returns a user's text with its images, which come first, as in Ollama's own prompts.
    pub fn content(&mut self, fields: &mut Fields<'_>, text: &str) -> ApiResult<Value> {
        let at = fields.param("images");
        let images = fields.take_few::<Vec<Text<'_>>>("images", MAX_NODES)?.unwrap_or_default();
        let mut content = Value::Null;
        for (i, image) in images.iter().enumerate() {
            self.parser.takes(&at, "images", Modality::Image)?;
            add_medium(&mut content, self.parser.base64(format!("{at}[{i}]"), "", &image.0)?);
        }
        if content.is_null() || !text.is_empty() {
            add_text(&mut content, text);
        }
        Ok(content)
    }

    fn message(&mut self, mut fields: Fields<'_>) -> ApiResult<()> {
        let at = fields.param("role");
        let role = fields.required::<String>("role")?;
        if !ROLES.contains(&role.as_str()) {
            let message = format!("{at} is `{}`; known roles are {}", quote(&role), ROLES.join(", "));
            return Err(ApiError::invalid(at, message));
        }
        let text = fields.take::<String>("content")?.unwrap_or_default();
        let content = self.content(&mut fields, &text)?;
        let calls = tool_calls(&mut fields, &mut self.arguments)?;
        let mut message = Map::new();
        message.insert("role".into(), role.as_str().into());
        message.insert("content".into(), content);
        if let Some(mut calls) = calls {
            calls.as_array_mut().into_iter().flatten().for_each(|call| self.call(call));
            message.insert("tool_calls".into(), calls);
        }
        if let Some(reasoning) = fields.take::<String>("thinking")?.filter(|text| !text.is_empty()) {
            message.insert("reasoning_content".into(), reasoning.into());
        }
        let name = fields.either::<String>("tool_name", "name")?;
        let id = fields.take::<String>("tool_call_id")?;
        if role == "tool" {
            self.answered(&mut message, name.as_deref(), id);
        }
        if let Some(name) = name {
            message.insert("name".into(), name.into());
        }
        fields.finish()?;
        self.messages.push(Value::Object(message));
        Ok(())
    }

    /// Gives a call an id, which Ollama's clients do not send back.
    fn call(&mut self, call: &mut Value) {
        self.calls += 1;
        call["function"].as_object_mut().map(|function| function.remove("index"));
        if call["id"].as_str().is_none_or(str::is_empty) {
            // Mistral's templates accept ids of nine characters only.
            call["id"] = format!("{:09}", self.calls).into();
        }
        call["type"] = "function".into();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.open.push((text(&call["function"]["name"]), text(&call["id"])));
    }

    /// Adds to a result the id of its call: the oldest open one of its name.
    fn answered(&mut self, message: &mut Map<String, Value>, name: Option<&str>, id: Option<String>) {
        let meant = |(called, own): &(String, String)| match (&id, name) {
            (Some(id), _) => own == id,
            (None, Some(name)) => called == name,
            (None, None) => true,
        };
        let open = self.open.iter().position(meant).map(|at| self.open.remove(at).1);
        if let Some(id) = id.or(open) {
            message.insert("tool_call_id".into(), id.into());
        }
    }
}
