//! OLMo 2 and OLMo 3: norms after attention and after the feed-forward part, and norms over the whole width of queries and keys. OLMo 3 has
//! sliding layers, which rotate without scaling.
//!
//! Reference: transformers, `modeling_olmo2.py` and `modeling_olmo3.py`; llama.cpp, `olmo2`, the architecture of both.

use super::{Defaults, Family};
use crate::config::{ModelConfig, RopeScaling};
use crate::error::FormatError;
use crate::gguf::keys::Keys;
use crate::hf::values::window;
use crate::variant::{Norms, QkNorm};

/// The interval of global layers, if the configuration does not list the layers.
const INTERVAL: usize = 4;
const WINDOW: usize = 4096;

pub(super) const OLMO2: Family = Family {
    name: "OLMo 2",
    classes: &["Olmo2ForCausalLM", "Olmo2Model", "olmo2"],
    gguf: &["olmo2"],
    defaults: Defaults { eps: 1e-5, ..Defaults::LLAMA },
    from_hf: |_, config| {
        norms(config);
        Ok(())
    },
    from_gguf,
    hf_names: &[],
    gguf_names: &[],
};

pub(super) const OLMO3: Family = Family {
    name: "OLMo 3",
    classes: &["Olmo3ForCausalLM", "Olmo3Model", "olmo3"],
    gguf: &[],
    defaults: Defaults { eps: 1e-5, theta: 500_000.0, local_theta: Some(500_000.0), ..Defaults::LLAMA },
    from_hf: |json, config| {
        norms(config);
        config.variant.local_rope = true;
        let size = json.size("sliding_window")?.or(json.lacks("sliding_window").then_some(WINDOW));
        window(json, config, size, |layers| (1..=layers).map(|layer| layer % INTERVAL != 0).collect())
    },
    from_gguf,
    hf_names: &[],
    gguf_names: &[],
};

fn norms(config: &mut ModelConfig) {
    config.qk_norm = true;
    config.variant.qk_norm = QkNorm::Row;
    config.variant.norms = Norms::After;
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    norms(config);
    config.variant.local_rope = true;
    // The converter writes the final factor on sine and cosine, not a parameter from which it is computed.
    if let (RopeScaling::Yarn(yarn), Some(factor)) = (&mut config.rope_scaling, keys.f32("rope.scaling.attn_factor")) {
        yarn.attention_factor = factor;
    }
    config.sliding_window = keys.size("attention.sliding_window")?.filter(|window| *window > 0);
    if config.sliding_window.is_some() {
        config.layer_is_sliding = keys.sliding_layers(config.layers, INTERVAL)?;
    }
    Ok(())
}
