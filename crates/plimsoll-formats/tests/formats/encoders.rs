//! Configurations of encoders: the meaning of their keys, and the values that are refused by name.

use crate::common::{GgufWriter, TempDir, open_config};
use plimsoll_formats::{Activation, Architecture, Checkpoint, Dense, DenseLayer, ModelConfig};
use serde_json::{Map, Value, json};

const MODERN: &str = r#"{"architectures": ["ModernBertModel"], "hidden_size": 64, "num_attention_heads": 4}"#;
const NOMIC: &str = r#"{"architectures": ["NomicBertModel"], "hidden_size": 64, "num_attention_heads": 4}"#;
const ORIGINAL: &str = r#"{"architectures": ["NomicBertModel"], "activation_function": "swiglu", "mlp_fc1_bias": false,
    "mlp_fc2_bias": false, "n_embd": 64, "n_head": 4, "n_inner": 200, "n_layer": 2, "n_positions": 8192,
    "pad_vocab_size_multiple": 64, "qkv_proj_bias": false, "rotary_emb_base": 500, "rotary_emb_fraction": 1.0, "vocab_size": 130}"#;

/// A configuration with members replaced or added.
fn with(base: &str, extra: Value) -> Result<ModelConfig, String> {
    let mut object: Map<String, Value> = serde_json::from_str(base).expect("the test's JSON is right");
    object.extend(extra.as_object().expect("an object").clone());
    open_config(&Value::Object(object).to_string()).map(|opened| opened.config).map_err(|error| error.to_string())
}

fn refused(base: &str, cases: &[(Value, &str)]) {
    for (extra, part) in cases {
        let refusal = with(base, extra.clone()).expect_err(part);
        assert!(refusal.contains(part), "{refusal:?} does not say {part:?}");
    }
}

#[test]
fn modernbert_has_the_defaults_of_transformers() {
    let config = with(MODERN, json!({})).expect("it opens");
    assert_eq!(config.architecture, Architecture::ModernBert);
    assert_eq!(
        (config.layers, config.intermediate_size, config.vocab_size, config.max_context),
        (22, 1152, 50_368, 8192)
    );
    assert_eq!((config.rope_theta, config.rope_local_theta, config.norm_eps), (160_000.0, 10_000.0, 1e-5));
    assert_eq!((config.sliding_window, config.hidden_act), (Some(128), Activation::Gelu));
    let global: Vec<usize> = (0..22).filter(|layer| !config.layer_is_sliding[*layer]).collect();
    assert_eq!(global, [0, 3, 6, 9, 12, 15, 18, 21]);
    assert!(!config.attention_bias && !config.attention_output_bias && !config.mlp_bias);
    let encoder = config.encoder.expect("an encoder");
    assert!(encoder.norms_before && encoder.gated && !encoder.norm_bias && encoder.labels.is_none());
    assert!(!encoder.classifier.mean && !encoder.classifier.bias && encoder.classifier.norm);
    assert_eq!((encoder.positions, encoder.token_types), (0, 0));
}

#[test]
fn modernbert_reads_its_layers_and_bases_in_either_form() {
    let kinds: Vec<&str> =
        (0..22).map(|layer| if layer == 1 { "full_attention" } else { "sliding_attention" }).collect();
    let rope = json!({"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 20.0}});
    let new = with(MODERN, json!({"layer_types": kinds, "rope_parameters": rope})).expect("it opens");
    assert_eq!((new.rope_theta, new.rope_local_theta), (5e5, 20.0));
    assert_eq!(new.layer_is_sliding.iter().filter(|sliding| !**sliding).count(), 1);
    let old = json!({"global_attn_every_n_layers": 11, "global_rope_theta": 5e5, "local_rope_theta": 20.0});
    let old = with(MODERN, old).expect("it opens");
    assert_eq!((old.rope_theta, old.rope_local_theta), (5e5, 20.0));
    assert!(!old.layer_is_sliding[11] && old.layer_is_sliding[12]);
}

#[test]
fn modernbert_refuses_what_would_change_the_answer() {
    refused(
        MODERN,
        &[
            (json!({"classifier_pooling": "max"}), "classifier_pooling \"max\"; supported are cls and mean"),
            (json!({"hidden_activation": "relu"}), "activation \"relu\""),
            (json!({"classifier_activation": "tanhshrink"}), "activation \"tanhshrink\""),
            (json!({"global_attn_every_n_layers": 0}), "global_attn_every_n_layers is 0"),
            (json!({"layer_types": ["full_attention"]}), "layer_types is not a list of 22 texts"),
            (json!({"local_attention": 0}), "sliding window: 0"),
            (json!({"local_rope_theta": null}), "local_rope_theta null"),
            (json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}), "rope_scaling in ModernBERT"),
            (json!({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}), "rope type \"dynamic\""),
            (json!({"num_attention_heads": 5}), "5 heads do not divide a hidden size of 64"),
            (json!({"is_decoder": true}), "is_decoder"),
        ],
    );
}

