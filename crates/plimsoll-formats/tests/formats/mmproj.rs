//! The vision encoder of a GGUF model in a separate file: found, read, mapped to the names of transformers. It is refused by name if it is
//! not the model's.

use crate::common::{GgufWriter, TempDir, seeing, seeing_model, values};
use plimsoll_formats::{
    Activation, Audio, AudioKind, Checkpoint, Conformer, Mmproj, MmprojState, RopeSections, Vision, VisionKind,
};
use std::path::PathBuf;

/// A model and its encoder in two files.
pub struct Pair {
    dir: TempDir,
    model: PathBuf,
    encoder: PathBuf,
}

impl Pair {
    pub fn new(model: &GgufWriter, encoder: &GgufWriter) -> Pair {
        let dir = TempDir::new();
        let (model, encoder) = (dir.write("m-Q8_0.gguf", model.bytes()), dir.write("mmproj-F16.gguf", encoder.bytes()));
        Pair { dir, model, encoder }
    }

    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(&self.model).unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn named(&self) -> Mmproj {
        Mmproj::File(self.encoder.clone())
    }

    pub fn refusal(&self, mmproj: &Mmproj) -> String {
        match Checkpoint::open_with(&self.model, mmproj) {
            Ok(_) => panic!("the file was accepted"),
            Err(error) => error.to_string(),
        }
    }
}

/// Returns an encoder with one change.
fn changed(change: impl Fn(&mut GgufWriter)) -> GgufWriter {
    let mut encoder = seeing("qwen3vl_merger");
    change(&mut encoder);
    encoder
}

#[test]
fn an_encoder_beside_the_model_becomes_part_of_it() {
    let mut encoder = seeing("qwen3vl_merger");
    // The frames of the patch embedding: 1, 2, 3, ... and their negatives.
    for (name, sign) in [("v.patch_embd.weight", 1.0), ("v.patch_embd.weight.1", -1.0f32)] {
        let at = encoder.tensors.iter().find(|(other, ..)| other == name).expect("it is there").3 as usize;
        for i in 0..8 * 3 * 4 * 4 {
            encoder.data[at + 4 * i..][..4].copy_from_slice(&(sign * (i as f32 + 1.0)).to_le_bytes());
        }
    }
    let pair = Pair::new(&seeing_model("qwen3vl"), &encoder);
    let checkpoint = pair.open();
    let vision = checkpoint.config.vision.clone().expect("an encoder");
    assert_eq!((vision.encoder, vision.depth, vision.hidden_size, vision.heads), (VisionKind::Qwen3, 2, 8, 2));
    assert_eq!((vision.intermediate_size, vision.act, vision.table_side), (16, Activation::GeluTanh, 3));
    assert_eq!((vision.channels, vision.patch, vision.temporal, vision.merge), (3, 4, 2, 2));
    assert_eq!((vision.deepstack, vision.tokens.image, vision.tokens.video), (vec![1], 1, 2));
    let sections = RopeSections { sizes: [4, 2, 2], interleaved: true };
    assert_eq!(checkpoint.config.rope_sections, Some(sections));
    let MmprojState::Loaded { path, processor } = checkpoint.mmproj() else { panic!("{:?}", checkpoint.mmproj()) };
    assert_eq!((path, processor.mean, processor.max_pixels), (&pair.encoder, Some([0.5; 3]), Some(4096)));
    for name in [
        "visual.blocks.1.attn.qkv.bias",
        "visual.blocks.0.mlp.linear_fc2.weight",
        "visual.blocks.0.norm2.weight",
        "visual.deepstack_merger_list.0.linear_fc1.weight",
        "visual.merger.norm.bias",
        "visual.merger.linear_fc2.weight",
        "visual.pos_embed.weight",
        "visual.patch_embed.proj.bias",
    ] {
        assert!(checkpoint.tensor(name).is_some(), "{name}");
    }
    // [out, channels, frames, height, width]: the frames are interleaved within a channel.
    let patches = values(&checkpoint, "visual.patch_embed.proj.weight");
    assert_eq!(checkpoint.tensor("visual.patch_embed.proj.weight").unwrap().shape, [8, 3, 2, 4, 4]);
    for (i, value) in patches.iter().enumerate() {
        let (block, frame, at) = (i / 32, i / 16 % 2, i % 16);
        let expected = (block * 16 + at) as f32 + 1.0;
        assert_eq!(*value, if frame == 0 { expected } else { -expected }, "element {i}");
    }
}

