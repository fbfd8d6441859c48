//! From a row of logits to one token: parameters, penalties, truncation, the draw, and log probabilities for the client.
//!
//! The same request gets the same token whatever else is aboard: the random number depends on (seed, position) only, the
//! weights of tokens are integers so that no sum depends on its order, and the exponential is our own, so that
//! no machine's library rounds it differently. A draft that is accepted exactly when it equals the token
//! sampled at its position therefore leaves sampled output the same as without speculation.
//!
//! The order of operations is vLLM's: logit bias; repetition, frequency and presence penalty; the allowed-token mask;
//! then either the largest logit (temperature 0) or temperature, min-p, top-k, top-p and the draw.
//!
//! What must not be in here: batches, requests, grammars (they arrive as a mask), stop conditions, text.

mod counts;
mod logprobs;
mod params;
mod rng;
mod sampler;
mod select;
#[cfg(test)]
mod tests;
mod weights;

pub use counts::{CountsError, TokenCounts};
pub use logprobs::{ChosenLogprob, LogprobError, TOP_LOGPROBS_MAX, top_logprobs};
pub use params::{LOGIT_BIAS_MAX, ParamError, SamplingParams};
pub use rng::{philox4x32, random_u64};
pub use sampler::{SampleError, Sampled, Sampler, SamplerError};
