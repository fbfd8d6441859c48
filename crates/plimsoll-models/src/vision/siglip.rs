//! The vision encoders of Gemma 3 and Idefics3 (SmolVLM): SigLIP over images of one size, with learned positions alone. A square of patches
//! becomes a token: in Gemma 3 by their mean, in Idefics3 side by side.
//!
//! Reference: transformers, `modeling_siglip.py`, `modeling_gemma3.py` and `modeling_idefics3.py`. [`crate::EncoderInput`] already has the
//! patches of a token side by side. In Gemma 3's language model an image's tokens attend to each other: [`Vision::tokens_see_each_other`].

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode};
use plimsoll_formats::{Vision as Config, VisionKind};

use super::order::Order;
use super::parts;
use crate::encoder_parts::{Norm, mean};
use crate::{Encoder, EncoderInput, Grid, PlaceRule, Vision};

/// Weights of an encoder.
pub struct SiglipEncoder {
    config: Config,
    body: parts::Siglip,
    /// The norm of means before the projection. None: a token has its patches side by side.
    token_norm: Option<Norm>,
    projection: LinearId,
    order: Order,
    /// Width of the model.
    out: usize,
}

impl SiglipEncoder {
    /// Declares `visual.*` for rows of width `out`, the model's.
    pub fn declare(vision: Config, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let hidden = vision.hidden_size;
        let body = parts::Siglip::declare(&vision, declare)?;
        let (token_norm, projection) = match vision.encoder {
            VisionKind::Idefics3 => {
                let width = hidden * vision.merge * vision.merge;
                (None, declare.linear("visual.projector.proj.weight", out, width)?)
            }
            _ => {
                // The norm has the language model's form, which stores weights less one; llama.cpp's converter adds the one.
                let whole = "visual.projector.soft_emb_norm.weight";
                let weight = match declare.has(whole) {
                    true => declare.vector(whole, hidden, 0.0)?,
                    false => declare.vector("visual.projector.mm_soft_emb_norm.weight", hidden, 1.0)?,
                };
                let name = "visual.projector.mm_input_projection_weight";
                let projection = declare.turned(name, &[hidden, out], (0, 0, 1), (out, hidden), None)?;
                (Some(Norm { weight, bias: None, eps: body.last_norm.eps }), projection)
            }
        };
        Ok(Self {
            body,
            token_norm,
            projection,
            order: Order { merge: vision.merge, window: None },
            out,
            config: vision,
        })
    }

    /// Computes the embeddings of all patches.
    fn embed(&self, device: &mut dyn Device, images: &EncoderInput<'_>, x: Buf) -> Result<(), DeviceError> {
        parts::embed(device, images.patches, (self.body.patch, self.patch_width()), x)?;
        let side = self.config.table_side;
        device.add_blended(x, self.body.positions, &|row| {
            let (_, y, x) = self.order.patch(images.grids, row);
            let nothing = (0, 0.0);
            [((y * side + x) as u32, 1.0), nothing, nothing, nothing]
        });
        Ok(())
    }
}

impl Vision for SiglipEncoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        None
    }

    fn tokens_see_each_other(&self) -> bool {
        self.config.encoder == VisionKind::Siglip
    }
}

impl Encoder for SiglipEncoder {
    fn patch_width(&self) -> usize {
        self.config.patch_width()
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        let side_by_side = if self.token_norm.is_none() { self.order.block() } else { 1 };
        EncoderShape::new(self.config.head_dim(), self.config.hidden_size * side_by_side)
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let side = self.config.table_side;
        let whole = |grid: &Grid| (grid.frames, grid.height, grid.width) == (1, side, side);
        assert!(images.grids.iter().all(whole), "images of {side} × {side} patches");
        let rows = images.grids.len() * side * side;
        let output = device.temp(rows / self.order.block(), self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, self.config.hidden_size)?;
        self.embed(device, images, x)?;
        let normed = device.temp(x.rows, x.cols)?;
        for layer in &self.body.layers {
            layer.forward(device, x, normed, None, self.order.whole_frames(images.grids))?;
        }
        self.body.last_norm.apply(device, normed, x);
        let tokens = match self.token_norm {
            None => normed.reshape(normed.cols * self.order.block()),
            Some(norm) => {
                // The residual stream is no longer needed, so tokens are written there.
                let tokens = x.span(0, output.rows);
                mean(device, normed, self.order.block(), tokens)?;
                norm.apply(device, tokens, tokens);
                tokens
            }
        };
        device.linear(tokens, &[(self.projection, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
