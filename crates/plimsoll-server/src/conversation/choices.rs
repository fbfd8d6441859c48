//! Choices: a whole answer collected from its deltas, and the arithmetic both APIs need on the way.

use plimsoll_engine::{Delta, FinishReason, TokenLogprobs, TokenOut};

use crate::conversation::active::{ActiveRequest, Event};
use crate::http::error::ApiError;

/// One choice of an answer that is not streamed.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub text: String,
    pub tokens: Vec<TokenOut>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub finish: Option<FinishReason>,
    pub stop_reason: Option<String>,
}

impl Collected {
    /// Adds a piece; its tokens, where they are reported.
    fn add(&mut self, delta: Delta, reports: bool) {
        self.text.push_str(&delta.text);
        if reports {
            self.tokens.extend(delta.tokens);
        }
        self.prompt_logprobs.extend(delta.prompt_logprobs);
        self.finish = delta.finish.or(self.finish);
        self.stop_reason = delta.stop_reason.or(self.stop_reason.take());
    }
}

/// Waits for all choices, or for the first failure. `reports`: their tokens are reported.
pub(crate) async fn collect(
    active_request: &mut ActiveRequest,
    choices: usize,
    reports: bool,
) -> Result<Vec<Collected>, ApiError> {
    let mut collected: Vec<Collected> = std::iter::repeat_with(Collected::default).take(choices).collect();
    loop {
        match active_request.next().await {
            Event::Delta(choice, delta) => collected[choice].add(delta, reports),
            Event::Done => return Ok(collected),
            Event::Failed(error) => return Err(error),
        }
    }
}

/// OpenAI's word for the end.
pub(crate) fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// Token ids of a choice, for `return_token_ids`.
pub(crate) fn ids(tokens: &[TokenOut]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}
