//! Images and videos on the real engine thread over the remembering runner with a toy encoder. Every answer is known beforehand. A wrong
//! row, a wrong place, or another request's image or outputs change it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use plimsoll_engine::governor::MemoryReading;
use plimsoll_engine::testing::{by_hand, take_reading};
use plimsoll_engine::{EngineHandle, Refusal, Request, RequestPhase};
use plimsoll_media::{ContentKey, Modality};

use crate::common::media_encoder::{FAILS, MediaEncoder, Mixed, PANICS};
use crate::common::recall::{Shape, mix, prompt, recall_bench, recall_engine};
use crate::common::{self, Answer, collect, drive, quiet};

/// A model with an encoder.
fn seeing() -> Shape {
    Shape { encoder: Some(MediaEncoder::default()), ..Shape::default() }
}

/// At rest: no request holds encoder outputs or host bytes for media.
fn all_back(engine: &EngineHandle) {
    quiet(engine);
    let spec = engine.media().unwrap();
    let stats = spec.outputs.stats();
    assert_eq!(stats.pages_free + stats.pages_idle, stats.pages, "outputs are held: {stats:?}");
    assert_eq!(spec.staging.used(), 0, "host bytes are held");
}

fn right(mixed: &Mixed, answer: &Answer) {
    assert_eq!((&answer.error, &answer.ids), (&None, &mixed.says(answer.ids.len())), "{:?}", mixed.prompt);
    assert!(!answer.ids.is_empty());
}

#[test]
fn a_image_is_seen_where_it_stands() {
    let (engine, seen) = recall_engine(seeing());
    let mixed = Mixed::new(&engine).text(&prompt(1, 7)).image(1, 3, 5).text(&prompt(2, 4)).image(2, 1, 1).text(&[9]);
    let answer = common::ask(&engine, mixed.request(12));
    right(&mixed, &answer);
    let other = Mixed::new(&engine).text(&prompt(1, 7)).image(3, 3, 5).text(&prompt(2, 4)).image(2, 1, 1).text(&[9]);
    assert_eq!(other.prompt, mixed.prompt);
    let answer = common::ask(&engine, other.request(12));
    right(&other, &answer);
    assert_ne!(other.says(12), mixed.says(12), "the same placeholders, another picture, another answer");
    // Three images are encoded: the one with one token was in the cache.
    assert_eq!(seen.images.load(Relaxed), 3);
    assert_eq!((engine.metrics().encoded_media.get(), engine.metrics().encoder_hits.get()), (3, 1));
    drop((mixed, other));
    all_back(&engine);
}

#[test]
fn groups_of_frames_stand_apart_or_together() {
    for frames_apart in [true, false] {
        let encoder = MediaEncoder { frames_apart, ..MediaEncoder::default() };
        let (engine, _) = recall_engine(Shape { encoder: Some(encoder), rows: 7, ..seeing() });
        let mixed = Mixed::new(&engine).text(&prompt(1, 3)).video(5, 5, 2, 3).text(&[8, 9]).image(6, 2, 2).text(&[7]);
        right(&mixed, &common::ask(&engine, mixed.request(9)));
    }
}

#[test]
fn i9_chunks_neighbours_and_prefixes_change_nothing() {
    for (rows, prefix_cache, state_slots) in [(3, false, 0), (5, true, 0), (16, true, 0), (64, true, 0), (16, true, 40)]
    {
        let shape = Shape { rows, logit_rows: 3, running: 3, prefix_cache, state_slots, ..seeing() };
        let (engine, seen) = recall_engine(Shape { step_time: Duration::from_micros(200), ..shape });
        let shared = prompt(4, 20);
        let all: Vec<Mixed> = (0..12)
            .map(|i| {
                Mixed::new(&engine).text(&shared).image(i % 3, 4, 5).text(&prompt(i, 5)).image(50 + i, 2, 2).text(&[3])
            })
            .collect();
        let plain: Vec<_> = (0..6).map(|i| prompt(70 + i, 30)).collect();
        let readers: Vec<_> = all.iter().map(|mixed| engine.submit(mixed.request(15)).unwrap()).collect();
        let text: Vec<_> = plain.iter().map(|p| engine.submit(common::greedy(p, 20)).unwrap()).collect();
        for (mixed, reader) in all.iter().zip(readers) {
            right(mixed, &collect(reader));
        }
        for (prompt, reader) in plain.iter().zip(text) {
            let answer = collect(reader);
            let mixed = Mixed::new(&engine).text(prompt);
            assert_eq!((answer.error, answer.ids), (None, mixed.says(20)));
        }
        // The same request again: the prefix is cached, images included.
        let again = common::ask(&engine, all[0].request(15));
        right(&all[0], &again);
        assert_eq!(prefix_cache, again.cached_tokens >= 40, "{} tokens of the prefix", again.cached_tokens);
        assert!(seen.media_rows.load(Relaxed) > 0);
        drop(all);
        all_back(&engine);
    }
}

