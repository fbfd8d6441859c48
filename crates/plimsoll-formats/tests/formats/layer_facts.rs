//! Families with layers that differ in numbers of heads, gates or reach: the meaning of their keys, and the values refused by name.

use crate::common::{GgufWriter, of_class, refuses};
use plimsoll_formats::{Norms, OutputGate, QkNorm, QueryGrowth, RopeScaling};

/// Laguna with a layer of each kind.
const LAGUNA: &str = r#""head_dim": 32, "layer_types": ["full_attention", "sliding_attention"],
    "num_attention_heads_per_layer": [4, 6], "num_experts": 8, "num_experts_per_tok": 2"#;

#[test]
fn heads_and_rotation_of_laguna_differ_between_layers() {
    let config = of_class("LagunaForCausalLM", LAGUNA);
    assert_eq!((config.query_heads(0), config.query_heads(1), config.heads), (4, 6, 6));
    assert_eq!((config.sliding_window, config.slides(0), config.slides(1)), (Some(512), false, true));
    // Without rotation parameters those of the class apply.
    assert_eq!((config.heads_of(false).rotary_dim, config.heads_of(true).rotary_dim), (16, 32));
    assert_eq!((config.rope_theta, config.rope_local_theta), (500_000.0, 10_000.0));
    let rope = r#""rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0,
            "original_max_position_embeddings": 64, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 200.0}}"#;
    let config = of_class("LagunaForCausalLM", &format!("{LAGUNA}, {rope}"));
    assert_eq!((config.heads_of(false).rotary_dim, config.heads_of(true).rotary_dim), (8, 32));
    assert_eq!((config.rope_theta, config.rope_local_theta), (3000.0, 200.0));
    assert!(matches!(config.rope_scaling, RopeScaling::Yarn(yarn) if yarn.factor == 4.0 && yarn.original == 64));
}

#[test]
fn gates_and_router_of_laguna_are_read() {
    let config = of_class("LagunaForCausalLM", LAGUNA);
    assert_eq!(config.variant.output_gate, Some(OutputGate::Softplus { per_head: true }));
    let experts = config.experts.expect("a mixture of experts");
    assert!(experts.routing.sigmoid && experts.routing.correction && experts.renormalise);
    assert_eq!((experts.layers.as_slice(), experts.routing.logit_softcap), ([false, true].as_slice(), None));
    let other = r#""gating": "per-element", "moe_router_logit_softcapping": 30.0, "moe_routed_scaling_factor": 2.5,
        "mlp_layer_types": ["sparse", "dense"]"#;
    let config = of_class("LagunaForCausalLM", &format!("{LAGUNA}, {other}"));
    assert_eq!(config.variant.output_gate, Some(OutputGate::Softplus { per_head: false }));
    let experts = config.experts.expect("a mixture of experts");
    assert_eq!((experts.routing.scale, experts.routing.logit_softcap), (2.5, Some(30.0)));
    assert_eq!(experts.layers, [true, false]);
}

