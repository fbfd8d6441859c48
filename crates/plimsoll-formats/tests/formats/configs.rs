//! Configurations: `config.json` of both generations of transformers, GGUF metadata, defaults and bounds.

use crate::common::{GgufWriter, LLAMA, TempDir, fixture, open_config};
use plimsoll_formats::{Activation, Architecture, Checkpoint, Dtype, Encoding, ModelConfig, RopeScaling, ScaleKind};

/// Returns the configuration of [`LLAMA`] as another class, with members replaced or added.
fn patched(class: &str, extra: &str) -> Result<ModelConfig, String> {
    let parse = |json: &str| serde_json::from_str::<serde_json::Map<_, _>>(json).expect("the test's JSON is right");
    let mut object = parse(&LLAMA.replace("LlamaForCausalLM", class));
    object.extend(parse(&format!("{{{extra}}}")));
    let json = serde_json::Value::Object(object).to_string();
    open_config(&json).map(|checkpoint| checkpoint.config).map_err(|error| error.to_string())
}

/// Returns the configuration of a Llama with these members.
fn with(extra: &str) -> Result<ModelConfig, String> {
    patched("LlamaForCausalLM", extra)
}

/// Returns the configuration of a model of this class with these members.
fn of_class(class: &str, extra: &str) -> ModelConfig {
    patched(class, extra).unwrap_or_else(|error| panic!("{class}: {error}"))
}

#[test]
fn a_lone_config_is_enough_to_plan() {
    let dir = TempDir::new();
    dir.write("config.json", LLAMA);
    for path in [dir.0.clone(), dir.0.join("config.json")] {
        let checkpoint = Checkpoint::open(&path).expect("a configuration alone opens");
        assert!(!checkpoint.has_data());
        assert_eq!((checkpoint.tensors().count(), checkpoint.dir()), (0, dir.0.as_path()));
    }
}

#[test]
fn llama_has_the_defaults_of_transformers() {
    let config = with("").expect("it opens");
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (4, 4, 16));
    assert_eq!((config.norm_eps, config.rope_theta, config.max_context), (1e-6, 10_000.0, 2048));
    assert_eq!((config.query_scale, config.embedding_scale, config.norm_weight_offset), (0.25, 1.0, 0.0));
    assert_eq!((config.hidden_act, config.rope_scaling), (Activation::Silu, RopeScaling::None));
    assert!(!config.tie_word_embeddings && !config.rope_interleaved && !config.qk_norm);
    assert!(!config.attention_bias && !config.attention_output_bias && !config.mlp_bias);
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (None, [].as_slice()));
    let biased = with(r#""attention_bias": true, "mlp_bias": true"#).expect("it opens");
    assert!(biased.attention_bias && biased.attention_output_bias && biased.mlp_bias);
}

