//! The pre-norm decoder that Llama, the Qwens and their relatives are: what mixes positions, then what works on each by
//! itself, each behind a norm and added to the residual stream.
//!
//! A family's file says what its configuration means; this one declares the layers that follow from it and runs them, with or
//! without a draft head.

use plimsoll_device::{
    Declare, DeclareError, Device, DeviceError, EncoderShape, KvDtype, KvShape, ModelShape, StateShape, StepInput,
};
use plimsoll_formats::ModelConfig;

use crate::block::{AttentionPlace, Ends};
use crate::delta::state_shape;
use crate::layer::{Kind, Layer, Rotary};
use crate::mtp::MtpHead;
use crate::{Drafter, Encoder, Model, Output, Pass, Sense, Vision, audio, vision};

/// A pre-norm decoder with one rotary embedding for all layers.
pub struct Decoder {
    ends: Ends,
    layers: Vec<Layer>,
    rotary: Rotary,
    head: Option<MtpHead>,
    vision: Option<Box<dyn Vision>>,
    audio: Option<Box<dyn Encoder>>,
    attention_layers: usize,
    state: Option<StateShape>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Decoder {
    /// Declares every weight of the model, those of the draft head only when it is asked for.
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
                    let sliding = config.layer_is_sliding.get(layer) == Some(&true);
                    Kind::Attention(AttentionPlace { cache: attention_layers - 1, sliding })
                }
            };
            let experts = config.experts.as_ref().is_some_and(|experts| experts.layers[layer]);
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
            attention_layers,
            state: config.delta_net.as_ref().map(|delta| state_shape(delta, recurrent_layers)),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
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
        let mut rounded = step.rounded_rows;
        if i + 1 == self.layers.len() {
            (pass.x, rounded) = self.ends.wanted(device, pass.x, i, step);
        }
        layer.transform(device, pass.x, normed.span(0, pass.x.rows), rounded)?;
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
        let layers = self.attention_layers + usize::from(self.head.is_some());
        let kv = KvShape { layers, kv_heads: self.kv_heads, head_dim: self.head_dim, dtype };
        let towers = Sense::ALL.into_iter().filter_map(|sense| self.tower(sense)).map(Encoder::shape);
        let encoder = towers.reduce(|one, other| EncoderShape {
            head_dim: one.head_dim.max(other.head_dim),
            widest: one.widest.max(other.widest),
        });
        ModelShape { kv, state: self.state, heads: self.heads, hidden: self.ends.hidden, encoder, rounded: false }
    }

    fn vocab_size(&self) -> usize {
        self.ends.vocab
    }
}
