//! Heads for multi-token prediction (MTP), without their layer. From a position's hidden state and the next token they predict the token
//! after that.
//!
//! Reference: `tools/fixturelib/hybrid.py`, assembled from transformers' layers. The hidden state is the one after the model's final norm.
//! In a further pass it is the one after the head's norm. Embedding and output projection are the model's.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, StepInput, VectorId};
use plimsoll_formats::ModelConfig;

use crate::Output;
use crate::block::norm;
use crate::encoder_parts::Norm;
use crate::ends::Ends;

/// Weights of a head, without its layer.
pub(crate) struct MtpWeights {
    ends: Ends,
    embedding_norm: VectorId,
    hidden_norm: VectorId,
    join: LinearId,
    norm: Norm,
    eps: f32,
}

impl MtpWeights {
    /// Declares `mtp.*`. An error means that there is no head, or that it is not supported.
    pub fn declare(config: &ModelConfig, ends: Ends, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let unsupported = |what: String| Err(DeclareError::Unsupported(format!("--enable-mtp {what}")));
        let hybrid = config.architecture.is_hybrid();
        let key = if hybrid { "mtp_num_hidden_layers" } else { "num_nextn_predict_layers" };
        let layers = config.draft_layers;
        let there = declare.has("mtp.fc.weight") || declare.is_plan() && layers > 0;
        if !there {
            let lacks = match hybrid || layers > 0 {
                true => "no tensor 'mtp.fc', 'eh_proj' or 'nextn.eh_proj'".to_owned(),
                false => format!("{key} is 0 or missing"),
            };
            return unsupported(format!(
                "needs a draft head, and the checkpoint has none ({lacks}): use --prompt-lookup-num-tokens or --draft-model"
            ));
        }
        if layers > 1 {
            return unsupported(format!(
                "needs a draft head of one layer, and {key} is {layers}: use --prompt-lookup-num-tokens or --draft-model"
            ));
        }
        let mut head_norm = |name: &str| norm(config, &format!("mtp.{name}.weight"), config.hidden_size, declare);
        let embedding_norm = head_norm("pre_fc_norm_embedding")?;
        let hidden_norm = head_norm("pre_fc_norm_hidden")?;
        let norm = Norm { weight: head_norm("norm")?, bias: None, eps: config.norm_eps };
        let join = declare.linear("mtp.fc.weight", config.hidden_size, 2 * config.hidden_size)?;
        Ok(Self { ends, embedding_norm, hidden_norm, join, norm, eps: config.norm_eps })
    }

    /// Runs a pass of a head with this `layer`: see [`crate::Drafter::draft`]. The layer computes in place and may overwrite two more
    /// buffers of the same shape.
    pub fn draft(
        &self,
        device: &mut dyn Device,
        (hidden, rows): (Buf, &[u32]),
        step: &StepInput<'_>,
        layer: impl FnOnce(&mut dyn Device, Buf, [Buf; 2]) -> Result<(), DeviceError>,
    ) -> Result<Output, DeviceError> {
        let x = device.temp(rows.len(), self.ends.hidden)?;
        let scope = device.mark();
        let both = device.temp(rows.len(), 2 * self.ends.hidden)?;
        let embedded = self.ends.embed(device, step)?;
        device.rms_norm(embedded, embedded, self.embedding_norm, self.eps);
        let before = device.temp(rows.len(), self.ends.hidden)?;
        device.gather(before, hidden, rows);
        device.rms_norm(before, before, self.hidden_norm, self.eps);
        device.put(both, embedded, 0);
        device.put(both, before, embedded.cols);
        device.linear_rows(both.into(), &[(self.join, x)], Mode::Store, step.bf16_rows)?;
        // The two halves are no longer needed, so the layer may overwrite them.
        layer(device, x, [before, embedded])?;
        device.release(scope);
        self.ends.output_through(device, x, self.norm, step)
    }
}
