//! Plans from a configuration alone: the memory that the largest published hybrid needs, and refusals before anything is loaded.

use std::path::Path;
use std::time::Instant;

use plimsoll_device::{Declare, DtypePolicy, KvDtype, KvGroup, PAGE_TOKENS, PlanDevice, SeqSpan, StepInput};
use plimsoll_formats::Checkpoint;

const MIB: usize = 1 << 20;

fn config(name: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/configs").join(name);
    Checkpoint::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The shapes are those that public configurations and descriptions of Qwen3.5-122B-A10B agree on; the sections of the rotary
/// embedding and the end-of-text token, which change no size, are its smaller sisters'.
#[test]
fn a_hybrid_of_122_billion_is_planned_from_its_configuration() {
    let checkpoint = config("qwen3.5-122b-a10b.json");
    let begun = Instant::now();
    let built = |with_drafter| {
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, with_drafter).unwrap();
        (model, declare.finish())
    };
    let (plain, weights) = built(false);
    let (drafting, more) = built(true);
    println!("declared twice in {:?}, {} matrices", begun.elapsed(), more.linears.len());

    let shape = plain.shape(KvDtype::F16);
    let state = shape.state.expect("a recurrent state");
    assert_eq!((shape.kv.layers().len(), state.layers), (12, 36));
    assert!(shape.kv.layers().iter().all(|layer| (layer.layout.kv_heads(), layer.layout.head_dim()) == (2, 256)));
    assert_eq!(drafting.shape(KvDtype::F16).kv.layers().len(), 13, "the head's keys and values are one layer more");
    // 36 layers of 64 heads of 128 x 128 f32 are 144 MiB; three inputs of the convolution's 12,288 channels 5 MiB.
    assert_eq!(state.slot_bytes(), 36 * (64 * 128 * 128 * 4 + 3 * 12_288 * 4));
    assert_eq!(state.slot_bytes() / MIB, 149);

    // 122 billion weights of two bytes; the head has a layer of experts, too, but shares both ends.
    let billions = |bytes: usize| bytes as f64 / 2e9;
    assert!((121.0..123.5).contains(&billions(weights.bytes)), "{}", billions(weights.bytes));
    assert!((2.4..2.8).contains(&billions(more.bytes - weights.bytes)), "{}", billions(more.bytes - weights.bytes));

    assert!(more.host_bytes() < 24 * MIB, "the table takes {} bytes", more.host_bytes());

    // A verify step of one sequence: five rows.
    let seqs = [SeqSpan { first_row: 0, rows: 5, start: 0, pages_at: 0, pages: 1, seen_from: 0, state: Some(0) }];
    let step = StepInput {
        tokens: &[0; 5],
        positions: &[0, 1, 2, 3, 4],
        seqs: &seqs,
        pages: &[0],
        logit_rows: &[0, 1, 2, 3, 4],
        state_out: &[1, 2, 3, 4, 0],
        ..StepInput::default()
    };
    let kv = drafting.shape(KvDtype::F16).kv;
    let mut device = PlanDevice::new(&more, &kv);
    let output = drafting.forward(&mut device, &step).unwrap();
    drafting.drafter().unwrap().draft(&mut device, output.hidden, &[0, 1, 2, 3, 4], &step).unwrap();
    assert!(device.high_water() < 64 * MIB, "{} bytes of workspace", device.high_water());
}

/// Configuration, parameters in billions, layers in the KV cache, KV heads, width of a head.
const PUBLISHED: [(&str, f64, usize, usize, usize); 19] = [
    ("smollm3-3b.json", 3.08, 36, 4, 128),
    ("phi-4-mini-3.8b.json", 3.84, 32, 8, 128),
    ("ministral-3-8b.json", 8.49, 34, 8, 128),
    ("granite-3.3-8b.json", 8.17, 40, 8, 128),
    ("olmo-3-7b.json", 7.30, 32, 32, 128),
    ("gemma-2-9b.json", 9.24, 42, 8, 256),
    ("gpt-oss-20b.json", 20.91, 24, 8, 64),
    ("hunyuan-7b.json", 7.50, 32, 8, 128),
    ("ernie-4.5-21b-a3b.json", 21.83, 28, 4, 128),
    ("glm-4-9b-0414.json", 9.40, 40, 2, 128),
    ("glm-4.5-air-106b-a12b.json", 106.85, 46, 8, 128),
    // One row a token: 512 elements and 64 rotated ones.
    ("glm-4.7-flash.json", 29.94, 47, 1, 576),
    ("deepseek-v2-lite.json", 15.71, 27, 1, 576),
    // Its configuration from memory, in bfloat16: published weights are FP8.
    ("deepseek-v3.json", 671.0, 61, 1, 576),
    ("lfm2-1.2b.json", 1.17, 6, 8, 64),
    ("lfm2-8b-a1b.json", 8.34, 6, 8, 64),
    ("falcon-h1-0.5b.json", 0.521, 36, 2, 64),
    ("granite-4.0-h-tiny.json", 6.94, 4, 4, 128),
    ("nemotron-3-nano-30b-a3b.json", 31.58, 6, 2, 128),
];

