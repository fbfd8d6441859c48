//! The response object: the request's fields, repeated; the answer, as items; and the way it ended.

use serde::Serialize;
use serde_json::value::RawValue;

use super::mcp_object::{CallError, ListedTool, McpCall};
use crate::conversation::active::Usage;
use crate::conversation::logprobs::ChatToken;
use crate::http::error::ApiError;

/// The request's fields that the object repeats.
#[derive(Debug, Default)]
pub(crate) struct Echo {
    pub background: bool,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub max_tool_calls: Option<u32>,
    pub metadata: Option<Box<RawValue>>,
    /// Functions that have a namespace.
    pub namespaced: Vec<Namespaced>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub prompt_cache_key: Option<String>,
    pub effort: Option<String>,
    /// Whether `truncation` is `auto`.
    pub drops_oldest: bool,
    pub safety_identifier: Option<String>,
    pub store: bool,
    pub temperature: f32,
    pub text: Option<Box<RawValue>>,
    pub tool_choice: Option<Box<RawValue>>,
    pub tools: Option<Box<RawValue>>,
    pub top_logprobs: u32,
    pub top_p: f32,
    pub user: Option<String>,
}

impl Echo {
    /// Returns the heap bytes of the fields.
    pub fn bytes(&self) -> u64 {
        let raw = [&self.metadata, &self.text, &self.tool_choice, &self.tools];
        let raw = raw.into_iter().flatten().map(|raw| raw.get().len());
        let texts = [
            &self.instructions,
            &self.previous_response_id,
            &self.prompt_cache_key,
            &self.safety_identifier,
            &self.user,
        ];
        let texts = texts.into_iter().flatten().map(String::len);
        let namespaced = self.namespaced.iter().map(|of| of.full.len() + size_of::<Namespaced>());
        (raw.sum::<usize>() + texts.sum::<usize>() + namespaced.sum::<usize>()) as u64
    }

    /// Returns a function's namespace, if it has one, and its own name.
    pub fn apart(&self, name: String) -> (Option<String>, String) {
        match self.namespaced.iter().find(|of| of.full == name) {
            Some(of) => (Some(name[..of.namespace].into()), name[of.namespace + 1..].into()),
            None => (None, name),
        }
    }
}

/// A function in a namespace under its name in the prompt: both names with a dot between them.
#[derive(Debug)]
pub(crate) struct Namespaced {
    full: String,
    /// Bytes of the namespace's name.
    namespace: usize,
}

impl Namespaced {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { full: format!("{namespace}.{name}"), namespace: namespace.len() }
    }

    pub fn full(&self) -> &str {
        &self.full
    }
}

/// The progress of a response or of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Queued,
    InProgress,
    Completed,
    Incomplete,
    Failed,
    Cancelled,
}

/// An item of the answer.
#[derive(Debug)]
pub(crate) struct Output {
    pub id: String,
    pub status: Status,
    pub what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    Reasoning {
        text: String,
    },
    Text {
        text: String,
        logprobs: Vec<ChatToken>,
    },
    Call {
        call_id: String,
        namespace: Option<String>,
        name: String,
        arguments: String,
    },
    Custom {
        call_id: String,
        name: String,
        input: String,
    },
    /// The tools of an MCP server; empty until the server has answered.
    McpTools {
        label: String,
        tools: Vec<ListedTool>,
        error: Option<String>,
    },
    McpCall(McpCall),
    /// A call that waits for the client's approval. It is shown when its arguments are complete.
    McpRequest {
        label: String,
        name: String,
        arguments: String,
    },
}

/// An item in the form of the API.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Shown<'a> {
    Reasoning {
        id: &'a str,
        summary: [(); 0],
        content: Vec<Part<'a>>,
        status: Status,
    },
    Message {
        id: &'a str,
        role: &'static str,
        status: Status,
        content: Vec<Part<'a>>,
    },
    FunctionCall {
        id: &'a str,
        call_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        name: &'a str,
        arguments: &'a str,
        status: Status,
    },
    CustomToolCall {
        id: &'a str,
        call_id: &'a str,
        name: &'a str,
        input: &'a str,
        status: Status,
    },
    McpListTools {
        id: &'a str,
        server_label: &'a str,
        tools: &'a [ListedTool],
        error: Option<&'a str>,
    },
    McpCall {
        id: &'a str,
        approval_request_id: Option<&'a str>,
        server_label: &'a str,
        name: &'a str,
        arguments: &'a str,
        output: Option<&'a str>,
        error: Option<&'a CallError>,
        status: Status,
    },
    McpApprovalRequest {
        id: &'a str,
        server_label: &'a str,
        name: &'a str,
        arguments: &'a str,
    },
}

/// A part of an item.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::enum_variant_names)] // OpenAI's names
pub(crate) enum Part<'a> {
    ReasoningText { text: &'a str },
    OutputText { text: &'a str, annotations: [(); 0], logprobs: &'a [ChatToken] },
}

