//! The multi-token-prediction head of a family: a projection, then one more layer like the last.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, StepInput};
use plimsoll_formats::ModelConfig;

use super::{Counts, Family, Layer, declare_layer};
use crate::ends::Ends;
use crate::mtp::MtpWeights;
use crate::{Drafter, Output, Pass};

/// Weights of a draft head of one layer.
pub(super) struct MtpHead {
    weights: MtpWeights,
    pub layer: Layer,
}

impl MtpHead {
    /// Declares `mtp.*`. The head's keys and values follow those of all layers in the KV cache.
    pub fn declare(
        config: &ModelConfig,
        ends: Ends,
        counts: &mut Counts,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let weights = MtpWeights::declare(config, ends, declare)?;
        let layer = declare_layer(config, config.layers, "mtp.layers.0", counts, declare)?;
        Ok(Self { weights, layer })
    }
}

impl Drafter for Family {
    fn draft(
        &self,
        device: &mut dyn Device,
        hidden: Buf,
        rows: &[u32],
        step: &StepInput<'_>,
    ) -> Result<Output, DeviceError> {
        let MtpHead { weights, layer } = self.head.as_ref().ok_or(DeviceError::NoDraft)?;
        weights.draft(device, (hidden, rows), step, |device, x, buffers| {
            let angles = [Some(self.global.angles(device, step)?), None];
            let pass = Pass::new(x, device.mark(), angles);
            if let Some(mixer) = &layer.mixer {
                self.mix(layer, mixer, device, &pass, buffers, step)?;
            }
            self.transform(layer, device, x, buffers, step.bf16_rows)
        })
    }
}