/// The number of parameters is what model cards give: a wrong width or a missing tensor would show.
#[test]
fn published_sizes_are_planned_from_their_configurations() {
    for (name, billions, layers, kv_heads, head_dim) in PUBLISHED {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let (weights, kv) = (declare.finish(), model.shape(KvDtype::F16).kv);
        assert_eq!(kv.layers().len(), layers, "{name}");
        let layouts = kv.layers().iter().map(|layer| (layer.layout.kv_heads(), layer.layout.head_dim()));
        assert!(layouts.into_iter().all(|layout| layout == (kv_heads, head_dim)), "{name}");
        let found = weights.bytes as f64 / 2e9;
        assert!((found / billions - 1.0).abs() < 0.01, "{name}: {found} billion parameters");
        let seqs = [SeqSpan { first_row: 0, rows: 1, start: 0, pages_at: 0, pages: 1, seen_from: 0, state: None }];
        let step = StepInput {
            tokens: &[0],
            positions: &[0],
            seqs: &seqs,
            pages: &[0],
            window_pages: &[0],
            logit_rows: &[0],
            ..StepInput::default()
        };
        let mut device = PlanDevice::new(&weights, &kv);
        model.forward(&mut device, &step).unwrap();
        assert!(device.high_water() < 8 * MIB, "{name}: {} bytes of workspace", device.high_water());
    }
}

/// Configuration; parameters in millions, as model cards give them (EmbeddingGemma's without its dense layers, which are no part of
/// its configuration); elements of a weight in bytes; layers with a window; width of a head; longest context.
const ENCODERS: [(&str, f64, f64, usize, usize, usize); 5] = [
    ("gte-modernbert-base.json", 149.01, 2.0, 14, 64, 8192),
    ("gte-reranker-modernbert-base.json", 149.61, 2.0, 14, 64, 8192),
    ("nomic-embed-text-v1.5.json", 136.73, 4.0, 0, 64, 8192),
    // 250,048 words; 12 x 2.36 of attention; 6 x 4.72 of plain feed-forward parts, 6 x 8 x 4.72 of experts.
    ("nomic-embed-text-v2-moe.json", 475.29, 4.0, 0, 64, 2048),
    ("embeddinggemma-300m.json", 302.86, 4.0, 20, 256, 2048),
];

#[test]
fn published_encoders_are_planned_from_their_configurations() {
    for (name, millions, element, windows, head_dim, context) in ENCODERS {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let (weights, shape) = (declare.finish(), model.shape(KvDtype::F16));
        let found = weights.bytes as f64 / element / 1e6;
        assert!((found / millions - 1.0).abs() < 2e-3, "{name}: {found} million parameters");
        assert_eq!(checkpoint.config.layer_is_sliding.iter().filter(|sliding| **sliding).count(), windows, "{name}");
        assert_eq!((shape.kv.layers().len(), shape.encoder.unwrap().head_dim()), (0, head_dim), "{name}");
        assert_eq!(checkpoint.config.max_context, context, "{name}");
        let rows = 512;
        let (tokens, positions) = (vec![0; rows], (0..rows as u32).collect::<Vec<_>>());
        let pages: Vec<u32> = (0..(rows / PAGE_TOKENS) as u32).collect();
        let span = SeqSpan { first_row: 0, rows, start: 0, pages_at: 0, pages: pages.len(), seen_from: 0, state: None };
        let step = StepInput {
            tokens: &tokens,
            positions: &positions,
            types: &tokens,
            seqs: &[span],
            pages: &pages,
            logit_rows: &[0],
            ..StepInput::default()
        };
        let mut device = PlanDevice::new(&weights, &shape.kv);
        let output = model.forward(&mut device, &step).unwrap();
        let labels = checkpoint.config.encoder.unwrap().labels.unwrap_or(0);
        assert_eq!((output.logits.cols, output.hidden.cols), (labels, 768), "{name}");
        // Rows of the widest layer: the hidden state, its norm, gate and up projection; or queries, keys and values.
        // Two experts' rows and their sum stand beside them.
        let experts = if checkpoint.config.experts.is_some() { 3 * 768 } else { 0 };
        assert!(
            device.high_water() < rows * 4 * (2 * 768 + 2 * 3072 + 768 + experts),
            "{name}: {}",
            device.high_water()
        );
    }
}

