//! I7: a failed step, a kernel that panics or logits that are NaN end the request they belong to and no other. The other requests get the
//! tokens that they would have got, and the engine continues to serve.

use plimsoll_engine::Request;
use plimsoll_engine::testing::by_hand;

use crate::common::recall::{FAILS, NAN, PANICS, SHORT_ROW, Shape, prompt, recall_bench, recall_engine, says};
use crate::common::{collect, drive, greedy, quiet};

/// Runs eight healthy requests and a ninth with `fault` at position `at` of its prompt. Returns the ninth request's
/// error.
fn one_among_eight(fault: u32, at: usize, shape: Shape) -> String {
    let (engine, _) = recall_engine(shape);
    let healthy: Vec<_> = (0..8).map(|i| prompt(i, 20 + 5 * i as usize)).collect();
    let mut bad = prompt(99, 40);
    bad[at] = fault;
    let (before, after) = healthy.split_at(4);
    let submit = |p: &Vec<u32>| engine.submit(greedy(p, 16)).unwrap();
    let mut readers: Vec<_> = before.iter().map(submit).collect();
    let bad_reader = submit(&bad);
    readers.extend(after.iter().map(submit));
    let failed = collect(bad_reader);
    for (prompt, reader) in healthy.iter().zip(readers) {
        let answer = collect(reader);
        assert_eq!(answer.error, None, "a neighbour of token {fault}");
        assert_eq!(answer.ids, says(prompt, 16), "a neighbour of token {fault}");
    }
    assert_eq!(failed.finish, None);
    assert_eq!(failed.ids, Vec::<u32>::new());
    quiet(&engine);
    assert!(!engine.stopped());
    let metrics = engine.metrics();
    assert_eq!((metrics.failed.get(), metrics.finished.get()), (1, 8), "failed, finished");
    // The failed request leaves nothing that harms a later request with the same beginning.
    let mut healed = bad.clone();
    healed[at] = 1;
    assert_eq!(collect(submit(&healed)).ids, says(&healed, 16), "after the fault");
    failed.error.expect("the request with the fault fails")
}

#[test]
fn a_failing_step_ends_only_the_request_that_fails() {
    for at in [0, 17, 39] {
        let error = one_among_eight(FAILS, at, Shape::default());
        assert!(error.contains("the token that fails"), "{error}");
    }
}

#[test]
fn a_panicking_kernel_ends_only_its_request() {
    for at in [0, 17, 39] {
        let error = one_among_eight(PANICS, at, Shape { prefix_cache: at == 17, ..Shape::default() });
        assert!(error.contains("token 372 was computed"), "{error}");
    }
}

#[test]
fn logits_that_are_no_numbers_end_only_their_request() {
    let error = one_among_eight(NAN, 39, Shape::default());
    assert!(error.contains("NaN"), "{error}");
}

#[test]
fn a_row_of_the_wrong_length_ends_only_its_request() {
    let error = one_among_eight(SHORT_ROW, 39, Shape::default());
    assert!(error.contains("row of 7 logits"), "{error}");
}

#[test]
fn faults_while_others_are_preempted_stay_alone() {
    let tiny = Shape { pages: 8, context: 128, ..Shape::default() };
    for fault in [FAILS, PANICS] {
        for at in [0, 39] {
            one_among_eight(fault, at, tiny);
        }
    }
}

/// A step that fails leaves recurrent state half written: its sequences start over and give the same output.
#[test]
fn faults_in_hybrids_stay_alone() {
    for fault in [FAILS, PANICS, NAN, SHORT_ROW] {
        for at in [0, 17, 39] {
            for (drafts, spare) in [(0, 0), (0, 16), (3, 8)] {
                if matches!(fault, FAILS | PANICS) || at == 39 {
                    one_among_eight(fault, at, Shape::hybrid(drafts, 180, spare));
                }
            }
        }
    }
    let tiny = Shape { pages: 8, context: 128, ..Shape::hybrid(2, 180, 4) };
    for at in [0, 39] {
        one_among_eight(FAILS, at, tiny);
    }
}

#[test]
fn a_fault_in_the_middle_of_an_answer_keeps_what_was_said() {
    let (engine, _) = recall_engine(Shape::default());
    let mut request = greedy(&prompt(5, 30), 16);
    // Bias makes the model say the failing token as soon as it may.
    request.sampling.logit_bias = vec![(FAILS, 100.0)];
    let bystander = prompt(6, 30);
    let other = engine.submit(greedy(&bystander, 40)).unwrap();
    let answer = collect(engine.submit(request).unwrap());
    assert_eq!(answer.ids, [FAILS], "said once, failed when it was computed");
    assert!(answer.error.is_some());
    assert_eq!(collect(other).ids, says(&bystander, 40));
}

