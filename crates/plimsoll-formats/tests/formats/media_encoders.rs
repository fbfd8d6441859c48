//! Published configurations of vision and audio models, and refusals.

use crate::common::open_config;
use plimsoll_formats::{
    Activation, Architecture, AudioChunks, AudioKind, MediaTokens, ModelConfig, Pixtral, RopeSections, Vision,
    VisionKind,
};

fn opened(json: &str) -> Result<ModelConfig, String> {
    open_config(json).map(|checkpoint| checkpoint.config).map_err(|error| error.to_string())
}

const TOKENS: &str = r#""image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653"#;
const IDS: MediaTokens = MediaTokens { image: 151_655, video: 151_656 };

/// Qwen2.5-VL-7B, with members of its encoder replaced or added.
fn qwen2_5(extra: &str) -> Result<ModelConfig, String> {
    opened(&format!(
        r#"{{"architectures": ["Qwen2_5_VLForConditionalGeneration"], {TOKENS}, "hidden_act": "silu",
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 128000,
            "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
            "vision_config": {{"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
                "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2, "temporal_patch_size": 2{extra}}},
            "rope_scaling": {{"type": "mrope", "mrope_section": [16, 24, 24]}}, "vocab_size": 152064}}"#
    ))
}

#[test]
fn qwen2_5_vl_as_it_is_published() {
    let config = qwen2_5("").expect("it opens");
    assert_eq!(
        (config.architecture.clone(), config.attention_bias, config.rope_theta),
        (Architecture::Qwen2, true, 1e6)
    );
    assert_eq!(config.rope_sections, Some(RopeSections { sizes: [16, 24, 24], interleaved: false }));
    let expected = Vision {
        encoder: VisionKind::Qwen2_5,
        depth: 32,
        hidden_size: 1280,
        heads: 16,
        intermediate_size: 3420,
        act: Activation::Silu,
        channels: 3,
        patch: 14,
        temporal: 2,
        merge: 2,
        table_side: 0,
        deepstack: Vec::new(),
        window: Some(112),
        full_layers: vec![7, 15, 23, 31],
        steps_per_second: Some(2),
        tokens: IDS,
    };
    assert_eq!((expected.head_dim(), expected.patch_width()), (80, 1176));
    assert_eq!(config.vision, Some(expected));
}

/// The thinker of a Qwen2.5-Omni, with additional keys of its audio encoder.
fn omni2_5(class: &str, audio: &str) -> Result<ModelConfig, String> {
    opened(&format!(
        r#"{{"architectures": ["{class}"], "model_type": "qwen2_5_omni", "thinker_config": {{
            "model_type": "qwen2_5_omni_thinker", "audio_config": {{"output_dim": 2048{audio}}},
            "vision_config": {{"hidden_size": 1280, "out_hidden_size": 2048}}, "text_config": {{"hidden_size": 2048,
            "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
            "vocab_size": 151936}}}}}}"#
    ))
}

