//! Thousands of steps with drafts and recurrent state, verified and optimistic. Memory stays where it was after the first few hundred, no
//! checkpoint is made, and every pool is full at the end. The test measures the whole process, so it runs alone.

use std::sync::atomic::Ordering::Acquire;

use crate::common::recall::mix;
use crate::common::{ask, collect, engine, exact, full_pools, greedy, ids, quiet, reference, settle};
use crate::process::own_process;
use plimsoll_engine::{EngineHandle, Options};
use plimsoll_memory::heap;
use plimsoll_memory::host::{OwnProcess, Root};

fn options(optimistic: bool) -> Options {
    Options {
        enable_mtp: true,
        mtp_num_draft_tokens: 2,
        mtp_optimistic: optimistic,
        mtp_adaptive: false,
        threads: Some(1),
        ..exact()
    }
}

fn prompt(seed: u64) -> Vec<u32> {
    (0..4 + mix(seed) % 40).map(|i| (mix(seed * 100 + i) % 380) as u32).collect()
}

fn steps(engine: &EngineHandle) -> u64 {
    engine.status().steps.load(Acquire)
}

/// Requests of all lengths, some aborted, until `until` steps were taken.
fn churn(engine: &EngineHandle, seed: &mut u64, until: u64) {
    let mut open = std::collections::VecDeque::new();
    while steps(engine) < until {
        *seed += 1;
        let request = greedy(&prompt(*seed), 20 + (mix(*seed) % 60) as u32);
        open.push_back(engine.submit(request).unwrap());
        if mix(*seed + 7).is_multiple_of(5) {
            open.pop_back();
        }
        if open.len() > 6 {
            let answer = collect(open.pop_front().unwrap());
            assert_eq!(answer.error, None);
        }
    }
    open.into_iter().for_each(|reader| drop(collect(reader)));
    quiet(engine);
}

fn resident() -> u64 {
    heap::trim();
    OwnProcess::read(&Root::system()).leak_gauge()
}

/// One test, so that nothing else moves the process's memory.
#[test]
fn memory_is_flat_over_thousands_of_steps() {
    own_process!();
    for optimistic in [false, true] {
        settle();
        let engine = engine("mtp-half", &options(optimistic));
        let mut seed = 0;
        churn(&engine, &mut seed, 256);
        let (in_use, process) = (heap::in_use(), resident());
        let mut looks = Vec::new();
        for round in 1..=8 {
            churn(&engine, &mut seed, 256 + round * 512);
            full_pools(&engine);
            looks.push((heap::in_use() as i64 - in_use as i64, resident() as i64 - process as i64));
        }
        assert!(steps(&engine) > 4096);
        // The heap holds as many bytes as before, or fewer: the first reading includes memory freed since. The rest of the process's memory
        // is the allocator's, in pages.
        let (heap_last, process_last) = looks[7];
        assert!(heap_last < 4096 && (heap_last - looks[3].0).abs() < 4096, "optimistic {optimistic}: {looks:?}");
        assert!(process_last - looks[0].1 <= 256 << 10, "optimistic {optimistic}: {looks:?}");
        let metrics = engine.metrics();
        assert!(metrics.accepted_tokens.get() > 1000);
        if optimistic {
            assert_eq!(metrics.drafted_tokens.get(), metrics.accepted_tokens.get());
        }

        // A long answer: thousands of tokens and no checkpoint.
        let long = Options { max_req_total_len: None, ..options(optimistic) };
        drop(engine);
        let engine = crate::common::engine("mtp-half", &long);
        let context = engine.limits().max_req_total_len;
        let made = || engine.metrics().checkpoints_made.get();
        assert_eq!(ask(&engine, greedy(&[5, 6, 7], context - 3)).ids.len() as u32, context - 3);
        assert_eq!(made(), 0, "decoding keeps no state aside");

        // Twenty in turn.
        let next = ids(&reference("mtp-half")["next"]);
        let mut before = None;
        for i in 0..24u64 {
            let answer = ask(&engine, greedy(&prompt(i), 64));
            assert_eq!(answer.ids.len(), 64);
            assert!(optimistic || answer.ids[1] == next[answer.ids[0] as usize]);
            quiet(&engine);
            if i == 3 {
                before = Some(resident());
            }
        }
        let grown = resident() as i64 - before.unwrap() as i64;
        assert!(grown < 1 << 20, "twenty requests left {grown} bytes behind");
    }
}
