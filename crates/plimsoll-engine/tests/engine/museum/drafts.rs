//! Speculation: drafts that cost memory, that outlived their request or the failure of their step, that never worked.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Acquire;

use plimsoll_engine::governor::MemoryReading;
use plimsoll_engine::testing::{by_hand, take_reading};
use plimsoll_engine::{Blueprint, Options, Request};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::faults::{self, Site};
use plimsoll_memory::heap;

use super::{crowd, device, heap_rise};
use crate::common::recall::{FAILS, Shape, expected_drafts, prompt, recall_bench, recall_engine, says};
use crate::common::{ask, collect, drive, engine, exact, fixtures, full_pools, greedy, quiet, with_drafts};
use crate::process::own_process;

// vllm-mlx 196: a state was copied every optimistic step and never used; out of memory after 4,000 steps of 147 MB each.
#[test]
fn v_05_optimistic_takes_no_snapshot() {
    own_process!();
    let one = Options { mtp_optimistic: true, running_max_req_size: 1, state_checkpoints: 0, ..with_drafts(1) };
    let engine = engine("mtp-half", &Options { threads: Some(1), ..one });
    assert_eq!(engine.status().slots_total.load(Acquire), 1, "there is no slot that a snapshot could be in");
    let tokens = engine.limits().max_req_total_len - 3;
    let before = device(&engine);
    let mut rises = Vec::new();
    while engine.status().steps.load(Acquire) < 10_000 {
        rises.push(heap_rise(|| assert_eq!(ask(&engine, greedy(&[5, 6, 7], tokens)).ids.len() as u32, tokens)));
        quiet(&engine);
    }
    // One copied state a step would be three megabytes for an answer.
    assert!(rises.len() > 3 && rises[1..].iter().all(|rise| *rise < rises[0] + (256 << 10)), "{rises:?}");
    assert_eq!((engine.metrics().checkpoints_made.get(), device(&engine)), (0, before));
}

// vllm-mlx 2d48123: the speculative state of a request that had ended entered the next one.
#[test]
fn v_17_no_draft_outlives_its_request() {
    own_process!();
    let shape = Shape { running: 1, state_slots: 4, ..Shape::hybrid(3, 180, 0) };
    let (bench, _) = recall_bench(shape);
    let (engine, mut hand) = by_hand(bench);
    let next = prompt(2, 20);
    let mut follow = |first: Request, rounds: usize| {
        let gone = engine.submit(first).unwrap();
        (0..rounds).for_each(|_| hand.run_iteration());
        drop(gone);
        let reader = engine.submit(greedy(&next, 40)).unwrap();
        let answer = drive(&mut hand, vec![reader], |_| {}).remove(0);
        assert_eq!(answer.ids, says(&next, 40), "after {rounds} rounds");
        assert_eq!(answer.drafts, expected_drafts(&next, 40, 3, 180), "after {rounds} rounds");
    };
    let (start, said) = (prompt(1, 20), says(&prompt(1, 20), 40));
    for at in 1..24 {
        // The request is aborted by its client, stops inside a draft, reaches its limit, or fails.
        follow(greedy(&start, 60), at);
        follow(Request { stop_token_ids: vec![said[at]], ..greedy(&start, 60) }, 40);
        follow(greedy(&start, at as u32), 40);
        follow(greedy(&[&start[..at.min(19)], &[FAILS]].concat(), 9), 3);
    }
}

// vllm-mlx scheduler.py:780: speculation needed what the installed library did not have, and was silently off.
#[test]
fn v_u_drafts_are_accepted_or_the_start_refuses() {
    own_process!();
    let options = Options { enable_mtp: true, ..exact() };
    for model in ["mtp-always", "mtp-half"] {
        let engine = engine(model, &options);
        let drafts = ask(&engine, greedy(&prompt(1, 20), 100)).drafts;
        assert!(drafts.1 > 0, "{model}: the request is told {drafts:?}");
        quiet(&engine);
        assert_eq!(engine.metrics().accepted_tokens.get(), u64::from(drafts.1), "{model}: and so is the operator");
    }
    let headless = Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let error = Blueprint::new(&headless, &options).map(drop).unwrap_err().to_string();
    assert!(error.contains("--enable-mtp"), "{error}");
}

