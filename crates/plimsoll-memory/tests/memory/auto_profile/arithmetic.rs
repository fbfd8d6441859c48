//! Pure arithmetic: probe, target, fraction, joint split, decode shape, advice.

use super::fake::{CELL, GIB, MIB, has_negative_number, usual_config};
use plimsoll_memory::sizing::diagnose::{Stage, Suggestion, Value, diagnose};
use plimsoll_memory::sizing::joint::{JointError, JointInput, solve};
use plimsoll_memory::sizing::{
    Component, EMERGENCY_RESERVE_BYTES, Fraction, OutOfMemory, PROBE_FLOOR_TOKENS, ScalesWith, SizingInput,
    SizingWarning, largest_decode, max_decode_batch, probe_tokens, target_tokens,
};
use proptest::prelude::*;

fn fraction(text: &str) -> Fraction {
    text.parse().unwrap()
}

/// Example sizes in GiB: a device of 80, a peak of 35, available 35.
fn golden(probe: u64, share: &str) -> SizingInput {
    SizingInput {
        total: 80 * GIB,
        peak_reserved: 35 * GIB,
        probe_tokens: probe,
        cell_bytes: CELL,
        probe_state_bytes: 0,
        own_reserved_now: 35 * GIB,
        available_now: 35 * GIB,
        emergency_reserve: EMERGENCY_RESERVE_BYTES,
        fraction: fraction(share),
    }
}

#[test]
fn a01_probe_is_one_prefill_and_one_decode_step() {
    assert_eq!(probe_tokens(4096, 128, PROBE_FLOOR_TOKENS), 8192, "4224 is below the floor");
    assert_eq!(probe_tokens(8192, 256, PROBE_FLOOR_TOKENS), 8448);
    assert_eq!(probe_tokens(256, 8, 64), 264, "a tiny device lowers the floor");
    assert_eq!(probe_tokens(262_144, 64, PROBE_FLOOR_TOKENS), 262_208, "without chunked prefill");
    assert_eq!(probe_tokens(u64::MAX, 1, 1), u64::MAX, "saturates");
    let mut cfg = usual_config();
    let probe = cfg.probe_tokens();
    cfg.max_seq_len = 10_000_000;
    assert_eq!(cfg.probe_tokens(), probe, "the longest context does not enter");
    cfg.batch_max_tokens = 8201;
    assert_eq!(cfg.probe_tokens(), 8272, "whole pages");
}

#[test]
fn a03_golden_vectors() {
    for (probe, share, non_kv, budget, tokens) in [
        (278_528, "1.0", 18 * GIB, 51 * GIB + 768 * MIB, 847_872),
        (8192, "1.0", 34 * GIB + 512 * MIB, 35 * GIB + 256 * MIB, 577_536),
        (8192, "0.95", 34 * GIB + 512 * MIB, (35 * GIB + 256 * MIB) / 100 * 95, 548_659),
    ] {
        let target = target_tokens(&golden(probe, share));
        assert_eq!((target.tokens, target.non_kv, target.peers), (tokens, non_kv, 10 * GIB), "probe {probe}");
        assert!(target.budget.abs_diff(budget) < 100, "{} and {budget}", target.budget);
        assert!(target.warnings.is_empty() && target.deficit == 0);
    }
}

#[test]
fn a04_clamps_warn_once_with_both_numbers() {
    let input = SizingInput { peak_reserved: GIB, ..golden(278_528, "1") };
    let target = target_tokens(&input);
    assert_eq!(target.non_kv, 0);
    let [warning] = target.warnings.as_slice() else { panic!("{:?}", target.warnings) };
    let text = warning.to_string();
    assert!(text.contains(&GIB.to_string()) && text.contains(&(278_528 * CELL).to_string()), "{text}");

    let input = SizingInput { available_now: 50 * GIB, ..golden(8192, "1") };
    let target = target_tokens(&input);
    assert_eq!(target.peers, 0);
    assert!(target.tokens > 577_536);
    assert!(matches!(target.warnings.as_slice(), [SizingWarning::PeersClamped { .. }]));
    // A need of exactly the whole memory is no contradiction.
    assert!(target_tokens(&SizingInput { available_now: 45 * GIB, ..input }).warnings.is_empty());
}

