//! Rotary embedding: inverse frequencies from the configuration, with the field's scaling rules.
//!
//! They are computed once at declaration, in f32 as in the reference (transformers, `modeling_rope_utils.py`).

use plimsoll_formats::{ModelConfig, RopeScaling, YarnScaling};

/// Inverse frequencies and the factor on cosines and sines.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// One per pair of elements: `head_dim / 2`.
    pub inv_freq: Vec<f32>,
    /// The factor on cosines and sines.
    pub scale: f32,
}

/// Whether sliding layers have other rotary angles than global ones.
pub(crate) fn has_local_angles(config: &ModelConfig) -> bool {
    config.layer_is_sliding.contains(&true) && config.variant.local_rope
}

/// The frequencies for heads of `head_dim` elements.
pub fn rope(head_dim: usize, theta: f32, scaling: &RopeScaling) -> Rope {
    let plain: Vec<f32> = (0..head_dim / 2).map(|i| 1.0 / theta.powf(2.0 * i as f32 / head_dim as f32)).collect();
    match scaling {
        RopeScaling::None => Rope { inv_freq: plain, scale: 1.0 },
        RopeScaling::Linear { factor } => {
            let inv_freq = plain.iter().map(|f| f / factor).collect();
            Rope { inv_freq, scale: 1.0 }
        }
        RopeScaling::Llama3 { factor, low, high, original } => {
            let inv_freq = plain.iter().map(|f| llama3(*f, *factor, *low, *high, *original as f32)).collect();
            Rope { inv_freq, scale: 1.0 }
        }
        RopeScaling::Proportional { share, factor } => {
            let rotated = (f64::from(*share) * head_dim as f64 / 2.0) as usize;
            let inv_freq = plain.iter().enumerate().map(|(i, f)| if i < rotated { f / factor } else { 0.0 }).collect();
            Rope { inv_freq, scale: 1.0 }
        }
        RopeScaling::Yarn(yarn) => {
            let mixed = plain.iter().zip(yarn_ramp(head_dim, theta, yarn)).map(|(f, keep)| {
                let interpolated = f / yarn.factor;
                interpolated * (1.0 - keep) + f * keep
            });
            Rope { inv_freq: mixed.collect(), scale: yarn.attention_factor }
        }
        RopeScaling::Long(long) => {
            // If the configuration has no list, the divisors are a tensor.
            let factors = long.factors.iter().copied().chain(std::iter::repeat(1.0));
            let inv_freq = plain.iter().zip(factors).map(|(f, factor)| f / factor).collect();
            Rope { inv_freq, scale: long.attention_factor }
        }
    }
}

/// Llama 3's rule: long wavelengths are interpolated, short ones are kept, and those between are blended.
fn llama3(freq: f32, factor: f32, low: f32, high: f32, original: f32) -> f32 {
    let wavelength = 2.0 * std::f32::consts::PI / freq;
    if wavelength > original / low {
        freq / factor
    } else if wavelength <= original / high {
        freq
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * freq / factor + smooth * freq
    }
}

/// YaRN's share of the unscaled frequency, per pair (Peng et al. 2023, section 3.2).
fn yarn_ramp(head_dim: usize, theta: f32, yarn: &YarnScaling) -> Vec<f32> {
    let dim = |rotations: f32| {
        let wavelengths = f64::from(rotations) * 2.0 * std::f64::consts::PI;
        head_dim as f64 * (yarn.original as f64 / wavelengths).ln() / (2.0 * f64::from(theta).ln())
    };
    let (low, high) = (dim(yarn.beta_fast), dim(yarn.beta_slow));
    let (low, high) = if yarn.truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
    let span = if low == high { 0.001 } else { high - low };
    let keep = |i: usize| 1.0 - ((i as f64 - low) / span).clamp(0.0, 1.0) as f32;
    (0..head_dim / 2).map(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unscaled_frequencies_fall_from_one() {
        let rope = rope(4, 10_000.0, &RopeScaling::None);
        assert_eq!(rope.inv_freq, vec![1.0, 0.01]);
    }

    #[test]
    fn proportional_frequencies_are_those_of_the_whole_head_and_then_zero() {
        let rope = rope(8, 10_000.0, &RopeScaling::Proportional { share: 0.5, factor: 2.0 });
        assert_eq!(rope.inv_freq, vec![0.5, 0.05, 0.0, 0.0]);
    }

    #[test]
    fn llama3_keeps_short_and_stretches_long_wavelengths() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
        let scaled = rope(64, 500_000.0, &scaling).inv_freq;
        let plain = rope(64, 500_000.0, &RopeScaling::None).inv_freq;
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[31], plain[31] / 8.0);
        assert!(scaled.windows(2).all(|w| w[0] > w[1]));
    }
}
