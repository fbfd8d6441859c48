//! What decoder-only transformers share: attention and gated feed-forward around residual connections.
//!
//! A family's file says which weights there are and in which order its norms stand; the arithmetic of the parts is here once.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, FeedForward, Input, LinearId, Mode, Rotary,
    RowPiece, StepInput, VectorId,
};
use plimsoll_formats::{Activation as ConfigActivation, ModelConfig};

use crate::Output;

/// A norm's weights, with 1 added where they are stored around zero.
///
/// Converters to MLX and GGUF add it, but some leave the draft head as it was: there a negative weight, which no ready norm has,
/// tells.
pub fn norm(config: &ModelConfig, name: &str, len: usize, declare: &mut Declare<'_>) -> Result<VectorId, DeclareError> {
    let mut plus = config.norm_weight_offset;
    if plus == 0.0 && name.starts_with("mtp.") {
        let negative = declare.read_vector(name)?.is_some_and(|weights| weights.iter().any(|weight| *weight < 0.0));
        plus = if negative { 1.0 } else { 0.0 };
    }
    declare.vector(name, len, plus)
}

/// Where an attention layer stands.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPlace {
    /// Its index among the layers that have keys and values in the cache.
    pub cache: usize,
    /// Whether it attends through the sliding window.
    pub sliding: bool,
}

/// Weights of one attention layer.
pub struct AttentionBlock {
    q: LinearId,
    k: LinearId,
    v: LinearId,
    o: LinearId,
    /// Its sigmoid is multiplied onto what attention gives, where the family does so.
    gate: Option<LinearId>,
    /// Per-head norms of queries and keys, where the family has them.
    norms: Option<[VectorId; 2]>,
    kv_heads: usize,
    head_dim: usize,
    eps: f32,
    rope_interleaved: bool,
    spec: Attention,
}

impl AttentionBlock {
    /// Declares `{prefix}.self_attn.*` of a layer at `place`.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        place: AttentionPlace,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("{prefix}.self_attn");
        let (heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
        if head_dim % 16 != 0 {
            return Err(DeclareError::Unsupported(format!(
                "heads of {head_dim} elements are not supported: the width must be a multiple of 16"
            )));
        }
        let mut projection = |name: &str, out: usize| {
            let name = format!("{prefix}.{name}");
            match config.attention_bias {
                true => declare.linear_with_bias(&name, out, config.hidden_size),
                false => declare.linear(&format!("{name}.weight"), out, config.hidden_size),
            }
        };
        let q = match config.attention_gate {
            true => None,
            false => Some(projection("q_proj", heads * head_dim)?),
        };
        let k = projection("k_proj", kv_heads * head_dim)?;
        let v = projection("v_proj", kv_heads * head_dim)?;
        let o = match config.attention_output_bias {
            true => declare.linear_with_bias(&format!("{prefix}.o_proj"), config.hidden_size, heads * head_dim)?,
            false => declare.linear(&format!("{prefix}.o_proj.weight"), config.hidden_size, heads * head_dim)?,
        };
        let (q, gate) = match q {
            Some(q) => (q, None),
            None => {
                // The stored rows alternate: a head's query, then its gate.
                let half = |first| RowPiece { first, rows: heads * head_dim, run: head_dim, stride: 2 * head_dim };
                let mut rows = |first| {
                    let stored = [2 * heads * head_dim, config.hidden_size];
                    declare.linear_rows(&format!("{prefix}.q_proj.weight"), &stored, &[half(first)], config.hidden_size)
                };
                (rows(0)?, Some(rows(head_dim)?))
            }
        };
        let mut head_norm = |name: &str| norm(config, &format!("{prefix}.{name}.weight"), head_dim, declare);
        let norms = if config.qk_norm { Some([head_norm("q_norm")?, head_norm("k_norm")?]) } else { None };
        Ok(Self {
            q,
            k,
            v,
            o,
            gate,
            norms,
            kv_heads,
            head_dim,
            eps: config.norm_eps,
            rope_interleaved: config.rope_interleaved,
            spec: Attention {
                layer: place.cache,
                heads,
                scale: config.query_scale,
                window: config.sliding_window.filter(|_| place.sliding),
                softcap: config.attn_logit_softcap,
            },
        })
    }

    /// `out (+)= attention(input)`; `angles` are this layer's rotary angles.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        angles: Buf,
        out: Buf,
        mode: Mode,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (scope, x) = (device.mark(), input.x);
        let q = device.temp(x.rows, self.spec.heads * self.head_dim)?;
        let k = device.temp(x.rows, self.kv_heads * self.head_dim)?;
        let v = device.temp(x.rows, self.kv_heads * self.head_dim)?;
        let gate = match self.gate {
            Some(gate) => {
                let buf = device.temp(x.rows, q.cols)?;
                let layers = [(self.q, q), (self.k, k), (self.v, v), (gate, buf)];
                device.linear_rows(input, &layers, Mode::Store, step.rounded_rows)?;
                Some(buf)
            }
            None => {
                let layers = [(self.q, q), (self.k, k), (self.v, v)];
                device.linear_rows(input, &layers, Mode::Store, step.rounded_rows)?;
                None
            }
        };
        let attended = device.temp(x.rows, self.spec.heads * self.head_dim)?;
        let rotary = Rotary { norms: self.norms, eps: self.eps, angles, interleaved: self.rope_interleaved };
        device.attention(&self.spec, Some(&rotary), attended, q, k, v, step);
        let gated = gate.map_or(attended, |gate| {
            device.glu(gate, attended, Activation::Sigmoid);
            gate
        });
        device.linear_rows(gated.into(), &[(self.o, out)], mode, step.rounded_rows)?;
        device.release(scope);
        Ok(())
    }
}

