//! The tools of a request: checked, bounded, for the template and for reading the calls.

use std::sync::Arc;

use plimsoll_grammar::ToolInput;
use plimsoll_reply::{ToolFormat, Tools};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, wrong};

/// The most tools of one request.
const MAX_TOOLS: usize = 128;

/// The calls that the client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model decides whether to call a tool.
    Auto,
    /// At least one call.
    Required,
    /// Exactly one call, of this tool.
    Named(String),
}

/// A tool with plain-text input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Custom {
    pub name: String,
    /// The grammar that the text must match.
    pub input: Option<ToolInput>,
}

/// Tools that the model may, or must, call.
#[derive(Clone, Debug)]
pub(crate) struct ToolUse {
    /// The list in chat's form, for the template.
    pub list: Value,
    /// The data of the list that the reply parser needs.
    pub known: Arc<Tools>,
    pub choice: ToolChoice,
    /// Whether several calls in one turn are allowed.
    pub parallel: bool,
    /// The tools of the list with plain-text input.
    pub custom: Arc<[Custom]>,
}

impl ToolUse {
    /// Returns whether any tool's arguments must match their schema, or its text a grammar.
    pub fn strict(&self) -> bool {
        !self.custom.is_empty()
            || self.list.as_array().is_some_and(|list| list.iter().any(|tool| tool["function"]["strict"] == true))
    }
}

/// A list of tools during parsing.
#[derive(Debug, Default)]
pub(crate) struct ToolList {
    list: Vec<Value>,
    names: Vec<String>,
    custom: Vec<Custom>,
}

impl ToolList {
    /// An empty list for `count` tools. Refuses too many.
    pub fn of(count: usize) -> ApiResult<Self> {
        if count > MAX_TOOLS {
            let message = format!("{count} tools, more than the limit of {MAX_TOOLS}");
            return Err(ApiError::invalid("tools", message));
        }
        Ok(Self::default())
    }

    /// The names of the tools.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The tools in the form of chat completions.
    pub fn values(&self) -> &[Value] {
        &self.list
    }

    /// Adds a tool in chat's form; `param` is its path in the body.
    pub fn add(&mut self, param: &str, name: String, tool: Value) -> ApiResult<()> {
        if self.names.len() == MAX_TOOLS {
            let message = format!("{param}: more tools than the limit of {MAX_TOOLS}");
            return Err(ApiError::invalid("tools", message));
        }
        if self.names.contains(&name) {
            let message = format!("{param}: there is a tool `{}` already", quote(&name));
            return Err(ApiError::invalid(param, message));
        }
        self.names.push(name);
        self.list.push(tool);
        Ok(())
    }

    /// Adds a tool with plain-text input. `tool` is the function that the model sees.
    pub fn add_custom(&mut self, param: &str, custom: Custom, tool: Value) -> ApiResult<()> {
        self.add(param, custom.name.clone(), tool)?;
        self.custom.push(custom);
        Ok(())
    }

    /// Keeps only the tools of these names.
    fn keep(&mut self, names: &[String]) {
        let kept: Vec<bool> = self.names.iter().map(|name| names.contains(name)).collect();
        let mut flags = kept.iter();
        self.list.retain(|_| flags.next() == Some(&true));
        self.names.retain(|name| names.contains(name));
        self.custom.retain(|custom| names.contains(&custom.name));
    }

    /// Reads a choice among the tools of these names; the model sees no others. `mode_param` is the path of the mode.
    pub fn allow(&mut self, mode_param: &str, mode: &str, names: &[String]) -> ApiResult<Option<ToolChoice>> {
        self.keep(names);
        match mode {
            "auto" | "required" => self.word(mode),
            _ => Err(ApiError::invalid(mode_param, format!("{mode_param} must be auto or required"))),
        }
    }

    /// Reads OpenAI's words for a choice. Returns none if the model may call no tool.
    pub fn word(&self, word: &str) -> ApiResult<Option<ToolChoice>> {
        match word {
            "none" => Ok(None),
            "auto" => Ok(Some(ToolChoice::Auto)),
            "required" => self.required("tool_choice is required").map(Some),
            other => {
                let message =
                    format!("tool_choice is `{}`; known are auto, none, required and a function", quote(other));
                Err(ApiError::invalid("tool_choice", message))
            }
        }
    }

