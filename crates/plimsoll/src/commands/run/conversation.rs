//! A conversation and its settings: the contents of a saved chat and of a request.

use anyhow::{Context, bail};
use plimsoll_memory::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Most bytes of a conversation, attachments included.
pub const CONVERSATION_BYTES_MAX: u64 = 64 << 20;

/// How a setting's value is read.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Number,
    Count,
    Text,
}

/// Settings that `/set` knows, by the names of the API.
const SETTINGS: [(&str, Kind); 12] = [
    ("temperature", Kind::Number),
    ("top_p", Kind::Number),
    ("top_k", Kind::Count),
    ("min_p", Kind::Number),
    ("max_tokens", Kind::Count),
    ("seed", Kind::Count),
    ("repetition_penalty", Kind::Number),
    ("presence_penalty", Kind::Number),
    ("frequency_penalty", Kind::Number),
    ("reasoning_effort", Kind::Text),
    ("thinking_token_budget", Kind::Count),
    ("stop", Kind::Text),
];

/// The names of all settings.
pub fn setting_names() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().map(|(name, _)| *name)
}

/// Messages, system prompt and settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Conversation {
    /// The system prompt.
    pub system: Option<String>,
    /// Sampling parameters that differ from the server's defaults.
    pub settings: Map<String, Value>,
    /// The messages of the user and the model, as the API's JSON objects.
    pub messages: Vec<Value>,
}

impl Conversation {
    /// Sets a parameter, or resets it without a value.
    ///
    /// # Errors
    /// The name is unknown, or the value is none of its kind.
    pub fn set(&mut self, name: &str, value: Option<&str>) -> anyhow::Result<()> {
        let Some((name, kind)) = SETTINGS.iter().find(|(known, _)| *known == name) else {
            let names: Vec<_> = setting_names().collect();
            bail!("unknown setting '{name}': use one of {}", names.join(", "));
        };
        let Some(value) = value else {
            self.settings.remove(*name);
            return Ok(());
        };
        let parsed = match kind {
            Kind::Number => value.parse::<f64>().ok().filter(|number| number.is_finite()).map(Value::from),
            Kind::Count => value.parse::<i64>().ok().map(Value::from),
            Kind::Text => Some(value.into()),
        };
        let wanted = if matches!(kind, Kind::Count) { "a whole number" } else { "a number" };
        let parsed = parsed.with_context(|| format!("{name} is '{value}': give {wanted}"))?;
        self.settings.insert((*name).to_owned(), parsed);
        Ok(())
    }

    /// Adds a message of the user: a text, and the parts that were attached before it.
    pub fn ask(&mut self, text: &str, parts: Vec<Value>) {
        let content = match parts.is_empty() {
            true => text.into(),
            false => {
                let all = parts.into_iter().chain([json!({"type": "text", "text": text})]);
                Value::Array(all.collect())
            }
        };
        self.messages.push(json!({"role": "user", "content": content}));
    }

    /// Adds an answer of the model.
    pub fn answered(&mut self, text: &str) {
        self.messages.push(json!({"role": "assistant", "content": text}));
    }

    /// Removes the last answer, so that the last message is the user's. False if there is no message left.
    pub fn take_back(&mut self) -> bool {
        if self.messages.last().is_some_and(|message| message["role"] == "assistant") {
            self.messages.pop();
        }
        !self.messages.is_empty()
    }

    /// The request for the next answer.
    ///
    /// # Errors
    /// The request has more bytes than `bytes_max`, the server's limit.
    pub fn request(&self, model: &str, bytes_max: u64) -> anyhow::Result<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        let mut body = self.settings.clone();
        body.insert("model".into(), model.into());
        body.insert("messages".into(), messages.into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        let body = Value::Object(body);
        let bytes = body.to_string().len() as u64;
        if bytes > bytes_max {
            bail!(
                "the conversation and its files have {}, at most {} are sent: send smaller files, or begin anew with /clear",
                Bytes(bytes),
                Bytes(bytes_max)
            );
        }
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_sent_and_reset() {
        let mut conversation = Conversation::default();
        conversation.set("temperature", Some("0.5")).unwrap();
        conversation.set("top_k", Some("40")).unwrap();
        conversation.set("top_k", None).unwrap();
        conversation.ask("hi", Vec::new());
        let body = conversation.request("m", CONVERSATION_BYTES_MAX).unwrap();
        assert_eq!((&body["temperature"], &body["top_k"], &body["model"]), (&json!(0.5), &Value::Null, &json!("m")));
        let error = conversation.set("temprature", Some("1")).unwrap_err().to_string();
        assert!(error.contains("'temprature'") && error.contains("temperature"), "{error}");
        let error = conversation.set("top_k", Some("many")).unwrap_err().to_string();
        assert_eq!(error, "top_k is 'many': give a whole number");
        assert!(conversation.set("min_p", Some("NaN")).is_err());
    }

    #[test]
    fn last_answer_is_taken_back_and_the_question_stays() {
        let mut conversation = Conversation { system: Some("Be brief.".into()), ..Conversation::default() };
        assert!(!conversation.take_back());
        conversation.ask("hi", vec![json!({"type": "text", "text": "a file"})]);
        conversation.answered("hello");
        assert!(conversation.take_back() && conversation.take_back());
        let body = conversation.request("m", CONVERSATION_BYTES_MAX).unwrap();
        let roles: Vec<_> = body["messages"].as_array().unwrap().iter().map(|message| &message["role"]).collect();
        assert_eq!(roles, ["system", "user"]);
        assert_eq!(body["messages"][1]["content"][1]["text"], "hi");
    }

    #[test]
    fn conversation_that_is_too_large_is_not_sent() {
        let mut conversation = Conversation::default();
        conversation.ask(&"x".repeat(CONVERSATION_BYTES_MAX as usize), Vec::new());
        let error = conversation.request("m", CONVERSATION_BYTES_MAX).unwrap_err().to_string();
        assert!(error.contains("at most 64.0 MiB") && error.contains("/clear"), "{error}");
    }
}
