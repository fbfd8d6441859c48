//! The sampler against the definition by full sort, against exact probabilities, and on rows no model should produce.

use std::collections::HashMap;

use proptest::prelude::*;

use super::select::{Candidate, Kept};
use super::weights::{UNITS, Weigher};
use super::*;

fn params(temperature: f32, top_k: i64, top_p: f32, min_p: f32) -> SamplingParams {
    SamplingParams { temperature, top_k, top_p, min_p, ..SamplingParams::default() }
}

fn sample(logits: &[f32], params: &SamplingParams, position: u64) -> Result<u32, SampleError> {
    let mut sampler = Sampler::new(logits.len()).unwrap();
    sampler.sample(&mut logits.to_vec(), params, &TokenCounts::default(), position, None)
}

fn pick(logits: &[f32], params: &SamplingParams) -> u32 {
    sample(logits, params, 0).unwrap()
}

/// Logits of roughly the shape models produce: a bell with a long upper tail.
fn row(vocab: usize, seed: u64) -> Vec<f32> {
    let uniform = |bits: u64| (bits >> 11) as f32 / (1_u64 << 53) as f32;
    let bell = |i| (0..4).map(|j| uniform(random_u64(seed, i * 4 + j)) - 0.5).sum::<f32>() * 4.0;
    (0..vocab as u64).map(|i| bell(i) + 18.0 * uniform(random_u64(!seed, i)).powi(64)).collect()
}

/// The kept tokens by the definition: sort all tokens, then apply min-p, top-k and top-p.
fn kept_by_sorting(logits: &[f32], params: &SamplingParams) -> Vec<(u32, u64)> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weigher = Weigher::new(max, params.temperature, params.min_p);
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(|one| !one.1.is_nan()).collect();
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
    let floor = if params.min_p > 0.0 { max + params.temperature * params.min_p.ln() } else { f32::NEG_INFINITY };
    all.retain(|one| one.1 >= floor);
    if params.top_k > 0 {
        all.truncate(params.top_k as usize);
    }
    let weighted: Vec<_> = all.iter().map(|&(id, logit)| (id, weigher.weigh(logit))).collect();
    let target = f64::from(params.top_p) * weighted.iter().map(|one| one.1).sum::<u64>() as f64;
    let mut reached = 0;
    let mut kept: Vec<(u32, u64)> = Vec::new();
    for one in weighted {
        if params.top_p < 1.0 && reached as f64 >= target {
            break;
        }
        reached += one.1;
        kept.push(one);
    }
    kept.retain(|one| one.1 > 0);
    kept.sort_by_key(|one| one.0);
    kept
}