#[test]
fn a05_fraction_is_a_share_above_zero() {
    let ratio = target_tokens(&golden(8192, "0.95")).tokens as f64 / target_tokens(&golden(8192, "1")).tokens as f64;
    assert!(ratio > 0.94 && ratio <= 0.95, "{ratio}");
    for text in ["0", "0.0", "-1", "1.01", "NaN", "inf", "", ".", "1e-1", "0.0000001", "1.000001", "+0.5", "0,9"] {
        let error = text.parse::<Fraction>().unwrap_err();
        assert!(error.to_string().contains("above 0 and at most 1"), "{text}: {error}");
    }
    for (text, ppm) in [("1", 1_000_000), ("1.0", 1_000_000), ("0.95", 950_000), (".5", 500_000), ("0.000001", 1)] {
        assert_eq!(fraction(text).ppm(), ppm);
    }
    for value in [0.0, -1.0, 1.01, f64::NAN, f64::INFINITY, 1e-9] {
        assert!(Fraction::try_from(value).is_err(), "{value}");
    }
    assert_eq!(Fraction::try_from(0.95).unwrap(), Fraction::DEFAULT);
    assert_eq!((fraction("0.950").to_string(), Fraction::ONE.to_string()), ("0.95".into(), "1".into()));
}

fn any_input() -> impl Strategy<Value = SizingInput> {
    let bytes = || prop_oneof![0..200 * GIB, Just(0u64), Just(u64::MAX), any::<u64>()];
    let pools = (0u64..1_000_000, 1u64..1 << 20, bytes());
    (bytes(), bytes(), bytes(), bytes(), bytes(), pools, 1u32..=1_000_000).prop_map(
        |(total, peak, own, available, emergency_reserve, (probe, cell, state), ppm)| SizingInput {
            total,
            peak_reserved: peak,
            probe_tokens: probe,
            cell_bytes: cell,
            probe_state_bytes: state,
            own_reserved_now: own,
            available_now: available,
            emergency_reserve,
            fraction: Fraction::from_ppm(ppm).unwrap(),
        },
    )
}

proptest! {
    #[test]
    fn a06_target_is_monotone(input in any_input(), more in 1u64..40 * GIB) {
        let tokens = |input: &SizingInput| target_tokens(input).tokens;
        let base = tokens(&input);
        // More fixed parts, a larger emergency reserve, or less available memory (more peers): never more tokens.
        let peak_reserved = input.peak_reserved.saturating_add(more);
        let emergency_reserve = input.emergency_reserve.saturating_add(more);
        let available_now = input.available_now.saturating_sub(more);
        for worse in [
            SizingInput { peak_reserved, ..input },
            SizingInput { emergency_reserve, ..input },
            SizingInput { available_now, ..input },
        ] {
            prop_assert!(tokens(&worse) <= base);
        }
        // A larger cell enters the probe's share too; with an equal fixed part the result is monotone.
        let bare = SizingInput { probe_tokens: 0, ..input };
        let coarse = SizingInput { cell_bytes: input.cell_bytes.saturating_add(more % 4096), ..bare };
        prop_assert!(tokens(&coarse) <= tokens(&bare));
        // More capacity that is free, or a larger share: never fewer.
        let total = input.total.saturating_add(more);
        let available_now = input.available_now.saturating_add(total - input.total);
        let all = SizingInput { fraction: Fraction::ONE, ..input };
        for better in [SizingInput { total, available_now, ..input }, all] {
            prop_assert!(tokens(&better) >= base);
        }
    }

    #[test]
    fn a08_plan_never_exceeds_what_others_leave(input in any_input()) {
        let target = target_tokens(&input);
        let planned = u128::from(target.non_kv) + u128::from(target.tokens) * u128::from(input.cell_bytes)
            + u128::from(target.emergency_reserve);
        let room = u128::from(input.total).saturating_sub(u128::from(target.peers));
        prop_assert!(planned <= room || target.deficit > 0 && target.tokens == 0);
        prop_assert!(target.deficit == 0 || target.budget == 0);
    }
}