#[test]
fn values_of_laguna_that_change_the_answer_are_refused() {
    let cases = [
        (
            r#""moe_apply_router_weight_on_input": true"#,
            "unsupported: moe_apply_router_weight_on_input: true; supported is false",
        ),
        (r#""norm_topk_prob": false"#, "unsupported: norm_topk_prob: false; supported is true"),
        (r#""gating": false"#, "unsupported: gating \"false\"; supported are true, per-head and per-element"),
        (r#""gating": "per-row""#, "unsupported: gating \"per-row\"; supported are per-head and per-element"),
        (
            r#""gating_types": ["per-head", "per-element"]"#,
            "unsupported: gating_types that differ; supported is per-head in every layer",
        ),
        (r#""rope_theta": 10000.0"#, "unsupported: rope_theta without rope_parameters for each layer type"),
        (
            r#""rope_scaling": {"rope_type": "linear", "factor": 2.0}"#,
            "unsupported: rope_scaling; use rope_parameters with an entry for each layer type",
        ),
        (
            r#""rope_parameters": {"full_attention": {"rope_theta": 10000.0}}"#,
            "model configuration: rope_parameters: sliding_attention is missing",
        ),
        (
            r#""rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {}}"#,
            "model configuration: rope_parameters: rope_theta of sliding_attention is missing",
        ),
        (
            r#""num_attention_heads_per_layer": [4]"#,
            "model configuration: num_attention_heads_per_layer is not a list of 2 numbers",
        ),
        (
            r#""num_attention_heads_per_layer": [6, 5]"#,
            "model configuration: 2 key-value heads do not divide the 5 heads of layer 1",
        ),
    ];
    refuses("LagunaForCausalLM", LAGUNA, &cases);
}

/// Muse Glimmer, with one layer more than two patterns.
const MUSE: &str = r#""head_dim": 16, "num_hidden_layers": 9"#;

#[test]
fn layers_of_muse_glimmer_are_counted_from_the_last() {
    let config = of_class("MuseGlimmerForConditionalGeneration", MUSE);
    let local = [false, true, true, true, false, true, true, true, false];
    assert_eq!((config.layer_is_sliding.as_slice(), config.sliding_window), (local.as_slice(), Some(2048)));
    assert_eq!(config.variant.rotated, local);
    let listed = r#""num_hidden_layers": 2, "layer_rope_theta": [0, 500000.0], "sliding_window": 32,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "layer_types": ["sliding_attention", "full_attention"]"#;
    let config = of_class("MuseGlimmerForConditionalGeneration", &format!("{MUSE}, {listed}"));
    assert_eq!((config.layer_is_sliding.as_slice(), config.sliding_window), ([true, false].as_slice(), Some(32)));
    assert_eq!(config.variant.rotated, [false, true]);
}

#[test]
fn norms_and_factors_of_muse_glimmer_are_read_and_refused() {
    let config = of_class("MuseGlimmerForConditionalGeneration", MUSE);
    let variant = &config.variant;
    assert_eq!((variant.norms, variant.output_gate), (Norms::Around, Some(OutputGate::Sigmoid)));
    assert!(variant.plain_qk_norm && variant.embedding_norm && variant.plain_final_norm && config.qk_norm);
    assert_eq!((config.norm_weight_offset, variant.post_norm_eps), (1.0, Some(1e-8)));
    assert_eq!((config.query_scale, config.final_logit_softcap), (3.87 / 4.0, Some(20.0)));
    assert!((variant.logit_scale - 0.196_116_14).abs() < 1e-7);
    let cases = [
        (r#""layer_rope_theta": [0]"#, "model configuration: layer_rope_theta is not a list of 9 numbers"),
        (
            r#""layer_rope_theta": [0, 1, 1, 1, 0, 1, 1, 1, 0]"#,
            "unsupported: layer_rope_theta: 1; supported are 0 and rope_theta, 10000",
        ),
        (
            r#""attn_logit_softcapping": 50.0"#,
            "unsupported: attn_logit_softcapping 50 of Muse Glimmer; supported is null",
        ),
        (
            r#""final_logit_softcapping": 0"#,
            "model configuration: final soft cap: 0, allowed are numbers above 0 and up to 1000000",
        ),
    ];
    refuses("MuseGlimmerForConditionalGeneration", MUSE, &cases);
}

/// Llama 4, with one layer more than its pattern.
const LLAMA4: &str = r#""head_dim": 16, "num_hidden_layers": 5, "num_local_experts": 4"#;

#[test]
fn layers_of_llama_4_attend_within_chunks_where_they_rotate() {
    let config = of_class("Llama4ForCausalLM", LLAMA4);
    let local = [true, true, true, false, true];
    assert_eq!(
        (config.variant.rotated.as_slice(), config.layer_is_sliding.as_slice()),
        (local.as_slice(), local.as_slice())
    );
    assert_eq!((config.sliding_window, config.variant.chunked, config.rope_interleaved), (Some(8192), true, true));
    let growth = QueryGrowth { beta: 0.1, length: 8192, offset: 1, unrotated_only: true };
    assert_eq!(config.variant.query_growth, Some(growth));
    assert!(config.qk_norm && config.variant.plain_qk_norm && config.variant.rotated_qk_norm);
    assert_eq!(config.variant.qk_norm, QkNorm::RotatedHead);
    let listed = r#""no_rope_layers": [0, 1, 1, 1, 1], "attention_chunk_size": 32, "attn_temperature_tuning": false,
        "layer_types": ["full_attention", "full_attention", "chunked_attention", "full_attention", "full_attention"]"#;
    let config = of_class("Llama4ForConditionalGeneration", &format!("{LLAMA4}, {listed}"));
    assert_eq!((config.variant.rotates(0), config.slides(1), config.slides(2)), (false, false, true));
    assert_eq!((config.sliding_window, config.variant.query_growth), (Some(32), None));
    let whole =
        of_class("Llama4ForCausalLM", &format!(r#"{LLAMA4}, "attention_chunk_size": null, "no_rope_layers": []"#));
    assert_eq!((whole.sliding_window, whole.variant.chunked), (None, false));
    // The first published configurations have a number here.
    let number = of_class("Llama4ForCausalLM", &format!(r#"{LLAMA4}, "attn_temperature_tuning": 4"#));
    assert_eq!(number.variant.query_growth, Some(growth));
}

#[test]
fn experts_of_llama_4_get_weighed_inputs() {
    let config = of_class("Llama4ForCausalLM", &format!(r#"{LLAMA4}, "interleave_moe_layer_step": 2"#));
    let experts = config.experts.as_ref().expect("a mixture of experts");
    assert_eq!(experts.layers, [false, true, false, true, false]);
    assert_eq!((experts.count, experts.top_k, experts.width, experts.shared_width), (4, 1, 96, 96));
    assert_eq!(config.intermediate_size, 16_384);
    assert!(experts.routing.sigmoid && experts.routing.weighs_inputs && !experts.routing.correction);
    assert!(!experts.renormalise && !experts.routing.shared_gate);
    let listed = of_class("Llama4ForCausalLM", &format!(r#"{LLAMA4}, "moe_layers": [4, 0]"#));
    assert_eq!(listed.experts.expect("a mixture of experts").layers, [true, false, false, false, true]);
    assert!(of_class("Llama4ForCausalLM", &format!(r#"{LLAMA4}, "moe_layers": []"#)).experts.is_none());
}

#[test]
fn values_of_llama_4_that_change_the_answer_are_refused() {
    let cases = [
        (r#""moe_layers": [5]"#, "model configuration: moe_layers is not a list of layers below 5"),
        (r#""interleave_moe_layer_step": 0"#, "model configuration: interleave_moe_layer_step is 0"),
        (r#""no_rope_layers": [1, 1]"#, "model configuration: no_rope_layers is not a list of 5 numbers"),
        (r#""no_rope_layer_interval": 0"#, "model configuration: no_rope_layer_interval is 0"),
        (r#""attn_temperature_tuning": "yes""#, "model configuration: attn_temperature_tuning is not a boolean"),
        (
            r#""attention_chunk_size": null, "layer_types": ["chunked_attention", "full_attention", "full_attention",
                "full_attention", "full_attention"]"#,
            "model configuration: layers of chunked_attention without attention_chunk_size",
        ),
        (
            r#""layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention", "full_attention"]"#,
            "unsupported: layer type \"sliding_attention\"",
        ),
        (r#""floor_scale": 0"#, "model configuration: step of the growth of queries: 0, allowed are 1 to 268435456"),
    ];
    refuses("Llama4ForCausalLM", LLAMA4, &cases);
}

#[test]
fn llama_4_in_gguf_has_the_published_chunks_and_growth() {
    let mut writer = GgufWriter::new("llama4");
    for (key, value) in [("expert_count", 16), ("expert_used_count", 1), ("expert_feed_forward_length", 32)] {
        writer.u32(&format!("llama4.{key}"), value);
    }
    writer.u32("llama4.interleave_moe_layer_step", 2);
    let scout = writer.open().expect("it opens").config;
    let every_fourth: Vec<bool> = (1..=12).map(|layer| layer % 4 != 0).collect();
    assert_eq!((&scout.variant.rotated, &scout.layer_is_sliding), (&every_fourth, &every_fourth));
    assert_eq!((scout.sliding_window, scout.variant.chunked, scout.qk_norm), (Some(8192), true, true));
    let growth = QueryGrowth { beta: 0.1, length: 8192, offset: 1, unrotated_only: true };
    assert_eq!(scout.variant.query_growth, Some(growth));
    let experts = scout.experts.expect("a mixture of experts");
    assert_eq!((experts.count, experts.width, experts.shared_width), (16, 32, 32));
    assert_eq!(experts.layers.iter().filter(|layer| **layer).count(), 6);
    assert!(experts.routing.sigmoid && experts.routing.weighs_inputs && !experts.renormalise);
    let maverick = writer.u32("llama4.expert_count", 128).open().expect("it opens").config;
    assert!(!maverick.qk_norm);
    let whole = writer.u32("llama4.attention.sliding_window", 0).open().expect("it opens").config;
    assert_eq!((whole.sliding_window, whole.variant.chunked, whole.variant.query_growth), (None, false, None));
    assert!(whole.variant.rotated.iter().all(|rotated| *rotated));
}
