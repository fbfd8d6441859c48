//! Recurrent state: copied, leaked, kept for ever, never kept, shared with the wrong request.

use std::sync::atomic::Ordering::Acquire;

use plimsoll_engine::{EngineHandle, Options, Request};
use plimsoll_memory::{Component, faults};

use super::{crowd, device, gone, heap_rise};
use crate::common::recall::{Shape, prompt, recall_engine, says};
use crate::common::{Answer, ask, collect, engine, exact, greedy, quiet, with_drafts};
use crate::process::own_process;

/// Bytes of the fixture qwen3.5's state, by its configuration: three recurrent layers; a convolution of 128 channels that looks
/// back three positions, four heads of 16 × 16; f32.
const QWEN35_STATE_BYTES: u64 = 3 * (128 * 3 + 4 * 16 * 16) * 4;

/// Models with other states than Gated DeltaNet's: short convolutions, and Mamba-2 alone, beside attention, and with experts.
const OTHER_STATES: [&str; 5] = ["lfm2", "lfm2-moe", "granite4-h-moe", "falcon-h1", "nemotron-h-moe"];

/// A conversation of `turns` turns: each starts from the end of the last one's input and generates the tokens of `expected`.
fn chat(engine: &EngineHandle, seed: u64, turns: u64, expected: impl Fn(Request) -> Option<Vec<u32>>) {
    let mut history = prompt(seed, 60);
    let mut end_before = 0;
    for turn in 0..turns {
        let request = greedy(&history, 4);
        let answer = ask(engine, request.clone());
        assert_eq!(answer.cached_tokens as usize, end_before, "turn {turn} of conversation {seed}");
        expected(request).into_iter().for_each(|ids| assert_eq!(answer.ids, ids, "turn {turn}"));
        end_before = (history.len() - 1) / 16 * 16;
        history.extend(answer.ids);
        history.extend(prompt(seed + 1000 + turn, 5));
    }
    quiet(engine);
}

// vllm-mlx 683: every turn kept an entry that nothing could start from, accounted as 0 bytes: 45 entries of 46 k tokens.
#[test]
fn v_09_a_conversation_keeps_no_entry_a_turn() {
    own_process!();
    let engine = engine("qwen3.5", &exact());
    (0..3).for_each(|session| chat(&engine, session, 12, |_| None));
    let status = engine.status();
    let (kept, slots) = (status.slots_kept.load(Acquire), status.slots_total.load(Acquire));
    assert!((3..=2 * 3).contains(&kept), "{kept} checkpoints of 36 turns");
    assert!(engine.metrics().checkpoints_superseded.get() >= 3 * 5);
    let committed = |component| engine.ledger().row(component).committed;
    assert_eq!(committed(Component::StateSlots), slots * QWEN35_STATE_BYTES, "what is accounted is what a state takes");
    let regions = [
        Component::Weights,
        Component::KvPages,
        Component::StateSlots,
        Component::StepWorkspace,
        Component::EmergencyReserve,
    ];
    let (accounted, real) = (regions.map(committed).iter().sum::<u64>(), faults::region_bytes());
    assert!(accounted.abs_diff(real) <= real / 100, "{accounted} bytes accounted, {real} mapped");
}

// vllm-mlx e93f8c8: recurrent layers were not evaluated between the chunks of a prompt; memory grew with its length.
#[test]
fn v_18_a_prompt_peaks_alike_in_any_number_of_chunks() {
    own_process!();
    for model in ["qwen3.5", "lfm2", "nemotron-h-moe"] {
        peaks_alike(model);
    }
}

fn peaks_alike(model: &str) {
    let run = |batch_max_tokens| {
        gone();
        let engine = engine(model, &Options { batch_max_tokens, prefix_cache: false, ..exact() });
        let request = Request { logprobs: Some(2), ..greedy(&prompt(1, 1900), 8) };
        ask(&engine, request.clone());
        quiet(&engine);
        let (before, mut answer) = (device(&engine), Answer::default());
        let rise = heap_rise(|| answer = ask(&engine, request));
        assert_eq!(device(&engine), before);
        (rise, answer)
    };
    let ((four, answer), (many, same)) = (run(475), run(16));
    assert_eq!(answer, same, "{model}: 4 chunks or 119");
    // 115 more retained states would be 1.9 MB of qwen3.5.
    assert!(many <= four + (16 << 10), "{model}: {four} bytes of heap in 4 chunks, {many} in 119");
}

