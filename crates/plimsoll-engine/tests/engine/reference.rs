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
                // `hybrid`, `embeddings`, `vision` and `audio` check weights set by hand, encoders and models for images and audio, which have
                // references of another kind. Rerankers are checked as they are served.
                let elsewhere = ["mtp-", "bert", "embedding", "rerank-", "vl-", "omni", "asr", "gguf-asr", "whisper"].iter().any(|kind| name.starts_with(kind));
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
    qwen4_exp: "qwen4-exp",
    mlx_qwen3_5_moe: "mlx-qwen3.5-moe-4bit",
    gguf_qwen3_moe: "gguf-qwen3moe-q8_0",
    gguf_qwen3_next: "gguf-qwen3next-q8_0",
    gguf_qwen3_5: "gguf-qwen35-q8_0",
    gguf_qwen3_5_moe: "gguf-qwen35moe-q8_0",
    gguf_llama_f32: "gguf-llama-f32",
    gguf_llama_f16: "gguf-llama-f16",
    gguf_llama_q8_0: "gguf-llama-q8_0",
    gguf_llama_q4_0: "gguf-llama-q4_0",
    gguf_llama_codebooks: "gguf-llama-codebooks",
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
    awq: "awq-llama",
    gptq_4bit: "gptq-llama",
    gptq_act_order: "gptq-llama-actorder",
    gptq_8bit: "gptq-qwen2-8bit",
    autoround: "autoround-llama",
    compressed_4bit: "ct-llama-w4a16",
    compressed_4bit_with_zero_points: "ct-llama-w4a16-asym",
    compressed_8bit: "ct-llama-w8a16",
    compressed_fp8: "ct-llama-fp8",
    compressed_nvfp4: "ct-llama-nvfp4",
    fp8: "fp8-llama",
    smollm3: "smollm3",
    phi3: "phi3",
    phi4_mini: "phi4-mini",
    mistral: "mistral",
    ministral3: "ministral3",
    granite: "granite",
    olmo2: "olmo2",
    olmo3: "olmo3",
    gemma2: "gemma2",
    gemma4_e2b: "gemma4-e2b",
    gemma4_26b: "gemma4-26b",
    mlx_gemma4_e2b: "mlx-gemma4-e2b-4bit",
    mlx_gemma4_26b: "mlx-gemma4-26b-4bit",
    gguf_gemma4_e2b: "gguf-gemma4-e2b-q8_0",
    gguf_gemma4_26b: "gguf-gemma4-26b-q8_0",
    mlx_ministral3: "mlx-ministral3-4bit",
    mlx_granite: "mlx-granite-4bit",
    mlx_olmo3: "mlx-olmo3-4bit",
    mlx_gemma2: "mlx-gemma2-4bit",
    gguf_ministral3: "gguf-ministral3-q8_0",
    gguf_granite: "gguf-granite-q8_0",
    gguf_olmo3: "gguf-olmo3-q8_0",
    gguf_gemma2: "gguf-gemma2-q8_0",
    gpt_oss: "gpt-oss",
    gguf_gpt_oss: "gguf-gpt-oss-q8_0",
    gguf_gpt_oss_mxfp4: "gguf-gpt-oss-mxfp4",
    hunyuan: "hunyuan",
    ernie4_5: "ernie4.5",
    ernie4_5_moe: "ernie4.5-moe",
    nvfp4_ernie4_5_moe: "nvfp4-ernie4.5-moe",
    glm4: "glm4",
    glm4_moe: "glm4-moe",
    laguna: "laguna",
    laguna_elements: "laguna-elements",
    muse_glimmer: "muse-glimmer",
    llama4: "llama4",
    llama4_whole: "llama4-whole",
    mlx_llama4: "mlx-llama4-4bit",
    gguf_llama4: "gguf-llama4-q8_0",
    gguf_hunyuan: "gguf-hunyuan-q8_0",
    gguf_ernie4_5_moe: "gguf-ernie4.5-moe-q8_0",
    gguf_ernie4_5_moe_nvfp4: "gguf-ernie4.5-moe-nvfp4",
    gguf_glm4: "gguf-glm4-q8_0",
    gguf_glm4_moe: "gguf-glm4-moe-q8_0",
    gpt_oss_mxfp4: "gpt-oss-mxfp4",
    mlx_gpt_oss: "mlx-gpt-oss-4bit",
    mlx_glm4_moe: "mlx-glm4-moe-4bit",
    mlx_smollm3: "mlx-smollm3-4bit",
    mlx_phi4_mini: "mlx-phi4-mini-4bit",
    gguf_smollm3: "gguf-smollm3-q8_0",
    gguf_phi3: "gguf-phi3-q8_0",
    gguf_phi4_mini: "gguf-phi4-mini-q8_0",
    glm4_7_flash: "glm4.7-flash",
    deepseek_v2_lite: "deepseek-v2-lite",
    deepseek_v3: "deepseek-v3",
    mlx_glm4_7_flash: "mlx-glm4.7-flash-4bit",
    mlx_deepseek_v2_lite: "mlx-deepseek-v2-lite-4bit",
    gguf_glm4_7_flash: "gguf-glm4.7-flash-q8_0",
    gguf_deepseek_v2_lite: "gguf-deepseek-v2-lite-q8_0",
    lfm2: "lfm2",
    lfm2_moe: "lfm2-moe",
    mlx_lfm2_moe: "mlx-lfm2-moe-4bit",
    gguf_lfm2: "gguf-lfm2-q8_0",
    gguf_lfm2_moe: "gguf-lfm2-moe-q8_0",
    granite4_h: "granite4-h",
    granite4_h_moe: "granite4-h-moe",
    mlx_granite4_h: "mlx-granite4-h-4bit",
    gguf_granite4_h: "gguf-granite4-h-q8_0",
    gguf_granite4_h_moe: "gguf-granite4-h-moe-q8_0",
    falcon_h1: "falcon-h1",
    falcon_h1_norm: "falcon-h1-norm",
    gguf_falcon_h1: "gguf-falcon-h1-q8_0",
    gguf_falcon_h1_norm: "gguf-falcon-h1-norm-f16",
    nemotron_h: "nemotron-h",
    nemotron_h_moe: "nemotron-h-moe",
    nemotron_h_latent: "nemotron-h-latent",
    gguf_nemotron_h: "gguf-nemotron-h-q8_0",
    gguf_nemotron_h_latent: "gguf-nemotron-h-latent-q8_0",
}
