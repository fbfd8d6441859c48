//! Normalised patches in the order of the Qwen-VL encoders' input.

use super::Rgb;
use crate::geometry::Patches;
use crate::geometry::config::Fields;
use crate::{MediaError, Size};

/// Mean and deviation of each channel, for values of a byte; or for values between 0 and 1, if each step is rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalize {
    /// Subtracted from a value.
    pub mean: [f32; 3],
    /// Divisor of the difference.
    pub std: [f32; 3],
    /// First factor of a byte, for a processor that rounds after each step to bfloat16.
    pub rounded: Option<f32>,
}

impl Normalize {
    /// Means and deviations of CLIP, the default of Qwen2-VL's and InternVL's processors, for values between 0 and 1.
    pub const CLIP: [[f64; 3]; 2] =
        [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_54, 0.261_302_58, 0.275_777_11]];
    /// Means and deviations of one half, the default of Qwen3-VL's video processor.
    pub const HALVES: [[f64; 3]; 2] = [[0.5; 3], [0.5; 3]];

    /// Returns the values of a processor, with its defaults.
    pub fn new(fields: &Fields, [mean, std]: [[f64; 3]; 2]) -> Result<Self, MediaError> {
        let (mean, std) = (fields.image_mean.unwrap_or(mean), fields.image_std.unwrap_or(std));
        Self::of(fields, mean, std)
    }

    /// Returns the values for Gemma 4 Unified: its processor keeps values between 0 and 1, unless its file says otherwise.
    pub fn unit_range(fields: &Fields) -> Result<Self, MediaError> {
        let [mean, std] = Self::given(fields);
        Self::of(fields, mean, std)
    }

    /// Returns means and deviations of a processor that normalizes only if its file says so.
    fn given(fields: &Fields) -> [[f64; 3]; 2] {
        let given = fields.do_normalize == Some(true);
        let or = |values: Option<[f64; 3]>, plain: f64| values.filter(|_| given).unwrap_or([plain; 3]);
        [or(fields.image_mean, 0.0), or(fields.image_std, 1.0)]
    }

    /// Returns the values for Gemma 4's encoders, which move values to between -1 and 1.
    pub fn centred(fields: &Fields) -> Result<Self, MediaError> {
        let [mean, std] = Self::given(fields);
        let mean = std::array::from_fn(|i| mean[i] + 0.5 * std[i]);
        Self::of(fields, mean, std.map(|std| 0.5 * std))
    }

    /// Returns the values for Llama 4. Its processor rounds after each step.
    pub fn rounded(fields: &Fields, defaults: [[f64; 3]; 2]) -> Result<Self, MediaError> {
        Self::new(fields, defaults)?;
        let short = |values: [f64; 3]| values.map(|value| bf16(value as f32));
        let (mean, std) =
            (short(fields.image_mean.unwrap_or(defaults[0])), short(fields.image_std.unwrap_or(defaults[1])));
        let factor = fields.rescale_factor.unwrap_or(1.0 / 255.0) as f32;
        let rule = Self { mean, std, rounded: Some(factor) };
        let ends = (0..3).flat_map(|channel| [rule.value(0, channel), rule.value(u8::MAX, channel)]);
        if factor.is_finite() && std.iter().all(|&value| value > 0.0) && ends.into_iter().all(f32::is_finite) {
            return Ok(rule);
        }
        let why =
            format!("mean {mean:?}, deviation {std:?}, factor {factor} in bfloat16 make pixels that are not finite");
        Err(MediaError::BadConfig { key: "image_mean, image_std, rescale_factor", why })
    }

    /// Returns the normalised value of a channel's byte.
    fn value(&self, byte: u8, channel: usize) -> f32 {
        let (mean, std) = (self.mean[channel], self.std[channel]);
        match self.rounded {
            Some(factor) => bf16(bf16(bf16(f32::from(byte) * factor) - mean) / std),
            None => (f32::from(byte) - mean) / std,
        }
    }

    fn of(fields: &Fields, mean: [f64; 3], std: [f64; 3]) -> Result<Self, MediaError> {
        let rescale = fields.rescale_factor.unwrap_or(1.0 / 255.0);
        let valid = rescale > 0.0 && std.iter().all(|&value| value > 0.0) && mean.iter().all(|value| value.is_finite());
        if !valid {
            let why = format!("mean {mean:?}, deviation {std:?}, factor {rescale}");
            return Err(MediaError::BadConfig { key: "image_mean, image_std, rescale_factor", why });
        }
        // The processors fold the rescaling into both, in single precision.
        let fold = |values: [f64; 3]| values.map(|value| value as f32 * (1.0 / rescale) as f32);
        Ok(Self { mean: fold(mean), std: fold(std), rounded: None })
    }
}

/// Returns the nearest bfloat16 of a finite number; of two, the even one.
fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000)
}

/// Returns the number of values that [`patchify`] writes for this many frames of this size.
pub fn patchify_len(rule: &Patches, frames: usize, size: Size) -> usize {
    let temporal = rule.temporal as usize;
    frames.div_ceil(temporal) * temporal * size.pixels() as usize * 3
}

/// Writes the patches of an image (one frame) or a video (frames of one size, resized) into `values`.
///
/// Shape: (groups of frames, rows / merge, columns / merge, merge, merge, 3, temporal, patch, patch). A group with too few
/// frames repeats the last one. Panics if a size does not fit the rule or `values` has another length.
pub fn patchify(frames: &[Rgb], rule: &Patches, normalize: &Normalize, values: &mut [f32]) {
    let size = frames[0].size;
    let (patch, merge, temporal) = (rule.patch as usize, rule.merge as usize, rule.temporal as usize);
    let (height, width) = (size.height as usize, size.width as usize);
    assert!(frames.iter().all(|frame| frame.size == size), "frames of one video have one size");
    assert!(height % (patch * merge) == 0 && width % (patch * merge) == 0, "{size:?} is not resized for {rule:?}");
    assert_eq!(values.len(), patchify_len(rule, frames.len(), size), "room for every patch");
    let (rows, columns) = (height / patch, width / patch);
    let mut patches = values.chunks_exact_mut(3 * temporal * patch * patch);
    for group in 0..frames.len().div_ceil(temporal) {
        for_each_in_blocks(rows, columns, merge, |row, column| {
            let Some(out) = patches.next() else { return };
            for (c, out) in out.chunks_exact_mut(temporal * patch * patch).enumerate() {
                for (t, out) in out.chunks_exact_mut(patch * patch).enumerate() {
                    let frame = &frames[(group * temporal + t).min(frames.len() - 1)];
                    for (y, out) in out.chunks_exact_mut(patch).enumerate() {
                        let at = ((row * patch + y) * width + column * patch) * 3;
                        let pixels = frame.data[at..at + 3 * patch].chunks_exact(3);
                        for (out, pixel) in out.iter_mut().zip(pixels) {
                            *out = normalize.value(pixel[c], c);
                        }
                    }
                }
            }
        });
    }
}

/// Visits a grid block by block, `side` × `side` at a time.
fn for_each_in_blocks(rows: usize, columns: usize, side: usize, mut visit: impl FnMut(usize, usize)) {
    for row in (0..rows).step_by(side) {
        for column in (0..columns).step_by(side) {
            for i in 0..side * side {
                visit(row + i / side, column + i % side);
            }
        }
    }
}
