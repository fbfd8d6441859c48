//! Chat's `tools`, `tool_choice` and `parallel_tool_calls`.

use serde_json::value::RawValue;

use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, MAX_NODES, wrong};
use crate::turn::tools::{ToolChoice, ToolList, ToolUse, checked_name, checked_schema, parallel_of};

/// Takes the fields. None without tools, and where the client wants no call: the tools are then kept from the model.
pub(crate) fn take(fields: &mut Fields<'_>) -> ApiResult<Option<ToolUse>> {
    let choice = fields.raw("tool_choice");
    let parallel = parallel_of(fields)?;
    fields.never(&["functions", "function_call"], "use tools")?;
    let list = fields.take_few::<Vec<&RawValue>>("tools", MAX_NODES)?.unwrap_or_default();
    let mut tools = ToolList::of(list.len())?;
    for (i, raw) in list.iter().enumerate() {
        let param = format!("tools[{i}]");
        let name = tool(Fields::of(param.clone(), raw)?)?;
        // For the template, the tool is what the client sent.
        tools.add(&param, name, serde_json::from_str(raw.get()).map_err(|e| wrong(&param, &e))?)?;
    }
    let choice = choice.map(|raw| self::choice(raw, &tools)).transpose()?;
    Ok(tools.used(choice.unwrap_or(Some(ToolChoice::Auto)), parallel))
}

/// Checks one tool and returns its name.
fn tool(mut fields: Fields<'_>) -> ApiResult<String> {
    fields.only("type", &["\"function\""])?;
    let param = fields.param("function");
    let raw = fields.raw("function").ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
    fields.finish()?;
    let mut function = Fields::of(param, raw)?;
    let name = checked_name(&mut function)?;
    function.take::<String>("description")?;
    function.take::<bool>("strict")?;
    checked_schema(&mut function, "parameters")?;
    function.finish()?;
    Ok(name)
}

/// None for no calls.
fn choice(raw: &RawValue, tools: &ToolList) -> ApiResult<Option<ToolChoice>> {
    let param = "tool_choice";
    if raw.get().starts_with('"') {
        let word: String = serde_json::from_str(raw.get()).map_err(|e| wrong(param, &e))?;
        return tools.word(&word);
    }
    let mut fields = Fields::of(param.into(), raw)?;
    fields.only("type", &["\"function\""])?;
    let function = fields.raw("function");
    fields.finish()?;
    let function =
        function.ok_or_else(|| ApiError::invalid("tool_choice.function", "tool_choice.function is missing"))?;
    let mut function = Fields::of("tool_choice.function".into(), function)?;
    let name = function.take::<String>("name")?.unwrap_or_default();
    function.finish()?;
    tools.named("tool_choice.function.name", name).map(Some)
}
