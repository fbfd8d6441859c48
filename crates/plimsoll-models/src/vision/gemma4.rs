//! The vision encoder of Gemma 4: images of any aspect, with a learned and a rotary position for each axis. A token is the mean of a square
//! of patches.
//!
//! Reference: transformers, `modeling_gemma4.py`. [`crate::EncoderInput`] already has the patches of a token side by side. Each image is
//! computed separately. In the larger sizes an image's tokens attend to each other in the language model's sliding layers:
//! [`Vision::tokens_see_each_other`].

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, RowPiece,
    VectorId,
};
use plimsoll_formats::{Gemma4, RopeScaling, Vision as Config};

use super::order::Order;
use super::parts::embed;
use crate::block::activation;
use crate::clipped::Clipped;
use crate::encoder_parts::{mean, spec};
use crate::rope::rope;
use crate::{Encoder, EncoderInput, Grid, PlaceRule, Vision};

/// Epsilon of every norm.
const EPS: f32 = 1e-6;
/// Base of the rotary frequencies.
const THETA: f32 = 100.0;
/// The quarters of a stored head, in the order in which a head is packed. Elements that rotate by one angle are then half a head apart, as
/// [`Device::rope`] requires. The first half of the angles belongs to columns.
const QUARTERS: [usize; 4] = [0, 2, 1, 3];

/// One layer.
struct Layer {
    attention_norm: VectorId,
    q: Clipped,
    k: Clipped,
    v: Clipped,
    o: Clipped,
    q_norm: VectorId,
    k_norm: VectorId,
    attention_after: VectorId,
    mlp_norm: VectorId,
    gate: Clipped,
    up: Clipped,
    down: Clipped,
    mlp_after: VectorId,
}

/// The shift and the scale of tokens before the projection.
struct Standard {
    /// One row: the shift.
    shift: VectorId,
    scale: VectorId,
}

/// Weights of an encoder.
pub struct Gemma4Encoder {
    config: Config,
    sees_ahead: bool,
    patch: LinearId,
    /// Positions of columns, then the same number of positions of rows.
    positions: LinearId,
    rows_from: usize,
    inv_freq: VectorId,
    /// The axis of every frequency.
    axes: Vec<u8>,
    layers: Vec<Layer>,
    act: Activation,
    attention: Attention,
    /// Ones: the weights of norms without stored weights, over a head and over a row.
    plain_head: VectorId,
    plain_row: VectorId,
    standard: Option<Standard>,
    projection: LinearId,
    order: Order,
    /// Width of the model.
    out: usize,
}

impl Layer {
    fn declare(vision: &Config, own: Gemma4, prefix: &str, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, width) = (vision.hidden_size, vision.intermediate_size);
        let (quarter, clipped) = (vision.head_dim() / 4, own.clipped);
        let quarters: Vec<usize> =
            (0..vision.heads).flat_map(|head| QUARTERS.map(|part| (4 * head + part) * quarter)).collect();
        let turned: Vec<RowPiece> = quarters.iter().map(|first| RowPiece::span(*first, quarter)).collect();
        let linear = |name: &str, shape: (usize, usize), rows: &[RowPiece], declare: &mut Declare<'_>| {
            Clipped::declare(&format!("{prefix}.{name}_proj"), shape, rows, clipped, declare)
        };
        let square = (hidden, hidden);
        let q = linear("self_attn.q", square, &turned, declare)?;
        let k = linear("self_attn.k", square, &turned, declare)?;
        let v = linear("self_attn.v", square, &[], declare)?;
        let o = linear("self_attn.o", square, &[], declare)?;
        let gate = linear("mlp.gate", (width, hidden), &[], declare)?;
        let up = linear("mlp.up", (width, hidden), &[], declare)?;
        let down = linear("mlp.down", (hidden, width), &[], declare)?;
        let mut norm = |name: &str| declare.vector(&format!("{prefix}.{name}.weight"), hidden, 0.0);
        let [attention_norm, attention_after] = [norm("input_layernorm")?, norm("post_attention_layernorm")?];
        let [mlp_norm, mlp_after] = [norm("pre_feedforward_layernorm")?, norm("post_feedforward_layernorm")?];
        let mut head = |name: &str| head_norm(&format!("{prefix}.self_attn.{name}.weight"), 4 * quarter, declare);
        let (q_norm, k_norm) = (head("q_norm")?, head("k_norm")?);
        Ok(Self { attention_norm, q, k, v, o, q_norm, k_norm, attention_after, mlp_norm, gate, up, down, mlp_after })
    }
}

