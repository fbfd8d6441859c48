//! The model configuration: one struct for all families and both file formats, and the bounds it must keep.
//!
//! `hf::config` and `gguf::config` read the values. The values here are those of a forward pass: all defaults and format-specific
//! conventions are resolved.

use std::borrow::Cow;

use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::audio::Audio;
use crate::bounds::{
    CONTEXT_MAX, DRAFT_LAYERS_MAX, EXPERTS_MAX, EXPERTS_TOTAL_MAX, GROUPS_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX,
    INTERMEDIATE_MAX, LAYERS_MAX, TAPS_MAX, VOCAB_MAX, positive, within, wrong,
};
use crate::draft_head;
use crate::encoder::Encoder;
use crate::encoding::{Dtype, Encoding};
use crate::error::FormatError;
use crate::quantization::Quantization;
use crate::variant::Variant;
use crate::vision::{RopeSections, Vision};

/// How a router scores experts and chooses among them.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Whether scores are sigmoids of the logits; otherwise their softmax over all experts.
    pub sigmoid: bool,
    /// Whether a learned bias is added to the scores for the choice alone (`gate.e_score_correction_bias`).
    pub correction: bool,
    /// Groups of neighbouring experts.
    pub groups: usize,
    /// Groups that a token chooses its experts from, by the sum of each group's two greatest scores.
    pub top_groups: usize,
    /// The factor on the weights of the chosen experts, applied last.
    pub scale: f32,
    /// Whether a learned gate weighs the shared expert.
    pub shared_gate: bool,
    /// Whether each expert has a stored factor on its weight (`expert_scale`).
    pub expert_scales: bool,
    /// Bound of the tanh soft cap on the router's logits.
    pub logit_softcap: Option<f32>,
    /// Whether the weight of a chosen expert is multiplied onto its input instead of its result.
    pub weighs_inputs: bool,
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            sigmoid: false,
            correction: false,
            groups: 1,
            top_groups: 1,
            scale: 1.0,
            shared_gate: true,
            expert_scales: false,
            logit_softcap: None,
            weighs_inputs: false,
        }
    }
}

/// A mixture of experts in place of a feed-forward part.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a token goes through.
    pub top_k: usize,
    /// Width between the projections of one expert.
    pub width: usize,
    /// Width of the expert that every token goes through; 0 without one.
    pub shared_width: usize,
    /// Whether the weights of the chosen experts are scaled to sum to 1.
    pub renormalise: bool,
    /// How the router scores experts.
    pub routing: Routing,
    /// Whether gate and up projection are stored as one tensor in which their outputs take turns. Otherwise gate's come first.
    pub alternating: bool,
    /// Whether the router and each projection of an expert have biases.
    pub biases: bool,
    /// Per layer, whether it has experts rather than a plain feed-forward part.
    pub layers: Vec<bool>,
}

/// The recurrent (Gated DeltaNet) layers of a hybrid model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaNet {
    /// Query and key heads; divides `value_heads`.
    pub key_heads: usize,
    /// Value heads, each with a state matrix of `key_dim` x `value_dim`.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Inputs of the causal convolution, the current one included.
    pub taps: usize,
    /// How value heads share key heads: neighbours do (false), or those a whole round of key heads apart (true), which
    /// is how GGUF files of Qwen 3.5 order them.
    pub tiled: bool,
    /// Per layer, whether it is recurrent.
    pub layers: Vec<bool>,
}

/// How rotary frequencies are stretched beyond the context of pre-training.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all (or, for GGUF, through the tensor `model.rope_freqs`).
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// The divisor of the long wavelengths.
        factor: f32,
        /// Wavelengths above `original / low` are divided.
        low: f32,
        /// Wavelengths below `original / high` are kept.
        high: f32,
        /// Context of pre-training in tokens.
        original: usize,
    },
    /// YaRN.
    Yarn(YarnScaling),
    /// LongRoPE.
    Long(LongRope),
    /// Only the shortest wavelengths rotate, as many as make `share` of a head. These wavelengths and the distance of their pairs are the
    /// same as in a head that rotates as a whole. All frequencies are divided by `factor`.
    Proportional {
        /// Share of a head that is rotated.
        share: f32,
        /// The divisor.
        factor: f32,
    },
}

