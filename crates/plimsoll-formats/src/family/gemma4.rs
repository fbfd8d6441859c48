//! Gemma 4 (text): norms as in Gemma 3. Global layers have wider heads, and in some sizes one projection for keys and values. The small
//! sizes have an embedding for each layer, and their last layers read earlier layers' keys and values. One size has experts beside the
//! feed-forward part of each layer. Unified has no experts and no embeddings of layers.
//!
//! Reference: transformers, `modeling_gemma4.py`; llama.cpp, `gemma4`.

use super::{Defaults, Family, Names};
use crate::activation::Activation;
use crate::bounds::wrong;
use crate::config::{Experts, ModelConfig, RopeScaling, Routing};
use crate::error::{FormatError, quote};
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
use crate::hf::values::window;
use crate::variant::{LayerHeads, Norms, PerLayerInput};

/// The interval of global layers, if the configuration does not list the layers.
const INTERVAL: usize = 6;
const WINDOW: usize = 512;
const UNIFIED_WINDOW: usize = 1024;
const GLOBAL_HEAD_DIM: usize = 512;
/// Elements of a layer's embedding, and rows of the table.
const PER_LAYER: PerLayerInput = PerLayerInput { width: 256, rows: 262_144, pad: 0 };
/// Share of a global head that is rotated.
const GLOBAL_SHARE: f32 = 0.25;

const DEFAULTS: Defaults = Defaults {
    heads: Some(8),
    kv_heads: Some(4),
    head_dim: Some(256),
    vocab_size: Some(262_144),
    max_context: 131_072,
    theta: 1_000_000.0,
    local_theta: Some(10_000.0),
    activation: "gelu_pytorch_tanh",
    tied: true,
    uneven: true,
    ..Defaults::LLAMA
};

pub(super) const FAMILY: Family = Family {
    name: "Gemma 4",
    classes: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4TextModel", "gemma4", "gemma4_text"],
    gguf: &["gemma4"],
    defaults: DEFAULTS,
    from_hf: |json, config| {
        decoder_of_hf(json, config, WINDOW)?;
        let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
        // An explicit null means 0.
        let absent = if json.lacks("hidden_size_per_layer_input") { PER_LAYER.width } else { 0 };
        let width = or("hidden_size_per_layer_input", absent)?;
        let pad = or("pad_token_id", PER_LAYER.pad as usize)?;
        per_layer(config, width, or("vocab_size_per_layer_input", PER_LAYER.rows)?, pad)?;
        if json.bool("enable_moe_block")?.unwrap_or(false) {
            let (count, top_k) = (json.need("num_experts")?, json.need("top_k_experts")?);
            experts(config, count, top_k, json.need("moe_intermediate_size")?);
        }
        Ok(())
    },
    from_gguf,
    hf_names: HF_NAMES,
    gguf_names: &[
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
        ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ("ffn_down_exps.scale", "mlp.expert_scale"),
        ("ffn_gate_inp.scale", "mlp.gate.scale"),
        ("inp_gate", "per_layer_input_gate"),
        ("proj", "per_layer_projection"),
        ("post_norm", "post_per_layer_input_norm"),
        ("layer_output_scale.weight", "layer_scalar"),
    ],
};

pub(super) const UNIFIED: Family = Family {
    name: "Gemma 4 Unified",
    classes: &[
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
        "gemma4_unified",
    ],
    // In GGUF files Unified has Gemma 4's architecture.
    gguf: &[],
    defaults: Defaults { max_context: 262_144, ..DEFAULTS },
    from_hf: |json, config| decoder_of_hf(json, config, UNIFIED_WINDOW),
    from_gguf: |_, _| Ok(()),
    hf_names: HF_NAMES,
    gguf_names: &[],
};

const HF_NAMES: Names = &[
    ("router.proj", "mlp.gate"),
    ("router.scale", "mlp.gate.scale"),
    ("router.per_expert_scale", "mlp.expert_scale"),
    ("experts.switch_glu", "mlp.experts"),
    ("experts", "mlp.experts"),
];

fn common(config: &mut ModelConfig) {
    config.qk_norm = true;
    config.query_scale = 1.0;
    // Activations are f32 here, so the scale is not rounded to the weights' type.
    config.embedding_scale = (config.hidden_size as f64).sqrt() as f32;
    let variant = &mut config.variant;
    (variant.norms, variant.local_rope, variant.value_norm, variant.layer_scalar) = (Norms::Around, true, true, true);
}

/// Reads the keys that both classes have. `default` is the window of sliding layers.
fn decoder_of_hf(json: &Lookup, config: &mut ModelConfig, default: usize) -> Result<(), FormatError> {
    common(config);
    if let Some(other) = json.str("use_bidirectional_attention")?.filter(|kind| *kind != "vision") {
        let what = format!("use_bidirectional_attention {}; supported is vision", quote(other));
        return Err(FormatError::Unsupported(what));
    }
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    window(json, config, Some(or("sliding_window", default)?), |layers| {
        (1..=layers).map(|layer| layer % INTERVAL != 0).collect()
    })?;
    // The last layer is always global, even if the list differs.
    config.layer_is_sliding.iter_mut().last().into_iter().for_each(|last| *last = false);
    if json.object("rope_parameters")?.is_none() {
        config.rope_scaling = RopeScaling::Proportional { share: GLOBAL_SHARE, factor: 1.0 };
    }
    let one_projection = json.bool("attention_k_eq_v")?.unwrap_or(false);
    let heads = json.size("num_global_key_value_heads")?.filter(|_| one_projection);
    match json.object("per_layer_config")? {
        Some(layers) => listed_heads(&layers, config, one_projection)?,
        None => {
            let width = or("global_head_dim", GLOBAL_HEAD_DIM)?;
            global(config, width, heads.unwrap_or(config.kv_heads), one_projection);
        }
    }
    let shared = or("num_kv_shared_layers", 0)?;
    config.variant.shared_kv_layers = shared;
    if json.bool("use_double_wide_mlp")?.unwrap_or(false) {
        let width = |layer| if layer < config.layers.saturating_sub(shared) { 1 } else { 2 };
        config.variant.mlp_widths =
            (0..config.layers).map(|layer| config.intermediate_size.saturating_mul(width(layer))).collect();
    }
    Ok(())
}

