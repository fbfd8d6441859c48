//! SmolLM2-135M (Q4_1) through the whole engine, with the quantized kernels, against transformers on the dequantized weights.
//!
//! The model is in the cache or is downloaded into it; otherwise these tests fail.

use std::sync::Arc;

use plimsoll_device::{ComputeDtype, Isa};
use plimsoll_engine::{EngineHandle, Host, LoadedModel, Options, start};
use plimsoll_hub::{Cache, Quiet};
use plimsoll_text::Ending;
use serde_json::Value;

use crate::common::{all_bf16, ask, fixtures, greedy, ids};

fn open(isa: Isa, compute_dtype: ComputeDtype) -> (LoadedModel, EngineHandle) {
    let path = plimsoll_hub::resolve("smollm2", &Cache::default_location().unwrap(), &mut Quiet)
        .unwrap_or_else(|e| panic!("{e}"));
    let model = LoadedModel::open(&path).unwrap();
    let options = Options {
        max_total_token_num: Some(4096),
        running_max_req_size: 8,
        graph_max_batch_size: 8,
        isa: Some(isa),
        compute_dtype,
        ..Options::default()
    };
    let host = Host::read(&options).unwrap();
    let engine = start(&model.checkpoint, Arc::clone(&model.tokenizer), &options, &host, |_| {}).unwrap();
    (model, engine)
}

fn reference() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("smollm2_reference.json")).unwrap()).unwrap()
}

#[test]
#[ignore = "models"]
fn quantized_kernels_agree_with_the_f32_reference() {
    agree(Isa::detect(), ComputeDtype::F32, 0.002, 0.99);
}

/// With a matrix unit prompts are computed in bfloat16, elsewhere as in the test above.
#[test]
#[ignore = "models"]
fn prompts_agree_with_the_f32_reference() {
    agree(Isa::detect(), ComputeDtype::Auto, 0.02, 0.97);
}

/// Logits, too, where answers are computed like prompts.
#[test]
fn logits_in_bf16_agree_with_the_f32_reference() {
    if let Some(compute_dtype) = all_bf16() {
        agree(Isa::detect(), compute_dtype, 0.02, 0.97);
    }
}

/// Prompts are computed with 8-bit activations: the error is as large as that of other engines with 8 bits.
#[test]
#[ignore = "models"]
fn int8_is_near_the_f32_reference() {
    let off = agree(Isa::Avx512.min(Isa::detect()), ComputeDtype::Int8, 0.07, 0.93);
    assert!(off > 0.02, "as exact as 16 bits: {off}");
}

/// Asserts the limits of the mean error and of the share of equal best tokens. Returns the mean error of the log-probabilities.
fn agree(isa: Isa, compute_dtype: ComputeDtype, most: f64, least: f64) -> f64 {
    let (_, engine) = open(isa, compute_dtype);
    let reference = reference();
    let tokens = ids(&reference["ids"]);
    let mut request = greedy(&tokens, 1);
    request.prompt_logprobs = Some(1);
    let answer = ask(&engine, request);
    let (mut sum, mut same, mut seen) = (0.0, 0, 0);
    for (position, report) in answer.prompt_logprobs.iter().enumerate().skip(1) {
        sum += (f64::from(report.own.unwrap()) - reference["logprobs"][position].as_f64().unwrap()).abs();
        // The reference's best token after `position - 1` is what it expects at `position`.
        same += usize::from(report.top[0].0 as u64 == reference["top5"][position - 1][0][0].as_u64().unwrap());
        seen += 1;
    }
    let (mean, agreement) = (sum / seen as f64, same as f64 / seen as f64);
    println!("mean |Δ log-probability| {mean:.4}, same best token at {:.1}% of {seen} positions", 100.0 * agreement);
    assert!(mean <= most, "mean |Δ log-probability| is {mean:.4}, the limit is {most}");
    assert!(agreement >= least, "same best token at {agreement:.4} of the positions, the limit is {least}");
    mean
}

#[test]
#[ignore = "models"]
fn chats_answer_as_the_reference_does() {
    let (model, engine) = open(Isa::detect(), ComputeDtype::Auto);
    for chat in reference()["greedy"].as_array().unwrap() {
        let tokens = ids(&chat["ids"]);
        let rendered = model
            .template
            .as_ref()
            .unwrap()
            .render(&chat["messages"], None, Ending::Open, &serde_json::Map::new())
            .unwrap();
        assert_eq!(model.tokenizer.encode(&rendered, false, true).unwrap(), tokens, "template and tokenizer");
        let expected = ids(&chat["greedy"]);
        // Beyond a near-tie of the reference both continuations are right.
        let gaps = chat["gaps"].as_array().unwrap();
        let sure = gaps.iter().take_while(|gap| gap.as_f64().unwrap() > 0.5).count();
        let answer = ask(&engine, greedy(&tokens, expected.len() as u32));
        assert_eq!(answer.ids[..sure], expected[..sure], "{:?}", answer.text);
    }
}
