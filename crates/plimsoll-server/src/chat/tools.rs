//! The tools of a request: checked, bounded, for the template and for reading the calls.

use std::sync::Arc;

use plimsoll_reply::Tools;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{ApiError, ApiResult, quote};
use crate::fields::{Fields, MAX_NODES, check_nodes, wrong};

/// Most tools of one request.
const MAX_TOOLS: usize = 128;

/// Which calls the client wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// As the model decides.
    Auto,
    /// At least one.
    Required,
    /// Exactly one, of this tool.
    Named(String),
}

/// Tools that the model may, or must, call.
#[derive(Clone, Debug)]
pub(crate) struct ToolUse {
    /// The list as it came, for the template.
    pub list: Value,
    /// What reading calls needs of it.
    pub known: Arc<Tools>,
    pub choice: ToolChoice,
    /// More than one call is welcome.
    pub parallel: bool,
}

impl ToolUse {
    /// Takes the fields. None without tools, and where the client wants no call: the tools are then kept from the model.
    pub fn take(fields: &mut Fields<'_>) -> ApiResult<Option<Self>> {
        let raw = fields.raw("tools");
        let choice = fields.raw("tool_choice");
        let parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
        fields.never(&["functions", "function_call"], "use tools")?;
        let list: Vec<&RawValue> = match raw {
            None => Vec::new(),
            Some(raw) => {
                check_nodes("tools", raw, MAX_NODES)?;
                serde_json::from_str(raw.get()).map_err(|e| wrong("tools", &e))?
            }
        };
        if list.len() > MAX_TOOLS {
            let message = format!("{} tools, more than the limit of {MAX_TOOLS}", list.len());
            return Err(ApiError::invalid("tools", message));
        }
        let mut names: Vec<String> = Vec::with_capacity(list.len());
        for (i, raw) in list.iter().enumerate() {
            let param = format!("tools[{i}]");
            let name = tool(Fields::of(param.clone(), raw)?)?;
            if names.contains(&name) {
                let message = format!("{param}: there is a tool `{}` already", quote(&name));
                return Err(ApiError::invalid(param, message));
            }
            names.push(name);
        }
        let choice = choice.map(|raw| self::choice(raw, &names)).transpose()?;
        let choice = choice.unwrap_or(Some(ToolChoice::Auto));
        let (Some(choice), false) = (choice, list.is_empty()) else { return Ok(None) };
        let list = list.iter().map(|raw| serde_json::from_str(raw.get())).collect::<Result<Vec<Value>, _>>();
        let list = Value::Array(list.map_err(|e| wrong("tools", &e))?);
        Ok(Some(Self { known: Arc::new(Tools::from_openai(&list)), list, choice, parallel }))
    }
}

/// Checks one tool and returns its name.
fn tool(mut fields: Fields<'_>) -> ApiResult<String> {
    fields.only("type", &["\"function\""])?;
    let param = fields.param("function");
    let raw = fields.raw("function").ok_or_else(|| ApiError::invalid(&param, format!("{param} is missing")))?;
    fields.finish()?;
    let mut function = Fields::of(param, raw)?;
    let param = function.param("name");
    let name = function.take::<String>("name")?.unwrap_or_default();
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    if name.is_empty() || name.len() > 128 || !name.chars().all(legal) {
        let message = format!("{param} must have 1 to 128 letters, digits, or characters of _-.:/");
        return Err(ApiError::invalid(param, message));
    }
    function.take::<String>("description")?;
    function.take::<bool>("strict")?;
    let param = function.param("parameters");
    if let Some(raw) = function.raw("parameters")
        && !raw.get().starts_with('{')
    {
        return Err(ApiError::invalid(&param, format!("{param} must be a JSON schema")));
    }
    function.finish()?;
    Ok(name)
}

/// None for no calls.
fn choice(raw: &RawValue, names: &[String]) -> ApiResult<Option<ToolChoice>> {
    let param = "tool_choice";
    if raw.get().starts_with('"') {
        let word: String = serde_json::from_str(raw.get()).map_err(|e| wrong(param, &e))?;
        return match word.as_str() {
            "none" => Ok(None),
            "auto" => Ok(Some(ToolChoice::Auto)),
            "required" if names.is_empty() => {
                Err(ApiError::invalid(param, "tool_choice is required, but there are no tools"))
            }
            "required" => Ok(Some(ToolChoice::Required)),
            other => {
                let message =
                    format!("tool_choice is `{}`; known are auto, none, required and a function", quote(other));
                Err(ApiError::invalid(param, message))
            }
        };
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
    if !names.contains(&name) {
        let message = format!("tool_choice names `{}`, which is not among the tools", quote(&name));
        return Err(ApiError::invalid("tool_choice.function.name", message));
    }
    Ok(Some(ToolChoice::Named(name)))
}
