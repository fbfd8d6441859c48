//! The Responses API's `tools`, `tool_choice` and `parallel_tool_calls`.

use serde_json::value::RawValue;

use super::mcp_tools::{McpTool, full_name, without_keys};
use super::object::{Echo, Namespaced};
use crate::conversation::custom;
use crate::conversation::prompt::value_bytes;
use crate::conversation::tools::{
    ToolChoice, ToolList, ToolUse, as_chat_tool, checked_name, checked_schema, parallel_of,
};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, MAX_NODES, check_nodes, wrong};
use crate::mcp::McpServers;

/// The parsed fields.
pub(crate) struct Taken {
    /// None without tools, and until the MCP servers have listed theirs.
    pub tools: Option<ToolUse>,
    /// Whether several calls in one turn are allowed.
    pub parallel: bool,
    pub mcp: Option<McpAsked>,
}

/// Tools of the request, and MCP servers whose tools must still be listed.
#[derive(Debug)]
pub(crate) struct McpAsked {
    pub(super) servers: Vec<McpTool>,
    /// The other tools.
    pub(super) list: ToolList,
    choice: Option<Box<RawValue>>,
    parallel: bool,
}

impl McpAsked {
    /// Returns the tools in use. The list must contain the servers' tools by now.
    pub(super) fn used(mut self) -> ApiResult<Option<ToolUse>> {
        let choice = match &self.choice {
            None => Some(ToolChoice::Auto),
            Some(raw) => choice(raw, &mut self.list)?,
        };
        Ok(self.list.used(choice, self.parallel))
    }

    /// Returns about the heap bytes of this.
    pub fn bytes(&self) -> u64 {
        let choice = self.choice.as_ref().map_or(0, |raw| raw.get().len());
        choice as u64
            + self.servers.iter().map(McpTool::bytes).sum::<u64>()
            + self.list.values().iter().map(value_bytes).sum::<u64>()
    }
}

/// Takes the fields.
pub(crate) fn take(fields: &mut Fields<'_>, echo: &mut Echo, known: Option<&McpServers>) -> ApiResult<Taken> {
    let choice = fields.raw("tool_choice");
    let parallel = parallel_of(fields)?;
    let list: Vec<&RawValue> = match fields.raw("tools") {
        None => Vec::new(),
        Some(raw) => {
            check_nodes("tools", raw.get(), MAX_NODES)?;
            echo.tools = Some(raw.to_owned());
            serde_json::from_str(raw.get()).map_err(|e| wrong("tools", &e))?
        }
    };
    let mut tools = ToolList::of(list.len())?;
    let (mut servers, mut repeated): (Vec<McpTool>, Vec<Box<RawValue>>) = (Vec::new(), Vec::new());
    for (i, raw) in list.iter().enumerate() {
        let param = format!("tools[{i}]");
        let mut fields = Fields::of(param.clone(), raw)?;
        if !fields.is_word("type", "mcp") {
            tool(&param, fields, &mut tools, &mut echo.namespaced)?;
            repeated.push((*raw).to_owned());
            continue;
        }
        fields.raw("type");
        let server = McpTool::take(&param, &mut fields, known)?;
        fields.finish()?;
        if servers.iter().any(|other| other.label == server.label) {
            let message = format!("{param}: there is an MCP server `{}` already", quote(&server.label));
            return Err(ApiError::invalid(format!("{param}.server_label"), message));
        }
        servers.push(server);
        repeated.push(without_keys(raw)?);
    }
    if let Some(choice) = choice {
        echo.tool_choice = Some(choice.to_owned());
    }
    if !servers.is_empty() {
        let broken = |_| ApiError::internal("the tools cannot be repeated");
        echo.tools = Some(serde_json::value::to_raw_value(&repeated).map_err(broken)?);
        let asked = McpAsked { servers, list: tools, choice: choice.map(RawValue::to_owned), parallel };
        return Ok(Taken { tools: None, parallel, mcp: Some(asked) });
    }
    let choice = match choice {
        None => Some(ToolChoice::Auto),
        Some(raw) => self::choice(raw, &mut tools)?,
    };
    Ok(Taken { tools: tools.used(choice, parallel), parallel, mcp: None })
}

fn tool(param: &str, mut fields: Fields<'_>, tools: &mut ToolList, namespaced: &mut Vec<Namespaced>) -> ApiResult<()> {
    let at = fields.param("type");
    let kind = fields.take::<String>("type")?.unwrap_or_default();
    match kind.as_str() {
        "function" => function(param, fields, None, tools),
        "custom" => {
            let (custom, function) = custom::take(&mut fields, false)?;
            direct_only(&mut fields)?;
            fields.finish()?;
            tools.add_custom(param, custom, function)
        }
        "namespace" => namespace(fields, tools, namespaced),
        // Agents add this tool by themselves: a search without access to the web. This server has nothing to search, so it drops the tool
        // without an error.
        "web_search" if fields.take::<bool>("external_web_access")? == Some(false) => Ok(()),
        _ => {
            let known = "function, custom, mcp and namespace";
            let message =
                format!("{at} is `{}`: this server runs no tools of its own; known are {known}", quote(&kind));
            Err(ApiError::unsupported(at, message))
        }
    }
}

