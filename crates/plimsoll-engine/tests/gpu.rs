//! The whole engine on a GPU driver in software: the log-probabilities of transformers, the same bits alone and in a crowd. The plan holds,
//! and no memory is allocated after ready. `tests/gpu/install.sh` installs the driver.

mod common;
#[path = "gpu/drafts.rs"]
mod drafts;
#[path = "gpu/encoders.rs"]
mod encoders;
#[path = "gpu/noop.rs"]
mod noop;

use std::sync::Arc;

use common::recall::mix;
use common::{Answer, alone, ask, collect, engine, exact, fixtures, greedy, ids, quiet, reference};
use plimsoll_device::{DtypePolicy, KvDtype};
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{DeviceChoice, Embed, EngineHandle, Host, Options, Pooling, Request, start};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Component, faults, heap};
use plimsoll_text::Tokenizer;

/// Counts the heap, so that reports contain it.
#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

/// Largest difference allowed between a log-probability and its reference.
const TOLERANCE: f64 = 2e-3;

fn on_gpu(options: Options) -> Options {
    Options { device: DeviceChoice::Gpu(None), allow_software_gpu: true, ..options }
}

/// Returns the bytes of device memory allocated before ready, and the attempts after it.
fn allocations(engine: &EngineHandle) -> (u64, u64) {
    engine.ledger().allocations()
}

fn check(model: &str, options: &Options) {
    let engine = engine(model, &on_gpu(options.clone()));
    let reference = reference(model);
    let taken = allocations(&engine);
    for prompt in reference["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["ids"]);
        let mut request = greedy(&tokens, 32);
        request.prompt_logprobs = Some(0);
        let answer = ask(&engine, request);
        assert_eq!(answer.error, None, "{model}");
        for (position, report) in answer.prompt_logprobs.iter().enumerate().skip(1) {
            let expected = prompt["logprobs"][position].as_f64().unwrap();
            let off = (f64::from(report.own.unwrap()) - expected).abs();
            assert!(off <= TOLERANCE, "{model}: prompt of {}, position {position}: off by {off}", tokens.len());
        }
        assert_eq!(answer.ids, ids(&prompt["greedy"]), "{model}: greedy continuation of {} tokens", tokens.len());
    }
    quiet(&engine);
    assert_eq!((allocations(&engine), taken.1), (taken, 0), "{model}: no device memory is taken after ready");
    for component in [Component::Weights, Component::KvPages, Component::StepWorkspace] {
        let row = engine.ledger().row(component);
        assert!(row.committed > 0 && row.peak <= row.planned, "{model}: {row:?}");
    }
}

#[test]
#[ignore = "external"]
fn dense_models_give_the_log_probabilities_of_transformers() {
    let _alone = alone();
    for model in ["llama", "qwen3", "qwen2", "gemma3", "gemma4-e2b"] {
        check(model, &exact());
    }
    for model in ["gguf-llama-q4_0", "llama-bf16", "mlx-llama-4bit-g64"] {
        check(model, &Options { dtype: DtypePolicy::Auto, ..exact() });
    }
}

#[test]
#[ignore = "external"]
fn experts_and_recurrent_layers_do_too() {
    let _alone = alone();
    for model in ["qwen3-moe", "gpt-oss", "gemma4-26b", "qwen3.5", "lfm2", "granite4-h", "nemotron-h-moe"] {
        check(model, &exact());
    }
}