/// Sets the heads of global layers from the list of layers that differ from the others, which transformers 5 writes.
fn listed_heads(layers: &Lookup, config: &mut ModelConfig, values_are_keys: bool) -> Result<(), FormatError> {
    let mut found: [Option<(usize, usize)>; 2] = [None; 2];
    // Longer keys are not numbers of layers.
    let digits = layers.keys().map(str::len).filter(|len| *len <= 4).max().unwrap_or(1);
    for layer in 0..config.layers {
        let mut heads = (config.head_dim, config.kv_heads);
        if let Some(entry) = layers.object(&format!("{layer:0digits$}"))? {
            if let Some(other) = entry.keys().find(|key| !["head_dim", "num_key_value_heads"].contains(key)) {
                return Err(FormatError::Unsupported(format!("per_layer_config: {other} of layer {layer}")));
            }
            heads = (entry.size("head_dim")?.unwrap_or(heads.0), entry.size("num_key_value_heads")?.unwrap_or(heads.1));
        }
        let kind = &mut found[usize::from(config.slides(layer))];
        if *kind.get_or_insert(heads) != heads {
            return Err(FormatError::Unsupported("per_layer_config with heads that differ within a kind".to_owned()));
        }
    }
    let (local, plain) = (found[1], (config.head_dim, config.kv_heads));
    if local.is_some_and(|local| local != plain) {
        return Err(FormatError::Unsupported("per_layer_config with other heads in sliding layers".to_owned()));
    }
    let (head_dim, kv_heads) = found[0].unwrap_or(plain);
    global(config, head_dim, kv_heads, values_are_keys);
    Ok(())
}

fn from_gguf(keys: &Keys, config: &mut ModelConfig) -> Result<(), FormatError> {
    common(config);
    config.hidden_act = Activation::GeluTanh;
    config.sliding_window = Some(keys.need("attention.sliding_window")?);
    config.layer_is_sliding = keys.sliding_layers(config.layers, INTERVAL)?;
    let heads = keys.sizes("attention.head_count_kv", config.layers)?.unwrap_or_default();
    let of =
        |sliding| heads.iter().zip(&config.layer_is_sliding).filter(move |(_, is)| **is == sliding).map(|(n, _)| *n);
    let uneven = [true, false].into_iter().any(|sliding| of(sliding).min() != of(sliding).max());
    if uneven {
        let key = keys.path("attention.head_count_kv");
        return Err(FormatError::Unsupported(format!("{key} differs between layers of one kind")));
    }
    let (local_heads, global_heads) = (of(true).next(), of(false).next());
    let (global_dim, local_dim) = (config.head_dim, keys.need("attention.key_length_swa")?);
    global(config, global_dim, global_heads.unwrap_or(config.kv_heads), false);
    config.kv_heads = local_heads.unwrap_or(config.kv_heads);
    config.head_dim = local_dim;
    config.rotary_dim = keys.size("rope.dimension_count_swa")?.unwrap_or(local_dim);
    config.rope_local_theta = keys.f32("rope.freq_base_swa").unwrap_or(10_000.0);
    config.variant.shared_kv_layers = keys.size("attention.shared_kv_layers")?.unwrap_or(0);
    config.variant.mlp_widths = keys.sizes("feed_forward_length", config.layers)?.unwrap_or_default();
    let pad = keys.meta.u64("tokenizer.ggml.padding_token_id").unwrap_or(0) as usize;
    per_layer(config, keys.size("embedding_length_per_layer_input")?.unwrap_or(0), config.vocab_size, pad)?;
    if keys.size("expert_count")?.is_some_and(|count| count > 0) {
        let (count, top_k) = (keys.need("expert_count")?, keys.need("expert_used_count")?);
        experts(config, count, top_k, keys.need("expert_feed_forward_length")?);
    }
    Ok(())
}

fn global(config: &mut ModelConfig, head_dim: usize, kv_heads: usize, values_are_keys: bool) {
    config.variant.global_heads = Some(LayerHeads { kv_heads, head_dim, rotary_dim: head_dim, values_are_keys });
}

fn per_layer(config: &mut ModelConfig, width: usize, rows: usize, pad: usize) -> Result<(), FormatError> {
    if width > 0 && pad >= rows {
        return wrong(format!("pad_token_id {pad}; the embeddings of layers have {rows} rows"));
    }
    config.variant.per_layer_input = (width > 0).then_some(PerLayerInput { width, rows, pad: pad as u32 });
    Ok(())
}

fn experts(config: &mut ModelConfig, count: usize, top_k: usize, width: usize) {
    config.variant.mlp_beside_experts = true;
    config.experts = Some(Experts {
        count,
        top_k,
        width,
        shared_width: 0,
        renormalise: true,
        routing: Routing { expert_scales: true, ..Routing::default() },
        alternating: false,
        biases: false,
        layers: vec![true; config.layers],
    });
}
