//! Mixtures of experts and hybrids on the device against transformers: every position's log-probability. Runs are in one pass, in chunks of
//! every kind, row by row, and beside another sequence. Between chunks the states are in slots. Chunking changes no bit.

use crate::common::{Part, Rig, argmax, ids, logprob, reference};
use plimsoll_device::DtypePolicy;
use serde_json::Value;

/// Largest difference allowed between a log-probability and its reference.
const TOLERANCE: f64 = 2e-3;

/// Ways to cut a sequence, as the lengths of pieces that are repeated.
const CUTS: [&[usize]; 4] = [&[64], &[1, 7, 16, 33], &[3, 61, 2], &[15, 1, 1]];

/// Runs `tokens` in pieces of these lengths, with the state in alternating slots. Returns the logits of every position.
fn in_pieces(rig: &mut Rig, tokens: &[u32], lengths: &[usize]) -> Vec<Vec<f32>> {
    let (mut logits, mut start, mut slot) = (Vec::new(), 0, None);
    for (i, length) in lengths.iter().cycle().enumerate() {
        let end = (start + length).min(tokens.len());
        if start == end {
            break;
        }
        // The slot changes, and at times stays the same.
        let next = (i as u32 * 2 / 3) % 3;
        logits.extend(rig.step(&[Part::new(&tokens[start..end], start, slot, next)]));
        (start, slot) = (end, Some(next));
    }
    logits
}

