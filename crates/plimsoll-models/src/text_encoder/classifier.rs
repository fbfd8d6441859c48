//! The head of an encoder that scores: a matrix and an activation over a sequence's first position or its mean, perhaps a
//! norm, then a matrix with one output a score.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, StepInput,
};
use plimsoll_formats::{Encoder, ModelConfig};

use super::{Norm, matrix};
use crate::block::activation;

/// A classifier.
pub(super) struct Classifier {
    dense: LinearId,
    act: Activation,
    norm: Option<Norm>,
    out: LinearId,
    labels: usize,
    /// What makes the mean of a sequence's positions, if that is read. With scores of 0 attention weighs all of them alike.
    mean: Option<Attention>,
}

impl Classifier {
    /// Declares `classifier.*`.
    pub fn declare(
        config: &ModelConfig,
        encoder: &Encoder,
        labels: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let (hidden, of) = (config.hidden_size, encoder.classifier);
        let mean = Attention { layer: 0, heads: config.heads, scale: 0.0, window: None, softcap: None, sinks: None };
        Ok(Self {
            dense: matrix("classifier.dense", of.bias, (hidden, hidden), declare)?,
            act: activation(of.activation),
            norm: of.norm.then(|| Norm::declare(config, "classifier.norm", declare)).transpose()?,
            out: matrix("classifier.out_proj", true, (labels, hidden), declare)?,
            labels,
            mean: of.mean.then_some(mean),
        })
    }

    /// Scores of a sequence.
    pub fn labels(&self) -> usize {
        self.labels
    }

    /// The scores of the sequences whose first rows need logits.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        step: &StepInput<'_>,
        scores: Buf,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let rows = step.logit_rows;
        let read = device.temp(rows.len(), x.cols)?;
        let inner = device.temp(rows.len(), x.cols)?;
        match &self.mean {
            Some(mean) => {
                let all = device.temp(x.rows, x.cols)?;
                device.attend_within(mean, all, x, x, x, step)?;
                device.gather(read, all, rows);
            }
            None => device.gather(read, x, rows),
        }
        device.linear(read, &[(self.dense, inner)], Mode::Store)?;
        device.activate(inner, self.act);
        if let Some(norm) = self.norm {
            norm.apply(device, inner, inner);
        }
        device.linear(inner, &[(self.out, scores)], Mode::Store)?;
        device.release(scope);
        Ok(())
    }
}
