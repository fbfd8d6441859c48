//! A token sampled from the top logits equals the token sampled from all logits.

use proptest::prelude::*;

use super::select::Candidate;
use super::*;

/// The first `count` tokens in the order of likelihood, as a device gives them.
fn most_likely(logits: &[f32], count: usize) -> Vec<[f32; 2]> {
    let numbers = (0..).zip(logits).filter(|(_, logit)| **logit > f32::NEG_INFINITY);
    let mut all: Vec<(u32, f32)> = numbers.map(|(id, logit)| (id, *logit)).collect();
    all.sort_by_key(|(id, logit)| Candidate::new(*logit, *id));
    let mut found: Vec<[f32; 2]> = all.iter().map(|(id, logit)| [*logit, *id as f32]).take(count).collect();
    found.resize(count, [0.0, -1.0]);
    found
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        // Few distinct values, so that ties are everywhere.
        6 => (-8_i8..8).prop_map(|value| f32::from(value) * 0.5),
        6 => -12.0_f32..12.0,
        1 => Just(f32::NEG_INFINITY),
        1 => prop_oneof![Just(0.0_f32), Just(-0.0), Just(f32::NAN), Just(-1e30), Just(80.0), Just(1e-40)],
    ]
}

fn any_row() -> impl Strategy<Value = Vec<f32>> {
    let infinite = prop::collection::vec((any::<prop::sample::Index>(), Just(f32::INFINITY)), 0..3);
    let some = prop_oneof![4 => Just(Vec::new()), 1 => infinite];
    (prop::collection::vec(any_logit(), 1..500), some).prop_map(|(mut row, infinite)| {
        for (at, value) in infinite {
            let at = at.index(row.len());
            row[at] = value;
        }
        row
    })
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(0.0_f32), Just(1.0), 0.01_f32..4.0];
    let top_k = prop_oneof![Just(0_i64), 1_i64..8, 1_i64..200];
    let top_p = prop_oneof![Just(1.0_f32), 1e-6_f32..1.0];
    let min_p = prop_oneof![Just(0.0_f32), 0.0_f32..=1.0];
    let penalties = prop_oneof![
        3 => Just([1.0_f32, 0.0, 0.0]),
        1 => (1.0_f32..3.0, 0.0_f32..2.0, 0.0_f32..2.0).prop_map(|(a, b, c)| [a, b, c]),
    ];
    let bias = prop_oneof![Just(Vec::new()), prop::collection::vec((0_u32..500, -100.0_f32..=0.0), 1..6)];
    (temperature, top_k, top_p, min_p, penalties, bias, any::<u64>()).prop_map(
        |(temperature, top_k, top_p, min_p, [repetition_penalty, presence_penalty, frequency_penalty], bias, seed)| {
            let logit_bias = bias;
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logit_bias,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn likely_tokens_tell_what_all_logits_tell(
        logits in any_row(),
        params in any_params(),
        seen in prop::collection::vec((0_u32..500, any::<bool>()), 0..40),
        mask in prop_oneof![Just(None), prop::collection::vec(any::<u32>(), 0..16).prop_map(Some)],
        ended in prop::collection::vec(0_u32..500, 0..4),
        position in any::<u64>(),
    ) {
        let vocab = logits.len();
        let mut counts = TokenCounts::new(64).unwrap();
        for (token, of_prompt) in seen {
            if of_prompt { counts.add_prompt(token).unwrap() } else { counts.add_output(token).unwrap() }
        }
        let narrowed = mask.is_some() || !ended.is_empty();
        // Also with parameters for which all logits would be fetched, a result from the top tokens is right.
        let count = match params.candidates(vocab, narrowed) as usize {
            0 => vocab.min(40),
            count => count,
        };
        let found = most_likely(&logits, count);
        let mut row = logits.clone();
        for id in &ended {
            row.get_mut(*id as usize).into_iter().for_each(|logit| *logit = f32::NEG_INFINITY);
        }
        let mut sampler = Sampler::new(vocab).unwrap();
        let want = sampler.sample(&mut row, &params, &counts, position, mask.as_deref());
        let banned = |id| ended.contains(&id);
        let told = sampler.sample_from_top(&found, &params, &counts, position, mask.as_deref(), banned);
        if let Some(token) = told {
            prop_assert_eq!(Ok(token), want.clone());
        }
        // Without mask, bias and penalties the top tokens always decide, except for draws among infinite logits.
        let asked = params.candidates(vocab, narrowed) > 0;
        let plain = asked && !narrowed && params.logit_bias.is_empty() && !params.needs_counts();
        let finite = params.is_greedy() || logits.iter().all(|logit| *logit < f32::INFINITY);
        if plain && finite && (params.is_greedy() || (1..=128).contains(&params.top_k)) {
            prop_assert_eq!(told, want.ok());
        }
    }
}

#[test]
fn few_candidates_are_asked_for_and_none_where_they_cannot_tell() {
    let usual = || SamplingParams { temperature: 0.7, ..SamplingParams::default() };
    let greedy = SamplingParams::greedy;
    let wanted = |params: &SamplingParams, narrowed| params.candidates(150_000, narrowed);
    assert_eq!((wanted(&greedy(), false), wanted(&greedy(), true)), (1, 32));
    assert_eq!(wanted(&SamplingParams { logit_bias: vec![(7, -100.0)], ..greedy() }, false), 32);
    assert_eq!(wanted(&SamplingParams { logit_bias: vec![(7, 1.0)], ..greedy() }, false), 0);
    assert_eq!(wanted(&SamplingParams { repetition_penalty: 0.9, ..greedy() }, false), 0);
    assert_eq!(wanted(&SamplingParams { frequency_penalty: -0.1, ..greedy() }, false), 0);
    let top_k = |top_k| SamplingParams { top_k, ..usual() };
    assert_eq!([20, 128, 129, 0].map(|k| wanted(&top_k(k), false)), [20, 128, 0, 0]);
    assert_eq!(wanted(&top_k(20), true), 51);
    assert_eq!(wanted(&SamplingParams { min_p: 0.05, ..usual() }, false), 128);
    assert_eq!(top_k(20).candidates(7, false), 0, "all are kept");
}

#[test]
fn a_lost_device_tells_nothing() {
    let mut sampler = Sampler::new(8).unwrap();
    let nothing = [[f32::NAN, f32::NAN]; 2];
    let told =
        sampler.sample_from_top(&nothing, &SamplingParams::greedy(), &TokenCounts::default(), 0, None, |_| false);
    assert_eq!(told, None);
}