/// Declares the weights of a head's norm, in the order in which heads are packed.
fn head_norm(name: &str, head_dim: usize, declare: &mut Declare<'_>) -> Result<VectorId, DeclareError> {
    let weights = declare.read_values(name, head_dim, 1.0)?;
    let quarter = head_dim / 4;
    Ok(declare.values(QUARTERS.iter().flat_map(|part| &weights[part * quarter..][..quarter]).copied().collect()))
}

impl Standard {
    fn declare(hidden: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let scale = declare.vector("visual.std_scale", hidden, 0.0)?;
        let bias = declare.read_values("visual.std_bias", hidden, 0.0)?;
        Ok(Self { shift: declare.values(bias.iter().map(|bias| -bias).collect()), scale })
    }
}

impl Gemma4Encoder {
    /// Declares `visual.*` for rows of width `out`, the model's.
    pub fn declare(vision: Config, own: Gemma4, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, head_dim) = (vision.hidden_size, vision.head_dim());
        let window = [vision.channels, vision.patch, vision.patch];
        let patch = declare.convolution("visual.patch_embedder.input_proj", hidden, &window, false)?;
        let table = [2, own.positions, hidden];
        let positions = declare.linear_rows(
            "visual.patch_embedder.position_embedding_table",
            &table,
            &[RowPiece::span(0, 2 * own.positions)],
            hidden,
        )?;
        let mut layers = Vec::with_capacity(vision.depth);
        for layer in 0..vision.depth {
            layers.push(Layer::declare(&vision, own, &format!("visual.encoder.layers.{layer}"), declare)?);
        }
        // Both axes have the same frequencies: those of a head with half the width.
        let inv_freq = rope(head_dim / 2, THETA, &RopeScaling::None).inv_freq;
        let axes = [[2].repeat(inv_freq.len()), [1].repeat(inv_freq.len())].concat();
        Ok(Self {
            sees_ahead: own.sees_ahead,
            patch,
            positions,
            rows_from: own.positions,
            inv_freq: declare.values([inv_freq.as_slice(), inv_freq.as_slice()].concat()),
            axes,
            layers,
            act: activation(vision.act),
            attention: Attention { scale: 1.0, ..spec(vision.heads, head_dim) },
            plain_head: declare.values(vec![1.0; head_dim]),
            plain_row: declare.values(vec![1.0; hidden]),
            standard: if own.standardize { Some(Standard::declare(hidden, declare)?) } else { None },
            projection: declare.linear("visual.projector.embedding_projection.weight", out, hidden)?,
            order: Order { merge: vision.merge, window: None },
            out,
            config: vision,
        })
    }

    /// Computes the embeddings of all patches.
    fn embed(&self, device: &mut dyn Device, images: &EncoderInput<'_>, x: Buf) -> Result<(), DeviceError> {
        embed(device, images.patches, (self.patch, self.patch_width()), x)?;
        device.add_blended(x, self.positions, &|row| {
            let (_, y, x) = self.order.patch(images.grids, row);
            let nothing = (0, 0.0);
            [(x as u32, 1.0), ((self.rows_from + y) as u32, 1.0), nothing, nothing]
        });
        Ok(())
    }

    /// `x += norm(attention(norm(x)))`; `normed` and `scratch` have the shape of `x` and are overwritten.
    fn attend(
        &self,
        layer: &Layer,
        device: &mut dyn Device,
        [x, normed, scratch, angles]: [Buf; 4],
        grids: &[Grid],
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let head_dim = self.config.head_dim();
        device.rms_norm(normed, x, layer.attention_norm, EPS);
        let (q, k, v) = (device.temp(x.rows, x.cols)?, device.temp(x.rows, x.cols)?, device.temp(x.rows, x.cols)?);
        for (linear, norm, out) in
            [(&layer.q, layer.q_norm, q), (&layer.k, layer.k_norm, k), (&layer.v, self.plain_head, v)]
        {
            linear.apply(device, normed, scratch, out)?;
            let heads = out.reshape(head_dim);
            device.rms_norm(heads, heads, norm, EPS);
        }
        device.rope(q, angles, head_dim, false);
        device.rope(k, angles, head_dim, false);
        // The projections no longer need the normed rows, so attention writes its result there.
        device.attend_all(&self.attention, normed, q, k, v, &mut self.order.whole_frames(grids))?;
        layer.o.apply(device, normed, normed, q)?;
        device.rms_norm(q, q, layer.attention_after, EPS);
        device.add(x, q);
        device.release(scope);
        Ok(())
    }

    /// `x += norm(mlp(norm(x)))`; `normed` and `scratch` have the shape of `x` and are overwritten.
    fn transform(
        &self,
        layer: &Layer,
        device: &mut dyn Device,
        [x, normed, scratch]: [Buf; 3],
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        device.rms_norm(normed, x, layer.mlp_norm, EPS);
        let width = self.config.intermediate_size;
        let (gate, up) = (device.temp(x.rows, width)?, device.temp(x.rows, width)?);
        layer.gate.apply(device, normed, scratch, gate)?;
        layer.up.apply(device, normed, normed, up)?;
        device.glu(gate, up, self.act);
        layer.down.apply(device, gate, gate, scratch)?;
        device.rms_norm(scratch, scratch, layer.mlp_after, EPS);
        device.add(x, scratch);
        device.release(scope);
        Ok(())
    }
}

