//! Draft heads and draft models on a GPU driver in software: the drafts are those of the CPU. The answers are those without drafts, alone
//! and in company.

use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{Options, Request};
use plimsoll_memory::{Component, faults};

use crate::common::recall::mix;
use crate::common::{
    Answer, alone, ask, collect, engine, exact, full_pools, greedy, ids, quiet, reference, with_drafts,
};
use crate::{allocations, on_gpu};

/// Models with draft heads: hybrids, and models with a head behind the last layer.
const HEADS: [&str; 6] = ["qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe", "glm4.7-flash", "deepseek-v3"];

/// Options with a draft model that makes `drafts` drafts at once; 0: without it.
fn with_model(draft: &str, drafts: usize) -> Options {
    let draft_model = (drafts > 0).then(|| draft.into());
    Options { draft_model, draft_num_tokens: drafts.max(1), mtp_adaptive: false, ..exact() }
}

/// Asserts that nothing was allocated after ready and that no component exceeds its plan.
fn as_planned(engine: &plimsoll_engine::EngineHandle, what: &str) {
    quiet(engine);
    full_pools(engine);
    assert_eq!(allocations(engine).1, 0, "{what}: device memory was taken after ready");
    for component in [Component::Weights, Component::KvPages, Component::StepWorkspace] {
        let row = engine.ledger().row(component);
        assert!(row.committed > 0 && row.peak <= row.planned, "{what}: {row:?}");
    }
    let metrics = engine.metrics();
    assert_eq!(metrics.failed.get() + metrics.failed_steps.get() + metrics.panics.get(), 0, "{what}");
}

/// The continuations of transformers, and its drafts. These are taken unchecked if the reference's next token is the model's own.
#[test]
#[ignore = "external"]
fn draft_heads_draft_what_transformers_drafts() {
    let _alone = alone();
    for model in HEADS {
        let engine = engine(model, &on_gpu(Options { mtp_optimistic: true, ..with_drafts(1) }));
        let mut checked = 0;
        for case in reference(model)["mtp"].as_array().unwrap() {
            let (known, follow, guess) = (ids(&case["ids"]), ids(&case["tokens"]), ids(&case["argmax"]));
            let answer = ask(&engine, greedy(&known, 3));
            if answer.ids[0] == *follow.last().unwrap() {
                assert_eq!((answer.ids[1], answer.drafts), (*guess.last().unwrap(), (1, 1)), "{model}");
                checked += 1;
            }
        }
        assert!(checked > 0, "{model}: no case of the reference could be checked");
        as_planned(&engine, model);
        drop(engine);
        let engine = self::engine(model, &on_gpu(with_drafts(3)));
        for prompt in reference(model)["prompts"].as_array().unwrap() {
            let answer = ask(&engine, greedy(&ids(&prompt["ids"]), 32));
            assert_eq!((&answer.error, &answer.ids), (&None, &ids(&prompt["greedy"])), "{model}");
            assert!(answer.drafts.0 > 0, "{model}");
        }
        as_planned(&engine, model);
    }
}

/// As many drafts as on the CPU, as many of them right, and the same tokens.
#[test]
#[ignore = "external"]
fn drafts_are_those_of_the_cpu() {
    let _alone = alone();
    let known = |model| (model, with_drafts(2));
    for (model, options) in
        [known("mtp-always"), known("mtp-half"), known("mtp-never"), ("llama-tied", with_model("llama-tied", 3))]
    {
        let answers = |options: &Options| {
            let engine = engine(model, options);
            let sampled = SamplingParams { temperature: 0.7, seed: 5, top_p: 0.95, ..SamplingParams::default() };
            let penalised = SamplingParams { repetition_penalty: 1.2, ..SamplingParams::greedy() };
            let ask = |(i, sampling): (u64, SamplingParams)| {
                let prompt: Vec<u32> = (0..3 + 9 * i).map(|j| (mix(i * 100 + j) % 380) as u32).collect();
                let answer = ask(&engine, Request { sampling, ..greedy(&prompt, 60) });
                assert_eq!(answer.error, None, "{model}");
                (answer.ids, answer.drafts)
            };
            (1..).zip([SamplingParams::greedy(), sampled, penalised]).map(ask).collect::<Vec<_>>()
        };
        let on_cpu = answers(&options);
        assert_eq!(answers(&on_gpu(options)), on_cpu, "{model}");
        let (drafted, accepted) = on_cpu.iter().fold((0, 0), |sum, (_, drafts)| (sum.0 + drafts.0, sum.1 + drafts.1));
        println!("{model}: {drafted} drafted, {accepted} accepted");
        assert!(drafted > 0 && (accepted > 0) == (model != "mtp-never"), "{model}: {accepted} of {drafted}");
    }
}

/// Requests of every kind; some of them begin alike.
fn crowd() -> Vec<Request> {
    let request = |i: u64| {
        let shared = mix(i).is_multiple_of(2);
        let token = |j: u64| (mix(if shared && j < 40 { j } else { i * 1009 + j }) % 300) as u32;
        // The last requests begin with one page and grow to the whole smallest pool, so they preempt each other.
        let [rows, tokens] = if i >= 9 { [16, 96] } else { [1 + mix(i + 7) % 70, 4 + mix(i + 9) % 24] };
        let prompt: Vec<u32> = (0..rows).map(token).collect();
        let sampling = match i % 4 {
            0 | 1 => SamplingParams::greedy(),
            2 => SamplingParams { seed: i, top_k: 20, ..SamplingParams::default() },
            _ => SamplingParams { seed: i, top_p: 0.9, frequency_penalty: 0.4, ..SamplingParams::default() },
        };
        let logprobs = i.is_multiple_of(8).then_some(2);
        Request { sampling, logprobs, ..greedy(&prompt, tokens as u32) }
    };
    (0..12).map(request).collect()
}

