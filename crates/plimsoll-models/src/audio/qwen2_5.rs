//! The audio encoder of Qwen2.5-Omni.
//!
//! Reference: transformers, `modeling_qwen2_5_omni.py`. Chunks of a spectrogram go through two convolutions, the second of which halves
//! time, and get positions of their own. The layers attend inside a chunk. The mean of two rows that follow one another is a token, also
//! where they are of two chunks; a last row without another is dropped. Only one chunk at a time is convolved.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, Unfold, VectorId,
};
use plimsoll_formats::{Audio, AudioChunks as Config};

use super::parts::{layer, norm, positions};
use super::{PAD, STEP, TAPS};
use crate::tower::{Layer, Norm, mean, values_of};
use crate::{Encoder, EncoderInput};

/// Rows of a token.
const POOLED: usize = 2;

/// Weights of the encoder.
pub struct Tower {
    config: Config,
    /// Mel bands.
    bands: usize,
    hidden: usize,
    head_dim: usize,
    /// The two convolutions, with the stride of each.
    convolutions: [(LinearId, usize); 2],
    /// The position of every row of a chunk.
    positions: VectorId,
    layers: Vec<Layer>,
    last_norm: Norm,
    projection: LinearId,
    /// Width of the model.
    out: usize,
}

impl Tower {
    /// Declares `audio.*`, giving rows for a model of width `out`.
    pub fn declare(audio: &Audio, own: Config, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let hidden = audio.hidden_size;
        let first = declare.convolution("audio.conv1", hidden, &[audio.bands, TAPS], true)?;
        let second = declare.convolution("audio.conv2", hidden, &[hidden, TAPS], true)?;
        let mut layers = Vec::with_capacity(audio.depth);
        for i in 0..audio.depth {
            layers.push(layer(audio, &format!("audio.layers.{i}"), false, declare)?);
        }
        Ok(Self {
            convolutions: [(first, 1), (second, STEP)],
            positions: declare.values(positions(own.half_window, hidden)),
            layers,
            last_norm: norm("audio.ln_post", hidden, declare)?,
            projection: declare.linear_with_bias("audio.proj", out, hidden)?,
            out,
            bands: audio.bands,
            hidden,
            head_dim: audio.head_dim(),
            config: own,
        })
    }

    /// The rows of one chunk without their positions, in `out`, which has room for just those.
    fn convolve(&self, device: &mut dyn Device, frames: usize, values: &[f32], out: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let mut plane = device.temp(frames, self.bands)?;
        device.place(plane, 0, values, self.bands, 0, Mode::Store);
        for (nth, (convolution, step)) in self.convolutions.into_iter().enumerate() {
            let next = if nth == 0 { device.temp(frames, self.hidden)? } else { out };
            let inner = device.mark();
            let windows = device.temp(next.rows, plane.cols * TAPS)?;
            let cut = Unfold { inner: 1, taps: [TAPS, 1], step: [step, 1], pad: [PAD, 0] };
            device.unfold(windows, plane, &cut);
            device.linear(windows, &[(convolution, next)], Mode::Store)?;
            device.release(inner);
            device.activate(next, Activation::Gelu);
            plane = next;
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
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.head_dim, self.hidden)
    }

    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let (hidden, chunk, most) = (self.hidden, self.config.chunk(), self.config.half_window);
        let clips = || images.grids.iter().map(|grid| grid.patches());
        let rows: usize = clips().map(Config::convolved).sum();
        let tokens: usize = clips().map(|frames| Config::convolved(frames) / POOLED).sum();
        let output = device.temp(tokens, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, hidden)?;
        let (mut row, mut frame) = (0, 0);
        for frames in clips() {
            let own = x.span(row, Config::convolved(frames));
            for first in (0..frames).step_by(chunk) {
                let count = chunk.min(frames - first);
                let values = values_of(images.patches, frame + first, count, self.bands);
                let rows = own.span(Config::convolved(first), Config::convolved(count));
                self.convolve(device, count, values, rows)?;
            }
            device.add_rows(own, self.positions, &|row| row % most);
            (row, frame) = (row + own.rows, frame + frames);
        }
        let normed = device.temp(rows, hidden)?;
        for layer in &self.layers {
            let mut first = 0;
            let sequences = clips().flat_map(|frames| {
                let (begin, rows) = (first, Config::convolved(frames));
                first += rows;
                (0..rows).step_by(most).map(move |at| (begin + at, most.min(rows - at)))
            });
            layer.forward(device, x, normed, None, sequences)?;
        }
        let (mut row, mut token) = (0, 0);
        for frames in clips() {
            let rows = Config::convolved(frames);
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
