//! The differences between a decoder's layers and Llama's, and among its own layers. A family's file (`family`) sets them.

use crate::bounds::{HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, TAPS_MAX, within, wrong};
use crate::error::FormatError;
use crate::qwen4::Qwen4;

/// The places of a layer's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Norms {
    /// Before attention and before the feed-forward part (`input_layernorm`, `post_attention_layernorm`).
    #[default]
    Before,
    /// After each of the two, before its result joins the residual stream.
    After,
    /// Before and after each of the two.
    Around,
    /// Before the layer's only part (`input_layernorm`): each layer is attention, a recurrence or a feed-forward part.
    Single,
}

/// The elements of queries and keys that are normed together, and the step at which they are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QkNorm {
    /// Each head, before rotation.
    #[default]
    Head,
    /// Each head, after rotation.
    RotatedHead,
    /// All heads of a row together, before rotation.
    Row,
}

/// The gate on the result of attention: an activated projection of the layer's input (`self_attn.gate_proj`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputGate {
    /// The softplus of the projection.
    Softplus {
        /// Whether a head has one gate for all its elements. Otherwise each element has one.
        per_head: bool,
    },
    /// The sigmoid of the projection, one for each element.
    Sigmoid,
}

/// The growth of queries with their position: by `1 + beta * ln(1 + floor((position + offset) / length))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// The factor on the logarithm.
    pub beta: f32,
    /// Positions in a step of growth.
    pub length: usize,
    /// The number that is added to the position.
    pub offset: usize,
    /// Whether queries grow only in layers that do not rotate.
    pub unrotated_only: bool,
}

/// The heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerHeads {
    /// Key and value heads; divides the query heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Leading elements of a head that are rotated.
    pub rotary_dim: usize,
    /// Whether values are the key projection's results, because there is no value projection.
    pub values_are_keys: bool,
}

/// A second table of embeddings. Each layer gets its own part of a token's row, mixed with a projection of the token's embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerInput {
    /// Elements of one layer's part.
    pub width: usize,
    /// Rows of the table.
    pub rows: usize,
    /// The token with the row that is used for positions that an encoder fills.
    pub pad: u32,
}

/// The part of a layer that mixes the positions of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Attention.
    Attention,
    /// A gated short convolution: its state is the last inputs.
    ShortConv,
    /// Mamba-2.
    Mamba,
    /// Attention and Mamba-2 side by side.
    Parallel,
    /// Nothing: the layer is a feed-forward part.
    None,
}

/// Latent attention (MLA). The keys and values of all heads are projections of one row a token. Only a rotated part of the keys does not
/// come from this row; all heads share that part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Elements of the row.
    pub rank: usize,
    /// Elements of a key that are rotated.
    pub rope_dim: usize,
    /// Elements of a key that each head has for itself.
    pub nope_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Width between the two projections of queries; none if there is one projection.
    pub query_rank: Option<usize>,
}

impl Latent {
    /// Elements that the cache keeps as a token's key.
    pub fn width(&self) -> usize {
        self.rope_dim.saturating_add(self.rank)
    }

    pub(crate) fn check(&self, heads: usize) -> Result<(), FormatError> {
        within("kv_lora_rank", self.rank, HEAD_DIM_MAX)?;
        within("rotated part of a key", self.rope_dim, HEAD_DIM_MAX)?;
        within("other part of a key", self.nope_dim, HEAD_DIM_MAX)?;
        within("width of a value", self.value_dim, HEAD_DIM_MAX)?;
        within("width of all values", heads * self.value_dim, HIDDEN_MAX)?;
        within("q_lora_rank", self.query_rank.unwrap_or(1), HIDDEN_MAX)
    }
}

/// The Mamba-2 layers of a hybrid model.
#[derive(Debug, Clone, PartialEq)]
pub struct Mamba {
    /// Heads, each with a state of `state_dim` × `head_dim`.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of B and of C, which are the key and the query of a state.
    pub state_dim: usize,
    /// Groups of neighbouring heads that share B and C; divides `heads`.
    pub groups: usize,
    /// Inputs of the causal convolution, the current one included.
    pub taps: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// The least and the greatest time step.
    pub time_limits: [f32; 2],
    /// Whether the result of the recurrence is normed.
    pub norm: bool,
    /// Factors on the projections, in families that have them.
    pub scales: Option<MambaScales>,
}

