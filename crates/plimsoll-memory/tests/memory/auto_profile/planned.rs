//! Plan once, build once, test once; and starts for which the plan is wrong. Also the dry run beside a server.

use super::attempts::{fails, hybrid_config, hybrid_device, usual_target};
use super::fake::{CELL, Fake, GIB, Wrong, production, usual_config};
use plimsoll_memory::sizing::{
    EMERGENCY_RESERVE_BYTES, Mode, PoolPhase, ProfileConfig, SizingError, auto_profile, dry_run,
};
use proptest::prelude::*;

fn planned(tokens: u64) -> ProfileConfig {
    ProfileConfig { mode: Mode::Planned { tokens, state_slots: 0 }, ..usual_config() }
}

#[test]
fn a_plan_that_holds_is_built_once_and_tested_once() {
    let mut fake = Fake::usual();
    let outcome = auto_profile(&planned(usual_target()), &mut fake).unwrap();
    assert_eq!((outcome.shape.tokens, outcome.attempts, outcome.probe_tokens), (usual_target(), 1, None));
    assert_eq!((fake.built.len(), fake.self_tests, fake.teardowns), (1, 1, 0));
    assert_eq!(
        (outcome.emergency_reserve_bytes, fake.held("reserve")),
        (EMERGENCY_RESERVE_BYTES, EMERGENCY_RESERVE_BYTES)
    );
    // The arithmetic over the plan's peak is that over a probe's peak.
    let auto = auto_profile(&usual_config(), &mut Fake::usual()).unwrap();
    assert_eq!(outcome.target, auto.target);
    assert_eq!((outcome.shape.phase, outcome.max_seq_len), (auto.shape.phase, auto.max_seq_len));
}

#[test]
fn a_plan_of_one_page_too_many_is_found_out_and_measured_anew() {
    let mut fake = Fake::usual();
    let outcome = auto_profile(&planned(usual_target() + 16), &mut fake).unwrap();
    assert_eq!((outcome.shape.tokens, outcome.probe_tokens), (usual_target(), Some(8256)));
    assert_eq!(production(&fake), [usual_target() + 16, usual_target()]);
    assert!(fake.log.iter().any(|line| line.contains(&format!("{} tokens were planned", usual_target() + 16))));
    assert_eq!(fake.held("kv"), usual_target() * CELL, "nothing of the plan that was given up is left");
}

#[test]
fn a_plan_smaller_than_what_fits_is_kept() {
    // The planner may want a pool no larger than all requests can use.
    let mut fake = Fake::usual();
    let outcome = auto_profile(&planned(100_000), &mut fake).unwrap();
    assert_eq!((outcome.shape.tokens, fake.self_tests), (100_000, 1));
}

#[test]
fn a_plan_that_cannot_be_right_is_not_even_built() {
    for tokens in [0, 900_000, u64::MAX] {
        let mut fake = Fake::usual();
        let outcome = auto_profile(&planned(tokens), &mut fake).unwrap();
        assert_eq!((outcome.shape.tokens, fake.built[0].phase), (usual_target(), PoolPhase::Probe), "{tokens}");
    }
}

#[test]
fn memory_that_runs_out_under_a_plan_sends_it_back_to_the_probe() {
    let mut fake = Fake::usual();
    fake.wrong.insert(1, Wrong::Short(1));
    let outcome = auto_profile(&planned(usual_target()), &mut fake).unwrap();
    assert_eq!((outcome.shape.tokens, outcome.attempts, fake.self_tests), (usual_target(), 1, 3));
    // If every self-test runs out of memory: the plan, the probe, and auto mode's four attempts.
    let mut fake = Fake::usual();
    fake.wrong.insert(1, Wrong::Short(1));
    fake.always_short_from = Some(3);
    assert!(matches!(fails(&planned(usual_target()), &mut fake), SizingError::OutOfMemory(_)));
    assert_eq!((fake.self_tests, fake.held("kv")), (6, 0));
    // A peer that starts between plan and build is counted as a peer.
    let mut fake = Fake::usual();
    fake.peers_at_build.insert(1, 30 * GIB);
    let outcome = auto_profile(&planned(usual_target()), &mut fake).unwrap();
    assert!((400_000..500_000).contains(&outcome.shape.tokens), "{}", outcome.shape.tokens);
}

