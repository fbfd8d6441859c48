//! Long prompts beside a stream are computed layer by layer, between the stream's steps. Both give the output that they give alone, even if
//! a request leaves, fails or is preempted in between. Nothing is left behind.

use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use plimsoll_engine::governor::MemoryReading;
use plimsoll_engine::testing::{by_hand, take_reading};
use plimsoll_engine::{EngineHandle, Reader};

use crate::common::media_encoder::{MediaEncoder, Mixed};
use crate::common::recall::{FAILS, NAN, PANICS, Seen, Shape, prompt, recall_bench, recall_engine, says};
use crate::common::{self, Answer, collect, drive, greedy, quiet};

/// Layers and steps take time, so that others run in between. After every step one layer is computed, whatever the clock says.
fn slow() -> Shape {
    Shape { rows: 64, context: 1024, pages: 200, step_time: Duration::from_millis(1), ..Shape::default() }
}

/// Returns a stream that has its first token.
fn stream(engine: &EngineHandle) -> Reader {
    let mut reader = engine.submit(greedy(&prompt(1, 20), 900)).unwrap();
    pollster::block_on(reader.next()).unwrap();
    reader
}

/// Submits a long prompt and waits until some of its layers have been computed.
fn under_way(engine: &EngineHandle, seen: &Seen, prompt: &[u32]) -> Reader {
    let before = seen.layers.load(Acquire);
    let reader = engine.submit(greedy(prompt, 5)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while seen.layers.load(Acquire) == before {
        assert!(Instant::now() < deadline, "no layer was computed");
        std::thread::sleep(Duration::from_micros(100));
    }
    reader
}

fn said(answer: &Answer, prompt: &[u32], tokens: usize) {
    assert_eq!((&answer.error, &answer.ids), (&None, &says(prompt, tokens)));
}

#[test]
fn a_long_prompt_beside_a_stream_goes_layer_by_layer() {
    let (engine, seen) = recall_engine(slow());
    let long = prompt(2, 640);
    said(&common::ask(&engine, greedy(&long, 1)), &long, 1);
    assert_eq!((seen.steps.load(Acquire), seen.layers.load(Acquire)), (10, 0), "nobody waits");
    let other = prompt(3, 640);
    let running = stream(&engine);
    let before = seen.steps.load(Acquire);
    said(&common::ask(&engine, greedy(&other, 1)), &other, 1);
    let (steps, layers) = (seen.steps.load(Acquire) - before, seen.layers.load(Acquire));
    let chunks = engine.metrics().layered_chunks.get();
    assert!(chunks >= 10 && layers == 4 * chunks, "{layers} layers of {chunks} chunks");
    assert!(steps - chunks >= layers - 1, "a step of the stream before every layer: {steps} and {layers}");
    drop(running);
    quiet(&engine);
    assert_eq!(engine.metrics().layered_dropped.get(), 0);
}

#[test]
fn a_prompt_that_leaves_between_two_layers_leaves_nothing_behind() {
    for state_slots in [0, 40] {
        let (engine, seen) = recall_engine(Shape { state_slots, ..slow() });
        let running = stream(&engine);
        for seed in 2..8 {
            drop(under_way(&engine, &seen, &prompt(seed, 700)));
            // Other requests take its pages.
            let short = prompt(100 + seed, 60);
            said(&common::ask(&engine, greedy(&short, 3)), &short, 3);
        }
        assert!(engine.metrics().layered_dropped.get() > 0, "none of six left between two layers");
        drop(running);
        quiet(&engine);
    }
}

#[test]
fn what_fails_between_steps_ends_alone() {
    for (fault, words) in [(FAILS, "the token that fails"), (PANICS, "was computed"), (NAN, "NaN")] {
        let (engine, _) = recall_engine(slow());
        let reader = engine.submit(greedy(&prompt(1, 20), 200)).unwrap();
        let mut bad = prompt(2, 700);
        bad[699] = fault;
        let failed = collect(engine.submit(greedy(&bad, 5)).unwrap());
        assert!(failed.error.is_some_and(|error| error.contains(words)), "token {fault}");
        said(&collect(reader), &prompt(1, 20), 200);
        let healed = prompt(2, 700);
        said(&common::ask(&engine, greedy(&healed, 5)), &healed, 5);
        quiet(&engine);
    }
}

/// A step fails while a chunk stands between two layers: the chunk is not affected.
#[test]
fn a_step_that_fails_does_not_touch_the_chunk_beside_it() {
    for state_slots in [0, 40] {
        let (engine, seen) = recall_engine(Shape { state_slots, ..slow() });
        let running = stream(&engine);
        let long = prompt(2, 900);
        let reader = under_way(&engine, &seen, &long);
        let mut bad = prompt(3, 30);
        bad[29] = FAILS;
        assert!(common::ask(&engine, greedy(&bad, 5)).error.is_some());
        said(&collect(reader), &long, 5);
        assert_eq!(engine.metrics().layered_dropped.get(), 0);
        drop(running);
        quiet(&engine);
    }
}

#[test]
fn a_prompt_that_gives_way_between_two_layers_begins_again() {
    let (bench, seen) = recall_bench(Shape { prefix_cache: false, ..slow() });
    let (engine, mut hand) = by_hand(bench);
    let prompts = [prompt(1, 20), prompt(2, 300)];
    let readers = prompts.iter().map(|prompt| engine.submit(greedy(prompt, 80)).unwrap()).collect();
    let calm =
        MemoryReading { available: 1 << 40, stall_room: 1 << 40, above_plan: 1 << 30, ..MemoryReading::default() };
    let stalls = MemoryReading { full_avg10: 45.0, stall_room: 0, ..calm };
    // Pressure so high that the newest request is preempted while a chunk of it is being computed.
    let answers = drive(&mut hand, readers, |round| {
        take_reading(&engine, if (4..10).contains(&round) { stalls } else { calm });
    });
    for (prompt, answer) in prompts.iter().zip(&answers) {
        said(answer, prompt, 80);
    }
    let metrics = engine.metrics();
    assert!(metrics.preemptions.get() > 0 && metrics.layered_dropped.get() > 0 && seen.layers.load(Acquire) > 4);
    quiet(&engine);
}

#[test]
fn drafts_and_states_go_on_beside_a_chunk() {
    for (drafts, optimistic) in [(0, false), (3, false), (3, true)] {
        let shape = Shape { rows: 64, context: 1024, pages: 300, step_time: Duration::from_millis(1), ..slow() };
        let hybrid = Shape::hybrid(drafts, 200, 12);
        let shape = Shape { state_slots: hybrid.state_slots, drafts, right: 200, ..shape };
        let shape = if optimistic { shape.optimistic() } else { shape };
        let (engine, seen) = recall_engine(shape);
        let prompts: Vec<_> = (0..3).map(|i| prompt(i, 20)).chain((3..6).map(|i| prompt(i, 500))).collect();
        let tokens = |prompt: &[u32]| if prompt.len() < 100 { 400 } else { 40 };
        let readers: Vec<_> =
            prompts.iter().map(|prompt| engine.submit(greedy(prompt, tokens(prompt) as u32)).unwrap()).collect();
        for (prompt, reader) in prompts.iter().zip(readers) {
            let answer = collect(reader);
            assert_eq!(answer.error, None);
            assert!(optimistic || answer.ids == says(prompt, tokens(prompt)), "{drafts} drafts");
        }
        assert!(seen.layers.load(Acquire) > 20);
        assert_eq!(drafts > 0, seen.draft_passes.load(Acquire) > 0);
        quiet(&engine);
    }
}

/// An encoder does not wait for a chunk.
#[test]
fn images_are_encoded_between_layers() {
    let (engine, seen) = recall_engine(Shape { encoder: Some(MediaEncoder::default()), ..slow() });
    let running = stream(&engine);
    let long = Mixed::new(&engine).text(&prompt(2, 900));
    let reader = under_way(&engine, &seen, &long.prompt);
    let make = |i: u64| Mixed::new(&engine).text(&prompt(10 + i, 9)).image(i, 3, 5).text(&prompt(20 + i, 5));
    let all: Vec<Mixed> = (0..4).map(make).collect();
    let readers: Vec<_> = all.iter().map(|mixed| engine.submit(mixed.request(12)).unwrap()).collect();
    for (mixed, reader) in all.iter().zip(readers) {
        let answer = collect(reader);
        assert_eq!((&answer.error, &answer.ids), (&None, &mixed.says(12)));
    }
    let answer = collect(reader);
    assert_eq!((&answer.error, &answer.ids), (&None, &long.says(5)));
    assert!(seen.batches_between.load(Acquire) > 0);
    drop((running, all, long));
    quiet(&engine);
}
