//! Qwen3-Next: one gated attention layer after every three Gated DeltaNet layers, experts with a shared expert, a draft head.
//!
//! Reference: transformers, `modeling_qwen3_next.py`. Its projections into a recurrent layer are joined tensors, interleaved by key head;
//! `delta` splits them.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::ModelConfig;

use crate::Model;
use crate::decoder::Decoder;

/// Declares a Qwen3-Next checkpoint.
pub fn build(
    config: &ModelConfig,
    declare: &mut Declare<'_>,
    with_drafter: bool,
) -> Result<Box<dyn Model>, DeclareError> {
    Ok(Box::new(Decoder::declare(config, declare, with_drafter)?))
}
