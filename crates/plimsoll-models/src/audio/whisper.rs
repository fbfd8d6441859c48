//! The audio tower of Whisper.
//!
//! Reference: transformers, `modeling_whisper.py`. Two convolutions over a whole spectrogram, the second of which halves time; positions
//! that are stored; then layers in which all rows of a clip attend to each other, and a last norm. Every clip has the same length.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, Unfold, VectorId,
};
use plimsoll_formats::{Audio, Whisper as Config};

use super::parts::{layer, norm};
use super::{PAD, STEP, TAPS};
use crate::tower::{Layer, Norm, values_of};
use crate::{Encoder, EncoderInput};

/// Weights of a tower.
pub struct Tower {
    /// Mel bands.
    bands: usize,
    hidden: usize,
    head_dim: usize,
    /// The two convolutions, each with the frames from one window to the next.
    convolutions: [(LinearId, usize); 2],
    /// A row for every row of a clip.
    positions: VectorId,
    /// Rows of that table.
    rows: usize,
    layers: Vec<Layer>,
    last_norm: Norm,
}

impl Tower {
    /// Declares `audio.*`. Its rows are as wide as the model.
    pub fn declare(audio: &Audio, own: &Config, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, rows) = (audio.hidden_size, own.positions);
        let mut convolution = |name: &str, from: usize| declare.convolution(name, hidden, &[from, TAPS], true);
        let convolutions = [(convolution("audio.conv1", audio.bands)?, 1), (convolution("audio.conv2", hidden)?, STEP)];
        Ok(Self {
            bands: audio.bands,
            hidden,
            head_dim: audio.head_dim(),
            convolutions,
            positions: declare.flat_vector("audio.embed_positions.weight", &[&[rows, hidden]])?,
            rows,
            layers: (0..audio.depth)
                .map(|i| layer(audio, &format!("audio.layers.{i}"), false, declare))
                .collect::<Result<_, _>>()?,
            last_norm: norm("audio.layer_norm", hidden, declare)?,
        })
    }

    /// The rows of one clip without their positions: `out` has room for just those.
    fn convolve(&self, device: &mut dyn Device, frames: usize, values: &[f32], out: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let mut x = device.temp(frames, self.bands)?;
        device.place(x, 0, values, self.bands, 0, Mode::Store);
        for (i, (convolution, step)) in self.convolutions.into_iter().enumerate() {
            let last = i + 1 == self.convolutions.len();
            let next = if last { out } else { device.temp(frames, self.hidden)? };
            let scope = device.mark();
            let windows = device.temp(next.rows, x.cols * TAPS)?;
            device.unfold(windows, x, &Unfold { inner: 1, taps: [TAPS, 1], step: [step, 1], pad: [PAD, 0] });
            device.linear(windows, &[(convolution, next)], Mode::Store)?;
            device.release(scope);
            device.activate(next, Activation::Gelu);
            x = next;
        }
        device.release(scope);
        Ok(())
    }
}

impl Encoder for Tower {
    fn patch_width(&self) -> usize {
        self.bands
    }

    fn output_width(&self) -> usize {
        self.hidden
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.head_dim, self.hidden)
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let rows_of = |frames: usize| frames.div_ceil(STEP);
        let clips = || images.grids.iter().map(|grid| grid.patches());
        let rows: usize = clips().map(rows_of).sum();
        let output = device.temp(rows, self.hidden)?;
        let scope = device.mark();
        let x = device.temp(rows, self.hidden)?;
        let (mut row, mut frame) = (0, 0);
        for frames in clips() {
            let own = x.span(row, rows_of(frames));
            self.convolve(device, frames, values_of(images.patches, frame, frames, self.bands), own)?;
            // No clip is longer than the table.
            device.add_rows(own, self.positions, &|row| row.min(self.rows - 1));
            (row, frame) = (row + own.rows, frame + frames);
        }
        let normed = device.temp(rows, self.hidden)?;
        for layer in &self.layers {
            let mut first = 0;
            let sequences = clips().map(|frames| {
                let begin = first;
                first += rows_of(frames);
                (begin, rows_of(frames))
            });
            layer.forward(device, x, normed, None, sequences)?;
        }
        self.last_norm.apply(device, output, x);
        device.release(scope);
        Ok(output)
    }
}
