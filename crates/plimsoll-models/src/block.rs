//! The blocks that decoder-only transformers share: attention and gated feed-forward around residual connections.
//!
//! A family's file names the weights and the order of norms; the arithmetic of the blocks is in this file.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, FeedForward, Input, KvLayer, LinearId,
    Mode, Rotary, RowPiece, StepInput, VectorId,
};
use plimsoll_formats::{Activation as ConfigActivation, LayerHeads, ModelConfig, OutputGate, QkNorm, QueryGrowth};

use crate::indexer::Indexer;

/// Declares a norm's weights. Adds 1 where they are stored around zero.
///
/// Converters to MLX and GGUF add it, but some leave the draft head unchanged. A negative weight reveals such a head: a norm that is ready
/// for use has none.
pub fn norm(config: &ModelConfig, name: &str, len: usize, declare: &mut Declare<'_>) -> Result<VectorId, DeclareError> {
    let mut plus = config.norm_weight_offset;
    if plus == 0.0 && config.architecture.is_hybrid() && name.starts_with("mtp.") {
        let negative = declare.read_vector(name)?.is_some_and(|weights| weights.iter().any(|weight| *weight < 0.0));
        plus = if negative { 1.0 } else { 0.0 };
    }
    declare.vector(name, len, plus)
}

/// The place of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPlace {
    /// Its index among all layers. A draft head's layers follow the last layer.
    pub layer: usize,
    /// Its index among the layers with keys and values in the cache.
    pub cache: usize,
    /// Whether it attends through the sliding window.
    pub sliding: bool,
    /// Whether the layer has no keys and values and reads those of another layer.
    pub shared: bool,
}

/// The weights that make a layer's keys and values.
struct KeyValue {
    k: LinearId,
    /// None: values are the keys before the keys' norm and rotation.
    v: Option<LinearId>,
    /// The weights, all ones, of the norm of each value head; none if the family has no such norm.
    norm: Option<VectorId>,
}

/// The output gate: a projection of the layer's input, whose activation is multiplied onto the result of attention.
#[derive(Clone, Copy)]
struct Gate {
    projection: LinearId,
    act: Activation,
    /// Outputs for a head: one for each element, or one for the whole head.
    width: usize,
}

/// Weights of one attention layer.
pub struct AttentionBlock {
    q: LinearId,
    /// None for a layer that reads another layer's keys and values.
    kv: Option<KeyValue>,
    o: LinearId,
    gate: Option<Gate>,
    /// Norms of queries and keys; none if the family has no such norms.
    norms: Option<[VectorId; 2]>,
    qk_norm: QkNorm,
    growth: Option<QueryGrowth>,
    kv_heads: usize,
    head_dim: usize,
    eps: f32,
    rope_interleaved: bool,
    /// Whether every position attends to earlier and later ones. Such a layer stores nothing in the cache.
    encodes: bool,
    /// The selection of the positions that rows attend to; none if the family attends to all.
    indexer: Option<Box<Indexer>>,
    spec: Attention,
}

