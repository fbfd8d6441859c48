//! Speculation and recurrent state on the real engine thread over the remembering runner. Whatever is drafted, verified, shared, preempted
//! or aborted, the answers are those without speculation.

mod grammars;

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::testing::Speculation;
use plimsoll_engine::{EngineHandle, FinishReason, Request};

use crate::common::recall::{NEVER_SAID, Shape, expected_drafts, mix, prompt, recall_engine, says};
use crate::common::{Answer, ask, collect, greedy, quiet};

/// A stream of pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 += 1;
        mix(self.0) % n
    }
}

/// A request of any kind; prompts of one family begin alike.
fn request(dice: &mut Dice, longest: u64) -> Request {
    let (family, len) = (dice.below(3), 1 + dice.below(longest * 3 / 4));
    let own = dice.below(len + 1);
    let tail = dice.below(1000);
    let token = |i| mix(if i < len - own { family * 7919 + i } else { tail * 104_729 + i }) % 256;
    let prompt: Vec<u32> = (0..len).map(|i| token(i) as u32).collect();
    let mut request = greedy(&prompt, 1 + dice.below((longest - len).min(40)) as u32);
    request.cache_salt = dice.below(4) / 3;
    request.speculate = dice.below(5) > 0;
    request.logprobs = (dice.below(4) == 0).then(|| dice.below(3) as u32);
    request.prompt_logprobs = (dice.below(6) == 0).then(|| dice.below(3) as u32);
    match dice.below(6) {
        0 | 1 => {
            request.sampling = SamplingParams { seed: dice.below(1 << 40), top_k: 20, ..SamplingParams::default() };
        }
        2 => request.sampling.repetition_penalty = 1.3,
        3 => {
            request.sampling.frequency_penalty = 0.7;
            request.sampling.presence_penalty = 0.3;
            request.sampling.temperature = 0.8;
            request.sampling.seed = dice.below(1 << 40);
        }
        _ => {}
    }
    request.grammar = (dice.below(4) == 0).then(|| Arc::new(grammars::Weave(1 + dice.below(40))) as _);
    match dice.below(5) {
        0 => request.stop_token_ids = (0..12).map(|_| dice.below(256) as u32).collect(),
        1 => request.stop = vec![char::from(b'a' + dice.below(26) as u8).to_string()],
        2 => {
            request.stop_token_ids = (0..16).map(|_| dice.below(256) as u32).collect();
            request.min_tokens = dice.below(u64::from(request.max_tokens) + 1) as u32;
        }
        _ => {}
    }
    request
}

/// The parts of an answer that do not depend on speculation.
fn bare(answer: &Answer) -> (&[u32], &str, String, Option<FinishReason>, &Option<String>) {
    let reports = format!("{:?} {:?}", answer.logprobs, answer.prompt_logprobs);
    (&answer.ids, &answer.text, reports, answer.finish, &answer.error)
}

/// Returns requests and their answers from an engine without speculation, caches or other requests.
fn alone(seed: u64, count: usize, longest: u64, echo: u64) -> Vec<(Request, Answer)> {
    let (engine, _) = recall_engine(Shape { prefix_cache: false, running: 1, echo, ..Shape::default() });
    let mut dice = Dice(seed << 32);
    (0..count)
        .map(|_| request(&mut dice, longest))
        .map(|request| {
            let answer = ask(&engine, request.clone());
            (request, answer)
        })
        .collect()
}

/// Runs all requests at once, some of which are aborted.
fn crowd(engine: &EngineHandle, known: &[(Request, Answer)], seed: u64) {
    let mut dice = Dice(seed << 40 | 1);
    let mut open = Vec::new();
    for pair in known {
        let reader = engine.submit(pair.0.clone()).unwrap_or_else(|e| panic!("{e}"));
        if dice.below(8) > 0 {
            open.push((pair, reader));
        }
        if dice.below(4) == 0 {
            std::thread::sleep(Duration::from_micros(dice.below(300)));
        }
        if dice.below(5) == 0 && !open.is_empty() {
            open.swap_remove(dice.below(open.len() as u64) as usize);
        }
        if open.len() > 40 {
            let ((request, expected), reader) = open.remove(0);
            assert_eq!(bare(&collect(reader)), bare(expected), "{request:?}");
        }
    }
    for ((request, expected), reader) in open {
        assert_eq!(bare(&collect(reader)), bare(expected), "{request:?}");
    }
    quiet(engine);
}

