//! Configurations of mixtures of experts and hybrids: the published forms, their defaults, and refusals.

use crate::common::{GgufWriter, open_config};
use plimsoll_formats::{Architecture, DeltaNet, Encoding, Experts, ModelConfig, Routing};

/// The parts of a configuration that every text model has.
const TEXT: &str = r#""hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "eos_token_id": 7"#;

fn opened(json: &str) -> Result<ModelConfig, String> {
    open_config(json).map(|checkpoint| checkpoint.config).map_err(|error| error.to_string())
}

/// A flat configuration of this class with these members.
fn flat(class: &str, extra: &str) -> Result<ModelConfig, String> {
    opened(&format!(r#"{{"architectures": ["{class}"], {TEXT}, {extra}}}"#))
}

/// A Qwen 3.5 MoE configuration with these members in its text part.
fn nested(extra: &str) -> Result<ModelConfig, String> {
    opened(&format!(
        r#"{{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "text_config": {{{TEXT}, "model_type": "qwen3_5_moe_text", {extra}}}, "vision_config": {{"depth": 27}}}}"#
    ))
}

#[test]
fn defaults_are_those_of_transformers() {
    let moe = flat("Qwen3MoeForCausalLM", r#""intermediate_size": 128"#).expect("it opens");
    let layers = vec![true; 4];
    let experts = Experts {
        count: 128,
        top_k: 8,
        width: 768,
        shared_width: 0,
        renormalise: false,
        routing: Routing::default(),
        alternating: false,
        biases: false,
        layers,
    };
    assert_eq!((moe.architecture.clone(), moe.experts, moe.delta_net), (Architecture::Qwen3Moe, Some(experts), None));
    assert!(moe.qk_norm && !moe.attention_gate && moe.norm_weight_offset == 0.0);
    assert_eq!((moe.head_dim, moe.rotary_dim), (16, 16));

    let next = flat("Qwen3NextForCausalLM", r#""intermediate_size": 128"#).expect("it opens");
    let experts = next.experts.expect("experts");
    assert_eq!((experts.count, experts.top_k, experts.shared_width), (512, 10, 512));
    assert!(experts.renormalise && next.attention_gate && next.qk_norm);
    assert_eq!((next.head_dim, next.rotary_dim, next.norm_weight_offset, next.draft_layers), (256, 64, 1.0, 1));
    let delta = DeltaNet {
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        taps: 4,
        tiled: false,
        layers: vec![true, true, true, false],
    };
    assert_eq!(next.delta_net, Some(delta));
}

#[test]
fn the_family_says_whether_routers_renormalise() {
    // Nothing in the text part names the family.
    let thinker = |extra: &str| {
        let text = format!(r#"{{{TEXT}, "intermediate_size": 128{extra}}}"#);
        let config = opened(&format!(
            r#"{{"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": {{"text_config": {text}}}}}"#
        ));
        config.expect("it opens").experts.expect("experts").renormalise
    };
    assert_eq!((thinker(""), thinker(r#", "norm_topk_prob": false"#)), (true, false));
    let seeing = |extra: &str| {
        let text = format!(r#"{{{TEXT}, "intermediate_size": 128{extra}}}"#);
        let class = "Qwen3VLMoeForConditionalGeneration";
        let config = opened(&format!(r#"{{"architectures": ["{class}"], "text_config": {text}}}"#));
        config.expect("it opens").experts.expect("experts").renormalise
    };
    assert_eq!(
        (seeing(""), seeing(r#", "norm_topk_prob": false"#)),
        (true, true),
        "transformers has no such key there"
    );
}

#[test]
fn the_text_of_qwen3_5_is_nested() {
    let config = nested(
        r#""layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mtp_num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 32,
        "rope_parameters": {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "rope_theta": 1e7,
                            "rope_type": "default", "mrope_interleaved": true}"#,
    )
    .expect("it opens");
    assert_eq!((config.architecture, config.rotary_dim, config.draft_layers), (Architecture::Qwen3_5Moe, 8, 1));
    assert_eq!((config.rope_theta, config.eos_token_ids.as_slice()), (1e7, [7].as_slice()));
    assert_eq!(config.delta_net.expect("recurrent layers").layers, [true, false, true, false]);
    let experts = config.experts.expect("experts");
    assert!(experts.renormalise);
    assert_eq!((experts.count, experts.top_k, experts.width), (8, 3, 512));
}

#[test]
fn plain_layers_stand_where_they_are_named() {
    let extra = r#""intermediate_size": 128, "decoder_sparse_step": 2, "mlp_only_layers": [3]"#;
    let config = flat("Qwen3MoeForCausalLM", extra).expect("it opens");
    assert_eq!(config.experts.expect("experts").layers, [false, true, false, false]);
}

#[test]
fn stacked_experts_are_planned_as_quantized_and_convolutions_are_not() {
    let config = nested(r#""quantization": {"bits": 4, "group_size": 64}"#).expect("it opens");
    let bits = |name: &str, shape: &[usize]| match config.planned_encoding(name, shape) {
        Encoding::Quant(layout) => layout.code_bits,
        _ => 16,
    };
    assert_eq!(bits("model.layers.0.mlp.experts.gate_proj.weight", &[4, 64, 64]), 4);
    assert_eq!(bits("model.layers.0.linear_attn.conv1d.weight", &[64, 1, 4]), 16);
}

#[test]
fn variants_that_nothing_runs_are_refused_by_their_key() {
    for (extra, part) in [
        (r#""attn_output_gate": false"#, "unsupported: attn_output_gate: false"),
        (r#""attention_bias": true"#, "unsupported: attention_bias: true"),
        (r#""mtp_use_dedicated_embeddings": true"#, "unsupported: mtp_use_dedicated_embeddings: true"),
        (r#""mtp_num_hidden_layers": 9"#, "draft layers: 10, allowed are 1 to 9"),
        (r#""partial_rotary_factor": 1.5"#, "partial_rotary_factor: 1.5"),
        (r#""linear_num_key_heads": 3, "linear_num_value_heads": 4"#, "linear_num_key_heads (3) does not divide"),
        (r#""linear_num_value_heads": 0"#, "linear_num_value_heads: 0"),
        (r#""linear_conv_kernel_dim": 99"#, "linear_conv_kernel_dim: 99"),
        (r#""full_attention_interval": 0"#, "full_attention_interval is 0"),
        (r#""full_attention_interval": 1"#, "linear_attention and full_attention"),
        (r#""layer_types": ["linear_attention"]"#, "layer_types is not a list of 4"),
        (r#""layer_types": ["linear_attention", "mamba", "full_attention", "full_attention"]"#, "layer type \"mamba\""),
        (r#""num_experts": 4, "num_experts_per_tok": 5"#, "experts per token: 5, allowed are 1 to 4"),
        (r#""num_experts": 100000"#, "experts: 100000"),
        (r#""num_experts": 4000, "num_hidden_layers": 40"#, "experts of all layers: 160000, allowed are 1 to 131072"),
        (r#""mlp_only_layers": [4]"#, "mlp_only_layers is not a list of layers below 4"),
        (r#""decoder_sparse_step": 0"#, "decoder_sparse_step is 0"),
    ] {
        let refusal = nested(extra).expect_err(part);
        assert!(refusal.contains(part), "{refusal:?} does not say {part:?}");
    }
}

#[test]
fn gguf_keeps_the_draft_head_among_its_blocks() {
    let mut writer = GgufWriter::new("qwen35");
    writer.u32("qwen35.block_count", 5).u32("qwen35.nextn_predict_layers", 1).u32("qwen35.attention.key_length", 32);
    writer.u32("qwen35.rope.dimension_count", 8).u32("qwen35.ssm.time_step_rank", 4).u32("qwen35.ssm.inner_size", 64);
    writer.u32("qwen35.ssm.group_count", 2).u32("qwen35.ssm.state_size", 16).u32("qwen35.ssm.conv_kernel", 4);
    writer.tensor("blk.4.nextn.eh_proj.weight", &[128, 64]).tensor("blk.4.attn_q.weight", &[64, 256]);
    writer.tensor("blk.3.attn_q.weight", &[64, 256]);
    let checkpoint = writer.open().expect("it opens");
    let mut names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["model.layers.3.self_attn.q_proj.weight", "mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"]
    );
    let config = &checkpoint.config;
    assert_eq!((config.layers, config.draft_layers, config.rotary_dim), (4, 1, 8));
    assert_eq!((config.norm_weight_offset, config.attention_gate), (0.0, true));
    let delta = config.delta_net.as_ref().expect("recurrent layers");
    assert_eq!(
        (delta.value_dim, delta.tiled, delta.layers.as_slice()),
        (16, true, [true, true, true, false].as_slice())
    );
}
