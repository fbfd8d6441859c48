//! Refused heap memory over a whole request life.

use std::sync::Arc;

use plimsoll_engine::Refusal;
use plimsoll_engine::testing::by_hand;
use plimsoll_memory::{Component, EmergencyReserve, Ledger, faults, heap};

use super::hide_injected_panics;
use super::life::{Fate, REQUESTS, Watched, calm, live, requests};
use crate::common::recall::{Shape, recall_bench};
use crate::process::own_process;

/// Arms a small emergency reserve for the test.
fn arm_reserve() {
    let ledger = Arc::new(Ledger::new());
    ledger.plan(Component::EmergencyReserve, 1 << 16);
    drop(heap::arm(EmergencyReserve::map(&ledger, 1 << 16).unwrap()));
}

#[test]
fn the_engine_thread_survives_every_refusal_without_a_reserve() {
    own_process!();
    hide_injected_panics();
    drop(heap::disarm());
    let script = requests();
    let calm = calm(&script, Watched::Rounds);
    let mut swept = 0;
    for nth in 1.. {
        let before = heap::in_use();
        faults::arm_thread(nth);
        let life = live(&script, Watched::Rounds);
        let tally = faults::disarm_thread();
        assert!(heap::in_use() <= before, "call {nth}: something is left of the engine");
        if tally.hit == 0 {
            assert_eq!(tally.seen, nth - 1, "the calls of a life are always the same");
            break;
        }
        swept += 1;
        life.assert_others_as_in(&calm, &format!("call {nth}"));
        assert_eq!(life.fates(Fate::Failed), 1, "call {nth}: {:?}", life.heard);
        assert_eq!(life.counted.failed, 1);
    }
    println!("{swept} heap calls of the engine thread were refused, one at a time");
    assert!(swept > 50, "{swept} calls only: the script has lost something");
}

#[test]
#[ignore = "soak"]
fn a_refused_allocation_is_paid_by_the_reserve() {
    own_process!();
    hide_injected_panics();
    let script = requests();
    arm_reserve();
    let calm = calm(&script, Watched::Everything);
    let mut swept = 0;
    for nth in 1.. {
        arm_reserve();
        let released = heap::blocks_released();
        faults::arm_thread(nth);
        let life = live(&script, Watched::Everything);
        let tally = faults::disarm_thread();
        if tally.hit == 0 {
            assert_eq!(tally.seen, nth - 1);
            break;
        }
        swept += 1;
        let paid = (heap::reserve_blocks_missing(), heap::blocks_released() - released);
        assert_eq!(paid, (1, 1), "call {nth}: a block of the emergency reserve paid for it");
        assert_eq!(life.heard, calm.heard, "call {nth}");
    }
    drop(heap::disarm());
    println!("{swept} heap calls of clients and engine were refused with a emergency reserve");
    assert!(swept > 100, "{swept} calls only");
}

#[test]
fn a_request_whose_memory_is_refused_is_told_503_before_it_starts() {
    own_process!();
    hide_injected_panics();
    let (bench, _) = recall_bench(Shape::default());
    let (engine, mut hand) = by_hand(bench);
    let mut swept = 0;
    for request in requests() {
        faults::arm_thread(0);
        drop(hand_over(&engine, request.clone()).unwrap());
        let calls = faults::disarm_thread().seen;
        hand.run_iteration();
        for nth in 1..=calls {
            // The last call is for the outbox, which only the emergency reserve can provide.
            if nth == calls {
                arm_reserve();
            }
            let before = heap::in_use();
            faults::arm_thread(nth);
            let answer = hand_over(&engine, request.clone());
            assert_eq!(faults::disarm_thread().hit, 1);
            swept += 1;
            match answer {
                Ok(reader) if nth == calls => drop(reader),
                Err(Refusal::Unavailable { message, retry_after_s: 1.. }) if nth < calls => {
                    assert!(message.contains("memory ran short"), "{message}");
                }
                other => panic!("call {nth} of {calls}: {other:?}"),
            }
            drop(heap::disarm());
            hand.run_iteration();
            assert_eq!(engine.reserved(), (0, 0), "call {nth} of {calls}");
            assert!(heap::in_use() <= before, "call {nth} of {calls}");
        }
    }
    drop(heap::disarm());
    println!("{swept} heap calls of submission were refused");
    assert!(swept >= 5 * REQUESTS, "{swept} calls only");
}

fn hand_over(
    engine: &plimsoll_engine::EngineHandle,
    request: plimsoll_engine::Request,
) -> Result<plimsoll_engine::Reader, Refusal> {
    faults::under(|| engine.submit(request))
}