// vllm-mlx 691/730: after a repair, prefixes of hybrids were no longer reused at all.
#[test]
fn v_q_a_chat_with_a_hybrid_hits() {
    own_process!();
    for model in ["qwen3-next", "qwen3.5"].into_iter().chain(OTHER_STATES) {
        let warm = engine(model, &with_drafts(usize::from(!OTHER_STATES.contains(&model))));
        let cold = engine(model, &Options { prefix_cache: false, ..with_drafts(0) });
        chat(&warm, 7, 16, |request| Some(ask(&cold, request).ids));
        let (hit, computed) = (warm.metrics().cached_tokens.get(), warm.metrics().prompt_tokens.get());
        assert!(hit > 3 * computed, "{model}: {hit} tokens found, {computed} computed");
    }
}

// sglang 16067, 20182, 33773, 36770: state slots leaked, or went back to the wrong pool, until none was left.
#[test]
fn t_41_every_slot_comes_back() {
    own_process!();
    for shape in [Shape::hybrid(0, 0, 8), Shape::hybrid(3, 180, 8), Shape::hybrid(1, 256, 0).optimistic()] {
        for prefix_cache in [true, false] {
            let (engine, _) = recall_engine(Shape { prefix_cache, ..shape });
            (0..3).for_each(|seed| crowd(&engine, seed, 80, |prompt, n| Some(says(prompt, n))));
            assert!(prefix_cache || engine.status().slots_used.load(Acquire) == 0, "{shape:?}");
        }
    }
    for optimistic in [true, false] {
        let options = Options { mtp_optimistic: optimistic, prefix_cache: false, ..with_drafts(2) };
        no_slot_is_lost("qwen3-next", &options);
    }
    // Slots of other states, window pages, and pages of latent attention.
    for model in OTHER_STATES.into_iter().chain(["gemma3", "laguna", "glm4.7-flash"]) {
        no_slot_is_lost(model, &Options { prefix_cache: false, ..exact() });
    }
}

fn no_slot_is_lost(model: &str, options: &Options) {
    let engine = engine(model, options);
    (0..2).for_each(|seed| crowd(&engine, seed, 60, |_, _| None));
    let status = engine.status();
    let used = [&status.slots_used, &status.pages_used, &status.windows_used].map(|used| used.load(Acquire));
    assert_eq!(used, [0; 3], "{model}");
}

// sglang 31230: snapshots of one conversation had no bound; a single chat exhausted the pool.
#[test]
fn t_42_a_conversation_of_200_turns_keeps_two_checkpoints() {
    own_process!();
    let (engine, _) = recall_engine(Shape { pages: 256, context: 4096, ..Shape::hybrid(2, 200, 4) });
    for turns in [1, 40, 200] {
        let kept = engine.status().slots_kept.load(Acquire);
        chat(&engine, turns, turns, |request| Some(says(&request.prompt, 4)));
        let kept = engine.status().slots_kept.load(Acquire) - kept;
        assert_eq!(kept, turns.min(2), "after {turns} turns");
    }
    assert_eq!(engine.metrics().checkpoints_evicted.get(), 0, "no need to push anything out");
}

// vllm.rs 229: a recycled state slot was not zeroed; an answer began where another user's had ended.
#[test]
fn t_43_a_recycled_slot_tells_nothing_of_its_last_user() {
    own_process!();
    let others = OTHER_STATES.map(|model| (model, 0));
    for (model, drafts) in
        [("qwen3-next", 0), ("qwen3.5", 0), ("qwen3.5-moe", 0), ("qwen3.5", 1)].into_iter().chain(others)
    {
        let one = Options { running_max_req_size: 1, prefix_cache: false, state_checkpoints: 0, ..with_drafts(drafts) };
        let request = Request { logprobs: Some(5), prompt_logprobs: Some(5), ..greedy(&prompt(2, 37), 20) };
        let cold = ask(&engine(model, &one), request.clone());
        let used = engine(model, &one);
        assert_eq!(used.status().slots_total.load(Acquire), 1 + drafts as u64, "there is no other slot");
        for first in 1..40 {
            ask(&used, greedy(&prompt(1, first), 1 + first as u32 % 5));
        }
        assert_eq!(ask(&used, request), cold, "{model}, {drafts} drafts");
    }
}

