//! MCP servers among a request's `tools`: which server, which of its tools, and which calls need an approval.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::conversation::tools::{ToolList, as_chat_tool};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;
use crate::mcp::{Credentials, Endpoint, McpServers, Tool, ToolSet, check_label};

/// Calls of one response by default, and the largest `max_tool_calls`.
pub(super) const CALLS: u32 = 32;
const CALLS_MAX: u32 = 128;

/// The most names of a filter.
const NAMES_MAX: usize = 256;

/// The most values in the request's headers for a server.
const HEADER_NODES_MAX: usize = 128;

/// One server as a request names it.
#[derive(Debug)]
pub(crate) struct McpTool {
    pub label: String,
    pub endpoint: Arc<Endpoint>,
    allowed: Filter,
    approval: Approval,
    /// The path of the tool in the body.
    param: String,
}

/// Selects tools by name, or by the server's `readOnlyHint`. An empty filter selects all.
#[derive(Debug, Default)]
struct Filter {
    names: Option<Vec<String>>,
    read_only: Option<bool>,
}

/// The calls that need the client's approval.
#[derive(Debug)]
enum Approval {
    Always,
    Never,
    /// Calls that `always` selects. Without `always`, calls that `never` does not select.
    Some {
        always: Option<Filter>,
        never: Option<Filter>,
    },
}

impl Filter {
    fn takes(&self, tool: &Tool) -> bool {
        self.names.as_ref().is_none_or(|names| names.contains(&tool.name))
            && self.read_only.is_none_or(|read_only| read_only == tool.read_only)
    }

    /// Takes a list of names or an object.
    fn of(param: String, raw: &RawValue) -> ApiResult<Self> {
        let names = |raw: &RawValue| {
            crate::http::fields::check_nodes(&param, raw.get(), NAMES_MAX)?;
            serde_json::from_str(raw.get()).map_err(|error| crate::http::fields::wrong(&param, &error))
        };
        if raw.get().starts_with('[') {
            return Ok(Self { names: Some(names(raw)?), read_only: None });
        }
        let mut fields = Fields::of(param.clone(), raw)?;
        let names = fields.raw("tool_names").map(names).transpose()?;
        let read_only = fields.take("read_only")?;
        fields.finish()?;
        Ok(Self { names, read_only })
    }
}

impl Approval {
    fn take(fields: &mut Fields<'_>) -> ApiResult<Self> {
        let param = fields.param("require_approval");
        let Some(raw) = fields.raw("require_approval") else { return Ok(Self::Always) };
        match raw.get() {
            "\"always\"" => return Ok(Self::Always),
            "\"never\"" => return Ok(Self::Never),
            text if text.starts_with('{') => {}
            _ => {
                let message = format!("{param} must be always, never, or an object with filters of these names");
                return Err(ApiError::invalid(param, message));
            }
        }
        let mut inner = Fields::of(param, raw)?;
        let mut filter = |name: &str| {
            let param = inner.param(name);
            inner.raw(name).map(|raw| Filter::of(param, raw)).transpose()
        };
        let (always, never) = (filter("always")?, filter("never")?);
        inner.finish()?;
        Ok(Self::Some { always, never })
    }

    fn needed(&self, tool: &Tool) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Some { always, never } => match (always, never) {
                (Some(always), _) if always.takes(tool) => true,
                (_, Some(never)) => !never.takes(tool),
                (always, None) => always.is_none(),
            },
        }
    }
}

impl McpTool {
    /// Takes the fields of a tool of the type `mcp`.
    pub fn take(param: &str, fields: &mut Fields<'_>, servers: Option<&McpServers>) -> ApiResult<Self> {
        let at = fields.param("server_label");
        let label: String = fields.required("server_label")?;
        check_label(&label).map_err(|why| ApiError::invalid(&at, format!("{at} {why}")))?;
        fields.never(&["connector_id", "tunnel_id"], "this server has no connectors; give server_url")?;
        let url_at = fields.param("server_url");
        let url = fields.take::<String>("server_url")?;
        fields.only("defer_loading", &["false"])?;
        fields.only("allowed_callers", &["[\"direct\"]"])?;
        // Each tool has its own description.
        fields.hints(&["server_description"]);
        let headers = fields.take_few::<BTreeMap<String, String>>("headers", HEADER_NODES_MAX)?.unwrap_or_default();
        let authorization = fields.take::<String>("authorization")?;
        let headers_at = fields.param("headers");
        let credentials = Credentials::new(&headers, authorization.as_deref())
            .map_err(|why| ApiError::invalid(&headers_at, format!("{headers_at}: {why}")))?;
        let allowed_at = fields.param("allowed_tools");
        let allowed = fields.raw("allowed_tools").map(|raw| Filter::of(allowed_at, raw)).transpose()?;
        let approval = Approval::take(fields)?;
        let Some(servers) = servers else {
            let message =
                format!("{param}: this server uses no MCP servers; its operator allows them with --mcp-server");
            return Err(ApiError::unsupported(param, message));
        };
        let server = servers.find(&label, url.as_deref()).ok_or_else(|| {
            let (at, what) = match &url {
                Some(_) => (url_at, "server_url".to_owned()),
                None => (at, format!("server_label `{}`", quote(&label))),
            };
            let message = format!(
                "{at}: this {what} is not one that this server may use; its operator allows servers with --mcp-server (now: {})",
                servers.labels()
            );
            ApiError::unsupported(at, message)
        })?;
        let endpoint = Endpoint::new(server, credentials)
            .ok_or_else(|| ApiError::internal("the address of an MCP server cannot be used"))?;
        let allowed = allowed.unwrap_or_default();
        Ok(Self { label, endpoint: Arc::new(endpoint), allowed, approval, param: param.into() })
    }