/// Encoders give the hidden states and scores of transformers. Each input gives the same bits in any company.
#[test]
#[ignore = "external"]
fn encoders_give_the_hidden_states_of_transformers() {
    let _alone = alone();
    let options = on_gpu(Options { max_total_token_num: None, ..exact() });
    for model in [
        "bert",
        "bert-roberta",
        "bert-cross",
        "bert-modern",
        "bert-modern-mean",
        "bert-nomic-cross",
        "embeddinggemma-bare",
    ] {
        let (engine, reference) = (engine(model, &options), reference(model));
        let pooled = |prompt: &[u32], embed| Request { max_tokens: 0, embed: Some(embed), ..greedy(prompt, 1) };
        let off = |found: &[f32], expected: &serde_json::Value| {
            let expected = expected.as_array().unwrap();
            assert_eq!(found.len(), expected.len(), "{model}");
            let off =
                |(found, expected): (&f32, &serde_json::Value)| (f64::from(*found) - expected.as_f64().unwrap()).abs();
            found.iter().zip(expected).map(off).fold(0.0, f64::max)
        };
        let texts: Vec<Vec<u32>> =
            reference["texts"].as_array().unwrap().iter().map(|text| ids(&text["ids"])).collect();
        let alone: Vec<Vec<f32>> =
            texts.iter().map(|text| ask(&engine, pooled(text, Embed::new(Pooling::Mean))).pooled.unwrap()).collect();
        for (found, text) in alone.iter().zip(reference["texts"].as_array().unwrap()) {
            assert!(off(found, &text["mean"]) <= 1e-4, "{model}: off by {}", off(found, &text["mean"]));
        }
        let readers: Vec<_> =
            texts.iter().map(|text| engine.submit(pooled(text, Embed::new(Pooling::Mean))).unwrap()).collect();
        for (reader, alone) in readers.into_iter().zip(&alone) {
            assert_eq!(collect(reader).pooled.as_ref(), Some(alone), "{model}: in company");
        }
        for pair in reference["pairs"].as_array().into_iter().flatten() {
            let second = ids(&pair["types"]).iter().position(|kind| *kind == 1).unwrap();
            let score = ask(&engine, pooled(&ids(&pair["ids"]), Embed::pair(Some(second as u32)))).pooled.unwrap();
            assert!((f64::from(score[0]) - pair["logit"].as_f64().unwrap()).abs() <= 1e-4, "{model}: {score:?}");
        }
        quiet(&engine);
        assert_eq!(allocations(&engine).1, 0);
    }
}

/// If few tokens determine the next one, few bytes are fetched. The answer is that of whole rows.
#[test]
#[ignore = "external"]
fn few_bytes_come_back_where_likely_tokens_tell_the_answer() {
    let _alone = alone();
    let engine = engine("qwen3", &on_gpu(exact()));
    let row = 4 * u64::from(engine.limits().vocab_size);
    let fetched = |request: Request| {
        let before = engine.metrics().device_fetched_bytes.get();
        let answer = ask(&engine, request);
        quiet(&engine);
        assert_eq!(answer.error, None);
        (answer.ids, engine.metrics().device_fetched_bytes.get() - before)
    };
    let usual = || SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() };
    let biased = |bias| SamplingParams { logit_bias: vec![(5, bias), (77, bias)], ..SamplingParams::greedy() };
    let penalised = SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.4, ..SamplingParams::greedy() };
    // Bytes fetched for a row: 8 for each token that may be the next one, or all. 0: candidates, and at times whole rows.
    for (name, sampling, min_tokens, bytes) in [
        ("greedy", SamplingParams::greedy(), 0, 8),
        ("greedy, not to end yet", SamplingParams::greedy(), 24, 32 * 8),
        ("top-k", SamplingParams { top_k: 20, top_p: 0.95, ..usual() }, 0, 20 * 8),
        ("top-k and min-p", SamplingParams { top_k: 3, min_p: 0.2, ..usual() }, 0, 3 * 8),
        ("less likely tokens", biased(-5.0), 0, 32 * 8),
        ("min-p", SamplingParams { min_p: 0.7, ..usual() }, 0, 128 * 8),
        ("more likely tokens", biased(5.0), 0, row),
        ("temperature alone", usual(), 0, row),
        ("penalties", penalised, 0, 0),
    ] {
        let request = Request { sampling, min_tokens, speculate: false, ..greedy(&[1, 2, 3, 4, 5, 6, 7], 24) };
        let (told, few) = fetched(request.clone());
        // Log probabilities need all logits.
        let (expected, all) = fetched(Request { logprobs: Some(1), ..request });
        assert_eq!(told, expected, "{name}");
        assert_eq!(all, 24 * row, "{name}");
        match bytes {
            // Whole rows may be needed as well, now and then.
            0 => assert!(few >= 24 * 32 * 8 && few <= 24 * (32 * 8 + row), "{name}: {few}"),
            bytes => assert_eq!(few, 24 * bytes, "{name}"),
        }
    }
    assert_eq!(allocations(&engine).1, 0);
}

