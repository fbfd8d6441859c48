//! The multi-token-prediction head of the hybrids.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, StepInput};
use plimsoll_formats::ModelConfig;

use crate::block::AttentionPlace;
use crate::decoder::{Kind, Layer};
use crate::ends::Ends;
use crate::mtp::MtpWeights;
use crate::rotary::Rotary;
use crate::{Drafter, Output};

/// Weights of a draft head of one layer.
pub struct MtpHead {
    weights: MtpWeights,
    rotary: Rotary,
    layer: Layer,
}

impl MtpHead {
    /// Declares `mtp.*`. The head's keys and values are layer `cache` of the KV cache.
    pub fn declare(
        config: &ModelConfig,
        ends: Ends,
        rotary: Rotary,
        cache: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let weights = MtpWeights::declare(config, ends, declare)?;
        let kind = Kind::Attention(AttentionPlace { layer: config.layers, cache, sliding: false, shared: false });
        let layer = Layer::declare(config, "mtp.layers.0", kind, config.experts.is_some(), declare)?;
        Ok(Self { weights, rotary, layer })
    }

    /// The head's layer.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }
}

impl Drafter for MtpHead {
    fn draft(
        &self,
        device: &mut dyn Device,
        hidden: Buf,
        rows: &[u32],
        step: &StepInput<'_>,
    ) -> Result<Output, DeviceError> {
        self.weights.draft(device, (hidden, rows), step, |device, x, [normed, _]| {
            let angles = self.rotary.angles(device, step)?;
            self.layer.forward(device, x, normed, angles, step)
        })
    }
}
