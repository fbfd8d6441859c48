//! Qwen3.5, dense and with experts: the layers of Qwen3-Next with separate projections, and a vision encoder.
//!
//! Reference: transformers, `modeling_qwen3_5.py` and `modeling_qwen3_5_moe.py`. A text's tokens have the same position in all three
//! sections of the rotary embedding, which then equals the plain one.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::ModelConfig;

use crate::Model;
use crate::decoder::Decoder;

/// Declares a Qwen3.5 or Qwen3.5-MoE checkpoint.
pub fn build(
    config: &ModelConfig,
    declare: &mut Declare<'_>,
    with_drafter: bool,
) -> Result<Box<dyn Model>, DeclareError> {
    Ok(Box::new(Decoder::declare(config, declare, with_drafter)?))
}
