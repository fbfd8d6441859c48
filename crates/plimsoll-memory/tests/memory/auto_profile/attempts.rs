//! The steps from probe to self-test on one rank.

use super::fake::{ATTENTION, CELL, Fake, GIB, MIB, Wrong, has_negative_number, production, usual_config};
use plimsoll_memory::sizing::diagnose::Stage;
use plimsoll_memory::sizing::{
    EMERGENCY_RESERVE_BYTES, Fraction, Mode, PoolPhase, ProfileConfig, ShadowReport, SizingError, SizingInput,
    SizingWarning, StatePool, auto_profile, check_sizes,
};
use proptest::prelude::*;

pub fn fails(cfg: &ProfileConfig, fake: &mut Fake) -> SizingError {
    match auto_profile(cfg, fake) {
        Ok(outcome) => panic!("started with {} tokens", outcome.shape.tokens),
        Err(error) => {
            assert!(!has_negative_number(&error.to_string()), "{error}");
            error
        }
    }
}

/// Returns the tokens that [`Fake::usual`] must arrive at, calculated from its parts.
pub fn usual_target() -> u64 {
    let room = 80 * GIB - 10 * GIB - 18 * GIB - 2 * GIB - ATTENTION - EMERGENCY_RESERVE_BYTES;
    let tokens = u128::from(room) * 95 / 100 / u128::from(CELL);
    tokens as u64 / 16 * 16
}

fn shrink(tokens: u64) -> u64 {
    tokens * 95 / 100 / 16 * 16
}

#[test]
fn a02_pinned_capacity_is_used_bit_exactly() {
    let cfg = ProfileConfig { mode: Mode::Pinned { tokens: 100_003 }, ..usual_config() };
    let mut fake = Fake::usual();
    let outcome = auto_profile(&cfg, &mut fake).unwrap();
    assert_eq!((outcome.shape.tokens, outcome.probe_tokens), (100_003, None), "not even rounded to pages");
    assert_eq!((outcome.emergency_reserve_bytes, outcome.target), (0, None));
    assert_eq!(fake.built.len(), 1);
}

#[test]
fn a09_the_probe_may_be_smaller_than_the_longest_context() {
    let cfg = ProfileConfig { max_seq_len: 262_144, batch_max_tokens: 4096, ..usual_config() };
    assert!(cfg.probe_tokens() < cfg.max_seq_len);
    let mut fake = Fake::usual();
    assert!(auto_profile(&cfg, &mut fake).is_ok());
    assert_eq!(fake.built[0].tokens, 8192);
    // Every other check still applies.
    assert!(matches!(check_sizes(PoolPhase::Probe, 4095, &cfg), Err(SizingError::BatchExceedsCapacity { .. })));
    let zero = ProfileConfig { cell_bytes: 0, ..cfg };
    assert!(matches!(fails(&zero, &mut Fake::usual()), SizingError::Zero { .. }));
}

#[test]
fn a10_after_the_rebuild_the_context_must_fit() {
    let mut cfg = usual_config();
    cfg.max_seq_len = usual_target() + 1;
    let error = fails(&cfg, &mut Fake::usual());
    let text = error.to_string();
    assert!(matches!(error, SizingError::ContextDoesNotFit { .. }), "{text}");
    assert!(text.contains(&cfg.max_seq_len.to_string()));
    assert!(text.contains(&format!("at most {}", usual_target())), "{text}");
    cfg.max_seq_len -= 1;
    assert!(auto_profile(&cfg, &mut Fake::usual()).is_ok(), "not one token too many");
    // Personal mode shortens the context instead.
    cfg.max_seq_len = 10_000_000;
    cfg.clamp_context = true;
    let outcome = auto_profile(&cfg, &mut Fake::usual()).unwrap();
    assert_eq!(outcome.max_seq_len, usual_target());
    assert!(outcome.warnings.contains(&SizingWarning::ContextClamped { from: 10_000_000, to: usual_target() }));
}

pub fn hybrid_config() -> ProfileConfig {
    let state = StatePool {
        slot_bytes: 50 * MIB,
        slots_per_request: 2,
        tokens_per_request: 8192,
        min_requests: 4,
        ratio: None,
    };
    ProfileConfig {
        batch_max_tokens: 4096,
        graph_max_batch_size: 128,
        max_seq_len: 65_536,
        cell_bytes: CELL / 4,
        state: Some(state),
        ..usual_config()
    }
}