/// Configuration; weights of two bytes, in millions: the embedding, what each layer has for it, all layers; keys and values of a token
/// in bytes: those kept for the whole context, those of the window.
const GEMMA_4: [(&str, [f64; 3], usize, usize); 4] = [
    // Heads: 28 layers of 2 · 1,536 · 2,048 and 7 of twice that, keys and values in 12 of the former (2 · 1,536 · 256) and 3 of the latter.
    // Feed-forward parts: 15 of 3 · 1,536 · 6,144 and 20 of twice that. The second table: 35 · 256 wide, as is its projection; 2 · 1,536 · 256
    // in every layer.
    ("gemma-4-e2b.json", [402.65, 2348.81 + 13.76 + 27.53, 264.24 + 14.16 + 1557.14], 3 * 4 * 512, 12 * 4 * 256),
    // As above with 35 and 7 layers, 20 and 4 of them with keys and values in 2 heads.
    (
        "gemma-4-e4b.json",
        [671.09, 2818.57 + 27.53 + 55.05, 513.80 + 73.40 + 3303.01],
        4 * 4 * 2 * 512,
        20 * 4 * 2 * 256,
    ),
    // 25 and 5 layers; the latter have no value projection. A feed-forward part of 2,112 beside 128 experts of 704, and a router.
    (
        "gemma-4-26b-a4b.json",
        [738.20, 0.0, 807.40 + 302.78 + 535.27 + 22_837.99 + 10.81],
        5 * 4 * 2 * 512,
        25 * 4 * 8 * 256,
    ),
    ("gemma-4-31b.json", [1409.29, 0.0, 6165.63 + 2312.11 + 20_808.99], 10 * 4 * 4 * 512, 50 * 4 * 16 * 256),
];

#[test]
fn all_sizes_of_gemma_4_are_planned_from_their_configurations() {
    for (name, millions, whole, window) in GEMMA_4 {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let (weights, kv) = (declare.finish(), model.shape(KvDtype::F16).kv);
        let (found, expected) = (weights.bytes as f64 / 2e6, millions.iter().sum::<f64>());
        assert!((found / expected - 1.0).abs() < 5e-4, "{name}: {found} million parameters for {expected}");
        let table = weights.linears.iter().find(|linear| &*linear.name == "model.embed_tokens_per_layer.weight");
        let shape = table.map(|table| (table.packing.out(), table.packing.k()));
        let expected = (millions[1] > 0.0).then_some((262_144, checkpoint.config.layers * 256));
        assert_eq!(shape, expected, "{name}: a second table");
        let token = |group| kv.page_bytes(group) / PAGE_TOKENS;
        assert_eq!((token(KvGroup::Whole), token(KvGroup::Window)), (whole, window), "{name}");
        assert_eq!(kv.window(), checkpoint.config.sliding_window, "{name}");
    }
}

/// Configuration; weights of two bytes, in millions: ends, attention, feed-forward parts; keys and values of a token in bytes: those
/// kept for the whole context, those of the window.
const UNEVEN: [(&str, [f64; 3], usize, usize); 3] = [
    // Two ends of 100,352 · 2,048. In 10 layers 48 heads of 128, in 30 that slide 64: queries and results of 2,048 · 128 a head,
    // 2,048 · 1,024 for keys and for values, a gate a head. One feed-forward part of 3 · 2,048 · 8,192; in 39 layers a router of
    // 256 · 2,048, and 257 experts of 3 · 2,048 · 512.
    ("laguna-xs.2.json", [411.04, 294.58 + 1136.39, 50.33 + 20.45 + 31_529.63], 10 * 4 * 8 * 128, 30 * 4 * 8 * 128),
    // Two ends of 202,048 · 6,656. In 52 layers queries, gates and results of 6,656 · 4,096, keys and values of 6,656 · 256, a
    // feed-forward part of 3 · 6,656 · 19,968. Every fourth layer is global.
    ("muse-glimmer-30b.json", [2689.66, 4430.23, 20_733.49], 13 * 4 * 2 * 128, 39 * 4 * 2 * 128),
    // Two ends of 202,048 · 5,120. In 48 layers queries and results of 5,120 · 5,120, keys and values of 5,120 · 1,024, a router of
    // 16 · 5,120, and 17 experts of 3 · 5,120 · 8,192. Every fourth layer is global, the others attend within chunks.
    ("llama-4-scout-109b-a17b.json", [2068.97, 3019.90, 3.93 + 102_676.56], 12 * 4 * 8 * 128, 36 * 4 * 8 * 128),
];

