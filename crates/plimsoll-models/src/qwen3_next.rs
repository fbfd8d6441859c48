//! Qwen3-Next: Gated DeltaNet layers with one of gated attention after every three, experts with a shared one, a draft head.
//!
//! Reference: transformers, `modeling_qwen3_next.py`. Its projections into a recurrent layer are joined tensors, interleaved by
//! key head; `delta` takes them apart.

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