#[test]
fn a13_largest_decode_adapts_to_what_is_free() {
    let shape = |batch, rows: u64, state, bmt, capacity, free| {
        largest_decode(batch, rows, state, bmt, capacity, free).map(|s| (s.batch, s.tokens_per_request, s.total_tokens))
    };
    assert_eq!(shape(8, 100, None, 1024, 4096, 4096), Some((8, 512, 4096)));
    assert_eq!(shape(16, 4, None, 1024, 4096, 4096).map(|s| s.0), Some(4), "request slots");
    assert_eq!(shape(8, 100, None, 256, 100_000, 100_000).map(|s| s.1), Some(256), "prefill bound");
    assert_eq!(shape(64, 100, Some((30, 3)), 256, 100_000, 100_000).map(|s| s.0), Some(10), "state slots");
    assert_eq!(shape(8, 100, None, 1024, 4096, 1001), Some((8, 125, 1000)), "less is free than there is");
    assert_eq!(shape(8, 100, None, 1024, 4, 4), Some((4, 1, 4)), "never more rows than tokens");
    for (batch, rows, state, free) in
        [(1, 9, None, 9), (9, 1, None, 9), (9, 9, Some((3, 2)), 9), (9, 9, None, 1), (9, 9, Some((9, 0)), 0)]
    {
        assert_eq!(shape(batch, rows, state, 16, 100, free), None);
    }
    assert_eq!(
        (max_decode_batch(64, 8, false), max_decode_batch(64, 1000, false), max_decode_batch(64, 1000, true)),
        (8, 64, 1000)
    );
}

fn joint(budget: u64) -> JointInput {
    JointInput {
        budget,
        page_bytes: 16 * CELL,
        page_tokens: 16,
        slot_bytes: 50 * MIB,
        slots_per_request: 2,
        tokens_per_request: 4096,
        min_requests: 1,
        max_requests: 128,
        min_tokens: 8192,
        state_ratio: None,
    }
}

#[test]
fn a35_the_margin_is_applied_once() {
    // Only the pools take memory here, so that the pools' share is the fraction itself.
    let input = SizingInput {
        peak_reserved: 0,
        probe_tokens: 0,
        own_reserved_now: 0,
        available_now: 80 * GIB,
        emergency_reserve: 0,
        ..golden(0, "0.95")
    };
    let target = target_tokens(&input);
    assert_eq!(target.budget, 80 * GIB / 100 * 95 + (80 * GIB % 100) * 95 / 100);
    let split = solve(&joint(target.budget)).unwrap();
    let used = split.state_bytes + split.kv_bytes;
    assert!(used <= target.budget && target.budget - used < 16 * CELL, "one margin, and nothing else is left over");
}

#[test]
fn a37_ratio_and_balance_by_hand() {
    let split = solve(&joint(20 * GIB)).unwrap();
    // A request takes 100 MiB of state and 256 MiB of KV: 57 of them in 20 GiB.
    assert_eq!((split.requests, split.state_slots, split.state_bytes), (57, 114, 5700 * MIB));
    assert_eq!((split.pages, split.tokens), (14_780, 236_480));
    let half = JointInput { state_ratio: Some(fraction("0.5")), ..joint(20 * GIB) };
    assert_eq!(solve(&half).unwrap().requests, 102);
    // If the number of requests is capped, the unused share of the state goes to KV.
    let most = JointInput { state_ratio: Some(fraction("0.9")), max_requests: 10, ..joint(20 * GIB) };
    assert_eq!((solve(&most).unwrap().requests, solve(&most).unwrap().kv_bytes), (10, 19_480 * MIB));
    // Requests that hold hardly any KV must not take the required KV.
    let bare = solve(&JointInput { tokens_per_request: 0, max_requests: 9999, ..joint(20 * GIB) });
    assert_eq!(bare.unwrap().requests, 199);
    let error = solve(&JointInput { state_ratio: Some(fraction("0.99")), ..joint(20 * GIB) }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a state ratio of 0.99 leaves one of the pools below its minimum: use a ratio from 0.004883 to 0.975, or leave it out"
    );
    let error = solve(&joint(512 * MIB)).unwrap_err();
    let JointError::Shortfall { need, budget, .. } = &error else { panic!("{error}") };
    assert_eq!(need - budget, 100 * MIB);
    assert!(error.to_string().contains(&(100 * MIB).to_string()), "{error}");
    assert_eq!(
        solve(&JointInput { slot_bytes: 0, ..joint(GIB) }).unwrap_err().to_string(),
        "the size of a recurrent state slot must not be zero"
    );
}

