//! GGUF tensor names → the names that transformers use.
//!
//! A name that is not in the table is kept, so that every tensor of the file stays visible.

use super::encoder;
use crate::architecture::Architecture;
use crate::family::{self, Names};

/// The ending of the name of a weight's second scale, until `scales` joins the two. No canonical name has a `#`.
pub(super) const SCALE: &str = "#scale";
/// The ending of the name of the scale of a weight's input.
pub(super) const INPUT_SCALE: &str = "#input_scale";

/// Returns the canonical name of a GGUF tensor of a model of this architecture. The name of a weight's scale is the weight's name with
/// another ending: `blk.0.attn_q.scale` becomes `model.layers.0.self_attn.q_proj.weight#scale`.
pub(super) fn canonical(name: &str, architecture: &Architecture) -> String {
    let names = match architecture {
        Architecture::Family(family) => family::named(family).map(|family| family.gguf_names),
        other => encoder::names(other),
    };
    let part = block_part(name).map_or(name, |(_, part)| part);
    // Gemma 4 has different scales, whose names are in its table.
    let own = names.is_some_and(|names| names.iter().any(|(stored, _)| *stored == part));
    for (stored, end) in [(".scale", SCALE), (".input_scale", INPUT_SCALE)] {
        if let Some(module) = name.strip_suffix(stored).filter(|_| !own) {
            return renamed(&format!("{module}.weight"), names) + end;
        }
    }
    renamed(name, names)
}

/// The canonical name of a tensor that is not a scale.
fn renamed(name: &str, names: Option<Names>) -> String {
    let renamed = match name.starts_with("blk.") {
        true => block_name(name, names),
        // The family's name comes first: encoders have another name for the embedding.
        false => of_family(name, names).or_else(|| outside(name).map(str::to_owned)),
    };
    renamed.unwrap_or_else(|| name.to_owned())
}

/// The name in the family's table of a part of a layer, or of a tensor outside layers.
fn of_family(name: &str, names: Option<Names>) -> Option<String> {
    family::renamed(names?, name)
}

/// The canonical name of a tensor outside layers.
fn outside(name: &str) -> Option<&'static str> {
    Some(match name {
        "token_embd.weight" => "model.embed_tokens.weight",
        "output_norm.weight" => "model.norm.weight",
        "output.weight" => "lm_head.weight",
        "per_layer_token_embd.weight" => "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight" => "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight" => "model.per_layer_projection_norm.weight",
        "rope_factors_long.weight" => "model.rope_factors_long",
        "rope_factors_short.weight" => "model.rope_factors_short",
        "rope_freqs.weight" => "model.rope_freqs",
        _ => return None,
    })
}

/// Layer and part of `blk.<layer>.<part>`.
fn block_part(name: &str) -> Option<(&str, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    (!layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit())).then_some((layer, part))
}