#[test]
fn nomic_bert_is_read_in_both_forms() {
    let config = with(NOMIC, json!({})).expect("it opens");
    assert_eq!(config.architecture, Architecture::NomicBert);
    assert_eq!(
        (config.layers, config.intermediate_size, config.vocab_size, config.max_context),
        (12, 3072, 30_528, 2048)
    );
    assert_eq!((config.rope_theta, config.norm_eps, config.hidden_act), (1000.0, 1e-12, Activation::Silu));
    let encoder = config.encoder.expect("an encoder");
    assert!(!encoder.norms_before && encoder.gated && encoder.norm_bias);
    assert_eq!((encoder.positions, encoder.token_types), (0, 2));
    let dynamic = json!({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0}});
    assert_eq!(with(NOMIC, dynamic).expect("it opens").rope_theta, 50.0);

    let config = with(ORIGINAL, json!({})).expect("it opens");
    // The published code rounds the width up to a multiple of 256, and the vocabulary to one of 64.
    assert_eq!((config.layers, config.intermediate_size, config.vocab_size, config.max_context), (2, 256, 192, 8192));
    assert_eq!((config.rope_theta, config.norm_eps, config.hidden_act), (500.0, 1e-5, Activation::Silu));
    let scaled = with(ORIGINAL, json!({"rotary_scaling_factor": 2})).expect("it opens");
    assert_eq!(scaled.max_context, 2048, "longer texts rotate otherwise");
    assert_eq!(with(ORIGINAL, json!({"activation_function": "geglu"})).expect("it opens").hidden_act, Activation::Gelu);
}

#[test]
fn nomic_bert_refuses_what_would_change_the_answer() {
    refused(
        NOMIC,
        &[
            (json!({"head_dim": 32}), "head_dim 32 with 4 heads of a hidden size of 64"),
            (json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}), "rope_parameters of nomic-bert"),
            (json!({"type_vocab_size": 0}), "type_vocab_size: 0"),
        ],
    );
    let flags =
        ["prenorm", "parallel_block", "parallel_block_tied_norm", "causal", "use_rms_norm", "rotary_emb_interleaved"];
    for flag in flags {
        let refusal = with(ORIGINAL, json!({flag: true})).expect_err(flag);
        assert!(refusal.contains(flag), "{refusal}");
    }
    refused(
        ORIGINAL,
        &[
            (json!({"activation_function": "gelu_new"}), "activation_function \"gelu_new\" of nomic-bert"),
            (json!({"activation_function": "gelu"}), "qkv_proj_bias false with this activation_function"),
            (json!({"qkv_proj_bias": true}), "qkv_proj_bias true with this activation_function"),
            (json!({"mlp_fc1_bias": null}), "mlp_fc1_bias true with this activation_function"),
            (json!({"rotary_emb_fraction": 0.5}), "rotary_emb_fraction other than 1"),
            (json!({"rotary_emb_scale_base": 512}), "rotary_emb_scale_base"),
            (json!({"num_heads_kv": 2}), "num_heads_kv other than n_head"),
            (json!({"moe_every_n_layers": 2}), "moe_every_n_layers with a gate"),
            (json!({"architectures": ["NomicBertForSequenceClassification"]}), "a classifier in the original layout"),
        ],
    );
}