/// Dedicated GPU memory is planned, held and reported apart from the machine's memory.
#[test]
#[ignore = "external"]
fn a_gpu_with_memory_of_its_own_has_its_own_line() {
    let _alone = alone();
    let options = Options { gpu_memory_budget: Some("480MiB".parse().unwrap()), ..exact() };
    check("qwen3-moe", &options);
    let engine = engine("llama", &on_gpu(options));
    let (plan, ledger) = (engine.plan(), engine.ledger());
    assert!(plan.device.as_ref().is_some_and(|device| device.limit == 480 << 20), "{plan}");
    assert!(plan.device_total() <= 480 << 20 && ledger.committed_on_device() <= plan.device_total(), "{plan}");
    assert!(ledger.committed_on_device() > 0 && ledger.row(Component::Transfers).committed > 0);
    assert_eq!(ask(&engine, greedy(&[1, 2, 3], 4)).ids.len(), 4);
    let report = engine.report();
    let device = report.device.expect("the memory of the GPU");
    assert_eq!(device.committed_bytes, ledger.committed_on_device());
    let line = Options { gpu_memory_budget: Some("300MiB".parse().unwrap()), ..on_gpu(exact()) };
    let checkpoint = Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap());
    let error = start(&checkpoint, tokenizer, &line, &Host::read(&line).unwrap(), |_| {}).err().unwrap().to_string();
    assert!(error.contains("a GPU with"), "{error}");
}

/// Buffers of the software driver are on the heap and are counted once.
#[test]
#[ignore = "external"]
fn buffers_of_software_are_no_rest_of_the_heap() {
    let _alone = alone();
    let engine = engine("llama", &on_gpu(Options { max_total_token_num: Some(1 << 16), ..exact() }));
    quiet(&engine);
    let report = engine.report();
    let row = |name: &str| report.components.iter().find(|row| row.component == name).unwrap().committed_bytes;
    let buffers = row("weights") + row("kv_pages") + row("step_workspace");
    let (rest, resident) = (row("host_heap"), report.heap.resident_bytes);
    let words = format!("{buffers} bytes of buffers and {rest} of the rest, of {resident} of the heap");
    assert!(buffers > 32 << 20, "too little to be noticed: {words}");
    assert!(rest + buffers <= resident + (4 << 20), "{words}");
}

/// `--device auto` takes only a hardware GPU, and logs which device it takes.
#[test]
#[ignore = "external"]
fn auto_takes_no_software() {
    let _alone = alone();
    let options = Options { device: DeviceChoice::Auto, ..exact() };
    let checkpoint = Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let (settled, said) = plimsoll_engine::choose_device(&checkpoint, &options).unwrap();
    let said = said.unwrap();
    match settled.device {
        DeviceChoice::Cpu => assert!(said.contains("the CPU") && said.contains("no GPU was found"), "{said}"),
        // On a machine with a GPU.
        device => assert!(device == DeviceChoice::Gpu(None) && !said.contains("llvmpipe"), "{said}"),
    }
    let cpu = Options { device: DeviceChoice::Cpu, ..options };
    assert_eq!(plimsoll_engine::choose_device(&checkpoint, &cpu).unwrap().1, None);
}

/// A lost GPU ends the running requests and is opened again, once.
#[test]
#[ignore = "external"]
fn a_lost_gpu_ends_requests_and_is_opened_again_once() {
    let _alone = alone();
    let engine = engine("llama", &on_gpu(exact()));
    let request = || greedy(&[1, 2, 3, 4, 5], 12);
    let before = ask(&engine, request());
    for loss in 0..2 {
        let held = engine.ledger().committed_total();
        faults::arm_site(faults::Site::LoseDevice, 4);
        let lost = ask(&engine, request());
        assert_eq!(faults::disarm_site().hit, 1);
        let error = lost.error.expect("the request ends with an error");
        assert!(error.to_lowercase().contains("gpu"), "{error}");
        let after = ask(&engine, request());
        if loss == 0 {
            assert_eq!((&after.error, &after.ids), (&None, &before.ids), "the same answer from the GPU opened again");
            assert_eq!(engine.ledger().row(Component::Weights).committed > 0, held > 0);
            assert_eq!(allocations(&engine).1, 0);
        } else {
            assert!(after.error.is_some_and(|error| error.contains("could not be opened again")));
        }
    }
}

