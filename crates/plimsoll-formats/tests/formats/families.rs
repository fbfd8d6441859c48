//! Families of decoders: the meaning of their own keys, and the values that are refused by name.

use crate::common::{GgufWriter, LLAMA, of_class, open_config, patched, refuses};
use plimsoll_formats::{Activation, Encoding, LayerHeads, Mixer, Norms, PerLayerInput, QkNorm, RopeScaling};

#[test]
fn layers_without_rotation_are_listed_or_counted() {
    let counted = of_class("SmolLM3ForCausalLM", r#""num_hidden_layers": 5"#);
    assert_eq!(counted.variant.rotated, [true, true, true, false, true]);
    let listed = of_class("SmolLM3ForCausalLM", r#""no_rope_layers": [0, 1, 1]"#);
    assert_eq!((listed.variant.rotates(0), listed.variant.rotates(1), listed.rope_theta), (false, true, 2_000_000.0));
    let refusal = patched("SmolLM3ForCausalLM", r#""no_rope_layers": [1]"#);
    assert_eq!(refusal, Err("model configuration: no_rope_layers is not a list of 2 numbers".to_owned()));
}

#[test]
fn long_rope_takes_the_list_of_the_longest_context() {
    let phi = |context: usize| {
        let lists = r#""short_factor": [1, 1, 1, 1, 1, 1, 1, 1], "long_factor": [1, 2, 3, 4, 5, 6, 7, 8]"#;
        let extra = format!(
            r#""max_position_embeddings": {context}, "original_max_position_embeddings": 4096,
            "rope_scaling": {{"type": "longrope", {lists}}}"#
        );
        match of_class("Phi3ForCausalLM", &extra).rope_scaling {
            RopeScaling::Long(long) => long,
            other => panic!("{other:?} is no LongRoPE"),
        }
    };
    let (short, long) = (phi(4096), phi(131_072));
    assert_eq!((short.long, short.attention_factor, short.factors[7]), (false, 1.0, 1.0));
    assert_eq!((long.long, long.factors[7]), (true, 8.0));
    assert!((long.attention_factor - (1.0 + 32f32.ln() / 4096f32.ln()).sqrt()).abs() < 1e-6);
    let refusal = patched("Phi3ForCausalLM", r#""rope_scaling": {"type": "longrope"}"#).expect_err("no list");
    assert!(refusal.ends_with("rope longrope: short_factor is not a list of numbers"), "{refusal}");
}

#[test]
fn norms_and_multipliers_follow_the_family() {
    let olmo = of_class("Olmo3ForCausalLM", r#""num_hidden_layers": 4, "sliding_window": 16"#);
    assert_eq!((olmo.variant.norms, olmo.variant.qk_norm, olmo.qk_norm), (Norms::After, QkNorm::Row, true));
    assert_eq!(olmo.layer_is_sliding, [true, true, true, false]);
    let granite = of_class("GraniteForCausalLM", r#""logits_scaling": 8, "residual_multiplier": 0.5"#);
    assert_eq!((granite.variant.logit_scale, granite.variant.residual_scale, granite.query_scale), (0.125, 0.5, 1.0));
    let gemma = of_class("Gemma2ForCausalLM", r#""attn_logit_softcapping": null, "head_dim": 16"#);
    assert_eq!((gemma.attn_logit_softcap, gemma.final_logit_softcap), (None, Some(30.0)));
    assert_eq!((gemma.sliding_window, gemma.layer_is_sliding.as_slice()), (Some(4096), [true, false].as_slice()));
    let hunyuan = r#""head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}"#;
    let theta = of_class("HunYuanDenseV1ForCausalLM", hunyuan).rope_theta;
    assert!((theta / (10_000.0 * 1000f32.powf(16.0 / 14.0)) - 1.0).abs() < 1e-5, "{theta}");
}

const SMALL: &str = r#""num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]"#;

#[test]
fn global_layers_of_gemma_4_have_heads_of_their_own() {
    let extra = format!(r#"{SMALL}, "num_global_key_value_heads": 1, "attention_k_eq_v": true"#);
    let config = of_class("Gemma4ForCausalLM", &extra);
    let wide = LayerHeads { kv_heads: 1, head_dim: 32, rotary_dim: 32, values_are_keys: true };
    assert_eq!(config.heads_of(false), wide);
    let narrow = LayerHeads { kv_heads: 2, head_dim: 16, rotary_dim: 16, values_are_keys: false };
    assert_eq!(config.heads_of(true), narrow);
    assert_eq!(config.layer_is_sliding, [true, false, true, false, true, false], "the last layer is global");
    assert_eq!((config.query_scale, config.norm_weight_offset, config.sliding_window), (1.0, 0.0, Some(512)));
    assert_eq!(config.rope_scaling, RopeScaling::Proportional { share: 0.25, factor: 1.0 });
    assert_eq!((config.rope_theta, config.rope_local_theta), (1_000_000.0, 10_000.0));
    // Without `attention_k_eq_v` the other number of heads does not count.
    let config = of_class("Gemma4ForCausalLM", &format!(r#"{SMALL}, "num_global_key_value_heads": 1"#));
    assert_eq!(config.heads_of(false), LayerHeads { kv_heads: 2, values_are_keys: false, ..wide });
}

#[test]
fn heads_of_gemma_4_may_be_listed_by_layer() {
    let listed = |layers: &str| {
        let extra = SMALL.replace(r#""global_head_dim": 32"#, &format!(r#""per_layer_config": {layers}"#));
        patched("Gemma4ForCausalLM", &extra)
    };
    let wide = r#"{"head_dim": 32, "num_key_value_heads": 4}"#;
    let all = format!(r#"{{"1": {wide}, "3": {wide}, "5": {wide}}}"#);
    let heads = listed(&all).expect("they are alike").heads_of(false);
    assert_eq!(heads, LayerHeads { kv_heads: 4, head_dim: 32, rotary_dim: 32, values_are_keys: false });
    let refusal = listed(&format!(r#"{{"1": {wide}, "3": {wide}}}"#)).expect_err("layer 5 is another one");
    assert_eq!(refusal, "unsupported: per_layer_config with heads that differ within a kind");
    let refusal = listed(r#"{"1": {"intermediate_size": 8}}"#).expect_err("heads alone may differ");
    assert_eq!(refusal, "unsupported: per_layer_config: intermediate_size of layer 1");
}

#[test]
fn layers_of_gemma_4_share_keys_and_widths_follow() {
    let config =
        of_class("Gemma4ForCausalLM", &format!(r#"{SMALL}, "num_kv_shared_layers": 2, "use_double_wide_mlp": true"#));
    let sources: Vec<_> = (0..6).map(|layer| config.kv_source(layer)).collect();
    assert_eq!(sources, [None, None, None, None, Some(2), Some(3)]);
    let width = config.intermediate_size;
    let widths: Vec<_> = (0..6).map(|layer| config.mlp_width(layer) / width).collect();
    assert_eq!(widths, [1, 1, 1, 1, 2, 2]);
    assert_eq!(config.variant.per_layer_input, Some(PerLayerInput { width: 8, rows: 262_144, pad: 0 }));
    let lonely =
        patched("Gemma4ForCausalLM", &format!(r#"{SMALL}, "num_kv_shared_layers": 5"#)).expect_err("no global source");
    assert_eq!(lonely, "model configuration: layer 1 shares keys and values, and no layer of its kind has them");
    let all = patched("Gemma4ForCausalLM", &format!(r#"{SMALL}, "num_kv_shared_layers": 6"#)).expect_err("no source");
    assert!(all.contains("6 of 6 layers share keys and values"), "{all}");
    let few = patched("Gemma4ForCausalLM", &format!(r#"{SMALL}, "vocab_size_per_layer_input": 3"#))
        .expect_err("too few rows");
    assert!(few.contains("the embedding of layers has 3 rows for"), "{few}");
}

#[test]
fn experts_of_gemma_4_stand_beside_the_feed_forward_part() {
    let moe = r#""enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8"#;
    let config = of_class("Gemma4ForCausalLM", &format!("{SMALL}, {moe}"));
    let experts = config.experts.as_ref().expect("a mixture of experts");
    assert!(config.variant.mlp_beside_experts && experts.routing.expert_scales && experts.renormalise);
    let unified = r#""num_hidden_layers": 6, "global_head_dim": 32, "use_bidirectional_attention": "vision""#;
    let unified = of_class("Gemma4UnifiedForConditionalGeneration", unified);
    assert_eq!((unified.variant.per_layer_input, unified.sliding_window), (None, Some(1024)));
    let all = patched("Gemma4ForCausalLM", &format!(r#"{SMALL}, "use_bidirectional_attention": "all""#));
    assert_eq!(all, Err("unsupported: a decoder with bidirectional attention".to_owned()));
}

#[test]
fn gpt_oss_has_experts_with_biases_and_refuses_another_gate() {
    let experts = r#""head_dim": 16, "num_local_experts": 4"#;
    let config = of_class("GptOssForCausalLM", experts);
    let parts = config.experts.as_ref().expect("a mixture of experts");
    assert!(parts.biases && parts.alternating && parts.renormalise && config.variant.sinks && config.attention_bias);
    assert_eq!((config.hidden_act, config.sliding_window), (Activation::ClampedSwish, Some(128)));
    let refusal = patched("GptOssForCausalLM", &format!(r#"{experts}, "swiglu_limit": 5.0"#));
    assert_eq!(refusal, Err("unsupported: swiglu_limit: 5; supported is 7".to_owned()));
}

#[test]
fn draft_heads_behind_the_last_layer_are_counted() {
    for (class, extra, layers) in [
        ("Glm4MoeForCausalLM", r#""num_nextn_predict_layers": 1"#, 1),
        ("Glm4MoeForCausalLM", r#""num_nextn_predict_layers": 0"#, 0),
        ("Glm4MoeForCausalLM", r#""num_hidden_layers": 2"#, 0),
        ("Glm4MoeLiteForCausalLM", r#""num_nextn_predict_layers": 1"#, 1),
        ("DeepseekV3ForCausalLM", r#""num_nextn_predict_layers": 2, "n_group": 1, "topk_group": 1"#, 2),
        // No draft head of this family is known.
        ("Glm4ForCausalLM", r#""num_nextn_predict_layers": 1"#, 0),
    ] {
        assert_eq!(of_class(class, extra).draft_layers, layers, "{class} with {extra}");
    }
    let refusal = patched("Glm4MoeForCausalLM", r#""num_nextn_predict_layers": 9"#);
    assert_eq!(refusal.map(drop), Err("model configuration: draft layers: 10, allowed are 1 to 9".to_owned()));
}

#[test]
fn a_heads_projection_left_in_floats_is_planned_in_floats() {
    let group =
        r#""weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "targets": ["Linear"]"#;
    let quantized = |ignore: &str| {
        let config = of_class(
            "Glm4MoeForCausalLM",
            &format!(
                r#""num_nextn_predict_layers": 1, "num_hidden_layers": 2, "quantization_config": {{"quant_method": "compressed-tensors",
                "format": "pack-quantized", "ignore": ["{ignore}"], "config_groups": {{"a": {{{group}}}}}}}"#
            ),
        );
        ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"]
            .map(|name| matches!(config.planned_encoding(name, &[64, 128]), Encoding::Quant(_)))
    };
    assert_eq!(quantized("lm_head"), [true, true]);
    assert_eq!(quantized("model.layers.2.eh_proj"), [false, true]);
    assert_eq!(quantized("re:.*layers.2.self_attn.*"), [true, false]);
}

#[test]
fn routers_of_glm_and_ernie_are_read_and_refused() {
    let glm =
        r#""num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 4"#;
    let config = of_class("Glm4MoeForCausalLM", glm);
    let experts = config.experts.as_ref().expect("a mixture of experts");
    assert!(experts.routing.sigmoid && experts.routing.correction && !experts.routing.shared_gate);
    assert_eq!((experts.layers.as_slice(), config.rotary_dim), ([false, true, true].as_slice(), 8));
    let refusal =
        patched("Glm4MoeForCausalLM", &glm.replace("\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 5"));
    assert_eq!(refusal, Err("model configuration: 5 of 8 experts in 1 of 2 groups".to_owned()));
    let ernie = of_class("Ernie4_5_MoeForCausalLM", r#""num_hidden_layers": 3, "moe_layer_end_index": -1"#);
    assert_eq!(ernie.experts.expect("a mixture of experts").layers, [false, true, true]);
    let refusal = patched("Ernie4_5_MoeForCausalLM", r#""moe_norm_min": 0.5"#).expect_err("it changes weights");
    assert!(refusal.starts_with("unsupported: moe_norm_min: 0.5"), "{refusal}");
}

#[test]
fn layers_of_lfm2_are_convolutions_but_for_those_listed() {
    let config = of_class("Lfm2ForCausalLM", r#""full_attn_idxs": [1], "block_ff_dim": 1000, "tie_embedding": false"#);
    assert_eq!(config.variant.mixers, [Mixer::ShortConv, Mixer::Attention]);
    // Two thirds of 1000, in whole multiples of 256.
    assert_eq!((config.intermediate_size, config.variant.conv_taps, config.norm_eps), (768, 3, 1e-5));
    assert!(config.qk_norm && !config.tie_word_embeddings);
    let plain =
        of_class("Lfm2ForCausalLM", r#""block_auto_adjust_ff_dim": false, "layer_types": ["full_attention", "conv"]"#);
    assert_eq!((plain.intermediate_size, plain.variant.mixer(1)), (96, Mixer::ShortConv));
    let moe = r#""num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 8"#;
    let experts = of_class("Lfm2MoeForCausalLM", moe).experts.expect("a mixture of experts");
    assert_eq!((experts.layers.as_slice(), experts.shared_width), ([false, false, true].as_slice(), 0));
    assert!(experts.routing.sigmoid && experts.routing.correction && experts.renormalise);
    for (extra, refusal) in [
        (r#""conv_bias": true"#, "unsupported: conv_bias: true; supported is false"),
        (r#""layer_types": ["conv", "mamba"]"#, "unsupported: layer type \"mamba\""),
        (
            r#""full_attn_idxs": []"#,
            "model configuration: none of 2 layers is one of attention; at least one is needed",
        ),
        (
            r#""full_attn_idxs": [0], "conv_L_cache": 1"#,
            "model configuration: convolution of 1 inputs, allowed are 2 to 16",
        ),
    ] {
        assert_eq!(patched("Lfm2ForCausalLM", extra).map(drop), Err(refusal.to_owned()));
    }
}

#[test]
fn gguf_files_of_lfm2_tell_convolutions_by_their_key_heads() {
    let mut writer = GgufWriter::new("lfm2");
    writer.u32("lfm2.block_count", 3).u32("lfm2.shortconv.l_cache", 4).u32s("lfm2.attention.head_count_kv", &[0, 2, 0]);
    writer.tensor("token_embd_norm.weight", &[64]).tensor("blk.0.shortconv.in_proj.weight", &[64, 192]);
    let checkpoint = writer.open().expect("it opens");
    let mixers = [Mixer::ShortConv, Mixer::Attention, Mixer::ShortConv];
    assert_eq!((checkpoint.config.variant.mixers.as_slice(), checkpoint.config.kv_heads), (mixers.as_slice(), 2));
    assert_eq!(checkpoint.config.variant.conv_taps, 4);
    assert!(checkpoint.tensor("model.norm.weight").is_some());
    assert!(checkpoint.tensor("model.layers.0.conv.in_proj.weight").is_some());
    let refusal = writer.u32s("lfm2.attention.head_count_kv", &[0, 2, 1]).refusal();
    assert!(refusal.ends_with("lfm2.attention.head_count_kv differs between layers"), "{refusal}");
    let refusal = writer.u32s("lfm2.attention.head_count_kv", &[0, 2]).refusal();
    assert!(refusal.ends_with("lfm2.attention.head_count_kv has 2 entries for 3 layers"), "{refusal}");
}

#[test]
fn layers_of_granite_4_are_mamba_but_for_those_that_attend() {
    let granite = r#""layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": "auto""#;
    let config = of_class("GraniteMoeHybridForCausalLM", &format!(r#"{granite}, "num_local_experts": 0"#));
    assert_eq!(config.variant.mixers, [Mixer::Mamba, Mixer::Attention]);
    let mamba = config.variant.mamba.as_ref().expect("Mamba layers");
    assert_eq!((mamba.head_dim * 8, mamba.channels()), (2 * config.hidden_size, 2 * config.hidden_size + 2 * 256));
    assert!(mamba.conv_bias && mamba.time_limits == [0.0, f32::INFINITY] && !config.variant.rotates(1));
    assert!(config.experts.is_none() && config.intermediate_size == 1024 && config.variant.dense_is_shared);
    let moe = of_class("GraniteMoeHybridForCausalLM", &format!(r#"{granite}, "position_embedding_type": "rope""#));
    let experts = moe.experts.as_ref().expect("a mixture of experts");
    assert_eq!((experts.count, experts.top_k, experts.width, experts.shared_width), (8, 2, 96, 1024));
    assert!(moe.variant.rotates(1) && experts.renormalise && !experts.routing.shared_gate);
    let cases = [
        (r#""mamba_proj_bias": true"#, "unsupported: mamba_proj_bias: true; supported is false"),
        (r#""mamba_d_head": 3"#, "model configuration: 8 Mamba heads of 3 are not 128 wide"),
        (r#""mamba_n_groups": 3"#, "model configuration: 3 groups do not divide 8 Mamba heads"),
        (r#""time_step_limit": [0.1]"#, "model configuration: time_step_limit is not a list of two numbers"),
        (
            r#""time_step_limit": [1, 0.5]"#,
            "model configuration: time steps from 1 to 0.5: they must be from 0 on and ascend",
        ),
    ];
    refuses("GraniteMoeHybridForCausalLM", granite, &cases);
}

#[test]
fn layers_of_nemotron_h_are_one_thing_each() {
    let nemotron = r#""num_hidden_layers": 4, "moe_latent_size": 32"#;
    let of = |pattern: &str| {
        patched("NemotronHForCausalLM", &format!(r#"{nemotron}, "hybrid_override_pattern": "{pattern}""#))
    };
    let config = of("M*-E").expect("it opens");
    assert_eq!(config.variant.mixers, [Mixer::Mamba, Mixer::Attention, Mixer::None, Mixer::None]);
    assert_eq!(config.variant.transforms, [false, false, true, true]);
    assert_eq!((config.variant.norms, config.hidden_act), (Norms::Single, Activation::ReluSquared));
    assert_eq!(config.experts.as_ref().expect("a mixture of experts").layers, [false, false, false, true]);
    assert!(config.variant.ungated && config.variant.expert_latent == Some(32) && !config.variant.rotates(1));
    let refusal = of("M*-").map(drop).expect_err("three of four");
    assert!(
        refusal.ends_with("hybrid_override_pattern \"M*-\": 4 characters of M, E, * and - are needed"),
        "{refusal}"
    );
    let refusal = of("MM-E").map(drop).expect_err("no attention");
    assert!(refusal.contains("none of 4 layers is one of attention"), "{refusal}");
    let refusal = patched("NemotronHForCausalLM", r#""hybrid_override_pattern": "M*", "use_bias": true"#).map(drop);
    assert_eq!(refusal, Err("unsupported: use_bias: true; supported is false".to_owned()));
}

#[test]
fn layers_of_falcon_h1_are_both_and_have_factors() {
    let falcon = r#""mamba_n_heads": 8, "mamba_d_ssm": 96, "mamba_d_head": "auto", "attention_in_multiplier": 0.5,
        "attention_out_multiplier": 4, "key_multiplier": 2, "ssm_in_multiplier": 2, "ssm_multipliers": [1, 2, 3, 4, 5]"#;
    let config = of_class("FalconH1ForCausalLM", falcon);
    assert_eq!(config.variant.mixers, [Mixer::Parallel; 2]);
    let mamba = config.variant.mamba.as_ref().expect("Mamba-2");
    assert_eq!((mamba.head_dim, mamba.norm, mamba.scales.expect("factors").0), (12, false, [2.0, 4.0, 6.0, 8.0, 10.0]));
    assert_eq!(config.variant.parallel_scales, [2.0, 1.0]);
    let plain = (config.head_dim as f32).powf(-0.5);
    assert!((config.query_scale / plain - 0.5).abs() < 1e-6, "{}", config.query_scale);
    let cases = [
        (r#""mamba_rms_norm": true"#, "unsupported: mamba_norm_before_gate: true; supported is false"),
        (r#""projectors_bias": true"#, "unsupported: projectors_bias: true; supported is false"),
        (r#""mlp_multipliers": [1]"#, "model configuration: mlp_multipliers is not a list of 2 numbers"),
        (
            r#""ssm_multipliers": [1, 1, 1, 1, 0]"#,
            "model configuration: multiplier of a layer's part: 0, allowed are numbers above 0 and up to 1000000",
        ),
    ];
    refuses("FalconH1ForCausalLM", falcon, &cases);
}

const LATENT: &str = r#""kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 48, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 1, "topk_group": 1"#;

#[test]
fn latent_attention_has_one_head_in_the_cache() {
    let yarn = r#""rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}"#;
    let v3 = of_class("DeepseekV3ForCausalLM", &format!("{LATENT}, {yarn}, \"first_k_dense_replace\": 1"));
    let latent = v3.variant.latent.expect("latent attention");
    assert_eq!((v3.kv_heads, v3.head_dim, v3.rotary_dim, latent.query_rank), (1, 48, 16, Some(1536)));
    let mscale = 1.0 + 0.1 * 40f32.ln();
    assert!((v3.query_scale - mscale * mscale / 40f32.sqrt()).abs() < 1e-6 && v3.rope_interleaved);
    let experts = v3.experts.as_ref().expect("a mixture of experts");
    assert!(experts.routing.sigmoid && experts.routing.correction && experts.renormalise);
    assert_eq!((experts.layers.as_slice(), experts.routing.scale), ([false, true, true].as_slice(), 2.5));
    let v2 = of_class("DeepseekV2ForCausalLM", &format!(r#"{LATENT}, "q_lora_rank": null"#));
    let experts = v2.experts.as_ref().expect("a mixture of experts");
    assert!(!experts.routing.sigmoid && !experts.renormalise && !experts.routing.shared_gate);
    assert_eq!((v2.variant.latent.expect("latent attention").query_rank, experts.shared_width), (None, 2 * 1407));
    let glm =
        of_class("Glm4MoeLiteForCausalLM", &format!(r#"{LATENT}, "mlp_layer_types": ["dense", "sparse", "dense"]"#));
    assert_eq!(glm.experts.expect("a mixture of experts").layers, [false, true, false]);
    for (extra, refusal) in [
        (r#""topk_method": "group_limited_greedy""#, "topk_method: \"group_limited_greedy\"; supported is 'greedy'"),
        (r#""norm_topk_prob": true"#, "norm_topk_prob: true; supported is false"),
        (r#""moe_layer_freq": 2"#, "moe_layer_freq: 2; supported is 1"),
        (r#""attention_bias": true"#, "attention_bias: true; supported is false"),
    ] {
        let found = patched("DeepseekV2ForCausalLM", &format!("{LATENT}, {extra}")).map(drop);
        assert_eq!(found, Err(format!("unsupported: {refusal}")));
    }
    let refusal = patched("DeepseekV3ForCausalLM", &LATENT.replace("\"kv_lora_rank\": 32", "\"kv_lora_rank\": 4096"));
    assert_eq!(refusal.map(drop), Err("model configuration: head width: 4112, allowed are 1 to 1024".to_owned()));
}

#[test]
fn gguf_files_of_latent_attention_give_widths_of_heads_in_two_ways() {
    let mut writer = GgufWriter::new("deepseek2");
    for (key, value) in [
        ("attention.kv_lora_rank", 32),
        ("rope.dimension_count", 16),
        ("attention.key_length", 40),
        ("attention.value_length", 24),
        ("leading_dense_block_count", 1),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 32),
    ] {
        writer.u32(&format!("deepseek2.{key}"), value);
    }
    let older = writer.open().expect("it opens").config;
    let latent = older.variant.latent.expect("latent attention");
    assert_eq!((latent.nope_dim, latent.value_dim, older.head_dim, older.kv_heads), (24, 24, 48, 1));
    assert!(!older.experts.expect("a mixture of experts").routing.sigmoid);
    writer.u32("deepseek2.attention.key_length", 48).u32("deepseek2.attention.value_length", 32);
    writer.u32("deepseek2.attention.key_length_mla", 40).u32("deepseek2.attention.value_length_mla", 24);
    let newer = writer.u32("deepseek2.expert_gating_func", 2).open().expect("it opens").config;
    assert_eq!((newer.variant.latent, newer.head_dim), (Some(latent), 48));
    assert!(newer.experts.expect("a mixture of experts").routing.sigmoid);
    let refusal = writer.u32("deepseek2.expert_gating_func", 3).refusal();
    assert!(
        refusal.ends_with("deepseek2.expert_gating_func: 3; supported are 1 (softmax) and 2 (sigmoid)"),
        "{refusal}"
    );
}

#[test]
fn infinities_of_python_are_read_in_configurations() {
    let json = LLAMA.replacen(
        '{',
        r#"{"note": "an Infinity \" Infinity", "time_step_limit": [0.0, Infinity], "low": -Infinity,"#,
        1,
    );
    assert!(open_config(&json).is_ok());
    assert!(open_config(&json.replace("0.0, Infinity", "0.0, Infinitude")).is_err());
}