impl Gate {
    /// Declares `{prefix}.gate_proj`, if the family has it.
    fn declare(
        config: &ModelConfig,
        prefix: &str,
        heads: usize,
        head_dim: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Option<Self>, DeclareError> {
        let (act, width) = match config.variant.output_gate {
            None => return Ok(None),
            Some(OutputGate::Softplus { per_head: true }) => (Activation::Softplus, 1),
            Some(OutputGate::Softplus { per_head: false }) => (Activation::Softplus, head_dim),
            Some(OutputGate::Sigmoid) => (Activation::Sigmoid, head_dim),
        };
        let projection = declare.linear(&format!("{prefix}.gate_proj.weight"), heads * width, config.hidden_size)?;
        Ok(Some(Self { projection, act, width }))
    }

    /// Returns the gated result of attention, which is in one of the two buffers.
    fn apply(self, device: &mut dyn Device, made: Buf, attended: Buf, head_dim: usize) -> Buf {
        if self.width == head_dim {
            device.glu(made, attended, self.act);
            return made;
        }
        device.activate(made, self.act);
        device.scale_by(attended.reshape(head_dim), made.reshape(1));
        attended
    }
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
        let LayerHeads { kv_heads, head_dim, .. } = config.heads_of(place.sliding);
        let heads = config.query_heads(place.layer);
        if head_dim % 16 != 0 {
            return Err(DeclareError::Unsupported(format!(
                "heads of {head_dim} elements are not supported: the width must be a multiple of 16"
            )));
        }
        let [q, k, v] = projections(config, &prefix, place, declare)?;
        let o = match config.attention_output_bias {
            true => declare.linear_with_bias(&format!("{prefix}.o_proj"), config.hidden_size, heads * head_dim)?,
            false => declare.linear(&format!("{prefix}.o_proj.weight"), config.hidden_size, heads * head_dim)?,
        };
        let (q, gate) = match q {
            Some(q) => (q, Gate::declare(config, &prefix, heads, head_dim, declare)?),
            None => {
                // The stored rows alternate: first a head's query, then the head's gate.
                let half = |first| RowPiece { first, rows: heads * head_dim, run: head_dim, stride: 2 * head_dim };
                let mut rows = |first| {
                    let stored = [2 * heads * head_dim, config.hidden_size];
                    declare.linear_rows(&format!("{prefix}.q_proj.weight"), &stored, &[half(first)], config.hidden_size)
                };
                let (q, projection) = (rows(0)?, rows(head_dim)?);
                (q, Some(Gate { projection, act: Activation::Sigmoid, width: head_dim }))
            }
        };
        let qk_norm = config.variant.qk_norm;
        let mut qk = |name: &str, heads: usize| {
            let width = if qk_norm == QkNorm::Row { heads * head_dim } else { head_dim };
            norm(config, &format!("{prefix}.{name}.weight"), width, declare)
        };
        let rotates = config.variant.rotates(place.layer);
        let norms = match config.qk_norm && (rotates || !config.variant.rotated_qk_norm) {
            true if config.variant.plain_qk_norm => Some([declare.values(vec![1.0; head_dim]); 2]),
            // A layer without keys does not use the second norm.
            true if place.shared => Some([qk("q_norm", heads)?; 2]),
            true => Some([qk("q_norm", heads)?, qk("k_norm", kv_heads)?]),
            false => None,
        };
        let ones = config.variant.value_norm && k.is_some();
        let kv = k.map(|k| KeyValue { k, v, norm: ones.then(|| declare.values(vec![1.0; head_dim])) });
        let sinks = match config.variant.sinks {
            true => Some(declare.vector(&format!("{prefix}.sinks.weight"), heads, 0.0)?),
            false => None,
        };
        Ok(Self {
            q,
            kv,
            o,
            gate,
            norms,
            qk_norm,
            growth: config.variant.query_growth.filter(|growth| !(rotates && growth.unrotated_only)),
            kv_heads,
            head_dim,
            eps: config.norm_eps,
            rope_interleaved: config.rope_interleaved,
            encodes: config.encoder.is_some(),
            indexer: None,
            spec: Attention {
                layer: declare.cache_layer(place.cache),
                heads,
                scale: config.query_scale,
                window: config.sliding_window.filter(|_| place.sliding),
                chunked: config.variant.chunked,
                softcap: config.attn_logit_softcap,
                sinks,
                ..Attention::WHOLE
            },
        })
    }

    /// Returns the same layer with an indexer, which selects the positions that rows attend to.
    #[must_use]
    pub(crate) fn selecting(self, indexer: Indexer) -> Self {
        let spec = Attention { selects_from: Some(indexer.selects_from()), ..self.spec };
        Self { indexer: Some(Box::new(indexer)), spec, ..self }
    }

    /// The layer's part of the KV cache, if it has keys and values.
    pub fn kv(&self) -> Option<KvLayer> {
        let Attention { heads, window, .. } = self.spec;
        self.kv.as_ref().filter(|_| !self.encodes).map(|_| KvLayer {
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            heads,
            window,
        })
    }

