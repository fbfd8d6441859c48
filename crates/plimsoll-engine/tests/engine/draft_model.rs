//! A draft model beside the model: the answers are those without it, bit for bit, and the plan covers both.

use std::sync::Arc;

use plimsoll_device::KvGroup;
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{Blueprint, Host, LoadedModel, Options, Request, start};
use plimsoll_formats::Checkpoint;
use plimsoll_hub::{Cache, Quiet};

use crate::common::{Answer, checkpoint, collect, engine, exact, fixtures, greedy, quiet, two_turns};

fn drafting(draft: &str, tokens: usize) -> Options {
    Options { draft_model: Some(draft.into()), draft_num_tokens: tokens, mtp_adaptive: false, ..exact() }
}

/// Greedy and sampled requests with penalties and reports; pairs of prompts share a prefix.
fn requests() -> Vec<Request> {
    let prompt = |i: u32| (0..20 + 9 * i).map(|at| (at * at + 7 * (i / 2) + at / 30 * i) % 380).collect::<Vec<u32>>();
    let sampling = |i: u32| match i % 3 {
        0 => SamplingParams::greedy(),
        1 => SamplingParams { seed: u64::from(i), top_k: 40, ..SamplingParams::default() },
        _ => SamplingParams { seed: u64::from(i), frequency_penalty: 0.5, ..SamplingParams::default() },
    };
    (0..10).map(|i| Request { sampling: sampling(i), logprobs: Some(2), ..greedy(&prompt(i), 40 + i) }).collect()
}

/// All of an answer except how it was drafted and cached.
fn said(answer: &Answer) -> (&[u32], &str, String) {
    assert_eq!(answer.error, None);
    (&answer.ids, &answer.text, format!("{:?}", answer.logprobs))
}

fn answers(model: &str, options: &Options, together: bool) -> (Vec<Answer>, [u64; 3]) {
    let engine = engine(model, options);
    let answers = match together {
        true => {
            let readers: Vec<_> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
            readers.into_iter().map(collect).collect()
        }
        false => requests().into_iter().map(|request| collect(engine.submit(request).unwrap())).collect(),
    };
    quiet(&engine);
    let metrics = engine.metrics();
    let counts = [metrics.drafted_tokens.get(), metrics.accepted_tokens.get(), metrics.preemptions.get()];
    assert_eq!(metrics.failed.get() + metrics.failed_steps.get() + metrics.panics.get(), 0);
    (answers, counts)
}

#[test]
fn answers_are_the_same_with_and_without_a_draft_model() {
    for model in ["llama-tied", "qwen3.5", "gguf-llama-q4_0"] {
        let (plain, none) = answers(model, &exact(), false);
        assert_eq!(none[0], 0);
        // One draft model is another model; the other is the model itself, whose drafts hit.
        let own = if model == "llama-tied" { model } else { "llama" };
        for (draft, tokens) in [("llama", 1), (own, 3), ("gguf-llama-q8_0", 8)] {
            let small = Options { max_total_token_num: Some(256), ..drafting(draft, tokens) };
            let bare = Options { prefix_cache: false, ..drafting(draft, tokens) };
            for options in [drafting(draft, tokens), small.clone(), bare] {
                let (with, [drafted, accepted, preempted]) = answers(model, &options, true);
                let what = format!("{model}, {draft}: {drafted} drafted, {accepted} accepted, {preempted} preempted");
                println!("{what}");
                plain.iter().zip(&with).for_each(|(plain, with)| assert_eq!(said(plain), said(with), "{what}"));
                assert!(drafted > 100, "{what}");
                // Random weights: without the first token, which the draft model never sees, they often choose otherwise.
                assert!(draft != model || accepted * 10 > drafted, "{what}");
                assert!(options.max_total_token_num != small.max_total_token_num || preempted > 0, "{what}");
            }
        }
    }
}

#[test]
fn a_second_turn_starts_from_cached_pages_with_a_draft_model() {
    let cached = engine("llama-tied", &drafting("llama", 3));
    let plain = engine("llama-tied", &Options { prefix_cache: false, ..exact() });
    let first = Request { logprobs: Some(0), ..greedy(&(0..70).collect::<Vec<u32>>(), 30) };
    let (found, prompt) = two_turns(&cached, &plain, &first, &[5, 6, 7]);
    assert!(found >= prompt / 16 * 16, "{found} of {prompt}");
    assert!(cached.metrics().drafted_tokens.get() > 0);
}