/// LongRoPE: each frequency has its own divisor. A model has two lists of them, one for texts within the context of
/// pre-training and one for longer texts. The list is chosen once, by [`ModelConfig::max_context`]: cached keys fit one list only.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// The divisors. Empty if the tensor `model.rope_factors_long` or `model.rope_factors_short` holds them.
    pub factors: Box<[f32]>,
    /// Whether it is the list for longer texts.
    pub long: bool,
    /// The factor on sine and cosine.
    pub attention_factor: f32,
}

/// The parameters of YaRN, named as in its paper and in transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// The factor by which the context grows.
    pub factor: f32,
    /// Context of pre-training in tokens.
    pub original: usize,
    /// The factor on sine and cosine, already resolved from `mscale` and the default rule.
    pub attention_factor: f32,
    /// Rotations over the original context above which a frequency is kept.
    pub beta_fast: f32,
    /// Rotations below which a frequency is divided.
    pub beta_slow: f32,
    /// Whether the ramp's ends are rounded to whole dimensions.
    pub truncate: bool,
}

/// Everything a forward pass must know about a model besides its weights. Every value has been bounded.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; `heads * head_dim` need not equal `hidden_size`.
    pub head_dim: usize,
    /// Leading elements of a head that are rotated: all of them, except in models with partial rotation.
    pub rotary_dim: usize,
    /// Width between the projections of the plain feed-forward part.
    pub intermediate_size: usize,
    /// The mixture of experts, in models that have one.
    pub experts: Option<Experts>,
    /// The recurrent layers, in models that have them.
    pub delta_net: Option<DeltaNet>,
    /// The properties of a text encoder. None for a decoder.
    pub encoder: Option<Encoder>,
    /// The vision encoder that the configuration describes. Checkpoints converted for text alone may lack its weights.
    pub vision: Option<Vision>,
    /// The audio encoder that the configuration describes. Its weights may be missing as well.
    pub audio: Option<Audio>,
    /// Layers of the multi-token-prediction head that the configuration announces.
    pub draft_layers: usize,
    /// Whether attention's output is gated: the query projection makes, for each head, the query and then the gate.
    pub attention_gate: bool,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Epsilon of every norm.
    pub norm_eps: f32,
    /// Base of the rotary frequencies (of global layers, where a model has two kinds).
    pub rope_theta: f32,
    /// Base of the rotary frequencies of sliding layers; equals `rope_theta` where a model has one kind. Sliding layers
    /// of a model with its own local base take no `rope_scaling`.
    pub rope_local_theta: f32,
    /// Stretching of the rotary frequencies of global layers.
    pub rope_scaling: RopeScaling,
    /// The frequencies of time, height and width, in models with images.
    pub rope_sections: Option<RopeSections>,
    /// Whether a head rotates neighbouring pairs (2i, 2i+1) rather than halves (i, i + head_dim/2). True for GGUF files
    /// of architecture `llama`: their converter permutes the rows of the query and key projections.
    pub rope_interleaved: bool,
    /// Longest context in tokens that the model is made for.
    pub max_context: usize,
    /// Tokens that a token of a sliding layer attends to, itself included.
    pub sliding_window: Option<usize>,
    /// Per layer, whether it attends through the sliding window. All false when there is no window.
    pub layer_is_sliding: Vec<bool>,
    /// Whether the query, key and value projections have biases.
    pub attention_bias: bool,
    /// Whether the attention output projection has a bias.
    pub attention_output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normed per head before rotation.
    pub qk_norm: bool,
    /// The differences between the family and Llama.
    pub variant: Variant,
    /// Whether the output projection is the embedding table.
    pub tie_word_embeddings: bool,
    /// The activation of the feed-forward part.
    pub hidden_act: Activation,
    /// The factor on attention scores.
    pub query_scale: f32,
    /// The factor on embeddings. Gemma 3: the square root of the hidden size, unrounded.
    pub embedding_scale: f32,
    /// The number that is added to every norm weight before use: 1 for Gemma 3 and the hybrids in Hugging Face form, 0 elsewhere. The norm
    /// inside a recurrent layer is never shifted.
    pub norm_weight_offset: f32,
    /// Bound of the tanh soft cap on attention scores.
    pub attn_logit_softcap: Option<f32>,
    /// Bound of the tanh soft cap on output logits.
    pub final_logit_softcap: Option<f32>,
    /// The token that begins a sequence.
    pub bos_token_id: Option<u32>,
    /// The tokens that end an answer, without repetition.
    pub eos_token_ids: Vec<u32>,
    /// The float type that a Hugging Face configuration declares.
    pub torch_dtype: Option<Dtype>,
    /// The quantization that the configuration declares.
    pub quantization: Option<Quantization>,
}

