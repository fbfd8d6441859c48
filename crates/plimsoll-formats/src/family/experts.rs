//! Mixtures of experts with a sigmoid router, as several families have them in GGUF metadata.

use crate::config::{Experts, ModelConfig, Routing};
use crate::error::FormatError;
use crate::gguf::keys::Keys;

/// llama.cpp's number of the sigmoid among the functions of a router.
pub(super) const GATING_SIGMOID: usize = 2;

/// A sigmoid router with a correction of its choice.
pub(super) fn routing() -> Routing {
    Routing { sigmoid: true, correction: true, shared_gate: false, ..Routing::default() }
}

/// The same with groups and scale of the metadata.
pub(super) fn routing_of_gguf(keys: &Keys) -> Result<Routing, FormatError> {
    Ok(Routing {
        groups: keys.size("expert_group_count")?.unwrap_or(1).max(1),
        top_groups: keys.size("expert_group_used_count")?.unwrap_or(1).max(1),
        scale: keys.f32("expert_weights_scale").filter(|scale| *scale != 0.0).unwrap_or(1.0),
        ..routing()
    })
}

/// The mixture of experts behind `leading_dense_block_count` dense layers. `shared` experts, unless the metadata says otherwise.
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
