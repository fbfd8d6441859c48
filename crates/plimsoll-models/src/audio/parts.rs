//! The parts that the audio encoders of Whisper and the Qwens share: convolutions, layers and positions.

use plimsoll_device::{Activation, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, Unfold};
use plimsoll_formats::Audio;

use super::{PAD, STEP, TAPS};
use crate::block::activation;
use crate::encoder_parts::{Layer, Mlp, Norm, spec};

/// Longest wavelength of the positions, as a factor of the shortest.
const TIMESCALE: f64 = 10_000.0;

/// Epsilon of every norm.
const EPS: f32 = 1e-5;

/// Declares the norm `{prefix}.*`.
pub(super) fn norm(prefix: &str, width: usize, declare: &mut Declare<'_>) -> Result<Norm, DeclareError> {
    Norm::declare(prefix, width, EPS, declare)
}

/// The two convolutions over a whole spectrogram of Whisper and Qwen2.5-Omni, the second of which halves time.
pub(super) struct Convolutions {
    /// Mel bands.
    pub bands: usize,
    /// Width of the rows.
    pub hidden: usize,
    /// The convolutions, each with its stride in frames.
    steps: [(LinearId, usize); 2],
}

impl Convolutions {
    /// Declares `audio.conv1` and `audio.conv2`.
    pub fn declare(audio: &Audio, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (bands, hidden) = (audio.bands, audio.hidden_size);
        let mut convolution = |name: &str, from: usize| declare.convolution(name, hidden, &[from, TAPS], true);
        let steps = [(convolution("audio.conv1", bands)?, 1), (convolution("audio.conv2", hidden)?, STEP)];
        Ok(Self { bands, hidden, steps })
    }

    /// Returns the rows for `frames` frames.
    pub fn rows(frames: usize) -> usize {
        frames.div_ceil(STEP)
    }

    /// Computes the rows without their positions. `out` has room for exactly these rows.
    pub fn run(&self, device: &mut dyn Device, frames: usize, values: &[f32], out: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let mut x = device.temp(frames, self.bands)?;
        device.place(x, 0, values, self.bands, 0, Mode::Store);
        for (nth, (convolution, step)) in self.steps.into_iter().enumerate() {
            let next = if nth == 0 { device.temp(frames, self.hidden)? } else { out };
            let inner = device.mark();
            let windows = device.temp(next.rows, x.cols * TAPS)?;
            let cut = Unfold { inner: 1, taps: [TAPS, 1], step: [step, 1], pad: [PAD, 0] };
            device.unfold(windows, x, &cut);
            device.linear(windows, &[(convolution, next)], Mode::Store)?;
            device.release(inner);
            device.activate(next, Activation::Gelu);
            x = next;
        }
        device.release(scope);
        Ok(())
    }
}

/// Declares the layer `{prefix}.*`. `key_bias` is whether the key projection has a bias, as the other projections do.
pub(super) fn layer(
    audio: &Audio,
    prefix: &str,
    key_bias: bool,
    declare: &mut Declare<'_>,
) -> Result<Layer, DeclareError> {
    let (hidden, width, head_dim) = (audio.hidden_size, audio.intermediate_size, audio.head_dim());
    let mut matrix = |name: &str, out: usize, k: usize| declare.linear_with_bias(&format!("{prefix}.{name}"), out, k);
    let mut projection = |name: &str| matrix(&format!("self_attn.{name}"), hidden, hidden);
    let [q, v, o] = [projection("q_proj")?, projection("v_proj")?, projection("out_proj")?];
    let (up, down) = (matrix("fc1", width, hidden)?, matrix("fc2", hidden, width)?);
    let key = format!("{prefix}.self_attn.k_proj");
    let k = match key_bias {
        true => declare.linear_with_bias(&key, hidden, hidden)?,
        false => declare.linear(&format!("{key}.weight"), hidden, hidden)?,
    };
    Ok(Layer {
        attention_norm: norm(&format!("{prefix}.self_attn_layer_norm"), hidden, declare)?,
        q,
        k,
        v,
        o,
        qk_norms: None,
        mlp_norm: norm(&format!("{prefix}.final_layer_norm"), hidden, declare)?,
        mlp: Mlp { gate: None, up, down, width, act: activation(audio.act) },
        scales: None,
        rope_interleaved: false,
        head_dim,
        spec: spec(audio.heads, head_dim),
    })
}

/// Returns sines, then cosines, of `rows` positions, `width` numbers each.
pub(super) fn positions(rows: usize, width: usize) -> Vec<f32> {
    let half = width / 2;
    let increment = (TIMESCALE.ln() / (half - 1) as f64) as f32;
    // Products are rounded to single precision, as in the reference; the results of functions are not.
    let angle = |row: usize, i: usize| {
        let scale = f64::from(-increment * i as f32).exp() as f32;
        f64::from(row as f32 * scale)
    };
    let row = |row: usize| {
        let sines = (0..half).map(move |i| angle(row, i).sin() as f32);
        sines.chain((0..half).map(move |i| angle(row, i).cos() as f32))
    };
    (0..rows).flat_map(row).collect()
}
