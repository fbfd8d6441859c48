//! The vision encoder of Mistral 3 and Ministral 3: Pixtral, for images of any grid. It has rotary positions alone. The patches of a token,
//! side by side, go through one projection to the encoder's width and two of the model's width.
//!
//! Reference: transformers, `modeling_pixtral.py` and `modeling_mistral3.py`. [`crate::EncoderInput`] already has the patches of a token
//! side by side.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, VectorId,
};
use plimsoll_formats::{Pixtral, RopeScaling, Vision as Config};

use super::order::Order;
use super::parts;
use crate::block::activation;
use crate::encoder_parts::{Layer, Mlp, Norm, spec};
use crate::rope::rope;
use crate::{Encoder, EncoderInput, Grid, PlaceRule, Vision};

/// Epsilon of the encoder's norms.
const EPS: f32 = 1e-5;
/// Base of the rotary frequencies.
const THETA: f32 = 10_000.0;

/// Weights of an encoder.
pub struct PixtralEncoder {
    config: Config,
    patch: LinearId,
    first_norm: Norm,
    inv_freq: VectorId,
    /// The axis of every frequency.
    axes: Vec<u8>,
    layers: Vec<Layer>,
    projector_norm: Norm,
    /// The projections of a token's patches to the encoder's width, from this to the model's width, and to the same again.
    merge: LinearId,
    up: LinearId,
    down: LinearId,
    order: Order,
    /// Width of the model.
    out: usize,
}

/// Declares a root-mean-square norm.
fn norm(name: &str, width: usize, eps: f32, declare: &mut Declare<'_>) -> Result<Norm, DeclareError> {
    Ok(Norm { weight: declare.vector(&format!("{name}.weight"), width, 0.0)?, bias: None, eps })
}

fn layer(vision: &Config, own: Pixtral, prefix: &str, declare: &mut Declare<'_>) -> Result<Layer, DeclareError> {
    let (hidden, width, head_dim) = (vision.hidden_size, vision.intermediate_size, vision.head_dim());
    let attention_norm = norm(&format!("{prefix}.attention_norm"), hidden, EPS, declare)?;
    let mlp_norm = norm(&format!("{prefix}.ffn_norm"), hidden, EPS, declare)?;
    let mut matrix = |name: &str, out: usize, k: usize| declare.linear(&format!("{prefix}.{name}.weight"), out, k);
    Ok(Layer {
        attention_norm,
        q: matrix("attention.q_proj", hidden, hidden)?,
        k: matrix("attention.k_proj", hidden, hidden)?,
        v: matrix("attention.v_proj", hidden, hidden)?,
        o: matrix("attention.o_proj", hidden, hidden)?,
        qk_norms: None,
        mlp_norm,
        mlp: Mlp {
            gate: Some(matrix("feed_forward.gate_proj", width, hidden)?),
            up: matrix("feed_forward.up_proj", width, hidden)?,
            down: matrix("feed_forward.down_proj", hidden, width)?,
            width,
            act: activation(vision.act),
        },
        scales: None,
        rope_interleaved: own.rope_interleaved,
        head_dim,
        spec: spec(vision.heads, head_dim),
    })
}

impl PixtralEncoder {
    /// Declares `visual.*` for rows of width `out`, the model's. `eps` is the epsilon of the model's norms and the projector's.
    pub fn declare(
        vision: Config,
        own: Pixtral,
        (out, eps): (usize, f32),
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let hidden = vision.hidden_size;
        let patch =
            declare.convolution("visual.patch_conv", hidden, &[vision.channels, vision.patch, vision.patch], false)?;
        let first_norm = norm("visual.ln_pre", hidden, EPS, declare)?;
        let mut layers = Vec::with_capacity(vision.depth);
        for nth in 0..vision.depth {
            layers.push(layer(&vision, own, &format!("visual.transformer.layers.{nth}"), declare)?);
        }
        // Row positions use every other frequency of a head, column positions the rest.
        let all = rope(vision.head_dim(), THETA, &RopeScaling::None).inv_freq;
        let inv_freq: Vec<f32> = all.iter().step_by(2).chain(all.iter().skip(1).step_by(2)).copied().collect();
        let axes = [[1].repeat(all.len().div_ceil(2)), [2].repeat(all.len() / 2)].concat();
        let projector_norm = norm("visual.projector.norm", hidden, eps, declare)?;
        // The weights of a channel are stored together, one for each patch of a token.
        let merge = declare.convolution(
            "visual.projector.patch_merger.merging_layer",
            hidden,
            &[vision.merge * vision.merge, hidden],
            false,
        )?;
        let mut matrix = |name: &str, k: usize| match own.projector_bias {
            true => declare.linear_with_bias(&format!("visual.projector.{name}"), out, k),
            false => declare.linear(&format!("visual.projector.{name}.weight"), out, k),
        };
        let (up, down) = (matrix("linear_1", hidden)?, matrix("linear_2", out)?);
        Ok(Self {
            patch,
            first_norm,
            inv_freq: declare.values(inv_freq),
            axes,
            layers,
            projector_norm,
            merge,
            up,
            down,
            order: Order { merge: vision.merge, window: None },
            out,
            config: vision,
        })
    }
}

impl Vision for PixtralEncoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        None
    }
}

impl Encoder for PixtralEncoder {
    fn patch_width(&self) -> usize {
        self.config.patch_width()
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.config.head_dim(), self.config.hidden_size * self.order.block())
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let grids = images.grids;
        let rows: usize = grids.iter().map(Grid::patches).sum();
        let (hidden, block) = (self.config.hidden_size, self.order.block());
        let output = device.temp(rows / block, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, hidden)?;
        parts::embed(device, images.patches, (self.patch, self.patch_width()), x)?;
        self.first_norm.apply(device, x, x);
        let angles = device.temp(rows, 2 * self.axes.len())?;
        let places = |row: usize| {
            let (_, y, x) = self.order.patch(grids, row);
            [0.0, y as f32, x as f32]
        };
        device.rope_angles_by_axis(angles, self.inv_freq, &self.axes, &places, 1.0);
        let normed = device.temp(rows, hidden)?;
        for layer in &self.layers {
            layer.forward(device, x, normed, Some(angles), self.order.whole_frames(grids))?;
        }
        self.projector_norm.apply(device, normed, x);
        // The residual stream is no longer needed, so merged tokens are written there.
        let merged = x.span(0, rows / block);
        device.linear(normed.reshape(hidden * block), &[(self.merge, merged)], Mode::Store)?;
        let inner = device.temp(rows / block, self.out)?;
        device.linear(merged, &[(self.up, inner)], Mode::Store)?;
        device.activate(inner, Activation::Gelu);
        device.linear(inner, &[(self.down, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