#[test]
fn answers_are_the_same_with_and_without_speculation_in_any_company() {
    let known = alone(1, 150, 128, 0);
    let roomy = |drafts, right| Shape { context: 128, waiting: 256, ..Shape::hybrid(drafts, right, 12) };
    let mut shapes: Vec<Shape> = [(0, 0), (1, 256), (1, 128), (2, 200), (3, 0), (4, 230), (8, 250)]
        .into_iter()
        .map(|(drafts, right)| roomy(drafts, right))
        .collect();
    // Pools that hold one request, no checkpoints at all, slots of one request, few rows, a chunk at a time, no prefix cache.
    shapes.push(Shape { pages: 9, ..roomy(2, 200) });
    shapes.push(Shape { pages: 8, prefix_cache: false, ..roomy(3, 220) });
    shapes.push(Shape { state_slots: 8 * 3, ..roomy(2, 200) });
    shapes.push(Shape { state_slots: 3, ..roomy(2, 200) });
    shapes.push(Shape { rows: 9, ..roomy(4, 220) });
    shapes.push(Shape { speculation: Speculation::default(), ..roomy(2, 60) });
    shapes.push(Shape { state_slots: 0, prefix_cache: false, ..roomy(2, 200) });
    for (i, shape) in shapes.into_iter().enumerate() {
        let (engine, _) = recall_engine(shape);
        crowd(&engine, &known, i as u64);
        let metrics = engine.metrics();
        // An engine that adapts its drafts to the clock may make any number of drafts, or none.
        let many = metrics.drafted_tokens.get() > 100 || shape.speculation.adaptive;
        assert!(shape.drafts == 0 || many, "{shape:?}");
        assert!(shape.right < 100 || metrics.accepted_tokens.get() > 50 || shape.drafts == 0, "{shape:?}");
        assert_eq!(metrics.failed.get(), 0, "{shape:?}");
    }
}

/// The same for looked-up drafts, of a model that likes to repeat earlier text, with recurrent state or without.
#[test]
fn answers_are_the_same_with_and_without_looked_up_drafts_in_any_company() {
    let echo = 210;
    let known = alone(2, 150, 128, echo);
    let shape = |drafts, slots| {
        let plain = Shape { context: 128, waiting: 256, rows: 128, drafts, head: false, echo, ..Shape::default() };
        Shape { state_slots: slots * plain.running * (1 + drafts), ..plain }
    };
    let shapes = [
        shape(1, 0),
        shape(3, 0),
        shape(8, 0),
        shape(3, 2),
        Shape { pages: 9, ..shape(4, 0) },
        Shape { pages: 8, prefix_cache: false, ..shape(3, 0) },
        Shape { state_slots: 4, ..shape(3, 1) },
        Shape { rows: 9, ..shape(4, 0) },
        Shape { speculation: Speculation::default(), ..shape(2, 0) },
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        let (engine, seen) = recall_engine(shape);
        crowd(&engine, &known, i as u64);
        let metrics = engine.metrics();
        // Some drafts hit, some miss. An engine that adapts its drafts to the clock may make any number, or none.
        let (drafted, accepted) = (metrics.drafted_tokens.get(), metrics.accepted_tokens.get());
        assert!(shape.speculation.adaptive || (drafted > 100 && (50..drafted).contains(&accepted)), "{shape:?}");
        assert_eq!((metrics.failed.get(), seen.draft_passes.load(Acquire)), (0, 0), "{shape:?}");
    }
}