impl ModelConfig {
    /// Checks every size against its bound, and that the parts fit together.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        within("layers", self.layers, LAYERS_MAX)?;
        within("hidden size", self.hidden_size, HIDDEN_MAX)?;
        within("attention heads", self.heads, HEADS_MAX)?;
        within("key-value heads", self.kv_heads, self.heads)?;
        within("head width", self.head_dim, HEAD_DIM_MAX)?;
        within("attention width (heads x head width)", self.heads * self.head_dim, HIDDEN_MAX)?;
        within("intermediate size", self.intermediate_size, INTERMEDIATE_MAX)?;
        within("vocabulary", self.vocab_size, VOCAB_MAX)?;
        within("context", self.max_context, CONTEXT_MAX)?;
        within("sliding window", self.sliding_window.unwrap_or(1), CONTEXT_MAX)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return wrong(format!("{} key-value heads do not divide {} heads", self.kv_heads, self.heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong(format!("a head width of {} cannot be rotated", self.head_dim));
        }
        within("rotated part of a head", self.rotary_dim, self.head_dim)?;
        if !self.rotary_dim.is_multiple_of(2) {
            return wrong(format!("a rotated part of {} elements is not even", self.rotary_dim));
        }
        within("draft layers", self.draft_layers + 1, DRAFT_LAYERS_MAX + 1)?;
        self.experts.as_ref().map_or(Ok(()), |experts| experts.check(self.layers))?;
        self.encoder.map_or(Ok(()), |encoder| encoder.check())?;
        self.delta_net.as_ref().map_or(Ok(()), |delta| delta.check(self.layers))?;
        if self.layer_is_sliding.len() != self.layers {
            return wrong(format!("{} layer types for {} layers", self.layer_is_sliding.len(), self.layers));
        }
        positive("norm epsilon", self.norm_eps, 1.0)?;
        positive("rope theta", self.rope_theta, 1e15)?;
        positive("local rope theta", self.rope_local_theta, 1e15)?;
        positive("query scale", self.query_scale, 1e6)?;
        positive("attention soft cap", self.attn_logit_softcap.unwrap_or(1.0), 1e6)?;
        positive("final soft cap", self.final_logit_softcap.unwrap_or(1.0), 1e6)?;
        self.vision.as_ref().map_or(Ok(()), Vision::check)?;
        self.audio.as_ref().map_or(Ok(()), Audio::check)?;
        self.rope_sections.map_or(Ok(()), |sections| sections.check(self.rotary_dim))?;
        self.check_variant()?;
        self.rope_scaling.check(self.rotary_dim / 2)
    }

    /// Returns the name of a module in the quantization's rules. The name of a draft head's module may differ there.
    fn published<'a>(&self, module: &'a str) -> Cow<'a, str> {
        let head = !self.architecture.is_hybrid() && self.draft_layers > 0;
        let published = if head { draft_head::published(module, self.layers) } else { None };
        published.map_or(Cow::Borrowed(module), Cow::Owned)
    }

    /// The encoding that a tensor will have, judged from the configuration alone, for planning before any weight is
    /// there: `name` is canonical and ends in `.weight` or `.bias`, `shape` has the outermost dimension first.
    pub fn planned_encoding(&self, name: &str, shape: &[usize]) -> Encoding {
        let dims = shape.len();
        // Converters leave encoders in floats. Biases of experts have two dimensions.
        let matrix = dims == 2 && !["visual.", "audio."].iter().any(|encoder| name.starts_with(encoder))
            || dims == 3 && name.contains(".experts.");
        if matrix
            && name.ends_with(".weight")
            && let Some(quantization) = &self.quantization
            && let Some(scheme) = quantization.of(&self.published(name.strip_suffix(".weight").unwrap_or(name)))
        {
            return scheme.encoding(self.torch_dtype.unwrap_or(Dtype::Bf16), shape[dims - 1]);
        }
        self.torch_dtype.unwrap_or(Dtype::Bf16).encoding()
    }
}

