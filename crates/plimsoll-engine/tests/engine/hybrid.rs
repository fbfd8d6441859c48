//! Hybrid models through the whole engine, with and without their draft heads. Tests use transformers' references, checkpoints with a known
//! acceptance, crowds and chats, and check the memory.

use std::sync::atomic::Ordering::Acquire;

use plimsoll_device::{ComputeDtype, KvDtype};
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{Blueprint, MemoryLimit, Options, PlanError, Request};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Component;

use crate::common::recall::mix;
use crate::common::{
    Answer, all_bf16, ask, collect, engine, exact, fixtures, greedy, ids, quiet, reference, with_drafts,
};

const HYBRIDS: [&str; 3] = ["qwen3-next", "qwen3.5", "qwen3.5-moe"];
/// Models of attention alone, with a draft head behind the last layer.
const HEADS: [&str; 4] = ["glm4-moe", "gguf-glm4-moe-q8_0", "glm4.7-flash", "deepseek-v3"];
/// Hybrids without a draft head: short convolutions, Mamba-2, and n-gram embeddings.
const HEADLESS: [&str; 6] = ["qwen4-exp", "lfm2", "lfm2-moe", "granite4-h-moe", "falcon-h1", "nemotron-h-moe"];

/// The continuations of transformers, whatever is drafted on the way.
#[test]
fn drafts_change_no_reference() {
    for model in HYBRIDS.into_iter().chain(HEADS) {
        for drafts in [0, 1, 3] {
            let engine = engine(model, &with_drafts(drafts));
            for prompt in reference(model)["prompts"].as_array().unwrap() {
                let answer = ask(&engine, greedy(&ids(&prompt["ids"]), 32));
                assert_eq!(answer.ids, ids(&prompt["greedy"]), "{model}, {drafts} drafts");
                assert_eq!(answer.drafts.0 > 0, drafts > 0, "{model}");
            }
        }
    }
}

/// The head's first guess is the one of the reference implementation.
#[test]
fn the_first_draft_is_the_references() {
    for model in HYBRIDS.into_iter().chain(HEADS) {
        let engine = engine(model, &Options { mtp_optimistic: true, ..with_drafts(1) });
        let mut checked = 0;
        for case in reference(model)["mtp"].as_array().unwrap() {
            // The reference was given the next token of each row. A case can be checked only where that token is the
            // model's own choice.
            let (known, follow, guess) = (ids(&case["ids"]), ids(&case["tokens"]), ids(&case["argmax"]));
            let answer = ask(&engine, greedy(&known, 3));
            if answer.ids[0] == *follow.last().unwrap() {
                assert_eq!(answer.ids[1], *guess.last().unwrap(), "{model}");
                assert_eq!(answer.drafts, (1, 1));
                checked += 1;
            }
        }
        assert!(checked > 0, "{model}: no case of the reference could be checked");
    }
}

/// Returns the greedy tokens after `last`, and the drafted and accepted tokens of a checkpoint with known acceptance.
fn known_drafts(reference: &serde_json::Value, last: u32, tokens: usize, drafts: usize) -> (Vec<u32>, (u32, u32)) {
    let (next, wrong) = (ids(&reference["next"]), ids(&reference["wrong"]));
    let mut said = vec![next[last as usize]];
    while said.len() < tokens {
        said.push(next[*said.last().unwrap() as usize]);
    }
    let (mut drafted, mut accepted, mut at) = (0, 0, 1);
    while at < tokens {
        let n = drafts.min(tokens - at - 1);
        let hits = (0..n).take_while(|i| !wrong.contains(&said[at - 1 + i])).count();
        (drafted, accepted) = (drafted + n as u32, accepted + hits as u32);
        at += hits + 1;
    }
    (said, (drafted, accepted))
}