fn drawn_by_sorting(logits: &[f32], params: &SamplingParams, position: u64) -> u32 {
    let kept = kept_by_sorting(logits, params);
    let total: u64 = kept.iter().map(|one| one.1).sum();
    let target = (u128::from(random_u64(params.seed, position)) * u128::from(total)) >> 64;
    let mut passed = 0;
    for (token, weight) in kept {
        passed += u128::from(weight);
        if passed > target {
            return token;
        }
    }
    unreachable!("the target is below the total")
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        // Few distinct values, so that ties are everywhere.
        6 => (-8_i8..8).prop_map(|value| f32::from(value) * 0.5),
        4 => -12.0_f32..12.0,
        1 => Just(f32::NEG_INFINITY),
        1 => prop_oneof![Just(0.0_f32), Just(-0.0), Just(f32::NAN), Just(-1e30), Just(80.0)],
    ]
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(1.0_f32), 0.01_f32..4.0, Just(1e-5), Just(100.0)];
    let top_k = prop_oneof![Just(0_i64), Just(-1), 1_i64..8, 1_i64..400];
    let top_p = prop_oneof![Just(1.0_f32), Just(0.5), 1e-6_f32..1.0];
    let min_p = prop_oneof![3 => Just(0.0_f32), 1 => 0.0_f32..=1.0, 1 => Just(1e-30)];
    (temperature, top_k, top_p, min_p, any::<u64>()).prop_map(|(temperature, top_k, top_p, min_p, seed)| {
        SamplingParams { temperature, top_k, top_p, min_p, seed, ..SamplingParams::default() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1500) })]

    #[test]
    fn draws_equal_those_of_a_full_sort(
        logits in prop::collection::vec(any_logit(), 1..400),
        params in any_params(),
        positions in prop::collection::vec(any::<u64>(), 8),
    ) {
        prop_assume!(logits.iter().any(|&logit| logit > f32::NEG_INFINITY));
        prop_assert!(params.validate(logits.len()).is_ok());
        for position in positions {
            let want = drawn_by_sorting(&logits, &params, position);
            prop_assert_eq!(sample(&logits, &params, position).unwrap(), want);
        }
    }

    #[test]
    fn logprobs_equal_those_of_a_full_sort(
        logits in prop::collection::vec(any_logit(), 1..300), chosen: prop::sample::Index, n in 0_usize..=20,
    ) {
        prop_assume!(logits.iter().any(|&logit| logit > f32::NEG_INFINITY));
        let chosen = chosen.index(logits.len());
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let total: f64 = logits.iter().filter(|it| !it.is_nan()).map(|&it| (f64::from(it) - max).exp()).sum();
        let agree = |got: f32, logit: f32| {
            let want = f64::from(logit) - max - total.ln();
            (f64::from(got) - want).abs() <= 1e-5_f64.max(1e-6 * want.abs())
        };
        let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(|one| !one.1.is_nan()).collect();
        sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        let rank = sorted.iter().position(|one| one.0 == chosen as u32);
        let mut top = Vec::with_capacity(20);
        let said = top_logprobs(&logits, chosen as u32, n, &mut top).unwrap();
        if let Some(rank) = rank.filter(|_| logits[chosen] > f32::NEG_INFINITY) {
            prop_assert_eq!(said.rank as usize, rank + 1);
            prop_assert!(agree(said.logprob, logits[chosen]), "{said:?}");
        } else {
            prop_assert_eq!(said.logprob, f32::NEG_INFINITY);
        }
        sorted.retain(|one| one.1 > f32::NEG_INFINITY);
        sorted.truncate(n);
        prop_assert_eq!(top.len(), sorted.len());
        for (got, want) in top.iter().zip(&sorted) {
            prop_assert_eq!(got.0, want.0);
            prop_assert!(agree(got.1, want.1), "{got:?}");
        }
    }

    #[test]
    fn counts_behave_like_maps(ops in prop::collection::vec((0_u8..3, 0_u32..40), 0..300)) {
        let (mut counts, mut prompt, mut output) = (TokenCounts::new(24).unwrap(), Vec::new(), HashMap::<u32, u32>::new());
        for (op, token) in ops {
            let known = |prompt: &Vec<u32>, output: &HashMap<u32, u32>| {
                prompt.iter().chain(output.keys()).collect::<std::collections::HashSet<_>>().len()
            };
            let room = prompt.contains(&token) || output.contains_key(&token) || known(&prompt, &output) < 24;
            match op {
                0 => {
                    prop_assert_eq!(counts.add_prompt(token).is_ok(), room);
                    if room { prompt.push(token) }
                }
                1 => {
                    prop_assert_eq!(counts.add_output(token).is_ok(), room);
                    if room { *output.entry(token).or_default() += 1 }
                }
                _ => {
                    prop_assert_eq!(counts.remove_output(token).is_ok(), output.contains_key(&token));
                    if let Some(times) = output.get_mut(&token) { *times -= 1 }
                    output.retain(|_, times| *times > 0);
                }
            }
            prop_assert_eq!(counts.distinct(), known(&prompt, &output));
            for token in 0..40 {
                let want = (output.get(&token).copied().unwrap_or(0), prompt.contains(&token));
                prop_assert_eq!(counts.get(token), want);
            }
        }
    }
}

#[test]
fn real_vocabularies_equal_the_full_sort() {
    let vocab = 151_936;
    let mut sampler = Sampler::new(vocab).unwrap();
    let settings = [(1.0, 0, 0.9, 0.0), (0.7, 20, 0.8, 0.0), (1.0, 0, 1.0, 0.0), (2.0, 0, 0.99, 0.0)];
    let more = [(1.0, 50, 1.0, 0.0), (0.6, 0, 0.95, 0.05), (1.5, 5_000, 0.999, 1e-9), (0.05, 0, 0.5, 0.0)];
    for (case, &(temperature, top_k, top_p, min_p)) in settings.iter().chain(&more).enumerate() {
        let logits = row(vocab, case as u64);
        let params = params(temperature, top_k, top_p, min_p);
        for position in 0..3 {
            let got = sampler.sample(&mut logits.clone(), &params, &TokenCounts::default(), position, None);
            assert_eq!(got, Ok(drawn_by_sorting(&logits, &params, position)), "{params:?}");
        }
    }
    assert_eq!(sampler.bytes(), Sampler::bytes_for(vocab));
}

