//! The bounds that every request is checked against.

use crate::api::pooling::{Embed, Pooling};

/// The bounds every request is checked against. One value, made from the plan; the same numbers `plimsoll plan` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Limits {
    /// Tokens of prompt plus output of one request, the least of the model's context and the page pool.
    pub max_req_total_len: u32,
    /// Tokens the page pool holds.
    pub max_total_token_num: u64,
    /// Requests that run at once.
    pub running_max_req_size: u32,
    /// Requests that wait at most.
    pub max_waiting: u32,
    /// Token rows of one step.
    pub batch_max_tokens: u32,
    /// Vocabulary size; token ids are below it.
    pub vocab_size: u32,
    /// Alternatives per reported log-probability.
    pub max_logprobs: u32,
    /// Stop strings per request.
    pub max_stop_strings: u32,
    /// Bytes of one stop string.
    pub max_stop_bytes: u32,
    /// Bytes that all requests together may hold on the host (ids, outputs not yet read).
    pub host_bytes: u64,
    /// Whether the model is an encoder: it makes embeddings and scores, no text, and takes inputs whole.
    pub encoder: bool,
    /// Numbers of an embedding.
    pub embedding_size: u32,
    /// Whether dense layers of the model make embeddings, and it pools hidden states itself.
    pub dense: bool,
    /// Scores of the classifier; 0 without one.
    pub labels: u32,
    /// Token types of an encoder; 0 for other models.
    pub token_types: u32,
}

impl Limits {
    /// Numbers in the answer to a request of this pooling; 0 if the model does not support it.
    pub(crate) fn pooled_size(&self, pooling: Pooling) -> u32 {
        match pooling {
            Pooling::Score => self.labels,
            _ if self.dense != (pooling == Pooling::Dense) => 0,
            _ => self.embedding_size,
        }
    }

    /// Sets the answer's size, and drops `second_at` for a model with one token type.
    pub(crate) fn complete(&self, embed: &mut Embed) {
        embed.size = self.pooled_size(embed.pooling);
        // A tokenizer may name a second kind of token that the model does not have.
        embed.second_at = embed.second_at.filter(|_| self.token_types > 1);
    }
}
