//! Mixture of experts around its matrix products: choosing a row's experts, grouping rows by expert, and joining the results. The
//! products themselves are in `linear`.

use crate::isa::{Isa, Kernel};
use crate::linear::Mode;
use crate::math;
use crate::ops::{Activation, activate};
use crate::simd::{LANES, Simd};
use crate::softmax::softmax;

/// Chooses the experts of one row. `logits` become probabilities (softmax over all experts). The `ids.len()` greatest are chosen,
/// greatest first; equal ones in the order of their ids. `weights` are their probabilities, divided by their sum if `renormalise`.
///
/// NaN logits give NaN weights, so that they cannot pass unnoticed. Panics if `ids` and `weights` differ in length or there are fewer
/// experts.
pub fn route(isa: Isa, logits: &mut [f32], ids: &mut [u32], weights: &mut [f32], renormalise: bool) {
    let top = ids.len();
    assert!(
        weights.len() == top && top <= logits.len(),
        "{top} of {} experts, {} weights",
        logits.len(),
        weights.len()
    );
    if top == 0 {
        return;
    }
    softmax(isa, logits);
    let mut found = 0;
    for (expert, probability) in logits.iter().enumerate() {
        // NaN ranks like zero: it is chosen, in the order of ids, only if nothing better is left.
        let rank = |weight: f32| weight.max(0.0);
        let mut place = found;
        while place > 0 && rank(*probability) > rank(weights[place - 1]) {
            place -= 1;
        }
        if place == top {
            continue;
        }
        found = (found + 1).min(top);
        ids[place..found].rotate_right(1);
        weights[place..found].rotate_right(1);
        (ids[place], weights[place]) = (expert as u32, *probability);
    }
    if renormalise {
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
}

/// How [`route_scored`] scores experts and chooses among them.
#[derive(Clone, Copy, Debug)]
pub struct Scoring<'a> {
    /// Scores are sigmoids of the logits; otherwise their softmax over all experts.
    pub sigmoid: bool,
    /// Correction added to each expert's score for the choice only; empty: none.
    pub correction: &'a [f32],
    /// Groups of neighbouring experts, 64 at most.
    pub groups: usize,
    /// Groups to choose from: the ones with the greatest sums of their two greatest corrected scores.
    pub top_groups: usize,
    /// Whether the weights are divided by their sum.
    pub renormalise: bool,
    /// Final factor on the weights.
    pub scale: f32,
    /// Additional factor on each expert's weight; empty: none.
    pub expert_scales: &'a [f32],
}

/// Chooses the experts of one row like [`route`], with another scoring: `weights` are the scores of the chosen experts, without their
/// corrections.
///
/// NaN logits give NaN weights. Panics if lengths differ, or the groups hold too few experts.
pub fn route_scored(isa: Isa, scoring: &Scoring<'_>, logits: &mut [f32], ids: &mut [u32], weights: &mut [f32]) {
    let Scoring { sigmoid, correction, groups, top_groups, renormalise, scale, expert_scales } = *scoring;
    let (top, experts) = (ids.len(), logits.len());
    let size = experts / groups;
    assert!(size * groups == experts && groups <= 64 && top_groups <= groups, "{top_groups} of {groups} groups");
    assert!(weights.len() == top && top <= top_groups * size, "{top} of {experts} experts, {} weights", weights.len());
    assert!(correction.is_empty() || correction.len() == experts, "a correction an expert");
    assert!(expert_scales.is_empty() || expert_scales.len() == experts, "a scale an expert");
    let score = |logits: &mut [f32]| match sigmoid {
        true => activate(isa, Activation::Sigmoid, logits),
        false => softmax(isa, logits),
    };
    // The sigmoid of a large logit rounds to 1. Without corrections and groups, logits rank the experts.
    let by_logits = sigmoid && correction.is_empty() && groups == 1;
    if !by_logits {
        score(logits);
    }
    choose(scoring, logits, ids, weights);
    if by_logits {
        score(logits);
    }
    ids.iter().zip(&mut *weights).for_each(|(id, weight)| *weight = logits[*id as usize]);
    let sum: f32 = if renormalise { weights.iter().sum() } else { 1.0 };
    weights.iter_mut().for_each(|weight| *weight = *weight / sum * scale);
    if !expert_scales.is_empty() {
        ids.iter().zip(&mut *weights).for_each(|(id, weight)| *weight *= expert_scales[*id as usize]);
    }
}