pub fn hybrid_device() -> Fake {
    let mut fake = Fake::new(80 * GIB, 60 * GIB, 0, GIB);
    fake.cell = CELL / 4;
    fake.slot_bytes = 50 * MIB;
    fake
}

#[test]
fn a11_a_hybrid_model_starts_where_larger_probes_starved_it() {
    let (cfg, mut fake) = (hybrid_config(), hybrid_device());
    let outcome = auto_profile(&cfg, &mut fake).unwrap();
    let probe = fake.built[0];
    assert_eq!(probe.tokens, 8192);
    assert!(probe.state_slots >= 2 * 64, "the largest decode step of the probe is worth something");
    assert!(outcome.shape.state_slots >= 2 * 4);
    assert!(outcome.shape.tokens >= 65_536);
    // The earlier formulas, on the same device: the probe alone leaves no room for the state of a decode batch.
    for starving in [128 * (4096 + 256), 262_144 + 128] {
        let cfg = ProfileConfig { probe_floor_tokens: starving, cell_bytes: CELL, max_seq_len: 8192, ..cfg.clone() };
        let mut fake = hybrid_device();
        fake.cell = CELL;
        let slots = match auto_profile(&cfg, &mut fake) {
            Ok(_) => fake.built[0].state_slots,
            Err(_) => 0,
        };
        assert!(slots < 2 * 64, "{starving}: {slots}");
    }
    // The state is fixed from the first production attempt on. It is sized with KV, not on top of it.
    let split = outcome.shape.tokens * (CELL / 4) + outcome.shape.state_slots * 50 * MIB;
    assert!(split <= outcome.target.unwrap().budget);
}

#[test]
fn a14_after_every_self_test_all_pools_are_full() {
    for wrong in [Wrong::Leaky, Wrong::ShortAndLeaky] {
        for run in [1, 2] {
            let mut fake = Fake::usual();
            fake.wrong.insert(run, wrong);
            let error = fails(&usual_config(), &mut fake);
            let SizingError::SelfTestLeak { pool, free, total } = &error else { panic!("{error}") };
            assert_eq!((pool.as_str(), total - free), ("kv", 1));
            assert_eq!(fake.held("kv"), 0);
        }
    }
}

#[test]
fn a15_other_errors_are_themselves_and_never_retried() {
    for (run, mode) in [(1, Mode::Auto), (2, Mode::Auto), (1, Mode::Pinned { tokens: 100_000 })] {
        let mut fake = Fake::usual();
        fake.wrong.insert(run, Wrong::Bug);
        let error = fails(&ProfileConfig { mode, ..usual_config() }, &mut fake);
        assert!(matches!(error, SizingError::Other(_)));
        assert_eq!(error.to_string(), "shape mismatch: [3, 4] and [4, 4]");
        assert_eq!(fake.self_tests, run);
        assert_eq!(fake.held("kv"), 0, "nothing is left standing");
    }
}

#[test]
fn a17_nothing_turns_the_self_test_off() {
    let mut fake = Fake::usual();
    auto_profile(&ProfileConfig { mode: Mode::Pinned { tokens: 100_000 }, ..usual_config() }, &mut fake).unwrap();
    assert_eq!(fake.self_tests, 1, "pinned keeps a single pass");
    let mut fake = Fake::usual();
    let mode = Mode::Planned { tokens: 100_000, state_slots: 0 };
    auto_profile(&ProfileConfig { mode, ..usual_config() }, &mut fake).unwrap();
    assert_eq!(fake.self_tests, 1, "and so does a plan that holds");
    for (name, source) in [
        ("attempts", include_str!("../../../src/sizing/attempts.rs")),
        ("pinned", include_str!("../../../src/sizing/pinned.rs")),
        ("planned", include_str!("../../../src/sizing/planned.rs")),
        ("config", include_str!("../../../src/sizing/config.rs")),
        ("checks", include_str!("../../../src/sizing/checks.rs")),
    ] {
        assert!(!source.contains("env::") && !source.contains("env!"), "{name} reads the environment");
    }
}

