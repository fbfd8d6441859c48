//! Panics at every passage of every site in the engine that a request passes.

use plimsoll_engine::testing::by_hand;
use plimsoll_memory::faults::{self, EVERY, Site};

use super::hide_injected_panics;
use super::life::{Fate, REQUESTS, Watched, calm, live, requests};
use crate::common::greedy;
use crate::common::recall::{Shape, recall_bench, says};
use crate::process::own_process;

/// Sweeps `site`: each life has a panic at one passage. There are at least `least` passages; each panic fails `failed` requests.
fn sweep(site: Site, least: u64, failed: usize, recoveries: u64) {
    hide_injected_panics();
    let script = requests();
    let calm = calm(&script, Watched::Rounds);
    let mut swept = 0;
    for nth in 1.. {
        faults::arm_site(site, nth);
        let life = live(&script, Watched::Rounds);
        let tally = faults::disarm_site();
        if tally.hit == 0 {
            break;
        }
        swept += 1;
        let what = format!("panic {nth} in {site:?}");
        life.assert_others_as_in(&calm, &what);
        assert_eq!(life.fates(Fate::Failed), failed, "{what}: {:?}", life.heard);
        assert_eq!((life.counted.panics, life.counted.failed), (1, failed as u64), "{what}");
        assert_eq!(life.counted.recoveries, recoveries, "{what}");
    }
    println!("{swept} passages of {site:?} panicked, one at a time");
    assert!(swept >= least, "{swept} passages of {site:?} only");
}

#[test]
fn a_panic_on_the_way_in_ends_that_request() {
    own_process!();
    sweep(Site::Accept, REQUESTS as u64, 1, 0);
}

#[test]
fn a_panicking_sampler_ends_one_request() {
    own_process!();
    sweep(Site::Sampler, 100, 1, 0);
}

#[test]
fn a_panicking_detokenizer_ends_one_request() {
    own_process!();
    sweep(Site::Detokenizer, 100, 1, 0);
}

#[test]
fn panicking_scheduler_ends_no_request() {
    own_process!();
    sweep(Site::Scheduler, 30, 0, 1);
}

#[test]
fn a_scheduler_that_always_panics_ends_its_requests_and_is_whole_again_afterwards() {
    own_process!();
    hide_injected_panics();
    let (bench, _) = recall_bench(Shape::default());
    let (engine, mut hand) = by_hand(bench);
    let prompt: Vec<u32> = (0..40).collect();
    let mut readers: Vec<_> = (0..3).map(|_| engine.submit(greedy(&prompt, 20)).unwrap()).collect();
    (0..5).for_each(|_| hand.run_iteration());
    faults::arm_site(Site::Scheduler, EVERY);
    (0..2).for_each(|_| hand.run_iteration());
    assert_eq!(faults::disarm_site().hit, 2);
    for reader in &mut readers {
        let last = std::iter::from_fn(|| reader.take()).last().expect("an end");
        assert!(last.error.is_some_and(|error| error.contains("failed and recovered")));
    }
    assert_eq!(engine.metrics().recoveries.get(), 2);
    drop(readers);
    hand.run_iteration();
    assert_eq!((engine.reserved(), engine.metrics().failed.get()), ((0, 0), 3));
    let mut reader = engine.submit(greedy(&prompt, 4)).unwrap();
    (0..8).for_each(|_| hand.run_iteration());
    assert_eq!(reader.take().unwrap().tokens.iter().map(|t| t.id).collect::<Vec<_>>(), says(&prompt, 4));
}

#[test]
fn an_engine_that_goes_round_without_getting_anywhere_starts_over() {
    own_process!();
    hide_injected_panics();
    let (bench, _) = recall_bench(Shape::default());
    let (engine, mut hand) = by_hand(bench);
    let limit = std::time::Duration::from_millis(100);
    engine.set_stall_limit(limit);
    let prompt: Vec<u32> = (0..40).collect();
    let mut reader = engine.submit(greedy(&prompt, 4)).unwrap();
    let mut other = engine.submit(greedy(&prompt, 4)).unwrap();
    (0..3).for_each(|_| hand.run_iteration());
    let stuck = |hand: &mut plimsoll_engine::testing::ByHand<_>, recoveries| {
        faults::arm_site(Site::NoStep, EVERY);
        while engine.metrics().recoveries.get() < recoveries {
            hand.run_iteration();
            std::thread::sleep(limit / 10);
        }
        assert!(faults::disarm_site().hit > 3);
    };
    stuck(&mut hand, 1);
    // The first panic is recovered: everything is computed again.
    (0..12).for_each(|_| hand.run_iteration());
    for reader in [&mut reader, &mut other] {
        let ids: Vec<u32> = std::iter::from_fn(|| reader.take()).flat_map(|d| d.tokens).map(|t| t.id).collect();
        assert_eq!(ids, says(&prompt, 4));
    }
    // A second panic without any progress in between ends the request.
    let mut lost = engine.submit(greedy(&prompt, 4)).unwrap();
    stuck(&mut hand, 3);
    assert!(lost.take().is_some_and(|delta| delta.error.is_some()), "it ended");
    assert_eq!(engine.reserved().1, 0);
}