    /// `out (+)= attention(input)`; `angles` are this layer's rotary angles, if it rotates.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        angles: impl Into<Option<Buf>>,
        out: Buf,
        mode: Mode,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (scope, x) = (device.mark(), input.x);
        let q = device.temp(x.rows, self.spec.heads * self.head_dim)?;
        let mut width = |cols| device.temp(x.rows, cols);
        let width_of_kv = self.kv_heads * self.head_dim;
        let kv = match self.kv {
            Some(_) => Some([width(width_of_kv)?, width(width_of_kv)?]),
            None => None,
        };
        let gate = match self.gate {
            Some(gate) => Some((gate, width(self.spec.heads * gate.width)?)),
            None => None,
        };
        let (mut layers, mut count) = ([(self.q, q); 4], 1);
        let own = self.kv.as_ref().zip(kv);
        let own_keys = own.map(|(made, [k, _])| (made.k, k));
        let own_values = own.and_then(|(made, [_, v])| Some((made.v?, v)));
        for layer in [own_keys, own_values, gate.map(|(gate, made)| (gate.projection, made))].into_iter().flatten() {
            layers[count] = layer;
            count += 1;
        }
        device.linear_rows(input, &layers[..count], Mode::Store, step.bf16_rows)?;
        if let Some((made, [k, v])) = own {
            self.ready_values(device, made, k, v);
        }
        let attended = device.temp(x.rows, self.spec.heads * self.head_dim)?;
        let angles = angles.into();
        let rotary = self.prepare(device, angles, q, kv.map(|[k, _]| k), step);
        match kv.filter(|_| self.encodes) {
            Some([k, v]) => {
                self.make_ready(device, rotary.as_ref(), [q, k]);
                device.attend_within(&self.spec, attended, q, k, v, step)?;
            }
            None => device.attention(&self.spec, rotary.as_ref(), attended, q, kv, step),
        }
        if let Some(indexer) = &self.indexer {
            let angles = angles.expect("an indexer rotates");
            indexer.attend(device, &self.spec, [attended, q, x, angles], step)?;
        }
        let gated = gate.map_or(attended, |(gate, made)| gate.apply(device, made, attended, self.head_dim));
        device.linear_rows(gated.into(), &[(self.o, out)], mode, step.bf16_rows)?;
        device.release(scope);
        Ok(())
    }

    /// Makes values from keys before their norm and rotation if there is no value projection, and norms the values.
    fn ready_values(&self, device: &mut dyn Device, made: &KeyValue, k: Buf, v: Buf) {
        if made.v.is_none() {
            device.put(v, k, 0);
        }
        if let Some(ones) = made.norm {
            let heads = v.reshape(self.head_dim);
            device.rms_norm(heads, heads, ones, self.eps);
        }
    }

    /// Applies norms and rotation to queries and keys in place of [`Device::attention`].
    fn make_ready(&self, device: &mut dyn Device, rotary: Option<&Rotary>, both: [Buf; 2]) {
        let Some(rotary) = rotary else { return };
        for (x, norm) in both.into_iter().zip(rotary.norms.into_iter().flatten()) {
            let heads = x.reshape(self.head_dim);
            device.rms_norm(heads, heads, norm, rotary.eps);
        }
        both.into_iter().for_each(|x| device.rope(x, rotary.angles, self.head_dim, rotary.interleaved));
    }

    /// Applies the steps to queries and keys that [`Device::attention`] does not support. Returns its part: norms of heads, then rotation.
    fn prepare(
        &self,
        device: &mut dyn Device,
        angles: Option<Buf>,
        q: Buf,
        k: Option<Buf>,
        step: &StepInput<'_>,
    ) -> Option<Rotary> {
        let made = || std::iter::once(q).chain(k);
        if let Some(QueryGrowth { beta, length, offset, .. }) = self.growth {
            let steps = |row: usize| ((step.positions[row] as usize + offset) / length) as f32;
            device.scale_rows(q, &|row| 1.0 + beta * (1.0 + steps(row)).ln());
        }
        let norms = |device: &mut dyn Device, width: fn(&Self, Buf) -> usize| {
            for (x, norm) in made().zip(self.norms.into_iter().flatten()) {
                let x = x.reshape(width(self, x));
                device.rms_norm(x, x, norm, self.eps);
            }
        };
        let rotary =
            |norms| angles.map(|angles| Rotary { norms, eps: self.eps, angles, interleaved: self.rope_interleaved });
        match self.qk_norm {
            QkNorm::Head if angles.is_some() => rotary(self.norms),
            QkNorm::Head => {
                norms(device, |block, _| block.head_dim);
                None
            }
            QkNorm::Row => {
                norms(device, |_, x| x.cols);
                rotary(None)
            }
            QkNorm::RotatedHead => {
                for x in made().filter(|_| angles.is_some()) {
                    device.rope(x, angles.expect("there are angles"), self.head_dim, self.rope_interleaved);
                }
                norms(device, |block, _| block.head_dim);
                None
            }
        }
    }
}

