//! Configurations of InternVL in both of its forms, and what is refused.

use crate::common::{TempDir, open_config};
use plimsoll_formats::{Architecture, Checkpoint, Intern, ModelConfig, Vision, VisionKind};

fn opened(json: &str) -> Result<ModelConfig, String> {
    open_config(json).map(|checkpoint| checkpoint.config).map_err(|error| error.to_string())
}

/// InternVL3-1B in the form of transformers, with members of its encoder and around it.
fn intern(encoder: &str, top: &str) -> Result<ModelConfig, String> {
    opened(&format!(
        r#"{{"architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5, "image_seq_length": 256,
            "image_token_id": 151667, "model_type": "internvl", "projector_hidden_act": "gelu",
            "text_config": {{"hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
                "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
                "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": null,
                "use_sliding_window": false, "vocab_size": 151674}},
            "vision_config": {{"attention_bias": true, "hidden_act": "gelu", "hidden_size": 1024,
                "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-06,
                "model_type": "internvl_vision", "norm_type": "layer_norm", "num_attention_heads": 16,
                "num_hidden_layers": 24, "patch_size": [14, 14], "use_mean_pooling": true, "use_qk_norm": false{encoder}}},
            "vision_feature_layer": -1, "vision_feature_select_strategy": "default"{top}}}"#
    ))
}

