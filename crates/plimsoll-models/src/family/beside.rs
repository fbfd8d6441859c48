//! Experts beside a plain feed-forward part: Gemma 4's 26B.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, FeedForward, Input, Mode, VectorId};
use plimsoll_formats::ModelConfig;

use crate::block::{feed_forward, norm};
use crate::moe::MoeBlock;

/// Experts and a plain feed-forward part on the same residual stream. Each has norms, and so has the router.
pub struct Beside {
    dense: FeedForward,
    dense_after: VectorId,
    experts: MoeBlock,
    experts_before: VectorId,
    experts_after: VectorId,
    router_norm: VectorId,
    eps: f32,
}

impl Beside {
    /// Declares the feed-forward part beside a layer's experts, and the norms.
    pub fn declare(
        config: &ModelConfig,
        layer: usize,
        prefix: &str,
        mut experts: MoeBlock,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let mut norm = |name: &str| norm(config, &format!("{prefix}.{name}"), config.hidden_size, declare);
        let dense_after = norm("post_feedforward_layernorm_1.weight")?;
        let experts_before = norm("pre_feedforward_layernorm_2.weight")?;
        let experts_after = norm("post_feedforward_layernorm_2.weight")?;
        let router_norm = norm("mlp.gate.scale")?;
        experts.logit_scale = (config.hidden_size as f32).powf(-0.5);
        let dense = feed_forward(config, &format!("{prefix}.mlp"), config.mlp_width(layer), declare)?;
        Ok(Self { dense, dense_after, experts, experts_before, experts_after, router_norm, eps: config.norm_eps })
    }

    /// `out = dense(input) + experts(x)`, both normed. The rows of `input` are overwritten.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        out: Buf,
        x: Buf,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        device.feed_forward(&self.dense, input, out, Mode::Store, bf16_rows)?;
        device.rms_norm(out, out, self.dense_after, self.eps);
        let (normed, mixed) = (input.x, device.temp(x.rows, x.cols)?);
        device.rms_norm(mixed, x, self.router_norm, self.eps);
        device.rms_norm(normed, x, self.experts_before, self.eps);
        self.experts.forward_routed(device, mixed, normed, mixed, Mode::Store, bf16_rows)?;
        device.rms_norm(mixed, mixed, self.experts_after, self.eps);
        device.add(out, mixed);
        device.release(scope);
        Ok(())
    }
}