#[test]
fn checkpoints_of_known_acceptance_are_accepted_exactly() {
    for model in ["mtp-always", "mtp-half", "mtp-never"] {
        let reference = reference(model);
        for drafts in 1..=4 {
            let engine = engine(model, &with_drafts(drafts));
            let prompts: Vec<Vec<u32>> =
                (0..8).map(|i| (0..3 + 9 * i).map(|j| (mix(i * 100 + j) % 380) as u32).collect()).collect();
            let mut sampled = SamplingParams { temperature: 0.7, seed: 5, ..SamplingParams::default() };
            sampled.top_p = 0.95;
            let mut sum = (0, 0);
            for params in [SamplingParams::greedy(), sampled] {
                let ask = |prompt: &Vec<u32>| Request { sampling: params.clone(), ..greedy(prompt, 100) };
                let readers: Vec<_> = prompts.iter().map(|p| engine.submit(ask(p)).unwrap()).collect();
                for (prompt, reader) in prompts.iter().zip(readers) {
                    let (said, counts) = known_drafts(&reference, *prompt.last().unwrap(), 100, drafts);
                    let answer = collect(reader);
                    assert_eq!(answer.ids, said, "{model}");
                    assert_eq!(answer.drafts, counts, "{model}, {drafts} drafts: drafted and accepted");
                    sum = (sum.0 + counts.0, sum.1 + counts.1);
                }
            }
            quiet(&engine);
            let metrics = engine.metrics();
            assert_eq!((metrics.drafted_tokens.get(), metrics.accepted_tokens.get()), (sum.0.into(), sum.1.into()));
            match model {
                "mtp-always" => assert_eq!(sum.0, sum.1),
                "mtp-never" => assert_eq!(sum.1, 0),
                _ => assert!(sum.1 > 0 && sum.1 < sum.0),
            }
        }
    }
}

/// Longest prompt plus output of a crowd.
const LONGEST: usize = 112;

fn crowd(seed: u64) -> Vec<Request> {
    let dice = |i: u64, salt: u64, n: u64| mix(seed * 1_000_003 + i * 1009 + salt) % n;
    let request = |i| {
        // The last requests begin with one page and end with seven. The smallest pool has eight. Half of what two of them may generate
        // fits, so both are admitted.
        let grows = i >= 18;
        let (len, shared) = (if grows { 16 } else { 1 + dice(i, 1, 56) }, dice(i, 2, 2) == 0);
        let token = |j| if shared && j < 40 { mix(seed + j) % 300 } else { dice(i, 100 + j, 300) };
        let prompt: Vec<u32> = (0..len).map(|j| token(j) as u32).collect();
        let output = if grows { LONGEST as u64 - len } else { 1 + dice(i, 3, LONGEST as u64 - 57) };
        let mut request = Request { ignore_eos: grows, ..greedy(&prompt, output as u32) };
        request.logprobs = Some(dice(i, 4, 3) as u32);
        request.prompt_logprobs = (dice(i, 5, 6) == 0).then_some(1);
        request.speculate = dice(i, 8, 6) > 0;
        match dice(i, 6, 4) {
            0 => {
                request.sampling = SamplingParams { seed: dice(i, 7, 1 << 40), top_p: 0.9, ..SamplingParams::default() }
            }
            1 => request.sampling.repetition_penalty = 1.3,
            _ => {}
        }
        request
    };
    (0..24).map(request).collect()
}

/// I9 for models with state: tokens and log-probabilities are the same bits with and without drafts and in any company. This holds however
/// the prompt is cut, preempted or found in the cache.
#[test]
fn a_crowd_of_hybrids_says_what_each_says_alone() {
    HYBRIDS.iter().for_each(|model| check(model, ComputeDtype::Auto));
}

/// The same for models without state, in all three kinds of arithmetic.
#[test]
#[ignore = "soak"]
fn a_crowd_of_models_with_heads_says_what_each_says_alone() {
    for compute_dtype in [ComputeDtype::Auto, ComputeDtype::Int8].into_iter().chain(all_bf16()) {
        HEADS.iter().for_each(|model| check(model, compute_dtype));
    }
}

/// The same without draft heads: drafts are looked up in the prompt and answer.
#[test]
fn a_crowd_of_a_headless_hybrid_says_what_each_says_alone() {
    check(HEADLESS[0], ComputeDtype::Auto);
}

/// The same for each of the other models without draft heads.
#[test]
#[ignore = "soak"]
fn a_crowd_of_headless_hybrids_says_what_each_says_alone() {
    HEADLESS[1..].iter().for_each(|model| check(model, ComputeDtype::Auto));
}

