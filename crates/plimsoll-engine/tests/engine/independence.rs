//! I9: a request's tokens and log-probabilities are the same bits alone and in a crowd. This holds for any neighbours, chunks, preemption,
//! cached prefix and number of threads.

use plimsoll_device::{ComputeDtype, Isa, KvDtype};
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{Options, Request};

use crate::common::recall::mix;
use crate::common::{Answer, all_bf16, ask, collect, engine, greedy, quiet};

/// Longest prompt plus output of the requests here; a pool of this many tokens holds the longest alone.
const LONGEST: usize = 112;

fn options(kv_dtype: KvDtype) -> Options {
    Options {
        kv_dtype,
        batch_max_tokens: 64,
        graph_max_batch_size: 16,
        running_max_req_size: 16,
        max_waiting: 64,
        max_total_token_num: Some(2048),
        threads: Some(1),
        ..Options::default()
    }
}

/// The shapes in which a crowd runs: as different as possible.
fn shapes(kv_dtype: KvDtype) -> Vec<Options> {
    let base = options(kv_dtype);
    let tiny = Some(LONGEST as u64 + 16);
    vec![
        Options { threads: Some(2), ..base.clone() },
        Options { batch_max_tokens: 16, threads: Some(2), ..base.clone() },
        Options { max_total_token_num: tiny, ..base.clone() },
        Options { batch_max_tokens: 16, max_total_token_num: tiny, ..base.clone() },
        Options { max_total_token_num: tiny, prefix_cache: false, threads: Some(2), ..base },
    ]
}

/// 32 requests: greedy and sampled, with and without reports, a third of them with a common beginning.
fn crowd(seed: u64) -> Vec<Request> {
    let dice = |i: u64, salt: u64, n: u64| mix(seed * 1_000_003 + i * 1009 + salt) % n;
    let request = |i| {
        let (len, shared) = (1 + dice(i, 1, 80), dice(i, 2, 3) == 0);
        let token = |j| if shared && j < 48 { mix(seed + j) % 300 } else { dice(i, 100 + j, 300) };
        let prompt: Vec<u32> = (0..len).map(|j| token(j) as u32).collect();
        let mut request = greedy(&prompt, 1 + dice(i, 3, LONGEST as u64 - 81) as u32);
        request.logprobs = Some(dice(i, 4, 3) as u32);
        request.prompt_logprobs = (dice(i, 5, 6) == 0).then_some(1);
        match dice(i, 6, 4) {
            0 => {
                request.sampling = SamplingParams { seed: dice(i, 7, 1 << 40), top_p: 0.9, ..SamplingParams::default() }
            }
            1 => request.sampling.repetition_penalty = 1.3,
            _ => {}
        }
        request
    };
    (0..32).map(request).collect()
}

fn check(model: &str, kv_dtype: KvDtype, compute_dtype: ComputeDtype) {
    let alone = engine(model, &Options { prefix_cache: false, compute_dtype, ..options(kv_dtype) });
    let crowds: Vec<Vec<Request>> = (1..=2).map(crowd).collect();
    let answers: Vec<Vec<Answer>> = crowds.iter().map(|c| c.iter().map(|r| ask(&alone, r.clone())).collect()).collect();
    drop(alone);
    let (mut preemptions, mut cached, mut layered) = (0, 0, 0);
    for (number, shape) in shapes(kv_dtype).into_iter().enumerate() {
        let engine = engine(model, &Options { compute_dtype, ..shape });
        for (seed, (requests, answers)) in crowds.iter().zip(&answers).enumerate() {
            let dice = |i: usize, n: u64| mix((seed * 77 + number * 1000 + i) as u64) % n;
            let mut readers = Vec::new();
            for (i, request) in requests.iter().enumerate() {
                readers.push(Some(engine.submit(request.clone()).unwrap()));
                if dice(i, 3) == 0 {
                    std::thread::sleep(std::time::Duration::from_micros(dice(i + 50, 1000)));
                }
                if dice(i + 100, 5) == 0 {
                    readers[dice(i + 200, i as u64 + 1) as usize] = None;
                }
            }
            for (i, reader) in readers.into_iter().enumerate() {
                let Some(reader) = reader else { continue };
                let answer = collect(reader);
                cached += answer.cached_tokens;
                answer.is_the_same_as(&answers[i], &format!("{model}, shape {number}, seed {seed}, request {i}"));
            }
        }
        quiet(&engine);
        preemptions += engine.metrics().preemptions.get();
        layered += engine.metrics().layered_chunks.get();
    }
    let seen = [preemptions, u64::from(cached), layered];
    assert!(seen.iter().all(|count| *count > 0), "{model}: {seen:?} prove nothing");
}