/// Declares `{prefix}.gate_proj` and its sisters, `width` wide between them.
pub fn feed_forward(
    config: &ModelConfig,
    prefix: &str,
    width: usize,
    declare: &mut Declare<'_>,
) -> Result<FeedForward, DeclareError> {
    let hidden = config.hidden_size;
    let mut matrix = |name: &str, out: usize, k: usize| match config.mlp_bias {
        true => declare.linear_with_bias(&format!("{prefix}.{name}"), out, k),
        false => declare.linear(&format!("{prefix}.{name}.weight"), out, k),
    };
    Ok(FeedForward {
        gate: matrix("gate_proj", width, hidden)?,
        up: matrix("up_proj", width, hidden)?,
        down: matrix("down_proj", hidden, width)?,
        width,
        act: activation(config.hidden_act),
    })
}

/// The device's name for the configuration's activation.
pub(crate) fn activation(act: ConfigActivation) -> Activation {
    match act {
        ConfigActivation::Silu => Activation::Silu,
        ConfigActivation::Gelu => Activation::Gelu,
        ConfigActivation::GeluQuick => Activation::GeluQuick,
        ConfigActivation::GeluTanh => Activation::GeluTanh,
    }
}

/// Token embedding, final norm and output projection.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    embedding: LinearId,
    norm: VectorId,
    head: LinearId,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Width of a row that comes from an encoder: the hidden state, and what the first layers are given besides.
    media_width: usize,
    eps: f32,
    embedding_scale: f32,
    softcap: Option<f32>,
}

impl Ends {
    /// Declares `model.embed_tokens`, `model.norm` and `lm_head`; tied weights are one copy.
    pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = declare.linear("model.embed_tokens.weight", vocab, hidden)?;
        let norm = norm(config, "model.norm.weight", hidden, declare)?;
        let head = match config.tie_word_embeddings {
            true => embedding,
            false => declare.linear("lm_head.weight", vocab, hidden)?,
        };
        Ok(Self {
            embedding,
            norm,
            head,
            vocab,
            hidden,
            media_width: hidden * (1 + config.vision.as_ref().map_or(0, |vision| vision.deepstack.len())),
            eps: config.norm_eps,
            embedding_scale: config.embedding_scale,
            softcap: config.final_logit_softcap,
        })
    }

    /// The hidden state of every row of the step.
    pub fn embed(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Buf, DeviceError> {
        let x = device.temp(step.tokens.len(), self.hidden)?;
        device.embed(x, self.embedding, step.tokens, self.embedding_scale);
        for media in step.media {
            device.place(x, media.first_row, media.values, self.media_width, 0, Mode::Store);
        }
        Ok(x)
    }

    /// Returns the rows that are still computed after the mixer of the last layer, `layer`, and how many of them are in
    /// bfloat16. These are all rows of `x`. If the step uses hidden states only for logits, they are the rows that need
    /// logits, moved to the beginning.
    pub fn wanted(&self, device: &mut dyn Device, x: Buf, layer: usize, step: &StepInput<'_>) -> (Buf, usize) {
        // What an encoder has for this layer belongs to rows by their place in the step.
        match step.only_logits && !self.deepens(layer) {
            true => (device.keep_rows(x, step.logit_rows), step.rounded_logit_rows()),
            false => (x, step.rounded_rows),
        }
    }

    /// Whether encoders have something for layer `layer`.
    fn deepens(&self, layer: usize) -> bool {
        (layer + 1) * self.hidden < self.media_width
    }

    /// After the first layers: adds what an encoder has for layer `layer` to the rows that come from it.
    pub fn deepen(&self, device: &mut dyn Device, x: Buf, layer: usize, step: &StepInput<'_>) {
        for media in step.media.iter().filter(|_| self.deepens(layer)) {
            let column = (layer + 1) * self.hidden;
            device.place(x, media.first_row, media.values, self.media_width, column, Mode::Add);
        }
    }

    /// The logits of the wanted rows of `x`, the hidden states of all rows or of these, which are normalised in place.
    pub fn output(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>) -> Result<Output, DeviceError> {
        self.output_through(device, x, self.norm, step)
    }

    /// [`Ends::output`] through another norm: a draft head shares the output projection only.
    pub fn output_through(
        &self,
        device: &mut dyn Device,
        x: Buf,
        norm: VectorId,
        step: &StepInput<'_>,
    ) -> Result<Output, DeviceError> {
        let logits = device.temp(step.logit_rows.len(), self.vocab)?;
        let output = Output { logits, hidden: x };
        device.rms_norm(x, x, norm, self.eps);
        if step.logit_rows.is_empty() {
            return Ok(output);
        }
        let mut last = x;
        // Where only logits are wanted `x` may be these rows already. The plan, which asks for all, always has room for both.
        if !step.only_logits || x.rows > step.logit_rows.len() {
            last = device.temp(step.logit_rows.len(), self.hidden)?;
            device.gather(last, x, step.logit_rows);
        }
        let rounded = if step.rounded_logits { last.rows } else { 0 };
        device.linear_rows(last.into(), &[(self.head, logits)], Mode::Store, rounded)?;
        if let Some(cap) = self.softcap {
            device.softcap(logits, cap);
        }
        Ok(output)
    }
}
