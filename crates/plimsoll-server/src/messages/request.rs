//! The bodies of Anthropic's requests, field by field.

use plimsoll_grammar::Source;
use serde_json::value::RawValue;

use super::content::{self, Content};
use super::tools;
use crate::conversation::cache_control::Marks;
use crate::conversation::output_format::{OutputFormat, schema};
use crate::conversation::params::{Common, STOPS_MAX, model_name};
use crate::conversation::prompt::Conversation;
use crate::conversation::{ChatRequest, ReasoningBudget};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, cache_control};
use crate::state::model::ModelState;

/// Parses a body. Returns the request, and whether the client marks prompt parts for caching. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<(ChatRequest, bool)> {
    let mut fields = Fields::of_body(body)?;
    let mut common = Common::take_few(&mut fields, state)?;
    let max_tokens = fields.required::<u32>("max_tokens")?;
    if max_tokens == 0 {
        return Err(ApiError::invalid("max_tokens", "max_tokens must be at least 1"));
    }
    common.max_tokens = Some(max_tokens);
    common.stop = fields.take_few::<Vec<String>>("stop_sequences", STOPS_MAX)?.unwrap_or_default();
    let said = Said::take(&mut fields, state)?;
    if let Some(raw) = fields.raw("metadata") {
        let mut metadata = Fields::of("metadata".into(), raw)?;
        metadata.take::<String>("user_id")?;
        metadata.finish()?;
    }
    fields.only("service_tier", &["\"auto\"", "\"standard_only\""])?;
    if fields.has("thread") {
        // Anthropic's client recognizes this error and continues without threads.
        let error = ApiError::invalid("thread", "thread: this server keeps no threads; send the whole conversation");
        return Err(ApiError { code: Some("thread_unsupported_request"), ..error });
    }
    let elsewhere = ["container", "diagnostics", "inference_geo"];
    fields.never(&elsewhere, "it belongs to Anthropic's own service")?;
    fields.finish()?;
    let budget = said.thinking.budget.map(|tokens| ReasoningBudget { param: "thinking.budget_tokens", tokens });
    if budget.is_some_and(|budget| budget.tokens >= max_tokens) {
        let message = format!("thinking.budget_tokens must be below max_tokens, which is {max_tokens}");
        return Err(ApiError::invalid("thinking.budget_tokens", message));
    }
    common.output_format = said.output_format;
    let caches = said.marks.any();
    let request = ChatRequest {
        conversation: said.conversation,
        common,
        logprobs: None,
        add_special: false,
        include_reasoning: said.thinking.shown,
        budget,
        call_prefix: "toolu",
        length_param: "max_tokens",
        clamps_max_tokens: true,
        repeats_output: false,
        drops_oldest: false,
        marks: said.marks,
    };
    Ok((request, caches))
}

/// Parses the conversation of a token-counting request. Runs on a text worker.
pub(crate) fn count(body: &[u8], state: &ModelState) -> ApiResult<Conversation> {
    let mut fields = Fields::of_body(body)?;
    model_name(&mut fields, state)?;
    let said = Said::take(&mut fields, state)?;
    fields.finish()?;
    Ok(said.conversation)
}

/// Values of `context_management` by which agents ask that nothing be cleared.
const CLEARS_NOTHING: [&str; 4] = [
    r#"{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}"#,
    r#"{"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}"#,
    r#"{"edits": []}"#,
    "{}",
];

/// The fields that make the prompt, which both routes share.
struct Said {
    conversation: Conversation,
    thinking: Thinking,
    output_format: Option<OutputFormat>,
    marks: Marks,
}

