//! The vision encoders of the Qwens: Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni, Qwen3-VL, Qwen3.5 and Qwen3-Omni.
//!
//! Reference: transformers, `modeling_qwen2_vl.py`, `modeling_qwen2_5_vl.py`, `modeling_qwen2_5_omni.py`, `modeling_qwen3_vl.py`,
//! `modeling_qwen3_5.py` and `vision_utils.py`. Patches attend to those of their frame, in most layers of Qwen2.5-VL to those of their
//! window. Each frame or window is computed separately, so that the workspace has only its keys and values.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, VectorId};
use plimsoll_formats::{RopeScaling, Vision as Config, VisionKind};

use super::order::Order;
use super::parts::{self, Merger};
use crate::encoder_parts::{Layer, values_of};
use crate::rope::rope;
use crate::{Encoder, EncoderInput, FrameTimes, Grid, PlaceRule, Vision};

/// Base of the rotary frequencies of every encoder.
const THETA: f32 = 10_000.0;

/// Weights of an encoder.
pub struct VisionEncoder {
    config: Config,
    patch: LinearId,
    /// The learned table of positions; none for families without one.
    table: Option<LinearId>,
    inv_freq: VectorId,
    /// The axis of every frequency.
    axes: Vec<u8>,
    layers: Vec<Layer>,
    merger: Merger,
    deepstack: Vec<Merger>,
    order: Order,
    /// Width of the model.
    out: usize,
}

impl VisionEncoder {
    /// Declares `visual.*` for rows of width `out`, the model's.
    pub fn declare(vision: Config, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let hidden = vision.hidden_size;
        let window = [vision.channels, vision.temporal, vision.patch, vision.patch];
        let learned = vision.table_side > 0;
        let patch = declare.convolution("visual.patch_embed.proj", hidden, &window, learned)?;
        let rows = vision.table_side * vision.table_side;
        let table = learned.then(|| declare.linear("visual.pos_embed.weight", rows, hidden)).transpose()?;
        // Both axes have the same frequencies: those of a head with half the width.
        let inv_freq = rope(vision.head_dim() / 2, THETA, &RopeScaling::None).inv_freq;
        let axes = [[1].repeat(inv_freq.len()), [2].repeat(inv_freq.len())].concat();
        let mut layers = Vec::with_capacity(vision.depth);
        for layer in 0..vision.depth {
            layers.push(parts::layer(&vision, &format!("visual.blocks.{layer}"), declare)?);
        }
        let merger = Merger::declare(&vision, "visual.merger", false, out, declare)?;
        let omni = vision.encoder == VisionKind::Omni;
        let list = if omni { "visual.merger_list" } else { "visual.deepstack_merger_list" };
        let deepstack =
            (0..vision.deepstack.len()).map(|i| Merger::declare(&vision, &format!("{list}.{i}"), true, out, declare));
        let deepstack = deepstack.collect::<Result<_, _>>()?;
        Ok(Self {
            patch,
            table,
            inv_freq: declare.values([inv_freq.as_slice(), inv_freq.as_slice()].concat()),
            axes,
            layers,
            merger,
            deepstack,
            order: Order {
                merge: vision.merge,
                window: vision.window.map(|pixels| pixels / (vision.patch * vision.merge)),
            },
            out,
            config: vision,
        })
    }

    /// Computes the embeddings of all patches, in the encoder's order.
    fn embed(&self, device: &mut dyn Device, images: &EncoderInput<'_>, x: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let width = self.patch_width();
        let input = device.temp(x.rows, width)?;
        let block = self.order.block();
        for run in self.order.runs(images.grids) {
            let values = values_of(images.patches, run.from * block, run.tokens * block, width);
            let rows = input.span(run.to * block, run.tokens * block);
            device.place(rows, 0, values, width, 0, Mode::Store);
        }
        device.linear(input, &[(self.patch, x)], Mode::Store)?;
        device.release(scope);
        if let Some(table) = self.table {
            let side = self.config.table_side;
            let blend = |row: usize| {
                let (grid, y, x) = self.order.patch(images.grids, row);
                between(side, (y, grid.height), (x, grid.width))
            };
            device.add_blended(x, table, &blend);
        }
        Ok(())
    }
}