// vllm 55600: a state's index was computed in blocks of tokens; illegal memory access for the high ones.
#[test]
fn t_44_the_last_slot_is_as_good_as_the_first() {
    own_process!();
    // 128 slots, 64 pages and 1,024 tokens: code that mixes them up leaves the pool.
    let options = Options { state_checkpoints: 0, batch_max_tokens: 256, ..with_drafts(7) };
    let options = Options { max_total_token_num: Some(1024), ..options };
    let lone = engine("qwen3.5", &Options { running_max_req_size: 1, ..options.clone() });
    let requests: Vec<_> = (0..16).map(|i| Request { logprobs: Some(2), ..greedy(&prompt(i, 9), 50) }).collect();
    let expected: Vec<Answer> = requests.iter().map(|request| ask(&lone, request.clone())).collect();
    let engine = engine("qwen3.5", &options);
    let status = engine.status();
    assert_eq!((status.slots_total.load(Acquire), status.pages_total.load(Acquire)), (128, 64));
    let mut used_max = 0;
    for _ in 0..50 {
        let readers: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        while !engine.idle() {
            used_max = used_max.max(status.slots_used.load(Acquire));
            std::thread::yield_now();
        }
        for (reader, expected) in readers.into_iter().zip(&expected) {
            let answer = collect(reader);
            assert_eq!((answer.ids, answer.logprobs), (expected.ids.clone(), expected.logprobs.clone()));
        }
        if used_max == 128 {
            return;
        }
    }
    panic!("only {used_max} slots were ever used");
}

// vllm 40696: pages as large as states; no prefix below 528 tokens was ever found.
#[test]
fn t_45_a_prefix_of_500_tokens_hits() {
    own_process!();
    let engine = engine("qwen3.5", &exact());
    let cold = crate::common::engine("qwen3.5", &Options { prefix_cache: false, ..exact() });
    let common = prompt(1, 500);
    // The first request leaves a state at its own end. The second shows where the prompts part, and all later ones
    // start from there.
    for (i, hit) in [0, 0, 496, 496].into_iter().enumerate() {
        let request = greedy(&[common.clone(), prompt(10 + i as u64, 21)].concat(), 4);
        let answer = ask(&engine, request.clone());
        assert_eq!(answer.cached_tokens, hit, "request {i}");
        assert_eq!(answer.ids, ask(&cold, request).ids);
    }
}

// llama.cpp 22629, 25740: checkpoints were bounded by number; 32 slots of long contexts took 18.7 GiB.
#[test]
fn t_50_checkpoints_are_bounded_in_bytes() {
    own_process!();
    let options = Options { running_max_req_size: 8, graph_max_batch_size: 8, state_checkpoints: 3, ..exact() };
    let engine = engine("qwen3.5", &Options { max_total_token_num: Some(16 << 10), ..options });
    let (status, before) = (engine.status(), device(&engine));
    let row = engine.ledger().row(Component::StateSlots);
    assert_eq!((status.slots_total.load(Acquire), row.planned), (32, 32 * QWEN35_STATE_BYTES), "32 slots, in bytes");
    for i in 0..60 {
        assert_eq!(ask(&engine, greedy(&prompt(i, 200 + 3 * i as usize), 2)).error, None);
        assert!(status.slots_used.load(Acquire) <= 32);
    }
    assert!(engine.metrics().checkpoints_evicted.get() >= 20, "{}", engine.metrics().checkpoints_evicted.get());
    assert_eq!(device(&engine), before, "60 long contexts take what was planned, and not a byte more");
}
