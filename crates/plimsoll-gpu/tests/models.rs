//! Whole models on the GPU device against transformers: every position's log-probability, in one step and in pieces, alone and beside
//! another sequence. How a sequence is cut into steps changes no bit.

mod common;
#[path = "models/drafts.rs"]
mod drafts;

use common::{PAGES, Rig, alone, checkpoint, cpu, gpu};
use plimsoll_device::{Declare, DtypePolicy, KvDtype, NO_STATE, PAGE_TOKENS, PlanDevice, SeqSpan, StepInput, Target};
use plimsoll_models::Model;
use serde_json::Value;

/// Largest difference allowed between a log-probability and its reference.
const TOLERANCE: f64 = 2e-3;

/// One sequence's part of a step: its tokens, the position of the first, and which of two sequences it is.
type Part<'a> = (&'a [u32], usize, usize);

/// Lays out a step and runs it; `wanted`: the rows of which logits are wanted, and nothing else.
fn laid_out<T>(parts: &[Part<'_>], wanted: Option<&[u32]>, run: impl FnOnce(&StepInput<'_>) -> T) -> T {
    let (mut tokens, mut positions, mut seqs, mut pages) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut state_out = Vec::new();
    for (own, start, sequence) in parts {
        let (rows, count) = (own.len(), (start + own.len()).div_ceil(PAGE_TOKENS));
        let (first_row, pages_at) = (tokens.len(), pages.len());
        let state = (*start > 0).then_some(*sequence as u32);
        seqs.push(SeqSpan { first_row, rows, start: *start, pages_at, pages: count, seen_from: 0, state });
        state_out.extend((1..=rows).map(|row| if row == rows { *sequence as u32 } else { NO_STATE }));
        tokens.extend_from_slice(own);
        positions.extend(*start as u32..(start + rows) as u32);
        pages.extend((0..count as u32).map(|page| (sequence * PAGES / 2) as u32 + page));
    }
    let all: Vec<u32> = (0..tokens.len() as u32).collect();
    let of_row = |(i, row): (usize, &u32)| {
        let row = *row as usize;
        let seq = seqs.iter().rfind(|seq: &&SeqSpan| seq.first_row <= row).unwrap();
        SeqSpan { first_row: i, rows: 1, start: seq.start + row - seq.first_row, ..*seq }
    };
    let logit_seqs: Vec<SeqSpan> = wanted.unwrap_or_default().iter().enumerate().map(of_row).collect();
    run(&StepInput {
        tokens: &tokens,
        positions: &positions,
        seqs: &seqs,
        pages: &pages,
        window_pages: &pages,
        logit_rows: wanted.unwrap_or(&all),
        logit_seqs: &logit_seqs,
        state_out: &state_out,
        only_logits: wanted.is_some(),
        ..StepInput::default()
    })
}

/// The logits of every row of a step; `only_logits` leaves out what they do not need.
fn step(device: &mut dyn Rig, model: &dyn Model, parts: &[Part<'_>], wanted: Option<&[u32]>) -> Vec<Vec<f32>> {
    let scope = device.mark();
    let output = laid_out(parts, wanted, |input| model.forward(device.as_device(), input)).unwrap();
    let rows = device.rows_of(&[output.logits]).remove(0);
    device.release(scope);
    rows
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn logprob(logits: &[f32], id: u32) -> f64 {
    let top = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - top).exp()).sum();
    f64::from(logits[id as usize] - top) - sum.ln()
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold((0, f32::MIN), |best, (i, x)| if *x > best.1 { (i, *x) } else { best });
    best.0 as u32
}

fn reference(name: &str) -> Value {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name);
    serde_json::from_slice(&std::fs::read(folder.join("reference.json")).unwrap()).unwrap()
}

