//! Resident memory after the work: all of it in pinned mode, no more than at the start in elastic mode. Also a real engine's emergency
//! reserve, which is given up for a refused allocation and restored.

use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use plimsoll_engine::governor::{DegradationLevel, MemoryReading};
use plimsoll_engine::testing::take_reading;
use plimsoll_engine::{EngineHandle, Options, Refusal};
use plimsoll_memory::emergency_reserve::BLOCKS;
use plimsoll_memory::host::{OwnProcess, Root};
use plimsoll_memory::{Component, faults, heap};

use super::{hide_injected_panics, whole_reserve};
use crate::common::recall::{Shape, mix, recall_engine};
use crate::common::{collect, engine, exact, greedy, quiet};
use crate::process::own_process;

const MIB: u64 = 1 << 20;

fn resident() -> u64 {
    heap::trim();
    OwnProcess::read(&Root::system()).leak_gauge()
}

/// A pool of many pages, which cached prefixes come to fill.
fn options(elastic: bool) -> Options {
    Options { elastic, max_total_token_num: Some(48 << 10), ..exact() }
}

/// Fills the pool with prompts that all differ.
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
#[ignore = "soak"]
fn elastic_memory_is_back_ten_seconds_after_the_last_answer() {
    own_process!();
    hide_injected_panics();
    let engine = engine("llama", &options(true));
    let pool = engine.ledger().row(Component::KvPages).planned;
    let told = || {
        let rows = engine.report().components.into_iter();
        rows.filter(|row| row.component == "kv_pages").map(|row| row.committed_bytes).sum::<u64>()
    };
    let (baseline, before) = (resident(), told());
    fill(&engine);
    let (full, at_height) = (resident(), told());
    assert!(
        before <= 2 * MIB && (pool / 2..=pool).contains(&at_height),
        "{before}, {at_height} of {pool} in the ledger"
    );
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
    assert!(told() <= 2 * MIB, "{} are in the ledger and were given back", told());
    assert_eq!(engine.status().pages_used.load(Acquire), 0);
    assert!(engine.metrics().trims.get() > 0);
    // Released memory is available again when it is needed.
    fill(&engine);
    end(engine);
}

