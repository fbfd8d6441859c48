//! The audio encoder of Qwen3-Omni and Qwen3-ASR.
//!
//! Reference: transformers, `modeling_qwen3_omni_moe.py`, `modeling_qwen3_asr.py`. Windows of a spectrogram go through three convolutions,
//! each of which halves time and bands, and get positions within the window. Then all rows of an audio clip go through the layers,
//! attending in larger windows. The reference pads a batch's last windows to the batch's longest. So there an audio clip shorter than one
//! window depends on the other clips of the batch; here it does not. Only one window at a time is convolved.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, Unfold, VectorId,
};
use plimsoll_formats::{Audio, AudioTask, AudioWindows as Config};

use super::parts::{layer, norm, positions};
use super::{PAD, STEP, TAPS};
use crate::block::activation;
use crate::encoder_parts::{Layer, Norm, values_of};
use crate::{Encoder, EncoderInput};

/// Weights of an encoder.
pub struct AudioEncoder {
    config: Config,
    /// Mel bands.
    bands: usize,
    hidden: usize,
    head_dim: usize,
    /// The three convolutions.
    convolutions: [LinearId; 3],
    /// The projection of all channels and bands of a moment to a row.
    frame: LinearId,
    /// The position of every row of a window.
    positions: VectorId,
    layers: Vec<Layer>,
    last_norm: Norm,
    up: LinearId,
    down: LinearId,
    act: Activation,
    /// Width of the model.
    out: usize,
}

impl AudioEncoder {
    /// Declares `audio.*` for rows of width `out`, the model's.
    pub fn declare(audio: &Audio, own: &Config, out: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, channels) = (audio.hidden_size, own.channels);
        let mut convolution = |name: &str, from: usize| {
            declare.convolution(&format!("audio.{name}"), channels, &[from, TAPS, TAPS], true)
        };
        let convolutions =
            [convolution("conv2d1", 1)?, convolution("conv2d2", channels)?, convolution("conv2d3", channels)?];
        let frame = declare.linear("audio.conv_out.weight", hidden, channels * Config::convolved(audio.bands))?;
        let mut layers = Vec::with_capacity(audio.depth);
        for i in 0..audio.depth {
            layers.push(layer(audio, &format!("audio.layers.{i}"), true, declare)?);
        }
        // transformers names Qwen3-ASR's last projections like those of vision encoders; the published files do not.
        let named = "visual.projector.linear_1.weight";
        let [up, down] = match declare.has(named) {
            true => ["visual.projector.linear_1", "visual.projector.linear_2"],
            false => ["audio.proj1", "audio.proj2"],
        };
        Ok(Self {
            convolutions,
            frame,
            positions: declare.values(positions(Config::convolved(own.window()), hidden)),
            layers,
            last_norm: norm("audio.ln_post", hidden, declare)?,
            up: declare.linear_with_bias(up, hidden, hidden)?,
            down: declare.linear_with_bias(down, out, hidden)?,
            act: activation(audio.act),
            out,
            bands: audio.bands,
            hidden,
            head_dim: audio.head_dim(),
            config: own.clone(),
        })
    }

    /// Rows of a whole window.
    fn window_rows(&self) -> usize {
        Config::convolved(self.config.window())
    }

    /// Windows of an audio clip that attend to each other.
    fn windows_together(&self) -> usize {
        self.config.attention_window / self.config.window()
    }

    /// Computes the rows of one audio clip without their positions. `x` has room for exactly these rows.
    fn convolve(&self, device: &mut dyn Device, frames: usize, patches: &[f32], x: Buf) -> Result<(), DeviceError> {
        let (bands, window) = (self.bands, self.config.window());
        let wide = self.config.channels * Config::convolved(bands);
        let together = window * self.windows_together();
        for first in (0..frames).step_by(together) {
            let scope = device.mark();
            let count = together.min(frames - first);
            let moments = device.temp(self.config.rows(count), wide)?;
            for begin in (0..count).step_by(window) {
                let own = window.min(count - begin);
                let values = values_of(patches, first + begin, own, bands);
                let rows = moments.span(begin / window * self.window_rows(), Config::convolved(own));
                // Silence follows the last frame of a clip with several windows. A clip shorter than a window ends with its last frame,
                // unless the family's feature extractor fills the window.
                let width = if self.config.task == AudioTask::Transcribe { window } else { window.min(frames) };
                self.convolve_window(device, values, (own, width), rows)?;
            }
            let rows = x.span(self.config.rows(first), moments.rows);
            device.linear(moments, &[(self.frame, rows)], Mode::Store)?;
            device.release(scope);
        }
        Ok(())
    }

    /// Convolves one window of `own` frames, with silence up to `width`. Writes to `out` a row per moment, with all its channels and bands.
    fn convolve_window(
        &self,
        device: &mut dyn Device,
        values: &[f32],
        (own, width): (usize, usize),
        out: Buf,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let (mut bands, mut moments, channels) = (self.bands, width, self.config.channels);
        let spectrum = device.temp(own, bands)?;
        device.place(spectrum, 0, values, bands, 0, Mode::Store);
        let mut plane = spectrum.reshape(1);
        for convolution in self.convolutions {
            let cut = Unfold { inner: bands, taps: [TAPS; 2], step: [STEP; 2], pad: [PAD; 2] };
            (bands, moments) = (cut.windows(), moments.div_ceil(STEP));
            let next = device.temp(moments * bands, channels)?;
            let scope = device.mark();
            let windows = device.temp(next.rows, plane.cols * TAPS * TAPS)?;
            device.unfold(windows, plane, &cut);
            device.linear(windows, &[(convolution, next)], Mode::Store)?;
            device.release(scope);
            device.activate(next, Activation::Gelu);
            plane = next;
        }
        // All bands of a moment, grouped by channel.
        device.unfold(out, plane, &Unfold { inner: bands, taps: [1, bands], step: [1, bands], pad: [0; 2] });
        device.release(scope);
        Ok(())
    }
}

impl Encoder for AudioEncoder {
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
        let (hidden, bands) = (self.hidden, self.bands);
        let clips = || images.grids.iter().map(|grid| grid.patches());
        let rows: usize = clips().map(|frames| self.config.rows(frames)).sum();
        let output = device.temp(rows, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, hidden)?;
        let (mut row, mut frame) = (0, 0);
        for frames in clips() {
            let own = x.span(row, self.config.rows(frames));
            let patches = values_of(images.patches, frame, frames, bands);
            self.convolve(device, frames, patches, own)?;
            device.add_rows(own, self.positions, &|row| row % self.window_rows());
            (row, frame) = (row + own.rows, frame + frames);
        }
        let normed = device.temp(rows, hidden)?;
        let most = self.window_rows() * self.windows_together();
        for layer in &self.layers {
            let mut first = 0;
            let sequences = clips().flat_map(|frames| {
                let (begin, rows) = (first, self.config.rows(frames));
                first += rows;
                (0..rows).step_by(most).map(move |at| (begin + at, most.min(rows - at)))
            });
            layer.forward(device, x, normed, None, sequences)?;
        }
        self.last_norm.apply(device, normed, x);
        device.linear(normed, &[(self.up, x)], Mode::Store)?;
        device.activate(x, self.act);
        device.linear(x, &[(self.down, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
