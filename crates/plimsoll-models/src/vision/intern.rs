//! The tower of InternVL: images are lists of square tiles of one size, each with a class row that attends and is then dropped.
//!
//! Reference: transformers, `modeling_internvl.py`. An image's grid has a frame for each tile. What the reference
//! shuffles at the end is the order of [`crate::EncoderInput`]: patches of a token lie side by side from the start. The
//! class row stands behind a tile's patches, so the patches keep their places.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, RowPiece};
use plimsoll_formats::{Intern, Vision as Config};

use super::order::Order;
use super::parts::{self, Merger};
use crate::tower::{Layer, Norm, values_of};
use crate::{Encoder, EncoderInput, Grid, PlaceRule, Vision};

/// Weights of a tower.
pub struct InternTower {
    config: Config,
    patch: LinearId,
    class: LinearId,
    /// The class row's position, then those of a tile's patches from left to right and from top to bottom.
    positions: LinearId,
    layers: Vec<Layer>,
    last_norm: Option<Norm>,
    projector: Merger,
    order: Order,
    /// Width of the model.
    out: usize,
}

impl InternTower {
    /// Declares `visual.*`, giving rows for a model of width `out`.
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
        // `norm_type` is about the layers' norms, not about this one.
        let last_norm = intern.last_norm.then(|| parts::layer_norm("visual.layernorm", hidden, declare)).transpose()?;
        Ok(Self {
            patch,
            class,
            positions,
            layers,
            last_norm,
            projector: Merger::declare(&vision, "visual.projector", true, out, declare)?,
            order: Order { merge: vision.merge, window: None },
            out,
            config: vision,
        })
    }

    /// Patches of a tile.
    fn patches(&self) -> usize {
        self.config.table_side * self.config.table_side
    }

    /// The embeddings of all tiles' patches and class rows.
    fn embed(&self, device: &mut dyn Device, images: &EncoderInput<'_>, x: Buf) -> Result<(), DeviceError> {
        let (patches, width) = (self.patches(), self.patch_width());
        let scope = device.mark();
        let input = device.temp(patches, width)?;
        for tile in 0..x.rows / (patches + 1) {
            let values = values_of(images.patches, tile * patches, patches, width);
            device.place(input, 0, values, width, 0, Mode::Store);
            let first = tile * (patches + 1);
            device.linear(input, &[(self.patch, x.span(first, patches))], Mode::Store)?;
            device.embed(x.span(first + patches, 1), self.class, &[0], 1.0);
        }
        device.release(scope);
        let side = self.config.table_side;
        let tile = [Grid { frames: 1, height: side, width: side }];
        let position = |row: usize| match row % (patches + 1) {
            row if row == patches => 0,
            row => {
                let (_, y, x) = self.order.patch(&tile, row);
                1 + y * side + x
            }
        };
        device.add_blended(x, self.positions, &|row| {
            let nothing = (0, 0.0);
            [(position(row) as u32, 1.0), nothing, nothing, nothing]
        });
        Ok(())
    }
}

impl Vision for InternTower {
    fn place_rule(&self) -> Option<PlaceRule> {
        // The language models before which such a tower stands know one axis only.
        None
    }
}

impl Encoder for InternTower {
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
        let (side, patches) = (self.config.table_side, self.patches());
        let whole = |grid: &Grid| (grid.height, grid.width) == (side, side);
        assert!(images.grids.iter().all(whole), "tiles of {side} × {side} patches");
        let tiles: usize = images.grids.iter().map(|grid| grid.frames).sum();
        let (rows, tokens) = (patches + 1, patches / self.order.block());
        let output = device.temp(tiles * tokens, self.out)?;
        let scope = device.mark();
        let x = device.temp(tiles * rows, self.config.hidden_size)?;
        self.embed(device, images, x)?;
        let normed = device.temp(x.rows, x.cols)?;
        for layer in &self.layers {
            layer.forward(device, x, normed, None, (0..tiles).map(|tile| (tile * rows, rows)))?;
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
