//! Tensors of small floats with one byte of scale per group: MLX's modes `mxfp4`, `mxfp8` and `nvfp4` (`X.weight` and `X.scales`), and
//! gpt-oss's experts (`X_blocks` and `X_scales`).

use crate::directory::{Entry, Storage};
use crate::encoding::{Dtype, TensorInfo};
use crate::error::{FormatError, quote};
use crate::hf::names::canonical;
use crate::hf::safetensors::{Found, Kind};
use crate::quantization::{GroupQuant, Mode};

/// The ending of the names of gpt-oss's codes.
pub(super) const BLOCKS: &str = "_blocks";
/// Bytes of one of gpt-oss's blocks.
const BLOCK_BYTES: usize = 16;

/// Joins a packed weight of MLX with its scales.
pub(super) fn mlx_entry<'a>(
    weight: &Found,
    quant: GroupQuant,
    find: impl Fn(&str) -> Option<&'a Found>,
) -> Result<Entry, FormatError> {
    let module = weight.name.strip_suffix(".weight").unwrap_or(&weight.name);
    if find(&format!("{module}.global_scale")).is_some() {
        let what = format!("tensor {}: nvfp4 with a global scale; convert it without one", quote(&weight.name));
        return Err(FormatError::Unsupported(what));
    }
    let (words, rows) = weight.shape.split_last().ok_or_else(|| wrong(weight, "it has no dimensions"))?;
    let bytes = words.checked_mul(4).ok_or_else(|| wrong(weight, "its shape overflows"))?;
    join(weight, (find(&format!("{module}.scales")), Kind::U8), (rows, bytes), quant)
}

/// Joins the codes of some of gpt-oss's experts with their scales: `[experts, rows, groups, 16]` and `[experts, rows, groups]` bytes.
/// `None` for another tensor whose name ends in [`BLOCKS`].
pub(super) fn blocks_entry<'a>(
    blocks: &Found,
    find: impl Fn(&str) -> Option<&'a Found>,
) -> Option<Result<Entry, FormatError>> {
    let module = blocks.name.strip_suffix(BLOCKS)?;
    let scales = find(&format!("{module}_scales"))?;
    let [rows @ .., groups, BLOCK_BYTES] = blocks.shape.as_slice() else {
        return Some(Err(wrong(blocks, "its last dimension is not 16")));
    };
    let quant = GroupQuant { bits: 4, group: 32, mode: Mode::Mxfp4 };
    let joined = match groups.checked_mul(BLOCK_BYTES) {
        Some(bytes) => join(blocks, (Some(scales), Kind::U8), (rows, bytes), quant),
        None => Err(wrong(blocks, "its shape overflows")),
    };
    Some(joined.map(|entry| Entry { name: canonical(module), ..entry }))
}

/// Joins codes of `bytes` bytes a row with their scales of type `kind`.
pub(super) fn join(
    codes: &Found,
    (scales, kind): (Option<&Found>, Kind),
    (rows, bytes): (&[usize], usize),
    quant: GroupQuant,
) -> Result<Entry, FormatError> {
    let scales = scales.ok_or_else(|| wrong(codes, "its scales are missing"))?;
    if scales.dtype != kind {
        let expected = if kind == Kind::F8 { "E4M3 numbers" } else { "bytes" };
        return Err(wrong(codes, &format!("its scales are not {expected}")));
    }
    let (groups, scale_rows) =
        scales.shape.split_last().ok_or_else(|| wrong(codes, "its scales have no dimensions"))?;
    let cols =
        groups.checked_mul(quant.group).filter(|cols| cols.checked_mul(quant.bits.into()) == bytes.checked_mul(8));
    let (true, Some(cols)) = (rows == scale_rows, cols) else {
        let what = format!("{:?} codes and {:?} scales are no groups of {}", codes.shape, scales.shape, quant.group);
        return Err(wrong(codes, &what));
    };
    let stored = codes.span.range.len() + scales.span.range.len();
    Ok(Entry {
        name: canonical(&codes.name),
        info: TensorInfo {
            shape: [rows, &[cols]].concat(),
            encoding: quant.encoding(Dtype::Bf16),
            bytes: stored as u64,
        },
        storage: Storage::Micro { codes: codes.span.clone(), scales: scales.span.clone() },
    })
}

fn wrong(tensor: &Found, what: &str) -> FormatError {
    FormatError::Safetensors(format!("tensor {}: {what}", quote(&tensor.name)))
}