impl Output {
    /// Returns the item's one part, if it has parts.
    pub fn part(&self) -> Option<Part<'_>> {
        match &self.what {
            What::Reasoning { text } => Some(Part::ReasoningText { text }),
            What::Text { text, logprobs } => Some(Part::OutputText { text, annotations: [], logprobs }),
            _ => None,
        }
    }

    /// Returns the item in the form of the API; without its part if it has only begun.
    pub fn shown(&self, begun: bool) -> Shown<'_> {
        let (id, status) = (self.id.as_str(), self.status);
        let content = self.part().filter(|_| !begun).into_iter().collect();
        match &self.what {
            What::Reasoning { .. } => Shown::Reasoning { id, summary: [], content, status },
            What::Text { .. } => Shown::Message { id, role: "assistant", status, content },
            What::Call { call_id, namespace, name, arguments } => {
                Shown::FunctionCall { id, call_id, namespace: namespace.as_deref(), name, arguments, status }
            }
            What::Custom { call_id, name, input } => Shown::CustomToolCall { id, call_id, name, input, status },
            What::McpTools { label, tools, error } => {
                Shown::McpListTools { id, server_label: label, tools, error: error.as_deref() }
            }
            What::McpCall(McpCall { label, name, arguments, result, request, .. }) => Shown::McpCall {
                id,
                approval_request_id: request.as_deref(),
                server_label: label,
                name,
                arguments,
                output: result.as_ref().and_then(|result| result.as_ref().ok()).map(String::as_str),
                error: result.as_ref().and_then(|result| result.as_ref().err()),
                status,
            },
            What::McpRequest { label, name, arguments } => {
                Shown::McpApprovalRequest { id, server_label: label, name, arguments }
            }
        }
    }
}

/// The response object.
#[derive(Serialize)]
pub(crate) struct Object<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created_at: u64,
    pub completed_at: Option<u64>,
    pub status: Status,
    pub background: bool,
    pub error: Option<Failure<'a>>,
    pub incomplete_details: Option<Reason>,
    pub instructions: Option<&'a str>,
    pub max_output_tokens: Option<u32>,
    pub max_tool_calls: Option<u32>,
    pub metadata: Raw<'a>,
    pub model: &'a str,
    pub output: Vec<Shown<'a>>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<&'a str>,
    pub prompt_cache_key: Option<&'a str>,
    pub reasoning: Reasoning<'a>,
    pub safety_identifier: Option<&'a str>,
    pub service_tier: &'static str,
    pub store: bool,
    pub temperature: f32,
    pub text: Raw<'a>,
    pub tool_choice: Raw<'a>,
    pub tools: Raw<'a>,
    pub top_logprobs: u32,
    pub top_p: f32,
    pub truncation: &'static str,
    pub usage: Option<Counts>,
    pub user: Option<&'a str>,
}

/// A field as the client sent it, or a value that stands for it.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Raw<'a> {
    Sent(&'a RawValue),
    Word(&'static str),
    None([(); 0]),
    Empty {},
    PlainText { format: PlainText },
}

#[derive(Serialize)]
pub(crate) struct PlainText {
    #[serde(rename = "type")]
    kind: &'static str,
}

impl<'a> Raw<'a> {
    fn of(sent: Option<&'a RawValue>, otherwise: Self) -> Self {
        sent.map_or(otherwise, Self::Sent)
    }
}

#[derive(Serialize)]
pub(crate) struct Reasoning<'a> {
    effort: Option<&'a str>,
    summary: Option<&'a str>,
}

#[derive(Serialize)]
pub(crate) struct Reason {
    pub reason: &'static str,
}

/// The reason why a response failed.
#[derive(Serialize)]
pub(crate) struct Failure<'a> {
    code: &'static str,
    message: &'a str,
}

impl<'a> Failure<'a> {
    pub fn of(error: &'a ApiError) -> Self {
        Self { code: "server_error", message: &error.message }
    }
}

/// The Responses API's token counts.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Counts {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

#[derive(Clone, Copy, Serialize)]
struct InputDetails {
    cached_tokens: u64,
    cache_write_tokens: u64,
}

#[derive(Clone, Copy, Serialize)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl Counts {
    pub fn of(usage: Usage, reasoning_tokens: u64) -> Self {
        let cached_tokens = usage.prompt_tokens_details.cached_tokens;
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens, cache_write_tokens: 0 },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens },
            total_tokens: usage.total_tokens,
        }
    }
}

impl<'a> Object<'a> {
    /// The object of a response that has only begun.
    pub fn begun(id: &'a str, created_at: u64, model: &'a str, echo: &'a Echo) -> Self {
        Self {
            id,
            object: "response",
            created_at,
            completed_at: None,
            status: Status::InProgress,
            background: echo.background,
            error: None,
            incomplete_details: None,
            instructions: echo.instructions.as_deref(),
            max_output_tokens: echo.max_output_tokens,
            max_tool_calls: echo.max_tool_calls,
            metadata: Raw::of(echo.metadata.as_deref(), Raw::Empty {}),
            model,
            output: Vec::new(),
            parallel_tool_calls: echo.parallel_tool_calls,
            previous_response_id: echo.previous_response_id.as_deref(),
            prompt_cache_key: echo.prompt_cache_key.as_deref(),
            reasoning: Reasoning { effort: echo.effort.as_deref(), summary: None },
            safety_identifier: echo.safety_identifier.as_deref(),
            service_tier: "default",
            store: echo.store,
            temperature: echo.temperature,
            text: Raw::of(echo.text.as_deref(), Raw::PlainText { format: PlainText { kind: "text" } }),
            tool_choice: Raw::of(echo.tool_choice.as_deref(), Raw::Word("auto")),
            tools: Raw::of(echo.tools.as_deref(), Raw::None([])),
            top_logprobs: echo.top_logprobs,
            top_p: echo.top_p,
            truncation: if echo.drops_oldest { "auto" } else { "disabled" },
            usage: None,
            user: echo.user.as_deref(),
        }
    }
}
