//! Choices: a whole answer collected from its deltas.

use plimsoll_engine::{Delta, FinishReason, TokenLogprobs, TokenOut};

use crate::conversation::active::ActiveRequest;
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
    /// Adds a piece of output. `reports`: whether the answer reports its tokens.
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

/// Waits for all choices, or for the first failure.
pub(crate) async fn collect(request: &mut ActiveRequest) -> Result<Vec<Collected>, ApiError> {
    let reports = request.submission.reports_tokens();
    let choices = request.submission.choices();
    let mut collected: Vec<Collected> = std::iter::repeat_with(Collected::default).take(choices).collect();
    request.each(|_, choice, delta| collected[choice].add(delta, reports)).await?;
    Ok(collected)
}

/// Returns the token ids of a choice, for `return_token_ids`.
pub(crate) fn ids(tokens: &[TokenOut]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}