/// Factors on the projections of a Mamba-2 layer: gate, values, B, C, time step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaScales(pub [f32; 5]);

impl Mamba {
    /// Elements of all heads together.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: values, B and C.
    pub fn channels(&self) -> usize {
        self.width() + 2 * self.groups * self.state_dim
    }

    pub(crate) fn check(&self) -> Result<(), FormatError> {
        within("heads of Mamba layers", self.heads, HEADS_MAX)?;
        within("groups of Mamba heads", self.groups, self.heads)?;
        within("width of a Mamba head", self.head_dim, HEAD_DIM_MAX)?;
        within("state of a Mamba head", self.state_dim, HEAD_DIM_MAX)?;
        within("width of Mamba layers", self.channels(), HIDDEN_MAX)?;
        check_taps(self.taps)?;
        let [least, most] = self.time_limits;
        if !(least >= 0.0 && least < most) {
            return wrong(format!("time steps from {least} to {most}: they must be from 0 on and ascend"));
        }
        match self.heads.is_multiple_of(self.groups) {
            true => Ok(()),
            false => wrong(format!("{} groups do not divide {} Mamba heads", self.groups, self.heads)),
        }
    }
}

/// Refuses a causal convolution that looks back to nothing, or too far.
pub(crate) fn check_taps(taps: usize) -> Result<(), FormatError> {
    match taps {
        2..=TAPS_MAX => Ok(()),
        _ => wrong(format!("convolution of {taps} inputs, allowed are 2 to {TAPS_MAX}")),
    }
}

