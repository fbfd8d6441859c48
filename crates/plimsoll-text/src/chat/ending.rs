//! The end of a prompt. A template supports two of the places; the third, inside its last message, is found by a mark.

use serde::Deserialize;
use serde_json::Value;

use crate::error::TextError;

/// The place where a prompt ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// At the beginning of the assistant's turn.
    Open,
    /// After the last message.
    Closed,
    /// At the end of the last message's text, which the assistant continues.
    Within,
}

/// The mark at the end of the last text: a character that occurs in no text, and a space that shows whether the template trims.
const MARK: &str = "\u{FFFE} ";

/// Returns the messages with [`MARK`] at the end of the last message's last text.
pub(super) fn marked(messages: &Value) -> Result<Value, TextError> {
    let mut messages = messages.clone();
    let content = messages.as_array_mut().and_then(|list| list.last_mut()).and_then(|last| last.get_mut("content"));
    let text = match content {
        Some(Value::Array(parts)) => parts.last_mut().and_then(|part| part.get_mut("text")),
        content => content,
    };
    let Some(Value::String(text)) = text else {
        return Err(TextError::Render("the last message does not end with a text to go on from".into()));
    };
    text.push_str(MARK);
    Ok(messages)
}

/// Returns the prompt up to the mark.
pub(super) fn cut(mut prompt: String) -> Result<String, TextError> {
    let Some(at) = prompt.rfind(MARK.trim_end()) else {
        let message =
            "the served model's chat template does not show the last message's text, so there is nothing to go on from";
        return Err(TextError::Render(message.into()));
    };
    let trims = !prompt[at..].starts_with(MARK);
    prompt.truncate(at);
    if trims {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}