/// A text that repeats for ever is generated with `1 + k` tokens a step as soon as the repetition is noticed.
#[test]
fn a_text_that_repeats_itself_takes_fewer_steps() {
    let steps = |drafts| {
        let shape = Shape { drafts, head: false, echo: 256, rows: 128, ..Shape::default() };
        let (engine, seen) = recall_engine(shape);
        let answer = ask(&engine, greedy(&[7, 8, 9, 7, 8, 9, 7, 8], 121));
        assert!(answer.ids.iter().zip([9, 7, 8].iter().cycle()).all(|(id, expected)| id == expected));
        assert_eq!(answer.drafts.0, answer.drafts.1);
        let refused = Request { speculate: false, ..greedy(&[7, 8, 9, 7, 8, 9, 7, 8], 121) };
        assert_eq!(ask(&engine, refused).drafts, (0, 0));
        seen.steps.load(Acquire) - 121
    };
    assert_eq!(steps(0), 121);
    assert_eq!(steps(1), 1 + 60);
    assert_eq!(steps(3), 1 + 30);
}

#[test]
fn exactly_the_known_drafts_are_accepted() {
    for drafts in 1..=4 {
        for right in [0, 64, 128, 205, 256] {
            let (engine, _) = recall_engine(Shape::hybrid(drafts, right, 16));
            let prompts: Vec<Vec<u32>> = (0..12).map(|i| prompt(i, 5 + 7 * i as usize)).collect();
            let readers: Vec<_> = prompts.iter().map(|p| engine.submit(greedy(p, 60)).unwrap()).collect();
            let mut sum = (0, 0);
            for (prompt, reader) in prompts.iter().zip(readers) {
                let answer = collect(reader);
                assert_eq!(answer.ids, says(prompt, 60));
                assert_eq!(
                    answer.drafts,
                    expected_drafts(prompt, 60, drafts, right),
                    "{drafts} drafts, {right} of 256"
                );
                sum = (sum.0 + answer.drafts.0, sum.1 + answer.drafts.1);
            }
            match right {
                0 => assert!(sum.1 == 0 && sum.0 > 0),
                256 => assert_eq!(sum.0, sum.1),
                _ => assert!(sum.1 > 0 && sum.1 < sum.0),
            }
            quiet(&engine);
            let metrics = engine.metrics();
            assert_eq!((metrics.drafted_tokens.get(), metrics.accepted_tokens.get()), (sum.0.into(), sum.1.into()));
            let ratio = f64::from(sum.1) / f64::from(sum.0);
            assert!((metrics.acceptance_ratio.get() - ratio).abs() < 1e-9);
        }
    }
}

/// With every draft right, `k` drafts make `1 + k` tokens a step.
#[test]
fn accepted_drafts_save_steps() {
    let steps = |drafts| {
        let (engine, seen) = recall_engine(Shape::hybrid(drafts, 256, 8));
        assert_eq!(ask(&engine, greedy(&prompt(3, 20), 121)).ids, says(&prompt(3, 20), 121));
        seen.steps.load(Acquire)
    };
    assert_eq!(steps(0), 121);
    assert_eq!(steps(1), 1 + 60);
    assert_eq!(steps(3), 1 + 30);
}

#[test]
fn a_request_may_refuse_speculation() {
    let (engine, seen) = recall_engine(Shape::hybrid(2, 256, 8));
    let request = Request { speculate: false, ..greedy(&prompt(4, 20), 30) };
    let answer = ask(&engine, request);
    assert_eq!((answer.ids, answer.drafts), (says(&prompt(4, 20), 30), (0, 0)));
    assert_eq!(seen.draft_passes.load(Acquire), 1, "the prompt's rows only, for those who share its pages");
}

/// Optimistic drafts: one slot a sequence, every draft is taken, and the answer is the draft head's.
#[test]
fn optimistic_takes_every_draft_in_one_slot() {
    for right in [256, 128] {
        let shape = Shape::hybrid(2, right, 0).optimistic();
        let (engine, seen) = recall_engine(Shape { state_slots: shape.running, rows: 128, ..shape });
        let prompts: Vec<Vec<u32>> = (0..8).map(|i| prompt(i, 8 + i as usize)).collect();
        let readers: Vec<_> = prompts.iter().map(|p| engine.submit(greedy(p, 61)).unwrap()).collect();
        for (prompt, reader) in prompts.iter().zip(readers) {
            let answer = collect(reader);
            assert_eq!(answer.drafts, (40, 40), "60 tokens in steps of three");
            assert_eq!(answer.ids == says(prompt, 61), right == 256);
        }
        quiet(&engine);
        assert_eq!(engine.metrics().checkpoints_made.get(), 0, "no state is kept aside");
        // One state a step and sequence: 8 prompts in one chunk each, and 20 checking steps.
        assert_eq!(seen.states_written.load(Acquire), 8 * 21);
    }
}

