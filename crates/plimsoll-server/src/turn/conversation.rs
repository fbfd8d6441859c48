//! A conversation as a chat template expects it, and the prompt it becomes.

use plimsoll_memory::faults::{self, Site};
use plimsoll_text::TextError;
use serde_json::{Map, Value};

use super::adapt;
use super::tools::ToolUse;
use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// What templates call the switch for thoughts.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];

/// What templates call the measure of thoughts.
const EFFORT: &str = "reasoning_effort";

/// Messages, tools and options, checked and bounded.
pub(crate) struct Conversation {
    /// The field that holds the messages, for errors.
    pub param: &'static str,
    /// In the form that templates know: OpenAI's chat messages, with text as content and objects as arguments.
    pub messages: Value,
    pub tools: Option<ToolUse>,
    pub add_generation_prompt: bool,
    /// Variables of the template.
    pub extra: Map<String, Value>,
    effort_param: &'static str,
}

impl Conversation {
    /// A conversation without a template's own options. `param` is the field that holds it, for errors.
    pub fn new(param: &'static str, messages: Vec<Value>, tools: Option<ToolUse>) -> Self {
        let (messages, effort_param) = (Value::Array(messages), "reasoning_effort");
        Self { param, messages, tools, add_generation_prompt: true, extra: Map::new(), effort_param }
    }

    /// Sets whether the model shall think, where its template can be told.
    pub fn set_thinking(&mut self, on: bool) {
        for name in THINKING {
            self.extra.insert(name.into(), on.into());
        }
    }

    /// Sets how hard the model shall think; `param` is the field that asks for it.
    pub fn set_effort(&mut self, param: &'static str, effort: String) {
        self.effort_param = param;
        self.extra.insert(EFFORT.into(), effort.into());
    }

    /// Whether the client wants no thoughts.
    pub fn thinking_off(&self) -> bool {
        THINKING.iter().any(|name| self.extra.get(*name) == Some(&Value::Bool(false)))
    }

    /// Whether the prompt ends where the assistant begins.
    pub fn ends_open(&self) -> bool {
        self.add_generation_prompt
    }

    /// The prompt. Runs on a text worker.
    pub fn render(&self, app: &App) -> ApiResult<String> {
        let template = app.served.template.as_ref().ok_or_else(|| {
            ApiError::unsupported(self.param, "the served model has no chat template; use /v1/completions")
        })?;
        if self.extra.contains_key(EFFORT) && !template.source().contains(EFFORT) {
            let param = self.effort_param;
            let message = format!("{param} has no effect: the served model's chat template does not know it");
            return Err(ApiError::unsupported(param, message));
        }
        faults::site(Site::Template);
        let tools = self.tools.as_ref().map(|tools| &tools.list);
        let rendered = if template.knows_tools() {
            template.render(&self.messages, tools, self.add_generation_prompt, &self.extra)
        } else {
            let messages = adapt::without_tools(&self.messages, tools);
            template.render(&messages, None, self.add_generation_prompt, &self.extra)
        };
        // A template refuses conversations it cannot express (roles out of order, say): the client's to mend.
        rendered.map_err(|error| match error {
            TextError::Panicked(_) => ApiError::internal(error.to_string()),
            _ => ApiError::invalid(self.param, error.to_string()),
        })
    }

    /// The prompt as ids. Runs on a text worker.
    pub fn tokens(&self, app: &App, add_special: bool) -> ApiResult<Vec<u32>> {
        app.encode(self.param, &self.render(app)?, add_special)
    }
}