/// The differences between a family and Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct Variant {
    /// Per layer, the part that mixes positions. Empty: attention in all layers.
    pub mixers: Vec<Mixer>,
    /// Inputs of a short convolution, the current one included; 0 without such layers.
    pub conv_taps: usize,
    /// The Mamba-2 layers, in families that have them.
    pub mamba: Option<Mamba>,
    /// The factors on the results of attention and of Mamba-2, in layers with both side by side.
    pub parallel_scales: [f32; 2],
    /// The factors on the feed-forward part's gate, before its activation, and on the part's result.
    pub mlp_scales: Option<[f32; 2]>,
    /// Latent attention, in families that have it. The cache then stores the latent row as its head.
    pub latent: Option<Latent>,
    /// Per layer, whether it has a feed-forward part. Empty: all layers have.
    pub transforms: Vec<bool>,
    /// Whether feed-forward parts and experts have no gate: the activation is applied to the up projection.
    pub ungated: bool,
    /// The width to which a row is projected before the experts, and from which their result is projected back.
    pub expert_latent: Option<usize>,
    /// Whether the plain feed-forward part has the tensor names of a mixture's shared expert.
    pub dense_is_shared: bool,
    /// Where the norms of a layer stand.
    pub norms: Norms,
    /// The kind of query and key norms, if [`crate::ModelConfig::qk_norm`] is true.
    pub qk_norm: QkNorm,
    /// Whether layers that do not rotate have no query and key norms.
    pub rotated_qk_norm: bool,
    /// Whether the query and key norms have no weights.
    pub plain_qk_norm: bool,
    /// Whether embeddings are normed, without weights.
    pub embedding_norm: bool,
    /// Whether the final norm's weights are stored without the offset, so that [`crate::ModelConfig::norm_weight_offset`] is added to those
    /// of layers only.
    pub plain_final_norm: bool,
    /// Epsilon of the norms after each half of a layer; none if it is the same as for the others.
    pub post_norm_eps: Option<f32>,
    /// Whether published checkpoints store queries, keys and values as one matrix `qkv_proj`.
    pub fused_qkv: bool,
    /// Whether published checkpoints store gate and up projection as one matrix `gate_up_proj`.
    pub fused_gate_up: bool,
    /// Per layer, whether queries and keys are rotated. Empty: in all layers.
    pub rotated: Vec<bool>,
    /// Whether the window of sliding layers is a chunk: a row sees positions from the last multiple of the window on.
    pub chunked: bool,
    /// Whether sliding layers rotate by [`crate::ModelConfig::rope_local_theta`] and without scaling. Otherwise all layers rotate in the
    /// same way.
    pub local_rope: bool,
    /// The factor on the results of attention and feed-forward part before they join the residual stream.
    pub residual_scale: f32,
    /// Whether the checkpoint has the rows of the answers "yes" and "no" ([`crate::JUDGE`]) in place of its output head. Such a model
    /// scores texts and generates none.
    pub judges: bool,
    /// The factor on output logits.
    pub logit_scale: f32,
    /// The growth of queries with their position.
    pub query_growth: Option<QueryGrowth>,
    /// Whether each head has a learned logit that takes part in the softmax and has no value (`self_attn.sinks`).
    pub sinks: bool,
    /// The gate on attention's result, if it has a projection for itself. [`crate::ModelConfig::attention_gate`] is the other kind.
    pub output_gate: Option<OutputGate>,
    /// Per layer, the number of query heads. Empty: [`crate::ModelConfig::heads`] in all layers.
    pub query_heads: Vec<usize>,
    /// Heads of layers that see the whole context; none if they are the same as in sliding layers.
    pub global_heads: Option<LayerHeads>,
    /// The number of layers at the end without keys and values. Each reads those of the last earlier layer of its kind: sliding or not.
    pub shared_kv_layers: usize,
    /// Whether each head of values is normed, without weights.
    pub value_norm: bool,
    /// Per layer, the width of the plain feed-forward part. Empty: [`crate::ModelConfig::intermediate_size`] in all layers.
    pub mlp_widths: Vec<usize>,
    /// Whether layers with experts also have the plain feed-forward part, and each of the two has norms.
    pub mlp_beside_experts: bool,
    /// The inputs that each layer has besides the residual stream.
    pub per_layer_input: Option<PerLayerInput>,
    /// Whether the result of each layer is multiplied with a stored number (`layer_scalar`).
    pub layer_scalar: bool,
    /// The parts of Qwen4-Exp besides the layers of Qwen 3.5 MoE.
    pub qwen4: Option<Box<Qwen4>>,
}

impl Default for Variant {
    fn default() -> Self {
        Self {
            mixers: Vec::new(),
            conv_taps: 0,
            mamba: None,
            parallel_scales: [1.0; 2],
            mlp_scales: None,
            latent: None,
            transforms: Vec::new(),
            ungated: false,
            expert_latent: None,
            dense_is_shared: false,
            norms: Norms::Before,
            qk_norm: QkNorm::Head,
            rotated_qk_norm: false,
            plain_qk_norm: false,
            embedding_norm: false,
            plain_final_norm: false,
            post_norm_eps: None,
            fused_qkv: false,
            fused_gate_up: false,
            rotated: Vec::new(),
            chunked: false,
            local_rope: false,
            residual_scale: 1.0,
            judges: false,
            logit_scale: 1.0,
            query_growth: None,
            sinks: false,
            output_gate: None,
            query_heads: Vec::new(),
            global_heads: None,
            shared_kv_layers: 0,
            value_norm: false,
            mlp_widths: Vec::new(),
            mlp_beside_experts: false,
            per_layer_input: None,
            layer_scalar: false,
            qwen4: None,
        }
    }
}

impl Variant {
    /// Whether layer `layer` has a feed-forward part.
    pub fn transforms(&self, layer: usize) -> bool {
        self.transforms.get(layer).copied().unwrap_or(true)
    }

    /// The part of layer `layer` that mixes positions.
    pub fn mixer(&self, layer: usize) -> Mixer {
        self.mixers.get(layer).copied().unwrap_or(Mixer::Attention)
    }

    /// Whether layer `layer` rotates queries and keys.
    pub fn rotates(&self, layer: usize) -> bool {
        self.rotated.get(layer).copied().unwrap_or(true)
    }
}
