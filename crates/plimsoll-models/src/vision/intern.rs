//! The vision encoder of InternVL: images are lists of square tiles of one size, each with a class row that attends and is then dropped.
//!
//! Reference: transformers, `modeling_internvl.py`. An image's grid has a frame for each tile. The reference's final shuffle is already the
//! order of [`crate::EncoderInput`], in which the patches of a token are side by side. The class row follows a tile's patches, so that the
//! patches keep their indexes.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, RowPiece};
use plimsoll_formats::{Intern, Vision as Config};

use super::class_rows::ClassRows;
use super::order::Order;
use super::parts::{self, Merger};
use crate::encoder_parts::{Layer, Norm};
use crate::{Encoder, EncoderInput, PlaceRule, Vision};

/// Weights of an encoder.
pub struct InternEncoder {
    config: Config,
    embeddings: ClassRows,
    layers: Vec<Layer>,
    last_norm: Option<Norm>,
    projector: Merger,
    /// Width of the model.
    out: usize,
}

impl InternEncoder {
    /// Declares `visual.*` for rows of width `out`, the model's.
    pub fn declare(
        vision: Config,
        intern: Intern,
        out: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let (hidden, side) = (vision.hidden_size, vision.table_side);
        let window = [vision.channels, vision.patch, vision.patch];
        let mut table = |name: &str, rows: usize| {
            declare.linear_rows(
                &format!("visual.embeddings.{name}"),
                &[1, rows, hidden],
                &[RowPiece::span(0, rows)],
                hidden,
            )
        };
        let (class, positions) = (table("cls_token", 1)?, table("position_embeddings", side * side + 1)?);
        let patch = declare.convolution("visual.embeddings.patch_embeddings.projection", hidden, &window, true)?;
        let mut layers = Vec::with_capacity(vision.depth);
        for layer in 0..vision.depth {
            layers.push(parts::layer(&vision, &format!("visual.encoder.layer.{layer}"), declare)?);
        }
        // `norm_type` applies to the layers' norms only; this one is always a layer norm.
        let last_norm = intern.last_norm.then(|| parts::layer_norm("visual.layernorm", hidden, declare)).transpose()?;
        Ok(Self {
            embeddings: ClassRows {
                patch,
                class,
                positions,
                class_first: true,
                width: vision.patch_width(),
                side,
                order: Order { merge: vision.merge, window: None },
            },
            layers,
            last_norm,
            projector: Merger::declare(&vision, "visual.projector", true, out, declare)?,
            out,
            config: vision,
        })
    }
}

impl Vision for InternEncoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        // The language models after this encoder have one position axis only.
        None
    }
}

impl Encoder for InternEncoder {
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
        let tiles = self.embeddings.squares(images);
        let (patches, rows, tokens) = (self.embeddings.patches(), self.embeddings.rows(), self.embeddings.tokens());
        let output = device.temp(tiles * tokens, self.out)?;
        let scope = device.mark();
        let x = device.temp(tiles * rows, self.config.hidden_size)?;
        self.embeddings.embed(device, images, x)?;
        let normed = device.temp(x.rows, x.cols)?;
        for layer in &self.layers {
            layer.forward(device, x, normed, None, self.embeddings.sequences(tiles))?;
        }
        if let Some(norm) = self.last_norm {
            norm.apply(device, x, x);
        }
        for tile in 0..tiles {
            let [x, normed] = [x, normed].map(|all| all.span(tile * rows, patches));
            self.projector.forward(device, x, normed, output.span(tile * tokens, tokens))?;
        }
        device.release(scope);
        Ok(output)
    }
}
