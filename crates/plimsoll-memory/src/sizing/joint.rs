//! Splitting one budget between KV pages and recurrent state slots.
//!
//! A hybrid model needs both pools, and a request needs its share of both. If one pool were sized first, it would starve the other. So
//! `slots · slot_bytes + pages · page_bytes ≤ budget` is solved for both at once. The safety margin is already inside the budget and is not
//! applied again.

use super::Fraction;
use crate::host::ExactBytes;

/// The budget, the unit sizes and the minima. Sizes are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct JointInput {
    /// Bytes that both pools may take together.
    pub budget: u64,
    /// Bytes of one KV page; not zero.
    pub page_bytes: u64,
    /// Tokens of one KV page; not zero.
    pub page_tokens: u64,
    /// Bytes of one recurrent state slot; not zero.
    pub slot_bytes: u64,
    /// Slots of each request: one, and one for every draft token.
    pub slots_per_request: u64,
    /// KV tokens of a typical request, which balance the two pools.
    pub tokens_per_request: u64,
    /// Requests that must fit at the same time; at least one is assumed.
    pub min_requests: u64,
    /// The most requests that can use state; more slots would be useless.
    pub max_requests: u64,
    /// KV tokens that must fit.
    pub min_tokens: u64,
    /// The user's share of the budget for state, in place of the balance.
    pub state_ratio: Option<Fraction>,
}

/// A solved split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct JointSplit {
    /// Requests with room for their state.
    pub requests: u64,
    /// Recurrent state slots, `requests × slots_per_request`.
    pub state_slots: u64,
    /// Their bytes.
    pub state_bytes: u64,
    /// KV pages.
    pub pages: u64,
    /// KV tokens, `pages × page_tokens`.
    pub tokens: u64,
    /// Their bytes.
    pub kv_bytes: u64,
}

/// The reason why there is no split.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, thiserror::Error)]
pub enum JointError {
    /// The budget is below the minimum of both pools.
    #[error(
        "{min_requests} request(s) with recurrent state and {min_tokens} KV tokens need {need}, but only {budget} are \
         there: {short} are missing",
        need = ExactBytes(*need), budget = ExactBytes(*budget), short = ExactBytes(need.saturating_sub(*budget))
    )]
    Shortfall {
        /// Requests that had to fit.
        min_requests: u64,
        /// Tokens that had to fit.
        min_tokens: u64,
        /// Bytes that both minima need together.
        need: u64,
        /// Bytes of the budget.
        budget: u64,
    },
    /// Both minima would fit, but not with the user's ratio.
    #[error(
        "a state ratio of {ratio} leaves one of the pools below its minimum: use a ratio from {least} to {most}, or \
         leave it out"
    )]
    Ratio {
        /// The ratio.
        ratio: Fraction,
        /// The smallest ratio that gives state its minimum.
        least: Fraction,
        /// The largest ratio that leaves KV its minimum.
        most: Fraction,
    },
    /// A size is zero where it cannot be.
    #[error("{0} must not be zero")]
    Zero(&'static str),
}

/// Solves for both pools.
///
/// Without a ratio, as many requests as possible get state *and* `tokens_per_request` KV tokens, at most `max_requests`. The rest of the
/// budget goes to KV. With a ratio, state gets that share, and KV gets all other bytes, the unused part of the state's share included.
///
/// # Errors
/// [`JointError`] if the minima do not fit, alone or with the ratio, or if a unit is zero.
pub fn solve(input: &JointInput) -> Result<JointSplit, JointError> {
    for (value, name) in [
        (input.page_bytes, "the size of a KV page"),
        (input.page_tokens, "the tokens of a KV page"),
        (input.slot_bytes, "the size of a recurrent state slot"),
        (input.slots_per_request, "the state slots of a request"),
    ] {
        if value == 0 {
            return Err(JointError::Zero(name));
        }
    }
    let budget = u128::from(input.budget);
    let request_state = u128::from(input.slot_bytes) * u128::from(input.slots_per_request);
    let kv_bytes = |tokens: u64| u128::from(tokens.div_ceil(input.page_tokens)) * u128::from(input.page_bytes);
    let min_requests = u128::from(input.min_requests.max(1));
    let max_requests = u128::from(input.max_requests).max(min_requests);
    // Below 2^256 in theory, so the product saturates; a saturated need is a shortfall.
    let min_state = request_state.saturating_mul(min_requests);
    let min_kv = kv_bytes(input.min_tokens.max(1));
    let need = min_state.saturating_add(min_kv);
    if need > budget {
        let need = u64::try_from(need).unwrap_or(u64::MAX);
        let (min_requests, min_tokens) = (input.min_requests.max(1), input.min_tokens.max(1));
        return Err(JointError::Shortfall { min_requests, min_tokens, need, budget: input.budget });
    }
    let requests = match input.state_ratio {
        None => budget / request_state.saturating_add(kv_bytes(input.tokens_per_request)),
        Some(ratio) => {
            let share = u128::from(ratio.of(input.budget));
            if share < min_state || budget - share < min_kv {
                return Err(bad_ratio(ratio, min_state, min_kv, budget));
            }
            share / request_state
        }
    };
    let beside_kv = (budget - min_kv) / request_state;
    let requests = requests.clamp(min_requests, max_requests).min(beside_kv);
    let state = requests * request_state;
    let pages = (budget - state) / u128::from(input.page_bytes);
    let tokens = u64::try_from(pages * u128::from(input.page_tokens)).unwrap_or(u64::MAX);
    // Every product below is at most the budget, and counts are at most bytes.
    Ok(JointSplit {
        requests: requests as u64,
        state_slots: (requests * u128::from(input.slots_per_request)) as u64,
        state_bytes: state as u64,
        pages: pages as u64,
        tokens,
        kv_bytes: (pages * u128::from(input.page_bytes)) as u64,
    })
}

/// Returns the error with the range of ratios that fit, in parts per million: rounded up for state, down for KV.
fn bad_ratio(ratio: Fraction, min_state: u128, min_kv: u128, budget: u128) -> JointError {
    let clamp = |ppm: u128| Fraction::from_ppm(ppm.clamp(1, 1_000_000) as u32).unwrap_or(Fraction::ONE);
    let least = clamp((min_state * 1_000_000).div_ceil(budget));
    let most = clamp((budget - min_kv) * 1_000_000 / budget);
    JointError::Ratio { ratio, least, most: most.max(least) }
}
