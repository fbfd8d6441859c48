//! Answers that a client received.

use serde_json::Value;

/// An answer with its whole body.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Returns the text of a 200.
    pub fn ok_text(&self) -> &str {
        assert_eq!(self.status, 200, "{}", self.body);
        &self.body
    }

    /// Returns the JSON of a 200.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// Returns the error object of an answer with this status, and asserts OpenAI's shape.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        let error = self.json()["error"].clone();
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{error}");
        assert!(error["type"].is_string() && error.get("param").is_some() && error.get("code").is_some(), "{error}");
        error
    }

    /// Returns the events of a stream, and asserts that it ends with its terminator.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert!(self.header("content-type").unwrap().starts_with("text/event-stream"));
        events(&self.body)
    }
}

/// Splits a stream's text into events and checks its end.
pub fn events(text: &str) -> Vec<Value> {
    assert!(text.ends_with("data: [DONE]\n\n"), "no terminator: {text:?}");
    assert_eq!(text.matches("data: [DONE]").count(), 1);
    let blocks = text.split("\n\n").filter(|block| !block.is_empty() && !block.starts_with(':'));
    let data = blocks.map(|block| block.strip_prefix("data: ").unwrap_or_else(|| panic!("odd event {block:?}")));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}
