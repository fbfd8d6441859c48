//! The multi-token-prediction head of the hybrids: from a position's hidden state and the token that follows it, a guess at
//! the token after that.
//!
//! Reference: `tools/fixturelib/hybrid.py`, put together from transformers' own layers. Embedding and output projection are the
//! model's.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, StepInput, VectorId};
use plimsoll_formats::ModelConfig;

use crate::block::{AttentionPlace, norm};
use crate::decoder::{Kind, Layer, Rotary};
use crate::ends::Ends;
use crate::tower::Norm;
use crate::{Drafter, Output};

/// Weights of a draft head of one layer.
pub struct MtpHead {
    ends: Ends,
    rotary: Rotary,
    embedding_norm: VectorId,
    hidden_norm: VectorId,
    join: LinearId,
    layer: Layer,
    norm: Norm,
    eps: f32,
}

impl MtpHead {
    /// Declares `mtp.*`; the head's keys and values are layer `cache` of the cache.
    pub fn declare(
        config: &ModelConfig,
        ends: Ends,
        rotary: Rotary,
        cache: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let unsupported = |what: String| Err(DeclareError::Unsupported(what));
        let there = declare.has("mtp.fc.weight") || declare.is_plan() && config.draft_layers > 0;
        if !there {
            return unsupported(
                "--enable-mtp needs a draft head, and the checkpoint has none (no tensor 'mtp.fc.weight')".into(),
            );
        }
        if config.draft_layers > 1 {
            let layers = config.draft_layers;
            return unsupported(format!("--enable-mtp: mtp_num_hidden_layers is {layers}; 1 is supported"));
        }
        let mut head_norm = |name: &str| norm(config, &format!("mtp.{name}.weight"), config.hidden_size, declare);
        let embedding_norm = head_norm("pre_fc_norm_embedding")?;
        let hidden_norm = head_norm("pre_fc_norm_hidden")?;
        let last_norm = head_norm("norm")?;
        let kind = Kind::Attention(AttentionPlace { layer: config.layers, cache, sliding: false, shared: false });
        Ok(Self {
            ends,
            rotary,
            embedding_norm,
            hidden_norm,
            join: declare.linear("mtp.fc.weight", config.hidden_size, 2 * config.hidden_size)?,
            layer: Layer::declare(config, "mtp.layers.0", kind, config.experts.is_some(), declare)?,
            norm: Norm { weight: last_norm, bias: None, eps: config.norm_eps },
            eps: config.norm_eps,
        })
    }

    /// Its layer.
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
        let angles = self.rotary.angles(device, step)?;
        // The joined rows are used up: one of their halves holds the layer's normed input.
        self.layer.forward(device, x, before, angles, step)?;
        device.release(scope);
        self.ends.output_through(device, x, self.norm, step)
    }
}
