//! Renders messages as a prompt with the chat template from a model's checkpoint.
//!
//! Templates are Jinja2 programs written for Python. The output must equal Python's in every byte: `python`, `operators`, `filters` and
//! `methods` replace the parts of minijinja that differ.
//!
//! A template comes from the model's files, so it is trusted within these limits: its length, its steps, the bytes that it writes, the
//! depth of its recursion. Messages come from clients. A known template takes memory linear in their bytes (`tests/heap.rs`). `tojson` and
//! printed lists write a character as at most 10 bytes. `split` and `list` make a value of each piece. `replace`, `join` and `indent` add
//! text of the template. A number or a format could request any length (`'x' * n`, `'%9d'`); no known template takes one from a message.

mod ending;
mod filters;
mod methods;
mod numbers;
mod operators;
mod output;
mod program;
mod python;
mod time;

use std::collections::BTreeMap;

use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value as Json, json};

pub use ending::Ending;
pub use time::strftime;

use self::output::OutputLimit;
use crate::error::{TextError, shielded};

/// The longest accepted template, in bytes. The longest known templates have 20 KiB.
pub const TEMPLATE_BYTES_MAX: usize = 256 << 10;
/// The longest prompt that a template may produce by default, in bytes.
pub const PROMPT_BYTES_MAX: usize = 8 << 20;

/// Steps that any template may take, and further steps for each value in the input.
const STEPS_BASE: u64 = 200_000;
const STEPS_PER_VALUE: u64 = 2_000;
/// The bytes that a template may write for each allowed byte of its prompt: captured text is written twice.
const WRITTEN_PER_PROMPT_BYTE: usize = 2;
/// The deepest nesting of macro calls and loops.
const RECURSION_MAX: usize = 250;

/// A text that is searched in a prompt.
const MARK: &str = "{plimsoll}";

