//! One layer of a text encoder: attention, then a feed-forward part, each added to the residual stream.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, FeedForward, LinearId, Mode, StepInput,
};
use plimsoll_formats::{Encoder, ModelConfig};

use super::{Norm, matrix};
use crate::Pass;
use crate::block::{AttentionPlace, activation, feed_forward, projections};
use crate::moe::MoeBlock;

/// The part that transforms each position by itself.
enum Transform {
    /// `down(act(up(x)))`.
    Plain { up: LinearId, down: LinearId, width: usize, act: Activation },
    /// `down(act(gate(x)) * up(x))`.
    Gated(FeedForward),
    /// A mixture of experts.
    Experts(Box<MoeBlock>),
}

/// Norms of the two halves of a layer.
enum Norms {
    /// `x += half(norm(x))`. The first layer's attention has no norm.
    Before { attention: Option<Norm>, transform: Norm },
    /// `x = norm(x + half(x))`.
    After { attention: Norm, transform: Norm },
}

/// The indexes of the angles of layers that attend to all positions, and of layers with a window.
const GLOBAL: usize = 0;
const LOCAL: usize = 1;

/// One layer.
pub(super) struct Layer {
    q: LinearId,
    k: LinearId,
    v: LinearId,
    o: LinearId,
    transform: Transform,
    norms: Norms,
    spec: Attention,
    head_dim: usize,
    /// The index of the layer's rotary angles in the step, if it has any.
    angles: usize,
}

impl Layer {
    /// Declares layer `layer`.
    pub fn declare(
        config: &ModelConfig,
        encoder: &Encoder,
        layer: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("model.layers.{layer}");
        let (hidden, sliding) = (config.hidden_size, config.layer_is_sliding[layer]);
        let attention = format!("{prefix}.self_attn");
        let place = AttentionPlace { layer, cache: 0, sliding, shared: false };
        let [q, k, v] = projections(config, &attention, place, declare)?.map(|id| id.expect("a layer has all three"));
        let o = matrix(&format!("{attention}.o_proj"), config.attention_output_bias, (hidden, hidden), declare)?;
        let transform = match config.experts.as_ref().filter(|experts| experts.layers[layer]) {
            Some(experts) => {
                Transform::Experts(Box::new(MoeBlock::declare(config, experts, &format!("{prefix}.mlp"), declare)?))
            }
            None => transform(config, encoder, &format!("{prefix}.mlp"), declare)?,
        };
        let mut norm = |name: &str| Norm::declare(config, &format!("{prefix}.{name}"), declare);
        let norms = match encoder.norms_before {
            true => Norms::Before {
                attention: (layer > 0).then(|| norm("input_layernorm")).transpose()?,
                transform: norm("post_attention_layernorm")?,
            },
            false => {
                Norms::After { attention: norm("post_attention_layernorm")?, transform: norm("post_mlp_layernorm")? }
            }
        };
        let spec = Attention {
            heads: config.heads,
            scale: config.query_scale,
            window: config.sliding_window.filter(|_| sliding),
            ..Attention::WHOLE
        };
        let angles = if sliding { LOCAL } else { GLOBAL };
        Ok(Self { q, k, v, o, transform, norms, spec, head_dim: config.head_dim, angles })
    }

    /// Computes the layer in place of the hidden state.
    pub fn forward(&self, device: &mut dyn Device, pass: &Pass, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let (x, angles) = (pass.x, pass.angles[self.angles]);
        let scope = device.mark();
        match self.norms {
            Norms::Before { attention, transform } => {
                let normed = device.temp(x.rows, x.cols)?;
                let input = attention.map_or(x, |norm| {
                    norm.apply(device, normed, x);
                    normed
                });
                self.attend(device, input, x, angles, step)?;
                transform.apply(device, normed, x);
                self.transform(device, normed, x)?;
            }
            Norms::After { attention, transform } => {
                self.attend(device, x, x, angles, step)?;
                attention.apply(device, x, x);
                self.transform(device, x, x)?;
                transform.apply(device, x, x);
            }
        }
        device.release(scope);
        Ok(())
    }

    /// `x += attention(input)`.
    fn attend(
        &self,
        device: &mut dyn Device,
        input: Buf,
        x: Buf,
        angles: Option<Buf>,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let q = device.temp(x.rows, x.cols)?;
        let k = device.temp(x.rows, x.cols)?;
        let v = device.temp(x.rows, x.cols)?;
        device.linear(input, &[(self.q, q), (self.k, k), (self.v, v)], Mode::Store)?;
        if let Some(angles) = angles {
            for heads in [q, k] {
                device.rope(heads, angles, self.head_dim, false);
            }
        }
        let attended = device.temp(x.rows, x.cols)?;
        device.attend_within(&self.spec, attended, q, k, v, step)?;
        device.linear(attended, &[(self.o, x)], Mode::Add)?;
        device.release(scope);
        Ok(())
    }

    /// `x += transform(input)`.
    fn transform(&self, device: &mut dyn Device, input: Buf, x: Buf) -> Result<(), DeviceError> {
        match &self.transform {
            Transform::Experts(experts) => {
                // Experts write to a separate buffer, because they read the rows without the sum.
                let scope = device.mark();
                let part = device.temp(x.rows, x.cols)?;
                experts.forward(device, input, part, Mode::Store, 0)?;
                device.add(x, part);
                device.release(scope);
                Ok(())
            }
            Transform::Gated(layer) => device.feed_forward(layer, input.into(), x, Mode::Add, 0),
            Transform::Plain { up, down, width, act } => {
                let scope = device.mark();
                let inner = device.temp(x.rows, *width)?;
                device.linear(input, &[(*up, inner)], Mode::Store)?;
                device.activate(inner, *act);
                device.linear(inner, &[(*down, x)], Mode::Add)?;
                device.release(scope);
                Ok(())
            }
        }
    }
}

fn transform(
    config: &ModelConfig,
    encoder: &Encoder,
    prefix: &str,
    declare: &mut Declare<'_>,
) -> Result<Transform, DeclareError> {
    let (hidden, width) = (config.hidden_size, config.intermediate_size);
    if encoder.gated {
        return feed_forward(config, prefix, width, declare).map(Transform::Gated);
    }
    Ok(Transform::Plain {
        up: matrix(&format!("{prefix}.up_proj"), config.mlp_bias, (width, hidden), declare)?,
        down: matrix(&format!("{prefix}.down_proj"), config.mlp_bias, (hidden, width), declare)?,
        width,
        act: activation(config.hidden_act),
    })
}