/// The canonical name of `blk.<layer>.<part>.<weight|bias>`.
fn block_name(name: &str, names: Option<Names>) -> Option<String> {
    let (layer, rest) = block_part(name)?;
    if let Some(part) = of_family(rest, names) {
        return Some(format!("model.layers.{layer}.{part}"));
    }
    match rest {
        // The factor of the recurrence, already -exp(A_log).
        "ssm_a" => return Some(format!("model.layers.{layer}.linear_attn.A")),
        "ssm_dt.bias" => return Some(format!("model.layers.{layer}.linear_attn.dt_bias")),
        _ => {}
    }
    let (part, leaf) = rest.rsplit_once('.')?;
    let module = match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_norm" => "post_attention_layernorm",
        "post_attention_norm" => "post_attention_layernorm",
        "post_ffw_norm" => "post_feedforward_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "ffn_gate_inp" => "mlp.gate",
        "ffn_gate_exps" => "mlp.experts.gate_proj",
        "ffn_up_exps" => "mlp.experts.up_proj",
        "ffn_down_exps" => "mlp.experts.down_proj",
        "ffn_gate_up_exps" => "mlp.experts.gate_up_proj",
        "ffn_gate_inp_shexp" => "mlp.shared_expert_gate",
        "ffn_gate_shexp" => "mlp.shared_expert.gate_proj",
        "ffn_up_shexp" => "mlp.shared_expert.up_proj",
        "ffn_down_shexp" => "mlp.shared_expert.down_proj",
        "attn_qkv" => "linear_attn.in_proj_qkv",
        "attn_gate" => "linear_attn.in_proj_z",
        "ssm_in" => "linear_attn.in_proj_qkvz",
        "ssm_ba" => "linear_attn.in_proj_ba",
        "ssm_alpha" => "linear_attn.in_proj_a",
        "ssm_beta" => "linear_attn.in_proj_b",
        "ssm_conv1d" => "linear_attn.conv1d",
        "ssm_norm" => "linear_attn.norm",
        "ssm_out" => "linear_attn.out_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{module}.{leaf}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_after_attention_depends_on_the_architecture() {
        let of = |name, architecture| canonical(name, &architecture);
        assert_eq!(of("blk.7.ffn_norm.weight", Architecture::Llama), "model.layers.7.post_attention_layernorm.weight");
        assert_eq!(
            of("blk.7.ffn_norm.weight", Architecture::Family("Gemma 3")),
            "model.layers.7.pre_feedforward_layernorm.weight"
        );
        assert_eq!(
            of("blk.7.post_attention_norm.weight", Architecture::Family("Gemma 3")),
            "model.layers.7.post_attention_layernorm.weight"
        );
    }

    #[test]
    fn biases_follow_their_weights_and_strangers_keep_their_names() {
        let of = |name| canonical(name, &Architecture::Qwen2);
        assert_eq!(of("blk.0.attn_q.bias"), "model.layers.0.self_attn.q_proj.bias");
        assert_eq!(of("output.weight"), "lm_head.weight");
        for stranger in ["blk.x.attn_q.weight", "blk.0.ffn_norm_exps.weight", "blk.0", "v.patch_embd.weight"] {
            assert_eq!(of(stranger), stranger);
        }
    }

    #[test]
    fn scales_are_named_after_their_weights() {
        let of = |name| canonical(name, &Architecture::Qwen3Moe);
        assert_eq!(of("blk.0.attn_q.scale"), "model.layers.0.self_attn.q_proj.weight#scale");
        assert_eq!(of("blk.1.ffn_up_exps.input_scale"), "model.layers.1.mlp.experts.up_proj.weight#input_scale");
        assert_eq!(of("output.scale"), "lm_head.weight#scale");
        assert_eq!(of("blk.0.stranger.scale"), "blk.0.stranger.weight#scale");
        let of = |name| canonical(name, &Architecture::Family("Gemma 4"));
        assert_eq!(of("blk.0.ffn_down_exps.scale"), "model.layers.0.mlp.expert_scale");
        assert_eq!(of("blk.0.ffn_gate_inp.scale"), "model.layers.0.mlp.gate.scale");
        assert_eq!(of("blk.0.proj.scale"), "model.layers.0.per_layer_projection.weight#scale");
    }

    #[test]
    fn recurrent_layers_and_experts_have_names() {
        let of = |name| canonical(name, &Architecture::Qwen3_5Moe);
        assert_eq!(of("blk.4.ssm_a"), "model.layers.4.linear_attn.A");
        assert_eq!(of("blk.4.ssm_dt.bias"), "model.layers.4.linear_attn.dt_bias");
        assert_eq!(of("blk.4.attn_gate.weight"), "model.layers.4.linear_attn.in_proj_z.weight");
        assert_eq!(of("blk.4.ffn_up_exps.weight"), "model.layers.4.mlp.experts.up_proj.weight");
        assert_eq!(of("blk.4.post_attention_norm.weight"), "model.layers.4.post_attention_layernorm.weight");
    }
}