#[test]
fn a18_a_leak_in_any_teardown_names_the_survivor() {
    // Generation 1 is the probe, 2 and 3 are attempts that run out of memory.
    for generation in 1..=3 {
        for owner in ["kv", "attention"] {
            let mut fake = Fake::usual();
            fake.wrong.extend([(2, Wrong::Short(1)), (3, Wrong::Short(1))]);
            fake.keep_at_teardown.insert(generation, owner);
            let error = fails(&usual_config(), &mut fake);
            let SizingError::LeakedGeneration { generation: found, survivors, released, expected } = &error else {
                panic!("{error}")
            };
            assert_eq!(*found, generation);
            assert!(survivors.starts_with(owner), "{error}");
            assert_eq!(released < expected, owner == "kv", "{error}");
        }
    }
}

#[test]
fn a18_memory_that_no_ledger_line_shows_is_missed_too() {
    for generation in 1..=2 {
        let mut fake = Fake::usual();
        fake.wrong.insert(2, Wrong::Short(1));
        fake.slack_at_teardown.push(generation);
        let error = fails(&usual_config(), &mut fake);
        assert!(matches!(error, SizingError::LeakedGeneration { generation: g, .. } if g == generation), "{error}");
        assert!(error.to_string().ends_with("still held by: nothing the ledger knows"), "{error}");
    }
}

#[test]
fn a19_no_generation_outlives_its_successor() {
    let mut fake = Fake::usual();
    fake.wrong.extend([(2, Wrong::Short(1)), (3, Wrong::Short(1))]);
    let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
    let numbers: Vec<u32> = fake.built.iter().map(|s| s.generation).collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
    // The ledger has the bytes of one generation, the last one.
    assert_eq!(fake.held("kv"), outcome.shape.tokens * CELL);
    assert_eq!(fake.held("attention"), ATTENTION);
    let steps: Vec<&str> =
        fake.log.iter().filter(|l| !l.starts_with("log")).map(|l| l.split(' ').next().unwrap()).collect();
    let attempt = ["build", "reserve", "self-test", "teardown"];
    assert_eq!(steps, [&["build", "self-test", "teardown"][..], &attempt, &attempt, &attempt[..3]].concat());
}

#[test]
fn a20_rebuilt_and_pinned_servers_are_built_alike() {
    let mut rebuilt = Fake::usual();
    let auto = auto_profile(&usual_config(), &mut rebuilt).unwrap();
    let mut fresh = Fake::usual();
    let mode = Mode::Pinned { tokens: auto.shape.tokens };
    let pinned = auto_profile(&ProfileConfig { mode, ..usual_config() }, &mut fresh).unwrap();
    assert_eq!((auto.shape.tokens, auto.shape.state_slots), (pinned.shape.tokens, pinned.shape.state_slots));
    assert_eq!((auto.shape.phase, auto.max_seq_len), (pinned.shape.phase, pinned.max_seq_len));
}

#[test]
fn a21_reserve_follows_the_rebuild_and_goes_with_the_teardown() {
    let mut fake = Fake::usual();
    fake.wrong.insert(2, Wrong::Short(1));
    let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
    let line = |start: &str| fake.log.iter().position(|l| l.starts_with(start)).unwrap();
    assert!(line("reserve") > line("teardown"), "not in the probe");
    assert_eq!(fake.held("reserve"), EMERGENCY_RESERVE_BYTES, "one, in the ledger");
    assert_eq!(outcome.emergency_reserve_bytes, EMERGENCY_RESERVE_BYTES);
    drop(outcome);
    assert_eq!(fake.held("reserve"), 0);
    // An emergency reserve that does not fit shrinks the pools like any other allocation.
    let mut fake = Fake::usual();
    // The weights, the probe's three and its scratch, then three for production: the ninth is the emergency reserve.
    fake.ledger().fail_allocation = vec![9];
    assert_eq!(auto_profile(&usual_config(), &mut fake).unwrap().attempts, 2);
}

#[test]
fn a22_five_percent_less_at_most_three_times() {
    let mut fake = Fake::usual();
    fake.always_short_from = Some(2);
    let error = fails(&usual_config(), &mut fake);
    let SizingError::OutOfMemory(found) = &error else { panic!("{error}") };
    assert_eq!((found.stage, found.attempts), (Stage::Exhausted, 4));
    assert_eq!(fake.self_tests, 1 + 4);
    let first = usual_target();
    let [second, third] = [shrink(first), shrink(shrink(first))];
    assert_eq!(production(&fake), [first, second, third, shrink(third)]);
    assert_eq!((fake.teardowns, fake.held("kv")), (5, 0));
}

