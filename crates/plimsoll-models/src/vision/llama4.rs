//! The vision encoder of Llama 4: squares of one size, each with a class row that attends and is then dropped. Positions are learned and
//! rotary, and the class row is not rotated. The patches of a token, side by side, go through two projections of the encoder and one to the
//! model's width.
//!
//! Reference: transformers, `modeling_llama4.py`. The reference's final shuffle is already the order of [`crate::EncoderInput`].

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, RowPiece, VectorId,
};
use plimsoll_formats::{Llama4, RopeScaling, Vision as Config};

use super::class_rows::ClassRows;
use super::order::Order;
use super::parts;
use crate::encoder_parts::{Layer, Norm};
use crate::rope::rope;
use crate::{Encoder, EncoderInput, PlaceRule, Vision};

/// Base of the rotary frequencies.
const THETA: f32 = 10_000.0;

/// Weights of the encoder.
pub struct Llama4Encoder {
    config: Config,
    own: Llama4,
    embeddings: ClassRows,
    inv_freq: VectorId,
    /// The axis of every frequency.
    axes: Vec<u8>,
    first_norm: Norm,
    layers: Vec<Layer>,
    last_norm: Norm,
    /// The projections of a token's patches to the projector's width, from this to the same width, and to the model's.
    projections: [LinearId; 3],
    /// Width of the model.
    out: usize,
}

impl Llama4Encoder {
    /// Declares `visual.*` for rows of width `out`, the model's.
    pub fn declare(vision: Config, own: Llama4, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, side) = (vision.hidden_size, vision.table_side);
        let order = Order { merge: vision.merge, window: None };
        let class = declare.linear_rows("visual.class_embedding", &[hidden], &[RowPiece::span(0, 1)], hidden)?;
        let embeddings = ClassRows {
            patch: declare.linear("visual.patch_embedding.linear.weight", hidden, vision.patch_width())?,
            class,
            positions: declare.linear("visual.positional_embedding_vlm", side * side + 1, hidden)?,
            class_first: false,
            width: vision.patch_width(),
            side,
            order,
        };
        let first_norm = parts::norm(&vision, "visual.layernorm_pre", hidden, declare)?;
        let mut layers = Vec::with_capacity(vision.depth);
        for nth in 0..vision.depth {
            let layer = parts::layer(&vision, &format!("visual.model.layers.{nth}"), declare)?;
            layers.push(Layer { rope_interleaved: true, ..layer });
        }
        // The first half of a head rotates by the column, the second by the row, with the same frequencies.
        let half = rope(vision.head_dim() / 2, THETA, &RopeScaling::None).inv_freq;
        let width = own.projector_width;
        Ok(Self {
            embeddings,
            axes: [[2].repeat(half.len()), [1].repeat(half.len())].concat(),
            inv_freq: declare.values([half.as_slice(), half.as_slice()].concat()),
            first_norm,
            layers,
            last_norm: parts::norm(&vision, "visual.layernorm_post", hidden, declare)?,
            projections: [
                declare.linear("visual.vision_adapter.mlp.fc1.weight", width, hidden * order.block())?,
                declare.linear("visual.vision_adapter.mlp.fc2.weight", width, width)?,
                declare.linear("visual.projector.linear_1.weight", out, width)?,
            ],
            out,
            own,
            config: vision,
        })
    }

    /// Writes the tokens of one square to `out`, from its normed patches.
    fn project(&self, device: &mut dyn Device, patches: Buf, out: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let mut from = patches.reshape(patches.cols * self.embeddings.order.block());
        let [projections @ .., last] = self.projections;
        for projection in projections {
            let to = device.temp(out.rows, self.own.projector_width)?;
            device.linear(from, &[(projection, to)], Mode::Store)?;
            device.activate(to, Activation::Gelu);
            from = to;
        }
        device.linear(from, &[(last, out)], Mode::Store)?;
        device.release(scope);
        Ok(())
    }
}

impl Vision for Llama4Encoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        None
    }
}

impl Encoder for Llama4Encoder {
    fn patch_width(&self) -> usize {
        self.config.patch_width()
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.config.head_dim(), self.config.hidden_size * self.embeddings.order.block())
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let squares = self.embeddings.squares(images);
        let (patches, rows, tokens) = (self.embeddings.patches(), self.embeddings.rows(), self.embeddings.tokens());
        let output = device.temp(squares * tokens, self.out)?;
        let scope = device.mark();
        let x = device.temp(squares * rows, self.config.hidden_size)?;
        self.embeddings.embed(device, images, x)?;
        self.first_norm.apply(device, x, x);
        let angles = device.temp(x.rows, 2 * self.axes.len())?;
        let places = |row: usize| match self.embeddings.place(row) {
            Some((y, x)) => [0.0, (y + 1) as f32, (x + 1) as f32],
            None => [0.0; 3],
        };
        device.rope_angles_by_axis(angles, self.inv_freq, &self.axes, &places, 1.0);
        let normed = device.temp(x.rows, x.cols)?;
        for layer in &self.layers {
            layer.forward(device, x, normed, Some(angles), self.embeddings.sequences(squares))?;
        }
        self.last_norm.apply(device, normed, x);
        for square in 0..squares {
            self.project(device, normed.span(square * rows, patches), output.span(square * tokens, tokens))?;
        }
        device.release(scope);
        Ok(output)
    }
}
