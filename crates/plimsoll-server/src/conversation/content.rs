//! A message's content in the form that templates expect: one text, or parts if there is more than text. Adjacent texts are joined by a
//! line break, even among other parts.

use serde_json::{Value, json};

/// Adds a text to a message's content.
pub(crate) fn add_text(content: &mut Value, text: &str) {
    let joined = |before: &str| Value::String(format!("{before}\n{text}"));
    match content {
        Value::String(before) => *content = joined(before),
        Value::Array(parts) => match parts.last_mut() {
            Some(last) if last["type"] == "text" => last["text"] = joined(last["text"].as_str().unwrap_or_default()),
            _ => parts.push(text_part(text)),
        },
        _ => *content = text.into(),
    }
}

/// Adds the part for an image, a video or an audio clip.
pub(crate) fn add_medium(content: &mut Value, medium: Value) {
    match content {
        Value::String(text) => *content = json!([text_part(text), medium]),
        Value::Array(parts) => parts.push(medium),
        _ => *content = json!([medium]),
    }
}

/// Puts a text before and one after a message's content, without a line break.
pub(crate) fn wrap(content: &mut Value, before: &str, after: &str) {
    match content {
        Value::Array(parts) => {
            if !before.is_empty() {
                parts.insert(0, text_part(before));
            }
            if !after.is_empty() {
                parts.push(text_part(after));
            }
        }
        text => *text = Value::String(format!("{before}{}{after}", text.as_str().unwrap_or_default())),
    }
}

/// Sets an empty text as the content of a message that has only reasoning, before an answer that was cut off. Templates expect a text.
pub(crate) fn reasoning_alone(message: &mut Value) {
    if message["content"].is_null() && message.get("tool_calls").is_none() {
        message["content"] = "".into();
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_joined_and_media_stand_where_they_stood() {
        let mut content = Value::Null;
        add_text(&mut content, "a");
        add_text(&mut content, "b");
        assert_eq!(content, json!("a\nb"));
        wrap(&mut content, "<", ">");
        add_medium(&mut content, json!({"type": "image"}));
        add_text(&mut content, "c");
        add_text(&mut content, "d");
        let text = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(content, json!([text("<a\nb>"), {"type": "image"}, text("c\nd")]));
        wrap(&mut content, "Error: ", "");
        assert_eq!(content[0], text("Error: "));
        let mut content = Value::Null;
        add_medium(&mut content, json!({"type": "video"}));
        assert_eq!(content, json!([{"type": "video"}]));
        let mut content = Value::Null;
        wrap(&mut content, "a", "b");
        assert_eq!(content, json!("ab"));
    }
}