/// Asserts that a crowd with drafts, cut and preempted in several ways, gets the answers of single requests without drafts.
fn the_same_with_and_without(model: &str, with: impl Fn(usize) -> Options) {
    let requests = crowd();
    let answers: Vec<Answer> = {
        let engine = engine(model, &on_gpu(Options { prefix_cache: false, ..with(0) }));
        requests.iter().map(|request| ask(&engine, request.clone())).collect()
    };
    let (mut drafted, mut preempted) = (0, 0);
    for shape in [
        with(1),
        // Chunks of 16 rows, layer by layer beside answers.
        Options { batch_max_tokens: 16, ..with(2) },
        // A pool that is too small for all.
        Options { max_total_token_num: Some(128), ..with(3) },
    ] {
        let what = format!("{model}, {} drafts, chunks of {}", shape.drafts(), shape.batch_max_tokens);
        let engine = engine(model, &on_gpu(shape));
        let readers: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        for (i, (reader, alone)) in readers.into_iter().zip(&answers).enumerate() {
            collect(reader).is_the_same_as(alone, &format!("{what}: request {i}"));
        }
        as_planned(&engine, &what);
        drafted += engine.metrics().drafted_tokens.get();
        preempted += engine.metrics().preemptions.get();
    }
    println!("{model}: {drafted} drafted, {preempted} preempted");
    assert!(drafted > 0 && preempted > 0, "{model}: {drafted} drafted, {preempted} preempted");
}

#[test]
#[ignore = "external"]
fn answers_are_the_same_bits_with_a_draft_head() {
    let _alone = alone();
    // Recurrent layers, and latent attention with experts.
    for model in ["qwen3.5", "deepseek-v3"] {
        the_same_with_and_without(model, with_drafts);
    }
}

#[test]
#[ignore = "external"]
fn answers_are_the_same_bits_with_a_draft_model() {
    let _alone = alone();
    // A draft model of more layers than the model has, one beside recurrent layers, and one that drafts the model's own tokens.
    for (model, draft) in [("llama", "llama-tied"), ("qwen3.5", "llama"), ("llama-tied", "llama-tied")] {
        the_same_with_and_without(model, |drafts| with_model(draft, drafts));
    }
}

/// If few tokens determine the next one, few bytes are fetched, for the draft head as for the model.
#[test]
#[ignore = "external"]
fn few_bytes_come_back_of_drafts() {
    let _alone = alone();
    let engine = engine("mtp-half", &on_gpu(with_drafts(2)));
    let row = 4 * u64::from(engine.limits().vocab_size);
    let fetched = |sampling: SamplingParams, logprobs| {
        let before = engine.metrics().device_fetched_bytes.get();
        let answer = ask(&engine, Request { sampling, logprobs, ..greedy(&[1, 2, 3, 4, 5], 40) });
        quiet(&engine);
        assert_eq!(answer.error, None);
        let (drafted, accepted) = answer.drafts;
        // A step checks its drafts and adds a token; each draft is drawn once and checked once.
        let rows = u64::from(40 - accepted + 2 * drafted);
        (answer.ids, rows, engine.metrics().device_fetched_bytes.get() - before)
    };
    for (sampling, count) in
        [(SamplingParams::greedy(), 1), (SamplingParams { top_k: 5, ..SamplingParams::default() }, 5)]
    {
        let (told, rows, few) = fetched(sampling.clone(), None);
        let (expected, _, all) = fetched(sampling, Some(1));
        assert_eq!(told, expected);
        assert_eq!((few, all), (8 * count * rows, row * rows), "{rows} rows");
    }
}

/// A GPU that is lost in a step or in a draft pass is opened again, and drafts again.
#[test]
#[ignore = "external"]
fn a_gpu_that_is_lost_while_it_drafts_is_opened_again() {
    let _alone = alone();
    for (model, options) in [("mtp-always", with_drafts(3)), ("llama-tied", with_model("llama", 3))] {
        // The prompt's step is the first submission. The next three are draft passes, the fifth verifies them, and so on.
        for nth in [2, 5, 7] {
            let engine = engine(model, &on_gpu(options.clone()));
            let request = || greedy(&[1, 2, 3, 4, 5], 24);
            let before = ask(&engine, request());
            assert!(before.drafts.0 > 0, "{model}");
            faults::arm_site(faults::Site::LoseDevice, nth);
            let lost = ask(&engine, request());
            assert_eq!(faults::disarm_site().hit, 1);
            let error = lost.error.expect("the request ends with an error");
            assert!(error.to_lowercase().contains("gpu"), "{model}, submission {nth}: {error}");
            let after = ask(&engine, request());
            assert_eq!((&after.error, &after.ids, after.drafts), (&None, &before.ids, before.drafts), "{model}, {nth}");
            quiet(&engine);
            assert_eq!(allocations(&engine).1, 0);
        }
    }
}