/// The same with activations of 8 bits.
#[test]
#[ignore = "soak"]
fn a_crowd_of_hybrids_in_int8() {
    HYBRIDS.iter().chain(&["qwen4-exp"]).for_each(|model| check(model, ComputeDtype::Int8));
}

/// The same where all is computed in bfloat16, drafts and logits included.
#[test]
fn a_crowd_of_hybrids_in_bf16() {
    if let Some(compute_dtype) = all_bf16() {
        HYBRIDS.iter().chain(&["qwen4-exp"]).for_each(|model| check(model, compute_dtype));
    }
}

fn check(model: &str, compute_dtype: ComputeDtype) {
    let base = Options { kv_dtype: KvDtype::F16, threads: Some(1), compute_dtype, ..with_drafts(0) };
    let alone = engine(model, &Options { prefix_cache: false, running_max_req_size: 1, ..base.clone() });
    let mut requests = crowd(7);
    // A text that repeats itself, so that drafts can be looked up: half of the requests prefer a few tokens.
    for request in requests.iter_mut().step_by(2).filter(|_| HEADLESS.contains(&model)) {
        request.sampling.logit_bias = (20..24).map(|token| (token, 60.0)).collect();
    }
    let answers: Vec<Answer> = requests.iter().map(|request| ask(&alone, request.clone())).collect();
    drop(alone);
    let tiny = Some(LONGEST as u64 + 16);
    let draft = |drafts| match HEADLESS.contains(&model) {
        true => Options { prompt_lookup_num_tokens: drafts, ..base.clone() },
        false => Options { enable_mtp: true, mtp_num_draft_tokens: drafts, ..base.clone() },
    };
    let shapes = [
        Options { threads: Some(2), ..base.clone() },
        Options { batch_max_tokens: 16, max_total_token_num: tiny, ..base.clone() },
        draft(1),
        Options { threads: Some(2), ..draft(3) },
        Options { batch_max_tokens: 16, ..draft(2) },
        Options { max_total_token_num: tiny, ..draft(2) },
        Options { max_total_token_num: tiny, prefix_cache: false, ..draft(1) },
        Options { mtp_adaptive: true, state_checkpoints: 0, ..draft(1) },
    ];
    let (mut preemptions, mut cached, mut drafted) = (0, 0, 0);
    for (number, shape) in shapes.iter().enumerate() {
        let engine = engine(model, shape);
        let mut readers = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            readers.push(Some(engine.submit(request.clone()).unwrap()));
            if mix((number * 100 + i) as u64).is_multiple_of(5) {
                readers[i / 2] = None;
            }
        }
        for (i, reader) in readers.into_iter().enumerate() {
            let Some(reader) = reader else { continue };
            let answer = collect(reader);
            (cached, drafted) = (cached + answer.cached_tokens, drafted + answer.drafts.0);
            answer.is_the_same_as(&answers[i], &format!("{model}, shape {number}, request {i}"));
        }
        quiet(&engine);
        preemptions += engine.metrics().preemptions.get();
    }
    println!("{model}: {preemptions} preemptions, {cached} tokens cached, {drafted} drafted");
    assert!(preemptions > 0 && cached > 0 && drafted > 0, "{model}: {preemptions} {cached} {drafted} prove nothing");
}

/// Each turn starts from the state after the last turn's input, and its answer is that of an engine without a cache.
#[test]
fn a_chat_with_a_hybrid_is_warm() {
    for model in HYBRIDS.into_iter().chain(HEADLESS) {
        let warm = engine(model, &with_drafts(usize::from(HYBRIDS.contains(&model))));
        let cold = engine(model, &Options { prefix_cache: false, batch_max_tokens: 16, ..with_drafts(0) });
        let mut prompt: Vec<u32> = (0..37).map(|i| (mix(i) % 300) as u32).collect();
        let mut end_before = 0;
        for turn in 0..4 {
            let mut request = greedy(&prompt, 30);
            request.logprobs = Some(2);
            let expected = ask(&cold, request.clone());
            let answer = ask(&warm, request);
            assert_eq!(answer.cached_tokens, end_before, "{model}, turn {turn}");
            answer.is_the_same_as(&expected, &format!("{model}, turn {turn}"));
            end_before = (prompt.len() as u32 - 1) / 16 * 16;
            prompt.extend(&expected.ids);
            prompt.extend([7, 8, 9]);
            quiet(&warm);
        }
        assert_eq!(warm.status().slots_kept.load(Acquire), 2);
    }
}