macro_rules! crowds {
    ($($test:ident: $model:literal, $kv:ident;)*) => {
        $(#[test] fn $test() { check($model, KvDtype::$kv, ComputeDtype::Auto) })*
    };
}

crowds! {
    llama_f16: "llama", F16;
    llama_q8: "llama", Q8;
    gemma3_f16: "gemma3", F16;
    gemma3_q8: "gemma3", Q8;
    gemma4_e2b_f16: "gemma4-e2b", F16;
    gemma4_26b_q8: "gemma4-26b", Q8;
    glm4_7_flash_f16: "gguf-glm4.7-flash-q8_0", F16;
    deepseek_v2_lite_q8: "mlx-deepseek-v2-lite-4bit", Q8;
    qwen2_q4_0_f16: "gguf-qwen2-q4_0", F16;
    qwen2_q4_0_q8: "gguf-qwen2-q4_0", Q8;
    qwen2_q4_0_bf16: "gguf-qwen2-q4_0", Bf16;
}

#[test]
fn qwen2_q4_0_all_in_bf16() {
    if let Some(compute_dtype) = all_bf16() {
        check("gguf-qwen2-q4_0", KvDtype::F16, compute_dtype);
        check("gguf-qwen2-q4_0", KvDtype::Bf16, compute_dtype);
    }
}

#[test]
fn qwen2_q4_0_in_int8() {
    check("gguf-qwen2-q4_0", KvDtype::F16, ComputeDtype::Int8);
}

/// Every family of decoders without state that no test above runs, as its checkpoints are stored.
#[test]
#[ignore = "soak"]
fn every_other_family_answers_in_company_as_alone() {
    for model in [
        "qwen2",
        "qwen3",
        "qwen3-moe",
        "mistral",
        "smollm3",
        "phi3",
        "phi4-mini",
        "ministral3",
        "granite",
        "olmo2",
        "olmo3",
        "gemma2",
        "gpt-oss-mxfp4",
        "gguf-gpt-oss-mxfp4",
        "hunyuan",
        "ernie4.5",
        "ernie4.5-moe",
        "nvfp4-ernie4.5-moe",
        "glm4",
        "glm4-moe",
        "deepseek-v3",
        "laguna",
        "muse-glimmer",
        "llama4",
        "gptq-llama-actorder",
        "fp8-llama",
    ] {
        check(model, KvDtype::F16, ComputeDtype::Auto);
    }
}

/// Every arithmetic that this machine has.
fn arithmetics() -> impl Iterator<Item = ComputeDtype> {
    [ComputeDtype::F32, ComputeDtype::Auto, ComputeDtype::Int8].into_iter().chain(all_bf16())
}

/// Prompts with 550 tokens in common, which attention reads once for all, and a different rest. There are two such families.
#[test]
fn requests_with_equal_prefixes_answer_as_alone() {
    let requests: Vec<Request> = (0..8)
        .map(|i| {
            let prompt: Vec<u32> =
                (0..550 + i).map(|j| (mix(j + if j < 550 { i % 2 } else { i } * 1000) % 300) as u32).collect();
            let mut request = greedy(&prompt, 30);
            request.logprobs = Some(2);
            request
        })
        .collect();
    for (model, kv_dtype) in [("gemma3", KvDtype::F16), ("gguf-qwen2-q4_0", KvDtype::Bf16), ("llama", KvDtype::Q8)] {
        for compute_dtype in arithmetics() {
            let base = Options { compute_dtype, max_total_token_num: Some(8192), ..options(kv_dtype) };
            let alone = engine(model, &Options { prefix_cache: false, ..base.clone() });
            let answers: Vec<Answer> = requests.iter().map(|request| ask(&alone, request.clone())).collect();
            drop(alone);
            let together = engine(model, &Options { threads: Some(2), ..base });
            let readers: Vec<_> = requests.iter().map(|request| together.submit(request.clone()).unwrap()).collect();
            let mut cached = 0;
            for (i, (reader, expected)) in readers.into_iter().zip(&answers).enumerate() {
                let answer = collect(reader);
                cached += answer.cached_tokens;
                answer.is_the_same_as(expected, &format!("{model}, {compute_dtype:?}, request {i}"));
            }
            assert!(cached >= 6 * 512, "{model}, {compute_dtype:?}: {cached} tokens of a cache prove nothing");
            quiet(&together);
        }
    }
}

#[test]
fn bf16_without_amx_is_refused_by_its_flag() {
    let options = Options { isa: Some(Isa::Portable), compute_dtype: ComputeDtype::Bf16, ..options(KvDtype::F16) };
    let refused = plimsoll_engine::check_options(&options).unwrap_err().to_string();
    assert!(refused.contains("--compute-dtype is bf16") && refused.contains("this is portable"), "{refused}");
}

/// A conversation of three turns. The earlier turns come from the cache, including answers where these are computed
/// like prompts.
#[test]
fn warm_is_cold() {
    let models = [("llama", KvDtype::F16), ("gemma3", KvDtype::Q8), ("gguf-qwen2-q4_0", KvDtype::Q8)];
    for compute_dtype in arithmetics() {
        models.iter().for_each(|(model, kv_dtype)| converse(model, Options { compute_dtype, ..options(*kv_dtype) }));
    }
}

fn converse(model: &str, options: Options) {
    let split_numerics = match (options.compute_dtype, Isa::detect()) {
        // The weights of llama are single precision, those of the other models are not.
        (ComputeDtype::Auto | ComputeDtype::Int8, Isa::Amx) => model != "llama",
        // The weights of the last model are quantized.
        (ComputeDtype::Int8, isa) => isa.rounds_attention() && model == "gguf-qwen2-q4_0",
        _ => false,
    };
    let warm = engine(model, &Options { threads: Some(2), ..options.clone() });
    let cold = engine(model, &Options { prefix_cache: false, batch_max_tokens: 16, ..options });
    let mut prompt: Vec<u32> = (0..37).map(|i| (mix(i) % 300) as u32).collect();
    let mut known = 0;
    for turn in 0..3 {
        let mut request = greedy(&prompt, 40);
        request.logprobs = Some(2);
        let expected = ask(&cold, request.clone());
        let first = ask(&warm, request.clone());
        assert_eq!(first.cached_tokens, known, "{model}, turn {turn}: what is known of earlier turns");
        first.is_the_same_as(&expected, &format!("{model}, turn {turn}"));
        quiet(&warm);
        let again = ask(&warm, request);
        assert_eq!(again.cached_tokens as usize, (prompt.len() - 1) / 16 * 16);
        again.is_the_same_as(&expected, &format!("{model}, turn {turn} again"));
        quiet(&warm);
        let of_prompt = prompt.len() as u32 / 16 * 16;
        prompt.extend(&expected.ids);
        // The last token of an answer was never computed.
        known = if split_numerics { of_prompt } else { (prompt.len() as u32 - 1) / 16 * 16 };
        prompt.extend([7, 8, 9]);
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for (model, kv_dtype) in
        [("llama", KvDtype::F16), ("llama", KvDtype::Bf16), ("gemma3", KvDtype::F16), ("gguf-qwen2-q4_0", KvDtype::Q8)]
    {
        agree(model, kv_dtype, ComputeDtype::F32, &Isa::ALL);
    }
    // Instruction sets that round attention compute prompts differently. If AVX-512 is one of them, the kernels' own tests compare its
    // products of bytes.
    let others: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| !isa.rounds_attention()).collect();
    agree("gguf-qwen2-q4_0", KvDtype::Q8, ComputeDtype::Int8, &others);
}

fn agree(model: &str, kv_dtype: KvDtype, compute_dtype: ComputeDtype, isas: &[Isa]) {
    let of = |isa| {
        let engine = engine(model, &Options { isa: Some(isa), compute_dtype, ..options(kv_dtype) });
        crowd(3).into_iter().map(|request| ask(&engine, request)).collect::<Vec<_>>()
    };
    let portable = of(Isa::Portable);
    for isa in isas.iter().copied().filter(|isa| isa.available() && *isa != Isa::Portable) {
        for (i, (answer, expected)) in of(isa).iter().zip(&portable).enumerate() {
            answer.is_the_same_as(expected, &format!("{model} in {compute_dtype:?} on {isa}, request {i}"));
        }
    }
}
