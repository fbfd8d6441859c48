//! The short causal convolution of recurrent layers: depthwise, mostly with SiLU, and for queries and keys of Gated DeltaNet the
//! normalisation of the head that follows.
//!
//! The inputs of earlier rows that a row needs are its channels' last `taps − 1` inputs. They are part of the sequence's state. A row's
//! result therefore depends only on its own input and these, wherever a span begins.

use crate::delta::StateSlots;
use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// Added to the sum of squares of a head.
const NORM_EPS: f32 = 1e-6;

/// Rows of some channels, overwritten by their results: row r at `ptr + r · ld`.
#[derive(Clone, Copy)]
pub struct ConvRows {
    /// Row 0, the first channel.
    pub ptr: *mut f32,
    /// Distance of two rows, in floats.
    pub ld: usize,
    /// Channels: one head's, if it is normalised.
    pub channels: usize,
}

/// The normalisation of a head's channels after the convolution and SiLU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadNorm {
    /// No normalisation: values.
    None,
    /// x / √(Σ x² + 1e-6) · scale: keys, and queries with their scale.
    L2(f32),
}

/// A convolution over some channels.
#[derive(Clone, Copy)]
pub struct ConvSpec<'a> {
    /// The weights, as [`conv_weights`] prepared them.
    pub weights: &'a [f32],
    /// Inputs per result, the row's own included.
    pub taps: usize,
    /// Bias of each channel.
    pub bias: Option<&'a [f32]>,
    /// Whether SiLU follows.
    pub silu: bool,
    /// The normalisation of the head.
    pub norm: HeadNorm,
    /// Distance of two inputs in a slot's history, in floats: the channels of the whole layer.
    pub history_ld: usize,
}

/// Returns the floats of prepared weights for some channels, see [`conv_weights`].
pub fn conv_weights_len(channels: usize, taps: usize) -> usize {
    channels.next_multiple_of(LANES) * taps
}

/// Returns the floats of scratch that [`causal_conv`] needs.
pub fn conv_scratch_len(channels: usize, taps: usize) -> usize {
    channels.next_multiple_of(LANES) * (taps - 1)
}

/// Reorders the stored weights of some channels (taps of one channel side by side, the oldest input's first) for use. Panics if lengths
/// do not fit.
pub fn conv_weights(stored: &[f32], taps: usize, into: &mut [f32]) {
    dilated_conv_weights(stored, (taps, 1), into);
}

/// [`conv_weights`] for a convolution whose inputs are `dilation` rows apart. The result has `(taps - 1) * dilation + 1` taps, with
/// zeros between the stored ones.
pub fn dilated_conv_weights(stored: &[f32], (taps, dilation): (usize, usize), into: &mut [f32]) {
    let channels = stored.len() / taps;
    assert_eq!(stored.len(), channels * taps, "whole channels of {taps} taps");
    let into = &mut into[..conv_weights_len(channels, (taps - 1) * dilation + 1)];
    into.fill(0.0);
    let lines = into.chunks_exact_mut(channels.next_multiple_of(LANES));
    for (tap, weights) in lines.step_by(dilation).enumerate() {
        for (weight, stored) in weights.iter_mut().zip(stored.chunks_exact(taps)) {
            *weight = stored[tap];
        }
    }
}

/// Convolves the rows of a span (as many as `slots.out` has) over time, applies SiLU and `norm`.
///
/// For each channel: `y = bias + Σ weight[t] · x[row − taps + 1 + t]`, one chain of fused multiply-adds from the oldest input on. A
/// slot holds `taps − 1` inputs, oldest first, `history_ld` floats apart.
///
/// Panics if the weights, the bias or the scratch do not fit.
///
/// # Safety
/// Rows are valid for reading and writing; so is, in every slot that is named, each of the `taps − 1` inputs of these
/// channels; nothing else accesses them during the call (a slot to start from may be read by others unless it is
/// written here).
pub unsafe fn causal_conv(isa: Isa, spec: &ConvSpec<'_>, rows: ConvRows, slots: &StateSlots<'_>, scratch: &mut [f32]) {
    let ConvSpec { weights, taps, .. } = *spec;
    let padded = rows.channels.next_multiple_of(LANES);
    assert!(taps > 0 && weights.len() == padded * taps, "{} weights, {taps} x {padded} needed", weights.len());
    assert!(spec.bias.is_none_or(|bias| bias.len() == rows.channels), "a bias of {} channels", rows.channels);
    let history = &mut scratch[..padded * (taps - 1)];
    isa.run(Conv { spec, rows, slots, history });
}