#[test]
fn candidates_sort_by_logit_then_id() {
    let logits = [f32::INFINITY, 3.5, 1e-40, 0.0, -0.0, -1e-40, -2.0, -1e30, f32::NEG_INFINITY];
    for (a, &larger) in logits.iter().enumerate() {
        assert_eq!(Candidate::new(larger, 7).logit(), larger);
        assert_eq!(Candidate::new(larger, u32::MAX).id(), u32::MAX);
        for &smaller in &logits[a + 1..] {
            let (low, high) = (Candidate::new(larger, 1), Candidate::new(smaller, 0));
            assert_eq!(low < high, larger > smaller, "{larger} and {smaller}");
        }
    }
    assert!(Candidate::new(-0.0, 1) < Candidate::new(0.0, 2));
}

#[test]
fn what_is_kept_of_a_flat_row_is_exact() {
    let mut sampler = Sampler::new(100).unwrap();
    let logits = vec![1.5; 100];
    let mut keep = |params: &SamplingParams| {
        sampler.sample(&mut logits.clone(), params, &TokenCounts::default(), 0, None).unwrap();
        let weigher = Weigher::new(1.5, params.temperature, params.min_p);
        let Kept { last, mass } = sampler.keep(&logits, params, weigher);
        (last.id(), mass / UNITS)
    };
    assert_eq!(keep(&params(1.0, 7, 1.0, 0.0)), (6, 7), "the lower ids of equal logits");
    assert_eq!(keep(&params(1.0, 0, 0.25, 0.0)), (24, 25));
    assert_eq!(keep(&params(1.0, 8, 0.5, 0.0)), (3, 4), "top-p of what top-k left");
    assert_eq!(keep(&params(1.0, 8, 1e-9, 1.0)), (0, 1), "one is always left");
}

