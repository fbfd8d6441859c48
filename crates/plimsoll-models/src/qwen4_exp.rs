//! Qwen4-Exp (Qwen3.8-Flash-Next): the layers of Qwen3.5-MoE over several residual streams. Attention is sparse, and some layers add
//! embeddings of n-grams.
//!
//! Reference: transformers, `modular_qwen4_exp.py`. There is no norm after the last layer: the mixture of the streams is normed.

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, KvDtype, KvLayer, KvShape, Mode, ModelShape, StateShape, StepInput,
};
use plimsoll_formats::{ModelConfig, Qwen4};

use crate::block::{AttentionBlock, AttentionPlace};
use crate::delta::{self, DeltaBlock};
use crate::ends::Ends;
use crate::indexer::Indexer;
use crate::moe::MoeBlock;
use crate::ngrams::{self, NgramBlock};
use crate::rotary::Rotary;
use crate::streams::{StreamMixer, Streams};
use crate::{Model, Output, Pass, Vision, vision};

enum Mixer {
    Attention(Box<AttentionBlock>),
    Delta(DeltaBlock),
}

struct Layer {
    ngrams: Option<NgramBlock>,
    before_mixer: StreamMixer,
    mixer: Mixer,
    before_experts: StreamMixer,
    experts: MoeBlock,
}

/// The decoder of Qwen4-Exp.
pub struct Qwen4Exp {
    ends: Ends,
    layers: Vec<Layer>,
    rotary: Rotary,
    streams: Streams,
    /// The mixer after the last layer.
    mixer: StreamMixer,
    state: Option<StateShape>,
    /// Elements of an index key.
    index_width: usize,
    widest_norm: usize,
    vision: Option<Box<dyn Vision>>,
}

/// Declares a Qwen4-Exp checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let unsupported = |what: &str| DeclareError::Unsupported(format!("Qwen4-Exp {what}"));
    let qwen4 = config.variant.qwen4.as_deref().ok_or_else(|| unsupported("without hyper-connections"))?;
    let delta = config.delta_net.as_ref().ok_or_else(|| unsupported("without recurrent layers"))?;
    if config.vision.as_ref().is_some_and(|vision| !vision.deepstack.is_empty()) {
        return Err(unsupported("with deepstack_visual_indexes: its vision encoder has one output"));
    }
    let ends = Ends::declare(config, declare)?;
    let (rotary, streams) = (Rotary::declare(config, declare)?, Streams::declare(config, qwen4, declare));
    let mut builder = Builder { config, qwen4, rotary: &rotary, streams, counts: [0; 3] };
    let layers = (0..config.layers).map(|layer| builder.layer(layer, declare)).collect::<Result<Vec<_>, _>>()?;
    let recurrent = builder.counts[1];
    let ngrams = qwen4.ngrams.as_ref().map(|ngrams| ngrams::state_shape(ngrams, &streams));
    let prefix = "model.hyper_connection_mixer";
    Ok(Box::new(Qwen4Exp {
        ends,
        layers,
        streams,
        mixer: StreamMixer::declare(config, qwen4, (streams, false), prefix, declare)?,
        state: Some(StateShape { ngrams, ..delta::state_shape(delta, recurrent) }),
        index_width: qwen4.indexer.head_dim,
        widest_norm: config.hidden_size.max(qwen4.indexer.head_dim),
        vision: vision::declare(config, declare)?,
        rotary,
    }))
}

/// Declares layers one after another.
struct Builder<'a> {
    config: &'a ModelConfig,
    qwen4: &'a Qwen4,
    rotary: &'a Rotary,
    streams: Streams,
    /// Numbers of declared layers: with attention, recurrent ones, and with n-grams.
    counts: [usize; 3],
}

