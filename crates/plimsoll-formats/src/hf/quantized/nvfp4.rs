//! NVFP4 weights in safetensors: codes of 4 bits, E4M3 scales of 16 elements, and a second scale for the tensor.
//!
//! ModelOpt has `X.weight`, `X.weight_scale` and `X.weight_scale_2`; compressed-tensors `X.weight_packed`, `X.weight_scale` and
//! `X.weight_global_scale`, the reciprocal of the other's.

use super::micro;
use super::tensors::Tensors;
use crate::directory::Entry;
use crate::error::{FormatError, quote};
use crate::hf::names::canonical;
use crate::hf::safetensors::{Found, Kind};
use crate::quantization::{GroupQuant, Mode, Scheme};
use crate::scaled::{self, Factors};

/// Elements of a group.
pub(super) const GROUP: usize = 16;
/// The scheme that planning uses for such a module.
pub(super) const SCHEME: Scheme = Scheme::Group(GroupQuant { bits: 4, group: GROUP, mode: Mode::Nvfp4Scaled });

/// Tensors beside the codes that change the codes' values, which is not supported. Scales of activations do not: activations are computed
/// at a higher precision.
const FOREIGN: [&str; 2] = ["pre_quant_scale", "weight_zero_point"];

/// Joins a weight in ModelOpt's form.
pub(super) fn modelopt(codes: &Found, all: &Tensors<'_>) -> Result<Entry, FormatError> {
    entry(codes, (".weight", "weight_scale_2", false), all)
}

/// Joins a weight in compressed-tensors' form.
pub(super) fn packed(codes: &Found, all: &Tensors<'_>) -> Result<Entry, FormatError> {
    entry(codes, (".weight_packed", "weight_global_scale", true), all)
}

fn entry(codes: &Found, (end, second, divides): (&str, &str, bool), all: &Tensors<'_>) -> Result<Entry, FormatError> {
    let wrong = |what: String| FormatError::Safetensors(format!("tensor {}: {what}", quote(&codes.name)));
    let module = codes.name.strip_suffix(end).unwrap_or(&codes.name);
    let beside = |leaf: &str| all.find(&format!("{module}.{leaf}"));
    if let Some(foreign) = FOREIGN.iter().find_map(|leaf| beside(leaf)) {
        let what = format!("tensor {} beside NVFP4 codes; use a version of the model without it", quote(&foreign.name));
        return Err(FormatError::Unsupported(what));
    }
    let factors = beside(second).ok_or_else(|| wrong(format!("its {second} is missing; fetch the file again")))?;
    let Kind::Float(encoding) = factors.dtype else {
        return Err(wrong(format!("its {second} is no float; fetch the file again")));
    };
    let (bytes, rows) = codes.shape.split_last().ok_or_else(|| wrong("it has no dimensions".to_owned()))?;
    let quant = GroupQuant { bits: 4, group: GROUP, mode: Mode::Nvfp4 };
    let joined = micro::join(codes, (beside("weight_scale"), Kind::F8), (rows, *bytes), quant)?;
    let named = Entry { name: canonical(&format!("{module}.weight")), ..joined };
    scaled::apply(named, &Factors { encoding, bytes: all.bytes(factors), divides }).map_err(wrong)
}