#[test]
fn a22_more_than_all_shrinks_could_free_fails_at_once() {
    let mut fake = Fake::usual();
    let freed = (usual_target() - shrink(shrink(shrink(usual_target())))) * CELL;
    fake.wrong.insert(2, Wrong::Short(freed + 1));
    let SizingError::OutOfMemory(found) = fails(&usual_config(), &mut fake) else { panic!() };
    assert_eq!((found.stage, found.attempts, fake.self_tests), (Stage::BeyondKv, 1, 2));
    // One byte less is a reason to try again.
    let mut fake = Fake::usual();
    fake.wrong.insert(2, Wrong::Short(freed));
    assert!(auto_profile(&usual_config(), &mut fake).is_ok());
}

#[test]
fn a23_exhaustion_names_attempts_flags_component_shortfall_and_values() {
    let mut fake = Fake::usual();
    fake.load("vision", GIB);
    fake.always_short_from = Some(2);
    let cfg = ProfileConfig { visual_infer_batch_size: 4, ..usual_config() };
    let text = fails(&cfg, &mut fake).to_string();
    let last = *production(&fake).last().unwrap();
    for part in [
        "Auto-profile failed after 4 attempts",
        &last.to_string(),
        "'decode workspace'",
        "1 bytes more",
        "largest component is 'kv'",
        "--batch-max-tokens 4096 (now 8192)",
        "--graph-max-batch-size 63 (now 64)",
        "--visual-infer-batch-size 3 (now 4)",
        &format!("--max-total-token-num {}", (last - last / 20) / 16 * 16),
        "--mem-fraction 0.9 (now 0.95)",
    ] {
        assert!(text.contains(part), "no '{part}' in: {text}");
    }
}

#[test]
fn a24_one_transient_failure_costs_five_percent() {
    let mut fake = Fake::usual();
    fake.wrong.insert(2, Wrong::Short(1));
    let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
    assert_eq!((outcome.attempts, outcome.shape.tokens), (2, shrink(usual_target())));
}

#[test]
fn a25_pinned_means_no_teardown_no_rebuild_one_trim() {
    let mut fake = Fake::usual();
    auto_profile(&ProfileConfig { mode: Mode::Pinned { tokens: 100_000 }, ..usual_config() }, &mut fake).unwrap();
    assert_eq!((fake.teardowns, fake.built.len(), fake.trims, fake.self_tests), (0, 1, 1, 1));
}

#[test]
fn a33_encoder_memory_is_seen_in_any_owner_at_any_time() {
    let sized = |prepare: &dyn Fn(&mut Fake)| {
        let mut fake = Fake::usual();
        prepare(&mut fake);
        let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
        let ledger = fake.ledger();
        assert!(ledger.own() + ledger.peers + 2 * GIB <= ledger.total, "with the scratch of a self-test");
        outcome.shape.tokens
    };
    let (vision, audio) = (6 * GIB, 3 * GIB);
    let one = sized(&|f| {
        f.load("vision", vision);
        f.load("audio", audio)
    });
    let other = sized(&|f| {
        f.load("audio", audio);
        f.load("vision", vision)
    });
    let outside = sized(&|f| f.ledger().peers += vision + audio);
    let mixed = sized(&|f| {
        f.ledger().peers += audio;
        f.load("vision", vision)
    });
    assert!(one == other && one == outside && one == mixed);
    assert!(one < usual_target());
}

#[test]
fn a39_shadow_mode_reports_and_changes_nothing() {
    let run = |mode| {
        let mut fake = Fake::usual();
        let outcome = auto_profile(&ProfileConfig { mode, ..usual_config() }, &mut fake).unwrap();
        (outcome.shape, outcome.shadow, fake.log)
    };
    let (pinned, none, pinned_log) = run(Mode::Pinned { tokens: 500_000 });
    let (shape, report, log) = run(Mode::Shadow { running_tokens: 500_000 });
    assert_eq!((shape, log, none), (pinned, pinned_log, None), "the same calls in the same order");
    let report = report.unwrap();
    assert_eq!((report.chosen_tokens, report.running_tokens), (usual_target(), 500_000));
    assert_eq!(report.delta(), i128::from(usual_target()) - 500_000);
    assert!(report.to_string().contains(&format!("{} more", usual_target() - 500_000)), "{report}");
    // The dry run: arithmetic on numbers alone.
    let input = SizingInput {
        total: 80 * GIB,
        peak_reserved: 35 * GIB,
        probe_tokens: 8192,
        cell_bytes: CELL,
        probe_state_bytes: 0,
        own_reserved_now: 35 * GIB,
        available_now: 35 * GIB,
        emergency_reserve: EMERGENCY_RESERVE_BYTES,
        fraction: Fraction::ONE,
    };
    let report = ShadowReport::new(&usual_config(), &input, 600_000);
    assert_eq!(report.delta(), 577_536 - 600_000);
    assert!(report.to_string().ends_with("auto would choose 577536, 22464 fewer"), "{report}");
    let full = ShadowReport::new(
        &usual_config(),
        &SizingInput { available_now: 0, total: 34 * GIB, own_reserved_now: 34 * GIB, ..input },
        9,
    );
    let refusal = full.refusal.clone().unwrap();
    assert!(refusal.starts_with("no KV page fits"), "{full}");
    // 34.5 GiB of fixed parts and a quarter of emergency reserve in 34: three quarters too many, and a page of 1 MiB.
    assert!(refusal.contains(&(769 * MIB).to_string()), "{full}");
}