#[test]
fn the_operator_chooses_the_file() {
    let pair = Pair::new(&seeing_model("qwen3vl"), &seeing("qwen3vl_merger"));
    let without = Checkpoint::open_with(&pair.model, &Mmproj::Off).expect("it opens");
    assert_eq!((&without.config.vision, without.mmproj()), (&None, &MmprojState::None));
    let elsewhere = TempDir::new();
    let other = elsewhere.write("other.gguf", seeing("qwen3vl_merger").bytes());
    let named = Checkpoint::open_with(&pair.model, &Mmproj::File(other.clone())).expect("it opens");
    assert!(matches!(named.mmproj(), MmprojState::Loaded { path, .. } if *path == other));
    let words = pair.refusal(&Mmproj::File(elsewhere.0.join("absent.gguf")));
    assert!(words.contains("absent.gguf"), "{words}");
    // A directory with only one model opens that model.
    let checkpoint = Checkpoint::open(&pair.dir.0).expect("it opens");
    assert!(matches!(checkpoint.mmproj(), MmprojState::Loaded { .. }));
    // Other formats have their encoders in their own files.
    pair.dir.write("config.json", crate::common::LLAMA);
    let refused = Checkpoint::open_with(&pair.dir.0, &pair.named()).err().expect("refused").to_string();
    assert!(refused.contains("an mmproj file is for a GGUF model"), "{refused}");
}

#[test]
fn a_file_for_another_model_is_left_out_and_refused_where_it_is_named() {
    let cases = [
        (
            changed(|e| {
                e.str("clip.projector_type", "minicpmv");
            }),
            "clip.projector_type is \"minicpmv\"; supported are qwen2vl_merger",
        ),
        (
            changed(|e| {
                e.str("clip.projector_type", "qwen2vl_merger");
            }),
            "\"qwen2vl_merger\" is for the architectures qwen2vl, the model's is \"qwen3vl\"",
        ),
        (
            changed(|e| {
                e.set("clip.has_vision_encoder", 7, [0]);
            }),
            "it holds no vision encoder",
        ),
        (
            changed(|e| {
                e.set("clip.has_vision_encoder", 7, [0]).str("clip.audio.projector_type", "ultravox");
            }),
            "clip.audio.projector_type is \"ultravox\"; supported are qwen2.5o",
        ),
        (
            changed(|e| {
                e.str("general.architecture", "llama");
            }),
            "general.architecture is \"llama\"",
        ),
        (
            changed(|e| {
                e.f32("clip.vision.attention.layer_norm_epsilon", 1e-5);
            }),
            "supported is 0.000001",
        ),
        (
            changed(|e| {
                e.bools("clip.vision.is_deepstack_layers", &[false; 2]);
            }),
            "it has 0 deepstack levels, the model takes 1",
        ),
        (
            changed(|e| {
                e.tensors.retain(|(name, ..)| name != "mm.2.weight");
                e.tensor("mm.2.weight", &[32, 96]);
            }),
            "its vectors have 96 numbers, the model's 64: use the mmproj file of the same model",
        ),
    ];
    for (encoder, words) in cases {
        let pair = Pair::new(&seeing_model("qwen3vl"), &encoder);
        let checkpoint = pair.open();
        let MmprojState::LeftOut { path, why } = checkpoint.mmproj() else {
            panic!("{words}: {:?}", checkpoint.mmproj())
        };
        assert!(why.contains(words) && *path == pair.encoder, "{why}");
        assert_eq!((&checkpoint.config.vision, checkpoint.tensor("visual.pos_embed.weight")), (&None, None));
        let refused = pair.refusal(&pair.named());
        assert!(
            refused.contains(why) && refused.contains("--no-mmproj") && refused.contains("mmproj-F16.gguf"),
            "{refused}"
        );
    }
    // A model without placeholder tokens for media, and one with time as its only axis.
    let mut wordless = seeing_model("qwen3vl");
    wordless.strings("tokenizer.ggml.tokens", &["a", "b"]);
    let checkpoint = Pair::new(&wordless, &seeing("qwen3vl_merger")).open();
    assert!(matches!(checkpoint.mmproj(), MmprojState::LeftOut { why, .. } if why.contains("<|image_pad|>")));
}

