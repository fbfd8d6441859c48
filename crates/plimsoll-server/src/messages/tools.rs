//! Anthropic's `tools` and `tool_choice`.

use serde_json::value::RawValue;

use crate::conversation::cache_control::Marks;
use crate::conversation::tools::{ToolChoice, ToolList, ToolUse, as_chat_tool, checked_name, checked_schema};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, MAX_NODES, cache_control};

/// Takes the fields, and the cache marks of the tools.
pub(crate) fn take(fields: &mut Fields<'_>) -> ApiResult<(Option<ToolUse>, Marks)> {
    let choice = fields.raw("tool_choice");
    let list = fields.take_few::<Vec<&RawValue>>("tools", MAX_NODES)?.unwrap_or_default();
    let mut tools = ToolList::of(list.len())?;
    let mut marks = Marks::default();
    for (i, raw) in list.iter().enumerate() {
        let param = format!("tools[{i}]");
        // Templates write a tool in their own form, so its text is not searched for in the prompt.
        marks.add(tool(&param, raw, &mut tools)?, "");
    }
    let (choice, parallel) = match choice {
        None => (Some(ToolChoice::Auto), true),
        Some(raw) => self::choice(raw, &tools)?,
    };
    Ok((tools.used(choice, parallel), marks))
}

fn tool(param: &str, raw: &RawValue, tools: &mut ToolList) -> ApiResult<Option<u32>> {
    let mut fields = Fields::of(param.into(), raw)?;
    let kind = fields.take::<String>("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let at = fields.param("type");
        let message = format!("{at} is `{}`: this server runs no tools of its own; only custom ones", quote(&kind));
        return Err(ApiError::unsupported(at, message));
    }
    let name = checked_name(&mut fields)?;
    let description = fields.take("description")?;
    let strict = fields.take("strict")?;
    let caches = cache_control(&mut fields)?;
    // Arguments are always streamed as the model writes them.
    fields.only("eager_input_streaming", &["true"])?;
    fields.only("defer_loading", &["false"])?;
    fields.only("allowed_callers", &["[\"direct\"]"])?;
    fields.only("input_examples", &["[]"])?;
    let at = fields.param("input_schema");
    let schema = checked_schema(&mut fields, "input_schema")?;
    let schema = schema.ok_or_else(|| ApiError::invalid(&at, format!("{at} is missing")))?;
    fields.finish()?;
    tools.add(param, name.clone(), as_chat_tool(&at, &name, description, Some(schema), strict)?)?;
    Ok(caches)
}

/// Returns the choice, none for no calls, and whether several calls are allowed.
fn choice(raw: &RawValue, tools: &ToolList) -> ApiResult<(Option<ToolChoice>, bool)> {
    let mut fields = Fields::of("tool_choice".into(), raw)?;
    let kind = fields.required::<String>("type")?;
    let choice = match kind.as_str() {
        "none" => {
            fields.finish()?;
            return Ok((None, true));
        }
        "auto" => ToolChoice::Auto,
        "any" => tools.required("tool_choice is any")?,
        "tool" => tools.named("tool_choice.name", fields.required("name")?)?,
        other => {
            let message = format!("tool_choice.type is `{}`; known are auto, any, tool and none", quote(other));
            return Err(ApiError::invalid("tool_choice.type", message));
        }
    };
    let parallel = !fields.take("disable_parallel_tool_use")?.unwrap_or(false);
    fields.finish()?;
    Ok((Some(choice), parallel))
}
