//! MLX affine group quantization as a configuration declares it. `hf::mlx` reads it.

use crate::encoding::{Dtype, QuantLayout, ScaleKind};
use std::collections::BTreeMap;

/// Width and group size of one quantized module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupQuant {
    /// Bits per code: 2, 3, 4, 5, 6 or 8.
    pub bits: u8,
    /// Elements per group: 32, 64 or 128.
    pub group: usize,
}

/// The quantization that a configuration declares: one default, and modules that differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// What holds for every linear layer and embedding without an override.
    pub default: GroupQuant,
    /// Canonical module name → its own quantization, or `None` for a module left in floats.
    pub(crate) overrides: BTreeMap<String, Option<GroupQuant>>,
}

impl GroupQuant {
    /// The layout of such a tensor when its scales are of type `scales`.
    pub fn layout(self, scales: Dtype) -> QuantLayout {
        let scales = match scales {
            Dtype::F32 => ScaleKind::F32,
            Dtype::F16 => ScaleKind::F16,
            Dtype::Bf16 => ScaleKind::Bf16,
        };
        QuantLayout { code_bits: self.bits, group: self.group, zero: 0, scales, offset: true }
    }
}

impl Quantization {
    /// The quantization of a module by canonical name without `.weight`; `None` when it is left in floats.
    pub fn of(&self, module: &str) -> Option<GroupQuant> {
        self.overrides.get(module).copied().unwrap_or(Some(self.default))
    }
}
