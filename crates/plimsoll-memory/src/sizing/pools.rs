//! From a budget to pools: whole KV pages, and recurrent state beside them where a model has it.

use super::joint::{self, JointInput};
use super::{ProfileConfig, SizingError, Target};

/// Returns the pools that this rank's budget holds, in whole pages: `(tokens, state slots)`. `total` only appears in errors. The planner
/// calls this with planned bytes, start-up with measured ones.
///
/// # Errors
/// [`SizingError::NothingFits`], or the reason why both pools do not fit together.
pub fn own_size(cfg: &ProfileConfig, target: &Target, total: u64) -> Result<(u64, u64), SizingError> {
    let nothing = |short: u64| SizingError::NothingFits {
        total,
        non_kv: target.non_kv,
        peers: target.peers,
        emergency_reserve: target.emergency_reserve,
        page_tokens: cfg.page_tokens,
        short,
    };
    let page_bytes = cfg.kv_bytes(cfg.page_tokens);
    if target.deficit > 0 {
        return Err(nothing(target.deficit.saturating_add(page_bytes)));
    }
    let Some(pool) = cfg.state else {
        return match cfg.whole_pages(target.tokens) {
            0 => Err(nothing(page_bytes.saturating_sub(target.budget).max(1))),
            tokens => Ok((tokens, 0)),
        };
    };
    let context = if cfg.clamp_context { 1 } else { cfg.max_seq_len };
    let input = JointInput {
        budget: target.budget,
        page_bytes,
        page_tokens: cfg.page_tokens,
        slot_bytes: pool.slot_bytes,
        slots_per_request: pool.slots_per_request,
        tokens_per_request: pool.tokens_per_request,
        min_requests: pool.min_requests,
        max_requests: cfg.running_max_req_size,
        min_tokens: cfg.batch_max_tokens.max(context),
        state_ratio: pool.ratio,
    };
    // If only the context or the batch is too long, a split without them lets the later check name it.
    let split = joint::solve(&input).or_else(|error| match error {
        joint::JointError::Shortfall { .. } => joint::solve(&JointInput { min_tokens: 1, ..input }),
        error => Err(error),
    })?;
    Ok((split.tokens, split.state_slots))
}
