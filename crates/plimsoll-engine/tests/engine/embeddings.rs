//! Pooled requests through the whole engine: encoders and a decoder against transformers, the same bits in any company. Limits are named in
//! errors, and everything is released.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use plimsoll_engine::whatif::{Load, what_if};
use plimsoll_engine::{Blueprint, Embed, EngineHandle, Host, LoadedModel, Options, Pooling, Refusal, Request, start};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Component;
use plimsoll_text::Tokenizer;
use serde_json::Value;

use crate::common::{Answer, ask, collect, engine, exact, fixtures, full_pools, greedy, ids, quiet, reference};

/// Largest difference allowed between a hidden state's element and its reference.
const TOLERANCE: f64 = 1e-5;

fn encoder() -> Options {
    Options { max_total_token_num: None, ..exact() }
}

fn pooled(prompt: &[u32], embed: Embed) -> Request {
    Request { max_tokens: 0, embed: Some(embed), ..greedy(prompt, 1) }
}

fn values(answer: Answer) -> Vec<f32> {
    assert_eq!(answer.error, None);
    answer.pooled.expect("a pooled request ends with its numbers")
}

fn embed(engine: &EngineHandle, prompt: &[u32], pooling: Pooling) -> Vec<f32> {
    values(ask(engine, pooled(prompt, Embed::new(pooling))))
}

fn off(found: &[f32], expected: &Value) -> f64 {
    let expected = expected.as_array().unwrap();
    assert_eq!(found.len(), expected.len());
    let off = |(found, expected): (&f32, &Value)| (f64::from(*found) - expected.as_f64().unwrap()).abs();
    found.iter().zip(expected).map(off).fold(0.0, f64::max)
}

fn check(model: &str) {
    let engine = engine(model, &encoder());
    let reference = reference(model);
    let mut worst: f64 = 0.0;
    for text in reference["texts"].as_array().unwrap() {
        let tokens = ids(&text["ids"]);
        let poolings = [(Pooling::First, "first"), (Pooling::Mean, "mean"), (Pooling::Dense, "dense")];
        for (pooling, name) in poolings.into_iter().filter(|(_, name)| !text[name].is_null()) {
            worst = worst.max(off(&embed(&engine, &tokens, pooling), &text[name]));
        }
    }
    for pair in reference["pairs"].as_array().into_iter().flatten() {
        let second = ids(&pair["types"]).iter().position(|kind| *kind == 1).unwrap();
        let score = values(ask(&engine, pooled(&ids(&pair["ids"]), Embed::pair(Some(second as u32)))));
        worst = worst.max(off(&score, &Value::from(vec![pair["logit"].clone()])));
    }
    println!("{model}: largest difference of a hidden state or score {worst:.2e}");
    assert!(worst <= TOLERANCE, "{model}: off by {worst}");
    quiet(&engine);
    engine.stop();
}

#[test]
fn bert() {
    check("bert");
}

#[test]
fn a_cross_encoder() {
    check("bert-cross");
}

#[test]
fn roberta() {
    check("bert-roberta");
}

#[test]
fn modernbert() {
    check("bert-modern");
}

#[test]
fn a_modernbert_that_scores_the_mean() {
    check("bert-modern-mean");
}

#[test]
fn a_modernbert_with_biases_and_two_kinds_of_layers_in_its_own_order() {
    check("bert-modern-biased");
}

#[test]
fn nomic_bert_in_its_original_form() {
    check("bert-nomic");
}

#[test]
fn nomic_bert_with_experts() {
    check("bert-nomic-moe");
    check("bert-gguf-nomic-moe");
}

#[test]
fn nomic_bert_with_a_classifier() {
    check("bert-nomic-cross");
}

#[test]
fn a_gemma_that_sees_later_positions() {
    check("embeddinggemma-bare");
}

#[test]
fn embeddinggemma_with_its_dense_layers() {
    check("embeddinggemma");
    let engine = engine("embeddinggemma", &encoder());
    assert_eq!((engine.limits().embedding_size, engine.limits().dense), (48, true));
    let (_, words) = refused(&engine, pooled(&[1], Embed::new(Pooling::Mean)));
    assert!(words.contains("dense layers make the embedding"), "{words}");
    let (_, words) = refused(&engine, greedy(&[1, 2], 3));
    assert!(words.contains("makes embeddings only"), "{words}");
    engine.stop();
}