struct Conv<'a> {
    spec: &'a ConvSpec<'a>,
    rows: ConvRows,
    slots: &'a StateSlots<'a>,
    /// The inputs before the current row, oldest first.
    history: &'a mut [f32],
}

impl Kernel for Conv<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let channels = self.rows.channels;
        let padded = channels.next_multiple_of(LANES);
        // SAFETY: slots are within the states by the contract of `causal_conv`.
        let start = unsafe { self.slots.start() };
        self.history.fill(0.0);
        if !start.is_null() {
            for (t, inputs) in self.history.chunks_exact_mut(padded).enumerate() {
                // SAFETY: each input of these channels can be read, by the contract.
                inputs[..channels].copy_from_slice(unsafe { input(start, t * self.spec.history_ld, channels) });
            }
        }
        for row in 0..self.slots.out.len() {
            // SAFETY: the row is valid and ours, by the contract.
            let x = unsafe { std::slice::from_raw_parts_mut(self.rows.ptr.add(row * self.rows.ld), channels) };
            let mut squares = s.zero();
            for (index, x) in x.chunks_mut(LANES).enumerate() {
                let y = self.lanes(s, padded, index * LANES, s.load_part(x, 0.0));
                squares = s.fma(y, y, squares);
                s.store_part(x, y);
            }
            if let HeadNorm::L2(scale) = self.spec.norm {
                let (factor, scale) = (s.splat(1.0 / (s.sum(squares) + NORM_EPS).sqrt()), s.splat(scale));
                for x in x.chunks_mut(LANES) {
                    let y = s.mul(s.mul(s.load_part(x, 0.0), factor), scale);
                    s.store_part(x, y);
                }
            }
            // SAFETY: as for the start.
            let out = unsafe { self.slots.out(row) };
            if !out.is_null() {
                for (t, inputs) in self.history.chunks_exact(padded).enumerate() {
                    // SAFETY: each input of these channels can be written, by the contract.
                    let kept = unsafe { std::slice::from_raw_parts_mut(out.add(t * self.spec.history_ld), channels) };
                    kept.copy_from_slice(&inputs[..channels]);
                }
            }
        }
    }
}

impl Conv<'_> {
    /// Sixteen channels of a row: the result, and `x` into the history.
    #[inline(always)]
    fn lanes<S: Simd>(&mut self, s: S, padded: usize, first: usize, x: S::F) -> S::F {
        let past = self.spec.weights.len() / padded - 1;
        let mut sum = match self.spec.bias {
            Some(bias) => s.load_part(&bias[first..(first + LANES).min(bias.len())], 0.0),
            None => s.zero(),
        };
        for t in 0..past {
            let input = s.load_part(&self.history[t * padded + first..][..LANES], 0.0);
            sum = s.fma(input, s.load_part(&self.spec.weights[t * padded + first..][..LANES], 0.0), sum);
            if t > 0 {
                s.store_part(&mut self.history[(t - 1) * padded + first..][..LANES], input);
            }
        }
        if past > 0 {
            s.store_part(&mut self.history[(past - 1) * padded + first..][..LANES], x);
        }
        sum = s.fma(x, s.load_part(&self.spec.weights[past * padded + first..][..LANES], 0.0), sum);
        if self.spec.silu { math::swish(s, sum, sum) } else { sum }
    }
}

/// # Safety
/// `channels` floats can be read at `from + offset`, and nothing writes them meanwhile.
unsafe fn input<'a>(from: *const f32, offset: usize, channels: usize) -> &'a [f32] {
    // SAFETY: this function's contract.
    unsafe { std::slice::from_raw_parts(from.add(offset), channels) }
}
