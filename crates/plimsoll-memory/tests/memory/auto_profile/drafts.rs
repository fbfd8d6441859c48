//! A draft model beside the main one: sizing includes its weights, its KV cache and its scratch. It is tested alone and together with the
//! main model (A16).

use super::attempts::{fails, usual_target};
use super::fake::{ATTENTION, CELL, Fake, GIB, production, usual_config};
use plimsoll_memory::sizing::{EMERGENCY_RESERVE_BYTES, Mode, ProfileConfig, auto_profile};

/// 4 GiB of weights, an eighth of the main model's KV cache for each token, 1 GiB of scratch.
const DRAFT_CELL: u64 = CELL / 8;

fn with_draft() -> (ProfileConfig, Fake) {
    let mut fake = Fake::usual();
    fake.load("draft weights", 4 * GIB);
    fake.cell += DRAFT_CELL;
    fake.draft = Some(GIB);
    (ProfileConfig { cell_bytes: CELL + DRAFT_CELL, ..usual_config() }, fake)
}

fn self_tests(fake: &Fake) -> Vec<&str> {
    fake.log.iter().map(String::as_str).filter(|line| line.starts_with("self-test")).collect()
}

#[test]
fn a16_the_draft_model_is_tested_alone_and_together() {
    let one = ["self-test", "self-test draft", "self-test both"];
    let (cfg, mut fake) = with_draft();
    auto_profile(&cfg, &mut fake).unwrap();
    assert_eq!(self_tests(&fake), [one, one].concat(), "in the probe and in production");
    for mode in [Mode::Pinned { tokens: 100_000 }, Mode::Planned { tokens: 100_000, state_slots: 0 }] {
        let (cfg, mut fake) = with_draft();
        auto_profile(&ProfileConfig { mode, ..cfg }, &mut fake).unwrap();
        assert_eq!(self_tests(&fake), one, "{mode:?}");
    }
}

#[test]
fn a16_the_peak_is_that_of_both_together() {
    let (cfg, mut fake) = with_draft();
    let outcome = auto_profile(&cfg, &mut fake).unwrap();
    // By hand: 80 − 10 of peers − 18 − 4 of weights − 2 − 1 of scratch at once, and the usual rest.
    let room = 45 * GIB - ATTENTION - EMERGENCY_RESERVE_BYTES;
    let tokens = (u128::from(room) * 95 / 100 / u128::from(CELL + DRAFT_CELL)) as u64 / 16 * 16;
    assert_eq!(outcome.shape.tokens, tokens);
    assert!(tokens < usual_target());
}

#[test]
fn a16_a_draft_that_does_not_fit_is_named() {
    // Alone the draft model needs more than is left: the probe finds this.
    let (cfg, mut fake) = with_draft();
    fake.draft = Some(60 * GIB);
    let text = fails(&cfg, &mut fake).to_string();
    assert!(text.contains("'draft workspace'"), "{text}");
    // Alone the draft model fits, together with the main model it does not.
    let (cfg, mut fake) = with_draft();
    fake.draft = Some(46 * GIB);
    let text = fails(&cfg, &mut fake).to_string();
    assert!(text.contains("'draft workspace'"), "{text}");
    assert!(self_tests(&fake).contains(&"self-test both"));
    assert!(production(&fake).is_empty() && fake.held("kv") == 0);
}

#[test]
fn e27_a_draft_of_another_cell_size_is_part_of_the_cell() {
    let (cfg, mut fake) = with_draft();
    auto_profile(&cfg, &mut fake).unwrap();
    // Without the draft's share the plan is too large for its own pools: the build is refused, the server is not killed.
    let (cfg, mut fake) = with_draft();
    let forgetful = ProfileConfig { cell_bytes: CELL, ..cfg };
    let built = auto_profile(&forgetful, &mut fake).map(|outcome| outcome.shape.tokens);
    assert!(built.is_err() || built.is_ok_and(|tokens| tokens * (CELL + DRAFT_CELL) <= 45 * GIB));
}
