//! Every fixture model through the whole engine against transformers (float32, eager): each prompt token's log-probability within
//! 2e-3, greedy continuations equal. `tools/make_fixtures.py` makes the references.

use crate::common::{self, ask, engine, exact, greedy, ids, reference};

/// Largest difference allowed between a log-probability and its reference.
const TOLERANCE: f64 = 2e-3;

fn check(model: &str) {
    let engine = engine(model, &exact());
    let reference = reference(model);
    let mut worst: f64 = 0.0;
    for prompt in reference["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["ids"]);
        let mut request = greedy(&tokens, 32);
        request.prompt_logprobs = Some(0);
        let answer = ask(&engine, request);
        assert_eq!(answer.error, None, "{model}");
        let expected = prompt["logprobs"].as_array().unwrap();
        assert_eq!(answer.prompt_logprobs.len(), tokens.len(), "{model}: one report per prompt token");
        for (position, report) in answer.prompt_logprobs.iter().enumerate().skip(1) {
            let difference = (f64::from(report.own.unwrap()) - expected[position].as_f64().unwrap()).abs();
            worst = worst.max(difference);
            assert!(
                difference <= TOLERANCE,
                "{model}: prompt of {}, position {position}: off by {difference}",
                tokens.len()
            );
        }
        assert_eq!(answer.ids, ids(&prompt["greedy"]), "{model}: greedy continuation of {} tokens", tokens.len());
    }
    println!("{model}: largest difference of a log-probability {worst:.2e}");
}

macro_rules! models {
    ($($test:ident: $model:literal),* $(,)?) => {
        $(#[test] fn $test() { check($model) })*
        /// A fixture that no test names would be a check quietly skipped.
        #[test]
        fn every_text_fixture_is_checked() {
            let known = [$($model),*];
            for entry in std::fs::read_dir(common::fixtures().join("models")).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                // Weights set by hand, encoders and models with towers have references of another kind, which `hybrid`, `embeddings` and
                // `vision` check, one that hears `hearing`.
                let elsewhere = ["mtp-", "bert", "vl-", "omni"].iter().any(|kind| name.starts_with(kind));
                assert!(known.contains(&name.as_str()) || elsewhere, "no test for fixture '{name}'");
            }
        }
    };
}

models! {
    llama: "llama",
    llama_tied: "llama-tied",
    llama_bf16: "llama-bf16",
    llama_f16: "llama-f16",
    llama3_rope: "llama3-rope",
    qwen2: "qwen2",
    qwen3: "qwen3",
    gemma3: "gemma3",
    gemma3_layer_types: "gemma3-layer-types",
    qwen3_moe: "qwen3-moe",
    qwen3_next: "qwen3-next",
    qwen3_5: "qwen3.5",
    qwen3_5_moe: "qwen3.5-moe",
    mlx_qwen3_5_moe: "mlx-qwen3.5-moe-4bit",
    gguf_qwen3_moe: "gguf-qwen3moe-q8_0",
    gguf_qwen3_next: "gguf-qwen3next-q8_0",
    gguf_qwen3_5: "gguf-qwen35-q8_0",
    gguf_qwen3_5_moe: "gguf-qwen35moe-q8_0",
    gguf_llama_f32: "gguf-llama-f32",
    gguf_llama_f16: "gguf-llama-f16",
    gguf_llama_q8_0: "gguf-llama-q8_0",
    gguf_llama_q4_0: "gguf-llama-q4_0",
    gguf_llama3_rope: "gguf-llama3-rope-q8_0",
    gguf_qwen2_f32: "gguf-qwen2-f32",
    gguf_qwen2_f16: "gguf-qwen2-f16",
    gguf_qwen2_q8_0: "gguf-qwen2-q8_0",
    gguf_qwen2_q4_0: "gguf-qwen2-q4_0",
    gguf_qwen3_mixed: "gguf-qwen3-mixed",
    gguf_gemma3_f16: "gguf-gemma3-f16",
    gguf_gemma3_q8_0: "gguf-gemma3-q8_0",
    gguf_gemma3_q4_0: "gguf-gemma3-q4_0",
    mlx_3bit: "mlx-llama-3bit-g64",
    mlx_4bit_g32: "mlx-llama-4bit-g32",
    mlx_4bit_g64: "mlx-llama-4bit-g64",
    mlx_5bit: "mlx-llama-5bit-g32",
    mlx_6bit: "mlx-llama-6bit-g64",
    mlx_8bit: "mlx-llama-8bit-g32",
    mlx_mixed: "mlx-llama-mixed",
}
