//! The projection that Gemma 4 Unified has in place of a vision encoder: it embeds the patch of a token, which gets a position on each
//! axis.
//!
//! Reference: transformers, `modeling_gemma4_unified.py`. A patch is a token here, so nothing is merged.

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, RowPiece, VectorId,
};
use plimsoll_formats::{Gemma4, Vision as Config};

use super::order::Order;
use crate::encoder_parts::{NO_HEAD, Norm};
use crate::{Encoder, EncoderInput, Grid, PlaceRule, Vision};

/// Epsilon of the norms that subtract the mean.
const EPS: f32 = 1e-5;
/// Epsilon of the norm before the projection.
const LAST_EPS: f32 = 1e-6;

/// Weights of the projections, positions and norms.
pub struct UnifiedEncoder {
    config: Config,
    sees_ahead: bool,
    patch_norm: Norm,
    patch: LinearId,
    dense_norm: Norm,
    /// The table of positions: for every position the row of a column, then the row of a row.
    positions: LinearId,
    place_norm: Norm,
    /// Ones: the weights of the last norm.
    plain: VectorId,
    projection: LinearId,
    /// Width of the model.
    out: usize,
}

impl UnifiedEncoder {
    /// Declares `visual.*` for rows of width `out`, the model's.
    pub fn declare(vision: Config, own: Gemma4, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let hidden = vision.hidden_size;
        let window = [vision.channels, vision.patch, vision.patch];
        let patch_norm = Norm {
            weight: patch_vector("visual.patch_ln1.weight", &vision, 1.0, declare)?,
            bias: Some(patch_vector("visual.patch_ln1.bias", &vision, 0.0, declare)?),
            eps: EPS,
        };
        let positions = [RowPiece::span(0, 2 * own.positions)];
        Ok(Self {
            sees_ahead: own.sees_ahead,
            patch_norm,
            patch: declare.convolution("visual.patch_dense", hidden, &window, true)?,
            dense_norm: Norm::declare("visual.patch_ln2", hidden, EPS, declare)?,
            positions: declare.linear_rows("visual.pos_embedding", &[own.positions, 2, hidden], &positions, hidden)?,
            place_norm: Norm::declare("visual.pos_norm", hidden, EPS, declare)?,
            plain: declare.values(vec![1.0; hidden]),
            projection: declare.linear("visual.projector.embedding_projection.weight", out, hidden)?,
            out,
            config: vision,
        })
    }
}

/// Declares a number for every value of a patch. The file stores the pixels one after another, each with all colours; here the colours
/// follow one another.
fn patch_vector(
    name: &str,
    vision: &Config,
    default: f32,
    declare: &mut Declare<'_>,
) -> Result<VectorId, DeclareError> {
    let (width, channels) = (vision.patch_width(), vision.channels);
    let stored = declare.read_values(name, width, default)?;
    let points = width / channels;
    Ok(declare.values((0..width).map(|i| stored[i % points * channels + i / points]).collect()))
}

impl Vision for UnifiedEncoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        None
    }

    fn tokens_see_each_other(&self) -> bool {
        self.sees_ahead
    }
}

impl Encoder for UnifiedEncoder {
    fn patch_width(&self) -> usize {
        self.config.patch_width()
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(NO_HEAD, self.patch_width().max(self.config.hidden_size))
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let (grids, width) = (images.grids, self.patch_width());
        let rows: usize = grids.iter().map(Grid::patches).sum();
        let output = device.temp(rows, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, self.config.hidden_size)?;
        let inner = device.mark();
        let patches = device.temp(rows, width)?;
        device.place(patches, 0, images.patches, width, 0, Mode::Store);
        self.patch_norm.apply(device, patches, patches);
        device.linear(patches, &[(self.patch, x)], Mode::Store)?;
        device.release(inner);
        self.dense_norm.apply(device, x, x);
        let order = Order { merge: 1, window: None };
        device.add_blended(x, self.positions, &|row| {
            let (_, y, x) = order.patch(grids, row);
            let nothing = (0, 0.0);
            [(2 * x as u32, 1.0), (2 * y as u32 + 1, 1.0), nothing, nothing]
        });
        self.place_norm.apply(device, x, x);
        device.rms_norm(x, x, self.plain, LAST_EPS);
        device.linear(x, &[(self.projection, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
