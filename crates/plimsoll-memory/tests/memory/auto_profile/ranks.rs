//! Several ranks: the smallest result decides, all decide alike, and none is left waiting.

use super::fake::{Fake, GIB, Link, Wrong, production, usual_config};
use plimsoll_memory::sizing::{ProfileConfig, SizingError, auto_profile};
use std::sync::Arc;

type Report = (Result<u64, SizingError>, Vec<u64>);

/// Runs one rank per device; a collective that not every rank joins fails the test after a while.
fn run(cfg: &ProfileConfig, fakes: Vec<Fake>) -> Vec<Report> {
    let link = Link::new(fakes.len());
    std::thread::scope(|scope| {
        let start = |mut fake: Fake| {
            fake.link = Some(Arc::clone(&link));
            scope.spawn(move || {
                let result = auto_profile(cfg, &mut fake).map(|outcome| outcome.shape.tokens);
                (result, production(&fake))
            })
        };
        let threads: Vec<_> = fakes.into_iter().map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn with_peers(peers: u64) -> Fake {
    Fake::new(80 * GIB, 18 * GIB, peers, 2 * GIB)
}

fn alone(peers: u64) -> u64 {
    auto_profile(&usual_config(), &mut with_peers(peers)).unwrap().shape.tokens
}

#[test]
fn a07_all_ranks_adopt_the_least_in_any_order() {
    let peers = [3 * GIB, 11 * GIB, 0];
    let expected = alone(11 * GIB);
    assert!(expected < alone(3 * GIB));
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        for (result, built) in run(&usual_config(), order.map(|i| with_peers(peers[i])).into()) {
            assert_eq!(result.unwrap(), expected);
            assert_eq!(built, [expected]);
        }
    }
}

#[test]
fn a22_one_rank_out_of_memory_shrinks_all() {
    let mut poor = with_peers(10 * GIB);
    poor.wrong.extend([(2, Wrong::Short(1)), (3, Wrong::Short(1))]);
    let reports = run(&usual_config(), vec![with_peers(10 * GIB), poor, with_peers(0)]);
    let expected: Vec<u64> = reports[1].1.clone();
    assert_eq!(expected.len(), 3);
    for (result, built) in reports {
        assert_eq!((result.unwrap(), &built), (expected[2], &expected));
    }
}

#[test]
fn a22_all_ranks_give_up_together() {
    let mut poor = with_peers(10 * GIB);
    poor.always_short_from = Some(2);
    let reports = run(&usual_config(), vec![with_peers(10 * GIB), poor]);
    for (result, built) in &reports {
        assert_eq!(built.len(), 4);
        let text = result.as_ref().unwrap_err().to_string();
        assert!(text.contains("failed after 4 attempts"), "{text}");
    }
    assert!(reports[0].0.as_ref().unwrap_err().to_string().contains("another rank ran out of memory"));
}

/// Every place where a single rank can fail: the other ranks are told, and end with an error too.
#[test]
fn a22_a_failing_rank_strands_no_request() {
    type Prepare = fn(&mut Fake);
    let cases: [(&str, Prepare); 8] = [
        ("bug in the probe", |f| {
            f.wrong.insert(1, Wrong::Bug);
        }),
        ("bug in the self-test", |f| {
            f.wrong.insert(2, Wrong::Bug);
        }),
        ("short in the probe", |f| {
            f.wrong.insert(1, Wrong::Short(9));
        }),
        ("hopeless in the self-test", |f| {
            f.wrong.insert(2, Wrong::Short(60 * GIB));
        }),
        ("leak in teardown", |f| {
            f.keep_at_teardown.insert(1, "kv");
        }),
        ("slot lost", |f| {
            f.wrong.insert(2, Wrong::Leaky);
        }),
        ("probe does not fit", |f| f.ledger().peers = 61 * GIB + GIB / 2),
        ("nothing fits", |f| f.ledger().peers = 59 * GIB + GIB / 4),
    ];
    // An emergency reserve for which only the crowded rank has no room.
    let cfg = ProfileConfig { emergency_reserve_bytes: GIB, ..usual_config() };
    for (name, prepare) in cases {
        let mut bad = with_peers(0);
        prepare(&mut bad);
        for (rank, (result, _)) in run(&cfg, vec![with_peers(0), bad, with_peers(GIB)]).into_iter().enumerate() {
            let error = result.expect_err(name);
            let elsewhere = error.to_string().contains("another rank");
            assert_eq!(elsewhere, rank != 1, "{name}, rank {rank}: {error}");
        }
    }
}
