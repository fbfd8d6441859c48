//! One request's life: how it ends (stop, length, abort, drain, stop of the engine), what it reports, and why it is refused. All that it
//! held is released afterwards (I4).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use plimsoll_device::{DeviceError, StepInput};
use plimsoll_engine::runner::Runner;
use plimsoll_engine::testing::{Bench, over_runner, watch_progress};
use plimsoll_engine::{EngineHandle, FinishReason, Options, Refusal, Request};

use crate::common::recall::{NEVER_SAID, Shape, VOCAB, prompt, recall_bench, recall_engine, says};
use crate::common::{self, ask, collect, engine, exact, greedy, quiet, until};

fn slow() -> Shape {
    Shape { step_time: Duration::from_millis(2), ..Shape::default() }
}

#[test]
fn an_abort_in_any_phase_gives_everything_back() {
    let (engine, _) = recall_engine(slow());
    // Drop requests that wait for a place in the running set.
    let crowd: Vec<_> = (0..12).map(|i| engine.submit(greedy(&prompt(i, 20), 100)).unwrap()).collect();
    until(&engine, |e| e.status().waiting.load(Acquire) >= 4);
    drop(crowd);
    quiet(&engine);
    // Drop a request while its prompt is computed: 200 tokens take 7 steps of 32 rows.
    let reader = engine.submit(greedy(&prompt(20, 200), 10)).unwrap();
    until(&engine, |e| e.status().running.load(Acquire) == 1);
    drop(reader);
    quiet(&engine);
    // Drop a request while it generates.
    let mut reader = engine.submit(greedy(&prompt(21, 20), 200)).unwrap();
    pollster::block_on(reader.next()).unwrap();
    drop(reader);
    quiet(&engine);
    // Drop a request after its end, unread.
    let reader = engine.submit(greedy(&prompt(22, 20), 2)).unwrap();
    until(&engine, |e| e.idle());
    assert!(engine.reserved().0 > 0, "unread output still counts");
    drop(reader);
    quiet(&engine);
    assert_eq!((engine.metrics().aborted.get(), engine.metrics().finished.get()), (14, 1));
}

