//! The body of a request to the Responses API, field by field.

use std::collections::BTreeMap;
use std::sync::Arc;

use plimsoll_grammar::Source;

use super::items::{self, Item, Shown};
use super::mcp_run::McpRun;
use super::object::Echo;
use super::references::Stored;
use super::tools::McpAsked;
use super::{mcp_items, mcp_tools};
use super::{prompt, references, tools};
use crate::conversation::ChatRequest;
use crate::conversation::cache_control::Marks;
use crate::conversation::output_format::{OutputFormat, text_format};
use crate::conversation::params::{Common, METADATA_NODES_MAX, model_name, top_logprobs};
use crate::conversation::prompt::Conversation;
use crate::conversation::submission::Submission;
use crate::http::body::{PARSED_FACTOR, ReadBody};
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, check_nodes};
use crate::media::MediaParser;
use crate::state::model::ModelState;
use crate::state::response_store::ResponseStore;

/// A parsed body.
pub(crate) struct ParsedBody {
    pub request: ChatRequest,
    held: Held,
    /// The fields that the answer repeats.
    echo: Echo,
    items: Input,
    /// MCP servers that are asked before the first turn of the model.
    mcp: Option<McpAsked>,
    /// Whether the response is made without a connection.
    pub background: bool,
}

/// The input items; empty if the response is not stored and uses no MCP server.
struct Input {
    all: Vec<Item>,
    stored: bool,
}

impl ParsedBody {
    /// Renders and tokenizes the prompt. Also returns the fields to repeat and the input to store.
    pub async fn prepare(self, state: &Arc<ModelState>) -> ApiResult<(Submission, Echo, Option<Arc<str>>)> {
        let Self { request, held, echo, items, .. } = self;
        let kept = move || {
            // Items are written only if the prompt fits, since their text takes as many bytes again.
            let items: Option<Arc<str>> = items.stored.then(|| items::written(&items.all).into());
            let bytes = ECHO_COPIES * echo.bytes() + items.as_ref().map_or(0, |text| text.len() as u64);
            (bytes, (echo, items))
        };
        let (submission, (echo, items)) = request.prepare_on_worker_with(state, held, kept).await?;
        Ok((submission, echo, items))
    }
}

/// A response that waits for MCP servers before its first turn.
pub(crate) struct Waiting {
    pub submission: Submission,
    pub echo: Echo,
    /// The input to store.
    pub items: Option<Arc<str>>,
    pub run: McpRun,
}

impl ParsedBody {
    /// Returns whether MCP servers are asked before the first turn of the model.
    pub fn waits(&self) -> bool {
        self.mcp.is_some()
    }

    /// Checks all that can be checked before the servers answer.
    pub async fn wait(self, state: &Arc<ModelState>) -> ApiResult<Waiting> {
        let Self { request, mut held, echo, items, mcp, background: _ } = self;
        let asked = mcp.ok_or_else(|| ApiError::internal("no MCP server is asked"))?;
        let own = Arc::clone(state);
        let work = move || {
            let param = request.conversation.param;
            let all = items.all;
            let approved = mcp_items::approved(param, &prompt::of_mcp(&all))?;
            let listed = prompt::listed(&all);
            let stored: Option<Arc<str>> = items.stored.then(|| items::written(&all).into());
            let text = stored.as_ref().map_or(0, |text| text.len() as u64);
            held.become_bytes(request.bytes() + asked.bytes() + ECHO_COPIES * echo.bytes() + text)?;
            let submission = Submission::waiting(request.common.clone(), &own)?;
            let run = McpRun::new(&own, asked, request, held, (approved, listed), echo.max_tool_calls)?;
            Ok(Waiting { submission, echo, items: stored, run })
        };
        state.server.on_text_worker(work).await
    }
}

/// Copies of the echoed fields that count against the byte budget. One is for the final answer, one for requests that
/// retrieve the response meanwhile. A stream's first bytes have two, in a buffer that grew by doubling.
const ECHO_COPIES: u64 = 6;

