//! Items of MCP in a conversation: lists of tools, calls, and approvals.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;

/// The number of characters of a call's id in a prompt. Some templates accept no other number.
const CALL_ID_CHARS: usize = 9;

/// One item.
#[derive(Clone, Debug)]
pub(crate) enum McpItem {
    /// Tools of a server. The server is asked again, so a list that a client has changed has no effect.
    Tools {
        label: String,
        tools: Box<RawValue>,
        error: Option<String>,
    },
    Call {
        label: String,
        name: String,
        arguments: String,
        ended: CallEnd,
        request: Option<String>,
    },
    /// A call that waits for the client's approval.
    Request {
        label: String,
        name: String,
        arguments: String,
    },
    Approval {
        request: String,
        approve: bool,
        reason: Option<String>,
    },
}

/// How a call ended.
#[derive(Clone, Debug)]
pub(crate) enum CallEnd {
    Output(String),
    /// The error in the form of the API.
    Error(Box<RawValue>),
    /// The call was not made, or has no result.
    Open,
}

/// An approved call that is still to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Approved {
    pub request: String,
    pub label: String,
    pub name: String,
    pub arguments: String,
}

impl McpItem {
    /// Takes an item of this kind. Returns it with the prefix of its ids; none if the kind is not one of MCP.
    pub fn take(kind: &str, fields: &mut Fields<'_>) -> ApiResult<Option<(&'static str, Self)>> {
        let item = match kind {
            "mcp_list_tools" => {
                let label = fields.required("server_label")?;
                let (_, tools) = fields.needed("tools")?;
                let error = fields.take("error")?;
                ("mcpl", Self::Tools { label, tools: tools.to_owned(), error })
            }
            "mcp_call" => {
                let (label, name) = (fields.required("server_label")?, fields.required("name")?);
                let arguments = fields.required("arguments")?;
                let error = fields.raw("error").map(RawValue::to_owned);
                let output = fields.take::<String>("output")?;
                let ended = match (error, output) {
                    (Some(error), _) => CallEnd::Error(error),
                    (None, Some(output)) => CallEnd::Output(output),
                    (None, None) => CallEnd::Open,
                };
                let request = fields.take("approval_request_id")?;
                ("mcp", Self::Call { label, name, arguments, ended, request })
            }
            "mcp_approval_request" => {
                let (label, name) = (fields.required("server_label")?, fields.required("name")?);
                ("mcpr", Self::Request { label, name, arguments: fields.required("arguments")? })
            }
            "mcp_approval_response" => {
                let request = fields.required("approval_request_id")?;
                let (approve, reason) = (fields.required("approve")?, fields.take("reason")?);
                ("mcpa", Self::Approval { request, approve, reason })
            }
            _ => return Ok(None),
        };
        Ok(Some(item))
    }

    /// Returns the heap bytes of the item.
    pub fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::Tools { label, tools, error } => {
                label.len() + tools.get().len() + error.as_ref().map_or(0, String::len)
            }
            Self::Call { label, name, arguments, ended, request } => {
                let ended = match ended {
                    CallEnd::Output(text) => text.len(),
                    CallEnd::Error(error) => error.get().len(),
                    CallEnd::Open => 0,
                };
                label.len() + name.len() + arguments.len() + ended + request.as_ref().map_or(0, String::len)
            }
            Self::Request { label, name, arguments } => label.len() + name.len() + arguments.len(),
            Self::Approval { request, reason, .. } => request.len() + reason.as_ref().map_or(0, String::len),
        };
        bytes as u64
    }

    /// Returns the item in the form of the API.
    pub fn shown(&self, id: &str) -> Value {
        match self {
            Self::Tools { label, tools, error } => {
                json!({"id": id, "type": "mcp_list_tools", "server_label": label, "tools": tools, "error": error})
            }
            Self::Call { label, name, arguments, ended, request } => {
                let (status, output, error) = match ended {
                    CallEnd::Output(text) => ("completed", json!(text), Value::Null),
                    CallEnd::Error(error) => ("failed", Value::Null, json!(error)),
                    CallEnd::Open => ("incomplete", Value::Null, Value::Null),
                };
                json!({"id": id, "type": "mcp_call", "server_label": label, "name": name, "arguments": arguments,
                       "output": output, "error": error, "approval_request_id": request, "status": status})
            }
            Self::Request { label, name, arguments } => {
                json!({"id": id, "type": "mcp_approval_request", "server_label": label, "name": name,
                       "arguments": arguments})
            }
            Self::Approval { request, approve, reason } => {
                json!({"id": id, "type": "mcp_approval_response", "approval_request_id": request, "approve": approve,
                       "reason": reason})
            }
        }
    }
}

