//! The governor on a real engine thread, with simulated memory readings. Each level has its documented effect and changes no answer. When
//! memory is available again, everything is as before.

use std::time::{Duration, Instant};

use plimsoll_engine::governor::{DegradationLevel, MemoryReading};
use plimsoll_engine::testing::take_reading;
use plimsoll_engine::{EngineHandle, Refusal};

use crate::common::recall::{Shape, recall_engine, says};
use crate::common::{ask, collect, greedy, quiet};
use crate::process::own_process;

const CALM: MemoryReading = MemoryReading {
    available: 1 << 40,
    untouched: 0,
    above_plan: 1 << 30,
    stall_room: 1 << 40,
    some_avg10: 0.0,
    full_avg10: 0.0,
};
const DIRE: MemoryReading = MemoryReading { available: 0, ..CALM };

/// Shows the engine a reading and waits until it has acted. The engine sets the level before it acts, so the function waits for two rounds.
fn show(engine: &EngineHandle, reading: MemoryReading) -> DegradationLevel {
    let steps = || engine.status().iterations.load(std::sync::atomic::Ordering::Acquire);
    take_reading(engine, reading);
    let before = steps();
    let deadline = Instant::now() + Duration::from_secs(10);
    while steps() < before + 2 {
        assert!(Instant::now() < deadline, "the engine does not look");
        std::thread::sleep(Duration::from_millis(1));
    }
    engine.level()
}

fn slow() -> Shape {
    Shape { step_time: Duration::from_millis(2), ..Shape::default() }
}

#[test]
#[ignore = "soak"]
fn cold_prefixes_go_first_and_new_requests_are_told_503() {
    own_process!();
    let (engine, _) = recall_engine(slow());
    let prompt: Vec<u32> = (0..64).collect();
    assert_eq!(ask(&engine, greedy(&prompt, 8)).ids, says(&prompt, 8));
    quiet(&engine);
    let cached = || engine.status().pages_cached.load(std::sync::atomic::Ordering::Acquire);
    assert!(cached() > 0, "the prompt was cached");
    assert_eq!(show(&engine, DIRE), DegradationLevel::EvictPrefix);
    assert_eq!(cached(), 0);
    assert_eq!(show(&engine, DIRE), DegradationLevel::SmallChunks);
    assert_eq!(ask(&engine, greedy(&prompt, 8)).ids, says(&prompt, 8), "chunks of one page");
    assert_eq!(show(&engine, DIRE), DegradationLevel::SpeculationOff);
    assert_eq!(show(&engine, DIRE), DegradationLevel::StopAdmitting);
    let refusal = engine.submit(greedy(&prompt, 8)).expect_err("memory is short");
    assert!(matches!(refusal, Refusal::Unavailable { retry_after_s: 1.., .. }), "{refusal:?}");
    assert!((0..40).any(|_| show(&engine, CALM) == DegradationLevel::Calm), "it recovers");
    assert_eq!(ask(&engine, greedy(&prompt, 8)).ids, says(&prompt, 8));
    let entered: Vec<u64> = engine.metrics().levels.iter().map(|level| level.get()).collect();
    assert_eq!(entered, [1, 1, 1, 1, 0, 0]);
    assert_eq!(engine.metrics().refused_memory.get(), 1);
    quiet(&engine);
}

#[test]
fn the_newest_give_way_and_the_oldest_finishes() {
    // At the last level the engine gives up the emergency reserve. It belongs to the process, so other engines would refuse requests.
    own_process!();
    let (engine, _) = recall_engine(slow());
    let prompts: Vec<Vec<u32>> = (0..6u32).map(|i| (i * 7..i * 7 + 20).collect()).collect();
    let readers: Vec<_> = prompts.iter().map(|prompt| engine.submit(greedy(prompt, 200)).unwrap()).collect();
    let levels: Vec<DegradationLevel> = (0..8).map(|_| show(&engine, DIRE)).collect();
    assert_eq!(
        levels[4..],
        [DegradationLevel::Preempt, DegradationLevel::Fail, DegradationLevel::Fail, DegradationLevel::Fail]
    );
    assert!(engine.metrics().preemptions.get() > 0);
    while show(&engine, CALM) != DegradationLevel::Calm {}
    let answers: Vec<_> = readers.into_iter().map(collect).collect();
    let failed: Vec<bool> = answers.iter().map(|answer| answer.error.is_some()).collect();
    assert!(!failed[0] && failed[5], "{failed:?}");
    assert!(failed.is_sorted(), "the newest first: {failed:?}");
    for (answer, prompt) in answers.iter().zip(&prompts).filter(|(answer, _)| answer.error.is_none()) {
        assert_eq!(answer.ids, says(prompt, 200), "what was preempted says the same in the end");
    }
    quiet(&engine);
}
