//! Log probabilities for the client: of the chosen token and of its most likely alternatives.
//!
//! They are taken from the model's own logits, before bias, penalties, mask and temperature, as in OpenAI's API and
//! vLLM's default (`raw_logprobs`). Call this before [`Sampler::sample`](super::Sampler::sample), which overwrites the
//! row, or on a copy. Not here: sampling.

use thiserror::Error;

use super::weights::{BLOCK, UNITS, Weigher, block_max};

/// The most alternatives in OpenAI's API; the server reserves memory for them by default.
pub const TOP_LOGPROBS_MAX: usize = 20;

/// Why log probabilities could not be given.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LogprobError {
    /// More alternatives than the list has capacity for.
    #[error("{asked} log probabilities were asked for, the list has room for {room}")]
    NoRoom {
        /// Requested alternatives.
        asked: usize,
        /// Capacity of the list.
        room: usize,
    },
    /// The chosen token is not in the row.
    #[error("token {token} is not among the {vocab} of this row")]
    UnknownToken {
        /// The token id given.
        token: u32,
        /// Logits in the row.
        vocab: usize,
    },
    /// The row defines no distribution.
    #[error("the row has no finite largest logit (it is {max}), hence no probabilities")]
    NoDistribution {
        /// The largest logit in words: `-inf`, `inf`.
        max: &'static str,
    },
}

/// Log probability and rank of the chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChosenLogprob {
    /// Natural logarithm of its probability; −∞ (which JSON cannot express) if its logit is −∞ or NaN.
    pub logprob: f32,
    /// 1 for the most likely token; equal ones count by id.
    pub rank: u32,
}

/// Writes the `n` most likely tokens of a row with their log probabilities to `top`: the most likely first, equal ones
/// by id. Returns the report of `chosen`.
///
/// `top` is cleared first and never grows beyond its capacity. A NaN counts as −∞; tokens at −∞ are not listed.
///
/// # Errors
/// [`LogprobError`] if `top` has no room for `n`, if `chosen` is not in the row, or if the row has no finite maximum.
pub fn top_logprobs(
    logits: &[f32],
    chosen: u32,
    n: usize,
    top: &mut Vec<(u32, f32)>,
) -> Result<ChosenLogprob, LogprobError> {
    top.clear();
    if n > top.capacity() {
        return Err(LogprobError::NoRoom { asked: n, room: top.capacity() });
    }
    let unknown = LogprobError::UnknownToken { token: chosen, vocab: logits.len() };
    let own = logits.get(chosen as usize).copied().ok_or(unknown)?;
    let own = if own.is_nan() { f32::NEG_INFINITY } else { own };
    let max = logits.chunks(BLOCK).map(block_max).fold(f32::NEG_INFINITY, f32::max);
    if max.is_infinite() {
        return Err(LogprobError::NoDistribution { max: if max > 0.0 { "inf" } else { "-inf" } });
    }
    let weigher = Weigher::new(max, 1.0, 0.0);
    let (mut total, mut rank) = (0, 1);
    for (first, block) in (0_u32..).step_by(BLOCK).zip(logits.chunks(BLOCK)) {
        total += weigher.sum(block);
        let largest = block_max(block);
        if largest >= own {
            let numbered = (first..).zip(block);
            rank += numbered.filter(|&(id, &it)| it > own || (it == own && id < chosen)).count() as u32;
        }
        if n > 0 && (top.len() < n || largest > top[n - 1].1) {
            for (id, &logit) in (first..).zip(block) {
                offer(top, n, id, logit);
            }
        }
    }
    let log_total = f64::from(max) + (total as f64 / UNITS as f64).ln();
    let logprob = |logit: f32| (f64::from(logit) - log_total) as f32;
    top.iter_mut().for_each(|(_, logit)| *logit = logprob(*logit));
    Ok(ChosenLogprob { logprob: logprob(own), rank })
}

/// Puts a token into the list of the `n` largest if it belongs there; ids arrive in ascending order.
fn offer(top: &mut Vec<(u32, f32)>, n: usize, id: u32, logit: f32) {
    if logit.is_nan() || logit == f32::NEG_INFINITY {
        return;
    }
    let place = top.partition_point(|&(_, larger)| larger >= logit);
    if place < n {
        if top.len() == n {
            top.pop();
        }
        top.insert(place, (id, logit));
    }
}