/// Sampled tokens have the model's distribution, whatever was drafted.
#[test]
fn sampled_tokens_have_the_models_distribution() {
    const TOP: usize = 3;
    let (engine, _) = recall_engine(Shape { waiting: 128, ..Shape::hybrid(2, 170, 8) });
    let start = prompt(11, 17);
    let sampling = |seed| SamplingParams { temperature: 6.0, top_k: TOP as i64, seed, ..SamplingParams::default() };
    // The likely tokens and their probabilities after any history, from the reported log-probabilities of the model.
    let mut known: std::collections::BTreeMap<Vec<u32>, Vec<(u32, f64)>> = std::collections::BTreeMap::new();
    let mut after = |history: &[u32]| {
        let table = known.entry(history.to_vec()).or_insert_with(|| {
            let mut request = greedy(&[&start, history].concat(), 1);
            request.logprobs = Some(TOP as u32);
            let report = ask(&engine, request).logprobs.remove(0).unwrap();
            let weights: Vec<(u32, f64)> =
                report.top[..TOP].iter().map(|(id, logprob)| (*id, f64::from(*logprob / 6.0).exp())).collect();
            let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
            weights.into_iter().map(|(id, weight)| (id, weight / sum)).collect()
        });
        table.clone()
    };
    let mut expected = vec![(Vec::new(), 1.0)];
    for _ in 0..4 {
        let grow = |(history, p): (Vec<u32>, f64)| {
            let table = after(&history);
            table.into_iter().map(move |(id, q)| ([history.as_slice(), &[id]].concat(), p * q)).collect::<Vec<_>>()
        };
        expected = expected.into_iter().flat_map(grow).collect();
    }
    assert_eq!(expected.len(), 81);
    let draws = 8100;
    let mut counts = std::collections::BTreeMap::new();
    for block in 0..draws / 100 {
        let ask = |i| Request { sampling: sampling(block * 100 + i), ..greedy(&start, 4) };
        let readers: Vec<_> = (0..100).map(|i| engine.submit(ask(i)).unwrap()).collect();
        for reader in readers {
            *counts.entry(collect(reader).ids).or_insert(0u32) += 1;
        }
    }
    assert!(engine.metrics().accepted_tokens.get() > draws / 2);
    let square = |(ids, p): &(Vec<u32>, f64)| {
        let (seen, mean) = (f64::from(counts.get(ids).copied().unwrap_or(0)), p * draws as f64);
        (seen - mean).powi(2) / mean
    };
    let chi: f64 = expected.iter().map(square).sum();
    assert_eq!(counts.values().sum::<u32>(), draws as u32);
    assert!(counts.keys().all(|ids| expected.iter().any(|(known, _)| known == ids)), "nothing else is drawn");
    // 80 degrees of freedom: 99.99 % lie below 134.
    assert!(chi < 134.0, "chi square {chi}");
}

/// Every turn of a chat starts from the state after the last one's input.
#[test]
fn the_turns_of_a_chat_hit() {
    for drafts in [0, 2] {
        let (engine, _) = recall_engine(Shape { pages: 256, context: 2048, ..Shape::hybrid(drafts, 200, 4) });
        let mut history = prompt(21, 50);
        let mut kept = Vec::new();
        let mut end_before = 0;
        for turn in 0..60 {
            let answer = ask(&engine, greedy(&history, 12));
            assert_eq!(answer.ids, says(&history, 12));
            assert_eq!(answer.cached_tokens as usize, end_before, "turn {turn}");
            end_before = (history.len() - 1) / 16 * 16;
            history.extend(answer.ids);
            history.extend(prompt(1000 + turn, 9));
            quiet(&engine);
            kept.push(engine.status().slots_kept.load(Acquire));
        }
        assert!(kept[2..].iter().all(|n| *n == 2), "{kept:?}");
    }
}