#[test]
#[ignore = "soak"]
fn pinned_memory_is_constant() {
    own_process!();
    hide_injected_panics();
    let engine = engine("llama", &options(false));
    // The first answers touch the memory that the heap keeps for later ones.
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

/// A real engine with a pool that is too small for its crowd.
fn crowded() -> EngineHandle {
    engine("llama", &Options { max_total_token_num: Some(160), ..exact() })
}

/// Runs six clients at once. A client that is refused because a reserve block is missing tries again.
fn crowd(engine: &EngineHandle) -> Vec<(Vec<u32>, String, Option<String>)> {
    let submit = |i: u64| {
        let mut request = greedy(&(0..40).map(|j| (mix(i * 100 + j) % 256) as u32).collect::<Vec<_>>(), 24);
        (request.logprobs, request.stop) = (Some(2), vec!["never said at all".into()]);
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match engine.submit(request.clone()) {
                Ok(reader) => return reader,
                Err(Refusal::Unavailable { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(refusal) => panic!("{refusal}"),
            }
        }
    };
    let readers: Vec<_> = (0..6).map(submit).collect();
    readers.into_iter().map(collect).map(|a| (a.ids, a.text, a.error)).collect()
}

/// Refuses `run` heap calls in a row, beginning at about ten points of a crowd's run. No answer changes.
fn refuse_runs(run: u64) {
    let engine = crowded();
    faults::arm_process(0);
    let calm = crowd(&engine);
    let calls = faults::disarm_process().seen;
    quiet(&engine);
    let (mut swept, mut refused) = (0, 0);
    for nth in (1..=calls).step_by((calls as usize / 10).max(1)) {
        faults::arm_process_run(nth, run);
        let answers = crowd(&engine);
        let hit = faults::disarm_process().hit;
        if hit < run {
            // The same work makes a few calls fewer when the threads run in another order.
            refused += hit;
            continue;
        }
        swept += 1;
        refused += hit;
        assert_eq!(answers, calm, "{run} refused from call {nth} of {calls} on");
        whole_reserve();
        quiet(&engine);
    }
    println!("{run} heap calls in a row were refused from {swept} of {calls} places on");
    assert!(swept >= 5, "{swept}");
    whole_reserve();
    let counted = || engine.metrics().reserve_releases.get();
    let deadline = Instant::now() + Duration::from_secs(5);
    while counted() < refused {
        assert!(Instant::now() < deadline, "{} of {refused} refusals were counted", counted());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(counted(), refused);
    assert_eq!(
        engine.ledger().row(Component::EmergencyReserve).committed,
        engine.ledger().row(Component::EmergencyReserve).planned
    );
    end(engine);
}

#[test]
fn a_real_engine_pays_with_its_reserve_and_gets_it_back() {
    own_process!();
    hide_injected_panics();
    refuse_runs(1);
}

#[test]
fn as_many_refusals_in_a_row_as_the_reserve_has_blocks_are_survived() {
    own_process!();
    hide_injected_panics();
    refuse_runs(BLOCKS as u64);
}

#[test]
fn nothing_is_admitted_until_the_reserve_is_whole() {
    own_process!();
    hide_injected_panics();
    let engine = crowded();
    let calm = crowd(&engine);
    let refused = (0..50).any(|_| {
        drop(heap::give_up_reserve());
        // The watching thread may have restored the reserve in between.
        let refused = match engine.submit(greedy(&[1, 2, 3], 4)) {
            Err(Refusal::Unavailable { message, retry_after_s: 1.. }) => message.contains("reserve"),
            Ok(reader) => {
                drop(collect(reader));
                false
            }
            Err(refusal) => panic!("{refusal}"),
        };
        whole_reserve();
        refused
    });
    assert!(refused, "a request was let in while the emergency reserve was gone");
    assert_eq!(crowd(&engine), calm);
    // A refusal wakes the thread that restores the block, long before its next reading is due.
    let mut fastest = Duration::MAX;
    for _ in 0..10 {
        assert!(Vec::<u8>::new().try_reserve_exact(isize::MAX as usize).is_err());
        let begun = Instant::now();
        whole_reserve();
        fastest = fastest.min(begun.elapsed());
    }
    println!("a slice is back after {fastest:.1?}");
    assert!(fastest < Duration::from_millis(200), "{fastest:?}");
    end(engine);
}

#[test]
#[ignore = "soak"]
fn what_an_engine_gave_up_its_calm_neighbour_does_not_take_back() {
    own_process!();
    hide_injected_panics();
    let calm = crowded();
    let (squeezed, _) = recall_engine(Shape::default());
    let room =
        MemoryReading { available: 1 << 40, above_plan: 1 << 30, stall_room: 1 << 40, ..MemoryReading::default() };
    let show = |reading, level| {
        let deadline = Instant::now() + Duration::from_secs(30);
        while squeezed.level() != level {
            assert!(Instant::now() < deadline, "it stands on {:?}", squeezed.level());
            take_reading(&squeezed, reading);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    show(MemoryReading { available: 0, ..room }, DegradationLevel::Fail);
    // The engine sets the level before it acts.
    let deadline = Instant::now() + Duration::from_secs(10);
    while heap::reserve_blocks_missing() < BLOCKS {
        assert!(Instant::now() < deadline, "{} blocks were given up", heap::reserve_blocks_missing());
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!((heap::reserve_blocks_missing(), calm.level()), (BLOCKS, DegradationLevel::Calm));
    show(room, DegradationLevel::Preempt);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(heap::reserve_blocks_missing(), BLOCKS, "it is given back one level below");
    show(room, DegradationLevel::StopAdmitting);
    whole_reserve();
    // When the engine ends, the emergency reserve is restored.
    show(MemoryReading { available: 0, ..room }, DegradationLevel::Fail);
    drop(squeezed);
    whole_reserve();
    end(calm);
}
