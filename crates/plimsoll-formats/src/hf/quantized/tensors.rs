//! All tensors of a checkpoint by name, and the names of a quantized weight's parts.

use crate::hf::safetensors::{Found, Kind};
use crate::mapping::Mapping;

/// The endings of names under which the codes of a quantized weight are stored.
pub(super) const CODES: [&str; 3] = [".weight", ".qweight", ".weight_packed"];
/// The endings of the names of tensors that belong to such codes.
const BESIDE: [&str; 16] = [
    ".scales",
    ".biases",
    ".qzeros",
    ".g_idx",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".input_scale",
    ".output_scale",
    ".weight_scale_inv",
    ".activation_scale",
    ".input_zero_point",
    ".weight_scale_2",
    ".weight_global_scale",
    ".input_global_scale",
];

/// All tensors of a checkpoint, as stored, with their bytes.
pub(super) struct Tensors<'a> {
    all: &'a [Found],
    by_name: Vec<u32>,
    files: &'a [Mapping],
}

impl<'a> Tensors<'a> {
    pub(super) fn new(all: &'a [Found], files: &'a [Mapping]) -> Tensors<'a> {
        let mut by_name: Vec<u32> = (0..all.len() as u32).collect();
        by_name.sort_unstable_by(|&a, &b| all[a as usize].name.cmp(&all[b as usize].name));
        Tensors { all, by_name, files }
    }

    /// The tensor with this stored name.
    pub(super) fn find(&self, name: &str) -> Option<&'a Found> {
        let at = self.by_name.binary_search_by(|&index| self.all[index as usize].name.as_str().cmp(name)).ok()?;
        Some(&self.all[self.by_name[at] as usize])
    }

    /// The bytes of a tensor.
    pub(super) fn bytes(&self, tensor: &Found) -> &'a [u8] {
        &self.files[tensor.span.file].bytes()[tensor.span.range.clone()]
    }

    /// Whether a tensor only belongs to the codes of a quantized weight.
    pub(super) fn is_beside_codes(&self, name: &str) -> bool {
        let module = BESIDE.iter().find_map(|end| name.strip_suffix(end));
        module.is_some_and(|module| {
            let codes = CODES.iter().filter_map(|end| self.find(&format!("{module}{end}")));
            codes.into_iter().any(|codes| !matches!(codes.dtype, Kind::Float(_)))
        })
    }
}