#[test]
fn qwen2_5_omni_hears_and_sees_with_the_defaults_of_transformers() {
    for class in ["Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"] {
        let config = omni2_5(class, "").expect("it opens");
        assert_eq!((config.architecture.clone(), config.rope_theta), (Architecture::Qwen2, 1e6));
        assert_eq!((config.sliding_window, config.eos_token_ids.clone()), (None, vec![151_645]));
        let vision = config.vision.expect("a vision encoder");
        assert_eq!((vision.encoder, vision.steps_per_second, vision.tokens), (VisionKind::Omni2_5, Some(25), IDS));
        assert_eq!((vision.window, vision.full_layers), (Some(112), vec![7, 15, 23, 31]));
        let audio = config.audio.expect("an audio encoder");
        assert_eq!((audio.depth, audio.hidden_size, audio.bands, audio.placeholder), (32, 1280, 128, 151_646));
        assert_eq!(audio.encoder, AudioKind::Chunks(AudioChunks { half_window: 100 }));
        assert_eq!([2, 3, 200, 201, 206].map(|frames| audio.rows(frames)), [0, 1, 50, 50, 51]);
    }
    let refused = |audio| omni2_5("Qwen2_5OmniModel", audio).expect_err("refused");
    let error = refused(r#", "n_window": 100, "max_source_positions": 99"#);
    assert!(error.contains("n_window: 100 rows, allowed are 99"), "{error}");
    assert!(refused(r#", "scale_embedding": true"#).contains("scale_embedding true; supported is false"));
    assert!(refused(r#", "n_window": 5000, "max_source_positions": 5000"#).contains("n_window"));
}

#[test]
fn qwen2_vl_as_it_is_published() {
    let config = opened(&format!(
        r#"{{"architectures": ["Qwen2VLForConditionalGeneration"], {TOKENS}, "hidden_size": 1536,
            "intermediate_size": 8960, "model_type": "qwen2_vl", "num_attention_heads": 12, "num_hidden_layers": 28,
            "num_key_value_heads": 2, "rope_theta": 1000000.0, "tie_word_embeddings": true,
            "vision_config": {{"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
                "temporal_patch_size": 2}},
            "rope_scaling": {{"type": "mrope", "mrope_section": [16, 24, 24]}}, "vocab_size": 151936}}"#
    ));
    let vision = config.expect("it opens").vision.expect("an encoder");
    assert_eq!((vision.encoder, vision.act), (VisionKind::Qwen2, Activation::GeluQuick));
    assert_eq!((vision.hidden_size, vision.intermediate_size, vision.window), (1280, 5120, None));
}

/// Qwen3-VL-4B, with members of its text model and of its encoder.
fn qwen3(text: &str, encoder: &str) -> Result<ModelConfig, String> {
    opened(&format!(
        r#"{{"architectures": ["Qwen3VLForConditionalGeneration"], {TOKENS}, "model_type": "qwen3_vl",
            "text_config": {{"head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
                "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 32,
                "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 5000000, "vocab_size": 151936,
                "rope_scaling": {{"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"}}
                {text}}},
            "tie_word_embeddings": true,
            "vision_config": {{"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl",
                "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16,
                "spatial_merge_size": 2, "temporal_patch_size": 2{encoder}}}}}"#
    ))
}

#[test]
fn qwen3_vl_as_it_is_published() {
    let config = qwen3("", "").expect("it opens");
    assert_eq!((config.architecture.clone(), config.qk_norm, config.head_dim), (Architecture::Qwen3, true, 128));
    assert_eq!((config.rope_theta, config.tie_word_embeddings), (5e6, true));
    assert_eq!(config.rope_sections, Some(RopeSections { sizes: [24, 20, 20], interleaved: true }));
    let vision = config.vision.expect("an encoder");
    assert_eq!((vision.encoder, vision.table_side, vision.head_dim()), (VisionKind::Qwen3, 48, 64));
    assert_eq!((vision.deepstack.clone(), vision.tokens, vision.patch_width()), (vec![5, 11, 17], IDS, 1536));
}

#[test]
fn qwen3_5_sees_with_the_defaults_of_transformers() {
    let config = opened(
        r#"{"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 100, "intermediate_size": 128, "model_type": "qwen3_5_text"},
            "vision_config": {"out_hidden_size": 64}}"#,
    );
    let config = config.expect("it opens");
    assert_eq!(config.rope_sections, Some(RopeSections { sizes: [11, 11, 10], interleaved: true }));
    let vision = config.vision.expect("an encoder");
    assert_eq!((vision.depth, vision.hidden_size, vision.heads, vision.head_dim()), (27, 1152, 16, 72));
    assert_eq!((vision.intermediate_size, vision.act), (4304, Activation::GeluTanh));
    assert_eq!((vision.deepstack.len(), vision.tokens.image, vision.tokens.video), (0, 248_056, 248_057));
}

/// Llama 4 Scout, with members of its vision encoder.
fn llama4(encoder: &str) -> Result<ModelConfig, String> {
    opened(&llama4_json(encoder))
}

fn llama4_json(encoder: &str) -> String {
    format!(
        r#"{{"architectures": ["Llama4ForConditionalGeneration"], "image_token_index": 200092, "model_type": "llama4",
            "text_config": {{"head_dim": 128, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                "model_type": "llama4_text", "num_attention_heads": 40, "num_hidden_layers": 48, "num_key_value_heads": 8,
                "vocab_size": 202048}},
            "vision_config": {{"hidden_act": "gelu", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
                "model_type": "llama4_vision_model", "multi_modal_projector_bias": false, "norm_eps": 1e-05,
                "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 34, "patch_size": 14,
                "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096,
                "rope_theta": 10000, "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
                "vision_output_dim": 4096{encoder}}}}}"#
    )
}