/// nomic-embed-text-v2-moe has experts in its odd layers, biases and no gate.
#[test]
fn nomic_bert_has_experts_in_every_other_layer() {
    let with_experts = |change: Value| {
        let mut keys = json!({
            "activation_function": "gelu", "qkv_proj_bias": true, "mlp_fc1_bias": true, "mlp_fc2_bias": true, "n_inner": 100,
            "num_experts": 8, "moe_top_k": 2, "moe_every_n_layers": 2
        });
        keys.as_object_mut().expect("an object").extend(change.as_object().expect("an object").clone());
        with(ORIGINAL, keys)
    };
    let config = with_experts(json!({})).expect("it opens");
    let experts = config.experts.clone().expect("experts");
    assert_eq!((experts.count, experts.top_k, experts.width, experts.renormalise), (8, 2, 100, false));
    assert!(experts.layers.iter().enumerate().all(|(layer, has)| *has == (layer % 2 == 1)));
    assert!(config.attention_bias && config.attention_output_bias && config.mlp_bias && config.variant.ungated);
    assert!(with_experts(json!({"moe_every_n_layers": 0})).expect("it opens").experts.is_none());
    for (change, words) in [
        (json!({"moe_every_n_layers": 3}), "moe_every_n_layers 3 of nomic-bert; supported is 2"),
        (json!({"num_shared_experts": 1}), "num_shared_experts"),
        (json!({"expert_choice_router": true}), "expert_choice_router true"),
        (json!({"moe_normalize_expert_weights": true}), "moe_normalize_expert_weights true"),
        (json!({"moe_top_k": 9}), "experts per token: 9"),
    ] {
        let refusal = with_experts(change).expect_err(words);
        assert!(refusal.contains(words), "{refusal}");
    }
}

const GEMMA: &str = r#"{"architectures": ["Gemma3TextModel"], "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 512, "use_bidirectional_attention": true}"#;

#[test]
fn a_gemma_that_sees_later_positions_is_an_encoder() {
    let config = with(GEMMA, json!({})).expect("it opens");
    let encoder = config.encoder.expect("an encoder");
    assert_eq!((config.sliding_window, encoder.labels, encoder.dense), (Some(512), None, None));
    assert!(with(GEMMA, json!({"use_bidirectional_attention": false})).expect("it opens").encoder.is_none());
    let cases = [
        (json!({"architectures": ["Gemma3ForCausalLM"]}), "bidirectional attention"),
        (json!({"is_causal": false}), "bidirectional attention"),
    ];
    refused(GEMMA, &cases);
}

/// Opens a directory for planning: a configuration, `modules.json` and the folders that it names.
fn modules(kinds: &[&str], folders: &[(&str, &str)]) -> Result<Option<Dense>, String> {
    let dir = TempDir::new();
    dir.write("config.json", GEMMA);
    let module = |(number, kind): (usize, &&str)| json!({"type": format!("sentence_transformers.models.{kind}"), "path": format!("{number}_{kind}")});
    dir.write("modules.json", Value::from(kinds.iter().enumerate().map(module).collect::<Vec<_>>()).to_string());
    for (folder, config) in folders {
        std::fs::create_dir(dir.0.join(folder)).expect("a new folder");
        dir.write(&format!("{folder}/config.json"), config);
    }
    let opened = Checkpoint::open(&dir.0).map_err(|error| error.to_string())?;
    Ok(opened.config.encoder.expect("an encoder").dense)
}

