//! Routing against a plain sort, grouping against its definition, joining against double precision.

use proptest::prelude::*;

use crate::support::{Random, bits, isas};
use plimsoll_kernels::*;

#[test]
fn logits_beyond_the_sigmoid_choose_the_greatest() {
    let plain = Scoring {
        sigmoid: true,
        correction: &[],
        groups: 1,
        top_groups: 1,
        renormalise: false,
        scale: 1.0,
        expert_scales: &[],
    };
    for isa in isas() {
        let (mut ids, mut weights) = ([9; 2], [f32::NAN; 2]);
        route_scored(isa, &plain, &mut [20.0, 30.0, f32::NAN, 40.0], &mut ids, &mut weights);
        assert_eq!((ids, weights), ([3, 1], [1.0; 2]), "{isa}");
    }
}

proptest! {
    #[test]
    fn the_greatest_are_chosen_and_of_equals_the_first(
        experts in 1usize..80,
        top in 1usize..12,
        levels in 1usize..9,
        renormalise: bool,
        seed in 0u64..1000,
    ) {
        let (mut random, top) = (Random::new(seed), top.min(experts));
        // Few levels: many ties.
        let logits: Vec<f32> = (0..experts).map(|_| random.below(levels) as f32 * 0.7 - 1.0).collect();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let all: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        let chosen: f64 = order[..top].iter().map(|e| f64::from(logits[*e]).exp()).sum();
        let mut first = None;
        for isa in isas() {
            let (mut ids, mut weights) = (vec![u32::MAX; top], vec![f32::NAN; top]);
            route(isa, &mut logits.clone(), &mut ids, &mut weights, renormalise);
            prop_assert!(ids.iter().zip(&order).all(|(id, expected)| *id as usize == *expected), "{:?}", ids);
            for (id, weight) in ids.iter().zip(&weights) {
                let sum = if renormalise { chosen } else { all };
                let expected = f64::from(logits[*id as usize]).exp() / sum;
                prop_assert!((f64::from(*weight) - expected).abs() <= 1e-6, "{} {}", weight, expected);
            }
            let all = (ids, bits(&weights));
            prop_assert_eq!(first.get_or_insert(all.clone()), &all, "{}", isa);
        }
    }

    #[test]
    fn scored_choices_are_those_of_a_sort_within_the_best_groups(
        groups in 1usize..6,
        size in 2usize..9,
        top in 1usize..9,
        sigmoid: bool,
        renormalise: bool,
        seed in 0u64..1000,
    ) {
        let (mut random, experts, top_groups) = (Random::new(seed), groups * size, groups.div_ceil(2));
        let top = top.min(top_groups * size);
        let (logits, correction) = (random.floats(experts), random.floats(experts));
        let all: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        let score = |x: f32| {
            let e = f64::from(x).exp();
            if sigmoid { e / (1.0 + e) } else { e / all }
        };
        let rank: Vec<f64> = (0..experts).map(|e| score(logits[e]) + f64::from(correction[e])).collect();
        let sum = |group: &usize| {
            let mut of: Vec<f64> = rank[group * size..][..size].to_vec();
            of.sort_by(|a, b| b.total_cmp(a));
            of[0] + of[1]
        };
        let mut best: Vec<usize> = (0..groups).collect();
        best.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
        let mut order: Vec<usize> = (0..experts).filter(|e| best[..top_groups].contains(&(e / size))).collect();
        order.sort_by(|a, b| rank[*b].total_cmp(&rank[*a]));
        let chosen: f64 = order[..top].iter().map(|e| score(logits[*e])).sum();
        let scales = if seed % 2 == 0 { random.floats(experts) } else { Vec::new() };
        let of_expert = |id: u32| scales.get(id as usize).map_or(1.0, |scale| f64::from(*scale));
        let scoring = Scoring {
            sigmoid,
            correction: &correction,
            groups,
            top_groups,
            renormalise,
            scale: 2.5,
            expert_scales: &scales,
        };
        let mut first = None;
        for isa in isas() {
            let (mut ids, mut weights) = (vec![u32::MAX; top], vec![f32::NAN; top]);
            route_scored(isa, &scoring, &mut logits.clone(), &mut ids, &mut weights);
            prop_assert!(ids.iter().zip(&order).all(|(id, expected)| *id as usize == *expected), "{:?}", ids);
            for (id, weight) in ids.iter().zip(&weights) {
                let expected = score(logits[*id as usize]) * 2.5 / if renormalise { chosen } else { 1.0 };
                let expected = expected * of_expert(*id);
                prop_assert!((f64::from(*weight) - expected).abs() <= 5e-6, "{} {}", weight, expected);
            }
            let all = (ids, bits(&weights));
            prop_assert_eq!(first.get_or_insert(all.clone()), &all, "{}", isa);
        }
    }

    #[test]
    fn choices_are_grouped_by_expert_in_order(ids in prop::collection::vec(0u32..9, 0..200)) {
        let (mut starts, mut places) = (vec![7; 10], vec![7; ids.len()]);
        group_by_expert(&ids, &mut starts, &mut places);
        let mut sorted: Vec<usize> = (0..ids.len()).collect();
        sorted.sort_by_key(|choice| ids[*choice]);
        for (place, choice) in sorted.iter().enumerate() {
            prop_assert_eq!(places[*choice] as usize, place);
        }
        for (expert, start) in starts.iter().enumerate() {
            let before = ids.iter().filter(|id| (**id as usize) < expert).count();
            prop_assert_eq!(*start as usize, before);
        }
    }

    #[test]
    fn results_join_in_order(cols in 1usize..70, top in 1usize..9, gate in -9f32..9.0, seed in 0u64..1000) {
        let mut random = Random::new(seed);
        let (old, y, weights) = (random.floats(cols), random.floats(20 * cols), random.floats(top));
        let places: Vec<u32> = (0..top).map(|_| random.below(20) as u32).collect();
        for mode in [Mode::Store, Mode::Add] {
            let mut first = None;
            for isa in isas() {
                let mut out = if mode == Mode::Add { old.clone() } else { vec![f32::NAN; cols] };
                combine(isa, &mut out, &y, &places, &weights, mode);
                for (c, actual) in out.iter().enumerate() {
                    let parts = places.iter().zip(&weights);
                    let parts = parts.map(|(p, w)| f64::from(*w) * f64::from(y[*p as usize * cols + c]));
                    let expected = parts.sum::<f64>() + if mode == Mode::Add { f64::from(old[c]) } else { 0.0 };
                    prop_assert!((f64::from(*actual) - expected).abs() <= 2e-6, "{} {}", actual, expected);
                }
                let first = first.get_or_insert_with(|| out.clone());
                prop_assert_eq!(bits(&out), bits(first), "{}", isa);
            }
        }
        let mut first = None;
        for isa in isas() {
            let mut x = old.clone();
            add_gated(isa, &mut x, &y[..cols], gate);
            for (c, actual) in x.iter().enumerate() {
                let expected = f64::from(old[c]) + f64::from(y[c]) / (1.0 + (-f64::from(gate)).exp());
                prop_assert!((f64::from(*actual) - expected).abs() <= 1e-6);
            }
            let first = first.get_or_insert_with(|| x.clone());
            prop_assert_eq!(bits(&x), bits(first), "{}", isa);
        }
    }
}

#[test]
fn logits_that_are_no_numbers_choose_distinct_experts_and_show() {
    for isa in isas() {
        let (mut ids, mut weights) = ([9; 3], [0.0; 3]);
        route(isa, &mut [1.0, f32::NAN, 0.5, 2.0], &mut ids, &mut weights, true);
        let mut sorted = ids;
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|pair| pair[0] < pair[1]) && sorted[2] < 4, "{ids:?}");
        assert!(weights.iter().all(|weight| weight.is_nan()), "{weights:?}");
    }
}