impl Said {
    fn take(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let whole = cache_control(fields)?;
        let (tools, marks) = tools::take(fields)?;
        let Content { messages, media, documents, mut marks } = content::take(fields, state, marks)?;
        // A mark on the request stands for one on its last block.
        marks.add(whole, "");
        let thinking = Thinking::take(fields)?;
        let prefilled = messages.last().is_some_and(|last| last["role"] == "assistant");
        let mut conversation = Conversation::new("messages", messages, media, tools);
        conversation.documents = documents;
        if prefilled {
            conversation.continue_last()?;
        }
        if let Some(on) = thinking.on {
            conversation.set_thinking(on);
        }
        let output_format = output_config(fields, &mut conversation)?;
        fields.only("speed", &["\"standard\""])?;
        // Reasoning always stays in the context. This server supports no edit that clears something.
        fields.only("context_management", &CLEARS_NOTHING)?;
        let elsewhere = ["user_profile_id", "workspace_id"];
        fields.never(&elsewhere, "it belongs to Anthropic's own service")?;
        Ok(Self { conversation, thinking, output_format, marks })
    }
}

/// The parsed field `thinking`.
struct Thinking {
    /// None leaves the decision to the model's template.
    on: Option<bool>,
    budget: Option<u32>,
    shown: bool,
}

impl Thinking {
    fn take(fields: &mut Fields<'_>) -> ApiResult<Self> {
        let Some(raw) = fields.raw("thinking") else { return Ok(Self { on: None, budget: None, shown: true }) };
        let mut fields = Fields::of("thinking".into(), raw)?;
        let kind = fields.required::<String>("type")?;
        let thinking = match kind.as_str() {
            "disabled" => Self { on: Some(false), budget: None, shown: true },
            // The model decides how much.
            "adaptive" => Self { on: Some(true), budget: None, shown: shown(&mut fields)? },
            "enabled" => {
                let budget = Some(fields.required::<u32>("budget_tokens")?);
                Self { on: Some(true), budget, shown: shown(&mut fields)? }
            }
            other => {
                let message = format!("thinking.type is `{}`; known are enabled, disabled and adaptive", quote(other));
                return Err(ApiError::unsupported("thinking.type", message));
            }
        };
        fields.finish()?;
        Ok(thinking)
    }
}

/// Returns whether reasoning is shown; it is shown whole or not at all.
fn shown(fields: &mut Fields<'_>) -> ApiResult<bool> {
    let omitted = fields.take::<String>("display")?;
    match omitted.as_deref() {
        // Whole reasoning contains more than the requested summary.
        None | Some("summarized") => Ok(true),
        Some("omitted") => Ok(false),
        Some(_) => {
            let message =
                "thinking.display is supported only as omitted or summarized; without it, reasoning is shown whole";
            Err(ApiError::unsupported("thinking.display", message))
        }
    }
}

fn output_config(fields: &mut Fields<'_>, conversation: &mut Conversation) -> ApiResult<Option<OutputFormat>> {
    let mut asked = output_format(fields.raw(BETAS_FORMAT), BETAS_FORMAT)?;
    let Some(raw) = fields.raw("output_config") else { return Ok(asked) };
    let mut config = Fields::of("output_config".into(), raw)?;
    let effort = config.take::<String>("effort")?;
    let format = config.raw("format");
    config.finish()?;
    if let Some(effort) = &effort {
        conversation.set_effort("output_config.effort", effort)?;
    }
    if let Some(output_format) = output_format(format, "output_config.format")?
        && asked.replace(output_format).is_some()
    {
        let message = "output_format and output_config.format are two names of one thing";
        return Err(ApiError::invalid(BETAS_FORMAT, message));
    }
    Ok(asked)
}

/// The name of `output_config.format` during its beta.
const BETAS_FORMAT: &str = "output_format";

fn output_format(raw: Option<&RawValue>, param: &'static str) -> ApiResult<Option<OutputFormat>> {
    let Some(raw) = raw else { return Ok(None) };
    let mut format = Fields::of(param.into(), raw)?;
    format.only("type", &["\"json_schema\""])?;
    let at = format.param("schema");
    let schema = schema(&mut format, "schema")?;
    format.finish()?;
    let schema = schema.ok_or_else(|| ApiError::invalid(&at, format!("{at} is missing")))?;
    Ok(Some(OutputFormat { param, source: Source::JsonSchema(schema) }))
}
