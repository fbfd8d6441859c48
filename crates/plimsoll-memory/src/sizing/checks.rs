//! The sizes that each phase accepts, and the shape of the decode step in the self-test.
//!
//! Each phase has its own invariants: a probe is too small for the longest context by design, production must not be.

use super::{ProfileConfig, SizingError};

/// The phase of start-up in which a generation is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum PoolPhase {
    /// The generation is small; it is measured and torn down.
    Probe,
    /// The generation serves requests.
    Production,
}

/// Rows of the largest decode step: all running requests. Without `eager` they are at most the rows that plans were captured for.
#[must_use]
pub fn max_decode_batch(graph_max_batch_size: u64, running_max_req_size: u64, eager: bool) -> u64 {
    if eager { running_max_req_size } else { graph_max_batch_size.min(running_max_req_size) }
}

/// Checks a capacity and returns the longest request it serves.
///
/// # Errors
/// [`SizingError::BatchExceedsCapacity`] in any phase; [`SizingError::ContextDoesNotFit`] in production only, unless
/// the configuration clamps the context.
pub fn check_sizes(phase: PoolPhase, tokens: u64, cfg: &ProfileConfig) -> Result<u64, SizingError> {
    if tokens < cfg.batch_max_tokens {
        return Err(SizingError::BatchExceedsCapacity { tokens, batch_max_tokens: cfg.batch_max_tokens });
    }
    match phase {
        PoolPhase::Probe => Ok(cfg.max_seq_len),
        PoolPhase::Production if tokens >= cfg.max_seq_len => Ok(cfg.max_seq_len),
        PoolPhase::Production if cfg.clamp_context => Ok(tokens),
        PoolPhase::Production => Err(SizingError::ContextDoesNotFit { tokens, max_seq_len: cfg.max_seq_len }),
    }
}

/// The decode step of the self-test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct LargestDecode {
    /// Rows of the step.
    pub batch: u64,
    /// KV tokens that each row already has, its new one included.
    pub tokens_per_request: u64,
    /// KV tokens of all rows.
    pub total_tokens: u64,
}

/// Returns the largest decode step that free slots allow. `None` below two rows, where prefill has covered it.
///
/// `state` is the number of free recurrent state slots, and the number that a request needs. `free_tokens` are the free tokens of the pool,
/// and `capacity_tokens` are all its tokens.
#[must_use]
pub fn largest_decode(
    max_decode_batch: u64,
    free_request_slots: u64,
    state: Option<(u64, u64)>,
    batch_max_tokens: u64,
    capacity_tokens: u64,
    free_tokens: u64,
) -> Option<LargestDecode> {
    let by_state = state.map_or(u64::MAX, |(slots, per_request)| slots / per_request.max(1));
    let batch = max_decode_batch.min(free_request_slots).min(by_state).min(free_tokens);
    if batch < 2 {
        return None;
    }
    let wanted = batch_max_tokens.min((capacity_tokens / batch).max(1)).max(1);
    let total = wanted.saturating_mul(batch).min(free_tokens);
    let tokens_per_request = total / batch;
    Some(LargestDecode { batch, tokens_per_request, total_tokens: tokens_per_request * batch })
}
