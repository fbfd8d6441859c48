//! Questions of all kinds, and the requests that ask them.

use serde::Serialize;
use serde_json::{Value, json};

use super::image;
use crate::prompts::Random;

/// Tokens of each recorded answer.
const TOKENS: u32 = 24;

/// Token limit of a structured answer, which must have room to end.
const FORM_TOKENS: u32 = 80;

/// Longest side of an image in pixels.
const SIDE_MAX: u64 = 160;

/// A request without its `stream` field, which is set at each sending.
#[derive(Clone, Debug)]
pub struct Question {
    /// The route.
    pub path: &'static str,
    /// The body, without `stream`.
    pub body: Value,
}

/// A sort of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Plain text.
    Text,
    /// A conversation.
    Chat,
    /// A conversation with images.
    Image,
    /// A conversation in which a tool must be called.
    Tools,
    /// A structured answer: by schema, regular expression or choice.
    Structured,
}

impl Kind {
    /// Returns a greedy question. `random` decides the images and the kind of structured output.
    pub fn question(self, model: &str, random: &mut Random, text: String) -> Question {
        let chat = |body: Value| Question { path: "/v1/chat/completions", body };
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        let mut question = match self {
            Self::Text => Question {
                path: "/v1/completions",
                body: json!({"prompt": text, "max_tokens": TOKENS, "ignore_eos": true}),
            },
            Self::Chat => chat(json!({"messages": user(text.into()), "max_tokens": TOKENS, "ignore_eos": true})),
            Self::Image => {
                let side = |random: &mut Random| random.between(16, SIDE_MAX) as u32;
                let url = image::data_url(side(random), side(random), random.next());
                let parts = json!([
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "What number do you see?"}
                ]);
                chat(json!({"messages": user(parts), "max_tokens": TOKENS, "ignore_eos": true}))
            }
            Self::Tools => {
                let parameters = json!({
                    "type": "object", "required": ["place", "days"], "additionalProperties": false,
                    "properties": {"place": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}}
                });
                let tool = json!({"type": "function", "function": {"name": "forecast", "parameters": parameters}});
                chat(json!({
                    "messages": user(text.into()), "tools": [tool], "tool_choice": "required", "max_tokens": FORM_TOKENS
                }))
            }
            Self::Structured => {
                let schema = json!({
                    "type": "object", "required": ["name", "age"], "additionalProperties": false,
                    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99, "minimum": 0}}
                });
                let mut body = json!({"messages": user(text.into()), "max_tokens": FORM_TOKENS});
                match random.below(3) {
                    0 => body["guided_regex"] = "[a-f]{4}-[0-9]{3}".into(),
                    1 => body["guided_choice"] = json!(["port", "starboard"]),
                    _ => {
                        body["response_format"] =
                            json!({"type": "json_schema", "json_schema": {"name": "person", "schema": schema}});
                    }
                }
                chat(body)
            }
        };
        question.body["model"] = model.into();
        question.body["temperature"] = 0.into();
        question
    }
}
