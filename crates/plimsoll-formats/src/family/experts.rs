//! Mixtures of experts with a sigmoid router: the GGUF metadata that several families share.

use crate::config::{Experts, ModelConfig, Routing};
use crate::error::FormatError;
use crate::gguf::keys::Keys;

/// llama.cpp's number for the sigmoid among the gating functions.
pub(super) const GATING_SIGMOID: usize = 2;

/// Returns a sigmoid router that corrects the scores for the choice.
pub(super) fn routing() -> Routing {
    Routing { sigmoid: true, correction: true, shared_gate: false, ..Routing::default() }
}

/// Returns that router with the metadata's groups and scale.
pub(super) fn routing_of_gguf(keys: &Keys) -> Result<Routing, FormatError> {
    Ok(Routing {
        groups: keys.size("expert_group_count")?.unwrap_or(1).max(1),
        top_groups: keys.size("expert_group_used_count")?.unwrap_or(1).max(1),
        scale: keys.f32("expert_weights_scale").filter(|scale| *scale != 0.0).unwrap_or(1.0),
        ..routing()
    })
}

/// Reads the mixture of experts after `leading_dense_block_count` dense layers. `shared` is the default number of shared experts.
pub(super) fn of_gguf(keys: &Keys, config: &mut ModelConfig, shared: usize) -> Result<(), FormatError> {
    let gating = keys.size("expert_gating_func")?.unwrap_or(GATING_SIGMOID);
    if gating != GATING_SIGMOID {
        let key = keys.path("expert_gating_func");
        return Err(FormatError::Unsupported(format!("{key}: {gating}; supported is {GATING_SIGMOID}, the sigmoid")));
    }
    let (width, first) = (keys.need("expert_feed_forward_length")?, keys.need("leading_dense_block_count")?);
    let shared = keys.size("expert_shared_count")?.unwrap_or(shared);
    config.experts = Some(Experts {
        count: keys.need("expert_count")?,
        top_k: keys.need("expert_used_count")?,
        width,
        shared_width: width.saturating_mul(shared),
        renormalise: keys.bool("expert_weights_norm").unwrap_or(true),
        routing: routing_of_gguf(keys)?,
        alternating: false,
        biases: false,
        layers: (0..config.layers).map(|layer| layer >= first).collect(),
    });
    Ok(())
}