fn blueprint(model: &str, options: &Options) -> Blueprint {
    let checkpoint = Checkpoint::open(&fixtures().join("models").join(model)).unwrap();
    Blueprint::new(&checkpoint, options).unwrap()
}

/// State slots and pages share one budget: the larger it is, the more requests run, up to all. At least one runs; otherwise the error says
/// what is missing.
#[test]
fn state_and_pages_share_the_room() {
    let options = Options { max_total_token_num: None, ..with_drafts(2) };
    let blueprint = blueprint("qwen3.5", &options);
    let line = |bytes| MemoryLimit::of_budget(bytes, "a test");
    let full = blueprint.plan(&options, 1, &line(1 << 40)).unwrap();
    assert_eq!(full.slots, 16 * (1 + 2 + 1), "one, one a draft, and one for a checkpoint");
    let pools = full.plan.bytes(Component::StateSlots) + full.plan.bytes(Component::KvPages);
    let fixed = full.plan.total() - pools;
    let mut before = (0, 0);
    for step in 0..60 {
        let line = line(fixed - (1 << 16) + step * (pools + pools / 4) / 60);
        match blueprint.plan(&options, 1, &line) {
            Ok(plan) => {
                assert!(plan.plan.total() <= line.bytes);
                assert!(plan.slots.is_multiple_of(4) && plan.step.running == plan.slots / 4 && plan.slots > 0);
                assert!(plan.pages >= 4, "a step of one request");
                let now = (plan.slots, plan.pages);
                assert!(now.0 >= before.0, "{now:?} after {before:?}");
                before = now;
            }
            Err(PlanError::DoesNotFit(short)) => {
                assert_eq!(before, (0, 0), "what fits goes on fitting");
                let text = short.to_string();
                assert!(short.needed > short.limit && !text.contains('-') || text.contains("--"), "{text}");
                assert!(short.details().contains("state_slots"), "{text}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(before, (full.slots, full.pages));
}

/// The user's ratio is used, or refused with the ratios that are possible.
#[test]
fn a_state_ratio_is_met_or_explained() {
    let ratio =
        |text: &str| Options { max_total_token_num: None, state_ratio: Some(text.parse().unwrap()), ..with_drafts(0) };
    let blueprint = blueprint("qwen3.5", &ratio("0.5"));
    let line = |bytes| MemoryLimit::of_budget(bytes, "a test");
    let full = blueprint.plan(&ratio("0.5"), 1, &line(1 << 40)).unwrap().plan;
    let state = full.bytes(Component::StateSlots);
    let share = state as f64 / (state + full.bytes(Component::KvPages)) as f64;
    let line = line(full.total());
    let slots = |text: &str| blueprint.plan(&ratio(text), 1, &line).map(|plan| plan.slots);
    let (half, quarter) = (slots(&format!("{:.6}", share / 2.0)), slots(&format!("{:.6}", share / 4.0)));
    let (half, quarter) = (half.unwrap(), quarter.unwrap());
    assert!(quarter > 0 && quarter < half && half < 32, "{quarter} {half}");
    let error = slots("0.000001").unwrap_err().to_string();
    assert!(error.contains("--state-ratio") && error.contains("use a ratio from"), "{error}");
}

/// Every speculation option has an upper limit.
#[test]
fn drafts_beyond_the_limit_are_refused() {
    let bad = |drafts| Options { enable_mtp: true, mtp_num_draft_tokens: drafts, ..exact() };
    let blueprint = blueprint("qwen3.5", &bad(1));
    let line = MemoryLimit::of_budget(1 << 40, "a test");
    for drafts in [0, 9] {
        let error = blueprint.plan(&bad(drafts), 1, &line).map(drop).unwrap_err().to_string();
        assert!(error.contains("--mtp-num-draft-tokens") && error.contains("1 to 8"), "{error}");
    }
    let dense = Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let error = Blueprint::new(&dense, &bad(1)).map(drop).unwrap_err().to_string();
    assert!(error.contains("--enable-mtp"), "{error}");
}