#[test]
fn rope_reads_the_same_in_old_and_new_form() {
    let llama3 = r#""factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192"#;
    let old = with(&format!(r#""rope_theta": 5e5, "rope_scaling": {{"rope_type": "llama3", {llama3}}}"#));
    let new = with(&format!(r#""rope_parameters": {{"rope_theta": 5e5, "rope_type": "llama3", {llama3}}}"#));
    let old = old.expect("the old form opens");
    assert_eq!(old.rope_theta, 500_000.0);
    let want = RopeScaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original: 8192 };
    assert_eq!(old.rope_scaling, want);
    assert_eq!(new.as_ref(), Ok(&old));
    let both = with(&format!(
        r#""rope_parameters": {{"rope_theta": 5e5, "rope_type": "llama3", {llama3}}}, "rope_scaling": {{}}"#
    ));
    assert_eq!(both.as_ref(), Ok(&old), "an empty one says nothing");
    let ancient = with(r#""rope_scaling": {"type": "linear", "factor": 2}"#).expect("the oldest form opens");
    assert_eq!(ancient.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    let refusal = with(r#""rope_scaling": {"type": "other", "factor": 2}"#).expect_err("another type is refused");
    assert_eq!(refusal, "unsupported: rope type \"other\"");
    assert_eq!(with(r#""partial_rotary_factor": 0.5"#), Err("unsupported: partial_rotary_factor".to_owned()));
}

#[test]
fn dynamic_rope_changes_nothing_within_the_context() {
    let dynamic = |more: &str| with(&format!(r#""rope_scaling": {{"type": "dynamic"{more}}}"#));
    let config = dynamic(r#", "factor": 2.0"#).expect("it opens");
    assert_eq!((config.rope_scaling, config.rope_theta, config.max_context), (RopeScaling::None, 10_000.0, 2048));
    let refusal = Err("unsupported: rope type \"dynamic\"".to_owned());
    assert_eq!(dynamic(""), refusal, "what it is stretched by is missing");
    assert_eq!(dynamic(r#", "factor": 2.0, "original_max_position_embeddings": 1024"#), refusal);
}

#[test]
fn yarn_resolves_its_attention_factor() {
    let yarn = |extra: &str| {
        let scaling = format!(
            r#""max_position_embeddings": 131072,
            "rope_scaling": {{"rope_type": "yarn", "original_max_position_embeddings": 32768 {extra}}}"#
        );
        match with(&scaling).expect("it opens").rope_scaling {
            RopeScaling::Yarn(yarn) => yarn,
            other => panic!("{other:?} is not YaRN"),
        }
    };
    let plain = yarn(r#", "factor": 4.0"#);
    assert_eq!((plain.factor, plain.original, plain.beta_fast, plain.beta_slow), (4.0, 32_768, 32.0, 1.0));
    assert!((plain.attention_factor - 1.138_629_4).abs() < 1e-6 && plain.truncate);
    assert_eq!(yarn("").factor, 4.0, "an absent factor is the ratio of the contexts");
    assert_eq!(yarn(r#", "factor": 4.0, "attention_factor": 0.5, "truncate": false"#).attention_factor, 0.5);
    let scaled = yarn(r#", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.0"#);
    let want = (0.1 * 0.707 * 4f32.ln() + 1.0) / (0.1 * 4f32.ln() + 1.0);
    assert!((scaled.attention_factor - want).abs() < 1e-6);
}

#[test]
fn sliding_windows_follow_their_family() {
    assert_eq!(with(r#""sliding_window": 16"#).expect("it opens").sliding_window, None, "Llama has no window");
    let mistral = of_class("MistralForCausalLM", r#""sliding_window": 16, "num_key_value_heads": 4"#);
    assert_eq!((mistral.architecture, mistral.sliding_window), (Architecture::Llama, Some(16)));
    assert_eq!(mistral.layer_is_sliding, [true, true]);
    let mistral = of_class("MistralForCausalLM", r#""sliding_window": null, "num_key_value_heads": 2"#);
    assert_eq!((mistral.sliding_window, mistral.kv_heads), (None, 2));
    for class in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        let qwen = of_class(class, r#""use_sliding_window": true, "max_window_layers": 0"#);
        assert_eq!(qwen.sliding_window, Some(4096), "the default of {class}");
    }
    let qwen = of_class("Qwen2ForCausalLM", r#""sliding_window": 16, "use_sliding_window": false"#);
    assert_eq!(qwen.sliding_window, None);
    assert!(qwen.attention_bias && !qwen.attention_output_bias);
    let qwen =
        of_class("Qwen2ForCausalLM", r#""sliding_window": 16, "use_sliding_window": true, "max_window_layers": 1"#);
    assert_eq!((qwen.sliding_window, qwen.layer_is_sliding.as_slice()), (Some(16), [false, true].as_slice()));
    let qwen = of_class("Qwen3ForCausalLM", r#""head_dim": 32"#);
    assert_eq!((qwen.architecture, qwen.head_dim, qwen.qk_norm), (Architecture::Qwen3, 32, true));
}

#[test]
fn gemma_nests_omits_and_rounds() {
    let config = Checkpoint::open(&fixture("mlx")).expect("the fixture opens").config;
    assert_eq!(config.architecture, Architecture::Family("Gemma 3"));
    assert_eq!((config.vocab_size, config.max_context, config.kv_heads), (262_208, 131_072, 2));
    assert_eq!((config.rope_theta, config.rope_local_theta), (1_000_000.0, 10_000.0));
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(config.layer_is_sliding, [true, true, true, true, true, false, true]);
    assert_eq!((config.sliding_window, config.query_scale), (Some(32), 0.0625));
    assert_eq!((config.hidden_act, config.norm_weight_offset), (Activation::GeluTanh, 1.0));
    assert!(config.qk_norm && config.tie_word_embeddings);
    assert_eq!(config.eos_token_ids, [1, 106], "from around the text configuration");

    let scale = |extra| of_class("Gemma3ForCausalLM", extra).embedding_scale;
    assert_eq!(scale(r#""head_dim": 16, "hidden_size": 640, "torch_dtype": "bfloat16""#), 640f32.sqrt());
    let new = of_class(
        "Gemma3ForCausalLM",
        r#""layer_types": ["full_attention", "sliding_attention"], "query_pre_attn_scalar": 64,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": null, "head_dim": 16,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}"#,
    );
    assert_eq!((new.rope_theta, new.rope_local_theta, new.query_scale), (2e6, 2e4, 0.125));
    assert_eq!(new.rope_scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((new.layer_is_sliding.as_slice(), new.final_logit_softcap), ([false, true].as_slice(), Some(30.0)));
    assert_eq!(new.attn_logit_softcap, None);
}

#[test]
fn encodings_can_be_planned_without_weights() {
    let quantization = r#""torch_dtype": "float16", "quantization": {"bits": 4, "group_size": 64,
        "language_model.lm_head": {"bits": 8, "group_size": 32}, "model.layers.0.mlp.down_proj": false}"#;
    let config = with(quantization).expect("it opens");
    assert_eq!(config.torch_dtype, Some(Dtype::F16));
    let bits = |name| match config.planned_encoding(name, &[64, 64]) {
        Encoding::Quant(layout) => (layout.code_bits, layout.group, layout.scales),
        float => panic!("{name} is {float:?}"),
    };
    assert_eq!(bits("model.layers.0.mlp.up_proj.weight"), (4, 64, ScaleKind::F16));
    assert_eq!(bits("lm_head.weight"), (8, 32, ScaleKind::F16));
    assert_eq!(config.planned_encoding("model.layers.0.mlp.down_proj.weight", &[64, 96]), Encoding::F16);
    assert_eq!(config.planned_encoding("model.norm.weight", &[64]), Encoding::F16);
    assert_eq!(with("").expect("it opens").planned_encoding("lm_head.weight", &[64, 64]), Encoding::BF16);
}

#[test]
fn sizes_out_of_bounds_are_refused_by_name() {
    for (extra, part) in [
        (r#""num_hidden_layers": 1001"#, "layers: 1001"),
        (r#""num_hidden_layers": 0"#, "layers: 0"),
        (r#""num_hidden_layers": 1e300"#, "num_hidden_layers is not a non-negative integer"),
        (r#""hidden_size": 1000000"#, "hidden size: 1000000, allowed are 1 to 131072"),
        (r#""hidden_size": "64""#, "hidden_size is not"),
        (r#""num_attention_heads": 0"#, "attention heads: 0"),
        (r#""num_key_value_heads": 3"#, "3 key-value heads do not divide 4"),
        (r#""num_key_value_heads": 8"#, "key-value heads: 8, allowed are 1 to 4"),
        (r#""head_dim": 15"#, "head width of 15"),
        (r#""head_dim": 4096"#, "head width: 4096"),
        (r#""vocab_size": 100000000"#, "vocabulary"),
        (r#""rms_norm_eps": 0"#, "norm epsilon"),
        (r#""rope_theta": -1"#, "rope theta: -1"),
        (r#""rope_scaling": {"rope_type": "linear", "factor": 0}"#, "rope factor: 0"),
        (r#""max_position_embeddings": 18446744073709551615"#, "context"),
        (r#""hidden_act": "relu""#, "activation \"relu\""),
        (r#""eos_token_id": "</s>""#, "eos_token_id"),
        (r#""use_bidirectional_attention": true"#, "bidirectional"),
        (r#""is_causal": false"#, "bidirectional"),
    ] {
        let refusal = with(extra).expect_err(part);
        assert!(refusal.contains(part), "{refusal:?} does not say {part:?}");
    }
}

#[test]
fn unknown_architectures_are_named() {
    let refusal = open_config(r#"{"architectures": ["MambaForCausalLM"], "d_model": 64}"#).map(drop);
    let known = format!("; supported are {}", plimsoll_formats::supported_models());
    let refusal = refusal.expect_err("unknown").to_string();
    assert_eq!(refusal, format!("unsupported: architecture \"MambaForCausalLM\"{known}"));
    let other = of_class("PhiForCausalLM", r#""x": 1"#).architecture;
    assert_eq!(other, Architecture::Other("PhiForCausalLM".to_owned()));
    let mut writer = GgufWriter::new("mamba");
    writer.keys.retain(|(key, ..)| !key.ends_with("head_count"));
    assert_eq!(writer.refusal(), format!("unsupported: GGUF architecture \"mamba\"{known}"));
}

#[test]
fn gguf_gemma_follows_llama_cpp() {
    let mut writer = GgufWriter::new("gemma3");
    writer.u32("gemma3.attention.sliding_window", 32).f32("gemma3.rope.freq_base", 1e6);
    writer.f32("gemma3.rope.scaling.factor", 8.0).u32("gemma3.attention.key_length", 16);
    let config = writer.open().expect("it opens").config;
    assert_eq!((config.rope_theta, config.rope_local_theta), (1e6, 1e4));
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(config.layer_is_sliding.iter().filter(|&&sliding| !sliding).count(), 2);
    assert!(!config.layer_is_sliding[5] && !config.layer_is_sliding[11]);
    assert_eq!((config.embedding_scale, config.norm_weight_offset, config.query_scale), (8.0, 0.0, 0.25));
    assert!(!config.rope_interleaved && config.qk_norm);
    assert_eq!(config.vocab_size, 3, "from the token list");

    let pattern: Vec<bool> = (0..12).map(|layer| layer == 3).collect();
    let explicit = writer.bools("gemma3.attention.sliding_window_pattern", &pattern).open().expect("it opens").config;
    assert_eq!(explicit.layer_is_sliding, pattern);
    let large = writer.u32("gemma3.block_count", 62).u32("gemma3.attention.sliding_window_pattern", 6);
    assert_eq!(large.u32("gemma3.embedding_length", 400).open().expect("it opens").config.query_scale, 0.1);
}

#[test]
fn gguf_biases_and_heads_are_read_off_the_tensors() {
    let mut writer = GgufWriter::new("qwen2");
    writer.tensor("blk.0.attn_q.bias", &[64]).tensor("token_embd.weight", &[64, 5]).tensor("output.weight", &[64, 5]);
    let config = writer.open().expect("it opens").config;
    assert!(config.attention_bias && !config.tie_word_embeddings && !config.rope_interleaved);
    assert_eq!(config.vocab_size, 5, "from the embedding table");
    let refusal = writer.u32("qwen2.rope.dimension_count", 8).refusal();
    assert!(refusal.contains("rope.dimension_count is 8"), "{refusal}");
}

#[test]
fn split_gguf_files_are_one_checkpoint() {
    let dir = TempDir::new();
    let mut first = GgufWriter::new("llama");
    first.u32("split.count", 2).u32("split.no", 0).tensor("token_embd.weight", &[64, 3]);
    let mut second = GgufWriter { keys: Vec::new(), ..GgufWriter::new("llama") };
    second.u32("split.count", 2).u32("split.no", 1).tensor("output_norm.weight", &[64]);
    let path = dir.write("m-00001-of-00002.gguf", first.bytes());
    let missing = Checkpoint::open(&path).err().expect("the second part is missing").to_string();
    assert!(missing.contains("m-00002-of-00002.gguf"), "{missing}");
    let last = dir.write("m-00002-of-00002.gguf", second.bytes());
    for path in [&path, &last, &dir.0] {
        let checkpoint = Checkpoint::open(path).expect("both parts are there");
        let names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
        assert_eq!(names, ["model.embed_tokens.weight", "model.norm.weight"]);
    }
    std::fs::remove_file(&path).expect("the first part is there");
    let missing = Checkpoint::open(&last).err().expect("the first part is missing").to_string();
    assert!(missing.contains("m-00001-of-00002.gguf"), "{missing}");
}
