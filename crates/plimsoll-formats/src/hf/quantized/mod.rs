//! Quantized checkpoints: reads `quantization_config`, and joins a module's tensors into one.
//!
//! `rules` reads values that the methods share, `integers` AWQ, GPTQ and AutoRound, `compressed` compressed-tensors, `float8` FP8, `mlx`
//! MLX. `micro` reads small floats with a byte of scale, `nvfp4` those with a second scale. `tensors` finds tensors by name, `join` gives
//! each its canonical name, `grouped` checks the parts of integer formats.

mod compressed;
mod float8;
mod grouped;
mod integers;
mod join;
mod micro;
mod mlx;
mod nvfp4;
mod rules;
mod tensors;

use super::json::Lookup;
use crate::error::FormatError;
use crate::quantization::Quantization;
pub(super) use join::join;

/// The next step in errors: the versions of a model that can be used instead of an unsupported one.
const NEXT: &str =
    "use a GGUF, MLX, AWQ, GPTQ, AutoRound, compressed-tensors, FP8 or NVFP4 version of the model, or the model itself";

impl Quantization {
    /// Reads `quantization` (MLX) or `quantization_config`. An unsupported method is refused by name.
    pub(super) fn read(config: &Lookup) -> Result<Option<Quantization>, FormatError> {
        let Some(object) = config.object("quantization")?.or(config.object("quantization_config")?) else {
            return Ok(None);
        };
        let read = match object.str("quant_method")? {
            None => mlx::read(&object),
            Some("mxfp4") => Ok(mlx::gpt_oss()),
            Some("awq") => integers::awq(&object),
            Some("gptq") => integers::gptq(&object),
            Some("auto-round" | "intel/auto-round") => integers::auto_round(&object),
            Some("compressed-tensors") => compressed::read(&object),
            Some("fp8") => float8::fp8(&object),
            Some("fbgemm_fp8") => float8::fbgemm(&object),
            Some("modelopt") => float8::modelopt(&object),
            Some(method) => Err(rules::refused("quant_method", &format!("{method:?}"), NEXT)),
        };
        read.map(Some)
    }
}