#[test]
fn internvl_as_it_is_published() {
    let config = intern("", "").expect("it opens");
    assert_eq!((config.architecture.clone(), config.rope_sections), (Architecture::Qwen2, None));
    let vision = config.vision.expect("an encoder");
    let kind = Intern { rms_norm: false, qk_norm: false, attention_bias: true, last_norm: false, tiles: None };
    assert_eq!((vision.encoder, vision.table_side, vision.merge), (VisionKind::Intern(kind), 32, 2));
    assert_eq!((vision.patch_width(), vision.head_dim(), vision.tokens.image), (588, 64, 151_667));
    for (encoder, top, part) in [
        (r#", "norm_type": "batch_norm""#, "", "norm_type"),
        (r#", "patch_size": 15"#, "", "patches of 15 pixels do not divide tiles of 448"),
        (r#", "patch_size": 0"#, "", "patches of 0 pixels"),
        (r#", "layer_norm_eps": 1e-5"#, "", "layer_norm_eps"),
        (r#", "use_absolute_position_embeddings": false"#, "", "use_absolute_position_embeddings"),
        ("", r#", "downsample_ratio": 0.3"#, "downsample_ratio"),
        ("", r#", "downsample_ratio": 0.0"#, "downsample_ratio"),
        ("", r#", "vision_feature_layer": -2"#, "vision_feature_layer"),
        ("", r#", "vision_feature_select_strategy": "full""#, "vision_feature_select_strategy"),
    ] {
        let refusal = intern(encoder, top).expect_err(part);
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
}

/// InternVL3-1B in its original form, with members replaced.
fn intern_chat_json(changes: &[(&str, &str)]) -> String {
    let json = r#"{"architectures": ["InternVLChatModel"], "downsample_ratio": 0.5, "dynamic_image_size": true,
        "force_image_size": 448, "hidden_size": 896, "image_fold": null,
        "llm_config": {"architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643,
            "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
            "max_window_layers": 70, "model_type": "qwen2", "moe_config": null, "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1000000.0,
            "sliding_window": null, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151674},
        "max_dynamic_patch": 12, "min_dynamic_patch": 1, "model_type": "internvl_chat", "pad2square": false,
        "ps_version": "v2", "select_layer": -1, "template": "internvl2_5", "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_thumbnail": true,
        "vision_config": {"architectures": ["InternVisionModel"], "drop_path_rate": 0.1, "hidden_act": "gelu",
            "hidden_size": 1024, "image_size": 448, "initializer_factor": 0.1, "intermediate_size": 4096,
            "layer_norm_eps": 1e-06, "model_type": "intern_vit_6b", "moe_intermediate_size": 768,
            "norm_type": "layer_norm", "num_attention_heads": 16, "num_channels": 3, "num_experts": 8,
            "num_hidden_layers": 24, "patch_size": 14, "qk_normalization": false, "qkv_bias": true,
            "shared_expert_intermediate_size": 3072, "torch_dtype": "bfloat16"}}"#;
    changes.iter().fold(json.to_owned(), |json, (from, to)| {
        assert!(json.contains(from), "{from}");
        json.replace(from, to)
    })
}

#[test]
fn internvl_in_its_original_form_is_the_model_for_transformers() {
    let original = |changes: &[(&str, &str)]| opened(&intern_chat_json(changes)).expect("it opens");
    let (found, expected) = (original(&[]), intern("", "").expect("it opens"));
    assert_eq!((found.architecture, found.rope_scaling), (expected.architecture, expected.rope_scaling));
    let (found, expected) = (found.vision.expect("an encoder"), expected.vision.expect("an encoder"));
    let kind = Intern { rms_norm: false, qk_norm: false, attention_bias: true, last_norm: false, tiles: Some([1, 12]) };
    assert_eq!(found.encoder, VisionKind::Intern(kind));
    assert_eq!(Vision { encoder: expected.encoder, ..found }, expected);
    // The encoder of 6 billion parameters has the defaults of its class.
    let large = [
        (r#""norm_type": "layer_norm", "num_attention_heads": 16, "#, ""),
        (r#""qk_normalization": false, "qkv_bias": true,"#, ""),
        (r#""hidden_size": 1024, "#, ""),
        (r#""max_dynamic_patch": 12, "min_dynamic_patch": 1, "#, ""),
        ("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    ];
    let config = original(&large);
    assert_eq!((config.architecture, config.qk_norm), (Architecture::Qwen3, true));
    let vision = config.vision.expect("an encoder");
    assert_eq!((vision.hidden_size, vision.heads), (3200, 25));
    let kind = Intern { rms_norm: true, qk_norm: true, attention_bias: false, last_norm: false, tiles: Some([1, 12]) };
    assert_eq!(vision.encoder, VisionKind::Intern(kind));
    let few = original(&[(
        r#""max_dynamic_patch": 12, "min_dynamic_patch": 1"#,
        r#""max_dynamic_patch": 6, "min_dynamic_patch": 2"#,
    )]);
    let VisionKind::Intern(few) = few.vision.expect("an encoder").encoder else { panic!("another encoder") };
    assert_eq!(few.tiles, Some([2, 6]));
}

#[test]
fn original_internvl_without_code_for_it_is_refused() {
    for (from, to, parts) in [
        (
            "Qwen2ForCausalLM",
            "InternLM2ForCausalLM",
            ["\"InternLM2ForCausalLM\"; supported are Qwen2ForCausalLM", "-hf"],
        ),
        (r#""architectures": ["Qwen2ForCausalLM"], "#, "", ["", ""]),
        (r#""ps_version": "v2""#, r#""ps_version": "v1""#, ["ps_version \"v1\"; supported is v2", "use InternVL 2.5"]),
        (r#""ps_version": "v2", "#, "", ["ps_version \"v1\"", ""]),
        (r#""select_layer": -1"#, r#""select_layer": -4"#, ["select_layer -4; supported is -1", "use InternVL 2.5"]),
        (r#""pad2square": false"#, r#""pad2square": true"#, ["pad2square true", ""]),
        (
            r#""force_image_size": 448"#,
            r#""force_image_size": 336"#,
            ["force_image_size 336 where image_size is 448", ""],
        ),
        (r#""use_thumbnail": true"#, r#""use_thumbnail": false"#, ["use_thumbnail false", "max_dynamic_patch 1"]),
        (r#""max_dynamic_patch": 12"#, r#""max_dynamic_patch": 5000"#, ["max_dynamic_patch: 5000", "1 to 1024"]),
        (r#""min_dynamic_patch": 1"#, r#""min_dynamic_patch": 13"#, ["min_dynamic_patch: 13", "1 to 12"]),
        (r#""llm_config""#, r#""other""#, ["llm_config of InternVLChatModel is missing", ""]),
    ] {
        let read = opened(&intern_chat_json(&[(from, to)]));
        if parts[0].is_empty() {
            // `model_type` says as much.
            assert_eq!(read.expect("it opens").architecture, Architecture::Qwen2);
            continue;
        }
        let refusal = read.expect_err(parts[0]);
        assert!(parts.iter().all(|part| refusal.contains(part)), "{parts:?}: {refusal}");
    }
}

#[test]
fn the_image_token_of_original_internvl_is_the_tokenizers() {
    let with = |files: &[(&str, &str)]| {
        let dir = TempDir::new();
        files.iter().for_each(|(name, text)| drop(dir.write(name, text)));
        let checkpoint = Checkpoint::open(&dir.write("config.json", intern_chat_json(&[])));
        let config = checkpoint.map_err(|error| error.to_string())?.config;
        Ok::<_, String>(config.vision.expect("an encoder").tokens.image)
    };
    let added = ("added_tokens.json", r#"{"<img>": 5, "<IMG_CONTEXT>": 7}"#);
    let decoder = (
        "tokenizer_config.json",
        r#"{"added_tokens_decoder": {"5": {"content": "<img>"}, "8": {"content": "<IMG_CONTEXT>"}}}"#,
    );
    let tokenizer = (
        "tokenizer.json",
        r#"{"model": {}, "added_tokens": [{"id": 9, "content": "<IMG_CONTEXT>", "special": true}]}"#,
    );
    assert_eq!(with(&[added]), Ok(7));
    assert_eq!(with(&[("added_tokens.json", "{}"), decoder]), Ok(8));
    assert_eq!(with(&[("tokenizer_config.json", "{}"), tokenizer]), Ok(9));
    assert_eq!(with(&[]), Ok(151_667), "a configuration alone is planned");
    let refusal = with(&[("tokenizer.json", r#"{"added_tokens": []}"#)]).expect_err("there is none");
    assert!(refusal.contains("no token <IMG_CONTEXT>") && refusal.contains("fetch"), "{refusal}");
}
