//! Panics in the path of an image: in the encoder, and beside it.

use std::sync::atomic::Ordering::Relaxed;

use plimsoll_engine::testing::by_hand;
use plimsoll_memory::faults::{self, Site};

use super::hide_injected_panics;
use crate::common::drive;
use crate::common::media_encoder::{MediaEncoder, Mixed};
use crate::common::recall::{Shape, recall_bench};
use crate::process::own_process;

fn seeing() -> Shape {
    Shape { encoder: Some(MediaEncoder { batch: 1, ..MediaEncoder::default() }), ..Shape::default() }
}

#[test]
fn a_panic_between_requests_costs_no_image() {
    own_process!();
    hide_injected_panics();
    let (bench, seen) = recall_bench(seeing());
    let (engine, mut hand) = by_hand(bench);
    let all: Vec<_> = (0..3).map(|i| Mixed::new(&engine).text(&[1]).image(i, 2, 3).text(&[2])).collect();
    let readers = all.iter().map(|mixed| engine.submit(mixed.request(9)).unwrap()).collect();
    hand.run_iteration();
    hand.run_iteration();
    faults::arm_site(Site::Scheduler, 1);
    hand.run_iteration();
    assert_eq!(faults::disarm_site().hit, 1);
    assert_eq!(engine.metrics().recoveries.get(), 1);
    let answers = drive(&mut hand, readers, |_| {});
    for (mixed, answer) in all.iter().zip(&answers) {
        assert_eq!((&answer.error, &answer.ids), (&None, &mixed.says(9)));
    }
    assert_eq!(seen.images.load(Relaxed), 3, "what was encoded before is found again");
}

#[test]
fn a_panic_in_the_encoder_ends_its_request_alone() {
    own_process!();
    hide_injected_panics();
    let (bench, _) = recall_bench(seeing());
    let (engine, mut hand) = by_hand(bench);
    let all: Vec<_> = (0..3).map(|i| Mixed::new(&engine).text(&[1]).image(i, 2, 3).text(&[2])).collect();
    let readers = all.iter().map(|mixed| engine.submit(mixed.request(9)).unwrap()).collect();
    hand.run_iteration();
    faults::arm_site(Site::Encoder, 2);
    let answers = drive(&mut hand, readers, |_| {});
    assert_eq!(faults::disarm_site().hit, 1);
    assert!(
        answers[1].ids.is_empty() && answers[1].error.as_ref().is_some_and(|words| words.contains("encoder failed"))
    );
    for i in [0, 2] {
        assert_eq!((&answers[i].error, &answers[i].ids), (&None, &all[i].says(9)));
    }
    let stats = engine.media().unwrap().outputs.stats();
    assert_eq!(stats.pages_free + stats.pages_idle, stats.pages);
}
