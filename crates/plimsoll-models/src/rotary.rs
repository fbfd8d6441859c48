//! The rotary embedding that all layers of attention share, and every row's angles.

use std::sync::Arc;

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, StepInput, VectorId};
use plimsoll_formats::{ModelConfig, RopeScaling};

use crate::rope::rope;

/// The rotary embedding that all attention layers share.
#[derive(Clone, Debug)]
pub(crate) struct Rotary {
    pub inv_freq: VectorId,
    dim: usize,
    pub scale: f32,
    /// The axis of every frequency, in models with images.
    pub axes: Option<Arc<[u8]>>,
}

impl Rotary {
    /// Declares the rotary embedding of global layers.
    pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let dim = config.heads_of(false).rotary_dim;
        let mut rope = rope(dim, config.rope_theta, &config.rope_scaling);
        let divisors = divisors_name(&config.rope_scaling);
        if let Some(factors) = declare.read_vector(divisors)? {
            if factors.len() != rope.inv_freq.len() {
                let (found, expected) = (vec![factors.len()], vec![rope.inv_freq.len()]);
                return Err(DeclareError::Shape { name: divisors.into(), found, expected });
            }
            rope.inv_freq.iter_mut().zip(&factors).for_each(|(freq, factor)| *freq /= factor);
        }
        let axes = config.rope_sections.map(|sections| sections.axes(rope.inv_freq.len()).into());
        Ok(Self { inv_freq: declare.values(rope.inv_freq), dim, scale: rope.scale, axes })
    }

    /// Returns every row's angles.
    pub fn angles(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Buf, DeviceError> {
        let angles = device.temp(step.positions.len(), self.dim)?;
        match self.axes.as_deref().filter(|_| !step.places.is_empty()) {
            Some(axes) => {
                device.rope_angles_by_axis(angles, self.inv_freq, axes, &|row| step.places[row], self.scale);
            }
            None => device.rope_angles(angles, self.inv_freq, step.positions, self.scale),
        }
        Ok(angles)
    }
}

/// The tensor with one divisor per frequency that GGUF files may have: for Llama 3's rule, or for one of LongRoPE's lists.
fn divisors_name(scaling: &RopeScaling) -> &'static str {
    match scaling {
        RopeScaling::Long(long) if long.long => "model.rope_factors_long",
        RopeScaling::Long(_) => "model.rope_factors_short",
        _ => "model.rope_freqs",
    }
}