#[test]
fn a_broken_file_stops_the_start_unless_it_is_left_out() {
    let cases = [
        (
            changed(|e| e.tensors.retain(|(name, ..)| name != "v.patch_embd.weight.1")),
            "\"v.patch_embd.weight.1\" is missing",
        ),
        (changed(|e| e.tensors.retain(|(name, ..)| name != "mm.2.weight")), "\"mm.2.weight\" is missing"),
        (
            changed(|e| e.keys.retain(|(key, ..)| key != "clip.vision.block_count")),
            "clip.vision.block_count is missing",
        ),
        (
            changed(|e| {
                e.u32("clip.vision.block_count", 1 << 30);
            }),
            "vision layers: 1073741824",
        ),
        (
            changed(|e| {
                e.u32("clip.vision.embedding_length", 0);
            }),
            "vision hidden size: 0",
        ),
        (
            changed(|e| {
                e.u32("clip.vision.attention.head_count", 3);
            }),
            "3 vision heads",
        ),
        (
            changed(|e| {
                e.u32("clip.vision.spatial_merge_size", 99);
            }),
            "spatial_merge_size: 99",
        ),
        (
            changed(|e| {
                e.bools("clip.vision.is_deepstack_layers", &[true]);
            }),
            "not a list of 2 booleans",
        ),
        (
            changed(|e| {
                e.str("clip.vision.image_mean", "grey");
            }),
            "not a list of three numbers",
        ),
        (
            changed(|e| {
                e.tensor("v.pre_ln.weight", &[8]);
            }),
            "tensor \"v.pre_ln.weight\"",
        ),
        (
            changed(|e| {
                e.tensor("v.deepstack.0.norm.weight", &[8]);
            }),
            "tensor \"v.deepstack.0.norm.weight\"",
        ),
        (changed(|e| e.keys.retain(|(key, ..)| key != "clip.projector_type")), "clip.projector_type is missing"),
    ];
    for (encoder, words) in cases {
        let pair = Pair::new(&seeing_model("qwen3vl"), &encoder);
        for mmproj in [Mmproj::Beside, pair.named()] {
            let refused = pair.refusal(&mmproj);
            assert!(refused.contains(words) && refused.contains("--no-mmproj"), "{words}: {refused}");
        }
        Checkpoint::open_with(&pair.model, &Mmproj::Off).expect("it opens");
    }
    let pair = Pair::new(&seeing_model("qwen3vl"), &seeing("qwen3vl_merger"));
    let whole = std::fs::read(&pair.encoder).expect("it is there");
    pair.dir.write("mmproj-F16.gguf", &whole[..whole.len() - 100]);
    assert!(pair.refusal(&Mmproj::Beside).contains("of the data, which has only"));
    // A model without rotary sections for height and width.
    let mut flat = seeing_model("qwen3vl");
    flat.keys.retain(|(key, ..)| key != "qwen3vl.rope.dimension_sections");
    assert!(Pair::new(&flat, &seeing("qwen3vl_merger")).refusal(&Mmproj::Beside).contains("rope.dimension_sections"));
}

/// The audio encoder of Gemma 4: its tensors have the names of transformers, and its configuration is read from the file.
#[test]
fn an_audio_encoder_stands_beside_that_of_images() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models");
    let file = Checkpoint::open(&root.join("vl-gguf-gemma4-audio/model.gguf")).expect("it opens");
    let whole = Checkpoint::open(&root.join("vl-gemma4-audio")).expect("it opens");
    let (of_file, of_whole) = (file.config.audio.clone().unwrap(), whole.config.audio.clone().unwrap());
    let (AudioKind::Conformer(own), AudioKind::Conformer(other)) = (&of_file.encoder, &of_whole.encoder) else {
        panic!("two conformers: {of_file:?}")
    };
    assert_eq!((own.seen, own.cap, own.taps, own.bound), (12, 50.0, 5, 1e10), "what published models have");
    let changed = Conformer { seen: other.seen, cap: other.cap, taps: other.taps, bound: other.bound, ..own.clone() };
    assert_eq!(Audio { encoder: AudioKind::Conformer(changed), ..of_file.clone() }, of_whole);
    let names = |checkpoint: &Checkpoint| {
        let all = checkpoint.tensors().map(|(name, _)| name.replace("per_dim_factor", "per_dim_scale"));
        all.filter(|name| name.starts_with("audio.")).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(names(&file), names(&whole));
}

