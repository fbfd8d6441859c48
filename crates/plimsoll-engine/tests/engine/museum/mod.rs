//! The regression museum: failures of other engines, as tests that Plimsoll does not fail in the same way. Each row of the catalogue has
//! one test, named by the row's id. The list is `tests/museum/README.md` at the top of the repository.
//!
//! The counted heap, mappings and injected faults belong to the process, so every test runs in a separate process.

mod drafts;
mod hybrid;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use plimsoll_engine::{EngineHandle, Reader, Request};
use plimsoll_memory::{Component, faults, heap};

use crate::common::recall::{mix, prompt};
use crate::common::{collect, full_pools, greedy, quiet, settle};

/// Waits until dropped engines have released all regions.
fn gone() {
    let deadline = Instant::now() + Duration::from_secs(20);
    while faults::region_bytes() > 0 {
        assert!(Instant::now() < deadline, "{} bytes of regions are left", faults::region_bytes());
        std::thread::sleep(Duration::from_millis(2));
    }
    settle();
}

/// Runs requests of all lengths with common beginnings. A third are aborted early or late; the others must generate the tokens of
/// `expected`.
fn crowd(engine: &EngineHandle, seed: u64, count: u64, expected: impl Fn(&[u32], usize) -> Option<Vec<u32>>) {
    let dice = |i: u64, salt: u64, n: u64| mix(seed * 1_000_003 + i * 101 + salt) % n;
    let mut open: VecDeque<(Request, Reader)> = VecDeque::new();
    for i in 0..count {
        let tokens = prompt(dice(i, 1, 4), 1 + dice(i, 2, 70) as usize);
        let request = Request { speculate: dice(i, 3, 5) > 0, ..greedy(&tokens, 1 + dice(i, 4, 50) as u32) };
        open.push_back((request.clone(), engine.submit(request).unwrap()));
        if dice(i, 5, 3) == 0 {
            open.remove(dice(i, 6, open.len() as u64) as usize);
        }
        if open.len() > 24 || i + 1 == count {
            for (request, reader) in open.drain(..) {
                let answer = collect(reader);
                assert_eq!((&answer.error, answer.ids.len()), (&None, request.max_tokens as usize));
                let known = expected(&request.prompt, answer.ids.len());
                known.into_iter().for_each(|ids| assert_eq!(answer.ids, ids, "{request:?}"));
            }
        }
    }
    quiet(engine);
    full_pools(engine);
}

/// Returns the mapped bytes and the ledger's bytes of each pool: they never change while an engine serves.
fn device(engine: &EngineHandle) -> (u64, Vec<u64>) {
    let pools = [Component::KvPages, Component::StateSlots, Component::StepWorkspace, Component::Weights];
    assert_eq!(engine.ledger().allocations().1, 0, "device allocations after ready");
    (faults::region_bytes(), pools.iter().map(|pool| engine.ledger().row(*pool).committed).collect())
}

/// Returns how far the heap's peak during `work` is above its size before.
fn heap_rise(work: impl FnOnce()) -> u64 {
    heap::restart_peak();
    let before = heap::in_use();
    work();
    heap::peak() - before
}
