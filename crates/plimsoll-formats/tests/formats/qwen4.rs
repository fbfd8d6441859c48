//! Configurations of Qwen4-Exp: their defaults, and refusals.

use crate::common::{GgufWriter, open_config};
use plimsoll_formats::{Architecture, Indexer, ModelConfig, Ngrams};

/// The parts without defaults.
const TEXT: &str = r#""hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "head_dim": 32, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5}"#;
const INDEXER: &str = r#""indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 24, "indexer_budget": 64,
    "indexer_compress_ratio": 16"#;

fn opened(members: &str) -> Result<ModelConfig, String> {
    let json = format!(r#"{{"architectures": ["Qwen4ExpForCausalLM"], {TEXT}, {members}}}"#);
    open_config(&json).map(|checkpoint| checkpoint.config).map_err(|error| error.to_string())
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = opened(&format!(r#"{INDEXER}, "eos_token_id": [7, 8], "ple_layer_ids": [3, 1]"#)).expect("it opens");
    assert_eq!((config.architecture.clone(), config.rotary_dim, config.draft_layers), (Architecture::Qwen4Exp, 16, 0));
    assert_eq!(config.delta_net.expect("recurrent layers").layers, [true, true, true, false]);
    let experts = config.experts.expect("experts");
    assert_eq!((experts.count, experts.top_k, experts.width, experts.shared_width), (512, 10, 512, 512));
    assert!(experts.renormalise && config.attention_gate && config.qk_norm && config.norm_weight_offset == 1.0);
    let qwen4 = config.variant.qwen4.expect("what the family has");
    assert_eq!((qwen4.streams, qwen4.mixer_rank, qwen4.sigmoid_gate), (4, 320, false));
    assert_eq!(qwen4.indexer, Indexer { heads: 4, head_dim: 24, block: 16, blocks: 4 });
    let ngrams = Ngrams {
        layers: vec![0, 2],
        width: 64,
        taps: 4,
        longest: 3,
        heads_per_order: 8,
        rows: 20_000_000,
        multiple: 128,
        seed: 1234,
        parts: 512,
        end: 7,
    };
    assert_eq!((ngrams.heads(), ngrams.history()), (16, 9));
    assert_eq!(ngrams.hashed_heads(0)[0].rows, 20_000_003, "the first prime number that is not below");
    assert_eq!(qwen4.ngrams, Some(ngrams));
    let plain = opened(INDEXER).expect("it opens");
    assert_eq!(plain.variant.qwen4.expect("what the family has").ngrams, None);
}

#[test]
fn attention_layers_are_named_as_published_or_as_saved() {
    let kinds = r#""layer_types": ["indexed_attention", "linear_attention", "full_attention", "linear_attention"]"#;
    let config = opened(&format!("{INDEXER}, {kinds}")).expect("it opens");
    assert_eq!(config.delta_net.expect("recurrent layers").layers, [false, true, false, true]);
}

#[test]
fn what_nothing_runs_is_refused_by_its_key() {
    let ngrams = r#""eos_token_id": 7, "ple_layer_ids": [1]"#;
    for (members, part) in [
        (r#""hidden_act": "silu""#.to_owned(), "indexer_budget is missing"),
        (INDEXER.replace("\"indexer_kv_heads\": 1", "\"indexer_kv_heads\": 2"), "indexer_kv_heads: 2; supported is 1"),
        (INDEXER.replace("64", "60"), "indexer_budget (60) is not a multiple of indexer_compress_ratio (16)"),
        (INDEXER.replace("24", "8"), "rotated part of an index head: 16, allowed are 1 to 8"),
        (format!(r#"{INDEXER}, "hc_count": 1"#), "hc_count: 1, allowed are 2 to 16"),
        (format!(r#"{INDEXER}, "hc_lowrank": 0"#), "hc_lowrank: 0"),
        (
            format!(r#"{INDEXER}, "output_gate_type": "tanh""#),
            "output_gate_type \"tanh\"; supported are sigmoid and silu",
        ),
        (format!(r#"{INDEXER}, "ple_layer_ids": [1]"#), "ple_layer_ids without eos_token_id"),
        (
            format!(r#"{INDEXER}, "eos_token_id": 7, "ple_layer_ids": [4]"#),
            "ple_layer_ids: 4, allowed are linear_attention",
        ),
        (
            format!(r#"{INDEXER}, "eos_token_id": 7, "ple_layer_ids": [0]"#),
            "ple_layer_ids is not a list of layers from 1 to 4",
        ),
        (
            format!(r#"{INDEXER}, {ngrams}, "ple_embed_dim": 40"#),
            "ple_embed_dim (40) is not a multiple of 16 n-gram heads",
        ),
        (format!(r#"{INDEXER}, {ngrams}, "ngram_size": 1"#), "ngram_size: 1, allowed are 2 to 8"),
        (format!(r#"{INDEXER}, {ngrams}, "ngram_size": 99"#), "ngram_size: 99, allowed are 1 to 8"),
        (format!(r#"{INDEXER}, {ngrams}, "ple_conv_kernel_size": 1"#), "ple_conv_kernel_size: 1"),
        (format!(r#"{INDEXER}, {ngrams}, "ngram_vocab_size_base": 0"#), "ngram_vocab_size_base: 0"),
        (format!(r#"{INDEXER}, {ngrams}, "split_ngram_parts": 0"#), "split_ngram_parts: 0"),
        (format!(r#"{INDEXER}, "quantization": {{"bits": 4, "group_size": 64}}"#), "Qwen4-Exp in MLX format"),
    ] {
        let refusal = opened(&members).expect_err(part);
        assert!(refusal.contains(part), "{refusal:?} does not say {part:?}");
    }
}

#[test]
fn gguf_files_name_an_architecture_that_no_model_code_runs() {
    let mut writer = GgufWriter::new("qwen4exp");
    writer.u32("qwen4exp.block_count", 4);
    let checkpoint = writer.open().expect("it opens");
    assert_eq!(checkpoint.config.architecture, Architecture::Other("qwen4exp".to_owned()));
}