// vllm-mlx scheduler.py:894: whenever a request joined or left, the others' drafts were dropped and a cached token fed again.
#[test]
fn v_w_joins_and_leaves_change_no_draft() {
    own_process!();
    for drafts in 1..=4 {
        let (bench, _) = recall_bench(Shape { context: 512, ..Shape::hybrid(drafts, 180, 8) });
        let (engine, mut hand) = by_hand(bench);
        let start = prompt(1, 20);
        let reader = engine.submit(greedy(&start, 200)).unwrap();
        let mut company = VecDeque::new();
        let (mut joined, mut left) = (0, 0);
        let answers = drive(&mut hand, vec![reader], |round| {
            if round % 2 == 0 && company.len() < 6 {
                joined += 1;
                company.push_back(engine.submit(greedy(&prompt(50 + joined, 6), 30)).unwrap());
            }
            if round % 3 == 0 {
                left += usize::from(company.pop_front().is_some());
            }
        });
        assert_eq!(answers[0].ids, says(&start, 200), "{drafts} drafts");
        assert_eq!(answers[0].drafts, expected_drafts(&start, 200, drafts, 180), "as if nobody had been there");
        assert!(joined > 10 && left > 5);
    }
}

// vllm-mlx scheduler.py:1132: an exception between checking and accepting drafts left the cache two tokens ahead.
#[test]
fn v_x_a_panic_between_check_and_acceptance_rolls_back() {
    own_process!();
    let prompts = [prompt(1, 20), prompt(2, 33), prompt(3, 7)];
    let (mut failures, mut costless) = (0, 0);
    for nth in 1.. {
        let (bench, _) = recall_bench(Shape::hybrid(2, 180, 8));
        let (engine, mut hand) = by_hand(bench);
        let submit = |prompt: &Vec<u32>| engine.submit(greedy(prompt, 12)).unwrap();
        let readers = prompts.iter().map(submit).collect();
        faults::arm_site(Site::Sampler, nth);
        let answers = drive(&mut hand, readers, |_| {});
        if faults::disarm_site().hit == 0 {
            break;
        }
        let mut failed = 0;
        for (prompt, answer) in prompts.iter().zip(&answers) {
            let said = says(prompt, 12);
            failed += usize::from(answer.error.is_some());
            assert!(said.starts_with(&answer.ids) && (answer.error.is_some() || answer.ids == said), "panic {nth}");
        }
        // A panic while drafting costs the drafts; a panic while sampling costs the request.
        assert!(failed <= 1, "panic {nth}");
        (failures, costless) = (failures + failed, costless + 1 - failed);
        // A later request with the same prompt is not affected.
        let readers = prompts.iter().map(submit).collect();
        for (prompt, answer) in prompts.iter().zip(drive(&mut hand, readers, |_| {})) {
            assert_eq!((answer.ids, answer.error), (says(prompt, 12), None), "after panic {nth}");
        }
        hand.run_iteration();
        full_pools(&engine);
    }
    assert!(failures >= 30 && costless >= 20, "{failures} {costless}");
}

// vllm-mlx mllm_batch_generator.py:2596: accepted and drafted lengths were appended to lists at every step, for ever.
#[test]
fn v_y_checks_of_drafts_leave_no_list() {
    own_process!();
    checks_leave_nothing(60_000);
}

#[test]
#[ignore = "soak"]
fn v_y_checks_of_330_000_drafts_leave_no_list() {
    own_process!();
    checks_leave_nothing(330_000);
}

fn checks_leave_nothing(drafts: u64) {
    let (engine, _) = recall_engine(Shape::hybrid(1, 128, 8));
    let wave = || {
        let readers: Vec<_> = (0..8).map(|i| engine.submit(greedy(&prompt(i, 4), 200)).unwrap()).collect();
        readers.into_iter().for_each(|reader| drop(collect(reader)));
        quiet(&engine);
    };
    (0..3).for_each(|_| wave());
    let before = heap::in_use();
    while engine.metrics().drafted_tokens.get() < drafts {
        wave();
    }
    let grown = heap::in_use() as i64 - before as i64;
    assert!(grown < 4096, "{grown} bytes of heap are left of {drafts} checks");
}

