//! Chat's `tools`, `tool_choice` and `parallel_tool_calls`.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::conversation::custom;
use crate::conversation::tools::{Custom, ToolChoice, ToolList, ToolUse, checked_name, checked_schema, parallel_of};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, MAX_NODES, cache_control, wrong};

/// Takes the fields. Returns none without tools, or if the client allows no call: the model then does not see the tools.
pub(crate) fn take(fields: &mut Fields<'_>) -> ApiResult<Option<ToolUse>> {
    let choice = fields.raw("tool_choice");
    let parallel = parallel_of(fields)?;
    fields.never(&["functions", "function_call"], "use tools")?;
    let list = fields.take_few::<Vec<&RawValue>>("tools", MAX_NODES)?.unwrap_or_default();
    let mut tools = ToolList::of(list.len())?;
    for (i, raw) in list.iter().enumerate() {
        let param = format!("tools[{i}]");
        let mut fields = Fields::of(param.clone(), raw)?;
        if fields.is_word("type", "custom") {
            let (custom, function) = custom(&mut fields)?;
            cache_control(&mut fields)?;
            fields.finish()?;
            tools.add_custom(&param, custom, function)?;
            continue;
        }
        let name = tool(fields)?;
        // The template gets the tool as the client sent it, but without cache marks.
        let mut sent: Map<String, Value> = serde_json::from_str(raw.get()).map_err(|e| wrong(&param, &e))?;
        unmark(&mut sent);
        sent.get_mut("function").and_then(Value::as_object_mut).map(unmark);
        tools.add(&param, name, sent.into())?;
    }
    let choice = choice.map(|raw| self::choice(raw, &mut tools)).transpose()?;
    Ok(tools.used(choice.unwrap_or(Some(ToolChoice::Auto)), parallel))
}

/// Removes a cache mark. The other fields keep their order.
fn unmark(sent: &mut Map<String, Value>) {
    sent.retain(|name, _| name != "cache_control");
}

/// Checks one tool and returns its name.
fn tool(mut fields: Fields<'_>) -> ApiResult<String> {
    fields.only("type", &["\"function\"", "\"custom\""])?;
    let (param, raw) = fields.needed("function")?;
    cache_control(&mut fields)?;
    fields.finish()?;
    let mut function = Fields::of(param, raw)?;
    let name = checked_name(&mut function)?;
    function.take::<String>("description")?;
    function.take::<bool>("strict")?;
    checked_schema(&mut function, "parameters")?;
    // Some clients put the mark here.
    cache_control(&mut function)?;
    function.finish()?;
    Ok(name)
}

/// Takes a tool with plain-text input, and makes a function of it.
fn custom(fields: &mut Fields<'_>) -> ApiResult<(Custom, Value)> {
    fields.raw("type");
    let (param, raw) = fields.needed("custom")?;
    let mut inner = Fields::of(param, raw)?;
    let taken = custom::take(&mut inner, true)?;
    inner.finish()?;
    Ok(taken)
}

/// Reads the tool choice. Returns none if the model may call no tool.
fn choice(raw: &RawValue, tools: &mut ToolList) -> ApiResult<Option<ToolChoice>> {
    let param = "tool_choice";
    if raw.get().starts_with('"') {
        let word: String = serde_json::from_str(raw.get()).map_err(|e| wrong(param, &e))?;
        return tools.word(&word);
    }
    let mut fields = Fields::of(param.into(), raw)?;
    // The default type is `function`.
    let kind = fields.take::<String>("type")?.unwrap_or_else(|| "function".into());
    if kind == "allowed_tools" {
        let raw = fields.raw("allowed_tools");
        fields.finish()?;
        return allowed(raw, tools);
    }
    if kind != "function" && kind != "custom" {
        let message = format!("tool_choice.type is `{}`; known are function, custom and allowed_tools", quote(&kind));
        return Err(ApiError::unsupported("tool_choice.type", message));
    }
    let name = tool_name(fields, &kind)?;
    tools.named(&format!("tool_choice.{kind}.name"), name).map(Some)
}

/// Reads a choice among some of the tools, with an optional or a required call.
fn allowed(raw: Option<&RawValue>, tools: &mut ToolList) -> ApiResult<Option<ToolChoice>> {
    let param = "tool_choice.allowed_tools";
    let raw = raw.ok_or_else(|| ApiError::invalid(param, format!("{param} is missing")))?;
    let mut fields = Fields::of(param.into(), raw)?;
    let mode = fields.take::<String>("mode")?.unwrap_or_default();
    let listed = fields.take_few::<Vec<&RawValue>>("tools", MAX_NODES)?.unwrap_or_default();
    fields.finish()?;
    let mut names = Vec::with_capacity(listed.len());
    for (i, raw) in listed.iter().enumerate() {
        let param = format!("{param}.tools[{i}]");
        let mut tool = Fields::of(param.clone(), raw)?;
        let kind = if tool.is_word("type", "custom") { "custom" } else { "function" };
        tool.only("type", &["\"function\"", "\"custom\""])?;
        let name = tool_name(tool, kind)?;
        tools.named(&format!("{param}.{kind}.name"), name.clone())?;
        names.push(name);
    }
    tools.allow("tool_choice.allowed_tools.mode", &mode, &names)
}

/// Returns the name in `function` or `custom`, the only field that is left.
fn tool_name(mut fields: Fields<'_>, kind: &str) -> ApiResult<String> {
    let param = fields.param(kind);
    let function = fields.raw(kind);
    fields.finish()?;
    let function = function.ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
    let mut function = Fields::of(param, function)?;
    let name = function.take::<String>("name")?.unwrap_or_default();
    function.finish()?;
    Ok(name)
}
