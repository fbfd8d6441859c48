//! Hunyuan, dense: norms on each head of queries and keys after rotation, and a rotary base that is stretched by a fixed alpha.
//!
//! Reference: transformers, `modeling_hunyuan_v1_dense.py`; llama.cpp, `hunyuan-dense`.

use super::{Defaults, Family};
use crate::config::ModelConfig;
use crate::variant::QkNorm;

pub(super) const FAMILY: Family = Family {
    name: "Hunyuan (dense)",
    classes: &["HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model", "hunyuan_v1_dense"],
    gguf: &["hunyuan-dense"],
    defaults: Defaults { eps: 1e-5, ..Defaults::LLAMA },
    from_hf: |_, config| {
        norms(config);
        Ok(())
    },
    from_gguf: |_, config| {
        norms(config);
        Ok(())
    },
    hf_names: &[("self_attn.query_layernorm", "self_attn.q_norm"), ("self_attn.key_layernorm", "self_attn.k_norm")],
    gguf_names: &[],
};

fn norms(config: &mut ModelConfig) {
    config.qk_norm = true;
    config.variant.qk_norm = QkNorm::RotatedHead;
}
