//! Items as messages of chat completions.

use serde_json::{Map, Value, json};

use super::items::{Item, What, content};
use super::mcp_items::{CallEnd, McpItem, call_id, denied, requested, words_of};
use super::mcp_tools::full_name;
use super::object::Namespaced;
use crate::conversation::content::reasoning_alone;
use crate::conversation::custom;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Arguments;

/// Converts items to messages. The items of one answer (reasoning, text, calls) become one message again.
pub(crate) fn messages(param: &str, instructions: Option<&str>, items: &[Item]) -> ApiResult<Vec<Value>> {
    let mut builder = MessageBuilder::default();
    if let Some(text) = instructions {
        builder.messages.push(json!({"role": "system", "content": text}));
    }
    builder.items(param, items)
}

/// Returns messages with these items after them.
pub(super) fn continued(param: &str, messages: Vec<Value>, items: &[Item]) -> ApiResult<Vec<Value>> {
    MessageBuilder { messages, ..MessageBuilder::default() }.items(param, items)
}

/// Returns the items of MCP, with their ids.
pub(super) fn of_mcp(items: &[Item]) -> Vec<(&str, &McpItem)> {
    let mut all: Vec<(&str, &McpItem)> = Vec::new();
    for item in items {
        if let What::Mcp(of_mcp) = &item.what {
            all.push((&item.id, of_mcp));
        }
    }
    all
}

/// Returns the labels of servers whose list of tools is in the conversation.
pub(super) fn listed(items: &[Item]) -> Vec<String> {
    let label = |item: &Item| match &item.what {
        What::Mcp(McpItem::Tools { label, .. }) => Some(label.clone()),
        _ => None,
    };
    items.iter().filter_map(label).collect()
}

#[derive(Default)]
struct MessageBuilder {
    messages: Vec<Value>,
    calls: Vec<String>,
    arguments: Arguments,
}

impl MessageBuilder {
    fn items(mut self, param: &str, items: &[Item]) -> ApiResult<Vec<Value>> {
        let mut mcp: Vec<(&str, &McpItem)> = Vec::new();
        for item in items {
            match &item.what {
                What::Message { role, said } => self.message(role, content(said)),
                What::Reasoning { said } => self.reasoning(content(said)),
                What::Call { call_id, namespace, name, arguments } => {
                    let full = namespace.as_ref().map(|namespace| Namespaced::new(namespace, name));
                    let arguments = self.arguments.parse(param, arguments)?;
                    self.call(call_id, full.as_ref().map_or(name, |of| of.full()), arguments);
                }
                What::Custom { call_id, name, input } => self.call(call_id, name, custom::arguments(input)),
                What::Result { call_id, said } | What::CustomResult { call_id, said } => {
                    self.result(param, call_id, content(said))?;
                }
                What::Mcp(item_of_mcp) => {
                    self.mcp(param, &item.id, item_of_mcp, &mcp)?;
                    mcp.push((&item.id, item_of_mcp));
                }
            }
        }
        self.messages.iter_mut().for_each(reasoning_alone);
        Ok(self.messages)
    }

    /// Adds a call of an MCP server's tool with its result. The prompt has no lists, and of approvals only calls that were denied.
    fn mcp(&mut self, param: &str, id: &str, item: &McpItem, before: &[(&str, &McpItem)]) -> ApiResult<()> {
        let (id, label, name, arguments, said) = match item {
            McpItem::Call { label, name, arguments, ended, .. } => {
                let said = match ended {
                    CallEnd::Output(text) => text.clone(),
                    CallEnd::Error(error) => words_of(error),
                    CallEnd::Open => "Error: this call was not made".into(),
                };
                (id, label.as_str(), name.as_str(), arguments.as_str(), said)
            }
            McpItem::Approval { request, approve: false, reason } => {
                let (label, name, arguments) = requested(param, before, request)?;
                (request.as_str(), label, name, arguments, denied(reason.as_deref()))
            }
            McpItem::Tools { .. } | McpItem::Request { .. } | McpItem::Approval { .. } => return Ok(()),
        };
        let arguments = self.arguments.parse(param, arguments)?;
        self.call(call_id(id), &full_name(label, name), arguments);
        self.result(param, call_id(id), said.into())
    }

    /// Returns the last message, if it is an assistant's that `more` can still be added to.
    fn open(&mut self, more: fn(&Map<String, Value>) -> bool) -> Option<&mut Map<String, Value>> {
        let last = self.messages.last_mut().and_then(Value::as_object_mut)?;
        (last["role"] == "assistant" && more(last)).then_some(last)
    }

    fn message(&mut self, role: &str, content: Value) {
        // Reasoning without a text belongs to the next text.
        let open = self.open(|last| last["content"].is_null() && !last.contains_key("tool_calls"));
        match open.filter(|_| role == "assistant") {
            Some(message) => drop(message.insert("content".into(), content)),
            None => self.messages.push(json!({"role": role, "content": content})),
        }
    }

    fn reasoning(&mut self, content: Value) {
        self.messages.push(json!({"role": "assistant", "content": null, "reasoning_content": content}));
    }

    fn call(&mut self, id: &str, name: &str, arguments: Value) {
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        self.calls.push(id.into());
        match self.open(|_| true) {
            Some(message) => {
                if let Value::Array(calls) = message.entry("tool_calls").or_insert_with(|| json!([])) {
                    calls.push(call);
                }
            }
            None => self.messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
        }
    }

    fn result(&mut self, param: &str, id: &str, content: Value) -> ApiResult<()> {
        if !self.calls.iter().any(|known| known == id) {
            let message = format!("{param}: no call before its output has the call_id `{}`", quote(id));
            return Err(ApiError::invalid(param, message));
        }
        self.messages.push(json!({"role": "tool", "content": content, "tool_call_id": id}));
        Ok(())
    }
}
