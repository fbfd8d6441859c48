//! From a row of logits to one token: parameters, penalties, truncation, the draw, and log probabilities for the
//! client.
//!
//! A request gets the same token in any batch. The random number depends on seed and position only. Weights are
//! integers, so sums do not depend on order. `exp` is our own, so every machine rounds alike. A draft is accepted if it
//! equals the token sampled at its position, so speculation does not change sampled output.
//!
//! The order of operations is vLLM's: logit bias; repetition, frequency and presence penalty; the allowed-token mask.
//! At temperature 0 the largest logit wins. Otherwise temperature, min-p, top-k, top-p and the draw follow.
//!
//! Not here: batches, requests, grammars (they arrive as a mask), stop conditions, text.

mod counts;
#[cfg(test)]
mod likely_tests;
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
pub use sampler::{SampleError, Sampler, SamplerError};