#[test]
fn encoders_from_gguf() {
    for model in ["bert-gguf", "bert-gguf-cross", "bert-gguf-nomic", "bert-gguf-modern", "embeddinggemma-gguf"] {
        check(model);
        // The vocabulary in the file gives the same ids as the library.
        let tokenizer = LoadedModel::open(&fixtures().join("models").join(model)).unwrap().tokenizer;
        for text in reference(model)["texts"].as_array().unwrap() {
            let found = tokenizer.encode(text["text"].as_str().unwrap(), true, false).unwrap();
            assert_eq!(found, ids(&text["ids"]), "{model}");
        }
    }
}

/// A tokenizer may mark the second text of a pair with a type that the model does not have.
#[test]
fn a_second_kind_of_token_that_the_model_lacks_is_the_first() {
    let engine = engine("bert-roberta", &encoder());
    let prompt = prompt(3, 20, 200);
    let plain = embed(&engine, &prompt, Pooling::Mean);
    let mut typed = Embed::new(Pooling::Mean);
    typed.second_at = Some(9);
    assert_eq!(values(ask(&engine, pooled(&prompt, typed))), plain);
    engine.stop();
}

fn pooling_reference() -> Value {
    let file = fixtures().join("pooling_reference.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// The prompts of 150 tokens go through in chunks of 64, or of 16.
#[test]
fn a_decoder_is_pooled_over_chunks() {
    let reference = pooling_reference();
    let mut worst: f64 = 0.0;
    let mut bits = Vec::new();
    for rows in [64, 16] {
        let engine = engine("qwen3", &Options { batch_max_tokens: rows, ..exact() });
        for prompt in reference["prompts"].as_array().unwrap() {
            let tokens = ids(&prompt["ids"]);
            let [last, mean] = [Pooling::Last, Pooling::Mean].map(|pooling| embed(&engine, &tokens, pooling));
            worst = worst.max(off(&last, &prompt["last"])).max(off(&mean, &prompt["mean"]));
            // The prefix is cached now. Mean pooling must not use it.
            assert_eq!(embed(&engine, &tokens, Pooling::Mean), mean);
            let again = ask(&engine, pooled(&tokens, Embed::new(Pooling::Last)));
            assert_eq!(again.cached_tokens as usize, (tokens.len() - 1) / 16 * 16);
            assert_eq!(values(again), last);
            bits.push([last, mean]);
        }
        quiet(&engine);
        full_pools(&engine);
        engine.stop();
    }
    let (first, second) = bits.split_at(bits.len() / 2);
    assert_eq!(first, second, "chunks do not show");
    println!("qwen3: largest difference of a pooled state {worst:.2e}");
    assert!(worst <= TOLERANCE, "off by {worst}");
}

fn prompt(seed: u32, len: usize, vocab: u32) -> Vec<u32> {
    (0..len as u32)
        .map(|i| seed.wrapping_mul(2_654_435_761).wrapping_add(i.wrapping_mul(i).wrapping_mul(7919) + i * 31) % vocab)
        .collect()
}

#[test]
fn i9_an_encoder_does_not_hear_its_neighbours() {
    let prompts: Vec<Vec<u32>> = (0..60).map(|i| prompt(i, 1 + (i as usize * 37) % 60, 200)).collect();
    let whole = || Embed::new(Pooling::Mean);
    let dense = Embed::new(Pooling::Dense);
    for (model, embed) in [
        ("bert", whole()),
        ("bert-modern", whole()),
        ("bert-modern-mean", Embed::pair(None)),
        ("embeddinggemma", dense),
    ] {
        let ask_alone = |engine: &EngineHandle, prompt: &Vec<u32>| values(ask(engine, pooled(prompt, embed)));
        let roomy = engine(model, &encoder());
        let alone: Vec<Vec<f32>> = prompts.iter().map(|prompt| ask_alone(&roomy, prompt)).collect();
        roomy.stop();
        for (threads, rows) in [(1, 64), (2, 64), (3, 90)] {
            let options = Options { threads: Some(threads), batch_max_tokens: rows, ..encoder() };
            let engine = engine(model, &options);
            let readers: Vec<_> = prompts.iter().map(|prompt| engine.submit(pooled(prompt, embed)).unwrap()).collect();
            let together: Vec<Vec<f32>> = readers.into_iter().map(|reader| values(collect(reader))).collect();
            assert!(together == alone, "{model}: {threads} threads, {rows} rows");
            let steps = engine.status().steps.load(Acquire);
            assert!(steps < prompts.len() as u64, "{model}: {steps} steps: short inputs share one");
            quiet(&engine);
            engine.stop();
        }
    }
}

/// A pool so small that pooled requests are preempted, beside requests that generate.
#[test]
fn i9_decoder_pools_beside_generation_and_after_preemption() {
    let roomy = engine("qwen3", &exact());
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| prompt(i, 100 + 17 * i as usize, 380)).collect();
    let expected: Vec<Vec<f32>> = prompts.iter().map(|prompt| embed(&roomy, prompt, Pooling::Mean)).collect();
    let said: Vec<Vec<u32>> = prompts.iter().map(|prompt| ask(&roomy, greedy(&prompt[..20], 200)).ids).collect();
    roomy.stop();
    let tight =
        Options { max_total_token_num: Some(320), max_req_total_len: Some(256), batch_max_tokens: 32, ..exact() };
    let engine = engine("qwen3", &tight);
    let submit = |request| engine.submit(request).unwrap();
    let readers: Vec<_> = prompts
        .iter()
        .map(|prompt| (submit(greedy(&prompt[..20], 200)), submit(pooled(prompt, Embed::new(Pooling::Mean)))))
        .collect();
    for (i, (text, pooled)) in readers.into_iter().enumerate() {
        assert_eq!(collect(text).ids, said[i]);
        assert_eq!(values(collect(pooled)), expected[i]);
    }
    assert!(engine.metrics().preemptions.get() > 0, "the pool was meant to be too small");
    quiet(&engine);
    full_pools(&engine);
    engine.stop();
}

#[test]
fn a_client_that_goes_gets_everything_back() {
    for (model, options) in [("bert", encoder()), ("qwen3", exact())] {
        let engine = engine(model, &options);
        for round in 0..20 {
            let requests = (0..16).map(|i| pooled(&prompt(round * 16 + i, 50, 200), Embed::new(Pooling::Mean)));
            let mut readers: Vec<_> = requests.map(|request| engine.submit(request).unwrap()).collect();
            // Some clients leave at once, some when they have their answers.
            readers.drain(..8);
            values(collect(readers.pop().unwrap()));
        }
        quiet(&engine);
        full_pools(&engine);
        assert_eq!(engine.held(), 0, "{model}");
        engine.stop();
    }
}

fn refused(engine: &EngineHandle, request: Request) -> (&'static str, String) {
    match engine.submit(request) {
        Err(Refusal::Invalid { param, message }) => (param, message),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was accepted"),
    }
}

#[test]
fn what_cannot_be_is_refused_with_its_limit() {
    let bert = engine("bert", &encoder());
    assert_eq!((bert.limits().max_req_total_len, bert.limits().embedding_size), (64, 32));
    let (param, words) = refused(&bert, greedy(&[1, 2], 3));
    assert!(param == "model" && words.contains("makes embeddings only"), "{words}");
    let long = pooled(&prompt(1, 65, 200), Embed::new(Pooling::Mean));
    let (_, words) = refused(&bert, long);
    assert!(
        words.contains("65 tokens") && words.contains("limit of 64") && words.contains("--batch-max-tokens"),
        "{words}"
    );
    let (_, words) = refused(&bert, pooled(&[1], Embed::pair(None)));
    assert!(words.contains("no classifier"), "{words}");
    let (_, words) = refused(&bert, Request { max_tokens: 1, ..pooled(&[1], Embed::new(Pooling::Mean)) });
    assert!(words.contains("not generated"), "{words}");
    refused(&bert, pooled(&[], Embed::new(Pooling::Mean)));
    refused(&bert, pooled(&[256], Embed::new(Pooling::Mean)));
    assert_eq!(embed(&bert, &prompt(1, 64, 200), Pooling::Mean).len(), 32, "the longest input");
    quiet(&bert);
    bert.stop();
    let decoder = engine("qwen3", &exact());
    let (_, words) = refused(&decoder, pooled(&prompt(1, 2049, 300), Embed::new(Pooling::Last)));
    assert!(words.contains("2049") && words.contains("--max-req-total-len"), "{words}");
    decoder.stop();
}

/// Starts an encoder, which tests its plan; many requests then take no more than the plan.
fn plan_and_test(model: &str, rows: usize, running: usize) {
    let folder = fixtures().join("models").join(model);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let options =
        Options { batch_max_tokens: rows, graph_max_batch_size: running, running_max_req_size: running, ..encoder() };
    let host = Host::read(&options).unwrap();
    let planned = Blueprint::new(&checkpoint, &options).unwrap().plan(&options, 2, &host.limit).unwrap();
    let bytes = |component| planned.plan.bytes(component);
    assert_eq!((bytes(Component::KvPages), bytes(Component::PrefixIndex), planned.pages), (0, 0, 0));
    let tokenizer = Arc::new(Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap());
    let engine = start(&checkpoint, tokenizer, &options, &host, |_| {}).unwrap();
    // The largest step takes the memory that was planned for it.
    let measured = engine.measured_workspace_bytes().unwrap();
    assert!(
        measured <= planned.workspace as u64 && planned.workspace as u64 - measured < 64,
        "{model}: {measured} of {}",
        planned.workspace
    );
    assert_eq!(*engine.limits(), planned.limits, "I8");
    let row = engine.ledger().row(Component::KvPages);
    assert_eq!((row.planned, row.committed), (0, 0));
    let most = engine.limits().max_req_total_len as usize;
    let (kind, width) = match checkpoint.config.encoder.unwrap() {
        encoder if encoder.labels.is_some() => (Embed::pair(None), 1),
        encoder if encoder.dense.is_some() => (Embed::new(Pooling::Dense), 48),
        _ => (Embed::new(Pooling::Mean), checkpoint.config.hidden_size),
    };
    let readers: Vec<_> = (0..64)
        .map(|i| pooled(&prompt(i, 1 + (i as usize * 29) % most, 200), kind))
        .map(|request| engine.submit(request).unwrap())
        .collect();
    readers.into_iter().for_each(|reader| assert_eq!(values(collect(reader)).len(), width));
    for row in engine.ledger().rows() {
        assert!(row.committed <= row.planned || row.component == Component::ProcessBaseline, "{row:?}");
    }
    quiet(&engine);
    engine.stop();
}

#[test]
fn an_encoder_is_planned_without_a_pool_and_tested() {
    for model in [
        "bert",
        "bert-cross",
        "bert-modern",
        "bert-modern-mean",
        "bert-nomic",
        "bert-nomic-cross",
        "bert-nomic-moe",
        "embeddinggemma",
        "embeddinggemma-bare",
    ] {
        for (rows, running) in [(64, 16), (200, 3), (8, 8), (512, 64)] {
            plan_and_test(model, rows, running);
        }
    }
    let checkpoint = Checkpoint::open(&fixtures().join("models/bert")).unwrap();
    let blueprint = |options: &Options| Blueprint::new(&checkpoint, options).unwrap();
    let pinned = exact();
    let host = Host::read(&pinned).unwrap();
    let words = blueprint(&pinned).plan(&pinned, 2, &host.limit).err().expect("refused").to_string();
    assert!(words.contains("--max-total-token-num") && words.contains("encoder"), "{words}");
    let words =
        what_if(&checkpoint, &encoder(), 2, &host.limit, Load { users: 2, context: 16, images: 0, audio_seconds: 0 })
            .unwrap_err()
            .to_string();
    assert!(words.contains("--users") && words.contains("encoder"), "{words}");
    let mtp = Options { enable_mtp: true, ..encoder() };
    assert!(Blueprint::new(&checkpoint, &mtp).is_err());
}

/// A pair does not wait for another with the same query: an encoder keeps no prefix to reuse.
#[test]
fn pairs_with_one_query_share_a_step() {
    let engine = engine("bert-cross", &encoder());
    let tokens = |seed: u32, n: u32| (0..n).map(move |i| 10 + (seed * 31 + i * 7) % 180);
    let pair = |i: u32| tokens(1, 20).chain(tokens(2 + i, 4)).collect::<Vec<u32>>();
    let submit = |i| engine.submit(pooled(&pair(i), Embed::pair(Some(20)))).unwrap();
    let readers: Vec<_> = (0..40).map(submit).collect();
    readers.into_iter().for_each(|reader| drop(values(collect(reader))));
    let steps = engine.status().steps.load(Acquire);
    assert!(steps < 40, "{steps} steps");
    quiet(&engine);
    engine.stop();
}