/// Returns the four positions of a table of `side` × `side` around a patch, and their weights by distance. The corners of image and table
/// coincide. Arithmetic and order are the reference's.
fn between(side: usize, (y, height): (usize, usize), (x, width): (usize, usize)) -> [(u32, f32); 4] {
    let axis = |at: usize, size: usize| {
        let source = at as f32 * (side - 1) as f32 / (size - 1).max(1) as f32;
        let low = source.floor();
        let after = (low as usize + 1).min(side - 1);
        [(low as usize, 1.0 - (source - low)), (after, (1.0 - (source - low - 1.0).abs()).max(0.0))]
    };
    let ([top, bottom], [left, right]) = (axis(y, height), axis(x, width));
    let corner = |row: (usize, f32), column: (usize, f32)| ((row.0 * side + column.0) as u32, row.1 * column.1);
    [corner(top, left), corner(top, right), corner(bottom, left), corner(bottom, right)]
}

impl Vision for VisionEncoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        Some(PlaceRule {
            merge: self.config.merge,
            frames_apart: self.config.encoder == VisionKind::Qwen3,
            steps_per_second: self.config.steps_per_second.map(|steps| steps as f32),
            times: match self.config.encoder {
                VisionKind::Omni => FrameTimes::Exact,
                VisionKind::Omni2_5 => FrameTimes::CutBefore,
                _ => FrameTimes::Cut,
            },
        })
    }
}

impl Encoder for VisionEncoder {
    fn patch_width(&self) -> usize {
        self.config.patch_width()
    }

    fn output_width(&self) -> usize {
        self.out * (1 + self.deepstack.len())
    }

    fn shape(&self) -> EncoderShape {
        let merged = self.config.hidden_size * self.order.block();
        let widest = if self.deepstack.is_empty() { self.config.hidden_size } else { merged };
        EncoderShape::new(self.config.head_dim(), widest)
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let grids = images.grids;
        let rows: usize = grids.iter().map(Grid::patches).sum();
        let tokens = rows / self.order.block();
        let output = device.temp(tokens, self.output_width())?;
        let scope = device.mark();
        let x = device.temp(rows, self.config.hidden_size)?;
        self.embed(device, images, x)?;
        let angles = device.temp(rows, 2 * self.axes.len())?;
        let places = |row: usize| {
            let (_, y, x) = self.order.patch(grids, row);
            [0.0, y as f32, x as f32]
        };
        device.rope_angles_by_axis(angles, self.inv_freq, &self.axes, &places, 1.0);
        let normed = device.temp(rows, self.config.hidden_size)?;
        let merged = device.temp(tokens, self.out)?;
        for (i, layer) in self.layers.iter().enumerate() {
            match self.order.window.is_some() && !self.config.full_layers.contains(&i) {
                true => layer.forward(device, x, normed, Some(angles), self.order.windows(grids))?,
                false => layer.forward(device, x, normed, Some(angles), self.order.whole_frames(grids))?,
            }
            if let Some(level) = self.config.deepstack.iter().position(|layer| *layer == i) {
                self.deepstack[level].forward(device, x, normed, merged)?;
                device.put(output, merged, (level + 1) * self.out);
            }
        }
        self.merger.forward(device, x, normed, merged)?;
        // Restores the order of the tokens in a prompt.
        device.arrange(output, merged, &|token| self.order.place(grids, token));
        device.release(scope);
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use super::between;

    #[test]
    fn corners_lie_on_corners() {
        assert_eq!(between(4, (0, 2), (1, 2)), [(3, 1.0), (3, 0.0), (7, 0.0), (7, 0.0)]);
        assert_eq!(between(3, (1, 2), (0, 1)), [(6, 1.0), (7, 0.0), (6, 0.0), (7, 0.0)]);
        let middle = between(2, (1, 3), (1, 3));
        assert_eq!(middle, [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25)]);
    }
}
