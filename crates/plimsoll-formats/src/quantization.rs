//! The quantization that a configuration declares, module by module. `hf` reads it; planning uses it.

use crate::decode::codebooks::E2M1_BOOK;
use crate::encoding::{Dtype, Encoding, QuantLayout, ScaleKind};
use regex::Regex;
use std::collections::BTreeMap;

/// The kind of codes and scales of a module that is quantized in groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Integers with a float scale and offset.
    Affine,
    /// E2M1 numbers of 4 bits with an exponent.
    Mxfp4,
    /// E4M3 numbers of 8 bits with an exponent.
    Mxfp8,
    /// E2M1 numbers of 4 bits with an E4M3 scale.
    Nvfp4,
    /// `Nvfp4` with a second scale for the tensor: ModelOpt and compressed-tensors.
    Nvfp4Scaled,
}

/// Width and group size of one quantized module of an MLX checkpoint, and of gpt-oss's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupQuant {
    /// Bits per code: 2, 3, 4, 5, 6 or 8.
    pub bits: u8,
    /// Elements per group: 32, 64 or 128; 16 in NVFP4.
    pub group: usize,
    /// The kind of codes and scales.
    pub mode: Mode,
}

/// Integer codes with a scale, and perhaps a zero point, per group: AWQ, GPTQ, AutoRound, compressed-tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntegerQuant {
    /// Bits per code.
    pub bits: u8,
    /// Elements per group; none: a whole row.
    pub group: Option<usize>,
    /// Whether one code stands for zero everywhere.
    pub symmetric: bool,
    /// The type of the scales; none: the model's type.
    pub scales: Option<Dtype>,
}

/// FP8 numbers (E4M3) with a scale per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct F8Quant {
    /// Rows and columns of a block; none: a scale for each row, or for all.
    pub block: Option<[usize; 2]>,
}

/// How the weights of one quantized module are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// MLX's modes: codes with a scale, and perhaps an offset, per group.
    Group(GroupQuant),
    /// Codes with a scale and a zero point per group.
    Integer(IntegerQuant),
    /// FP8 numbers with a scale per block.
    F8(F8Quant),
}

/// The layout of the tensors of a quantized checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// MLX: `weight`, `scales`, `biases`.
    Mlx,
    /// gpt-oss: experts in MXFP4.
    Mxfp4,
    /// AWQ: `qweight`, `qzeros`, `scales`; words hold neighbouring outputs in an interleaved order.
    Awq,
    /// GPTQ: the same names; words of `qweight` hold neighbouring inputs.
    Gptq {
        /// Whether `qzeros` holds each zero point less one, as the first version of the format does.
        zeros_less_one: bool,
    },
    /// compressed-tensors: `weight_packed` or `weight`, `weight_scale`, `weight_zero_point`.
    CompressedTensors,
    /// FP8 as DeepSeek, Qwen, FBGEMM and ModelOpt write it: `weight`, and `weight_scale_inv` or `weight_scale`. ModelOpt's NVFP4:
    /// `weight`, `weight_scale`, `weight_scale_2`.
    F8,
}

/// The module names that a rule applies to.
#[derive(Debug, Clone)]
pub(crate) enum Pattern {
    /// Names that contain this text.
    Contains(String),
    /// Names that a regular expression matches from their beginning.
    Regex(Regex),
    /// A regular expression that this engine's library does not support. It matches all names, so that a plan is an upper limit.
    Any,
}

impl Pattern {
    fn matches(&self, module: &str) -> bool {
        match self {
            Pattern::Contains(text) => module.contains(text),
            Pattern::Regex(regex) => regex.is_match(module),
            Pattern::Any => true,
        }
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Pattern) -> bool {
        match (self, other) {
            (Pattern::Contains(a), Pattern::Contains(b)) => a == b,
            (Pattern::Regex(a), Pattern::Regex(b)) => a.as_str() == b.as_str(),
            (Pattern::Any, Pattern::Any) => true,
            _ => false,
        }
    }
}

/// The quantization that a configuration declares: one default, and modules that differ.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    /// The layout of the tensors.
    pub method: Method,
    /// The quantization of every linear layer that no override or rule names.
    pub default: Scheme,
    /// Whether only experts are quantized.
    pub(crate) experts_only: bool,
    /// Whether the token embedding is quantized too.
    pub(crate) embedding: bool,
    /// Whether the output projection is quantized too.
    pub(crate) head: bool,
    /// Canonical module name → its quantization, or `None` for a module left in floats.
    pub(crate) overrides: BTreeMap<String, Option<Scheme>>,
    /// Rules for several modules. The first rule that matches applies.
    pub(crate) rules: Vec<(Pattern, Option<Scheme>)>,
}

impl GroupQuant {
    /// Returns the encoding of such a tensor. Its float scales, if it has any, are of type `scales`.
    pub fn encoding(self, scales: Dtype) -> Encoding {
        let (codebook, zero) = E2M1_BOOK;
        let (code_bits, group) = (self.bits, self.group);
        let micro = |scales| QuantLayout { code_bits, group, zero, scales, offset: false, codebook: Some(codebook) };
        Encoding::Quant(match self.mode {
            Mode::Affine => {
                QuantLayout { code_bits, group, zero: 0, scales: scales.scales(), offset: true, codebook: None }
            }
            Mode::Mxfp4 => micro(ScaleKind::E8m0Half),
            Mode::Nvfp4 => micro(ScaleKind::Ue4m3Half),
            // The product of both scales.
            Mode::Nvfp4Scaled => micro(ScaleKind::F32),
            // A number of four digits times a power of two is a bfloat16.
            Mode::Mxfp8 => return Encoding::BF16,
        })
    }
}

impl IntegerQuant {
    /// Returns the layout of such a tensor with rows of `cols` elements, in a model of type `dtype`.
    pub fn layout(self, dtype: Dtype, cols: usize) -> QuantLayout {
        let (code_bits, group) = (self.bits, self.group.unwrap_or(cols));
        match self.symmetric {
            true => {
                let scales = self.scales.unwrap_or(dtype).scales();
                QuantLayout { code_bits, group, zero: 1 << (code_bits - 1), scales, offset: false, codebook: None }
            }
            // A scale times a zero point has more digits than the scale's own type.
            false => QuantLayout { code_bits, group, zero: 0, scales: ScaleKind::F32, offset: true, codebook: None },
        }
    }
}

impl Scheme {
    /// Returns the encoding of such a tensor with rows of `cols` elements, in a model of type `dtype`.
    pub fn encoding(self, dtype: Dtype, cols: usize) -> Encoding {
        match self {
            Scheme::Group(quant) => quant.encoding(dtype),
            Scheme::Integer(quant) => Encoding::Quant(quant.layout(dtype, cols)),
            Scheme::F8(quant) => Encoding::F8 { group: quant.block.map_or(cols, |[_, columns]| columns.min(cols)) },
        }
    }
}

impl Quantization {
    /// Returns the quantization of a module by canonical name without `.weight`. `None` if it is left in floats.
    pub fn of(&self, module: &str) -> Option<Scheme> {
        if let Some(own) = self.overrides.get(module) {
            return *own;
        }
        if self.experts_only && !module.contains(".experts.") {
            return None;
        }
        if !self.embedding && module.ends_with("embed_tokens") || !self.head && module == "lm_head" {
            return None;
        }
        match self.rules.iter().find(|(pattern, _)| pattern.matches(module)) {
            Some((_, own)) => *own,
            None => Some(self.default),
        }
    }
}