/// Finds the ids of the greatest corrected scores in open groups, greatest first; `weights` become these scores.
fn choose(scoring: &Scoring<'_>, scores: &[f32], ids: &mut [u32], weights: &mut [f32]) {
    let Scoring { correction, groups, top_groups, .. } = *scoring;
    let (top, experts) = (ids.len(), scores.len());
    let size = experts / groups;
    // NaN ranks below all numbers: it is chosen, in the order of ids, only if nothing better is left.
    let rank = |expert: usize| {
        let score = scores[expert] + correction.get(expert).copied().unwrap_or(0.0);
        if score.is_nan() { f32::NEG_INFINITY } else { score }
    };
    let open = open_groups(groups, top_groups, size, rank);
    let mut found = 0;
    for expert in (0..experts).filter(|expert| open >> (expert / size) & 1 == 1) {
        let score = rank(expert);
        let mut place = found;
        while place > 0 && score > weights[place - 1] {
            place -= 1;
        }
        if place == top {
            continue;
        }
        found = (found + 1).min(top);
        ids[place..found].rotate_right(1);
        weights[place..found].rotate_right(1);
        (ids[place], weights[place]) = (expert as u32, score);
    }
}

/// Returns the groups with the greatest sums of their two greatest ranks, as bits; among equal ones the first.
fn open_groups(groups: usize, top: usize, size: usize, rank: impl Fn(usize) -> f32) -> u64 {
    if top == groups {
        return u64::MAX;
    }
    let sum = |group: usize| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for rank in (group * size..(group + 1) * size).map(&rank) {
            (first, second) = if rank > first { (rank, first) } else { (first, second.max(rank)) };
        }
        first + second
    };
    let mut open = 0u64;
    for _ in 0..top {
        let closed = (0..groups).filter(|group| open >> group & 1 == 0);
        let best = closed.reduce(|best, group| if sum(group) > sum(best) { group } else { best });
        open |= best.map_or(0, |best| 1 << best);
    }
    open
}

/// Groups choices by expert with a counting sort. `places[i]` becomes the place of choice i in the order of experts and then of i. The
/// choices of expert e have the places `starts[e]..starts[e + 1]`.
///
/// Panics if lengths differ or an id is not below `starts.len() − 1`.
pub fn group_by_expert(ids: &[u32], starts: &mut [u32], places: &mut [u32]) {
    assert_eq!(ids.len(), places.len(), "a place a choice");
    starts.fill(0);
    for id in ids {
        starts[*id as usize + 1] += 1;
    }
    for expert in 1..starts.len() {
        starts[expert] += starts[expert - 1];
    }
    // Each start advances to its group's end, which is the next start. Afterwards they are moved up by one.
    for (id, place) in ids.iter().zip(places) {
        *place = starts[*id as usize];
        starts[*id as usize] += 1;
    }
    starts.rotate_right(1);
    starts[0] = 0;
}

/// Joins the results of a row's experts: `out (+)= Σ weights[j] · y[places[j]]`, one chain of fused multiply-adds in ascending j. Row i
/// of `y` is at `i · out.len()`. Panics if a place is beyond `y`.
pub fn combine(isa: Isa, out: &mut [f32], y: &[f32], places: &[u32], weights: &[f32], mode: Mode) {
    assert_eq!(places.len(), weights.len(), "a weight an expert");
    isa.run(Combine { out, y, places, weights, mode });
}

struct Combine<'a> {
    out: &'a mut [f32],
    y: &'a [f32],
    places: &'a [u32],
    weights: &'a [f32],
    mode: Mode,
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.out.len();
        for (index, out) in self.out.chunks_mut(LANES).enumerate() {
            let mut sum = s.zero();
            for (place, weight) in self.places.iter().zip(self.weights) {
                let y = &self.y[*place as usize * cols + index * LANES..][..out.len()];
                sum = s.fma(s.splat(*weight), s.load_part(y, 0.0), sum);
            }
            if self.mode == Mode::Add {
                sum = s.add(s.load_part(out, 0.0), sum);
            }
            s.store_part(out, sum);
        }
    }
}

/// x = fma(sigmoid(gate), y, x): a shared expert joins. Panics if lengths differ.
pub fn add_gated(isa: Isa, x: &mut [f32], y: &[f32], gate: f32) {
    assert_eq!(x.len(), y.len(), "elements of two operands");
    isa.run(AddGated { x, y, gate });
}

struct AddGated<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
    gate: f32,
}

impl Kernel for AddGated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let gate = math::sigmoid(s, s.splat(self.gate));
        for (x, y) in self.x.chunks_mut(LANES).zip(self.y.chunks(LANES)) {
            let sum = s.fma(gate, s.load_part(y, 0.0), s.load_part(x, 0.0));
            s.store_part(x, sum);
        }
    }
}