/// Returns the id of an item's call in the prompt. It depends on the item alone, so that the prefix cache finds the prompt again.
pub(super) fn call_id(id: &str) -> &str {
    let from = id.len().saturating_sub(CALL_ID_CHARS);
    if id.is_char_boundary(from) { &id[from..] } else { id }
}

/// Returns the text that the model reads for a failed call.
pub(super) fn words_of(error: &RawValue) -> String {
    let value: Value = serde_json::from_str(error.get()).unwrap_or_default();
    let texts = value["content"].as_array().into_iter().flatten().filter_map(|block| block["text"].as_str());
    let said = texts.collect::<Vec<_>>().join("\n");
    let said = if said.is_empty() { value["message"].as_str().map(str::to_owned) } else { Some(said) };
    format!("Error: {}", said.or_else(|| value.as_str().map(str::to_owned)).unwrap_or_else(|| "the tool failed".into()))
}

/// Returns the text that the model reads for a call that the client did not approve.
pub(super) fn denied(reason: Option<&str>) -> String {
    match reason {
        Some(reason) => format!("Error: the user did not approve this call: {reason}"),
        None => "Error: the user did not approve this call".into(),
    }
}

/// Returns the request that an approval names, from the items before it.
pub(super) fn requested<'a>(
    param: &str,
    before: &[(&'a str, &'a McpItem)],
    request: &str,
) -> ApiResult<(&'a str, &'a str, &'a str)> {
    let found = before.iter().rev().find(|(id, _)| *id == request).and_then(|(_, item)| match item {
        McpItem::Request { label, name, arguments } => Some((label.as_str(), name.as_str(), arguments.as_str())),
        _ => None,
    });
    found.ok_or_else(|| {
        let message = format!(
            "{param}: no mcp_approval_request before its mcp_approval_response has the id `{}`",
            quote(request)
        );
        ApiError::invalid(param, message)
    })
}

/// Returns the approved calls that are still to be made.
pub(super) fn approved(param: &str, items: &[(&str, &McpItem)]) -> ApiResult<Vec<Approved>> {
    let mut open: Vec<Approved> = Vec::new();
    for (at, (_, item)) in items.iter().enumerate() {
        match item {
            McpItem::Approval { request, approve: true, .. } => {
                let (label, name, arguments) = requested(param, &items[..at], request)?;
                let (label, name, arguments) = (label.into(), name.into(), arguments.into());
                let approved = Approved { request: request.clone(), label, name, arguments };
                if !open.contains(&approved) {
                    open.push(approved);
                }
            }
            McpItem::Call { request: Some(made), .. } => open.retain(|approved| approved.request != *made),
            _ => {}
        }
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_approval_is_for_one_call() {
        let request = McpItem::Request { label: "s".into(), name: "t".into(), arguments: "{}".into() };
        let answer = |approve| McpItem::Approval { request: "r".into(), approve, reason: None };
        let (yes, no) = (answer(true), answer(false));
        let ended = CallEnd::Output("x".into());
        let (label, name) = ("s".to_owned(), "t".to_owned());
        let made = McpItem::Call { label, name, arguments: "{}".into(), ended, request: Some("r".into()) };
        let open = |items: &[(&str, &McpItem)]| approved("input", items).map(|open| open.len());
        assert_eq!(open(&[("r", &request)]).unwrap(), 0);
        assert_eq!(open(&[("r", &request), ("a", &yes)]).unwrap(), 1);
        assert_eq!(open(&[("r", &request), ("a", &yes), ("b", &yes)]).unwrap(), 1);
        assert_eq!(open(&[("r", &request), ("a", &no)]).unwrap(), 0);
        assert_eq!(open(&[("r", &request), ("a", &yes), ("m", &made)]).unwrap(), 0);
        assert!(open(&[("a", &yes), ("r", &request)]).is_err(), "before its request");
        assert!(open(&[("q", &request), ("a", &yes)]).is_err(), "of another request");
    }

    #[test]
    fn words_and_ids_fit_templates() {
        let words = |json: &str| words_of(&RawValue::from_string(json.into()).unwrap());
        assert_eq!(words(r#"{"content":[{"type":"text","text":"no file"}]}"#), "Error: no file");
        assert_eq!(words(r#"{"type":"http_error","code":504,"message":"late"}"#), "Error: late");
        assert_eq!(words(r#""plain""#), "Error: plain");
        assert_eq!(words("7"), "Error: the tool failed");
        assert_eq!((call_id("mcp_0123456789abcdef"), call_id("x"), call_id("éééééé")), ("789abcdef", "x", "éééééé"));
    }
}