// sglang 11970, 7130, 6888: pages leaked on unusual ways out, and the self-check that noticed ended the server.
#[test]
fn t_39_unusual_ends_leak_nothing_and_a_failed_check_ends_no_request() {
    own_process!();
    let tight = Shape { pages: 10, context: 128, ..Shape::hybrid(2, 180, 6) };
    let (engine, _) = recall_engine(tight);
    (0..6).for_each(|seed| crowd(&engine, seed, 60, |prompt, n| Some(says(prompt, n))));
    let metrics = engine.metrics();
    assert!(metrics.preemptions.get() > 0 && metrics.aborted.get() > 0, "nothing unusual happened");

    let (bench, _) = recall_bench(tight);
    let (engine, mut hand) = by_hand(bench);
    let prompts = [prompt(1, 40), prompt(2, 40), prompt(3, 40)];
    let readers = prompts.iter().map(|prompt| engine.submit(greedy(prompt, 40)).unwrap()).collect();
    faults::arm_site(Site::Scheduler, 9);
    let answers = drive(&mut hand, readers, |_| {});
    assert_eq!((faults::disarm_site().hit, engine.metrics().recoveries.get()), (1, 1), "it is counted");
    for (prompt, answer) in prompts.iter().zip(answers) {
        assert_eq!((answer.ids, answer.error), (says(prompt, 40), None));
    }
    hand.run_iteration();
    full_pools(&engine);
}

// sglang 14972: a request retracted while the next step was already under way was accounted twice.
#[test]
fn t_40_preemption_at_any_step_counts_nothing_twice() {
    own_process!();
    let short = MemoryReading { full_avg10: 45.0, available: u64::MAX, ..MemoryReading::default() };
    let calm = MemoryReading { available: u64::MAX, ..MemoryReading::default() };
    for offset in 0..12 {
        for width in [1, 3] {
            let (bench, _) = recall_bench(Shape::hybrid(width - 1, 180, 6));
            let (engine, mut hand) = by_hand(bench);
            let prompts: Vec<_> = (0..3).map(|i| prompt(i, 30 + 5 * i as usize)).collect();
            let readers = prompts.iter().map(|prompt| engine.submit(greedy(prompt, 60)).unwrap()).collect();
            let answers = drive(&mut hand, readers, |round| {
                let status = engine.status();
                let own = status.slots_used.load(Acquire) - status.slots_kept.load(Acquire);
                assert_eq!(own, status.running.load(Acquire) * width as u64, "slots of those who run");
                if round >= offset {
                    // Readings raise the degradation to the level that preempts; then it falls by one and rises again every seven rounds.
                    let up = round - offset < 5 || (round - offset) % 7 == 4;
                    take_reading(&engine, if up { short } else { calm });
                }
            });
            for (prompt, answer) in prompts.iter().zip(answers) {
                assert_eq!((answer.ids, answer.error), (says(prompt, 60), None), "preempted from step {offset} on");
            }
            assert!(engine.metrics().preemptions.get() >= 2, "{}", engine.metrics().preemptions.get());
            hand.run_iteration();
            full_pools(&engine);
        }
    }
}

// llama.cpp 23635: the pool grew as long as drafts were made.
#[test]
fn t_51_ten_thousand_drafts_leave_the_device_as_it_was() {
    own_process!();
    let engine = engine("mtp-half", &Options { prefix_cache: false, ..with_drafts(4) });
    let before = device(&engine);
    while engine.metrics().drafted_tokens.get() < 10_000 {
        let readers: Vec<_> = (0..8).map(|i| engine.submit(greedy(&prompt(i, 20), 200)).unwrap()).collect();
        readers.into_iter().for_each(|reader| assert_eq!(collect(reader).error, None));
    }
    quiet(&engine);
    let status = engine.status();
    assert_eq!(device(&engine), before);
    assert_eq!((status.pages_used.load(Acquire), status.slots_used.load(Acquire)), (0, 0));
}