/// Draws match the probabilities of the definition, computed with the library's exponential in f64.
#[test]
fn frequencies_match_probabilities() {
    let logits: Vec<f32> = (0..24).map(|i| 3.0 * ((i * 7 % 24) as f32 / 24.0).sin() + (i % 3) as f32).collect();
    for (seed, (temperature, top_k, top_p)) in [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.8, 12, 1.0)].into_iter().enumerate() {
        let mut params = params(temperature, top_k, top_p, 0.0);
        params.seed = seed as u64;
        let kept: Vec<u32> = kept_by_sorting(&logits, &params).iter().map(|one| one.0).collect();
        let weight = |id: u32| (f64::from(logits[id as usize]) / f64::from(temperature)).exp();
        let total: f64 = kept.iter().map(|&id| weight(id)).sum();
        let (draws, mut seen) = (200_000, HashMap::<u32, f64>::new());
        let mut sampler = Sampler::new(logits.len()).unwrap();
        for position in 0..draws {
            let got = sampler.sample(&mut logits.clone(), &params, &TokenCounts::default(), position, None).unwrap();
            *seen.entry(got).or_default() += 1.0;
        }
        assert!(seen.keys().all(|id| kept.contains(id)), "only kept tokens are drawn");
        let chi_square: f64 = kept
            .iter()
            .map(|id| {
                let want = draws as f64 * weight(*id) / total;
                (seen.get(id).copied().unwrap_or(0.0) - want).powi(2) / want
            })
            .sum();
        // The 99.9% quantile by Wilson and Hilferty. The draws are fixed, so this holds always or never.
        let freedom = kept.len() as f64 - 1.0;
        let limit = freedom * (1.0 - 2.0 / (9.0 * freedom) + 3.09 * (2.0 / (9.0 * freedom)).sqrt()).powi(3);
        assert!(chi_square < limit, "chi-square {chi_square:.1} of {freedom} degrees, limit {limit:.1}");
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_only() {
    let (logits, other) = (row(5000, 1), row(5000, 2));
    let mut params = params(1.0, 0, 0.95, 0.0);
    params.seed = 42;
    let alone: Vec<_> = (0..50).map(|position| pick_at(&logits, &params, position)).collect();
    let mut shared = Sampler::new(5000).unwrap();
    for position in (0..50).rev() {
        shared.sample(&mut other.clone(), &params, &TokenCounts::default(), position, None).unwrap();
        let got = shared.sample(&mut logits.clone(), &params, &TokenCounts::default(), position, None).unwrap();
        assert_eq!(got, alone[position as usize]);
    }
    params.seed = 43;
    let reseeded: Vec<_> = (0..50).map(|position| pick_at(&logits, &params, position)).collect();
    assert_ne!(alone, reseeded);
}

fn pick_at(logits: &[f32], params: &SamplingParams, position: u64) -> u32 {
    sample(logits, params, position).unwrap()
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    let mut logits = vec![0.0; 300];
    (logits[70], logits[200], logits[71]) = (5.0, 5.0, f32::NAN);
    assert_eq!(sample(&logits, &SamplingParams::greedy(), 9), Ok(70));
    assert_eq!(pick(&[-0.0, 0.0], &SamplingParams::greedy()), 0);
}

#[test]
fn rows_without_a_choice_are_errors() {
    for params in [SamplingParams::greedy(), params(1.0, 2, 0.9, 0.1)] {
        let nan = sample(&[f32::NAN; 70], &params, 0).unwrap_err();
        assert_eq!(nan, SampleError::NotANumber { nans: 70, vocab: 70 });
        let nothing = sample(&[f32::NEG_INFINITY; 70], &params, 0).unwrap_err();
        assert_eq!(nothing, SampleError::NothingAllowed { vocab: 70 });
        let mut sampler = Sampler::new(70).unwrap();
        let none = sampler.sample(&mut [1.0; 70], &params, &TokenCounts::default(), 0, Some(&[0, 0, 0]));
        assert_eq!(none, Err(SampleError::NothingAllowed { vocab: 70 }));
        let short = sampler.sample(&mut [1.0; 69], &params, &TokenCounts::default(), 0, None);
        assert_eq!(short, Err(SampleError::WrongLength { given: 69, vocab: 70 }));
        let infinite = sample(&[1.0, f32::INFINITY, f32::NAN, f32::NEG_INFINITY], &params, 0).unwrap();
        assert_eq!(infinite, 1);
        assert_eq!(sample(&[f32::MAX, f32::MIN], &params, 0).unwrap(), 0);
    }
    assert!(Sampler::new(0).is_err() && Sampler::new(Sampler::VOCAB_MAX + 1).is_err());
}

#[test]
fn a_mask_allows_what_its_bits_say() {
    let logits: Vec<f32> = (0..70).map(|i| i as f32).collect();
    let mut sampler = Sampler::new(70).unwrap();
    let mut greedy = |mask: &[u32]| {
        let params = SamplingParams::greedy();
        sampler.sample(&mut logits.clone(), &params, &TokenCounts::default(), 0, Some(mask)).unwrap()
    };
    assert_eq!(greedy(&[u32::MAX, u32::MAX, u32::MAX]), 69);
    assert_eq!(greedy(&[u32::MAX, 1 << 7 | 1 << 3, 0]), 39);
    assert_eq!(greedy(&[1 << 31]), 31, "tokens beyond the mask are not allowed");
    assert_eq!(greedy(&[1, 0, 0b1000]), 67);
}

#[test]
fn bias_and_penalties_move_logits_as_defined() {
    let mut counts = TokenCounts::new(8).unwrap();
    counts.add_prompt(0).unwrap();
    counts.add_prompt(1).unwrap();
    for token in [2, 2, 2, 3] {
        counts.add_output(token).unwrap();
    }
    let mut params = SamplingParams {
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        logit_bias: vec![(4, -3.0), (3, 1.0)],
        ..SamplingParams::greedy()
    };
    let (mut logits, mut sampler) = ([4.0, -4.0, 8.0, 1.0, 9.0, 2.5], Sampler::new(6).unwrap());
    let got = sampler.sample(&mut logits, &params, &counts, 0, None).unwrap();
    assert_eq!(logits, [2.0, -8.0, 8.0 / 2.0 - 1.75, 2.0 / 2.0 - 0.75, 6.0, 2.5]);
    assert_eq!(got, 4);
    params.logit_bias.push((1, 100.0));
    assert_eq!(sampler.sample(&mut [0.0; 6], &params, &counts, 0, None).unwrap(), 1);
    assert!(params.needs_counts() && !SamplingParams::default().needs_counts());
}

#[test]
fn parameters_out_of_range_are_named() {
    let default = SamplingParams::default;
    let refused = |params: SamplingParams| params.validate(100).unwrap_err().to_string();
    assert_eq!(default().validate(100), Ok(()));
    assert_eq!(SamplingParams { top_k: -1, ..default() }.validate(100), Ok(()));
    let message = refused(SamplingParams { temperature: f32::NAN, ..default() });
    assert_eq!(message, "temperature is NaN, it must be between 0 and 100");
    assert_eq!(refused(SamplingParams { top_p: 0.0, ..default() }), "top_p is 0, it must be above 0 and at most 1");
    assert_eq!(
        refused(SamplingParams { presence_penalty: 2.1, ..default() }),
        "presence_penalty is 2.1, it must be between -2 and 2"
    );
    let more = [
        (SamplingParams { temperature: -0.1, ..default() }, "temperature"),
        (SamplingParams { top_k: -2, ..default() }, "top_k"),
        (SamplingParams { min_p: 1.1, ..default() }, "min_p"),
        (SamplingParams { repetition_penalty: 0.0, ..default() }, "repetition_penalty"),
        (SamplingParams { frequency_penalty: f32::INFINITY, ..default() }, "frequency_penalty"),
        (SamplingParams { logit_bias: vec![(100, 0.0)], ..default() }, "token 100"),
        (SamplingParams { logit_bias: vec![(1, 101.0)], ..default() }, "logit_bias is 101"),
        (SamplingParams { logit_bias: vec![(1, 0.0); LOGIT_BIAS_MAX + 1], ..default() }, "1025"),
    ];
    for (params, part) in more {
        let message = refused(params);
        assert!(message.contains(part), "{message:?} does not name {part:?}");
    }
}

#[test]
fn logprobs_need_room_a_token_and_a_distribution() {
    let mut top = Vec::with_capacity(2);
    let room = top.capacity();
    let asked = room + 1;
    assert_eq!(top_logprobs(&[0.0; 9], 0, asked, &mut top), Err(LogprobError::NoRoom { asked, room }));
    assert_eq!(top_logprobs(&[0.0; 9], 9, 1, &mut top), Err(LogprobError::UnknownToken { token: 9, vocab: 9 }));
    assert!(top_logprobs(&[f32::NAN; 9], 0, 1, &mut top).is_err());
    assert!(top_logprobs(&[f32::INFINITY; 9], 0, 1, &mut top).is_err());
    let said = top_logprobs(&[0.0; 4], 2, 2, &mut top).unwrap();
    assert_eq!((said.rank, top.len(), top[1].0), (3, 2, 1));
    assert!((said.logprob - 0.25_f32.ln()).abs() < 1e-6);
    assert_eq!(top.capacity(), room);
}

/// Tokens from 3 on count together: they win as soon as their sum is above each token before them.
#[test]
fn tokens_that_count_together_win_against_each_other_one() {
    let mut sampler = Sampler::new(6).unwrap();
    let mut chosen = |logits: [f32; 6], allowed: Option<&[u32]>, together: Option<u32>| {
        let (params, counts) = (SamplingParams::greedy(), TokenCounts::default());
        sampler.sample_grouped(&mut logits.clone(), &params, &counts, 0, allowed, together).unwrap()
    };
    // Three of 1.0 are e * 3; one of 2.0 is e * 2.718.
    let row = [0.0, 2.0, -1.0, 0.9, 1.0, 1.1];
    assert_eq!(chosen(row, None, None), 1, "each by itself");
    assert_eq!(chosen(row, None, Some(3)), 5, "together");
    assert_eq!(chosen(row, Some(&[0b011111]), Some(3)), 1, "what the mask rules out does not count");
    assert_eq!(chosen(row, Some(&[0b111000]), Some(3)), 5);
    assert_eq!(chosen(row, Some(&[0b000011]), Some(3)), 1, "none of the group is allowed");
    assert_eq!(
        chosen([f32::NEG_INFINITY, 1.0, 1.0, 1.0, -90.0, -90.0], None, Some(3)),
        1,
        "as likely is not more likely"
    );
    assert_eq!(chosen([0.0, f32::INFINITY, 0.0, 3.0, 3.0, 3.0], None, Some(3)), 1);
    assert_eq!(chosen(row, None, Some(9)), 1, "behind the vocabulary");
    let drawn = |seed, temperature| {
        let params = SamplingParams { temperature, seed, ..SamplingParams::default() };
        let mut sampler = Sampler::new(6).unwrap();
        sampler.sample_grouped(&mut row.clone(), &params, &TokenCounts::default(), 0, None, Some(3)).unwrap()
    };
    assert!((0..50).all(|seed| drawn(seed, 3.0) >= 3), "drawn among the group, whatever the temperature");
}
