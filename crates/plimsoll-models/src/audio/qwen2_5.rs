//! The audio encoder of Qwen2.5-Omni.
//!
//! Reference: transformers, `modeling_qwen2_5_omni.py`. Chunks of a spectrogram go through two convolutions, the second of which halves
//! time, and get positions within the chunk. The layers attend inside a chunk. The mean of two consecutive rows is a token, even if they
//! are of two chunks. A last row without a partner is dropped. Only one chunk at a time is convolved.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, VectorId};
use plimsoll_formats::{Audio, AudioChunks as Config};

use super::parts::{Convolutions, layer, norm, positions};
use crate::encoder_parts::{Layer, Norm, mean, values_of};
use crate::{Encoder, EncoderInput};

/// Rows of a token.
const POOLED: usize = 2;

/// Weights of the encoder.
pub struct AudioEncoder {
    config: Config,
    convolutions: Convolutions,
    head_dim: usize,
    /// The position of every row of a chunk.
    positions: VectorId,
    layers: Vec<Layer>,
    last_norm: Norm,
    projection: LinearId,
    /// Width of the model.
    out: usize,
}

impl AudioEncoder {
    /// Declares `audio.*` for rows of width `out`, the model's.
    pub fn declare(audio: &Audio, own: Config, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let hidden = audio.hidden_size;
        let convolutions = Convolutions::declare(audio, declare)?;
        let mut layers = Vec::with_capacity(audio.depth);
        for i in 0..audio.depth {
            layers.push(layer(audio, &format!("audio.layers.{i}"), false, declare)?);
        }
        Ok(Self {
            convolutions,
            positions: declare.values(positions(own.half_window, hidden)),
            layers,
            last_norm: norm("audio.ln_post", hidden, declare)?,
            projection: declare.linear_with_bias("audio.proj", out, hidden)?,
            out,
            head_dim: audio.head_dim(),
            config: own,
        })
    }
}

impl Encoder for AudioEncoder {
    fn patch_width(&self) -> usize {
        self.convolutions.bands
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.head_dim, self.convolutions.hidden)
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let (bands, hidden) = (self.convolutions.bands, self.convolutions.hidden);
        let (chunk, most) = (self.config.chunk(), self.config.half_window);
        let clips = || images.grids.iter().map(|grid| grid.patches());
        let rows: usize = clips().map(Convolutions::rows).sum();
        let tokens: usize = clips().map(|frames| Convolutions::rows(frames) / POOLED).sum();
        let output = device.temp(tokens, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, hidden)?;
        let (mut row, mut frame) = (0, 0);
        for frames in clips() {
            let own = x.span(row, Convolutions::rows(frames));
            for first in (0..frames).step_by(chunk) {
                let count = chunk.min(frames - first);
                let values = values_of(images.patches, frame + first, count, bands);
                let rows = own.span(Convolutions::rows(first), Convolutions::rows(count));
                self.convolutions.run(device, count, values, rows)?;
            }
            device.add_rows(own, self.positions, &|row| row % most);
            (row, frame) = (row + own.rows, frame + frames);
        }
        let normed = device.temp(rows, hidden)?;
        for layer in &self.layers {
            let mut first = 0;
            let sequences = clips().flat_map(|frames| {
                let (begin, rows) = (first, Convolutions::rows(frames));
                first += rows;
                (0..rows).step_by(most).map(move |at| (begin + at, most.min(rows - at)))
            });
            layer.forward(device, x, normed, None, sequences)?;
        }
        let (mut row, mut token) = (0, 0);
        for frames in clips() {
            let rows = Convolutions::rows(frames);
            let pooled = rows / POOLED;
            mean(device, x.span(row, pooled * POOLED), POOLED, normed.span(token, pooled))?;
            (row, token) = (row + rows, token + pooled);
        }
        let (pooled, last) = (normed.span(0, tokens), x.span(0, tokens));
        self.last_norm.apply(device, last, pooled);
        device.linear(last, &[(self.projection, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