#[test]
fn dense_layers_are_read_from_the_folders_that_modules_json_names() {
    let (mean, first) = (r#"{"pooling_mode_mean_tokens": true}"#, r#"{"pooling_mode_cls_token": true}"#);
    let wide = r#"{"in_features": 64, "out_features": 96, "bias": false,
        "activation_function": "torch.nn.modules.linear.Identity"}"#;
    let tanh = r#"{"in_features": 96, "out_features": 32}"#;
    let kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"];
    let found = modules(&kinds, &[("1_Pooling", mean), ("2_Dense", wide), ("3_Dense", tanh)]).expect("it opens");
    let dense = found.expect("dense layers");
    let layers = [DenseLayer { width: 96, bias: false, tanh: false }, DenseLayer { width: 32, bias: true, tanh: true }];
    assert_eq!((dense.mean, dense.layers, dense.width()), (true, layers.map(Some), 32));
    let one = modules(&kinds[..3], &[("1_Pooling", first), ("2_Dense", wide)]).expect("it opens").expect("a layer");
    assert_eq!((one.mean, one.width()), (false, 96));
    assert_eq!(modules(&kinds[..2], &[("1_Pooling", mean)]), Ok(None));
    let relu = r#"{"in_features": 64, "out_features": 96, "activation_function": "torch.nn.modules.activation.ReLU"}"#;
    for (folders, part) in [
        (
            &[("1_Pooling", mean), ("2_Dense", tanh), ("3_Dense", tanh)][..],
            "in_features of a dense layer is 96; what it reads has 64 elements",
        ),
        (&[("1_Pooling", mean), ("2_Dense", relu), ("3_Dense", tanh)], "ReLU"),
        (&[("1_Pooling", mean), ("2_Dense", "{}"), ("3_Dense", tanh)], "in_features is missing"),
    ] {
        let refusal = modules(&kinds, folders).expect_err(part);
        assert!(refusal.contains(part), "{refusal:?} does not say {part:?}");
    }
    let refusal = modules(&["Transformer", "Dense"], &[("1_Dense", wide)]).expect_err("no pooling");
    assert!(refusal.contains("dense layers and no pooling"), "{refusal}");
    let same = r#"{"in_features": 64, "out_features": 64}"#;
    let three = ["Transformer", "Pooling", "Dense", "Dense", "Dense"];
    let folders = [("1_Pooling", mean), ("2_Dense", same), ("3_Dense", same), ("4_Dense", same)];
    assert!(modules(&three, &folders).expect_err("three").contains("more than 2 dense layers"));
}

/// Returns an encoder of two layers as a GGUF file, with the tensors for what metadata does not say.
fn in_file(arch: &str) -> GgufWriter {
    let mut writer = GgufWriter::new(arch);
    writer.u32(&format!("{arch}.block_count"), 2);
    writer.f32(&format!("{arch}.attention.layer_norm_epsilon"), 1e-5);
    writer.tensor("token_embd.weight", &[64, 3]).tensor("token_types.weight", &[64]);
    writer
}

#[test]
fn bert_in_gguf_has_what_its_tensors_say() {
    let mut writer = in_file("bert");
    writer.tensor("position_embd.weight", &[64, 130]).tensor("blk.0.attn_q.bias", &[64]);
    let bert = writer.open().expect("it opens").config;
    assert_eq!((bert.architecture.clone(), bert.hidden_act), (Architecture::Bert, Activation::Gelu));
    assert_eq!((bert.max_context, bert.vocab_size, bert.norm_eps), (128, 3, 1e-5));
    assert!(bert.attention_bias && !bert.attention_output_bias && !bert.mlp_bias && !bert.variant.fused_qkv);
    let encoder = bert.encoder.expect("an encoder");
    assert_eq!((encoder.positions, encoder.first_position, encoder.token_types), (130, 0, 1));
    assert!(!encoder.gated && !encoder.norms_before && encoder.labels.is_none());
    assert!(writer.tensor("cls.output.weight", &[64]).refusal().contains("without the matrix before it"));
    writer.tensor("cls.weight", &[64, 64]).tensor("cls.bias", &[64]);
    let encoder = writer.open().expect("it opens").config.encoder.expect("an encoder");
    assert_eq!((encoder.labels, encoder.classifier.bias, encoder.classifier.mean), (Some(1), true, false));
}

#[test]
fn nomic_bert_in_gguf_rotates_and_has_a_gate() {
    let mut writer = in_file("nomic-bert");
    writer.f32("nomic-bert.rope.freq_base", 1000.0).tensor("blk.0.attn_qkv.weight", &[64, 192]);
    let nomic = writer.open().expect("it opens").config;
    assert_eq!((nomic.architecture.clone(), nomic.hidden_act), (Architecture::NomicBert, Activation::Silu));
    assert_eq!((nomic.rope_theta, nomic.variant.fused_qkv, nomic.rope_interleaved), (1000.0, true, false));
    let encoder = nomic.encoder.expect("an encoder");
    assert_eq!((encoder.positions, encoder.token_types, encoder.gated), (0, 1, true));
    assert_eq!(nomic.architecture.gguf_name(), "nomic-bert");
}

