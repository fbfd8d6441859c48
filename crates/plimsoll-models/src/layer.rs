//! One layer of a pre-norm decoder and the rotary embedding that all layers share.

use std::sync::Arc;

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, FeedForward, Input, Mode, StepInput, VectorId};
use plimsoll_formats::ModelConfig;

use crate::block::{AttentionBlock, AttentionPlace, feed_forward, norm};
use crate::delta::DeltaBlock;
use crate::moe::MoeBlock;
use crate::rope::rope;

/// What mixes positions in a layer, with its place among its kind.
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
    Experts(MoeBlock),
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
            Some(of) if experts => Transform::Experts(MoeBlock::declare(config, of, &prefix, declare)?),
            _ => Transform::Dense(feed_forward(config, &prefix, config.intermediate_size, declare)?),
        };
        Ok(Self { mixer_norm, mixer, transform_norm, transform, eps: config.norm_eps })
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
        self.transform(device, x, normed, step.rounded_rows)
    }

    pub(crate) fn mix(
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

    pub(crate) fn transform(
        &self,
        device: &mut dyn Device,
        x: Buf,
        normed: Buf,
        rounded: usize,
    ) -> Result<(), DeviceError> {
        if x.rows == 0 {
            return Ok(());
        }
        match &self.transform {
            Transform::Dense(dense) => {
                let input = Input::normed(normed, x, self.transform_norm, self.eps);
                device.feed_forward(dense, input, x, Mode::Add, rounded)
            }
            Transform::Experts(experts) => {
                device.rms_norm(normed, x, self.transform_norm, self.eps);
                experts.forward(device, normed, x, Mode::Add, rounded)
            }
        }
    }
}

/// The rotary embedding that all layers of attention share.
#[derive(Clone, Debug)]
pub struct Rotary {
    inv_freq: VectorId,
    dim: usize,
    scale: f32,
    /// The axis of every frequency, in models that see pictures.
    axes: Option<Arc<[u8]>>,
}

impl Rotary {
    pub(crate) fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let mut rope = rope(config.rotary_dim, config.rope_theta, &config.rope_scaling);
        if let Some(factors) = declare.read_vector("model.rope_freqs")? {
            // GGUF stores Llama 3's rule as one divisor per pair.
            if factors.len() != rope.inv_freq.len() {
                let (found, expected) = (vec![factors.len()], vec![rope.inv_freq.len()]);
                return Err(DeclareError::Shape { name: "rope_freqs".into(), found, expected });
            }
            rope.inv_freq.iter_mut().zip(&factors).for_each(|(freq, factor)| *freq /= factor);
        }
        let axes = config.rope_sections.map(|sections| sections.axes(rope.inv_freq.len()).into());
        Ok(Self { inv_freq: declare.values(rope.inv_freq), dim: config.rotary_dim, scale: rope.scale, axes })
    }

    /// Every row's angles.
    pub fn angles(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Buf, DeviceError> {
        let angles = device.temp(step.positions.len(), self.dim)?;
        match self.axes.as_deref().filter(|_| !step.places.is_empty()) {
            Some(axes) => {
                device.rope_angles_by_axis(angles, self.inv_freq, axes, &|row| step.places[row], self.scale);
            }
            None => device.rope_angles(angles, self.inv_freq, step.positions, self.scale),
        }
        Ok(angles)
    }
}