#[test]
fn errors_and_leaks_under_a_plan_are_what_they_are_anywhere() {
    let mut fake = Fake::usual();
    fake.wrong.insert(1, Wrong::Bug);
    assert!(matches!(fails(&planned(usual_target()), &mut fake), SizingError::Other(_)));
    assert_eq!(fake.self_tests, 1);
    let mut fake = Fake::usual();
    fake.wrong.insert(1, Wrong::Leaky);
    assert!(matches!(fails(&planned(usual_target()), &mut fake), SizingError::SelfTestLeak { .. }));
    let mut fake = Fake::usual();
    fake.keep_at_teardown.insert(1, "kv");
    let error = fails(&planned(usual_target() + 16), &mut fake);
    assert!(matches!(error, SizingError::LeakedGeneration { generation: 1, .. }), "{error}");
}

#[test]
fn a_hybrid_plan_holds_both_pools() {
    let auto = auto_profile(&hybrid_config(), &mut hybrid_device()).unwrap();
    let (tokens, state_slots) = (auto.shape.tokens, auto.shape.state_slots);
    let mut fake = hybrid_device();
    let cfg = ProfileConfig { mode: Mode::Planned { tokens, state_slots }, ..hybrid_config() };
    let outcome = auto_profile(&cfg, &mut fake).unwrap();
    assert_eq!((outcome.shape.tokens, outcome.shape.state_slots, fake.self_tests), (tokens, state_slots, 1));
    let mut fake = hybrid_device();
    let cfg = ProfileConfig { mode: Mode::Planned { tokens, state_slots: state_slots + 2 }, ..hybrid_config() };
    let outcome = auto_profile(&cfg, &mut fake).unwrap();
    assert_eq!(outcome.shape.state_slots, state_slots, "two slots too many are found out");
}

#[test]
fn a39_the_dry_run_probes_reports_and_leaves_nothing() {
    let mut fake = Fake::usual();
    let report = dry_run(&usual_config(), &mut fake, 500_000).unwrap();
    assert_eq!((report.chosen_tokens, report.delta()), (usual_target(), i128::from(usual_target()) - 500_000));
    assert_eq!((fake.built.len(), fake.built[0].phase, fake.teardowns), (1, PoolPhase::Probe, 1));
    assert_eq!(fake.ledger().own(), 18 * GIB, "only the weights are left");
    // Beside a server that holds most of the machine the dry run reports what would be left, and takes none of it.
    let mut fake = Fake::usual();
    fake.ledger().peers += 40 * GIB;
    let report = dry_run(&usual_config(), &mut fake, usual_target()).unwrap();
    assert!(report.delta() < 0 && report.refusal.is_none(), "{report}");
    assert!(report.to_string().contains("fewer"), "{report}");
    // If not even the probe fits, there is nothing to report.
    let mut fake = Fake::usual();
    fake.ledger().peers = 62 * GIB - (256 << 20);
    assert!(matches!(dry_run(&usual_config(), &mut fake, 1).unwrap_err(), SizingError::ProbeDoesNotFit { .. }));
    assert_eq!(fake.self_tests, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever was planned, a successful start passes auto mode's own arithmetic.
    #[test]
    fn whatever_was_planned_what_starts_fits(
        peers in 0u64..70 * GIB, scratch in 0u64..6 * GIB, tokens in 0u64..1_200_000, clamp in any::<bool>(),
        fail in prop::collection::vec(2u64..30, 0..3),
    ) {
        let mut fake = Fake::new(80 * GIB, 10 * GIB, peers, scratch);
        let undisturbed = fail.is_empty();
        fake.ledger().fail_allocation = fail;
        let cfg = ProfileConfig { clamp_context: clamp, ..planned(tokens / 16 * 16) };
        let mut calm = Fake::new(80 * GIB, 10 * GIB, peers, scratch);
        let auto = auto_profile(&ProfileConfig { mode: Mode::Auto, ..cfg.clone() }, &mut calm);
        match auto_profile(&cfg, &mut fake) {
            Ok(outcome) => {
                let target = outcome.target.unwrap();
                prop_assert!(outcome.shape.tokens <= target.tokens);
                prop_assert!(outcome.shape.tokens * CELL <= target.budget);
                let ledger = fake.ledger();
                prop_assert!(ledger.own() + ledger.peers + scratch <= ledger.total);
            }
            Err(error) => {
                prop_assert!(auto.is_err() || !undisturbed, "auto mode starts, the plan does not: {}", error);
                prop_assert_eq!(fake.ledger().own(), 10 * GIB, "only the weights are left: {}", error);
            }
        }
    }
}
