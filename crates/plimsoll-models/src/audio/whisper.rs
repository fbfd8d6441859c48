//! The audio encoder of Whisper.
//!
//! Reference: transformers, `modeling_whisper.py`. Two convolutions run over a whole spectrogram; the second halves time. Stored positions
//! are added. Then follow layers in which all rows of a clip attend to each other, and a last norm. Every clip has the same length.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, VectorId};
use plimsoll_formats::{Audio, Whisper as Config};

use super::parts::{Convolutions, layer, norm};
use crate::encoder_parts::{Layer, Norm, values_of};
use crate::{Encoder, EncoderInput};

/// Weights of an encoder.
pub struct AudioEncoder {
    convolutions: Convolutions,
    head_dim: usize,
    /// The stored positions: one for every row of a clip.
    positions: VectorId,
    /// Rows of the positions' table.
    rows: usize,
    layers: Vec<Layer>,
    last_norm: Norm,
}

impl AudioEncoder {
    /// Declares `audio.*`. Its rows are as wide as the model.
    pub fn declare(audio: &Audio, own: &Config, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, rows) = (audio.hidden_size, own.positions);
        Ok(Self {
            convolutions: Convolutions::declare(audio, declare)?,
            head_dim: audio.head_dim(),
            positions: declare.flat_vector("audio.embed_positions.weight", &[&[rows, hidden]])?,
            rows,
            layers: (0..audio.depth)
                .map(|i| layer(audio, &format!("audio.layers.{i}"), false, declare))
                .collect::<Result<_, _>>()?,
            last_norm: norm("audio.layer_norm", hidden, declare)?,
        })
    }
}

impl Encoder for AudioEncoder {
    fn patch_width(&self) -> usize {
        self.convolutions.bands
    }

    fn output_width(&self) -> usize {
        self.convolutions.hidden
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.head_dim, self.convolutions.hidden)
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let (bands, hidden) = (self.convolutions.bands, self.convolutions.hidden);
        let clips = || images.grids.iter().map(|grid| grid.patches());
        let rows: usize = clips().map(Convolutions::rows).sum();
        let output = device.temp(rows, hidden)?;
        let scope = device.mark();
        let x = device.temp(rows, hidden)?;
        let (mut row, mut frame) = (0, 0);
        for frames in clips() {
            let own = x.span(row, Convolutions::rows(frames));
            self.convolutions.run(device, frames, values_of(images.patches, frame, frames, bands), own)?;
            // No clip is longer than the table.
            device.add_rows(own, self.positions, &|row| row.min(self.rows - 1));
            (row, frame) = (row + own.rows, frame + frames);
        }
        let normed = device.temp(rows, hidden)?;
        for layer in &self.layers {
            let mut first = 0;
            let sequences = clips().map(|frames| {
                let begin = first;
                first += Convolutions::rows(frames);
                (begin, Convolutions::rows(frames))
            });
            layer.forward(device, x, normed, None, sequences)?;
        }
        self.last_norm.apply(device, output, x);
        device.release(scope);
        Ok(output)
    }
}