/// The encoders of Gemma 3, Gemma 4, LFM2-VL, SmolVLM, Mistral 3, InternVL and Llama 4. All their tensors get the names of transformers.
#[test]
fn encoders_of_images_alone_have_the_names_of_transformers() {
    let open = |name: &str| {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models");
        Checkpoint::open(&root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    for (file, whole) in [
        ("vl-gguf-gemma3/model.gguf", "vl-gemma3"),
        ("vl-gguf-gemma4/model.gguf", "vl-gemma4"),
        ("vl-gguf-gemma4-e2b/model.gguf", "vl-gemma4-e2b"),
        ("vl-gguf-lfm2/model.gguf", "vl-lfm2"),
        ("vl-gguf-idefics3/model.gguf", "vl-idefics3"),
        ("vl-gguf-mistral3/model.gguf", "vl-mistral3"),
        ("vl-gguf-lfm2-bare/model.gguf", "vl-lfm2-bare"),
        ("vl-gguf-llama4/model.gguf", "vl-llama4"),
        ("vl-gguf-intern/model.gguf", "vl-intern"),
        ("vl-gguf-intern-rms/model.gguf", "vl-intern-rms"),
    ] {
        let (file, whole) = (open(file), open(whole));
        let (of_file, of_whole) = (file.config.vision.clone().unwrap(), whole.config.vision.clone().unwrap());
        // The file has no video token.
        assert_eq!(of_file.tokens.image, of_whole.tokens.image);
        let mut of_file = Vision { tokens: of_whole.tokens, ..of_file };
        if let VisionKind::Pixtral(own) = &mut of_file.encoder {
            // The converter interleaves rows.
            assert!(std::mem::take(&mut own.rope_interleaved));
        }
        assert_eq!(of_file, of_whole);
        assert_eq!(file.config.rope_sections, None);
        let shape = |checkpoint: &Checkpoint, name: &str| checkpoint.tensor(name).map(|info| info.shape.clone());
        let mut compared = 0;
        for (name, info) in whole.tensors().filter(|(name, _)| name.starts_with("visual.")) {
            let found = shape(&file, &name.replace("mm_soft_emb_norm", "soft_emb_norm"));
            let found = found.unwrap_or_else(|| panic!("{name} is missing"));
            let of_bounds = name.ends_with("_min") || name.ends_with("_max");
            // A scalar has one dimension in the file, and a patch has its own dimensions.
            let of_patch = ["input_proj", "patch_embedding", "patch_conv"].iter().any(|part| name.contains(part));
            let same = found == info.shape || of_bounds && found == [1] || of_patch && found.len() == 4;
            assert!(same, "{name}: {found:?} for {:?}", info.shape);
            compared += 1;
        }
        assert!(compared > 20, "{compared}");
    }
}

#[test]
fn an_encoder_is_no_model() {
    let dir = TempDir::new();
    let file = dir.write("mmproj-F16.gguf", seeing("qwen3vl_merger").bytes());
    let words = Checkpoint::open(&file).err().expect("refused").to_string();
    assert!(words.contains("the encoders of a model") && words.contains("--mmproj"), "{words}");
}

#[test]
fn qwen2_5_vl_attends_in_windows_and_spaces_frames_by_time() {
    let mut encoder = seeing("qwen2.5vl_merger");
    encoder.u32("clip.vision.n_wa_pattern", 2).set("clip.use_silu", 7, [1]);
    let vision = Pair::new(&seeing_model("qwen2vl"), &encoder).open().config.vision.expect("an encoder");
    assert_eq!((vision.encoder, vision.act, vision.table_side), (VisionKind::Qwen2_5, Activation::Silu, 0));
    assert_eq!((vision.window, vision.full_layers, vision.steps_per_second), (Some(112), vec![1], Some(2)));
    encoder.keys.retain(|(key, ..)| key != "clip.vision.n_wa_pattern");
    assert!(Pair::new(&seeing_model("qwen2vl"), &encoder).refusal(&Mmproj::Beside).contains("n_wa_pattern is missing"));
}

#[test]
fn qwen2_vl_of_old_converters_has_its_feed_forward_names_swapped() {
    let mut encoder = seeing("qwen2vl_merger");
    let checkpoint = Pair::new(&seeing_model("qwen2vl"), &encoder).open();
    let vision = checkpoint.config.vision.clone().expect("an encoder");
    assert_eq!((vision.encoder, vision.act, vision.intermediate_size), (VisionKind::Qwen2, Activation::GeluQuick, 16));
    assert_eq!(checkpoint.config.rope_sections.map(|sections| sections.interleaved), Some(false));
    let shape = |checkpoint: &Checkpoint, name: &str| checkpoint.tensor(name).map(|info| info.shape.clone());
    assert_eq!(shape(&checkpoint, "visual.blocks.1.mlp.fc1.weight"), Some(vec![16, 8]));
    assert_eq!(shape(&checkpoint, "visual.merger.ln_q.weight"), Some(vec![8]));
    for (name, ..) in &mut encoder.tensors {
        *name = match name.split_once(".ffn_up.") {
            Some((layer, leaf)) => format!("{layer}.ffn_down.{leaf}"),
            None => name.replace(".ffn_down.", ".ffn_up."),
        };
    }
    let old = Pair::new(&seeing_model("qwen2vl"), &encoder).open();
    assert_eq!(old.config.vision, checkpoint.config.vision);
    for name in ["fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"].map(|name| format!("visual.blocks.1.mlp.{name}")) {
        assert_eq!(shape(&old, &name), shape(&checkpoint, &name), "{name}");
    }
}