#[test]
fn layers_with_their_own_heads_are_planned_from_their_configurations() {
    for (name, millions, whole, window) in UNEVEN {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let (weights, kv) = (declare.finish(), model.shape(KvDtype::F16).kv);
        let (found, expected) = (weights.bytes as f64 / 2e6, millions.iter().sum::<f64>());
        assert!((found / expected - 1.0).abs() < 2e-4, "{name}: {found} million parameters for {expected}");
        let token = |group| kv.page_bytes(group) / PAGE_TOKENS;
        assert_eq!((token(KvGroup::Whole), token(KvGroup::Window)), (whole, window), "{name}");
        assert_eq!(kv.window(), checkpoint.config.sliding_window, "{name}");
    }
}

/// The encoder of Gemma 3's larger sizes, in millions: patches of 3 · 14 · 14, 4,096 positions, 27 layers of 4 · 1,152² and
/// 2 · 1,152 · 4,304, and a projection to the model's width. Published configurations leave out what equals a default.
#[test]
fn the_encoder_of_gemma_3_is_planned_from_its_configuration() {
    let bytes = |name| {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let kv = model.shape(KvDtype::F16).kv;
        (model.vision().is_some(), kv.bytes(1, 1), declare.finish().bytes as f64 / 2e6)
    };
    let ((sees, kv, whole), (_, kv_of_text, text)) = (bytes("gemma-3-4b-it.json"), bytes("gemma-3-4b.json"));
    assert!(sees);
    assert_eq!(kv, kv_of_text);
    // The published text model alone has 64 rows less.
    let (found, expected) = (whole - text - 64.0 * 2560.0 / 1e6, 0.68 + 4.72 + 411.06 + 2.95);
    assert!((found / expected - 1.0).abs() < 5e-3, "{found} million parameters for {expected}");
}

/// The vision encoder of Llama 4, its configuration from memory, in millions: patches of 3 · 14 · 14, 577 positions, 34 layers of
/// 4 · 1,408² and 2 · 1,408 · 5,632, projections of four patches to 4,096 and of these to 4,096, and one to the model's width. Each layer
/// has 9 · 1,408 + 5,632 numbers of norms and biases, in twice the bytes.
#[test]
fn the_vision_encoder_of_llama_4_is_planned_from_its_configuration() {
    let bytes = |name| {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let kv = model.shape(KvDtype::F16).kv.bytes(1, 1);
        (model.vision().map(|vision| vision.output_width()), kv, declare.finish().bytes as f64 / 2e6)
    };
    let (whole, text) = (bytes("llama-4-scout-109b-a17b-it.json"), bytes("llama-4-scout-109b-a17b.json"));
    assert_eq!((whole.0, text.0), (Some(5120), None));
    assert_eq!(whole.1, text.1);
    let (found, expected) = (whole.2 - text.2, 0.83 + 0.81 + 808.86 + 23.07 + 16.78 + 20.97 + 2.0 * 0.62);
    assert!((found / expected - 1.0).abs() < 1e-3, "{found} million parameters for {expected}");
}

/// The encoder of LFM2-VL-1.6B, in millions: patches of 3 · 16 · 16, 256 positions, 27 layers of 4 · 1,152² and 2 · 1,152 · 4,304, and
/// projections of four patches to 2,048 and of these to the model's width.
#[test]
fn the_encoder_of_lfm2_vl_is_planned_from_its_configuration() {
    let bytes = |name| {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let state = model.shape(KvDtype::F16).state.expect("a recurrent state");
        (model.vision().is_some(), (state.layers, state.slot_bytes()), declare.finish().bytes as f64 / 2e6)
    };
    let ((sees, state, whole), (_, state_of_text, text)) = (bytes("lfm2-vl-1.6b.json"), bytes("lfm2-1.2b.json"));
    assert!(sees);
    assert_eq!(state, state_of_text);
    let (found, expected) = (whole - text, 0.88 + 0.29 + 411.07 + 13.63);
    assert!((found / expected - 1.0).abs() < 5e-3, "{found} million parameters for {expected}");
}

