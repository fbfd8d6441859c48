//! The vision encoder of LFM2-VL: SigLIP 2 over images of any grid. Its learned positions are resized to the grid of each image. The
//! patches of a token, side by side, go through two projections.
//!
//! Reference: transformers, `modeling_siglip2.py` and `modeling_lfm2_vl.py`. [`crate::EncoderInput`] already has the patches of a token
//! side by side, in the order of the reference's pixel unshuffle.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape};
use plimsoll_formats::Vision as Config;

use super::order::Order;
use super::parts::{self, Merger};
use crate::{Encoder, EncoderInput, Grid, PlaceRule, Vision};

/// Rows of a table that a device blends in one call.
const BLENDED: usize = 4;

/// Weights of an encoder.
pub struct Siglip2Encoder {
    config: Config,
    body: parts::Siglip,
    projector: Merger,
    order: Order,
    /// Width of the model.
    out: usize,
}

impl Siglip2Encoder {
    /// Declares `visual.*` for rows of width `out`, the model's.
    pub fn declare(vision: Config, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let body = parts::Siglip::declare(&vision, declare)?;
        Ok(Self {
            body,
            projector: Merger::declare(&vision, "visual.projector", true, out, declare)?,
            order: Order { merge: vision.merge, window: None },
            out,
            config: vision,
        })
    }

    /// Computes the embeddings of all patches.
    fn embed(&self, device: &mut dyn Device, images: &EncoderInput<'_>, x: Buf) -> Result<(), DeviceError> {
        parts::embed(device, images.patches, (self.body.patch, self.patch_width()), x)?;
        let mut first = 0;
        for grid in images.grids {
            self.add_positions(device, *grid, x.span(first, grid.patches()));
            first += grid.patches();
        }
        Ok(())
    }

    /// Adds to each patch of an image its position in the table, which is resized to the image's grid. In an image smaller than the table a
    /// patch blends many positions, a few per call.
    fn add_positions(&self, device: &mut dyn Device, grid: Grid, x: Buf) {
        let side = self.config.table_side;
        let all = Axis::most(grid.height, side) * Axis::most(grid.width, side);
        for at in (0..all).step_by(BLENDED) {
            device.add_blended(x, self.body.positions, &|row| {
                let (_, y, x) = self.order.patch(&[grid], row);
                let (rows, columns) = (Axis::new(y, grid.height, side), Axis::new(x, grid.width, side));
                std::array::from_fn(|i| {
                    let (row, column) = ((at + i) / columns.count, (at + i) % columns.count);
                    match row < rows.count {
                        true => {
                            let place = (rows.first + row) * side + columns.first + column;
                            (place as u32, rows.share(row) * columns.share(column))
                        }
                        false => (0, 0.0),
                    }
                })
            });
        }
    }
}

/// The shares that a position on one axis of an image takes of the table's positions: neighbours, weighted by distance. The interpolation
/// is linear, with antialiasing, and aligned to the outer edges. Arithmetic is the reference's.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    first: usize,
    count: usize,
    centre: f32,
    reach: f32,
    sum: f32,
}

impl Axis {
    /// The most neighbours of a position in an image of `size`.
    fn most(size: usize, side: usize) -> usize {
        (2 * side).div_ceil(size).clamp(2, side.max(2))
    }

    fn new(at: usize, size: usize, side: usize) -> Self {
        let scale = side as f32 / size as f32;
        let reach = scale.max(1.0);
        let centre = (at as f32 + 0.5) * scale - 0.5;
        // A neighbour at exactly the reach has no share.
        let first = (centre - reach).floor() as isize + 1;
        let last = (centre + reach).ceil() as isize - 1;
        let (first, last) = (first.max(0) as usize, last.min(side as isize - 1).max(0) as usize);
        let axis = Self { first, count: last + 1 - first, centre, reach, sum: 1.0 };
        let sum = (0..axis.count).map(|nth| axis.share(nth)).sum();
        Self { sum, ..axis }
    }

    /// The share of the `nth` neighbour.
    fn share(&self, nth: usize) -> f32 {
        let away = ((self.first + nth) as f32 - self.centre).abs();
        (1.0 - away / self.reach).max(0.0) / self.sum
    }
}

impl Vision for Siglip2Encoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        None
    }
}

impl Encoder for Siglip2Encoder {
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
        let rows: usize = images.grids.iter().map(Grid::patches).sum();
        let output = device.temp(rows / self.order.block(), self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, self.config.hidden_size)?;
        self.embed(device, images, x)?;
        let normed = device.temp(x.rows, x.cols)?;
        for layer in &self.body.layers {
            layer.forward(device, x, normed, None, self.order.whole_frames(images.grids))?;
        }
        self.body.last_norm.apply(device, x, x);
        self.projector.forward(device, x, normed, output)?;
        device.release(scope);
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use super::Axis;

    /// The shares of all positions of the table.
    fn shares(at: usize, size: usize, side: usize) -> Vec<f32> {
        let axis = Axis::new(at, size, side);
        assert!(axis.count <= Axis::most(size, side), "{at} of {size} on {side}: {axis:?}");
        let share = |place| axis.share(place - axis.first);
        (0..side)
            .map(|place| if (axis.first..axis.first + axis.count).contains(&place) { share(place) } else { 0.0 })
            .collect()
    }

    #[test]
    fn a_grid_as_large_as_the_table_is_the_table() {
        for at in 0..5 {
            let expected: Vec<f32> = (0..5).map(|place| f32::from(u8::from(place == at))).collect();
            assert_eq!(shares(at, 5, 5), expected);
        }
    }

    #[test]
    fn larger_grids_lie_between_and_smaller_ones_take_means() {
        assert_eq!(shares(0, 4, 2), [1.0, 0.0]);
        assert_eq!(shares(1, 4, 2), [0.75, 0.25]);
        assert_eq!(shares(0, 2, 4), [3.0, 3.0, 1.0, 0.0].map(|share| share / 7.0));
        assert_eq!(shares(0, 1, 3).iter().sum::<f32>(), 1.0);
        for (size, side) in [(1, 1), (1, 16), (3, 16), (7, 16), (15, 16), (64, 16), (2, 3)] {
            for at in 0..size {
                let sum: f32 = shares(at, size, side).iter().sum();
                assert!((sum - 1.0).abs() < 1e-6, "{at} of {size} on {side}: {sum}");
            }
        }
    }
}
