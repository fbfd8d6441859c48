//! Qwen3 (dense): Llama with queries and keys that are normed per head before rotation.
//!
//! Reference: transformers, `modeling_qwen3.py`.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::ModelConfig;

use crate::Model;
use crate::decoder::Decoder;

/// Declares a Qwen3 checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let config = ModelConfig { qk_norm: true, ..config.clone() };
    Ok(Box::new(Decoder::declare(&config, declare, false)?))
}