    /// Returns the choice of a call of any tool. `asked` describes the request in the API's words, for the error.
    pub fn required(&self, asked: &str) -> ApiResult<ToolChoice> {
        if self.names.is_empty() {
            return Err(ApiError::invalid("tool_choice", format!("{asked}, but there are no tools")));
        }
        Ok(ToolChoice::Required)
    }

    /// Returns the choice of a call of one tool.
    pub fn named(&self, param: &str, name: String) -> ApiResult<ToolChoice> {
        if !self.names.contains(&name) {
            let message = format!("tool_choice names `{}`, which is not among the tools", quote(&name));
            return Err(ApiError::invalid(param, message));
        }
        Ok(ToolChoice::Named(name))
    }

    /// Returns the tools in use. None without tools, or without a choice: the model then does not see the tools.
    pub fn used(self, choice: Option<ToolChoice>, parallel: bool) -> Option<ToolUse> {
        let choice = choice.filter(|_| !self.list.is_empty())?;
        let list = Value::Array(self.list);
        let known = Arc::new(Tools::from_openai(&list));
        Some(ToolUse { known, list, choice, parallel, custom: self.custom.into() })
    }
}

/// Takes OpenAI's `parallel_tool_calls`.
pub(crate) fn parallel_of(fields: &mut Fields<'_>) -> ApiResult<bool> {
    Ok(fields.take("parallel_tool_calls")?.unwrap_or(true))
}

/// Takes a tool's name.
pub(crate) fn checked_name(tool: &mut Fields<'_>) -> ApiResult<String> {
    let param = tool.param("name");
    let name = tool.take::<String>("name")?.unwrap_or_default();
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    if name.is_empty() || name.len() > 128 || !name.chars().all(legal) {
        let message = format!("{param} must have 1 to 128 letters, digits, or characters of _-.:/");
        return Err(ApiError::invalid(param, message));
    }
    Ok(name)
}

/// Takes the schema of a tool's arguments.
pub(crate) fn checked_schema<'a>(tool: &mut Fields<'a>, name: &str) -> ApiResult<Option<&'a RawValue>> {
    let param = tool.param(name);
    match tool.raw(name) {
        Some(raw) if !raw.get().starts_with('{') => {
            Err(ApiError::invalid(&param, format!("{param} must be a JSON schema")))
        }
        schema => Ok(schema),
    }
}

/// Returns a tool of another API in chat's form, with the members in the order in which chat's clients send them.
pub(crate) fn as_chat_tool(
    param: &str,
    name: &str,
    description: Option<String>,
    schema: Option<&RawValue>,
    strict: Option<bool>,
) -> ApiResult<Value> {
    let mut function = serde_json::Map::new();
    function.insert("name".into(), name.into());
    if let Some(description) = description {
        function.insert("description".into(), description.into());
    }
    if let Some(schema) = schema {
        let schema = serde_json::from_str(schema.get()).map_err(|error| wrong(param, &error))?;
        function.insert("parameters".into(), schema);
    }
    if let Some(strict) = strict {
        function.insert("strict".into(), strict.into());
    }
    Ok(serde_json::json!({"type": "function", "function": function}))
}

/// Returns the format of calls under a grammar: the model's own if its arguments are JSON, else Hermes's.
pub(crate) fn forced_format(format: ToolFormat) -> ToolFormat {
    match format {
        ToolFormat::Hermes
        | ToolFormat::Llama3
        | ToolFormat::Mistral
        | ToolFormat::DeepSeek
        | ToolFormat::Harmony
        | ToolFormat::KimiK2
        | ToolFormat::Nemotron
        | ToolFormat::Granite
        | ToolFormat::Phi4Mini
        | ToolFormat::Hunyuan => format,
        ToolFormat::QwenXml
        | ToolFormat::Glm
        | ToolFormat::FunctionGemma
        | ToolFormat::Gemma4
        | ToolFormat::Lfm2
        | ToolFormat::Olmo3 => ToolFormat::Hermes,
    }
}