#[test]
fn pages_are_shared_by_content_and_salt_alone() {
    let (engine, _) = recall_engine(seeing());
    let make = |seed| Mixed::new(&engine).text(&prompt(1, 20)).image(seed, 4, 5).text(&prompt(2, 30));
    let (mine, theirs) = (make(1), make(2));
    let cached = |mixed: &Mixed, salt: u64| {
        let answer = common::ask(&engine, Request { cache_salt: salt, ..mixed.request(4) });
        right(mixed, &answer);
        answer.cached_tokens
    };
    assert_eq!(cached(&mine, 0), 0);
    // The common prefix ends with the page in which the image begins.
    assert_eq!(cached(&theirs, 0), 16);
    assert_eq!((cached(&mine, 0), cached(&theirs, 0)), (64, 64));
    // Another salt shares neither pages nor encoder outputs.
    let encoded = engine.metrics().encoded_media.get();
    assert_eq!(cached(&mine, 5), 0);
    assert_eq!(engine.metrics().encoded_media.get(), encoded + 1);
}

#[test]
fn what_is_cut_from_a_image_by_the_cache_is_encoded_again() {
    let (engine, seen) = recall_engine(seeing());
    let long = Mixed::new(&engine).text(&prompt(1, 10)).image(1, 4, 5).text(&prompt(2, 30));
    right(&long, &common::ask(&engine, long.request(3)));
    // The prompt ends inside the page after the image's first: the cached prefix ends in the middle of the image.
    let short = Mixed::new(&engine).text(&prompt(1, 10)).image(1, 4, 5).text(&[1]);
    let answer = common::ask(&engine, short.request(3));
    right(&short, &answer);
    assert_eq!((answer.cached_tokens, seen.images.load(Relaxed)), (16, 1), "and its outputs were there");
}

#[test]
fn preempted_requests_see_their_images_again() {
    // Room for one request's outputs: they are evicted when a second one has been encoded.
    let encoder = MediaEncoder { output_pages: 7, ..MediaEncoder::default() };
    let (bench, seen) = recall_bench(Shape { encoder: Some(encoder), prefix_cache: false, ..seeing() });
    let (engine, mut hand) = by_hand(bench);
    let all: Vec<Mixed> =
        (0..3).map(|i| Mixed::new(&engine).text(&prompt(i, 5)).image(i, 4, 5).text(&prompt(9, 6))).collect();
    let readers = all.iter().map(|mixed| engine.submit(mixed.request(90)).unwrap()).collect();
    let calm =
        MemoryReading { available: 1 << 40, stall_room: 1 << 40, above_plan: 1 << 30, ..MemoryReading::default() };
    // The machine stalls so much that the newest requests are preempted, one a reading; then it stops stalling.
    let stalls = MemoryReading { full_avg10: 45.0, stall_room: 0, ..calm };
    let answers = drive(&mut hand, readers, |round| {
        if round >= 12 {
            take_reading(&engine, if round < 19 { stalls } else { calm });
        }
    });
    for (mixed, answer) in all.iter().zip(&answers) {
        right(mixed, answer);
        assert_eq!(answer.ids.len(), 90);
    }
    assert_eq!((engine.metrics().preemptions.get(), seen.images.load(Relaxed)), (2, 5));
}