/// The encoders of Qwen2.5-Omni-7B, in millions. Images: patches of 2 · 3 · 14 · 14, 32 layers of 4 · 1,280² and 3 · 1,280 · 3,420, and
/// projections of four patches to 5,120 and of these to the model's width. Audio: convolutions of 3 · 128 · 1,280 and 3 · 1,280², 32
/// layers of 4 · 1,280² and 2 · 1,280 · 5,120, and a projection. The language model is that of Qwen2.5-7B.
#[test]
fn the_encoders_of_qwen2_5_omni_are_planned_from_its_configuration() {
    let parts = |name| {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let kv = model.shape(KvDtype::F16).kv.bytes(1, 1);
        let senses = (model.vision().is_some(), model.audio().is_some());
        (senses, kv, declare.finish().bytes as f64 / 2e6)
    };
    let ((senses, kv, whole), (_, kv_of_text, text)) = (parts("qwen2.5-omni-7b.json"), parts("qwen2.5-7b.json"));
    assert_eq!((senses, kv), ((true, true), kv_of_text));
    let (found, expected) = (whole - text, 1.51 + 629.96 + 44.56 + 5.41 + 629.15 + 4.59);
    assert!((found / expected - 1.0).abs() < 2e-3, "{found} million parameters for {expected}");
}

/// The encoders of Gemma 4, in millions: patches of 3 · 16 · 16, 10,240 positions for each axis, layers, and a projection to the model's
/// width. 16 layers of 4 · 768² and 3 · 768 · 3,072; 27 of 4 · 1,152² and 3 · 1,152 · 4,304. E2B's audio encoder: two convolutions, 12
/// layers of 2 · 2 · 1,024 · 4,096 and 8 · 1,024², three projections.
#[test]
fn the_encoders_of_gemma_4_are_planned_from_their_configurations() {
    for (name, millions, sees_ahead) in [
        ("gemma-4-e2b", [0.59 + 307.05, 15.73, 151.0, 1.18], false),
        ("gemma-4-31b", [0.88, 23.59, 544.94, 6.19], true),
    ] {
        let bytes = |name: String| {
            let checkpoint = config(&name);
            let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
            let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
            let kv = model.shape(KvDtype::F16).kv.bytes(1, 1);
            let ahead = model.vision().map(|vision| vision.tokens_see_each_other());
            (ahead, kv, declare.finish().bytes as f64 / 2e6)
        };
        let (whole, text) = (bytes(format!("{name}-it.json")), bytes(format!("{name}.json")));
        assert_eq!((whole.0, text.0), (Some(sees_ahead), None), "{name}");
        assert_eq!(whole.1, text.1, "{name}");
        let (found, expected) = (whole.2 - text.2, millions.iter().sum::<f64>());
        assert!((found / expected - 1.0).abs() < 2e-3, "{name}: {found} million parameters for {expected}");
    }
}