/// A compiled chat template. It is immutable, so one template serves all threads.
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
    environment: Environment<'static>,
    prompt_bytes_max: usize,
    /// Whether the template reads a message's text only from a list of parts.
    takes_parts: bool,
    /// Whether the tools in its input change its prompts.
    shows_tools: bool,
    /// The template for conversations with tools, if it is another one.
    tool_use: Option<Box<ChatTemplate>>,
}

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are its `bos_token` and `eos_token`.
    ///
    /// # Errors
    ///
    /// [`TextError::BadTemplate`] if the template is longer than [`TEMPLATE_BYTES_MAX`], does not compile, or uses a refused feature.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TextError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(TextError::BadTemplate(format!("{} bytes, the limit is {TEMPLATE_BYTES_MAX}", source.len())));
        }
        let mut template = Self {
            source: program::prepare(source),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            environment: environment(),
            prompt_bytes_max: PROMPT_BYTES_MAX,
            takes_parts: false,
            shows_tools: false,
            tool_use: None,
        };
        shielded(TextError::BadTemplate, || program::compile(&template.source).map(drop))?;
        let parts = json!([{"type": "text", "text": MARK}]);
        template.takes_parts = !template.shows(&MARK.into()) && template.shows(&parts);
        template.shows_tools = template.source.contains("tools") && template.shows_a_tool();
        Ok(template)
    }

    /// Whether a prompt with a tool differs from the prompt without. Some templates read tools from a message and ignore the tools of the
    /// request. True for a template that refuses the conversations of this test.
    fn shows_a_tool(&self) -> bool {
        let parameters = json!({"type": "object", "properties": {}});
        let function = json!({"name": "probe", "description": "A probe.", "parameters": parameters});
        let tools = json!([{"type": "function", "function": function}]);
        let message = |role: &str| json!({"role": role, "content": "x"});
        let prompt = |messages: &Json, tools| self.render(messages, tools, Ending::Open, &Map::new()).ok();
        let conversations = [json!([message("user")]), json!([message("system"), message("user")])];
        let with_tool: Vec<Option<String>> = conversations.iter().map(|all| prompt(all, Some(&tools))).collect();
        let refused = with_tool.iter().all(Option::is_none);
        refused || conversations.iter().zip(with_tool).any(|(all, with)| with.is_some() && with != prompt(all, None))
    }

    /// Whether the prompt for one message with this content contains [`MARK`].
    fn shows(&self, content: &Json) -> bool {
        let messages = json!([{"role": "user", "content": content}]);
        self.render(&messages, None, Ending::Open, &Map::new()).is_ok_and(|prompt| prompt.contains(MARK))
    }

    /// Returns the template with another limit on the length of a prompt, in bytes.
    pub fn with_prompt_bytes_max(mut self, bytes: usize) -> Self {
        self.prompt_bytes_max = bytes;
        self
    }

    /// Returns the template with another template for conversations with tools.
    pub fn with_tool_use(mut self, template: Self) -> Self {
        self.tool_use = Some(Box::new(template));
        self
    }

    /// The template for conversations with tools, or for those without.
    pub fn when(&self, with_tools: bool) -> &Self {
        self.tool_use.as_deref().filter(|_| with_tools).unwrap_or(self)
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template puts tools into the prompt.
    pub fn knows_tools(&self) -> bool {
        self.shows_tools
    }

    /// Renders the prompt for `messages`.
    ///
    /// The template's variables are `messages`, `tools` (none if absent), `documents` (none unless in `extra`), `add_generation_prompt`
    /// (from `ending`), `bos_token`, `eos_token`, and the entries of `extra`, such as `enable_thinking`. A message's text is a list of one
    /// part if the template reads texts only from lists. `extra` cannot replace the other variables.
    ///
    /// # Errors
    ///
    /// [`TextError::Render`] if the template fails, refuses these messages, or does not show the end of the last message's text for
    /// [`Ending::Within`]. [`TextError::TemplateLimit`] if it takes too many steps or writes too much. [`TextError::Panicked`] if its
    /// engine panics.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        ending: Ending,
        extra: &Map<String, Json>,
    ) -> Result<String, TextError> {
        if ending == Ending::Within {
            let prompt = self.render(&ending::marked(messages)?, tools, Ending::Closed, extra)?;
            return ending::cut(prompt);
        }
        let values = [messages].into_iter().chain(tools).chain(extra.values()).map(values_in).sum();
        let mut context: Vec<(&str, Value)> = vec![("documents", Value::from(()))];
        context.extend(extra.iter().map(|(key, value)| (key.as_str(), from_json(value))));
        context.extend([
            ("messages", self.messages(messages)),
            ("tools", tools.map_or(Value::from(()), from_json)),
            ("add_generation_prompt", Value::from(ending == Ending::Open)),
            ("bos_token", Value::from(self.bos.as_str())),
            ("eos_token", Value::from(self.eos.as_str())),
        ]);
        shielded(TextError::Panicked, || self.run(context, values))
    }

    /// Returns the messages in the form that this template reads.
    fn messages(&self, messages: &Json) -> Value {
        let (true, Json::Array(messages)) = (self.takes_parts, messages) else { return from_json(messages) };
        let text = |text: &str| Value::from_pairs([("type", "text"), ("text", text)]);
        let value = |(key, value): (&String, &Json)| match value {
            Json::String(content) if key == "content" => Value::from(vec![text(content)]),
            value => from_json(value),
        };
        let message = |message: &Json| match message {
            Json::Object(entries) => Value::from_pairs(entries.iter().map(|entry| (entry.0.as_str(), value(entry)))),
            other => from_json(other),
        };
        messages.iter().map(message).collect()
    }

    fn run(&self, context: Vec<(&str, Value)>, values: u64) -> Result<String, TextError> {
        let steps = STEPS_BASE + STEPS_PER_VALUE * values;
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        let written_max = self.prompt_bytes_max.saturating_mul(WRITTEN_PER_PROMPT_BYTE);
        let written = OutputLimit::install(&mut environment, written_max);
        let instructions = program::compile(&self.source)?;
        let mut prompt = String::new();
        let mut output = minijinja::machinery::make_string_output(&mut prompt);
        let no_blocks = BTreeMap::new();
        let result = minijinja::machinery::eval(
            &environment,
            &instructions,
            Value::from_pairs(context),
            &no_blocks,
            &mut output,
            AutoEscape::None,
        );
        let limit = |what, limit| Err(TextError::TemplateLimit { what, limit });
        match result {
            Ok(_) if prompt.len() > self.prompt_bytes_max => limit("bytes of prompt", self.prompt_bytes_max as u64),
            Ok(_) => Ok(prompt),
            Err(_) if written.exceeded() => limit("bytes of prompt and captured text", written_max as u64),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => limit("steps", steps),
            Err(error) => Err(TextError::Render(error.to_string())),
        }
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("bytes", &self.source.len())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// The number of values in a JSON value, itself included. The parser bounds the nesting.
fn values_in(value: &Json) -> u64 {
    match value {
        Json::Array(items) => 1 + items.iter().map(values_in).sum::<u64>(),
        Json::Object(entries) => 1 + entries.values().map(values_in).sum::<u64>(),
        _ => 1,
    }
}

/// Returns a JSON value for templates. Maps keep their order.
fn from_json(value: &Json) -> Value {
    match value {
        Json::Null => Value::from(()),
        Json::Bool(bool) => Value::from(*bool),
        Json::Number(number) => numbers::from_json(number),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(from_json).collect(),
        Json::Object(entries) => Value::from_pairs(entries.iter().map(|(key, value)| (key.as_str(), from_json(value)))),
    }
}

/// The environment of templates: the library's filters and functions, replaced by Python's where they differ.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_recursion_limit(RECURSION_MAX);
    operators::install(&mut environment);
    filters::install(&mut environment);
    methods::install(&mut environment);
    time::install(&mut environment);
    environment
}