impl Vision for Gemma4Encoder {
    fn place_rule(&self) -> Option<PlaceRule> {
        None
    }

    fn tokens_see_each_other(&self) -> bool {
        self.sees_ahead
    }
}

impl Encoder for Gemma4Encoder {
    fn patch_width(&self) -> usize {
        self.config.patch_width()
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.config.head_dim(), self.config.hidden_size)
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let grids = images.grids;
        let (hidden, block) = (self.config.hidden_size, self.order.block());
        let rows: usize = grids.iter().map(Grid::patches).sum();
        let output = device.temp(rows / block, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, hidden)?;
        self.embed(device, images, x)?;
        let angles = device.temp(rows, 2 * self.axes.len())?;
        let places = |row: usize| {
            let (_, y, x) = self.order.patch(grids, row);
            [0.0, y as f32, x as f32]
        };
        device.rope_angles_by_axis(angles, self.inv_freq, &self.axes, &places, 1.0);
        let (normed, scratch) = (device.temp(rows, hidden)?, device.temp(rows, hidden)?);
        for layer in &self.layers {
            self.attend(layer, device, [x, normed, scratch, angles], grids)?;
            self.transform(layer, device, [x, normed, scratch])?;
        }
        // The layers no longer need their buffers, so tokens are written there.
        let tokens = normed.span(0, output.rows);
        mean(device, x, block, tokens)?;
        device.scale_rows(tokens, &|_| (hidden as f64).sqrt() as f32);
        if let Some(standard) = &self.standard {
            device.add_rows(tokens, standard.shift, &|_| 0);
            device.multiply(tokens, standard.scale);
        }
        device.rms_norm(tokens, tokens, self.plain_row, EPS);
        device.linear(tokens, &[(self.projection, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