#[test]
fn a_thousand_clients_that_hang_up_at_once() {
    let (engine, _) = recall_engine(Shape::default());
    let mut accepted = 0;
    for i in 0..1000 {
        match engine.submit(greedy(&prompt(i, 30), 50)) {
            Ok(reader) => drop(reader),
            Err(Refusal::Full { .. }) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
        accepted += 1;
    }
    assert_eq!(accepted, 1000);
    quiet(&engine);
    assert_eq!(ask(&engine, greedy(&prompt(0, 30), 5)).ids, says(&prompt(0, 30), 5));
}

#[test]
fn a_full_queue_says_so_and_recovers() {
    let (engine, _) = recall_engine(Shape { running: 2, waiting: 3, ..slow() });
    let readers: Vec<_> = (0..5).map(|i| engine.submit(greedy(&prompt(i, 20), 30)).unwrap()).collect();
    let refused = engine.submit(greedy(&prompt(9, 20), 30)).unwrap_err();
    assert!(
        matches!(&refused, Refusal::Full { message, retry_after_s: 1.. } if message.contains('2') && message.contains('3')),
        "{refused:?}"
    );
    for (i, reader) in (0..).zip(readers) {
        assert_eq!(collect(reader).ids, says(&prompt(i, 20), 30), "those who were accepted are served");
    }
    quiet(&engine);
    assert!(engine.submit(greedy(&prompt(9, 20), 1)).is_ok());
}

#[test]
fn a_full_host_budget_says_so_and_recovers() {
    let (engine, _) = recall_engine(Shape { running: 8, waiting: 1000, ..slow() });
    let mut request = greedy(&prompt(1, 200), 50);
    request.prompt_logprobs = Some(20);
    let per_request = request.host_bytes();
    let fit = engine.limits().host_bytes / per_request;
    let readers: Vec<_> = (0..fit).map(|_| engine.submit(request.clone()).unwrap()).collect();
    assert!(engine.reserved().0 <= engine.limits().host_bytes);
    let refused = engine.submit(request.clone()).unwrap_err();
    assert!(matches!(&refused, Refusal::Full { message, .. } if message.contains("16777216")), "{refused:?}");
    drop(readers);
    quiet(&engine);
    assert!(engine.submit(request).is_ok());
}

#[test]
fn what_never_fits_is_refused_with_the_limit() {
    let (engine, _) = recall_engine(Shape { pages: 4, ..Shape::default() });
    let refuse = |edit: &dyn Fn(&mut plimsoll_engine::Request), param: &str, limit: &str| {
        let mut request = greedy(&prompt(1, 20), 10);
        edit(&mut request);
        match engine.submit(request) {
            Err(Refusal::Invalid { param: p, message }) => {
                assert_eq!(p, param);
                assert!(message.contains(limit), "'{message}' does not name {limit}");
            }
            other => panic!("{param}: {other:?}"),
        }
    };
    refuse(&|r| r.max_tokens = 45, "max_tokens", "64");
    refuse(&|r| r.max_tokens = u32::MAX, "max_tokens", "64");
    refuse(&|r| r.max_tokens = 0, "max_tokens", "1");
    refuse(&|r| r.min_tokens = 11, "min_tokens", "10");
    refuse(&|r| r.prompt.clear(), "prompt", "one");
    refuse(&|r| r.prompt[3] = VOCAB, "prompt", "384");
    refuse(&|r| r.stop_token_ids = vec![VOCAB], "stop_token_ids", "384");
    refuse(&|r| r.stop_token_ids = vec![1; 17], "stop_token_ids", "16");
    refuse(&|r| r.stop = vec!["x".into(); 17], "stop", "16");
    refuse(&|r| r.stop = vec!["x".repeat(257)], "stop", "256");
    refuse(&|r| r.stop = vec![String::new()], "stop", "256");
    refuse(&|r| r.logprobs = Some(21), "logprobs", "20");
    refuse(&|r| r.prompt_logprobs = Some(21), "prompt_logprobs", "20");
    refuse(&|r| r.sampling.temperature = f32::NAN, "sampling", "100");
    assert_eq!(engine.reserved(), (0, 0));
    // The largest request that fits is served.
    assert_eq!(ask(&engine, greedy(&prompt(1, 20), 44)).ids, says(&prompt(1, 20), 44));
    assert_eq!(ask(&engine, greedy(&prompt(1, 63), 1)).ids, says(&prompt(1, 63), 1));
}

#[test]
fn one_token_is_one_token() {
    let (engine, _) = recall_engine(Shape::default());
    for len in [1, 15, 16, 17, 31, 32, 33, 255] {
        for _ in 0..2 {
            let answer = ask(&engine, greedy(&prompt(3, len), 1));
            assert_eq!(answer.ids, says(&prompt(3, len), 1));
            assert_eq!(answer.finish, Some(FinishReason::Length));
        }
    }
}

#[test]
fn stop_tokens_end_the_answer_and_are_not_text() {
    let (engine, _) = recall_engine(Shape::default());
    let expected = says(&prompt(4, 20), 12);
    let first = expected.iter().position(|id| *id == expected[5]).unwrap();
    let mut request = greedy(&prompt(4, 20), 12);
    request.stop_token_ids = vec![expected[5]];
    let stopped = ask(&engine, request.clone());
    assert_eq!(stopped.ids, expected[..=first]);
    assert_eq!(stopped.finish, Some(FinishReason::Stop));
    let before = ask(&engine, greedy(&prompt(4, 20), first.max(1) as u32));
    assert_eq!(stopped.text, before.text, "the stop token is no text");
    // Before `min_tokens` the stop token is not even sampled.
    request.min_tokens = 10;
    let later = ask(&engine, request);
    assert!(later.ids.len() >= 10, "{} tokens", later.ids.len());
    assert!(!later.ids[..10].contains(&expected[5]));
    assert_eq!(later.ids[..first], expected[..first]);
}

#[test]
fn the_end_of_sequence_token_ends_unless_ignored() {
    let (engine, _) = recall_engine(Shape::default());
    let mut request = greedy(&prompt(4, 20), 6);
    request.sampling.logit_bias = vec![(VOCAB - 1, 100.0)];
    let ignored = ask(&engine, request.clone());
    assert_eq!((ignored.ids.len(), ignored.finish), (6, Some(FinishReason::Length)));
    request.ignore_eos = false;
    let ended = ask(&engine, request.clone());
    assert_eq!((ended.ids, ended.finish, ended.text), (vec![VOCAB - 1], Some(FinishReason::Stop), String::new()));
    request.min_tokens = 3;
    let later = ask(&engine, request);
    assert_eq!(later.ids.len(), 4, "three tokens, then the end");
    assert_eq!(later.ids[3], VOCAB - 1);
}

#[test]
fn stops_end_the_text_before_them_or_behind() {
    let (engine, _) = recall_engine(Shape::default());
    let whole = ask(&engine, greedy(&prompt(8, 20), 40)).text;
    let letters: Vec<(usize, char)> = whole.char_indices().filter(|(_, c)| c.is_ascii_graphic()).collect();
    let (_, wanted) = letters[letters.len() / 2];
    let first = whole.find(wanted).unwrap();
    let mut request = greedy(&prompt(8, 20), 40);
    request.stop = vec!["never said".into(), wanted.to_string()];
    let answer = ask(&engine, request.clone());
    assert_eq!(answer.text, whole[..first]);
    assert_eq!(answer.finish, Some(FinishReason::Stop));
    assert!(answer.ids.len() < 40);
    request.keep_stop = true;
    let kept = ask(&engine, request);
    assert_eq!((&kept.text[..], &kept.ids), (&whole[..=first], &answer.ids));
    // A token that ends the text has its own text.
    let ends = *answer.ids.last().unwrap();
    let [before, behind] = [false, true]
        .map(|keep_stop| ask(&engine, Request { stop_token_ids: vec![ends], keep_stop, ..greedy(&prompt(8, 20), 40) }));
    assert_eq!((&before.ids, before.finish), (&behind.ids, behind.finish));
    assert!(behind.text.starts_with(&before.text) && behind.text.len() > before.text.len(), "{}", behind.text);
}

/// Text that may begin a stop string is held back. The offset of its tokens is known at once, and is the same.
#[test]
fn where_a_token_begins_does_not_wait_for_its_text() {
    let (engine, _) = recall_engine(Shape::default());
    let plain = ask(&engine, greedy(&prompt(8, 20), 40));
    let half: String = plain.text.chars().take(plain.text.chars().count() / 2).collect();
    let waits = ask(&engine, Request { stop: vec![half + "never said"], ..greedy(&prompt(8, 20), 40) });
    let begins = waits.begins;
    assert_eq!(begins, plain.begins);
    assert!(begins.iter().all(|&(at, chars)| plain.text[..at as usize].chars().count() == chars as usize));
}

#[test]
fn twins_share_their_prompt() {
    let (engine, seen) = recall_engine(slow());
    let twins: Vec<_> = (0..6).map(|_| engine.submit(greedy(&prompt(5, 200), 8)).unwrap()).collect();
    let answers: Vec<_> = twins.into_iter().map(collect).collect();
    assert!(answers.iter().all(|answer| answer.ids == says(&prompt(5, 200), 8)));
    let cached: Vec<u32> = answers.iter().map(|answer| answer.cached_tokens).collect();
    assert_eq!(cached, [0, 192, 192, 192, 192, 192]);
    assert_eq!(seen.seqs_max.load(Acquire), 6, "and then run side by side");
    // A different salt shares nothing.
    let mut stranger = greedy(&prompt(5, 200), 8);
    stranger.cache_salt = 1;
    assert_eq!(ask(&engine, stranger).cached_tokens, 0);
}

#[test]
fn every_token_is_reported_once_also_after_preemption() {
    let (engine, _) = recall_engine(Shape { pages: 12, context: 128, ..slow() });
    let full = |i| {
        let mut request = greedy(&prompt(i, 60), 50);
        (request.logprobs, request.prompt_logprobs) = (Some(2), Some(2));
        request
    };
    let alone: Vec<_> = (0..4).map(|i| ask(&engine, full(i))).collect();
    let before = engine.metrics().preemptions.get();
    let crowd: Vec<_> = (0..4).map(|i| engine.submit(full(i)).unwrap()).collect();
    for (alone, reader) in alone.iter().zip(crowd) {
        let answer = collect(reader);
        assert_eq!(answer.prompt_logprobs.len(), 60);
        assert_eq!(answer.prompt_logprobs[0], plimsoll_engine::TokenLogprobs::default());
        assert_eq!(answer, *alone);
    }
    assert!(engine.metrics().preemptions.get() > before, "nothing was preempted");
}

#[test]
fn an_echo_generates_nothing() {
    let (engine, _) = recall_engine(Shape::default());
    for len in [1, 16, 64, 200] {
        let mut request = greedy(&prompt(6, len), 0);
        request.prompt_logprobs = Some(1);
        let answer = ask(&engine, request);
        assert_eq!((answer.ids.len(), answer.text.as_str(), answer.finish), (0, "", Some(FinishReason::Length)));
        assert_eq!(answer.prompt_logprobs.len(), len);
        assert!(
            answer
                .prompt_logprobs
                .iter()
                .skip(1)
                .all(|report| report.own.is_some_and(|p| p <= 0.0) && report.top.len() == 1)
        );
    }
    quiet(&engine);
}

#[test]
fn draining_finishes_what_was_accepted_and_refuses_the_rest() {
    let (engine, _) = recall_engine(slow());
    let readers: Vec<_> = (0..12).map(|i| engine.submit(greedy(&prompt(i, 20), 20)).unwrap()).collect();
    engine.drain();
    assert!(matches!(engine.submit(greedy(&prompt(1, 5), 1)), Err(Refusal::Unavailable { .. })));
    for (i, reader) in (0..).zip(readers) {
        assert_eq!(collect(reader).ids, says(&prompt(i, 20), 20));
    }
    quiet(&engine);
    assert!(engine.idle() && engine.draining() && !engine.stopped());
}

#[test]
fn stopping_ends_every_reader_with_an_error() {
    let (engine, _) = recall_engine(slow());
    let readers: Vec<_> = (0..20).map(|i| engine.submit(greedy(&prompt(i, 20), 200)).unwrap()).collect();
    until(&engine, |e| e.status().running.load(Acquire) == 8);
    engine.stop();
    for reader in readers {
        let answer = collect(reader);
        assert!(answer.error.is_some() && answer.finish.is_none(), "{answer:?}");
    }
    until(&engine, EngineHandle::stopped);
    assert!(matches!(engine.submit(greedy(&prompt(1, 5), 1)), Err(Refusal::Unavailable { .. })));
    assert!(!engine.healthy());
    quiet(&engine);
}

#[test]
fn the_thread_ends_with_the_last_handle_and_serves_its_readers_first() {
    let (engine, seen) = recall_engine(slow());
    let reader = engine.submit(greedy(&prompt(1, 20), 20)).unwrap();
    drop(engine);
    assert_eq!(collect(reader).ids, says(&prompt(1, 20), 20));
    let deadline = Instant::now() + Duration::from_secs(5);
    while std::sync::Arc::strong_count(&seen) > 1 {
        assert!(Instant::now() < deadline, "the engine thread outlives its handles");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A runner that waits inside a step while `closed` is set.
struct Gate {
    inner: common::recall::Recall,
    closed: Arc<AtomicBool>,
}

impl Runner for Gate {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        while self.closed.load(Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.inner.forward(step)
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        self.inner.logits(row)
    }
}

#[test]
fn i10_an_engine_that_stands_still_says_so_and_goes_on_when_it_can() {
    let (bench, _) = recall_bench(Shape::default());
    let closed = Arc::new(AtomicBool::new(false));
    let Bench { runner, limits, step, prefix_cache, state_slots, speculation, tokenizer, eos, elastic, media } = bench;
    let runner = Gate { inner: runner, closed: Arc::clone(&closed) };
    let engine = over_runner(Bench {
        runner,
        limits,
        step,
        prefix_cache,
        state_slots,
        speculation,
        tokenizer,
        eos,
        elastic,
        media,
    });
    engine.set_stall_limit(Duration::from_secs(1));
    watch_progress(&engine);
    // Idle time longer than the limit is no stall.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(engine.healthy() && engine.metrics().stalls.get() == 0);
    closed.store(true, Release);
    let prompts = [prompt(1, 40), prompt(2, 60)];
    let readers = prompts.each_ref().map(|prompt| engine.submit(greedy(prompt, 12)).unwrap());
    until(&engine, |engine| !engine.healthy() && engine.metrics().stalls.get() == 1);
    let mut refused = None;
    until(&engine, |engine| {
        refused = engine.submit(greedy(&prompts[0], 1)).err();
        refused.is_some()
    });
    assert!(matches!(&refused, Some(Refusal::Unavailable { message, .. }) if message.contains("no progress")));
    closed.store(false, Release);
    for (reader, prompt) in readers.into_iter().zip(&prompts) {
        assert_eq!(collect(reader).ids, says(prompt, 12), "a step that returned late is a step like any other");
    }
    until(&engine, |engine| engine.healthy() && engine.submit(greedy(&prompts[0], 1)).is_ok());
    assert_eq!((engine.metrics().stalls.get(), engine.metrics().failed.get()), (1, 0));
    quiet(&engine);
}

#[test]
fn a_real_engine_allocates_nothing_after_ready() {
    let options = Options { max_total_token_num: Some(160), ..exact() };
    let engine = engine("llama", &options);
    let (before, after) = engine.ledger().allocations();
    assert!(before > 0 && after == 0);
    let pages = engine.status().pages_total.load(Acquire);
    let readers: Vec<_> = (0..20)
        .map(|i| {
            let mut request = greedy(&prompt(i, 40 + i as usize), 40);
            (request.logprobs, request.prompt_logprobs) = (Some(3), (i % 3 == 0).then_some(3));
            engine.submit(request).unwrap()
        })
        .collect();
    for (i, reader) in readers.into_iter().enumerate() {
        if i % 4 != 3 {
            let answer = collect(reader);
            assert_eq!((answer.error, answer.ids.len()), (None, 40));
            assert!(answer.ids.iter().all(|id| *id < VOCAB) && NEVER_SAID < VOCAB);
        }
    }
    quiet(&engine);
    assert!(engine.metrics().preemptions.get() > 0, "nothing was preempted");
    assert_eq!(engine.ledger().allocations(), (before, 0));
    assert!(pages == 0 || pages == engine.status().pages_total.load(Acquire));
    for row in engine.ledger().rows() {
        assert!(row.peak <= row.planned, "I2: {row:?}");
    }
}

/// The time to first token starts when the client sent the request, the queue time when the engine received it.
#[test]
fn the_first_tokens_clock_starts_with_the_client() {
    let (engine, _) = recall_engine(Shape::default());
    let asked = Instant::now().checked_sub(Duration::from_secs(40)).unwrap();
    collect(engine.submit(Request { received: Some(asked), ..greedy(&prompt(1, 20), 3) }).unwrap());
    let mut registry = prometheus_client::registry::Registry::default();
    engine.metrics().register(&mut registry);
    let mut page = String::new();
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    let sum = |name: &str| -> f64 {
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("plimsoll_{name}_seconds_sum "))).unwrap();
        line.parse().unwrap()
    };
    assert!((40.0..70.0).contains(&sum("ttft")) && sum("queue") < 30.0, "{} {}", sum("ttft"), sum("queue"));
}

#[test]
fn what_is_refused_is_never_counted_as_reserved() {
    let (engine, _) = recall_engine(Shape { running: 1, waiting: 1, ..slow() });
    let open: Vec<_> = (1..3).map(|seed| engine.submit(greedy(&prompt(seed, 20), 200)).unwrap()).collect();
    let reserved = engine.reserved();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 3..5 {
            let (engine, over) = (&engine, &over);
            scope.spawn(move || {
                while !over.load(Acquire) {
                    assert!(matches!(engine.submit(greedy(&prompt(seed, 20), 200)), Err(Refusal::Full { .. })));
                }
            });
        }
        let seen: Vec<_> = (0..100_000).map(|_| engine.reserved()).filter(|seen| *seen != reserved).collect();
        over.store(true, Release);
        assert!(seen.is_empty(), "{:?} of {reserved:?}", seen[0]);
    });
    drop(open);
    quiet(&engine);
}
