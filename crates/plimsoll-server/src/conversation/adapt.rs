//! Conversations for models with a chat template that lacks features of the APIs. Tools go into the system message, in Hermes's format, the
//! plainest of all. Calls and results of the conversation become text in the same way. The `developer` role becomes `system`.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::content::wrap;

/// The role that has replaced `system` in OpenAI's API.
const DEVELOPER: &str = "developer";

/// Returns the messages with roles that a template of this source knows: most templates drop `developer` messages silently.
pub(crate) fn roles<'a>(messages: &'a Value, template: &str) -> Cow<'a, Value> {
    let mut messages = Cow::Borrowed(messages);
    let speaks = messages.as_array().is_some_and(|all| all.iter().any(|message| message["role"] == DEVELOPER));
    if speaks && !template.contains(DEVELOPER) {
        let all = messages.to_mut().as_array_mut().into_iter().flatten();
        all.filter(|message| message["role"] == DEVELOPER).for_each(|message| message["role"] = "system".into());
    }
    messages
}

/// Returns the conversation with the texts of later system messages added to the first one, in order: some templates refuse a system
/// message anywhere else. None if there is no later one, or if one has more than text.
pub(crate) fn system_first(messages: &Value) -> Option<Value> {
    let speaks = |message: &Value| message["role"] == "system" || message["role"] == DEVELOPER;
    let all = messages.as_array()?;
    if !all.iter().skip(1).any(speaks) {
        return None;
    }
    let mut texts = Vec::new();
    for message in all.iter().filter(|message| speaks(message)) {
        match &message["content"] {
            Value::String(text) => texts.push(text.clone()),
            Value::Array(parts) => {
                let part = |part: &Value| part["text"].as_str().map(str::to_owned);
                texts.extend(parts.iter().map(part).collect::<Option<Vec<_>>>()?);
            }
            _ => return None,
        }
    }
    texts.retain(|text| !text.is_empty());
    let first = json!({"role": "system", "content": texts.join("\n\n")});
    let others = all.iter().filter(|message| !speaks(message)).cloned();
    Some(std::iter::once(first).chain(others).collect())
}

/// Returns the conversation with tools, calls and results as text.
pub(crate) fn without_tools(messages: &Value, tools: Option<&Value>) -> Value {
    let mut adapted: Vec<Value> = messages.as_array().into_iter().flatten().map(message).collect();
    if let Some(tools) = tools {
        let told = introduction(tools);
        let first = adapted.first_mut().filter(|first| first["role"] == "system" || first["role"] == DEVELOPER);
        match first.and_then(Value::as_object_mut) {
            Some(system) => append(system, &format!("\n\n{told}")),
            None => adapted.insert(0, json!({"role": "system", "content": told})),
        }
    }
    Value::Array(adapted)
}

fn message(message: &Value) -> Value {
    let Some(object) = message.as_object() else { return message.clone() };
    let mut object = object.clone();
    if let Some(Value::Array(calls)) = object.remove("tool_calls") {
        for call in &calls {
            let function = &call["function"];
            let call = json!({"name": function["name"], "arguments": function["arguments"]});
            append(&mut object, &format!("\n<tool_call>\n{call}\n</tool_call>"));
        }
    }
    if object.get("role").is_some_and(|role| role == "tool") {
        object.insert("role".into(), "user".into());
        wrap(object.entry("content").or_insert(Value::Null), "<tool_response>\n", "\n</tool_response>");
        object.remove("tool_call_id");
    }
    Value::Object(object)
}

/// Adds to a message's text. If the text is empty, leading white space of the addition is dropped.
fn append(message: &mut Map<String, Value>, more: &str) {
    let content = message.entry("content").or_insert(Value::Null);
    let empty = content.as_array().is_none() && content.as_str().is_none_or(str::is_empty);
    wrap(content, "", if empty { more.trim_start() } else { more });
}

fn introduction(tools: &Value) -> String {
    let list: Vec<String> = tools.as_array().into_iter().flatten().map(Value::to_string).collect();
    format!(
        "You may call tools. Their signatures, one a line:\n<tools>\n{}\n</tools>\n\
         To call one, answer with its name and arguments as JSON between tags:\n\
         <tool_call>\n{{\"name\": <name>, \"arguments\": <object>}}\n</tool_call>",
        list.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_system_messages_are_folded_into_the_first_in_order() {
        let say = |role: &str, text: &str| json!({"role": role, "content": text});
        let late = json!([
            say("user", "a"),
            say("system", "s"),
            say("assistant", "b"),
            {"role": "developer", "content": [{"type": "text", "text": "t"}]},
            say("user", "c")
        ]);
        let expected = json!([say("system", "s\n\nt"), say("user", "a"), say("assistant", "b"), say("user", "c")]);
        assert_eq!(system_first(&late), Some(expected));
        assert_eq!(system_first(&json!([say("system", "s"), say("user", "a")])), None);
        let image = json!([say("user", "a"), {"role": "system", "content": [{"type": "image"}]}]);
        assert_eq!(system_first(&image), None);
    }

    #[test]
    fn tools_calls_and_results_become_text() {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let messages = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"}
        ]);
        let adapted = without_tools(&messages, Some(&json!([{"type": "function", "function": {"name": "f"}}])));
        assert!(adapted[0]["content"].as_str().unwrap().contains("<tools>\n{\"type\""), "{adapted}");
        assert_eq!(adapted[0]["role"], "system");
        let call = "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>";
        assert_eq!(adapted[2], json!({"role": "assistant", "content": call}));
        assert_eq!(adapted[3], json!({"role": "user", "content": "<tool_response>\n42\n</tool_response>"}));
        // An existing system message keeps its text.
        let messages = json!([{"role": "system", "content": "Be kind."}]);
        let adapted = without_tools(&messages, Some(&json!([])));
        assert!(adapted[0]["content"].as_str().unwrap().starts_with("Be kind.\n\nYou may call tools."), "{adapted}");
        assert_eq!(adapted.as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_developer_speaks_as_the_system_where_the_template_does_not_know_one() {
        let said =
            |role: &str| json!([{"role": role, "content": "Be brief."}, {"role": "user", "content": "developer"}]);
        assert_eq!(*roles(&said("developer"), "{% if m.role == 'system' %}"), said("system"));
        let kept = |said: &Value, template: &str| matches!(roles(said, template), Cow::Borrowed(_));
        assert!(kept(&said("developer"), "{% if m.role in ('system', 'developer') %}"));
        assert!(kept(&said("system"), ""), "nothing to change");
    }
}