/// Parses the body of a client with this API key. Runs on a text worker.
pub(crate) fn parse(mut body: ReadBody, state: &ModelState, key: Option<usize>) -> ApiResult<ParsedBody> {
    let bytes = std::mem::take(&mut body.bytes);
    let mut fields = Fields::of_body(&bytes)?;
    let mut common = Common::take_few(&mut fields, state)?;
    common.max_tokens = fields.take("max_output_tokens")?;
    if common.max_tokens == Some(0) {
        return Err(ApiError::invalid("max_output_tokens", "max_output_tokens must be at least 1"));
    }
    let mut echo = Echo { temperature: common.sampling.temperature, top_p: common.sampling.top_p, ..Echo::default() };
    echo.max_output_tokens = common.max_tokens;
    let logprobs = logprobs(&mut fields)?;
    echo.top_logprobs = logprobs.unwrap_or(0);
    let store = store(&mut fields, &state.server.responses)?;
    echo.store = store;
    echo.max_tool_calls = mcp_tools::max_calls(&mut fields)?;
    let Said { conversation, items, output_format, mcp } = said(&mut fields, state, key, &mut body, store, &mut echo)?;
    common.output_format = output_format;
    the_rest(&mut fields, &mut echo)?;
    fields.finish()?;
    drop(bytes);
    let items = Input { all: if store || mcp.is_some() { items } else { Vec::new() }, stored: store };
    let written = items.all.iter().map(Item::bytes).sum::<u64>() + mcp.as_ref().map_or(0, McpAsked::bytes);
    let request = ChatRequest {
        conversation,
        common,
        logprobs,
        add_special: false,
        include_reasoning: true,
        budget: None,
        call_prefix: "call",
        length_param: "max_output_tokens",
        clamps_max_tokens: false,
        repeats_output: true,
        drops_oldest: echo.drops_oldest,
        marks: Marks::default(),
    };
    let held = body.keep(request.bytes() + written + echo.bytes())?;
    let background = echo.background;
    Ok(ParsedBody { request, held, echo, items, mcp, background })
}

/// Parses the conversation of a token-counting request, and the MCP servers whose tools belong to it. Runs on a text worker.
pub(crate) fn count(
    mut body: ReadBody,
    state: &ModelState,
    key: Option<usize>,
) -> ApiResult<(Conversation, Held, Option<McpAsked>)> {
    let bytes = std::mem::take(&mut body.bytes);
    let mut fields = Fields::of_body(&bytes)?;
    model_name(&mut fields, state)?;
    let Said { conversation, mcp, .. } = said(&mut fields, state, key, &mut body, false, &mut Echo::default())?;
    truncation(&mut fields)?;
    fields.never(&["conversation", "personality"], ELSEWHERE)?;
    fields.finish()?;
    drop(bytes);
    let held = body.keep(conversation.bytes() + mcp.as_ref().map_or(0, McpAsked::bytes))?;
    Ok((conversation, held, mcp))
}

/// The parts of the prompt, parsed alike for generating and for counting.
struct Said {
    conversation: Conversation,
    items: Vec<Item>,
    output_format: Option<OutputFormat>,
    mcp: Option<McpAsked>,
}

