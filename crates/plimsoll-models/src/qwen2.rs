//! Qwen2 and Qwen2.5 (dense): Llama with biases on queries, keys and values.
//!
//! Reference: transformers, `modeling_qwen2.py`.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::ModelConfig;

use crate::Model;
use crate::decoder::Decoder;

/// Declares a Qwen2 checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let config = ModelConfig { attention_bias: true, ..config.clone() };
    Ok(Box::new(Decoder::declare(&config, declare, false)?))
}
