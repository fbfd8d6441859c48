//! Llama and its relatives (Mistral, SmolLM2, …): a plain [`Decoder`].
//!
//! Reference: transformers, `modeling_llama.py`.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::ModelConfig;

use crate::Model;
use crate::decoder::Decoder;

/// Declares a Llama-family checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    Ok(Box::new(Decoder::declare(config, declare, false)?))
}