/// The largest difference of a log-probability.
fn check(name: &str, dtype: DtypePolicy, kv: KvDtype, tolerance: f64) {
    let checkpoint = checkpoint(name);
    let mut declare = Declare::new(&checkpoint, dtype);
    let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    let (table, shape) = (declare.finish(), model.shape(kv));
    let mut device = gpu(&table, &checkpoint, &shape);
    let reference = reference(name);
    let mut worst: f64 = 0.0;
    for prompt in reference["prompts"].as_array().unwrap() {
        let (tokens, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        let all = [tokens.clone(), greedy.clone()].concat();
        assert!(all.len() <= PAGES / 2 * PAGE_TOKENS, "{name}: {} tokens", all.len());
        let whole = step(&mut device, &*model, &[(&all, 0, 0)], None);
        for (position, expected) in prompt["logprobs"].as_array().unwrap().iter().enumerate().skip(1) {
            let off = (logprob(&whole[position - 1], tokens[position]) - expected.as_f64().unwrap()).abs();
            assert!(off <= tolerance, "{name}: {} tokens, position {position}: off by {off}", tokens.len());
            worst = worst.max(off);
        }
        let chosen: Vec<u32> = whole[tokens.len() - 1..][..greedy.len()].iter().map(|row| argmax(row)).collect();
        assert_eq!(chosen, greedy, "{name}: {} tokens", tokens.len());
        let mut pieces = Vec::new();
        for length in [1, 7, 16, 33].into_iter().cycle() {
            let start = pieces.len();
            let end = (start + length).min(all.len());
            pieces.extend(step(&mut device, &*model, &[(&all[start..end], start, 1)], None));
            if end == all.len() {
                break;
            }
        }
        assert_eq!(pieces, whole, "{name}: in pieces");
        let half = all.len() / 2;
        if half > 3 {
            let first = step(&mut device, &*model, &[(&all[..3], 0, 1), (&all[..half], 0, 0)], None);
            let second = step(&mut device, &*model, &[(&all[half..], half, 0), (&all[3..5], 3, 1)], None);
            let beside = [&first[3..], &second[..all.len() - half]].concat();
            assert_eq!(beside, whole, "{name}: beside another");
            let wanted = [0, half as u32];
            let some = step(&mut device, &*model, &[(&all, 0, 0)], Some(&wanted));
            assert_eq!(some, [whole[0].clone(), whole[half].clone()], "{name}: some logits alone");
        }
    }
    println!("{name}: largest difference of a log-probability {worst:.2e}");
}

#[test]
#[ignore = "external"]
fn dense_models_give_the_log_probabilities_of_transformers() {
    let _alone = alone();
    for name in ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3"] {
        check(name, DtypePolicy::F32, KvDtype::F32, TOLERANCE);
    }
}

#[test]
#[ignore = "external"]
fn relatives_of_dense_models_do_too() {
    let _alone = alone();
    for name in [
        "mistral",
        "gemma2",
        "gemma3",
        "phi3",
        "olmo2",
        "olmo3",
        "smollm3",
        "granite",
        "glm4",
        "hunyuan",
        "gemma4-e2b",
        "muse-glimmer",
    ] {
        check(name, DtypePolicy::F32, KvDtype::F32, TOLERANCE);
    }
}

#[test]
#[ignore = "external"]
fn mixtures_of_experts_do_too() {
    let _alone = alone();
    for name in [
        "qwen3-moe",
        "gpt-oss",
        "gemma4-26b",
        "glm4-moe",
        "ernie4.5-moe",
        "laguna",
        "laguna-elements",
        "llama4",
        "llama4-whole",
    ] {
        check(name, DtypePolicy::F32, KvDtype::F32, TOLERANCE);
    }
    check("gpt-oss-mxfp4", DtypePolicy::Auto, KvDtype::F32, TOLERANCE);
}

#[test]
#[ignore = "external"]
fn recurrent_layers_do_too() {
    let _alone = alone();
    for name in
        ["lfm2", "lfm2-moe", "granite4-h", "granite4-h-moe", "nemotron-h", "nemotron-h-latent", "nemotron-h-moe"]
    {
        check(name, DtypePolicy::F32, KvDtype::F32, TOLERANCE);
    }
    for name in ["qwen3.5", "qwen3.5-moe", "qwen3-next"] {
        check(name, DtypePolicy::F32, KvDtype::F32, TOLERANCE);
    }
    check("gguf-qwen35-q8_0", DtypePolicy::Auto, KvDtype::F32, TOLERANCE);
}

#[test]
#[ignore = "external"]
fn latent_attention_does_too() {
    let _alone = alone();
    for name in ["deepseek-v2-lite", "deepseek-v3", "glm4.7-flash"] {
        check(name, DtypePolicy::F32, KvDtype::F32, TOLERANCE);
    }
    check("gguf-glm4.7-flash-q8_0", DtypePolicy::Auto, KvDtype::F32, TOLERANCE);
}

#[test]
#[ignore = "external"]
fn weights_as_stored_do_too() {
    let _alone = alone();
    for name in
        ["llama-bf16", "llama-f16", "gguf-llama-q8_0", "gguf-llama-q4_0", "mlx-llama-4bit-g64", "gguf-qwen3-mixed"]
    {
        check(name, DtypePolicy::Auto, KvDtype::F32, TOLERANCE);
    }
}