#[test]
fn modernbert_in_gguf_has_windows_and_the_first_layer_has_none() {
    let mut writer = in_file("modern-bert");
    writer.u32("modern-bert.block_count", 5).u32("modern-bert.attention.sliding_window", 10);
    let modern = writer.open().expect("it opens").config;
    assert_eq!(modern.layer_is_sliding, [false, true, true, false, true]);
    assert_eq!((modern.sliding_window, modern.rope_theta, modern.rope_local_theta), (Some(10), 160_000.0, 10_000.0));
    let encoder = modern.encoder.expect("an encoder");
    assert!(encoder.norms_before && encoder.gated && encoder.classifier.mean && encoder.classifier.norm);
    writer.bools("modern-bert.attention.sliding_window_pattern", &[true, false, true, true, false]);
    assert_eq!(writer.open().expect("it opens").config.layer_is_sliding, [true, false, true, true, false]);
}

#[test]
fn embeddinggemma_in_gguf_reads_its_dense_layers() {
    let mut writer = GgufWriter::new("gemma-embedding");
    writer.u32("gemma-embedding.attention.sliding_window", 512);
    let bare = writer.open().expect("it opens").config;
    assert_eq!((bare.encoder.expect("an encoder").dense, bare.sliding_window), (None, Some(512)));
    writer.tensor("dense_2.weight", &[64, 96]).tensor("dense_3.weight", &[96, 32]);
    assert!(
        writer.refusal().contains("dense layers where gemma-embedding.pooling_type is neither 1 (mean) nor 2 (cls)")
    );
    let dense = writer.u32("gemma-embedding.pooling_type", 1).open().expect("it opens").config.encoder;
    let dense = dense.expect("an encoder").dense.expect("dense layers");
    let layers = [96, 32].map(|width| Some(DenseLayer { width, bias: false, tanh: false }));
    assert_eq!((dense.mean, dense.layers), (true, layers));
}

#[test]
fn encoders_in_gguf_refuse_what_would_change_the_answer() {
    for arch in ["bert", "nomic-bert", "modern-bert"] {
        let causal = format!("{arch}.attention.causal");
        let refusal = in_file(arch).set(&causal, 7, [1]).refusal();
        assert!(refusal.contains(&format!("{causal} true; supported is false")), "{refusal}");
    }
    let refusal = in_file("bert").tensor("position_embd.weight", &[64, 96]).refusal();
    assert!(refusal.contains("context_length is 128, and position_embd has 96 rows"), "{refusal}");
    let mut mixture = in_file("nomic-bert-moe");
    let refusal = mixture.u32("nomic-bert-moe.expert_count", 8).refusal();
    assert!(refusal.contains("nomic-bert-moe.expert_used_count is missing"), "{refusal}");
    let refusal =
        mixture.u32("nomic-bert-moe.expert_used_count", 2).u32("nomic-bert-moe.moe_every_n_layers", 3).refusal();
    assert!(refusal.contains("moe_every_n_layers 3 of nomic-bert; supported is 2"), "{refusal}");
}

/// A file of Qwen3-Reranker has the rows of two answers and names the answers.
#[test]
fn a_decoder_with_other_answers_than_yes_and_no_is_refused() {
    let with = |arch: &str, rows: u64| {
        let mut writer = GgufWriter::new(arch);
        writer.tensor("cls.output.weight", &[64, rows]);
        writer
    };
    assert!(with("qwen3", 2).open().expect("it opens").config.variant.judges);
    assert!(!GgufWriter::new("qwen3").open().expect("it opens").config.variant.judges);
    let refusal = with("qwen3", 3).refusal();
    assert!(refusal.contains("cls.output has 3 rows; supported are 2"), "{refusal}");
    let refusal = with("qwen2", 2).refusal();
    assert!(refusal.contains("a classifier (cls.output) of Qwen2"), "{refusal}");
    let refusal = with("qwen3", 2).strings("qwen3.classifier.output_labels", &["no", "yes"]).refusal();
    assert!(refusal.contains(r#"output_labels is ["no", "yes"]; supported is ["yes", "no"]"#), "{refusal}");
}