/// Eight requests with one beginning run at once: the beginning is computed once.
#[test]
fn a_common_beginning_is_computed_once() {
    let (engine, _) = recall_engine(Shape { step_time: Duration::from_millis(2), ..Shape::hybrid(1, 200, 20) });
    let common = prompt(31, 100);
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| [common.clone(), prompt(40 + i, 30)].concat()).collect();
    // A long request keeps the engine busy while the others gather.
    let busy = engine.submit(greedy(&prompt(99, 10), 100)).unwrap();
    let readers: Vec<_> = prompts.iter().map(|p| engine.submit(greedy(p, 6)).unwrap()).collect();
    let mut cached = Vec::new();
    for (prompt, reader) in prompts.iter().zip(readers) {
        let answer = collect(reader);
        assert_eq!(answer.ids, says(prompt, 6));
        cached.push(answer.cached_tokens);
    }
    assert_eq!(cached.iter().filter(|n| **n == 96).count(), 7, "{cached:?}");
    collect(busy);
    let metrics = engine.metrics();
    assert_eq!(metrics.prompt_tokens.get(), 10 + 130 + 7 * 34);
    assert!(metrics.checkpoints_missed.get() == 0);
}

/// Without a prefix cache no missed checkpoint is counted.
#[test]
fn without_a_prefix_cache_nothing_is_missed() {
    let shape = Shape { prefix_cache: false, running: 2, step_time: Duration::from_millis(1), ..Shape::default() };
    let (engine, _) = recall_engine(Shape { state_slots: 2, ..shape });
    let readers: Vec<_> = (0..5).map(|i| engine.submit(greedy(&prompt(60 + i, 40), 30)).unwrap()).collect();
    for (i, reader) in (0..).zip(readers) {
        assert_eq!(collect(reader).ids, says(&prompt(60 + i, 40), 30));
    }
    assert_eq!(engine.metrics().checkpoints_missed.get(), 0);
    quiet(&engine);
}

/// A stop token that the model never generates ends nothing; a stop token inside a draft ends the answer right there.
#[test]
fn stops_inside_a_draft_are_exact() {
    let (engine, _) = recall_engine(Shape::hybrid(4, 256, 8));
    let start = prompt(51, 20);
    let said = says(&start, 40);
    for at in 0..40 {
        let first = said.iter().position(|id| *id == said[at]).unwrap();
        let request = Request { stop_token_ids: vec![said[at], NEVER_SAID], ..greedy(&start, 40) };
        let answer = ask(&engine, request);
        assert_eq!(answer.ids, said[..=first], "stop at {at}");
        assert_eq!(answer.finish, Some(FinishReason::Stop));
        let answer = ask(&engine, greedy(&start, at as u32 + 1));
        assert_eq!((answer.ids.as_slice(), answer.finish), (&said[..=at], Some(FinishReason::Length)));
        assert_eq!(answer.drafts.0, answer.drafts.1, "nothing is drafted beyond max_tokens");
    }
    quiet(&engine);
}

/// Drafts that miss and cost twice a step are soon paused; drafts that hit and cost a tenth continue.
#[test]
fn drafting_rests_where_it_does_not_pay() {
    let run = |right, pass_us| {
        let (step_time, pass_time) = (Duration::from_millis(1), Duration::from_micros(pass_us));
        let adaptive = Speculation { cost: 1.4, ..Speculation::default() };
        let plain = Shape { context: 1024, speculation: adaptive, ..Shape::hybrid(1, right, 8) };
        let (engine, _) = recall_engine(Shape { step_time, pass_time, ..plain });
        let answer = ask(&engine, greedy(&prompt(61, 20), 800));
        assert_eq!(answer.ids, says(&prompt(61, 20), 800));
        answer.drafts
    };
    let (drafted, accepted) = run(0, 2000);
    assert!((1..40).contains(&drafted) && accepted == 0, "{drafted}");
    // Times are measured: on a busy machine a pass may take as long as a step.
    let found: Vec<_> = (0..5).map(|_| run(256, 100)).collect();
    assert!(found.iter().any(|(drafted, _)| *drafted > 300), "{found:?}");
    assert!(found.iter().all(|(drafted, accepted)| accepted == drafted), "{found:?}");
}