/// Prompts long enough for tiles, of the experts' matrices too: in one step, and in steps that are too short for them.
#[test]
#[ignore = "external"]
fn long_prompts_have_the_bits_of_their_pieces() {
    let _alone = alone();
    let tokens: Vec<u32> = (0..180).map(|i| 3 + i * i % 61).collect();
    for name in ["llama", "gguf-qwen3-mixed", "qwen3-moe", "gemma4-26b", "llama4", "gpt-oss-mxfp4", "nemotron-h-moe"] {
        let checkpoint = checkpoint(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let (table, shape) = (declare.finish(), model.shape(KvDtype::F16));
        let mut device = gpu(&table, &checkpoint, &shape);
        let whole = step(&mut device, &*model, &[(&tokens, 0, 0)], None);
        let mut pieces = Vec::new();
        for piece in tokens.chunks(14) {
            pieces.extend(step(&mut device, &*model, &[(piece, pieces.len(), 1)], None));
        }
        assert!(pieces == whole, "{name}: in pieces");
        let two = step(&mut device, &*model, &[(&tokens[..40], 0, 1), (&tokens, 0, 0)], None);
        assert!(two[40..] == whole && two[..40] == whole[..40], "{name}: beside another");
    }
}

/// Largest difference of a log-probability between two ways to use keys and values in eight bits: the CPU rounds queries, too.
const Q8_TOLERANCE: f64 = 5e-2;

/// Both devices with keys and values in fewer bits: the same choice for every position, and nearly the same logits.
#[test]
#[ignore = "external"]
fn keys_and_values_in_fewer_bits_agree_with_the_cpu() {
    let _alone = alone();
    for (name, kv, tolerance) in [
        ("llama", KvDtype::F16, TOLERANCE),
        ("qwen3", KvDtype::F16, TOLERANCE),
        ("llama", KvDtype::Bf16, TOLERANCE),
        ("llama", KvDtype::Q8, Q8_TOLERANCE),
    ] {
        let checkpoint = checkpoint(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let (table, shape) = (declare.finish(), model.shape(kv));
        let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
        let reference = reference(name);
        for prompt in reference["prompts"].as_array().unwrap() {
            let tokens = ids(&prompt["ids"]);
            let expected = step(&mut cpu, &*model, &[(&tokens, 0, 0)], None);
            let got = step(&mut gpu, &*model, &[(&tokens, 0, 0)], None);
            for (row, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let id = argmax(expected);
                let off = (logprob(got, id) - logprob(expected, id)).abs();
                assert!(off <= tolerance, "{name}, {kv:?}: row {row} of {}: off by {off}", tokens.len());
            }
        }
    }
}

/// The planner names the operations that the GPU lacks, and no others.
#[test]
#[ignore = "external"]
fn models_with_missing_operations_are_named() {
    for (name, missing) in [
        ("llama", None),
        ("gemma3", None),
        ("qwen3-moe", None),
        ("qwen3.5", None),
        ("nemotron-h-moe", None),
        ("bert", None),
        ("bert-modern-mean", None),
        ("bert-nomic", None),
        ("bert-nomic-moe", None),
        ("vl-qwen2.5", None),
        ("qwen4-exp", Some("n-gram embeddings")),
        ("gptq-llama-actorder", Some("columns ordered by activation")),
    ] {
        let checkpoint = checkpoint(name);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        let (table, shape) = (declare.finish().on(Target::Gpu), model.shape(KvDtype::F16));
        let seqs = [SeqSpan { first_row: 0, rows: 2, start: 0, pages_at: 0, pages: 1, seen_from: 0, state: None }];
        let step = StepInput {
            tokens: &[0, 0],
            positions: &[0, 1],
            seqs: &seqs,
            pages: &[0],
            window_pages: &[0],
            logit_rows: &[1],
            state_out: &[NO_STATE, 0],
            types: &[0, 0],
            places: &[[0.0; 3]; 2],
            ..StepInput::default()
        };
        let mut device = PlanDevice::new(&table, &shape.kv);
        model.forward(&mut device, &step).unwrap();
        assert!(
            device.missing() == missing || missing.is_some() && device.missing().is_some(),
            "{name}: {:?}",
            device.missing()
        );
        assert_eq!(device.missing().is_some(), missing.is_some(), "{name}");
    }
}
