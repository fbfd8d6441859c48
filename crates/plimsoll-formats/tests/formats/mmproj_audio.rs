//! The audio encoders of the Qwens in `mmproj` files: their configurations, names of tensors, and refusals.

use crate::common::{GgufWriter, seeing, seeing_model};
use crate::mmproj::Pair;
use plimsoll_formats::{
    Audio, AudioChunks, AudioKind, AudioTask, AudioWindows, Checkpoint, Mmproj, MmprojState, VisionKind,
};
use std::collections::BTreeMap;
use std::path::PathBuf;

fn fixture(name: &str) -> Checkpoint {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models");
    Checkpoint::open(&root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A model of this architecture with the tokens for audio in its vocabulary.
fn model(arch: &str) -> GgufWriter {
    let mut model = seeing_model(arch);
    model.strings("tokenizer.ggml.tokens", &["a", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|AUDIO|>"]);
    model
}

/// Returns an audio encoder of one layer without a vision encoder; all its weights are 0.
fn encoder(projector: &str) -> GgufWriter {
    let mut encoder = GgufWriter { version: 3, keys: Vec::new(), tensors: Vec::new(), data: Vec::new() };
    encoder.str("general.architecture", "clip");
    with_audio(&mut encoder, projector);
    encoder
}

/// Adds such an encoder to a file.
fn with_audio(encoder: &mut GgufWriter, projector: &str) {
    encoder.str("clip.audio.projector_type", projector).set("clip.has_audio_encoder", 7, [1]);
    let (hidden, wide, bands) = (8, 16, 8);
    for (key, value) in [
        ("block_count", 1),
        ("embedding_length", hidden),
        ("feed_forward_length", wide),
        ("attention.head_count", 2),
        ("num_mel_bins", bands),
    ] {
        encoder.u32(&format!("clip.audio.{key}"), value as u32);
    }
    encoder.f32("clip.audio.attention.layer_norm_epsilon", 1e-5);
    encoder.tensor("a.position_embd.weight", &[hidden, 1500]);
    for (name, width, out) in [
        ("attn_q", hidden, hidden),
        ("attn_k", hidden, hidden),
        ("attn_v", hidden, hidden),
        ("attn_out", hidden, hidden),
        ("ffn_up", hidden, wide),
        ("ffn_down", wide, hidden),
    ] {
        encoder.tensor(&format!("a.blk.0.{name}.weight"), &[width, out]);
        encoder.tensor(&format!("a.blk.0.{name}.bias"), &[out]);
    }
    for norm in ["a.blk.0.ln1", "a.blk.0.ln2", "a.post_ln"] {
        encoder.tensor(&format!("{norm}.weight"), &[hidden]).tensor(&format!("{norm}.bias"), &[hidden]);
    }
    if projector == "qwen2a" {
        encoder.tensor("a.conv1d.1.weight", &[3, bands, hidden]).tensor("a.conv1d.1.bias", &[1, hidden]);
        encoder.tensor("a.conv1d.2.weight", &[3, hidden, hidden]).tensor("a.conv1d.2.bias", &[1, hidden]);
        encoder.tensor("mm.a.fc.weight", &[hidden, 64]).tensor("mm.a.fc.bias", &[64]);
        return;
    }
    let channels = 4;
    for (i, from) in [(1, 1), (2, channels), (3, channels)] {
        encoder.tensor(&format!("a.conv2d.{i}.weight"), &[3, 3, from, channels]);
        encoder.tensor(&format!("a.conv2d.{i}.bias"), &[1, 1, channels]);
    }
    encoder.tensor("a.conv_out.weight", &[channels, hidden]);
    encoder.tensor("mm.a.mlp.1.weight", &[hidden, hidden]).tensor("mm.a.mlp.1.bias", &[hidden]);
    encoder.tensor("mm.a.mlp.2.weight", &[hidden, 64]).tensor("mm.a.mlp.2.bias", &[64]);
}

fn changed(change: impl Fn(&mut GgufWriter)) -> GgufWriter {
    let mut encoder = encoder("qwen3a");
    change(&mut encoder);
    encoder
}

/// Asserts that the encoders' tensors have the names and shapes of the model in the transformers layout.
fn has_the_tensors_of(file: &Checkpoint, whole: &Checkpoint) {
    let encoders = |checkpoint: &Checkpoint| {
        let own = checkpoint.tensors().filter(|(name, _)| name.starts_with("audio.") || name.starts_with("visual."));
        own.map(|(name, info)| (name.to_owned(), info.shape.clone())).collect::<BTreeMap<_, _>>()
    };
    let mut expected = encoders(whole);
    // No model uses this tensor.
    expected.remove("audio.audio_bos_eos_token.weight");
    assert_eq!(encoders(file), expected);
}

#[test]
fn qwen2_5_omni_has_both_encoders_under_one_type() {
    let (file, whole) = (fixture("vl-gguf-omni2.5/model.gguf"), fixture("omni2.5"));
    has_the_tensors_of(&file, &whole);
    let (own, other) = (file.config.audio.clone().unwrap(), whole.config.audio.clone().unwrap());
    let chunks = AudioKind::Chunks(AudioChunks { half_window: 100 });
    assert_eq!(own, Audio { encoder: chunks, ..other }, "what published models have");
    let (mut own, other) = (file.config.vision.clone().unwrap(), whole.config.vision.clone().unwrap());
    assert_eq!((own.encoder, own.steps_per_second), (VisionKind::Omni2_5, Some(25)));
    own.steps_per_second = other.steps_per_second;
    assert_eq!(own, other);
    assert_eq!(file.config.rope_sections, whole.config.rope_sections);
}

/// A type for each encoder, as converters may write it in future.
#[test]
fn qwen2_5_omni_may_have_a_type_for_each_encoder() {
    let mut both = seeing("qwen2.5vl_merger");
    both.u32("clip.vision.n_wa_pattern", 2).set("clip.use_silu", 7, [1]);
    both.keys.retain(|(key, ..)| key != "clip.projector_type");
    both.str("clip.vision.projector_type", "qwen2.5vl_merger");
    with_audio(&mut both, "qwen2a");
    let mut model = model("qwen2vl");
    model.strings("tokenizer.ggml.tokens", &["a", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"]);
    let checkpoint = Pair::new(&model, &both).open();
    let (vision, audio) = (checkpoint.config.vision.clone().unwrap(), checkpoint.config.audio.clone().unwrap());
    assert_eq!((vision.encoder, vision.steps_per_second, vision.tokens.video), (VisionKind::Omni2_5, Some(25), 2));
    assert_eq!((audio.encoder, audio.placeholder), (AudioKind::Chunks(AudioChunks { half_window: 100 }), 3));
    assert_eq!(checkpoint.tensor("audio.conv2.bias").map(|info| info.shape.clone()), Some(vec![8]));
    // Without its audio encoder the file is Qwen2.5-VL's.
    both.set("clip.has_audio_encoder", 7, [0]);
    let mut model = seeing_model("qwen2vl");
    model.strings("tokenizer.ggml.tokens", &["a", "<|image_pad|>", "<|video_pad|>"]);
    let alone = Pair::new(&model, &both).open();
    assert_eq!(alone.config.vision.as_ref().map(|vision| vision.encoder), Some(VisionKind::Qwen2_5));
    assert_eq!(alone.config.audio, None);
}

#[test]
fn qwen3_omni_has_all_deepstack_levels_though_its_text_names_none() {
    let (file, whole) = (fixture("vl-gguf-omni/model.gguf"), fixture("omni"));
    has_the_tensors_of(&file, &whole);
    let (own, other) = (file.config.audio.clone().unwrap(), whole.config.audio.clone().unwrap());
    let AudioKind::Windows(windows) = &other.encoder else { panic!("windows: {other:?}") };
    let windows = AudioKind::Windows(AudioWindows { attention_window: 800, ..windows.clone() });
    assert_eq!(own, Audio { encoder: windows, ..other.clone() }, "what published models have");
    assert_eq!(file.gguf().unwrap().u64("qwen3vlmoe.n_deepstack_layers"), Some(0));
    let vision = file.config.vision.as_ref().unwrap();
    assert_eq!((vision.encoder, vision.steps_per_second, vision.deepstack.len()), (VisionKind::Omni, Some(13), 2));
    assert_eq!(Some(vision), whole.config.vision.as_ref());
    assert_eq!(file.config.rope_sections, whole.config.rope_sections);
}

#[test]
fn qwen3_asr_has_an_audio_encoder_alone() {
    let (file, whole) = (fixture("gguf-asr/model.gguf"), fixture("asr"));
    let sizes = |checkpoint: &Checkpoint| {
        let named = checkpoint.tensors().filter(|(name, _)| name.starts_with("audio."));
        named.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    };
    assert!(sizes(&file).iter().any(|name| name == "audio.proj2.bias"), "{:?}", sizes(&file));
    let (own, other) = (file.config.audio.clone().unwrap(), whole.config.audio.clone().unwrap());
    let AudioKind::Windows(windows) = &own.encoder else { panic!("windows: {own:?}") };
    assert_eq!((windows.half_window, windows.attention_window, windows.task), (50, 800, AudioTask::Transcribe));
    assert_eq!((own.placeholder, own.bands, own.heads), (other.placeholder, other.bands, other.heads));
    assert_eq!((&file.config.vision, file.config.rope_sections), (&None, None));
}

#[test]
fn an_encoder_alone_is_that_of_qwen3_asr_whatever_the_other_key_says() {
    for encoder in [
        encoder("qwen3a"),
        changed(|e| {
            e.set("clip.has_vision_encoder", 7, [0]);
        }),
        changed(|e| e.tensors.retain(|(name, ..)| name != "a.position_embd.weight")),
    ] {
        let checkpoint = Pair::new(&model("qwen3vl"), &encoder).open();
        let audio = checkpoint.config.audio.clone().expect("an audio encoder");
        assert_eq!((audio.depth, audio.hidden_size, audio.heads, audio.intermediate_size), (1, 8, 2, 16));
        assert_eq!((audio.bands, audio.placeholder, audio.rows(100)), (8, 3, 13));
        let shape = |name: &str| checkpoint.tensor(name).map(|info| info.shape.clone());
        assert_eq!(shape("audio.conv2d2.bias"), Some(vec![4]));
        assert_eq!(shape("audio.layers.0.self_attn.k_proj.bias"), Some(vec![8]));
        assert_eq!((shape("a.position_embd.weight"), &checkpoint.config.vision), (None, &None));
    }
}

#[test]
fn a_file_for_another_model_is_left_out_and_refused_where_it_is_named() {
    let cases = [
        (
            model("qwen3vl"),
            encoder("ultravox"),
            "clip.audio.projector_type is \"ultravox\"; supported are qwen2.5o, qwen2a, qwen3a, gemma4a",
        ),
        (
            model("qwen2vl"),
            encoder("qwen3a"),
            "\"qwen3a\" is for the architectures qwen3vl, qwen3vlmoe, the model's is \"qwen2vl\"",
        ),
        (
            model("qwen3vl"),
            encoder("qwen2a"),
            "\"qwen2a\" is for the architectures qwen2vl, the model's is \"qwen3vl\"",
        ),
        (
            model("qwen3vl"),
            changed(|e| {
                e.tensors.retain(|(name, ..)| name != "mm.a.mlp.2.weight");
                e.tensor("mm.a.mlp.2.weight", &[8, 96]);
            }),
            "its vectors have 96 numbers, the model's 64: use the mmproj file of the same model",
        ),
        (
            model("qwen3vl"),
            changed(|e| {
                e.f32("clip.audio.attention.layer_norm_epsilon", 1e-6);
            }),
            "clip.audio.attention.layer_norm_epsilon is 0.000001; supported is 0.00001",
        ),
        (seeing_model("qwen3vl"), encoder("qwen3a"), "the model's vocabulary lacks the token <|audio_pad|>"),
        (
            model("qwen3vl"),
            changed(|e| {
                e.set("clip.has_vision_encoder", 7, [0]).set("clip.has_audio_encoder", 7, [0]);
            }),
            "it holds no vision encoder (clip.has_vision_encoder is false) and no audio encoder",
        ),
    ];
    for (model, encoder, words) in cases {
        let pair = Pair::new(&model, &encoder);
        let checkpoint = pair.open();
        let MmprojState::LeftOut { why, .. } = checkpoint.mmproj() else {
            panic!("{words}: {:?}", checkpoint.mmproj())
        };
        assert!(why.contains(words), "{why}");
        assert_eq!(checkpoint.config.audio, None);
        assert!(pair.refusal(&pair.named()).contains(words));
    }
}

#[test]
fn a_broken_file_stops_the_start() {
    let cases = [
        (
            changed(|e| e.tensors.retain(|(name, ..)| name != "a.conv2d.1.weight")),
            "tensor \"a.conv2d.1.weight\" is missing",
        ),
        (
            changed(|e| e.tensors.retain(|(name, ..)| name != "mm.a.mlp.2.weight")),
            "tensor \"mm.a.mlp.2.weight\" is missing",
        ),
        (
            changed(|e| e.keys.retain(|(key, ..)| key != "clip.audio.num_mel_bins")),
            "clip.audio.num_mel_bins is missing",
        ),
        (
            changed(|e| e.keys.retain(|(key, ..)| key != "clip.audio.projector_type")),
            "clip.audio.projector_type is missing",
        ),
        (
            changed(|e| {
                e.u32("clip.audio.block_count", 1 << 30);
            }),
            "audio layers: 1073741824",
        ),
        (
            changed(|e| {
                e.u32("clip.audio.attention.head_count", 3);
            }),
            "3 audio heads",
        ),
        (
            changed(|e| {
                e.tensors.retain(|(name, ..)| name != "a.position_embd.weight");
                e.tensor("a.position_embd.weight", &[12, 1500]);
            }),
            "a.position_embd.weight has shape [1500, 12], expected rows of 8",
        ),
        (
            changed(|e| {
                e.tensor("a.blk.0.ffn_gate.weight", &[8, 16]);
            }),
            "tensor \"a.blk.0.ffn_gate.weight\"",
        ),
        (
            changed(|e| {
                e.tensor("v.post_ln.weight", &[8]);
            }),
            "tensor \"v.post_ln.weight\"",
        ),
    ];
    for (encoder, words) in cases {
        let pair = Pair::new(&model("qwen3vl"), &encoder);
        for mmproj in [Mmproj::Beside, pair.named()] {
            let refused = pair.refusal(&mmproj);
            assert!(refused.contains(words) && refused.contains("--no-mmproj"), "{words}: {refused}");
        }
    }
}
