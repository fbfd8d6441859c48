//! FP8 weights: the `quantization_config` of the methods that write them, and the joining of a weight's numbers with their scales. This
//! module also reads ModelOpt's configuration for NVFP4.
//!
//! A tensor has one scale, one per output, or one per block: [n / rows of a block, k / columns of a block].

use super::nvfp4;
use super::rules::{block, check_count, names, refused};
use super::tensors::Tensors;
use crate::decode::grouped::Scales;
use crate::directory::{Entry, F8, Storage};
use crate::encoding::{Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::hf::json::Lookup;
use crate::hf::names::canonical;
use crate::hf::safetensors::{Found, Kind};
use crate::quantization::{F8Quant, Method, Pattern, Quantization, Scheme};
use std::collections::BTreeMap;

/// Returns a quantization with this scheme for linear layers, except for the modules in these lists.
fn plain(object: &Lookup, default: Scheme, skipped: &[&str]) -> Result<Quantization, FormatError> {
    let mut rules = Vec::new();
    for key in skipped {
        let skipped = names(object, key)?;
        check_count(key, skipped.len(), 0)?;
        // A star stands for any text (ModelOpt). A name also covers all modules below it.
        let text = |name: &str| name.trim_matches('*').to_owned();
        rules.extend(skipped.iter().map(|name| (Pattern::Contains(text(name)), None)));
    }
    Ok(Quantization {
        method: Method::F8,
        default,
        experts_only: false,
        embedding: false,
        head: false,
        overrides: BTreeMap::new(),
        rules,
    })
}

/// Reads DeepSeek's and Qwen's form. Schemes of activations are ignored: activations are computed at a higher precision.
pub(super) fn fp8(object: &Lookup) -> Result<Quantization, FormatError> {
    for (key, known) in [("fmt", "e4m3"), ("expert_dtype", "fp8"), ("scale_fmt", "float")] {
        if let Some(value) = object.str(key)?
            && value != known
            // Scales that are powers of two are floats as well. Tensors with byte scales are refused later.
            && (key, value) != ("scale_fmt", "ue8m0")
        {
            return Err(refused(key, &format!("{value:?}"), &format!("supported is {known:?}")));
        }
    }
    let block = block(object, "weight_block_size")?;
    plain(object, Scheme::F8(F8Quant { block }), &["modules_to_not_convert", "ignored_layers"])
}

/// Reads FBGEMM's form: one scale per output.
pub(super) fn fbgemm(object: &Lookup) -> Result<Quantization, FormatError> {
    plain(object, Scheme::F8(F8Quant { block: None }), &["modules_to_not_convert"])
}

/// Reads ModelOpt's form for two algorithms: FP8 with one scale per tensor, and NVFP4. Activations may be in NVFP4 or not (`W4A16_NVFP4`):
/// either way they are computed at a higher precision.
pub(super) fn modelopt(object: &Lookup) -> Result<Quantization, FormatError> {
    let algorithm = object.str("quant_algo")?.unwrap_or_default();
    let scheme = match algorithm {
        "FP8" => Scheme::F8(F8Quant { block: None }),
        "NVFP4" | "W4A16_NVFP4" => nvfp4::SCHEME,
        _ => {
            let next = "supported are \"FP8\", \"NVFP4\" and \"W4A16_NVFP4\": use an FP8, NVFP4, AWQ, GPTQ or GGUF version of the model";
            return Err(refused("quant_algo", &format!("{algorithm:?}"), next));
        }
    };
    let group = object.size("group_size")?.filter(|group| *group != nvfp4::GROUP);
    if let (Some(group), "NVFP4" | "W4A16_NVFP4") = (group, algorithm) {
        return Err(refused("group_size", &group.to_string(), "NVFP4 has groups of 16"));
    }
    plain(object, scheme, &["ignore", "exclude_modules"])
}

/// Joins a weight of FP8 numbers with its scales.
pub(super) fn entry(numbers: &Found, declared: &Quantization, all: &Tensors<'_>) -> Result<Entry, FormatError> {
    let wrong = |what: String| FormatError::Safetensors(format!("tensor {}: {what}", quote(&numbers.name)));
    let module = numbers.name.strip_suffix(".weight").unwrap_or(&numbers.name);
    let beside = |leaf: &str| all.find(&format!("{module}.{leaf}"));
    if beside("weight_scale_2").is_some() {
        let what = "it has a second scale, which only NVFP4 weights may have; use another version of the model";
        return Err(FormatError::Unsupported(format!("tensor {}: {what}", quote(&numbers.name))));
    }
    let scales = beside("weight_scale_inv").or_else(|| beside("weight_scale"));
    let scales = scales.ok_or_else(|| wrong("its weight_scale or weight_scale_inv is missing".to_owned()))?;
    let Kind::Float(encoding) = scales.dtype else {
        let what = format!("tensor {}: scales that are not F32, F16 or BF16", quote(&scales.name));
        return Err(FormatError::Unsupported(format!("{what}; use a version with float scales")));
    };
    let unfit = || wrong(format!("scales {:?} for {:?} numbers", scales.shape, numbers.shape));
    let Some((&cols, outer)) = numbers.shape.split_last() else { return Err(unfit()) };
    let rows: usize = outer.iter().product();
    let count: usize = scales.shape.iter().product();
    let (places, block_rows, group) = match scales.shape.as_slice() {
        _ if count == 1 => (Scales { encoding, row: 0, group: 0 }, rows, cols),
        [.., 1] | [_] if count == rows => (Scales { encoding, row: 1, group: 0 }, 1, cols),
        [above @ .., down, across] if above.len() + 1 == outer.len() && *above == outer[..above.len()] => {
            let last = outer[above.len()];
            let [own_rows, own_columns] = match declared.default {
                Scheme::F8(F8Quant { block: Some(block) }) => block,
                _ => [128, 128],
            };
            let sides = (fitting(cols, *across, own_columns), fitting(last, *down, own_rows));
            let (Some(group), Some(block_rows)) = sides else { return Err(unfit()) };
            // The rows of all experts are numbered consecutively, so one expert's blocks must not extend into the next.
            if !above.is_empty() && !last.is_multiple_of(block_rows) {
                return Err(wrong(format!("{last} outputs of an expert in blocks of {block_rows}")));
            }
            (Scales { encoding, row: *across, group: 1 }, block_rows, group)
        }
        _ => return Err(unfit()),
    };
    let bytes = numbers.span.range.len() + scales.span.range.len();
    Ok(Entry {
        name: canonical(&numbers.name),
        info: TensorInfo { shape: numbers.shape.clone(), encoding: Encoding::F8 { group }, bytes: bytes as u64 },
        storage: Storage::F8(Box::new(F8 {
            numbers: numbers.span.clone(),
            scales: (scales.span.clone(), places),
            block_rows,
        })),
    })
}

/// Returns the side of `blocks` blocks over `size` elements: the declared side if it fits, else 128, else the side of equal blocks.
fn fitting(size: usize, blocks: usize, declared: usize) -> Option<usize> {
    let sides = [declared, 128, size.checked_div(blocks)?.max(1)];
    sides.into_iter().find(|side| size.div_ceil(*side) == blocks).map(|side| side.min(size))
}