/// Requests of all lengths; some of them begin alike.
fn crowd() -> Vec<(Vec<u32>, u32)> {
    let request = |i: u64| {
        let shared = mix(i).is_multiple_of(3);
        let token = |j: u64| if shared && j < 40 { mix(j) % 300 } else { mix(i * 1009 + j) % 300 };
        ((0..1 + mix(i + 7) % 90).map(|j| token(j) as u32).collect(), 1 + (mix(i + 9) % 30) as u32)
    };
    (0..24).map(request).collect()
}

#[test]
#[ignore = "external"]
fn answers_are_the_same_bits_alone_and_in_a_crowd() {
    let _alone = alone();
    ["qwen3", "qwen3-moe", "qwen3.5"].into_iter().for_each(same_bits);
}

fn same_bits(model: &str) {
    let options = Options { dtype: DtypePolicy::Auto, kv_dtype: KvDtype::F16, ..exact() };
    let request = |(prompt, tokens): &(Vec<u32>, u32)| {
        let mut request = greedy(prompt, *tokens);
        request.logprobs = Some(2);
        request
    };
    let answers: Vec<Answer> = {
        let engine = engine(model, &on_gpu(Options { prefix_cache: false, ..options.clone() }));
        crowd().iter().map(|of| ask(&engine, request(of))).collect()
    };
    // Chunks of 16 rows, layer by layer beside answers, and a pool that is too small for all.
    for shape in [
        options.clone(),
        Options { batch_max_tokens: 16, ..options.clone() },
        Options { max_total_token_num: Some(256), ..options },
    ] {
        let engine = engine(model, &on_gpu(shape.clone()));
        let readers: Vec<_> = crowd().iter().map(|of| engine.submit(request(of)).unwrap()).collect();
        for (i, (reader, alone)) in readers.into_iter().zip(&answers).enumerate() {
            collect(reader).is_the_same_as(alone, &format!("{model}: request {i} of {shape:?}"));
        }
        quiet(&engine);
        assert_eq!(allocations(&engine).1, 0);
    }
}

/// Every buffer of a start is refused once: the start fails with the reason, or does without the buffer.
#[test]
#[ignore = "external"]
fn every_buffer_of_a_start_may_be_refused() {
    let _alone = alone();
    let options = on_gpu(exact());
    let checkpoint = Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap());
    let mut refused = 0;
    for nth in 1.. {
        let host = Host::read(&options).unwrap();
        faults::arm_regions(None, nth);
        let started = start(&checkpoint, Arc::clone(&tokenizer), &options, &host, |_| {});
        let hit = faults::disarm_regions().hit;
        match started {
            Ok(engine) => assert_eq!(ask(&engine, greedy(&[1, 2, 3], 4)).ids.len(), 4, "refusal {nth}"),
            Err(error) => {
                refused += 1;
                assert!(
                    error.to_string().contains("refused") || error.to_string().contains("memory"),
                    "{nth}: {error}"
                );
            }
        }
        if hit == 0 {
            break;
        }
    }
    // Weights, vectors, staging, a cache for each layer, arena, three buffers of transfers.
    assert!(refused >= 8, "{refused} refusals");
}

#[test]
#[ignore = "external"]
fn software_stands_for_no_gpu_unless_allowed() {
    let _alone = alone();
    let options = Options { allow_software_gpu: false, ..on_gpu(exact()) };
    let line = Host::read(&options).unwrap().limit;
    let why = line.gpu.expect("a GPU was asked for");
    // A machine with a GPU finds it.
    match why {
        Err(why) => assert!(why.contains("--allow-software-gpu") || why.contains("no GPU was found"), "{why}"),
        Ok(gpu) => assert!(!gpu.name.contains("llvmpipe"), "{gpu:?}"),
    }
}
