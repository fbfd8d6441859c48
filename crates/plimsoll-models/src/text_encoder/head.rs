//! The head of a text encoder: scores by a classifier, or an embedding by dense layers, from a sequence's hidden states.
//!
//! Both read the first position or the mean of all positions, and are a chain of matrices.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, StepInput,
};
use plimsoll_formats::{Encoder, ModelConfig};

use super::{Norm, matrix};
use crate::block::activation;

/// A matrix, and the activation and norm after it.
struct Stage {
    id: LinearId,
    width: usize,
    act: Option<Activation>,
    norm: Option<Norm>,
}

/// A classifier or dense layers.
pub(crate) struct Head {
    /// The attention that computes the mean of a sequence's positions, if the head reads the mean. With scores of 0 all positions have the
    /// same weight.
    mean: Option<Attention>,
    stages: Vec<Stage>,
}

impl Head {
    /// Declares `classifier.*` or `dense.*`, if the configuration has one of them.
    pub fn declare(
        config: &ModelConfig,
        encoder: &Encoder,
        declare: &mut Declare<'_>,
    ) -> Result<Option<Self>, DeclareError> {
        let hidden = config.hidden_size;
        let (mean, stages) = match (encoder.labels, encoder.dense) {
            (Some(labels), _) => (encoder.classifier.mean, classifier(config, encoder, labels, declare)?),
            (None, Some(dense)) => {
                let (mut stages, mut from) = (Vec::new(), hidden);
                for (number, layer) in dense.layers.iter().flatten().enumerate() {
                    let id = matrix(&format!("dense.{number}"), layer.bias, (layer.width, from), declare)?;
                    let act = layer.tanh.then_some(Activation::Tanh);
                    stages.push(Stage { id, width: layer.width, act, norm: None });
                    from = layer.width;
                }
                (dense.mean, stages)
            }
            (None, None) => return Ok(None),
        };
        if mean && !hidden.is_multiple_of(config.head_dim) {
            let head_dim = config.head_dim;
            return Err(DeclareError::Unsupported(format!(
                "hidden size {hidden} is not a multiple of head_dim {head_dim}: the mean of positions needs one"
            )));
        }
        let heads = hidden / config.head_dim;
        let spec = Attention { heads, scale: 0.0, ..Attention::WHOLE };
        Ok(Some(Self { mean: mean.then_some(spec), stages }))
    }

    /// Numbers that the head computes for a sequence.
    pub fn width(&self) -> usize {
        self.stages.last().map_or(0, |stage| stage.width)
    }

    /// Writes one row of `out` for each row that needs logits, which is the first row of a sequence.
    pub fn forward(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>, out: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let rows = step.logit_rows;
        let mut input = device.temp(rows.len(), x.cols)?;
        match &self.mean {
            Some(mean) => {
                let inner = device.mark();
                let all = device.temp(x.rows, x.cols)?;
                device.attend_within(mean, all, x, x, x, step)?;
                device.gather(input, all, rows);
                device.release(inner);
            }
            None => device.gather(input, x, rows),
        }
        for (number, stage) in self.stages.iter().enumerate() {
            let last = number + 1 == self.stages.len();
            let made = if last { out } else { device.temp(rows.len(), stage.width)? };
            device.linear(input, &[(stage.id, made)], Mode::Store)?;
            if let Some(act) = stage.act {
                device.activate(made, act);
            }
            if let Some(norm) = stage.norm {
                norm.apply(device, made, made);
            }
            input = made;
        }
        device.release(scope);
        Ok(())
    }
}

/// Declares the two matrices of a classifier.
fn classifier(
    config: &ModelConfig,
    encoder: &Encoder,
    labels: usize,
    declare: &mut Declare<'_>,
) -> Result<Vec<Stage>, DeclareError> {
    let (hidden, of) = (config.hidden_size, encoder.classifier);
    let dense = Stage {
        id: matrix("classifier.dense", of.bias, (hidden, hidden), declare)?,
        width: hidden,
        act: Some(activation(of.activation)),
        norm: of.norm.then(|| Norm::declare(config, "classifier.norm", declare)).transpose()?,
    };
    let id = matrix("classifier.out_proj", true, (labels, hidden), declare)?;
    Ok(vec![dense, Stage { id, width: labels, act: None, norm: None }])
}