/// Declares the query, key and value projections of `{prefix}`: three matrices, or rows of one. There is no query projection if it is
/// stored together with a gate. There is no key projection if the layer reads another layer's keys. There is no value projection if values
/// are keys.
pub(crate) fn projections(
    config: &ModelConfig,
    prefix: &str,
    place: AttentionPlace,
    declare: &mut Declare<'_>,
) -> Result<[Option<LinearId>; 3], DeclareError> {
    let (hidden, fused) = (config.hidden_size, format!("{prefix}.qkv_proj"));
    let LayerHeads { kv_heads, head_dim, values_are_keys, .. } = config.heads_of(place.sliding);
    let widths = [config.query_heads(place.layer), kv_heads, kv_heads].map(|heads| heads * head_dim);
    let absent = [false, place.shared, place.shared || values_are_keys];
    let is_fused = is_stored(&format!("{fused}.weight"), config.variant.fused_qkv, declare);
    let (stored, mut first, mut ids) = (widths.iter().sum(), 0, [None; 3]);
    for (i, (name, width)) in ["q_proj", "k_proj", "v_proj"].into_iter().zip(widths).enumerate() {
        let name = format!("{prefix}.{name}");
        ids[i] = match (is_fused, config.attention_bias) {
            (true, true) => Some(declare.part_with_bias(&fused, stored, (first, width), hidden)?),
            (true, false) => {
                let rows = [RowPiece::span(first, width)];
                Some(declare.linear_rows(&format!("{fused}.weight"), &[stored, hidden], &rows, hidden)?)
            }
            (false, _) if absent[i] || i == 0 && config.attention_gate => None,
            (false, true) => Some(declare.linear_with_bias(&name, width, hidden)?),
            (false, false) => Some(declare.linear(&format!("{name}.weight"), width, hidden)?),
        };
        first += width;
    }
    Ok(ids)
}

/// Whether the checkpoint has a tensor. For a configuration alone: whether published checkpoints have it.
fn is_stored(name: &str, published: bool, declare: &Declare<'_>) -> bool {
    declare.has(name) || published && declare.is_plan()
}

/// Declares the projections `{prefix}.gate_proj`, `up_proj` and `down_proj`, `width` wide between them.
pub fn feed_forward(
    config: &ModelConfig,
    prefix: &str,
    width: usize,
    declare: &mut Declare<'_>,
) -> Result<FeedForward, DeclareError> {
    let (hidden, fused) = (config.hidden_size, format!("{prefix}.gate_up_proj"));
    let matrix = |name: &str, out: usize, k: usize, declare: &mut Declare<'_>| match config.mlp_bias {
        true => declare.linear_with_bias(&format!("{prefix}.{name}"), out, k),
        false => declare.linear(&format!("{prefix}.{name}.weight"), out, k),
    };
    let half = |first: usize, declare: &mut Declare<'_>| match config.mlp_bias {
        true => declare.part_with_bias(&fused, 2 * width, (first, width), hidden),
        false => {
            let (stored, rows) = ([2 * width, hidden], [RowPiece::span(first, width)]);
            declare.linear_rows(&format!("{fused}.weight"), &stored, &rows, hidden)
        }
    };
    let [gate, up] = match is_stored(&format!("{fused}.weight"), config.variant.fused_gate_up, declare) {
        true => [half(0, declare)?, half(width, declare)?],
        false => [matrix("gate_proj", width, hidden, declare)?, matrix("up_proj", width, hidden, declare)?],
    };
    Ok(FeedForward {
        gate,
        up,
        down: matrix("down_proj", hidden, width, declare)?,
        width,
        act: activation(config.hidden_act),
    })
}

/// Returns the device's activation for the configuration's.
pub(crate) fn activation(act: ConfigActivation) -> Activation {
    match act {
        ConfigActivation::Silu => Activation::Silu,
        ConfigActivation::Gelu => Activation::Gelu,
        ConfigActivation::ClampedSwish => Activation::ClampedSwish,
        ConfigActivation::ReluSquared => Activation::ReluSquared,
        ConfigActivation::GeluQuick => Activation::GeluQuick,
        ConfigActivation::GeluTanh => Activation::GeluTanh,
        ConfigActivation::Tanh => Activation::Tanh,
    }
}