#[test]
fn what_a_failed_request_computed_is_not_shared() {
    let (engine, _) = recall_engine(Shape { rows: 64, ..Shape::default() });
    let mut bad = prompt(7, 33);
    bad[32] = NAN;
    assert!(collect(engine.submit(greedy(&bad, 4)).unwrap()).error.is_some());
    quiet(&engine);
    let again = collect(engine.submit(greedy(&bad, 4)).unwrap());
    assert!(again.error.is_some());
    assert_eq!(again.cached_tokens, 0, "the step whose logits were no numbers is not cached");
}

/// A non-finite value may come from a step without wanted logits. Other requests may have taken its pages from the
/// cache since.
#[test]
fn what_led_to_no_number_is_not_found_any_more() {
    let (engine, _) = recall_engine(Shape { rows: 16, ..Shape::default() });
    let good = prompt(7, 33);
    let cached = || {
        let answer = collect(engine.submit(greedy(&good, 4)).unwrap());
        assert_eq!(answer.ids, says(&good, 4));
        quiet(&engine);
        answer.cached_tokens
    };
    assert_eq!((cached(), cached()), (0, 32));
    let mut bad = good.clone();
    bad[32] = NAN;
    let failed = collect(engine.submit(greedy(&bad, 4)).unwrap());
    assert!(failed.error.is_some() && failed.cached_tokens == 32, "{failed:?}");
    quiet(&engine);
    assert_eq!((cached(), cached()), (0, 32));
    // Logits that are only reported make the request fail too.
    bad[20] = NAN;
    let reported = Request { prompt_logprobs: Some(0), ..greedy(&bad, 4) };
    assert!(collect(engine.submit(reported).unwrap()).error.is_some());
    quiet(&engine);
    assert_eq!((cached(), cached()), (0, 32));
}

/// Requests may have used such pages before the fault. They do not put these pages back into the cache, nor the pages that they have
/// computed since. This holds page by page, for the states of a hybrid, and when a request ends.
#[test]
fn pages_of_a_step_with_non_finite_values_are_not_shared() {
    for state_slots in [0, 40] {
        let (bench, _) = recall_bench(Shape { rows: 16, state_slots, ..Shape::default() });
        let (engine, mut hand) = by_hand(bench);
        // A bias makes its answer the token that leads to non-finite logits: the next step fails.
        let mut bad = greedy(&prompt(1, 3), 4);
        bad.sampling.logit_bias = vec![(NAN, 100.0)];
        let long = prompt(2, 165);
        let readers = [bad, greedy(&long, 4)].map(|request| engine.submit(request).unwrap());
        let mut tokens_then = None;
        let answers = drive(&mut hand, readers.into(), |_| {
            let metrics = engine.metrics();
            if metrics.failed.get() == 1 {
                tokens_then.get_or_insert(metrics.generated_tokens.get());
            }
        });
        assert!(answers[0].error.as_ref().is_some_and(|error| error.contains("NaN")), "{answers:?}");
        assert_eq!(tokens_then, Some(1), "the other had computed a part of its prompt");
        assert_eq!((&answers[1].error, &answers[1].ids), (&None, &says(&long, 4)));
        let mut cached = || {
            let readers = vec![engine.submit(greedy(&long, 4)).unwrap()];
            drive(&mut hand, readers, |_| ()).remove(0).cached_tokens
        };
        assert_eq!((cached(), cached()), (0, 160), "{state_slots} slots");
        quiet(&engine);
    }
}

#[test]
fn every_request_failing_leaves_an_engine_that_serves() {
    let (engine, _) = recall_engine(Shape::default());
    for round in 0..20 {
        let mut bad = prompt(round, 25);
        bad[24] = [FAILS, PANICS, NAN, SHORT_ROW][round as usize % 4];
        let readers: Vec<_> = (0..6).map(|_| engine.submit(greedy(&bad, 4)).unwrap()).collect();
        assert!(readers.into_iter().all(|reader| collect(reader).error.is_some()));
    }
    quiet(&engine);
    let good = prompt(1, 25);
    assert_eq!(collect(engine.submit(greedy(&good, 8)).unwrap()).ids, says(&good, 8));
}
