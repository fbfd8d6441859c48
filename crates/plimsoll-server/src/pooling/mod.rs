//! Embeddings, reranking and scores: inputs in, numbers out, many at a time.
//!
//! `run` sends inputs through the engine, a bounded number at once. `vector` does the arithmetic on the results. One file for each endpoint
//! parses the request and forms the answer. When a client disconnects, its inputs are cancelled.

pub(crate) mod cohere;
mod cut;
mod documents;
pub(crate) mod embeddings;
mod judge;
pub(crate) mod ollama;
pub(crate) mod rerank;
mod run;
pub(crate) mod score;
mod vector;

use plimsoll_engine::{Embed, TRANSCRIBES_ONLY};
use serde::Serialize;

use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, CONTEXT_LENGTH};
use crate::state::model::ModelState;

/// One input, ready for the engine.
#[derive(Debug)]
pub(crate) struct Input {
    pub ids: Vec<u32>,
    pub embed: Embed,
}

/// OpenAI's `usage` of requests that generate nothing.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
}

impl Usage {
    fn new(inputs: &[Input]) -> Self {
        let tokens = input_tokens(inputs);
        Self { prompt_tokens: tokens, total_tokens: tokens }
    }
}

fn input_tokens(inputs: &[Input]) -> u64 {
    inputs.iter().map(|input| input.ids.len() as u64).sum()
}

/// Returns the bytes of these inputs' token ids.
fn ids_bytes(inputs: &[Input]) -> u64 {
    inputs.iter().map(|input| size_of_val(input.ids.as_slice()) as u64).sum()
}

/// Returns how a text is embedded, or an error with the reason why it cannot be.
fn embedding(state: &ModelState) -> ApiResult<Embed> {
    if let Some(pooling) = state.served.pooled.pooling {
        return Ok(Embed::new(pooling));
    }
    let message = match state.served.engine.limits().labels {
        0 if state.served.transcribes_only() => TRANSCRIBES_ONLY,
        0 if state.served.pooled.rank.is_none() => {
            "this model is not served for embeddings: start the server with --pooling mean, last or cls, or rank for a Qwen3-Reranker"
        }
        _ => "this model scores pairs and makes no embeddings: ask /v1/rerank or /v1/score",
    };
    Err(ApiError::unsupported("model", message))
}

/// Refuses more inputs than a request may have.
fn check_count(state: &ModelState, param: &str, count: usize) -> ApiResult<()> {
    let limit = state.server.config.max_inputs;
    if count > limit as usize {
        let message = format!("{count} inputs, more than this server's limit of {limit} (--max-inputs)");
        return Err(ApiError::invalid(param, message));
    }
    Ok(())
}

/// Refuses an input that can never run, before others are computed in vain.
fn check_length(state: &ModelState, param: &str, index: usize, count: usize, tokens: usize) -> ApiResult<()> {
    let limit = state.served.engine.limits().max_req_total_len as usize;
    if tokens > limit {
        let at = if count > 1 { format!("{param}[{index}]: ") } else { String::new() };
        let message = format!(
            "{at}{tokens} tokens, more than this server's limit of {limit} tokens for one input (--batch-max-tokens for encoders, --max-req-total-len otherwise)"
        );
        return Err(ApiError { code: Some(CONTEXT_LENGTH), ..ApiError::invalid(param, message) });
    }
    Ok(())
}

/// Charges the byte budget for the most bytes of an answer, or refuses an answer beyond the whole budget.
fn hold_answer(state: &ModelState, param: &str, bytes: u64) -> ApiResult<Held> {
    let limit = state.server.bytes.limit();
    if bytes > limit {
        let message = format!(
            "the answer may need {bytes} bytes, more than this server's limit of {limit} (--max-bytes-in-flight); send fewer inputs"
        );
        return Err(ApiError::invalid(param, message));
    }
    state.server.bytes.hold(bytes)
}