#[test]
fn the_plan_has_the_draft_models_weights_and_cache() {
    let plan = |model: &str, options: &Options| {
        let mut checkpoint = checkpoint(model);
        if let Some(draft) = &options.draft_model {
            checkpoint = checkpoint.with_draft(self::checkpoint(draft)).unwrap();
        }
        let host = Host::read(options).unwrap();
        let blueprint = Blueprint::new(&checkpoint, options).unwrap();
        (blueprint.weights.bytes, blueprint.plan(options, 2, &host.limit).unwrap())
    };
    let (own, other) = (plan("llama-tied", &exact()), plan("llama", &exact()));
    let both = plan("llama-tied", &drafting("llama", 3));
    assert_eq!(both.0, own.0 + other.0);
    let page = |planned: &(usize, plimsoll_engine::EnginePlan)| planned.1.kv.page_bytes(KvGroup::Whole);
    assert_eq!(page(&both), page(&own) + page(&other));
    assert!(both.1.workspace >= own.1.workspace);
    let text = both.1.plan.to_string();
    assert!(text.contains("of them the draft model's"), "{text}");
    let [_, drafting] = both.1.draft_work.unwrap();
    assert!(drafting.flops > 0);
}

#[test]
fn a_draft_model_that_cannot_be_used_is_refused_with_what_to_do() {
    let refused = |model: &str, options: Options| {
        let draft = options.draft_model.clone().unwrap();
        let checkpoint = checkpoint(model).with_draft(self::checkpoint(&draft)).map_err(|error| error.to_string())?;
        Blueprint::new(&checkpoint, &options).map(|_| ()).map_err(|error| error.to_string())
    };
    let lookup = Options { prompt_lookup_num_tokens: 2, ..drafting("llama", 3) };
    let head = Options { enable_mtp: true, ..drafting("llama", 3) };
    for (model, options, words) in [
        ("llama", drafting("qwen3.5", 3), "recurrent state"),
        ("llama", drafting("gemma2", 3), "wide, wider than the model (64)"),
        ("llama", drafting("llama", 9), "--draft-num-tokens is 9; 1 to 8 are allowed"),
        ("llama", lookup, "--prompt-lookup-num-tokens"),
        ("llama", head, "--enable-mtp"),
        ("llama", Options { hosted: true, ..drafting("llama", 3) }, "a server of one model"),
    ] {
        let error = refused(model, options).unwrap_err();
        assert!(error.contains("--draft-") && error.contains(words), "{error}");
    }
    let config = std::fs::read_to_string(fixtures().join("models/llama/config.json")).unwrap();
    let of = |config: &str| Checkpoint::of_config(config).unwrap();
    let other = of(&config.replace("\"vocab_size\": 384", "\"vocab_size\": 500"));
    let error = of(&config).with_draft(other).err().unwrap().to_string();
    assert!(error.contains("a vocabulary of 500 tokens, and the model has 384"), "{error}");
    let error = checkpoint("llama").with_draft(of(&config)).err().unwrap().to_string();
    assert!(error.contains("the draft model has a configuration alone"), "{error}");
}

/// The model's drafts for itself would all be right if it also saw the first token.
#[test]
#[ignore = "models"]
fn a_real_model_drafts_most_of_its_own_tokens() {
    let cache = Cache::default_location().unwrap();
    let path = plimsoll_hub::resolve("smollm2", &cache, &mut Quiet).unwrap_or_else(|e| panic!("{e}"));
    let answer = |draft: Option<String>| {
        let options = Options {
            draft_model: draft,
            mtp_adaptive: false,
            max_total_token_num: Some(2048),
            graph_max_batch_size: 4,
            running_max_req_size: 4,
            ..Options::default()
        };
        let model = LoadedModel::open(&path).unwrap();
        let model = if options.draft_model.is_some() { model.with_draft(&path).unwrap() } else { model };
        let host = Host::read(&options).unwrap();
        let engine = start(&model.checkpoint, Arc::clone(&model.tokenizer), &options, &host, |_| {}).unwrap();
        let prompt = model.tokenizer.encode("Write a short story about a lighthouse keeper.\n", true, false).unwrap();
        collect(engine.submit(greedy(&prompt, 96)).unwrap())
    };
    let (plain, drafted) = (answer(None), answer(Some("smollm2".into())));
    assert_eq!((&plain.ids, &plain.error), (&drafted.ids, &None));
    let (checked, hits) = drafted.drafts;
    println!("{hits} of {checked} drafts were right");
    // 65 of 90 with AVX-512.
    assert!(hits * 2 > checked, "{hits} of {checked}");
}