proptest! {
    #[test]
    fn a37_any_split_honours_both_minima_or_says_why_not(
        budget in prop_oneof![0..100 * GIB, any::<u64>()],
        page_tokens in 1u64..512, cell in 1u64..1 << 20, slot_bytes in prop_oneof![1u64..1 << 30, any::<u64>()],
        slots_per_request in 1u64..9, tokens_per_request in prop_oneof![0u64..1 << 20, any::<u64>()],
        (min_requests, max_requests, min_tokens) in (0u64..300, 0u64..300, 0u64..1 << 20),
        ratio in proptest::option::of(1u32..=1_000_000),
    ) {
        let input = JointInput {
            budget, page_bytes: page_tokens * cell, page_tokens, slot_bytes, slots_per_request, tokens_per_request,
            min_requests, max_requests, min_tokens, state_ratio: ratio.and_then(Fraction::from_ppm),
        };
        match solve(&input) {
            Ok(split) => {
                prop_assert!(split.requests >= min_requests.max(1));
                prop_assert!(split.requests <= max_requests.max(min_requests).max(1));
                prop_assert!(split.tokens >= min_tokens.max(1));
                prop_assert!(split.state_bytes.checked_add(split.kv_bytes).unwrap() <= budget);
                prop_assert_eq!(split.state_bytes, split.state_slots * slot_bytes);
                prop_assert_eq!(split.kv_bytes, split.pages * input.page_bytes);
                prop_assert!(budget - split.state_bytes - split.kv_bytes < input.page_bytes, "KV takes the rest");
            }
            Err(error @ JointError::Shortfall { need, budget, .. }) => {
                prop_assert!(need > budget);
                prop_assert!(!has_negative_number(&error.to_string()));
            }
            Err(JointError::Ratio { least, most, .. }) => {
                prop_assert!(solve(&JointInput { state_ratio: None, ..input }).is_ok(), "without a ratio it fits");
                if least < most {
                    for good in [least, most] {
                        prop_assert!(solve(&JointInput { state_ratio: Some(good), ..input }).is_ok(), "advice {good}");
                    }
                }
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn a36_no_advice_is_negative_or_nonsense(
        tokens in prop_oneof![0u64..100, 0u64..10_000_000, any::<u64>()],
        shortfall in prop_oneof![Just(0u64), 0..100 * GIB, any::<u64>()],
        (bmt, gmbs, visual) in (0u64..100_000, 0u64..600, 0u64..20),
        ppm in 1u32..=1_000_000,
        parts in prop::collection::vec(any::<u64>(), 5),
        with_failure in any::<bool>(),
    ) {
        let mut cfg = usual_config();
        (cfg.batch_max_tokens, cfg.graph_max_batch_size, cfg.visual_infer_batch_size) = (bmt, gmbs, visual);
        cfg.fraction = Fraction::from_ppm(ppm).unwrap();
        use ScalesWith::{Capacity, DecodeBatch, Fixed, PrefillTokens, VisualBatch};
        let components: Vec<Component> = parts.iter().zip([Fixed, PrefillTokens, DecodeBatch, VisualBatch, Capacity])
            .map(|(&bytes, scales_with)| Component { name: "x".into(), bytes, scales_with }).collect();
        let failure = with_failure.then(|| OutOfMemory { component: "y".into(), requested: shortfall, shortfall });
        let found = diagnose(Stage::Exhausted, 4, tokens, failure, &components, &cfg);
        let text = found.to_string();
        prop_assert!(!has_negative_number(&text), "{}", text);
        for advice in &found.advice {
            match (advice.suggested, advice.current) {
                (Suggestion::Lower(Value::Count(new)), Value::Count(old)) => prop_assert!(new >= 1 && new < old),
                (Suggestion::Lower(Value::Share(new)), Value::Share(old)) => prop_assert!(new < old),
                (Suggestion::Lower(_), _) => prop_assert!(false, "a share for a count"),
                (Suggestion::Keep, _) => {}
                (Suggestion::NoValueHelps { missing }, _) => prop_assert!(missing > 0),
            }
            if advice.flag == "--max-total-token-num" && let Suggestion::Lower(Value::Count(new)) = advice.suggested {
                let missing = if with_failure { u128::from(shortfall) } else { 0 };
                prop_assert!(u128::from(tokens - new) * u128::from(CELL) >= missing, "the suggestion frees enough");
                prop_assert_eq!(new % cfg.page_tokens, 0);
            }
        }
    }
}
