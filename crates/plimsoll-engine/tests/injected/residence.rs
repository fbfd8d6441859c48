//! What stays resident when the work is done: everything in pinned mode, nothing more than at the start in elastic mode. And a
//! real engine's canary, which is given up for a refused allocation and comes back.

use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use plimsoll_engine::{EngineHandle, Options};
use plimsoll_memory::host::{OwnProcess, Root};
use plimsoll_memory::{Component, faults, heap};

use crate::alone;
use crate::common::recall::mix;
use crate::common::{collect, engine, exact, greedy, quiet};

const MIB: u64 = 1 << 20;

fn resident() -> u64 {
    heap::trim();
    OwnProcess::read(&Root::system()).leak_gauge()
}

/// A pool of many pages, which cached prefixes come to fill.
fn options(elastic: bool) -> Options {
    Options { elastic, max_total_token_num: Some(48 << 10), ..exact() }
}

/// Fills the pool with prompts of which no two are alike.
fn fill(engine: &EngineHandle) {
    let len = engine.limits().max_req_total_len as usize - 4;
    let rounds = engine.limits().max_total_token_num as usize / len;
    for batch in 0..rounds.div_ceil(8) as u64 {
        let prompt = |i: u64| (0..len as u64).map(|j| (mix((batch * 8 + i) * 10_000 + j) % 256) as u32).collect();
        let readers: Vec<_> =
            (0..8).map(|i| engine.submit(greedy(&Vec::from_iter::<Vec<u32>>(prompt(i)), 4)).unwrap()).collect();
        assert!(readers.into_iter().all(|reader| collect(reader).error.is_none()));
    }
    quiet(engine);
}

fn end(engine: EngineHandle) {
    engine.stop();
    while !engine.stopped() || heap::armed() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn elastic_memory_is_back_ten_seconds_after_the_last_answer() {
    let _alone = alone();
    let engine = engine("llama", &options(true));
    let pool = engine.ledger().row(Component::KvPages).committed;
    let baseline = resident();
    fill(&engine);
    let full = resident();
    assert!(pool > 20 * MIB && full > baseline + pool / 2, "{full} bytes from {baseline} with a pool of {pool}");
    let done = Instant::now();
    let slack = 2 * MIB;
    while resident() > baseline + slack {
        let (now, waited) = (resident(), done.elapsed());
        assert!(waited < Duration::from_secs(10), "{now} bytes after {waited:?}, {baseline} before, {full} at most");
        std::thread::sleep(Duration::from_millis(100));
    }
    let (after, waited) = (resident(), done.elapsed());
    println!("elastic: {baseline} bytes before, {full} at the height, {after} {waited:.1?} after the last answer");
    assert_eq!(engine.status().pages_used.load(Acquire), 0);
    assert!(engine.metrics().trims.get() > 0);
    // What was given back is there again when it is needed.
    fill(&engine);
    end(engine);
}

#[test]
fn pinned_memory_is_constant() {
    let _alone = alone();
    let engine = engine("llama", &options(false));
    // The first answers touch what the heap keeps for them.
    fill(&engine);
    let baseline = resident();
    for _ in 0..2 {
        fill(&engine);
        let now = resident();
        assert!(now.abs_diff(baseline) <= 2 * MIB, "{now} bytes, {baseline} before");
    }
    std::thread::sleep(Duration::from_secs(4));
    let idle = resident();
    assert!(idle.abs_diff(baseline) <= 2 * MIB, "{idle} bytes when idle, {baseline} before");
    println!("pinned: {baseline} bytes under load, {idle} idle");
    assert!(engine.status().pages_cached.load(Acquire) > 0, "cached prefixes stay");
    end(engine);
}

#[test]
fn a_real_engine_pays_with_its_canary_and_gets_it_back() {
    let _alone = alone();
    let engine = engine("llama", &Options { max_total_token_num: Some(160), ..exact() });
    let crowd = || {
        let request = |i: u64| {
            let mut request = greedy(&(0..40).map(|j| (mix(i * 100 + j) % 256) as u32).collect::<Vec<_>>(), 24);
            (request.logprobs, request.stop) = (Some(2), vec!["never said at all".into()]);
            request
        };
        let readers: Vec<_> = (0..6).map(|i| engine.submit(request(i)).unwrap()).collect();
        readers.into_iter().map(collect).map(|a| (a.ids, a.text, a.error)).collect::<Vec<_>>()
    };
    faults::arm_process(0);
    let calm = crowd();
    let calls = faults::disarm_process().seen;
    quiet(&engine);
    let mut swept = 0;
    for nth in (1..=calls).step_by((calls as usize / 10).max(1)) {
        faults::arm_process(nth);
        let answers = crowd();
        if faults::disarm_process().hit == 0 {
            // The same work makes a few calls fewer when the threads meet differently.
            continue;
        }
        swept += 1;
        assert_eq!(answers, calm, "call {nth} of {calls}");
        let deadline = Instant::now() + Duration::from_secs(10);
        while !heap::armed() {
            assert!(Instant::now() < deadline, "the canary does not come back");
            std::thread::sleep(Duration::from_millis(10));
        }
        quiet(&engine);
    }
    println!("{swept} of {calls} heap calls of a real engine and its clients were refused");
    assert!(swept >= 5, "{swept}");
    assert_eq!(engine.metrics().canaries.get(), swept);
    assert_eq!(engine.ledger().row(Component::Canary).committed, engine.ledger().row(Component::Canary).planned);
    end(engine);
}
