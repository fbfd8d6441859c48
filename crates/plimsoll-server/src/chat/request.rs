//! The body of a chat request, field by field.

use super::messages::conversation;
use crate::conversation::cache_control::Marks;
use crate::conversation::params::{Common, top_logprobs};
use crate::conversation::{ChatRequest, ReasoningBudget};
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::state::model::ModelState;

/// Parses a body. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<ChatRequest> {
    let mut fields = Fields::of_body(body)?;
    let newer = fields.has("max_completion_tokens");
    let common = Common::take(&mut fields, state)?;
    let logprobs = logprobs(&mut fields)?;
    let add_special = fields.take("add_special_tokens")?.unwrap_or(false);
    let conversation = conversation(&mut fields, state)?;
    fields.only("echo", &["false"])?;
    fields.only("modalities", &["[\"text\"]"])?;
    // Gateways send these, too: this server always separates reasoning from content, also in streams.
    fields.only("separate_reasoning", &["true"])?;
    fields.only("stream_reasoning", &["true"])?;
    let why = "this server answers in text and by the served model alone";
    fields.never(&["audio", "web_search_options"], why)?;
    let why = "images and videos are prepared as the model's own processor does, within this server's limits; `detail: low`, `fps` and mm_processor_kwargs.use_audio_in_video are known";
    fields.never(&["media_io_kwargs"], why)?;
    let include_reasoning = fields.take("include_reasoning")?.unwrap_or(true);
    let budget = fields.take::<u32>("thinking_token_budget")?;
    fields.finish()?;
    let budget = budget.map(|tokens| ReasoningBudget { param: "thinking_token_budget", tokens });
    Ok(ChatRequest {
        conversation,
        common,
        logprobs,
        add_special,
        include_reasoning,
        budget,
        call_prefix: "call",
        length_param: if newer { "max_completion_tokens" } else { "max_tokens" },
        clamps_max_tokens: false,
        repeats_output: false,
        drops_oldest: false,
        marks: Marks::default(),
    })
}

fn logprobs(fields: &mut Fields<'_>) -> ApiResult<Option<u32>> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top = fields.take::<u32>("top_logprobs")?;
    match (wanted, top) {
        (false, Some(n)) if n > 0 => {
            Err(ApiError::invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true"))
        }
        (true, top) => top_logprobs(top).map(Some),
        (false, _) => Ok(None),
    }
}
