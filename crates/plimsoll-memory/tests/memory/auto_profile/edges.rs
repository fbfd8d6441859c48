//! Edge cases of the specification's list that need no engine: one row each, by the list's number.

use super::fake::{CELL, Fake, GIB, MIB, Wrong, has_negative_number, production, usual_config};
use plimsoll_memory::sizing::{Mode, ProfileConfig, SizingError, SizingWarning, StatePool, auto_profile};

/// The expected result of a row: a check of the tokens, or parts of the message.
enum Expect {
    Starts(fn(u64) -> bool),
    Says(&'static [&'static str]),
}
use Expect::{Says, Starts};

type Row = (&'static str, fn(&mut ProfileConfig), fn(&mut Fake), Expect);

fn same(_: &mut ProfileConfig) {}
fn usual(_: &mut Fake) {}

const ROWS: &[Row] = &[
    (
        "1 probe does not fit",
        same,
        |f| f.ledger().peers = 62 * GIB - 400 * MIB,
        Says(&["the probe of 8256 KV tokens", "bytes) are missing"]),
    ),
    (
        "1 probe fits, its scratch does not",
        same,
        |f| f.ledger().peers = 60 * GIB,
        Says(&["The probe of 8256", "'workspace'"]),
    ),
    (
        "2 target below probe",
        |c| {
            c.max_seq_len = 4096;
            c.batch_max_tokens = 1024
        },
        |f| f.ledger().peers = 59 * GIB + 340 * MIB,
        Starts(|t| (1024..8192).contains(&t)),
    ),
    (
        "3 target below one prefill step",
        |c| {
            c.max_seq_len = 1024;
            c.batch_max_tokens = 8100
        },
        |f| f.ledger().peers = 59 * GIB + 300 * MIB,
        Says(&["fewer than the 8100 of one prefill step", "--batch-max-tokens to at most"]),
    ),
    (
        "4 one token short",
        |c| c.max_seq_len = 773_377,
        usual,
        Says(&["773377", "--max-req-total-len to at most 773376"]),
    ),
    (
        "5 preset to zero",
        |c| c.mode = Mode::Pinned { tokens: 0 },
        usual,
        Says(&["--max-total-token-num must not be zero"]),
    ),
    (
        "5 preset beyond the device",
        |c| c.mode = Mode::Pinned { tokens: 900_000 },
        usual,
        Says(&["--max-total-token-num 900000 needs", "at most 851968 tokens fit"]),
    ),
    (
        "5 preset beyond arithmetic",
        |c| c.mode = Mode::Pinned { tokens: u64::MAX },
        usual,
        Says(&["at most 851968 tokens fit"]),
    ),
    (
        "5 preset below the context",
        |c| c.mode = Mode::Pinned { tokens: 20_000 },
        usual,
        Says(&["32768", "at most 20000"]),
    ),
    ("6 a single slot", |c| c.running_max_req_size = 1, usual, Starts(|t| t > 700_000)),
    (
        "8 prefill not chunked, room enough",
        |c| (c.batch_max_tokens, c.max_seq_len) = (262_144, 262_144),
        usual,
        Starts(|t| t > 262_144),
    ),
    (
        "8 prefill not chunked, no room",
        |c| (c.batch_max_tokens, c.max_seq_len) = (1 << 20, 1 << 20),
        usual,
        Says(&["the probe of 1048640 KV tokens", "lower --batch-max-tokens"]),
    ),
    (
        "9 more rows than requests",
        |c| (c.graph_max_batch_size, c.running_max_req_size) = (512, 16),
        usual,
        Starts(|t| t > 700_000),
    ),
    (
        "13 a peer starts before the build",
        same,
        |f| {
            f.peers_at_build.insert(2, 30 * GIB);
        },
        Starts(|t| (400_000..500_000).contains(&t)),
    ),
    (
        "13 a peer dies before the build",
        same,
        |f| {
            f.peers_at_build.insert(2, 0);
        },
        Starts(|t| t > 700_000),
    ),
    (
        "13 a peer takes all of it",
        same,
        |f| {
            f.peers_at_build.insert(2, 62 * GIB);
        },
        Says(&["Auto-profile failed after 1 attempt:", "'kv'"]),
    ),
    ("4 the longest request of all", |c| c.max_seq_len = u64::MAX, usual, Says(&["18446744073709551615"])),
    (
        "24 a cell of one byte",
        |c| (c.cell_bytes, c.fraction) = (1, "1".parse().unwrap()),
        |f| f.cell = 1,
        Starts(|t| t > 49 * GIB),
    ),
    ("24 a cell larger than the device", |c| c.cell_bytes = u64::MAX, usual, Says(&["the probe of 8256 KV tokens"])),
];

#[test]
fn the_list_of_edge_cases() {
    for (name, configure, prepare, expect) in ROWS {
        let (mut cfg, mut fake) = (usual_config(), Fake::usual());
        configure(&mut cfg);
        prepare(&mut fake);
        match (auto_profile(&cfg, &mut fake), expect) {
            (Ok(outcome), Starts(good)) => {
                assert!(good(outcome.shape.tokens), "{name}: {} tokens", outcome.shape.tokens);
                let ledger = fake.ledger();
                assert!(ledger.own() + ledger.peers <= ledger.total, "{name}");
            }
            (Err(error), Says(parts)) => {
                let text = error.to_string();
                assert!(parts.iter().all(|part| text.contains(part)), "{name}: {text}");
                assert!(!has_negative_number(&text), "{name}: {text}");
                assert_eq!(fake.ledger().own(), 18 * GIB, "{name}: only the weights are left");
            }
            (Ok(outcome), Says(_)) => {
                panic!("{name}: started with {} tokens", outcome.shape.tokens)
            }
            (Err(error), Starts(_)) => panic!("{name}: {error}"),
        }
    }
}

#[test]
fn e02_production_below_the_probe_is_said() {
    let mut cfg = usual_config();
    (cfg.max_seq_len, cfg.batch_max_tokens) = (4096, 1024);
    let mut fake = Fake::usual();
    fake.ledger().peers = 59 * GIB + 340 * MIB;
    let outcome = auto_profile(&cfg, &mut fake).unwrap();
    assert!(matches!(outcome.warnings.as_slice(), [SizingWarning::BelowProbe { probe: 8192, .. }]));
}

#[test]
fn e10_decode_without_plans_is_tested_at_its_full_width() {
    let mut cfg = usual_config();
    (cfg.graph_max_batch_size, cfg.running_max_req_size, cfg.eager_decode) = (256, 1000, true);
    assert_eq!((cfg.max_decode_batch(), cfg.probe_tokens()), (1000, 9200));
}

#[test]
fn e13_attempts_after_a_peer_came_stay_inside_what_it_left() {
    let mut fake = Fake::usual();
    fake.peers_at_build.insert(2, 30 * GIB);
    auto_profile(&usual_config(), &mut fake).unwrap();
    let sizes = production(&fake);
    assert_eq!(sizes.len(), 2, "measured anew instead of five per cent at a time: {sizes:?}");
}

#[test]
fn e14_a_shrinking_peer_is_never_negative() {
    let mut fake = Fake::usual();
    // Integrated memory: the system reports more available memory than there is.
    fake.ledger().peers = 0;
    let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
    assert_eq!(outcome.target.unwrap().peers, 0);
}

#[test]
fn e22_e23_scales_padding_and_a_hold_slot_do_not_bend_the_sum() {
    // A constant part of all generations (a hold slot, padding of the last page) counts once in the fixed part.
    let plain = auto_profile(&usual_config(), &mut Fake::usual()).unwrap().shape.tokens;
    let mut fake = Fake::usual();
    fake.load("hold slot", 16 * CELL);
    let held = auto_profile(&usual_config(), &mut fake).unwrap().shape.tokens;
    assert!((16..=32).contains(&(plain - held)), "{}", plain - held);
}

#[test]
fn e44_e45_few_state_slots_are_said_and_draft_tokens_share_them() {
    let state =
        StatePool { slot_bytes: GIB, slots_per_request: 3, tokens_per_request: 4096, min_requests: 1, ratio: None };
    let cfg = ProfileConfig { state: Some(state), ..usual_config() };
    let mut fake = Fake::usual();
    fake.slot_bytes = GIB;
    let outcome = auto_profile(&cfg, &mut fake).unwrap();
    let probe = fake.built[0];
    assert_eq!(probe.state_slots, 24, "half of what is free, in whole requests");
    assert!(outcome.warnings.contains(&SizingWarning::ProbeSlots { slots: 24, batch: 8, wanted: 64 }));
    assert_eq!(outcome.shape.state_slots % 3, 0);
    // Not even one request: the shortfall is named.
    let state = StatePool { slot_bytes: 30 * GIB, ..state };
    let mut fake = Fake::usual();
    fake.slot_bytes = 30 * GIB;
    let error = auto_profile(&ProfileConfig { state: Some(state), ..usual_config() }, &mut fake).map(drop).unwrap_err();
    assert!(matches!(error, SizingError::ProbeDoesNotFit { state_slots: 3, .. }), "{error}");
}

#[test]
fn e39_a_reserve_belongs_to_one_pool_build() {
    let mut fake = Fake::usual();
    fake.wrong.insert(2, Wrong::Short(1));
    fake.keep_at_teardown.insert(2, "state");
    let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
    assert_eq!(outcome.attempts, 2, "an empty state pool that survives holds nothing");
}

#[test]
fn e40_the_same_start_twice_gives_the_same_plan() {
    let run = || {
        let mut fake = Fake::usual();
        let outcome = auto_profile(&usual_config(), &mut fake).unwrap();
        (outcome.shape, outcome.target, fake.log)
    };
    assert_eq!(run(), run());
}
