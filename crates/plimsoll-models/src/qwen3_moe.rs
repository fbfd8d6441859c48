//! Qwen3-MoE: Qwen3 with a mixture of experts in all layers, or in those that the configuration names.
//!
//! Reference: transformers, `modeling_qwen3_moe.py`.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::ModelConfig;

use crate::Model;
use crate::decoder::Decoder;

/// Declares a Qwen3-MoE checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let config = ModelConfig { qk_norm: true, ..config.clone() };
    Ok(Box::new(Decoder::declare(&config, declare, false)?))
}