    /// Adds the allowed tools to the list for the model.
    pub fn add_to(&self, list: &mut ToolList, tools: &ToolSet) -> ApiResult<()> {
        for tool in tools.tools.iter().filter(|tool| self.allowed.takes(tool)) {
            let name = full_name(&self.label, &tool.name);
            let tool = as_chat_tool(&self.param, &name, tool.description.clone(), Some(&tool.schema), None)?;
            list.add(&self.param, name, tool)?;
        }
        Ok(())
    }

    /// Returns the tool of this name, if it may be called, and whether its calls need an approval.
    pub fn find<'t>(&self, tools: &'t ToolSet, name: &str) -> Option<(&'t Tool, bool)> {
        let tool = tools.tools.iter().find(|tool| tool.name == name && self.allowed.takes(tool))?;
        Some((tool, self.approval.needed(tool)))
    }

    /// Returns whether the server's list shows a tool.
    pub fn shows(&self, tool: &Tool) -> bool {
        self.allowed.takes(tool)
    }

    /// Returns about the heap bytes of this.
    pub fn bytes(&self) -> u64 {
        size_of::<Self>() as u64 + self.label.len() as u64 + self.endpoint.credentials.bytes()
    }
}

/// Returns a tool's name in the prompt, in the form of a function in a namespace.
pub(super) fn full_name(label: &str, name: &str) -> String {
    format!("{label}.{name}")
}

/// Takes `max_tool_calls`.
pub(super) fn max_calls(fields: &mut Fields<'_>) -> ApiResult<Option<u32>> {
    match fields.take::<u32>("max_tool_calls")? {
        Some(calls) if calls > CALLS_MAX => {
            let message = format!("max_tool_calls is {calls}; at most {CALLS_MAX} calls are made for one response");
            Err(ApiError::invalid("max_tool_calls", message))
        }
        calls => Ok(calls),
    }
}

/// Returns a tool for the response: without headers and authorization.
pub(super) fn without_keys(raw: &RawValue) -> ApiResult<Box<RawValue>> {
    let broken = |_| ApiError::internal("a tool cannot be repeated");
    let mut tool: Value = serde_json::from_str(raw.get()).map_err(broken)?;
    if let Some(tool) = tool.as_object_mut() {
        tool.remove("headers");
        tool.remove("authorization");
    }
    serde_json::value::to_raw_value(&tool).map_err(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, read_only: bool) -> Tool {
        let schema = RawValue::from_string("{}".into()).unwrap();
        Tool { name: name.into(), description: None, schema, annotations: None, read_only }
    }

    #[test]
    fn approvals_are_needed_where_the_filters_say_so() {
        let of = |json: &str| {
            let text = format!("{{\"require_approval\":{json}}}");
            Approval::take(&mut Fields::of_body(text.as_bytes()).unwrap()).unwrap()
        };
        let (reads, writes) = (tool("read", true), tool("write", false));
        for (json, expected) in [
            ("null", (true, true)),
            ("\"always\"", (true, true)),
            ("\"never\"", (false, false)),
            (r#"{"never":{"tool_names":["read"]}}"#, (false, true)),
            (r#"{"never":{"read_only":true}}"#, (false, true)),
            (r#"{"always":{"tool_names":["write"]}}"#, (false, true)),
            (r#"{"always":{"read_only":false},"never":{}}"#, (false, true)),
            ("{}", (true, true)),
        ] {
            let approval = of(json);
            assert_eq!((approval.needed(&reads), approval.needed(&writes)), expected, "{json}");
        }
        for bad in ["\"sometimes\"", "1", r#"{"never":{"x":1}}"#] {
            let text = format!("{{\"require_approval\":{bad}}}");
            assert!(Approval::take(&mut Fields::of_body(text.as_bytes()).unwrap()).is_err(), "{bad}");
        }
    }

    #[test]
    fn repeated_tools_hold_no_keys() {
        let raw = RawValue::from_string(r#"{"type":"mcp","headers":{"a":"k"},"authorization":"k2","x":1.0}"#.into());
        let text = without_keys(&raw.unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<Value>(text.get()).unwrap(), serde_json::json!({"type": "mcp", "x": 1.0}));
    }
}
