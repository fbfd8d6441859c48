//! The pre-norm decoder of Llama, the Qwens and their relatives. A layer mixes positions, then transforms each position by itself. Both
//! halves read a norm of the residual stream and add their result to it.
//!
//! A family's file interprets its configuration. This file declares the resulting layers and runs them, with or without a draft head.

mod mtp;

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, FeedForward, Input, KvDtype, KvLayer, KvShape, Mode, ModelShape,
    StateShape, StepInput, VectorId,
};
use plimsoll_formats::ModelConfig;

use crate::block::{AttentionBlock, AttentionPlace, feed_forward, norm};
use crate::delta::{DeltaBlock, state_shape};
use crate::ends::Ends;
use crate::moe::MoeBlock;
use crate::rotary::Rotary;
use crate::{Drafter, Encoder, Model, Output, Pass, Vision, audio, vision};
use mtp::MtpHead;

/// The mixer of positions in a layer, with its index among its kind.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Attention.
    Attention(AttentionPlace),
    /// Gated DeltaNet, by its index among the recurrent layers.
    Recurrent(usize),
}

enum Mixer {
    Attention(AttentionBlock),
    Delta(DeltaBlock),
}

enum Transform {
    Dense(FeedForward),
    Experts(Box<MoeBlock>),
}

/// One layer.
pub struct Layer {
    mixer_norm: VectorId,
    mixer: Mixer,
    transform_norm: VectorId,
    transform: Transform,
    eps: f32,
}

impl Layer {
    /// Declares `{prefix}.*`.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        kind: Kind,
        experts: bool,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let mut norm = |name: &str| norm(config, &format!("{prefix}.{name}.weight"), config.hidden_size, declare);
        let (mixer_norm, transform_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        let mixer = match kind {
            Kind::Attention(place) => Mixer::Attention(AttentionBlock::declare(config, prefix, place, declare)?),
            Kind::Recurrent(index) => Mixer::Delta(DeltaBlock::declare(config, prefix, index, declare)?),
        };
        let prefix = format!("{prefix}.mlp");
        let transform = match &config.experts {
            Some(of) if experts => Transform::Experts(Box::new(MoeBlock::declare(config, of, &prefix, declare)?)),
            _ => Transform::Dense(feed_forward(config, &prefix, config.intermediate_size, declare)?),
        };
        Ok(Self { mixer_norm, mixer, transform_norm, transform, eps: config.norm_eps })
    }

    /// The layer's part of the KV cache, if it has attention.
    pub fn kv(&self) -> Option<KvLayer> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.kv(),
            Mixer::Delta(_) => None,
        }
    }

    /// `x += mixer(norm(x)); x += transform(norm(x))`; `normed` has the shape of `x` and is overwritten.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        normed: Buf,
        angles: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        self.mix(device, x, normed, angles, step)?;
        self.transform(device, x, normed, step.bf16_rows)
    }

    fn mix(
        &self,
        device: &mut dyn Device,
        x: Buf,
        normed: Buf,
        angles: Buf,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let input = Input::normed(normed, x, self.mixer_norm, self.eps);
        match &self.mixer {
            Mixer::Attention(attention) => attention.forward(device, input, angles, x, Mode::Add, step),
            Mixer::Delta(delta) => delta.forward(device, input, x, Mode::Add, step),
        }
    }

    fn transform(&self, device: &mut dyn Device, x: Buf, normed: Buf, bf16: usize) -> Result<(), DeviceError> {
        if x.rows == 0 {
            return Ok(());
        }
        match &self.transform {
            Transform::Dense(dense) => {
                let input = Input::normed(normed, x, self.transform_norm, self.eps);
                device.feed_forward(dense, input, x, Mode::Add, bf16)
            }
            Transform::Experts(experts) => {
                device.rms_norm(normed, x, self.transform_norm, self.eps);
                experts.forward(device, normed, x, Mode::Add, bf16)
            }
        }
    }
}

/// A pre-norm decoder with one rotary embedding for all layers.
pub struct Decoder {
    ends: Ends,
    layers: Vec<Layer>,
    rotary: Rotary,
    head: Option<MtpHead>,
    vision: Option<Box<dyn Vision>>,
    audio: Option<Box<dyn Encoder>>,
    state: Option<StateShape>,
}

impl Decoder {
    /// Declares every weight of the model. Declares the draft head's weights only `with_drafter`.
    pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>, with_drafter: bool) -> Result<Self, DeclareError> {
        let ends = Ends::declare(config, declare)?;
        let (mut attention_layers, mut recurrent_layers) = (0, 0);
        let mut layers = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            let kind = match config.delta_net.as_ref().is_some_and(|delta| delta.layers[layer]) {
                true => {
                    recurrent_layers += 1;
                    Kind::Recurrent(recurrent_layers - 1)
                }
                false => {
                    attention_layers += 1;
                    let (cache, sliding) = (attention_layers - 1, config.slides(layer));
                    Kind::Attention(AttentionPlace { layer, cache, sliding, shared: false })
                }
            };
            let experts = config.experts_of(layer).is_some();
            layers.push(Layer::declare(config, &format!("model.layers.{layer}"), kind, experts, declare)?);
        }
        let rotary = Rotary::declare(config, declare)?;
        let head = match with_drafter {
            true => Some(MtpHead::declare(config, ends, rotary.clone(), attention_layers, declare)?),
            false => None,
        };
        Ok(Self {
            ends,
            layers,
            rotary,
            head,
            vision: vision::declare(config, declare)?,
            audio: audio::declare(config, declare)?,
            state: config.delta_net.as_ref().map(|delta| state_shape(delta, recurrent_layers)),
        })
    }
}

impl Model for Decoder {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        let x = self.ends.embed(device, step)?;
        let scope = device.mark();
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
        let normed = device.temp(pass.x.rows, pass.x.cols)?;
        layer.mix(device, pass.x, normed, angles, step)?;
        let mut bf16 = step.bf16_rows;
        if i + 1 == self.layers.len() {
            (pass.x, bf16) = self.ends.wanted(device, pass.x, i, step);
        }
        layer.transform(device, pass.x, normed.span(0, pass.x.rows), bf16)?;
        device.release(scope);
        self.ends.deepen(device, pass.x, i, step);
        match pass.passed(device, self.layers.len()) {
            true => self.ends.output(device, pass.x, step).map(Some),
            false => Ok(None),
        }
    }

    fn drafter(&self) -> Option<&dyn Drafter> {
        self.head.as_ref().map(|head| head as &dyn Drafter)
    }

    fn vision(&self) -> Option<&dyn Vision> {
        self.vision.as_deref()
    }

    fn audio(&self) -> Option<&dyn Encoder> {
        self.audio.as_deref()
    }

    fn shape(&self, dtype: KvDtype) -> ModelShape {
        let layers = self.layers.iter().chain(self.head.as_ref().map(MtpHead::layer));
        let layers = layers.filter_map(Layer::kv);
        let kv = KvShape::of(dtype, self.state.is_some(), layers);
        let encoder = self.encoders();
        ModelShape { kv, state: self.state, hidden: self.ends.hidden, encoder, bf16: false }
    }

    fn vocab_size(&self) -> usize {
        self.ends.vocab
    }
}