fn check_prompt(rig: &mut Rig, model: &str, prompt: &Value) -> f64 {
    let (prompt_ids, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
    let tokens = [prompt_ids.clone(), greedy.clone()].concat();
    let whole = rig.step(&[Part::new(&tokens, 0, None, 0)]);
    let mut worst: f64 = 0.0;
    let mut compare = |position: usize, id: u32, expected: &Value| {
        let difference = (logprob(&whole[position - 1], id) - expected.as_f64().unwrap()).abs();
        assert!(difference <= TOLERANCE, "{model}: {} tokens, position {position}: off by {difference}", tokens.len());
        worst = worst.max(difference);
    };
    for (position, expected) in prompt["logprobs"].as_array().unwrap().iter().enumerate().skip(1) {
        compare(position, tokens[position], expected);
    }
    for (i, expected) in prompt["greedy_logprobs"].as_array().unwrap().iter().enumerate() {
        compare(prompt_ids.len() + i, greedy[i], expected);
    }
    for (i, id) in greedy.iter().enumerate() {
        assert_eq!(argmax(&whole[prompt_ids.len() + i - 1]), *id, "{model}: greedy token {i}");
    }
    for lengths in CUTS {
        assert_eq!(in_pieces(rig, &tokens, lengths), whole, "{model}: in pieces of {lengths:?}");
    }
    for rows in [vec![], vec![tokens.len() as u32 - 1], (0..tokens.len() as u32).step_by(3).collect()] {
        let wanted: Vec<_> = rows.iter().map(|row| whole[*row as usize].clone()).collect();
        let parts = [Part::new(&tokens, 0, None, 0)];
        assert_eq!(rig.only_logits(&parts, &rows), wanted, "{model}: the logits of rows {rows:?} alone");
    }
    // Beside another sequence with its state in other slots.
    let half = tokens.len() / 2;
    if half > 0 {
        let other = |tokens: &[u32], start, from, slot| Part { sequence: 1, ..Part::new(tokens, start, from, slot) };
        let first = rig.step(&[Part::new(&tokens[..half], 0, None, 4), other(&tokens[..3], 0, None, 5)]);
        let second = rig.step(&[other(&tokens[..2], 3, Some(5), 5), Part::new(&tokens[half..], half, Some(4), 6)]);
        assert_eq!(first[..half], whole[..half], "{model}: beside another, first half");
        assert_eq!(second[2..], whole[half..], "{model}: beside another, second half");
        // Layer by layer, with steps of the other in between.
        let between = [other(&tokens[..2], 3, Some(5), 7)];
        let alone = rig.step(&between);
        let (rest, others) = rig.by_layers(&[Part::new(&tokens[half..], half, Some(4), 6)], &between);
        assert_eq!(rest, whole[half..], "{model}: layer by layer");
        assert!(others.len() > 1 && others.iter().all(|other| *other == alone), "{model}: between layers");
    }
    worst
}

fn check(model: &str) {
    let mut rig = Rig::new(model, false);
    let reference = reference(model);
    let prompts = reference["prompts"].as_array().unwrap().iter().chain([&reference["chat"]]);
    let worst = prompts.map(|prompt| check_prompt(&mut rig, model, prompt)).fold(0.0, f64::max);
    println!("{model}: largest difference of a log-probability {worst:.2e}");
}

/// The weights as stored, through the kernels that serve them: the greedy continuation, and every log-probability within `tolerance`
/// (activations of quantized layers have 16 bits).
fn check_as_stored(model: &str, tolerance: f64) {
    let mut rig = Rig::with(model, reference(model)["mtp"].is_array(), DtypePolicy::Auto);
    let mut worst: f64 = 0.0;
    for prompt in reference(model)["prompts"].as_array().unwrap() {
        let (tokens, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        let logits = in_pieces(&mut rig, &[tokens.clone(), greedy.clone()].concat(), CUTS[0]);
        for (position, expected) in prompt["logprobs"].as_array().unwrap().iter().enumerate().skip(1) {
            let difference = (logprob(&logits[position - 1], tokens[position]) - expected.as_f64().unwrap()).abs();
            worst = worst.max(difference);
        }
        let chosen: Vec<u32> = logits[tokens.len() - 1..][..greedy.len()].iter().map(|row| argmax(row)).collect();
        assert_eq!(chosen, greedy, "{model}: as stored");
    }
    println!("{model}: as stored, largest difference of a log-probability {worst:.2e}");
    assert!(worst <= tolerance, "{model}: off by {worst}");
}

/// Any row of a step can leave its state in a slot to continue from: verification of drafts needs this.
fn check_slots(model: &str) {
    let mut rig = Rig::new(model, false);
    let prompt = ids(&reference(model)["prompts"][4]["ids"]);
    let whole = rig.step(&[Part::new(&prompt, 0, None, 0)]);
    let at = prompt.len() - 20;
    rig.step(&[Part::new(&prompt[..at], 0, None, 0)]);
    // Slots 1, 2, 3 after the first three rows, and the slot that it starts from after the fourth.
    let verify = Part { to: vec![1, 2, 3, 0], ..Part::new(&prompt[at..at + 4], at, Some(0), 0) };
    assert_eq!(rig.step(&[verify])[..], whole[at..at + 4]);
    for (slot, accepted) in [(1, 1), (3, 3), (2, 2), (0, 4)] {
        let from = at + accepted;
        assert_eq!(
            rig.step(&[Part::new(&prompt[from..], from, Some(slot), 7)])[..],
            whole[from..],
            "{model}: slot {slot}"
        );
    }
}

/// The draft head against its reference: at every position of a prompt, at once and in chunks, and drafting from itself.
fn check_head(model: &str) {
    let mut rig = Rig::new(model, true);
    let entries = reference(model)["mtp"].as_array().unwrap().clone();
    assert!(!entries.is_empty());
    let mut worst: f64 = 0.0;
    for entry in &entries {
        let (tokens, following, drafts) = (ids(&entry["ids"]), ids(&entry["tokens"]), ids(&entry["draft"]));
        for chunk in [tokens.len(), 5] {
            let mut guesses = Vec::new();
            let mut last = None;
            for start in (0..tokens.len()).step_by(chunk) {
                let end = (start + chunk).min(tokens.len());
                let from = (start > 0).then_some(0);
                let output = rig.forward(&[Part::new(&tokens[start..end], start, from, 0)]);
                let rows: Vec<u32> = (0..(end - start) as u32).collect();
                let output = rig.draft(output.hidden, &rows, &[Part::new(&following[start..end], start, None, 0)]);
                guesses.extend(rig.rows(output.logits));
                last = Some(output);
            }
            let best: Vec<u32> = guesses.iter().map(|logits| argmax(logits)).collect();
            assert_eq!(best, ids(&entry["argmax"]), "{model}: {} tokens in chunks of {chunk}", tokens.len());
            for pair in entry["top5"].as_array().unwrap() {
                let own = logprob(guesses.last().unwrap(), pair[0].as_u64().unwrap() as u32);
                worst = worst.max((own - pair[1].as_f64().unwrap()).abs());
                assert!(worst <= TOLERANCE, "{model}: {own} for {pair}");
            }
            let mut output = last.unwrap();
            let mut drafted = vec![*best.last().unwrap()];
            while drafted.len() < drafts.len() {
                let at = tokens.len() + drafted.len() - 1;
                let token = *drafted.last().unwrap();
                let row = output.hidden.rows as u32 - 1;
                output = rig.draft(output.hidden, &[row], &[Part::new(&[token], at, None, 0)]);
                drafted.push(argmax(rig.rows(output.logits).last().unwrap()));
            }
            assert_eq!(drafted, drafts, "{model}: drafted in a row");
        }
    }
    println!("{model}: largest difference of a draft's log-probability {worst:.2e}");
}

macro_rules! models {
    ($check:ident: $($test:ident $model:literal),* $(,)?) => { $(#[test] fn $test() { $check($model) })* };
}

models! { check:
    qwen3_moe "qwen3-moe",
    qwen3_next "qwen3-next",
    qwen3_5 "qwen3.5",
    qwen3_5_moe "qwen3.5-moe",
    qwen4_exp "qwen4-exp",
    mlx_qwen3_5_moe "mlx-qwen3.5-moe-4bit",
    gguf_qwen3_moe "gguf-qwen3moe-q8_0",
    gguf_qwen3_next "gguf-qwen3next-q8_0",
    gguf_qwen3_5 "gguf-qwen35-q8_0",
    gguf_qwen3_5_moe "gguf-qwen35moe-q8_0",
    smollm3 "smollm3",
    phi3 "phi3",
    phi4_mini "phi4-mini",
    mistral "mistral",
    ministral3 "ministral3",
    granite "granite",
    olmo2 "olmo2",
    olmo3 "olmo3",
    gemma2 "gemma2",
    mlx_ministral3 "mlx-ministral3-4bit",
    mlx_granite "mlx-granite-4bit",
    mlx_olmo3 "mlx-olmo3-4bit",
    mlx_gemma2 "mlx-gemma2-4bit",
    gguf_ministral3 "gguf-ministral3-q8_0",
    gguf_granite "gguf-granite-q8_0",
    gguf_olmo3 "gguf-olmo3-q8_0",
    gguf_gemma2 "gguf-gemma2-q8_0",
    gpt_oss "gpt-oss",
    gguf_gpt_oss "gguf-gpt-oss-q8_0",
    gguf_gpt_oss_mxfp4 "gguf-gpt-oss-mxfp4",
    hunyuan "hunyuan",
    ernie4_5 "ernie4.5",
    ernie4_5_moe "ernie4.5-moe",
    nvfp4_ernie4_5_moe "nvfp4-ernie4.5-moe",
    glm4 "glm4",
    glm4_moe "glm4-moe",
    laguna "laguna",
    laguna_elements "laguna-elements",
    muse_glimmer "muse-glimmer",
    llama4 "llama4",
    llama4_whole "llama4-whole",
    mlx_llama4 "mlx-llama4-4bit",
    gguf_llama4 "gguf-llama4-q8_0",
    gguf_hunyuan "gguf-hunyuan-q8_0",
    gguf_ernie4_5_moe "gguf-ernie4.5-moe-q8_0",
    gguf_ernie4_5_moe_nvfp4 "gguf-ernie4.5-moe-nvfp4",
    gguf_glm4 "gguf-glm4-q8_0",
    gguf_glm4_moe "gguf-glm4-moe-q8_0",
    gpt_oss_mxfp4 "gpt-oss-mxfp4",
    mlx_gpt_oss "mlx-gpt-oss-4bit",
    mlx_glm4_moe "mlx-glm4-moe-4bit",
    gemma4_e2b "gemma4-e2b",
    gemma4_26b "gemma4-26b",
    mlx_gemma4_e2b "mlx-gemma4-e2b-4bit",
    mlx_gemma4_26b "mlx-gemma4-26b-4bit",
    gguf_gemma4_e2b "gguf-gemma4-e2b-q8_0",
    gguf_gemma4_26b "gguf-gemma4-26b-q8_0",
    mlx_smollm3 "mlx-smollm3-4bit",
    mlx_phi4_mini "mlx-phi4-mini-4bit",
    gguf_smollm3 "gguf-smollm3-q8_0",
    gguf_phi3 "gguf-phi3-q8_0",
    gguf_phi4_mini "gguf-phi4-mini-q8_0",
    lfm2 "lfm2",
    lfm2_moe "lfm2-moe",
    mlx_lfm2_moe "mlx-lfm2-moe-4bit",
    gguf_lfm2 "gguf-lfm2-q8_0",
    gguf_lfm2_moe "gguf-lfm2-moe-q8_0",
    granite4_h "granite4-h",
    granite4_h_moe "granite4-h-moe",
    mlx_granite4_h "mlx-granite4-h-4bit",
    gguf_granite4_h "gguf-granite4-h-q8_0",
    gguf_granite4_h_moe "gguf-granite4-h-moe-q8_0",
    falcon_h1 "falcon-h1",
    falcon_h1_norm "falcon-h1-norm",
    nemotron_h "nemotron-h",
    nemotron_h_moe "nemotron-h-moe",
    nemotron_h_latent "nemotron-h-latent",
    gguf_nemotron_h "gguf-nemotron-h-q8_0",
    gguf_nemotron_h_latent "gguf-nemotron-h-latent-q8_0",
    glm4_7_flash "glm4.7-flash",
    deepseek_v2_lite "deepseek-v2-lite",
    deepseek_v3 "deepseek-v3",
    mlx_glm4_7_flash "mlx-glm4.7-flash-4bit",
    mlx_deepseek_v2_lite "mlx-deepseek-v2-lite-4bit",
    gguf_glm4_7_flash "gguf-glm4.7-flash-q8_0",
    gguf_deepseek_v2_lite "gguf-deepseek-v2-lite-q8_0",
}

#[test]
fn stored_as_mlx_quantizes() {
    check_as_stored("mlx-qwen3.5-moe-4bit", 1e-2);
}

#[test]
fn stored_as_q8_0() {
    check_as_stored("gguf-qwen35moe-q8_0", 1e-2);
}

#[test]
fn stored_as_small_floats_in_gguf() {
    check_as_stored("gguf-ernie4.5-moe-nvfp4", 1e-2);
    check_as_stored("gguf-gpt-oss-mxfp4", 1e-2);
}

/// Matrices that are quantized along their later output dimension are kept as floats.
#[test]
fn latent_attention_as_stored() {
    for model in ["mlx-deepseek-v2-lite-4bit", "gguf-glm4.7-flash-q8_0"] {
        check_as_stored(model, 1e-2);
    }
}

#[test]
fn stored_as_other_quantizers_do() {
    let packed = ["awq-llama", "gptq-llama", "gptq-llama-actorder", "gptq-qwen2-8bit", "autoround-llama"];
    let compressed = ["ct-llama-w4a16", "ct-llama-w4a16-asym", "ct-llama-w8a16", "ct-llama-fp8", "fp8-llama"];
    let small_floats = ["ct-llama-nvfp4", "nvfp4-ernie4.5-moe"];
    packed.iter().chain(&compressed).chain(&small_floats).for_each(|model| check_as_stored(model, 1e-2));
}

#[test]
fn stored_as_bfloat16() {
    check_as_stored("qwen3.5-moe", TOLERANCE);
    check_as_stored("qwen4-exp", TOLERANCE);
}

models! { check_slots:
    slots_of_qwen3_next "qwen3-next",
    slots_of_qwen3_5 "qwen3.5",
    slots_of_qwen4_exp "qwen4-exp",
    slots_of_lfm2 "lfm2",
    slots_of_granite4_h "granite4-h",
    slots_of_falcon_h1 "falcon-h1",
    slots_of_gguf_falcon_h1 "gguf-falcon-h1-q8_0",
    slots_of_nemotron_h "nemotron-h",
    slots_of_lfm2_moe "lfm2-moe",
}

models! { check_head:
    head_of_qwen3_next "qwen3-next",
    head_of_qwen3_5 "qwen3.5",
    head_of_qwen3_5_moe "qwen3.5-moe",
    head_of_mlx_qwen3_5_moe "mlx-qwen3.5-moe-4bit",
    head_of_gguf_qwen3_5 "gguf-qwen35-q8_0",
    head_of_gguf_qwen3_5_moe "gguf-qwen35moe-q8_0",
    head_of_glm4_moe "glm4-moe",
    head_of_mlx_glm4_moe "mlx-glm4-moe-4bit",
    head_of_gguf_glm4_moe "gguf-glm4-moe-q8_0",
    head_of_glm4_7_flash "glm4.7-flash",
    head_of_gguf_glm4_7_flash "gguf-glm4.7-flash-q8_0",
    head_of_deepseek_v3 "deepseek-v3",
}