#[test]
fn llama_4_as_it_is_published() {
    let vision = llama4("").expect("it opens").vision.expect("a vision encoder");
    let VisionKind::Llama4(own) = vision.encoder else { panic!("{:?}", vision.encoder) };
    assert_eq!((vision.table_side, vision.merge, own.projector_width), (24, 2, 4096));
    assert_eq!((vision.patch_width(), vision.head_dim(), vision.tokens.image), (588, 88, 200_092));
    let unnamed = llama4_json("").replace(r#""architectures": ["Llama4ForConditionalGeneration"], "#, "");
    assert_eq!(opened(&unnamed).expect("it opens").vision, Some(vision), "by its model_type");
    for (encoder, part) in [
        (r#""image_size": 0"#, "image_size: 0 pixels do not divide into patches of 14 pixels"),
        (r#""image_size": 343"#, "image_size: 343 pixels do not divide into patches of 14 pixels"),
        (r#""image_size": 350"#, "image_size: 350 pixels do not divide into patches of 14 pixels"),
        (r#""patch_size": 0"#, "patches of 0 pixels"),
        (r#""image_size": 57372"#, "vision positions per side: 4098"),
        (r#""pixel_shuffle_ratio": 0.0"#, "pixel_shuffle_ratio: 0, expected one divided by a whole number up to 16"),
        (r#""pixel_shuffle_ratio": 0.3"#, "pixel_shuffle_ratio: 0.3"),
        (r#""pixel_shuffle_ratio": -0.5"#, "pixel_shuffle_ratio: -0.5"),
        (r#""hidden_size": 0"#, "intermediate_size: 5632, expected the width of a token's 4 patches of 0"),
        (r#""hidden_size": 18446744073709551615"#, "patches of 18446744073709551615"),
        (r#""num_attention_heads": 0"#, "vision heads: 0"),
        (r#""num_hidden_layers": 100000"#, "vision layers: 100000"),
        (r#""vision_output_dim": 7680"#, "4096, 4096 and 7680 are not equal"),
        (r#""multi_modal_projector_bias": true"#, "multi_modal_projector_bias: true"),
        (r#""norm_eps": 1e-06"#, "norm_eps 0.000001"),
        (r#""num_channels": 4"#, "num_channels 4"),
        (r#""hidden_act": "silu""#, r#"hidden_act "silu""#),
        (r#""rope_theta": 500000"#, "rope_theta 500000"),
        (r#""vision_feature_layer": -2"#, "vision_feature_layer"),
        (r#""vision_feature_select_strategy": "full""#, r#"vision_feature_select_strategy "full""#),
    ] {
        let refusal = llama4(&format!(", {encoder}")).expect_err(part);
        assert!(refusal.contains(part), "{encoder}: {refusal}");
    }
}

#[test]
fn a_text_model_has_no_encoder() {
    let config = opened(
        r#"{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 100, "intermediate_size": 128}"#,
    );
    let config = config.expect("it opens");
    assert_eq!((config.vision, config.rope_sections), (None, None));
}

#[test]
fn encoders_that_cannot_be_are_refused() {
    for (extra, part) in [
        (r#", "depth": 5000"#, "vision layers: 5000, allowed are 1 to 1000"),
        (r#", "num_heads": 0"#, "vision heads: 0"),
        (r#", "num_heads": 48"#, "48 vision heads of 1280 elements"),
        (r#", "patch_size": 0"#, "patch_size: 0"),
        (r#", "patch_size": [14, 16]"#, "patch_size with sides that differ"),
        (r#", "window_size": 20"#, "window_size: 20 pixels, allowed are 28"),
        (r#", "fullatt_block_indexes": [32]"#, "layer 32 of a vision encoder of 32"),
        (r#", "fullatt_block_indexes": "all""#, "fullatt_block_indexes is not a short list"),
        (r#", "out_hidden_size": 4096"#, "a vision encoder of width 4096 for a model of width 3584"),
        (r#", "hidden_act": "mish""#, "activation"),
        (r#", "spatial_merge_size": 17"#, "spatial_merge_size: 17"),
    ] {
        let refusal = qwen2_5(extra).expect_err(extra);
        assert!(refusal.contains(part), "{extra}: {refusal}");
    }
    for (text, encoder, part) in [
        ("", r#", "num_position_embeddings": 2300"#, "2300 positions are no square"),
        ("", r#", "deepstack_visual_indexes": [11, 5]"#, "do not ascend"),
        (r#", "rope_parameters": {"mrope_section": [24, 20]}"#, "", "mrope_section is not a list of three"),
        (r#", "rope_parameters": {"mrope_section": [24, 20, 21]}"#, "", "does not share out 64 frequencies"),
    ] {
        let refusal = qwen3(text, encoder).expect_err(part);
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
}

/// Mistral Small 3.1, with members of the whole and of its encoder added.
fn mistral3(top: &str, encoder: &str) -> Result<ModelConfig, String> {
    opened(&format!(
        r#"{{"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
            "multimodal_projector_bias": false, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "text_config": {{"head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "model_type": "mistral",
                "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0, "vocab_size": 131072}},
            "vision_config": {{"head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
                "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
                "num_hidden_layers": 24, "patch_size": 14{encoder}}}, "vision_feature_layer": -1{top}}}"#
    ))
}

#[test]
fn mistral3_as_it_is_published_and_what_is_refused() {
    let vision = mistral3("", "").expect("it opens").vision.expect("it sees");
    assert_eq!(vision.encoder, VisionKind::Pixtral(Pixtral { projector_bias: false, rope_interleaved: false }));
    assert_eq!((vision.patch, vision.merge, vision.depth, vision.head_dim()), (14, 2, 24, 64));
    assert_eq!((vision.act, vision.tokens), (Activation::Silu, MediaTokens { image: 10, video: 10 }));
    for (top, encoder, words) in [
        (r#", "vision_feature_layer": -2"#, "", "vision_feature_layer other than -1"),
        (r#", "projector_hidden_act": "relu""#, "", "projector_hidden_act \"relu\""),
        ("", r#", "rope_theta": 5000.0"#, "rope_theta 5000"),
        ("", r#", "rope_parameters": {"rope_type": "yarn"}"#, "rope_type \"yarn\""),
        ("", r#", "head_dim": 9223372036854775808"#, "head"),
        (r#", "spatial_merge_size": 0"#, "", "spatial_merge_size"),
    ] {
        let refused = mistral3(top, encoder).expect_err("refused");
        assert!(refused.contains(words), "{top} {encoder}: {refused}");
    }
}

/// SmolVLM-500M, with members of the whole and of its encoder added.
fn smolvlm(top: &str, encoder: &str) -> Result<ModelConfig, String> {
    opened(&format!(
        r#"{{"architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": 49190, "model_type": "idefics3",
            "scale_factor": 4, "text_config": {{"architectures": ["VLlama3ForCausalLM"], "hidden_size": 960,
                "intermediate_size": 2560, "model_type": "llama", "num_attention_heads": 15, "num_hidden_layers": 32,
                "num_key_value_heads": 5, "rope_theta": 100000, "vocab_size": 49280}},
            "vision_config": {{"hidden_size": 768, "image_size": 512, "model_type": "idefics3",
                "num_attention_heads": 12, "patch_size": 16{encoder}}}{top}}}"#
    ))
}

#[test]
fn smolvlm_as_it_is_published_and_what_is_refused() {
    let config = smolvlm("", "").expect("it opens");
    let vision = config.vision.expect("it sees");
    assert_eq!((config.architecture, vision.encoder), (Architecture::Llama, VisionKind::Idefics3));
    assert_eq!((vision.table_side, vision.merge, vision.depth, vision.intermediate_size), (32, 4, 12, 3072));
    // 2.2B: six pixels of each side are not used.
    let larger = smolvlm(r#", "scale_factor": 3"#, r#", "image_size": 384, "patch_size": 14"#).expect("it opens");
    assert_eq!(larger.vision.map(|vision| (vision.table_side, vision.merge)), Some((27, 3)));
    for (top, encoder, words) in [
        ("", r#", "layer_norm_eps": 1e-5"#, "layer_norm_eps 0.00001"),
        (r#", "scale_factor": 5"#, "", "scale_factor: 5"),
        (r#", "scale_factor": 0"#, "", "scale_factor: 0"),
        ("", r#", "patch_size": 0"#, "scale_factor: 4"),
        ("", r#", "image_size": 640"#, "squares of 40 patches on a side"),
    ] {
        let refused = smolvlm(top, encoder).expect_err("refused");
        assert!(refused.contains(words), "{top} {encoder}: {refused}");
    }
}
