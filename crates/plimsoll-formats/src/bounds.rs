//! The bounds of every size in a configuration, and the checks that refuse values outside them.

use crate::error::FormatError;

/// Most layers of a model.
pub(crate) const LAYERS_MAX: usize = 1000;
/// Most heads of a layer.
pub(crate) const HEADS_MAX: usize = 1024;
/// Widest head.
pub(crate) const HEAD_DIM_MAX: usize = 1024;
/// Widest residual stream, and widest product of heads and head width.
pub(crate) const HIDDEN_MAX: usize = 1 << 17;
/// Widest feed-forward part.
pub(crate) const INTERMEDIATE_MAX: usize = 1 << 20;
/// Largest vocabulary: a sampler stores a token in a fixed number of bits.
pub const VOCAB_MAX: usize = 1 << 20;
/// Longest context in tokens.
pub(crate) const CONTEXT_MAX: usize = 1 << 28;
/// Most experts of a layer.
pub(crate) const EXPERTS_MAX: usize = 4096;
/// Most experts of all layers together; each has three entries in the table of weights.
pub(crate) const EXPERTS_TOTAL_MAX: usize = 1 << 17;
/// Most groups of experts: the router keeps them as bits.
pub(crate) const GROUPS_MAX: usize = 64;
/// Longest causal convolution.
pub(crate) const TAPS_MAX: usize = 16;
/// Most layers of a draft head.
pub(crate) const DRAFT_LAYERS_MAX: usize = 8;
/// Most kinds of token, and most scores of a classifier.
pub(crate) const KINDS_MAX: usize = 1024;
/// Most layers of an encoder.
pub(crate) const DEPTH_MAX: usize = 1000;

/// Refuses a size of 0 or above `most`.
pub(crate) fn within(what: &str, value: usize, most: usize) -> Result<(), FormatError> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    wrong(format!("{what}: {value}, allowed are 1 to {most}"))
}

/// Refuses a number that is not finite, not above 0, or above `most`.
pub(crate) fn positive(what: &str, value: f32, most: f32) -> Result<(), FormatError> {
    if value > 0.0 && value <= most {
        return Ok(());
    }
    wrong(format!("{what}: {value}, allowed are numbers above 0 and up to {most}"))
}

/// A configuration error.
pub(crate) fn wrong<T>(message: String) -> Result<T, FormatError> {
    Err(FormatError::Config(message))
}