impl Builder<'_> {
    fn layer(&mut self, layer: usize, declare: &mut Declare<'_>) -> Result<Layer, DeclareError> {
        let (config, qwen4, prefix) = (self.config, self.qwen4, format!("model.layers.{layer}"));
        let ngrams = match qwen4.ngrams.as_ref().filter(|ngrams| ngrams.layers.contains(&layer)) {
            Some(ngrams) => {
                self.counts[2] += 1;
                Some(NgramBlock::declare(config, ngrams, self.streams, (&prefix, self.counts[2] - 1), declare)?)
            }
            None => None,
        };
        let mixer = match config.delta_net.as_ref().is_some_and(|delta| delta.layers[layer]) {
            true => {
                self.counts[1] += 1;
                Mixer::Delta(DeltaBlock::declare(config, &prefix, self.counts[1] - 1, declare)?)
            }
            false => {
                self.counts[0] += 1;
                let place = AttentionPlace { layer, cache: self.counts[0] - 1, sliding: false, shared: false };
                let attention = AttentionBlock::declare(config, &prefix, place, declare)?;
                let indexer = Indexer::declare(config, qwen4.indexer, &prefix, self.rotary, declare)?;
                Mixer::Attention(Box::new(attention.selecting(indexer)))
            }
        };
        let experts = config.experts_of(layer);
        let experts =
            experts.ok_or_else(|| DeclareError::Unsupported(format!("Qwen4-Exp without experts in layer {layer}")))?;
        let mut streams = |name: &str| {
            StreamMixer::declare(config, qwen4, (self.streams, true), &format!("{prefix}.{name}"), declare)
        };
        let (before_mixer, before_experts) = (streams("attn_hyper_connection")?, streams("mlp_hyper_connection")?);
        let experts = MoeBlock::declare(config, experts, &format!("{prefix}.mlp"), declare)?;
        Ok(Layer { ngrams, before_mixer, mixer, before_experts, experts })
    }
}

impl Layer {
    /// The layer's part of the KV cache, if it has attention.
    fn kv(&self) -> Option<KvLayer> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.kv(),
            Mixer::Delta(_) => None,
        }
    }

    /// Runs the first half of a layer: n-grams, then the mixer of positions. `mixed` and `part` are as wide as one stream.
    fn mix(
        &self,
        device: &mut dyn Device,
        x: Buf,
        [mixed, part, shares]: [Buf; 3],
        angles: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        if let Some(ngrams) = &self.ngrams {
            ngrams.forward(device, x, step)?;
        }
        self.before_mixer.mix(device, x, [mixed, shares], step.bf16_rows)?;
        match &self.mixer {
            Mixer::Attention(attention) => attention.forward(device, mixed.into(), angles, part, Mode::Store, step)?,
            Mixer::Delta(delta) => delta.forward(device, mixed.into(), part, Mode::Store, step)?,
        }
        self.before_mixer.join(device, x, part, shares)
    }

    /// Runs the second half of a layer.
    fn transform(
        &self,
        device: &mut dyn Device,
        x: Buf,
        [mixed, part, shares]: [Buf; 3],
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        if x.rows == 0 {
            return Ok(());
        }
        self.before_experts.mix(device, x, [mixed, shares], bf16_rows)?;
        self.experts.forward(device, mixed, part, Mode::Store, bf16_rows)?;
        self.before_experts.join(device, x, part, shares)
    }
}

impl Model for Qwen4Exp {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        let x = device.temp(step.tokens.len(), self.streams.all())?;
        let scope = device.mark();
        let embedded = self.ends.embed(device, step)?;
        self.streams.spread(device, x, embedded);
        device.release(scope);
        Ok(Pass::new(x, scope, [Some(self.rotary.angles(device, step)?), None]))
    }

    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError> {
        let (i, layer, scope) = (pass.layer, &self.layers[pass.layer], device.mark());
        let angles = pass.angles[0].expect("taken when the step began");
        let (rows, width) = (pass.x.rows, self.streams.width);
        let buffers = [device.temp(rows, width)?, device.temp(rows, width)?, device.temp(rows, self.streams.count)?];
        layer.mix(device, pass.x, buffers, angles, step)?;
        let mut bf16_rows = step.bf16_rows;
        if i + 1 == self.layers.len() {
            (pass.x, bf16_rows) = self.ends.wanted(device, pass.x, i, step);
        }
        let rows = pass.x.rows;
        layer.transform(device, pass.x, buffers.map(|buf| buf.first(rows)), bf16_rows)?;
        device.release(scope);
        if !pass.passed(device, self.layers.len()) {
            return Ok(None);
        }
        let (mixed, shares) = (device.temp(rows, width)?, device.temp(rows, 1)?);
        if rows > 0 {
            self.mixer.mix(device, pass.x, [mixed, shares], bf16_rows)?;
        }
        self.ends.output(device, mixed, step).map(Some)
    }

    fn vision(&self) -> Option<&dyn Vision> {
        self.vision.as_deref()
    }

    fn shape(&self, dtype: KvDtype) -> ModelShape {
        let kv = KvShape::of(dtype, true, self.layers.iter().filter_map(Layer::kv)).with_index(self.index_width);
        let encoder = self.encoders();
        ModelShape { kv, state: self.state, hidden: self.widest_norm, encoder, bf16: false }
    }

    fn vocab_size(&self) -> usize {
        self.ends.vocab
    }
}