fn said(
    fields: &mut Fields<'_>,
    state: &ModelState,
    key: Option<usize>,
    body: &mut ReadBody,
    kept: bool,
    echo: &mut Echo,
) -> ApiResult<Said> {
    echo.instructions = fields.take("instructions")?;
    let tools::Taken { tools, parallel, mcp } = tools::take(fields, echo, state.server.mcp.as_deref())?;
    echo.parallel_tool_calls = parallel;
    let output_format = text(fields, echo)?;
    let earlier = earlier(fields, state, key, body, echo)?;
    let raw = fields.raw("input").ok_or_else(|| ApiError::invalid("input", "input is missing"))?;
    let stored = references::referred(state, key, body, raw)?;
    let mut shown = Shown { media: MediaParser::new(state), kept };
    let mut items = match &earlier {
        Some(text) => items::list(state, "previous_response_id", &format!("[{text}]"), &Stored::new(), &mut shown)?,
        None => Vec::new(),
    };
    items.extend(items::input(state, raw, &stored, &mut shown)?);
    let messages = prompt::messages("input", echo.instructions.as_deref(), &items)?;
    let mut conversation = Conversation::new("input", messages, shown.media.media, tools);
    conversation.documents = shown.media.files.documents;
    reasoning(fields, &mut conversation, echo)?;
    if mcp.is_none() && !mcp_items::approved("input", &prompt::of_mcp(&items))?.is_empty() {
        let message =
            "input: it approves a call of an MCP server, but tools names none; send the tool of type mcp again";
        return Err(ApiError::invalid("input", message));
    }
    Ok(Said { conversation, items, output_format, mcp })
}

/// Returns the items of the earlier conversation, as the text between a list's brackets.
fn earlier(
    fields: &mut Fields<'_>,
    state: &ModelState,
    key: Option<usize>,
    body: &mut ReadBody,
    echo: &mut Echo,
) -> ApiResult<Option<String>> {
    let param = "previous_response_id";
    let Some(id) = fields.take::<String>(param)? else { return Ok(None) };
    let kept = state.server.responses.get(&id, key).ok_or_else(|| {
        let message = format!("{param}: no response `{}` is stored here; it may have been dropped", quote(&id));
        ApiError { code: Some("previous_response_not_found"), ..ApiError::invalid(param, message) }
    })?;
    // The text is parsed like a part of the body, and charged like one.
    let bytes = (kept.items.len() + kept.response.len()) as u64 * PARSED_FACTOR;
    body.held.grow_for(param, bytes)?;
    let output = kept.output()?;
    let comma = if output.is_empty() { "" } else { "," };
    let text = format!("{}{comma}{output}", kept.items);
    echo.previous_response_id = Some(id);
    Ok(Some(text))
}

const LOGPROBS: &str = "message.output_text.logprobs";
/// An `include` value of clients that keep a conversation themselves: it asks for reasoning in the answer. This server always sends
/// reasoning as text.
const ENCRYPTED: &str = "reasoning.encrypted_content";

/// The reason for refusing a field of OpenAI's own service.
const ELSEWHERE: &str = "it belongs to OpenAI's own service";

/// The most entries of `include`; a client names each value once.
const INCLUDES_MAX: usize = 64;

fn logprobs(fields: &mut Fields<'_>) -> ApiResult<Option<u32>> {
    let include = fields.take_few::<Vec<String>>("include", INCLUDES_MAX)?.unwrap_or_default();
    if let Some(other) = include.iter().find(|name| ![LOGPROBS, ENCRYPTED].contains(&name.as_str())) {
        let message = format!("include has `{}`; this server has {LOGPROBS}", quote(other));
        return Err(ApiError::unsupported("include", message));
    }
    let wanted = include.iter().any(|name| name == LOGPROBS);
    let top = fields.take::<u32>("top_logprobs")?;
    match (wanted, top) {
        (false, Some(n)) if n > 0 => {
            Err(ApiError::invalid("top_logprobs", format!("top_logprobs needs include to have {LOGPROBS}")))
        }
        (false, _) => Ok(None),
        (true, top) => top_logprobs(top).map(Some),
    }
}

fn text(fields: &mut Fields<'_>, echo: &mut Echo) -> ApiResult<Option<OutputFormat>> {
    let Some(raw) = fields.raw("text") else { return Ok(None) };
    let mut text = Fields::of("text".into(), raw)?;
    text.hints(&["verbosity"]);
    let format = text.raw("format");
    text.finish()?;
    echo.text = Some(raw.to_owned());
    let source: Option<Source> = format.map(text_format).transpose()?.flatten();
    Ok(source.map(|source| OutputFormat { param: "text.format", source }))
}