#[test]
fn a_request_that_needs_all_room_is_not_starved_by_small_ones() {
    let encoder = MediaEncoder { output_pages: 20, ..MediaEncoder::default() };
    // One step computes the large request's prompt, so that rounds count how long it waited.
    let (bench, _) = recall_bench(Shape { encoder: Some(encoder), rows: 96, ..seeing() });
    let (engine, mut hand) = by_hand(bench);
    let small = |i: u64| Mixed::new(&engine).image(100 + i, 3, 4).text(&[1]);
    let large = Mixed::new(&engine).image(1, 4, 10).image(2, 4, 10).text(&[2]);
    let mut readers = vec![engine.submit(small(0).request(30)).unwrap(), engine.submit(large.request(3)).unwrap()];
    readers.extend((1..30).map(|i| engine.submit(small(i).request(30)).unwrap()));
    let mut rounds = None;
    let mut large_reader = readers.remove(1);
    let mut answer = Vec::new();
    drive(&mut hand, readers, |round| {
        answer.extend(large_reader.take().into_iter().flat_map(|delta| delta.tokens).map(|token| token.id));
        if answer.len() == 3 {
            rounds.get_or_insert(round);
        }
    });
    assert_eq!(answer, large.says(3));
    assert!(rounds.is_some_and(|rounds| rounds < 12), "served in round {rounds:?}");
}

#[test]
fn decoding_waits_for_one_media_batch_at_most() {
    let (bench, seen) =
        recall_bench(Shape { encoder: Some(MediaEncoder { batch: 1, ..MediaEncoder::default() }), ..seeing() });
    let (engine, mut hand) = by_hand(bench);
    let decoding = Mixed::new(&engine).text(&prompt(1, 4));
    let mut reader = engine.submit(decoding.request(40)).unwrap();
    hand.run_iteration();
    let many = Mixed::new(&engine).image(1, 2, 2).image(2, 2, 2).image(3, 2, 2).image(4, 2, 2).text(&[5]);
    let many_reader = engine.submit(many.request(2)).unwrap();
    // The request is admitted.
    hand.run_iteration();
    let mut said = reader.take().map_or(0, |delta| delta.tokens.len());
    for round in 1..=4 {
        hand.run_iteration();
        said += reader.take().map_or(0, |delta| delta.tokens.len());
        assert_eq!((seen.images.load(Relaxed), said), (round, 2 + round as usize), "a token for every picture");
        assert_eq!(
            many_reader.watch().snapshot().phase,
            if round < 4 { RequestPhase::Encode } else { RequestPhase::Decode }
        );
    }
}

#[test]
fn a34_a_image_that_cannot_be_encoded_ends_its_request_alone() {
    for colour in [FAILS, PANICS] {
        let encoder = MediaEncoder { batch: 4, ..MediaEncoder::default() };
        let (bench, seen) = recall_bench(Shape { encoder: Some(encoder), ..seeing() });
        let (engine, mut hand) = by_hand(bench);
        let good: Vec<_> = (0..3).map(|i| Mixed::new(&engine).text(&[1]).image(i, 2, 3).text(&[2])).collect();
        let bad = Mixed::new(&engine).text(&[1]).coloured(colour, 3, 3).text(&[2]);
        let mut readers: Vec<_> = good.iter().map(|mixed| engine.submit(mixed.request(8)).unwrap()).collect();
        readers.insert(1, engine.submit(bad.request(8)).unwrap());
        let mut answers = drive(&mut hand, readers, |_| {});
        let failed = answers.remove(1);
        assert!(failed.ids.is_empty() && failed.error.is_some_and(|words| words.contains("encoder failed")));
        good.iter().zip(&answers).for_each(|(mixed, answer)| right(mixed, answer));
        assert_eq!(seen.batch_max.load(Relaxed), 4, "all were in one batch");
        let metrics = engine.metrics();
        assert_eq!((metrics.encoder_failures.get(), metrics.failed.get(), metrics.encoded_media.get()), (1, 1, 3));
        drop((good, bad));
        hand.run_iteration();
        all_back(&engine);
    }
}

