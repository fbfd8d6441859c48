//! The audio encoder of Gemma 4 (E2B, E4B): a conformer.
//!
//! Reference: transformers, `modeling_gemma4.py`. Each of two convolutions halves time and bands. A layer is half a feed-forward part,
//! attention to the rows before with a key for every distance, a causal convolution, and half a feed-forward part. Each audio clip is
//! computed separately, so the reference's padding of a batch has no counterpart. Spectrograms are convolved a few rows at a time.

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, LinearId, Mode, Unfold, VectorId,
};
use plimsoll_formats::{Audio, Conformer};

use super::{PAD, STEP, TAPS};
use crate::block::activation;
use crate::encoder_parts::values_of;
use crate::{Encoder, EncoderInput};
use layer::{EPS, Layer, Shared};

mod layer;

/// Longest wavelength of the distances, as a factor of the shortest.
const TIMESCALE: f64 = 10_000.0;
/// Frames of the spectrogram that become one row.
const FRAMES: usize = 4;
/// Rows whose frames are convolved together. All rows at once would take 160 MB for windows of 30 seconds.
const ROWS_TOGETHER: usize = 16;

/// A convolution of the spectrogram, and the norm after it.
struct Halving {
    matrix: LinearId,
    channels: usize,
    weight: VectorId,
    bias: VectorId,
}

/// Weights of an encoder.
pub struct AudioEncoder {
    shared: Shared,
    bands: usize,
    halvings: [Halving; 2],
    frame: LinearId,
    inv_freq: VectorId,
    layers: Vec<Layer>,
    output: LinearId,
    /// Ones: the weights of the norm before the projection.
    plain: VectorId,
    projection: LinearId,
    /// Width of the model.
    out: usize,
}

impl Halving {
    fn declare(layer: usize, [from, channels]: [usize; 2], declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let prefix = format!("audio.subsample_conv_projection.layer{layer}");
        Ok(Self {
            matrix: declare.convolution(&format!("{prefix}.conv"), channels, &[from, TAPS, TAPS], false)?,
            channels,
            weight: declare.vector(&format!("{prefix}.norm.weight"), channels, 0.0)?,
            bias: declare.values(vec![0.0; channels]),
        })
    }

    /// Writes to `next` the halved plane of `moments` by bands, with moments as the inner axis.
    fn forward(&self, device: &mut dyn Device, plane: Buf, moments: usize, next: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let cut = Unfold { inner: moments, taps: [TAPS; 2], step: [STEP; 2], pad: [PAD; 2] };
        let windows = device.temp(next.rows, plane.cols * TAPS * TAPS)?;
        device.unfold(windows, plane, &cut);
        device.linear(windows, &[(self.matrix, next)], Mode::Store)?;
        device.release(scope);
        device.layer_norm(next, next, self.weight, self.bias, EPS);
        device.clamp(next, 0.0, f32::INFINITY);
        Ok(())
    }
}

impl AudioEncoder {
    /// Declares `audio.*` for rows of width `out`, the model's.
    pub fn declare(
        audio: &Audio,
        own: &Conformer,
        out: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let (hidden, [first, second]) = (audio.hidden_size, own.channels);
        let halvings = [Halving::declare(0, [1, first], declare)?, Halving::declare(1, [first, second], declare)?];
        let frame = "audio.subsample_conv_projection.input_proj_linear.weight";
        let frame = declare.linear(frame, hidden, Conformer::convolved(audio.bands) * second)?;
        let layers = (0..audio.depth).map(|layer| Layer::declare(audio, own, layer, declare));
        Ok(Self {
            halvings,
            frame,
            layers: layers.collect::<Result<_, _>>()?,
            inv_freq: declare.values(frequencies(hidden / 2)),
            shared: Shared {
                hidden,
                width: audio.intermediate_size,
                heads: audio.heads,
                act: activation(audio.act),
                own: own.clone(),
                key_scale: (1.0_f64.exp().ln_1p() / std::f64::consts::LN_2) as f32,
            },
            output: declare.linear_with_bias("audio.output_proj", own.output, hidden)?,
            plain: declare.values(vec![1.0; own.output]),
            projection: declare.linear("audio.projector.embedding_projection.weight", out, own.output)?,
            bands: audio.bands,
            out,
        })
    }