/// Bytes of one sequence's state, in f32: what a convolution looks back to, and a matrix a head.
#[test]
fn states_of_published_hybrids_are_those_of_their_sizes() {
    for (name, layers, bytes) in [
        ("lfm2-1.2b.json", 10, 2 * 2048 * 4),
        ("lfm2-8b-a1b.json", 18, 2 * 2048 * 4),
        ("granite-4.0-h-tiny.json", 36, 3 * (48 * 64 + 2 * 128) * 4 + 48 * 128 * 64 * 4),
        ("nemotron-3-nano-30b-a3b.json", 23, 3 * (64 * 64 + 2 * 8 * 128) * 4 + 64 * 128 * 64 * 4),
    ] {
        let checkpoint = config(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let state = model.shape(KvDtype::F16).state.expect("a recurrent state");
        assert_eq!((state.layers, state.slot_bytes()), (layers, layers * bytes), "{name}");
    }
}

#[test]
fn a_draft_head_that_is_not_there_is_refused_by_its_flag() {
    for (model, part) in [
        ("llama", "--enable-mtp needs a draft head, and Llama models have none"),
        ("qwen3-moe", "--enable-mtp needs a draft head, and Qwen3Moe models have none"),
        ("gguf-qwen3next-q8_0", "--enable-mtp needs a draft head, and the checkpoint has none"),
        ("glm4", "--enable-mtp needs a draft head, and GLM-4 models have none"),
        ("mlx-glm4.7-flash-4bit", "the checkpoint has none (no tensor 'mtp.fc', 'eh_proj' or 'nextn.eh_proj')"),
        ("deepseek-v2-lite", "the checkpoint has none (num_nextn_predict_layers is 0 or missing)"),
    ] {
        let checkpoint = crate::common::checkpoint(model);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let refusal = plimsoll_models::build(&checkpoint.config, &mut declare, true).err().expect(model).to_string();
        assert!(refusal.contains(part), "{model}: {refusal}");
    }
}

/// Configuration, parameters of the head in millions, layers in the KV cache with it. By hand: GLM-4.5-Air has attention of
/// 2 · 4,096 · 12,288 + 2 · 4,096 · 1,024, 129 experts of 3 · 4,096 · 1,408, a router of 128 · 4,096, a projection of 2 · 4,096².
/// Attention of GLM-4.7-Flash has 2,048 · 768 + 768 · 20 · 256 + 2,048 · 576 + 512 · 20 · 448 + 20 · 256 · 2,048, that of
/// DeepSeek-V3 7,168 · 1,536 + 1,536 · 128 · 192 + 7,168 · 576 + 512 · 128 · 256 + 128 · 128 · 7,168; the rest as above.
const HEADS: [(&str, f64, usize); 3] = [
    ("glm-4.5-air-106b-a12b.json", 2375.06, 47),
    ("glm-4.7-flash.json", 643.71, 48),
    ("deepseek-v3.json", 11_610.07, 62),
];

#[test]
fn draft_heads_behind_the_last_layer_are_planned_from_their_configurations() {
    for (name, millions, layers) in HEADS {
        let mut checkpoint = config(name);
        let built = |with_drafter| {
            let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
            let model = plimsoll_models::build(&checkpoint.config, &mut declare, with_drafter).unwrap();
            (model.shape(KvDtype::F16).kv, declare.finish().bytes as f64 / 2e6)
        };
        let ((plain, without), (kv, with)) = (built(false), built(true));
        let found = with - without;
        assert!((found / millions - 1.0).abs() < 2e-3, "{name}: {found} million parameters for {millions}");
        assert_eq!((plain.layers().len() + 1, kv.layers().len()), (layers, layers), "{name}");
        assert_eq!(plain.layers()[0].layout, kv.layers()[layers - 1].layout, "{name}");
        checkpoint.config.draft_layers = 2;
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let refusal = plimsoll_models::build(&checkpoint.config, &mut declare, true).err().expect(name).to_string();
        assert!(refusal.contains("--enable-mtp needs a draft head of one layer, and num_nextn_predict_layers is 2"));
    }
}

#[test]
fn without_being_asked_for_no_draft_head_is_loaded() {
    let checkpoint = crate::common::checkpoint("qwen3.5");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    assert!(model.drafter().is_none());
    assert_eq!(model.shape(KvDtype::F32).kv.layers().len(), 1);
    assert!(declare.finish().linears.iter().all(|linear| !linear.name.starts_with("mtp.")));
}

/// Whisper large-v3-turbo, its configuration from memory: 32 layers of the encoder, 4 of the decoder, of 1,280.
#[test]
fn a_whisper_is_planned_from_its_configuration() {
    let checkpoint = config("whisper-large-v3-turbo.json");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    let (weights, shape) = (declare.finish(), model.shape(KvDtype::F16));
    // An attention has four matrices and three biases, a feed-forward part two and two, a norm two vectors.
    let (attention, mlp, norm) = (4 * 1280 * 1280 + 3 * 1280, 2 * 1280 * 5120 + 5120 + 1280, 2 * 1280);
    let encoder = 3 * 1280 * (128 + 1280) + 2 * 1280 + 1500 * 1280 + 32 * (attention + mlp + 2 * norm) + norm;
    let decoder = (51_866 + 448) * 1280 + 4 * (2 * attention + mlp + 3 * norm) + norm;
    // Matrices have two bytes an element; vectors and positions four, which is 6 MiB more: 0.4%.
    let (found, expected) = (weights.bytes as f64 / 2e6, (encoder + decoder) as f64 / 1e6);
    assert!((0.003..0.005).contains(&(found / expected - 1.0)), "{found} million parameters for {expected}");
    assert!((808.0..810.0).contains(&expected), "{expected}");
    // One layer of keys and values for both attentions of a decoder layer.
    assert_eq!(shape.kv.token_bytes(), 4 * 2 * 2 * 1280);
    assert_eq!((checkpoint.config.max_context, model.audio().unwrap().output_width()), (1500 + 448, 1280));
}