impl Experts {
    fn check(&self, layers: usize) -> Result<(), FormatError> {
        within("experts", self.count, EXPERTS_MAX)?;
        within("experts of all layers", self.count * layers, EXPERTS_TOTAL_MAX)?;
        within("experts per token", self.top_k, self.count)?;
        within("expert width", self.width, INTERMEDIATE_MAX)?;
        within("shared expert width", self.shared_width.max(1), INTERMEDIATE_MAX)?;
        let Routing { groups, top_groups, scale, logit_softcap, .. } = self.routing;
        within("groups of experts", groups, GROUPS_MAX)?;
        within("groups of experts per token", top_groups, groups)?;
        positive("scale of routed experts", scale, 1e6)?;
        positive("soft cap of a router", logit_softcap.unwrap_or(1.0), 1e6)?;
        let per_group = self.count / groups;
        if per_group * groups != self.count || groups > 1 && (per_group < 2 || self.top_k > top_groups * per_group) {
            return wrong(format!("{} of {} experts in {top_groups} of {groups} groups", self.top_k, self.count));
        }
        match self.layers.len() == layers {
            true => Ok(()),
            false => wrong(format!("{} expert flags for {layers} layers", self.layers.len())),
        }
    }
}

impl DeltaNet {
    fn check(&self, layers: usize) -> Result<(), FormatError> {
        within("linear_num_value_heads", self.value_heads, HEADS_MAX)?;
        within("linear_num_key_heads", self.key_heads, self.value_heads)?;
        within("linear_key_head_dim", self.key_dim, HEAD_DIM_MAX)?;
        within("linear_value_head_dim", self.value_dim, HEAD_DIM_MAX)?;
        within("linear_conv_kernel_dim", self.taps, TAPS_MAX)?;
        within("width of linear attention", 2 * self.key_heads * self.key_dim + self.value_width(), HIDDEN_MAX)?;
        if !self.value_heads.is_multiple_of(self.key_heads) {
            return wrong(format!(
                "linear_num_key_heads ({}) does not divide linear_num_value_heads ({})",
                self.key_heads, self.value_heads
            ));
        }
        if self.layers.len() != layers || !self.layers.contains(&true) || !self.layers.contains(&false) {
            return wrong(format!("layer_types must name linear_attention and full_attention, {layers} in all"));
        }
        Ok(())
    }

    /// Elements of all value heads together.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of all query heads together, and of all key heads.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }
}

impl RopeScaling {
    /// Checks the ranges of all factors.
    fn check(&self, frequencies: usize) -> Result<(), FormatError> {
        match *self {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope factor", factor, 1e6),
            RopeScaling::Proportional { share, factor } => {
                positive("rope partial_rotary_factor", share, 1.0)?;
                positive("rope factor", factor, 1e6)
            }
            RopeScaling::Llama3 { factor, low, high, original } => {
                positive("rope factor", factor, 1e6)?;
                positive("rope low_freq_factor", low, 1e6)?;
                positive("rope high_freq_factor", high, 1e6)?;
                if high < low {
                    return wrong(format!("rope high_freq_factor {high} is below low_freq_factor {low}"));
                }
                within("original context", original, CONTEXT_MAX)
            }
            RopeScaling::Yarn(yarn) => {
                positive("rope factor", yarn.factor, 1e6)?;
                positive("rope attention_factor", yarn.attention_factor, 1e6)?;
                positive("rope beta_fast", yarn.beta_fast, 1e6)?;
                positive("rope beta_slow", yarn.beta_slow, 1e6)?;
                within("original context", yarn.original, CONTEXT_MAX)
            }
            RopeScaling::Long(ref long) => {
                positive("rope attention_factor", long.attention_factor, 1e6)?;
                if !long.factors.is_empty() && long.factors.len() != frequencies {
                    return wrong(format!("{} rope factors for {frequencies} frequencies", long.factors.len()));
                }
                long.factors.iter().try_for_each(|factor| positive("rope factor", *factor, 1e6))
            }
        }
    }
}