#[test]
fn a40_three_smokes() {
    let mut fake = Fake::usual();
    let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
    assert_eq!((outcome.shape.tokens, outcome.attempts, outcome.probe_tokens), (usual_target(), 1, Some(8256)));
    assert!(outcome.warnings.is_empty());

    let pinned = ProfileConfig { mode: Mode::Pinned { tokens: 40_000 }, ..usual_config() };
    assert_eq!(auto_profile(&pinned, &mut Fake::usual()).unwrap().shape.tokens, 40_000);

    let mut fake = Fake::usual();
    fake.wrong.insert(1, Wrong::Short(3 * GIB));
    let text = fails(&usual_config(), &mut fake).to_string();
    assert!(text.starts_with("The probe of 8256 KV tokens ran out of memory: 'decode workspace'"), "{text}");
    assert!(text.contains("--max-total-token-num (no value helps"), "{text}");
    let mut fake = Fake::usual();
    fake.wrong.insert(1, Wrong::Short(3 * GIB));
    let text = fails(&pinned, &mut fake).to_string();
    assert!(text.starts_with("The self-test at --max-total-token-num 40000 ran out of memory"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A8 and A36 over whole start-ups: a start that succeeds fits. A start that fails leaves nothing and reports no absurd numbers.
    #[test]
    fn a08_whatever_starts_fits(
        total in 1u64..100 * GIB, parts in prop::collection::vec(0u64..1000, 3), scratch in 0u64..8 * GIB,
        page in 1u64..200, bmt in 1u64..20_000, gmbs in 1u64..300, running in 1u64..600, context in 1u64..300_000,
        ppm in 1u32..=1_000_000, hybrid in any::<bool>(), clamp in any::<bool>(),
        fail in prop::collection::vec(1u64..30, 0..3),
    ) {
        let share = |i: usize| total / 1000 * parts[i] / 2;
        let mut fake = Fake::new(total, share(0), share(1), scratch);
        let mut cfg = ProfileConfig {
            batch_max_tokens: bmt, graph_max_batch_size: gmbs, running_max_req_size: running, clamp_context: clamp,
            page_tokens: page, fraction: Fraction::from_ppm(ppm).unwrap(), ..ProfileConfig::new(CELL, context)
        };
        if hybrid {
            let slot_bytes = 20 * MIB;
            fake.slot_bytes = slot_bytes;
            cfg.state = Some(StatePool {
                slot_bytes, slots_per_request: 1 + parts[2] % 3, tokens_per_request: 1000, min_requests: 1, ratio: None,
            });
        }
        fake.ledger().fail_allocation = fail.iter().map(|n| n + 1).collect();
        match auto_profile(&cfg, &mut fake) {
            Ok(outcome) => {
                let planned = share(0) + scratch + ATTENTION + cfg.emergency_reserve_bytes
                    + outcome.shape.tokens * CELL + outcome.shape.state_slots * fake.slot_bytes;
                prop_assert!(planned <= total - share(1), "{planned}");
                prop_assert!(outcome.shape.tokens >= bmt && outcome.shape.tokens % page == 0);
                prop_assert!(outcome.max_seq_len <= outcome.shape.tokens);
                prop_assert!(outcome.attempts <= 4);
            }
            Err(error) => {
                let text = error.to_string();
                prop_assert!(!has_negative_number(&text), "{}", text);
                prop_assert_eq!(fake.ledger().own(), share(0), "only the weights are left: {}", text);
            }
        }
    }
}
