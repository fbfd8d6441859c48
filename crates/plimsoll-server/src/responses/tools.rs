//! The Responses API's `tools`, `tool_choice` and `parallel_tool_calls`.

use serde_json::value::RawValue;

use super::object::{Echo, Namespaced};
use crate::conversation::tools::{
    ToolChoice, ToolList, ToolUse, checked_name, checked_schema, in_chats_form, parallel_of,
};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, MAX_NODES, check_nodes, wrong};

/// Takes the fields, and whether several calls are welcome.
pub(crate) fn take(fields: &mut Fields<'_>, echo: &mut Echo) -> ApiResult<(Option<ToolUse>, bool)> {
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
    for (i, raw) in list.iter().enumerate() {
        tool(&format!("tools[{i}]"), raw, &mut tools, &mut echo.namespaced)?;
    }
    let choice = match choice {
        None => Some(ToolChoice::Auto),
        Some(raw) => {
            echo.tool_choice = Some(raw.to_owned());
            self::choice(raw, &mut tools)?
        }
    };
    Ok((tools.used(choice, parallel), parallel))
}

fn tool(param: &str, raw: &RawValue, tools: &mut ToolList, namespaced: &mut Vec<Namespaced>) -> ApiResult<()> {
    let mut fields = Fields::of(param.into(), raw)?;
    let at = fields.param("type");
    let kind = fields.take::<String>("type")?.unwrap_or_default();
    match kind.as_str() {
        "function" => function(param, fields, None, tools),
        "namespace" => namespace(fields, tools, namespaced),
        // Agents add this tool by themselves: a search without access to the web. This server has nothing to search, so
        // it drops the tool without an error.
        "web_search" if fields.take::<bool>("external_web_access")? == Some(false) => Ok(()),
        _ => {
            let known = "function and namespace";
            let message =
                format!("{at} is `{}`: this server runs no tools of its own; known are {known}", quote(&kind));
            Err(ApiError::unsupported(at, message))
        }
    }
}

/// Takes functions under one name, in front of which it stands.
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
    fields.only("defer_loading", &["false"])?;
    fields.only("async", &["false"])?;
    fields.only("allowed_callers", &["[\"direct\"]"])?;
    fields.never(&["output_schema"], "results are taken as they come")?;
    fields.finish()?;
    tools.add(param, name.clone(), in_chats_form(&at, &name, description, schema, strict)?)
}

/// None for no calls.
fn choice(raw: &RawValue, tools: &mut ToolList) -> ApiResult<Option<ToolChoice>> {
    if raw.get().starts_with('"') {
        let word: String = serde_json::from_str(raw.get()).map_err(|e| wrong("tool_choice", &e))?;
        return tools.word(&word);
    }
    let mut fields = Fields::of("tool_choice".into(), raw)?;
    let kind = fields.take::<String>("type")?.unwrap_or_default();
    match kind.as_str() {
        "function" => {
            let name = fields.take::<String>("name")?.unwrap_or_default();
            fields.finish()?;
            tools.named("tool_choice.name", name).map(Some)
        }
        "allowed_tools" => {
            let mode = fields.take::<String>("mode")?.unwrap_or_default();
            let allowed = fields.take_few::<Vec<&RawValue>>("tools", MAX_NODES)?.unwrap_or_default();
            fields.finish()?;
            let mut names = Vec::with_capacity(allowed.len());
            for (i, raw) in allowed.iter().enumerate() {
                let param = format!("tool_choice.tools[{i}]");
                let mut tool = Fields::of(param.clone(), raw)?;
                tool.only("type", &["\"function\""])?;
                let name = tool.take::<String>("name")?.unwrap_or_default();
                tool.finish()?;
                tools.named(&format!("{param}.name"), name.clone())?;
                names.push(name);
            }
            tools.allow("tool_choice.mode", &mode, &names)
        }
        other => {
            let message = format!("tool_choice.type is `{}`; known are function and allowed_tools", quote(other));
            Err(ApiError::unsupported("tool_choice.type", message))
        }
    }
}