/// Returns whether the response is stored; by default it is, if the server stores any.
fn store(fields: &mut Fields<'_>, responses: &ResponseStore) -> ApiResult<bool> {
    match fields.take("store")? {
        Some(true) if !responses.is_on() => {
            let message = "store: this server keeps no responses (--response-store-bytes 0)";
            Err(ApiError::unsupported("store", message))
        }
        asked => Ok(asked.unwrap_or(true) && responses.is_on()),
    }
}

/// Returns whether the response is made without a connection. The client then reads it from the store.
fn background(fields: &mut Fields<'_>, stored: bool) -> ApiResult<bool> {
    let background = fields.take("background")?.unwrap_or(false);
    if background && !stored {
        let message = "background needs store: true, and a server that keeps responses (--response-store-bytes)";
        return Err(ApiError::unsupported("background", message));
    }
    Ok(background)
}

fn reasoning(fields: &mut Fields<'_>, conversation: &mut Conversation, echo: &mut Echo) -> ApiResult<()> {
    let Some(raw) = fields.raw("reasoning") else { return Ok(()) };
    let mut reasoning = Fields::of("reasoning".into(), raw)?;
    // Reasoning is returned whole, as reasoning items: more than either of these asks for.
    for name in ["summary", "generate_summary"] {
        reasoning.only(name, &["\"auto\"", "\"concise\"", "\"detailed\""])?;
    }
    reasoning.only("context", &["\"auto\""])?;
    reasoning.only("mode", &["\"standard\""])?;
    let effort = reasoning.take::<String>("effort")?;
    reasoning.finish()?;
    if let Some(effort) = &effort {
        conversation.set_effort("reasoning.effort", effort)?;
    }
    echo.effort = effort;
    Ok(())
}

/// Returns whether the oldest turns may be left out.
fn truncation(fields: &mut Fields<'_>) -> ApiResult<bool> {
    match fields.take::<String>("truncation")?.as_deref() {
        None | Some("disabled") => Ok(false),
        Some("auto") => Ok(true),
        Some(other) => {
            let message = format!("truncation is `{}`; known are auto and disabled", quote(other));
            Err(ApiError::invalid("truncation", message))
        }
    }
}

/// Takes fields that the answer repeats, fields without an effect on this server, and fields that it refuses.
fn the_rest(fields: &mut Fields<'_>, echo: &mut Echo) -> ApiResult<()> {
    echo.user = fields.take("user")?;
    echo.safety_identifier = fields.take("safety_identifier")?;
    echo.prompt_cache_key = fields.take("prompt_cache_key")?;
    if let Some(raw) = fields.raw("metadata") {
        check_nodes("metadata", raw.get(), METADATA_NODES_MAX)?;
        serde_json::from_str::<BTreeMap<String, String>>(raw.get())
            .map_err(|e| crate::http::fields::wrong("metadata", &e))?;
        echo.metadata = Some(raw.to_owned());
    }
    // Data of an agent about itself.
    fields.take_few::<BTreeMap<String, String>>("client_metadata", METADATA_NODES_MAX)?;
    if let Some(raw) = fields.raw("stream_options") {
        let mut options = Fields::of("stream_options".into(), raw)?;
        options.only("include_obfuscation", &["false"])?;
        options.finish()?;
    }
    echo.background = background(fields, echo.store)?;
    echo.drops_oldest = truncation(fields)?;
    fields.service_tier()?;
    // Prefixes are always cached.
    fields.hints(&["prompt_cache_retention", "prompt_cache_options", "prediction", "safe_prompt"]);
    let elsewhere = ["access_programs", "context_management", "conversation", "image", "moderation", "prompt"];
    fields.never(&elsewhere, ELSEWHERE)
}