/// Takes the functions of a namespace. The model sees the namespace's name in front of theirs.
fn namespace(mut fields: Fields<'_>, tools: &mut ToolList, namespaced: &mut Vec<Namespaced>) -> ApiResult<()> {
    let namespace = checked_name(&mut fields)?;
    let at = fields.param("tools");
    // Each function describes itself.
    fields.take::<String>("description")?;
    let list: Vec<&RawValue> = fields.take_few("tools", MAX_NODES)?.unwrap_or_default();
    fields.finish()?;
    for (i, raw) in list.iter().enumerate() {
        let param = format!("{at}[{i}]");
        let mut fields = Fields::of(param.clone(), raw)?;
        fields.only("type", &["\"function\""])?;
        function(&param, fields, Some((&namespace, namespaced)), tools)?;
    }
    Ok(())
}

fn function(
    param: &str,
    mut fields: Fields<'_>,
    within: Option<(&str, &mut Vec<Namespaced>)>,
    tools: &mut ToolList,
) -> ApiResult<()> {
    let mut name = checked_name(&mut fields)?;
    if let Some((namespace, all)) = within {
        let of = Namespaced::new(namespace, &name);
        name = of.full().into();
        all.push(of);
    }
    let description = fields.take("description")?;
    let strict = fields.take("strict")?;
    let at = fields.param("parameters");
    let schema = checked_schema(&mut fields, "parameters")?;
    direct_only(&mut fields)?;
    fields.never(&["output_schema"], "results are taken as they come")?;
    fields.finish()?;
    tools.add(param, name.clone(), as_chat_tool(&at, &name, description, schema, strict)?)
}

/// Takes the fields for tools that a program may call; this server has no such programs.
fn direct_only(fields: &mut Fields<'_>) -> ApiResult<()> {
    fields.only("defer_loading", &["false"])?;
    fields.only("async", &["false"])?;
    fields.only("allowed_callers", &["[\"direct\"]"])
}

/// Reads the tool choice. Returns none if the model may call no tool.
fn choice(raw: &RawValue, tools: &mut ToolList) -> ApiResult<Option<ToolChoice>> {
    if raw.get().starts_with('"') {
        let word: String = serde_json::from_str(raw.get()).map_err(|e| wrong("tool_choice", &e))?;
        return tools.word(&word);
    }
    let mut fields = Fields::of("tool_choice".into(), raw)?;
    let kind = fields.take::<String>("type")?.unwrap_or_default();
    match kind.as_str() {
        "function" | "custom" => {
            let name = fields.take::<String>("name")?.unwrap_or_default();
            fields.finish()?;
            tools.named("tool_choice.name", name).map(Some)
        }
        "mcp" => {
            let (label, name) = (fields.required::<String>("server_label")?, fields.take::<String>("name")?);
            fields.finish()?;
            match name {
                Some(name) => tools.named("tool_choice.name", full_name(&label, &name)).map(Some),
                None => {
                    let names = of_server(tools, "tool_choice.server_label", &label)?;
                    tools.allow("tool_choice", "required", &names)
                }
            }
        }
        "allowed_tools" => {
            let mode = fields.take::<String>("mode")?.unwrap_or_default();
            let allowed = fields.take_few::<Vec<&RawValue>>("tools", MAX_NODES)?.unwrap_or_default();
            fields.finish()?;
            let mut names = Vec::with_capacity(allowed.len());
            for (i, raw) in allowed.iter().enumerate() {
                let param = format!("tool_choice.tools[{i}]");
                let mut tool = Fields::of(param.clone(), raw)?;
                if tool.is_word("type", "mcp") {
                    tool.raw("type");
                    let at = tool.param("server_label");
                    let (label, name) = (tool.required::<String>("server_label")?, tool.take::<String>("name")?);
                    tool.finish()?;
                    match name {
                        Some(name) => names.push(full_name(&label, &name)),
                        None => names.extend(of_server(tools, &at, &label)?),
                    }
                    continue;
                }
                tool.only("type", &["\"function\"", "\"custom\""])?;
                let name = tool.take::<String>("name")?.unwrap_or_default();
                tool.finish()?;
                tools.named(&format!("{param}.name"), name.clone())?;
                names.push(name);
            }
            tools.allow("tool_choice.mode", &mode, &names)
        }
        other => {
            let message =
                format!("tool_choice.type is `{}`; known are function, custom, mcp and allowed_tools", quote(other));
            Err(ApiError::unsupported("tool_choice.type", message))
        }
    }
}

/// Returns the names of an MCP server's tools, as the model sees them.
fn of_server(tools: &ToolList, param: &str, label: &str) -> ApiResult<Vec<String>> {
    let begins = full_name(label, "");
    let names: Vec<String> = tools.names().iter().filter(|name| name.starts_with(&begins)).cloned().collect();
    if names.is_empty() {
        let message = format!("{param} is `{}`; no MCP server in tools has this label and a tool", quote(label));
        return Err(ApiError::invalid(param, message));
    }
    Ok(names)
}