    /// Convolves one audio clip: writes rows with all bands side by side.
    fn convolve(&self, device: &mut dyn Device, frames: usize, patches: &[f32], out: Buf) -> Result<(), DeviceError> {
        for begin in (0..out.rows).step_by(ROWS_TOGETHER) {
            let rows = ROWS_TOGETHER.min(out.rows - begin);
            // A convolution reads frames of the row before. Padding with zeros is right only at the clip's start.
            let before = usize::from(begin > 0);
            let first = FRAMES * (begin - before);
            let count = (FRAMES * (begin + rows)).min(frames) - first;
            let values = values_of(patches, first, count, self.bands);
            self.convolve_frames(device, values, (count, before), out.span(begin, rows))?;
        }
        Ok(())
    }

    /// Convolves `count` frames and drops the first `before` rows.
    fn convolve_frames(
        &self,
        device: &mut dyn Device,
        values: &[f32],
        (count, before): (usize, usize),
        out: Buf,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let spectrum = device.temp(count, self.bands)?;
        device.place(spectrum, 0, values, self.bands, 0, Mode::Store);
        // Kernels are stored with bands last, so bands must be the outer axis of the plane.
        let (mut plane, mut moments, mut bands) = (device.temp(count * self.bands, 1)?, count, self.bands);
        device.arrange(plane, spectrum.reshape(1), &|row| row % count * self.bands + row / count);
        for halving in &self.halvings {
            let (half, half_bands) = (moments.div_ceil(STEP), bands.div_ceil(STEP));
            let next = device.temp(half * half_bands, halving.channels)?;
            halving.forward(device, plane, moments, next)?;
            (plane, moments, bands) = (next, half, half_bands);
        }
        let own = out.reshape(plane.cols);
        device.arrange(own, plane, &|row| row % bands * moments + row / bands + before);
        device.release(scope);
        Ok(())
    }

    /// Returns sines, then cosines, of every distance that a row attends to, from 0 on.
    fn distances(&self, device: &mut dyn Device) -> Result<Buf, DeviceError> {
        let half = self.shared.hidden / 2;
        let out = device.temp(self.shared.own.seen, self.shared.hidden)?;
        let scope = device.mark();
        let (angles, part) = (device.temp(out.rows, out.cols)?, device.temp(out.rows, half)?);
        let places: Vec<u32> = (0..out.rows as u32).collect();
        device.rope_angles(angles, self.inv_freq, &places, 1.0);
        for (from, to) in [(half, 0), (0, half)] {
            device.take(part, angles, from);
            device.put(out, part, to);
        }
        device.release(scope);
        Ok(out)
    }
}

/// The frequencies of the sines and cosines of distances.
fn frequencies(count: usize) -> Vec<f32> {
    let increment = TIMESCALE.ln() / (count - 1).max(1) as f64;
    (0..count).map(|i| (-increment * i as f64).exp() as f32).collect()
}

impl Encoder for AudioEncoder {
    fn patch_width(&self) -> usize {
        self.bands
    }

    fn output_width(&self) -> usize {
        self.out
    }

    fn shape(&self) -> EncoderShape {
        EncoderShape::new(self.shared.hidden / self.shared.heads, self.shared.hidden)
    }

    fn encode(&self, device: &mut dyn Device, clips: &EncoderInput<'_>) -> Result<Buf, DeviceError> {
        let frames = || clips.grids.iter().map(|grid| grid.patches());
        let rows: usize = frames().map(Conformer::convolved).sum();
        let output = device.temp(rows, self.out)?;
        let scope = device.mark();
        let x = device.temp(rows, self.shared.hidden)?;
        let (mut row, mut frame) = (0, 0);
        for frames in frames() {
            let own = x.span(row, Conformer::convolved(frames));
            let patches = values_of(clips.patches, frame, frames, self.bands);
            let scope = device.mark();
            let wide = Conformer::convolved(self.bands) * self.shared.own.channels[1];
            let moments = device.temp(own.rows, wide)?;
            self.convolve(device, frames, patches, moments)?;
            device.linear(moments, &[(self.frame, own)], Mode::Store)?;
            device.release(scope);
            (row, frame) = (row + own.rows, frame + frames);
        }
        let distances = self.distances(device)?;
        let (normed, scratch) = (device.temp(rows, self.shared.hidden)?, device.temp(rows, self.shared.hidden)?);
        let sequences = || {
            let mut first = 0;
            frames().map(move |frames| {
                let rows = Conformer::convolved(frames);
                first += rows;
                (first - rows, rows)
            })
        };
        for layer in &self.layers {
            self.shared.layer(layer, device, [x, normed, scratch, distances], sequences)?;
        }
        let wide = device.temp(rows, self.shared.own.output)?;
        device.linear(x, &[(self.output, wide)], Mode::Store)?;
        device.rms_norm(wide, wide, self.plain, EPS);
        device.linear(wide, &[(self.projection, output)], Mode::Store)?;
        device.release(scope);
        Ok(output)
    }
}