#[test]
fn i6_what_is_larger_or_does_not_agree_is_refused() {
    let (engine, _) = recall_engine(seeing());
    let refused = |request: Request| match engine.submit(request) {
        Err(Refusal::Invalid { message, .. }) => message,
        other => panic!("{:?}", other.map(|_| ())),
    };
    let good = Mixed::new(&engine).text(&[1, 2]).image(1, 2, 3).text(&[3]);
    let words = refused(Mixed::new(&engine).image(1, 7, 7).text(&[1]).request(1));
    assert!(words.contains("an image has 7 x 7 tokens") && words.contains("--max-image-pixels"), "{words}");
    // The image has few tokens, but no image is resized to such a strip.
    let words = refused(Mixed::new(&engine).image(1, 2, 40).request(1));
    assert!(words.contains("--max-image-pixels"), "{words}");
    let many = (0..9).fold(Mixed::new(&engine), |mixed, i| mixed.image(i, 1, 1));
    let words = refused(many.request(1));
    assert!(words.contains("9 media") && words.contains("--max-media-per-request"), "{words}");
    let words = refused((0..7).fold(Mixed::new(&engine), |mixed, i| mixed.image(i, 4, 10)).request(1));
    assert!(words.contains("--encoder-output-bytes") || words.contains("context"), "{words}");
    let mut fewer = good.request(1);
    fewer.prompt.remove(3);
    assert!(refused(fewer).contains("placeholder"));
    let mut more = good.request(1);
    more.prompt.push(common::media_encoder::IMAGE);
    assert!(refused(more).contains("stands for no medium"));
    let mut elsewhere = good.request(1);
    elsewhere.media[0].first += 1;
    assert!(refused(elsewhere).contains("said to begin"));
    let mut other = good.request(1);
    other.media[0].grid.height += 2;
    assert!(refused(other).contains("do not agree"));
    assert_eq!(engine.metrics().refused_invalid.get(), 8);
    right(&good, &common::ask(&engine, good.request(3)));
    let (text_only, _) = recall_engine(Shape::default());
    assert!(matches!(text_only.submit(good.request(1)), Err(Refusal::Invalid { .. })));
}

#[test]
fn i4_two_hundred_requests_with_images_and_aborts_leave_every_pool_full() {
    for (seed, hybrid) in [(1, false), (2, true)] {
        let encoder = MediaEncoder { batch: 3, output_pages: 24, ..MediaEncoder::default() };
        let base = if hybrid { Shape::hybrid(2, 128, 6) } else { Shape::default() };
        let shape = Shape { pages: 40, encoder: Some(encoder), step_time: Duration::from_micros(150), ..base };
        let (engine, seen) = recall_engine(shape);
        let mut dice = seed * 1_000_003;
        let mut below = |n: u64| {
            dice += 1;
            mix(dice) % n
        };
        let mut kept = Vec::new();
        for i in 0..200 {
            let mut mixed = Mixed::new(&engine).text(&prompt(below(3), 1 + below(20) as usize));
            for _ in 0..below(4) {
                mixed = match below(4) {
                    0 => mixed.video(below(9), 2 + below(3), 1 + below(2) as u32, 1 + below(3) as u32),
                    _ => mixed.image(below(20), 1 + below(4) as u32, 1 + below(5) as u32),
                };
                mixed = mixed.text(&prompt(below(3), 1 + below(6) as usize));
            }
            let request = Request { cache_salt: below(4) / 3, ..mixed.request(1 + below(20) as u32) };
            // All places are taken: the oldest request is read first.
            let reader = loop {
                match engine.submit(request.clone()) {
                    Ok(reader) => break reader,
                    Err(Refusal::Full { .. }) => std::thread::sleep(Duration::from_millis(1)),
                    Err(other) => panic!("request {i}: {other}"),
                }
            };
            match below(3) {
                0 => {
                    std::thread::sleep(Duration::from_micros(below(1500)));
                    drop(reader);
                }
                _ => kept.push((mixed, reader)),
            }
        }
        for (mixed, reader) in kept {
            right(&mixed, &collect(reader));
        }
        assert!(engine.metrics().aborted.get() > 0 && seen.images.load(Relaxed) > 20);
        all_back(&engine);
    }
}

#[test]
fn i4_outputs_still_held_are_missed_at_rest() {
    let (engine, _) = recall_engine(seeing());
    let pool = engine.media().unwrap().outputs.clone();
    let kept = pool.claim(&[(ContentKey::of(Modality::Image, "", &[1]), 6)]).unwrap();
    let lost = || engine.metrics().lost_outputs.get();
    let until = std::time::Instant::now() + Duration::from_secs(30);
    // Only an engine that has worked checks whether everything was released.
    assert_eq!(common::ask(&engine, common::greedy(&prompt(1, 5), 3)).error, None);
    while lost() == 0 && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(lost(), 2, "two pages of four rows, counted once");
    drop(kept);
    all_back(&engine);
}
