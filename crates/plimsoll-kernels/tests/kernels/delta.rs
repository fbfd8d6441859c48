//! The delta rule against a double-precision recurrence, and against itself: spans, kept states, tiles and instruction sets must not
//! show, and what a slot held before must not leak.

use proptest::prelude::*;

use crate::support::{Random, bits, isas};
use plimsoll_kernels::*;

/// A head's inputs, with more columns around them than are its own.
struct Head {
    rows: usize,
    key_dim: usize,
    value_dim: usize,
    ld: usize,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    rule: StateRule,
    start: Option<Vec<f32>>,
}

const GATE_LD: usize = 5;

impl Head {
    fn new(rows: usize, (key_dim, value_dim): (usize, usize), from_zero: bool, rule: StateRule, seed: u64) -> Head {
        let mut random = Random::new(seed);
        let ld = 2 * key_dim + value_dim + 3;
        let mut qkv = random.floats(rows * ld);
        for row in qkv.chunks_exact_mut(ld) {
            for (part, scale) in row[..2 * key_dim].chunks_exact_mut(key_dim).zip([(key_dim as f32).powf(-0.5), 1.0]) {
                let norm = part.iter().map(|x| x * x).sum::<f32>().sqrt() + 1e-3;
                part.iter_mut().for_each(|x| *x *= scale / norm);
            }
        }
        let gates = (0..rows * GATE_LD).map(|_| random.uniform().abs()).collect();
        let start = (!from_zero).then(|| random.floats(key_dim * value_dim));
        Head { rows, key_dim, value_dim, ld, qkv, gates, rule, start }
    }

    fn input(&self, row: usize) -> DeltaInput<'_> {
        let (qkv, gates) = (&self.qkv[row * self.ld..], &self.gates[row * GATE_LD..]);
        let (q, k, v) = (qkv, &qkv[self.key_dim..], &qkv[2 * self.key_dim..]);
        let (key_dim, value_dim, rule) = (self.key_dim, self.value_dim, self.rule);
        DeltaInput { q, k, v, ld: self.ld, decay: gates, beta: &gates[1..], gate_ld: GATE_LD, key_dim, value_dim, rule }
    }

    /// Where element (row, column) of a state lies.
    fn place(&self, row: usize, column: usize) -> usize {
        let first = column / STATE_TILE * STATE_TILE;
        first * self.key_dim + row * STATE_TILE.min(self.value_dim - first) + column - first
    }

    /// The recurrence as the paper writes it: outputs, and the state after the last row, row by row.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let (keys, values) = (self.key_dim, self.value_dim);
        let mut state = vec![0.0; keys * values];
        if let Some(start) = &self.start {
            for i in 0..keys {
                (0..values).for_each(|c| state[i * values + c] = start[self.place(i, c)].into());
            }
        }
        let mut out = Vec::new();
        for row in 0..self.rows {
            let input = self.input(row);
            let at = |x: &[f32], i: usize| f64::from(x[i]);
            state.iter_mut().for_each(|s| *s *= at(input.decay, 0));
            for c in 0..values {
                let kept: f64 = match self.rule {
                    StateRule::Delta => (0..keys).map(|i| state[i * values + c] * at(input.k, i)).sum(),
                    StateRule::Additive { .. } => 0.0,
                };
                let delta = (at(input.v, c) - kept) * at(input.beta, 0);
                (0..keys).for_each(|i| state[i * values + c] += at(input.k, i) * delta);
                let skipped = match self.rule {
                    StateRule::Delta => 0.0,
                    StateRule::Additive { skip } => f64::from(skip) * at(input.v, c),
                };
                out.push(skipped + (0..keys).map(|i| state[i * values + c] * at(input.q, i)).sum::<f64>());
            }
        }
        (out, state)
    }
}

/// How a head is run; no choice may change a bit.
#[derive(Clone, Debug)]
struct Way {
    isa: Isa,
    /// Rows of the spans.
    spans: Vec<usize>,
    /// Tiles of a call.
    tiles: usize,
    /// Every row's state goes to a slot of its own, or only a span's last one's, to where the span began.
    keep_all: bool,
}

/// Outputs, and the states after the rows that the way keeps (none for the others).
fn run(head: &Head, way: &Way) -> (Vec<f32>, Vec<Option<Vec<f32>>>) {
    let (size, tiles) = (head.key_dim * head.value_dim, head.value_dim.div_ceil(STATE_TILE));
    let stride = size + 7;
    // Slot 0 is where the sequence starts, slot r + 1 the state after row r; all of them stale.
    let mut slots = vec![f32::NAN; stride * (head.rows + 1)];
    if let Some(start) = &head.start {
        slots[..size].copy_from_slice(start);
    }
    let mut out = vec![f32::NAN; head.rows * head.value_dim];
    let mut kept = Vec::new();
    let (mut first, mut from) = (0, head.start.as_ref().map(|_| 0));
    for rows in &way.spans {
        let mut named: Vec<u32> = (first..first + rows).map(|row| row as u32 + 1).collect();
        if !way.keep_all {
            named.fill(NO_SLOT);
            named[rows - 1] = 0;
        }
        for tile in (0..tiles).step_by(way.tiles) {
            let mut scratch = vec![f32::NAN; delta_scratch_len(head.key_dim)];
            let view = StateSlots { base: slots.as_mut_ptr(), stride, start: from, out: &named };
            let target = DeltaOutput { ptr: out[first * head.value_dim..].as_mut_ptr(), ld: head.value_dim };
            // SAFETY: all slots are in `slots`, all rows in `out`.
            unsafe {
                let input = head.input(first);
                gated_delta(way.isa, &input, tile..(tile + way.tiles).min(tiles), &view, &mut scratch, target);
            }
        }
        for slot in &named {
            let state = |slot: &u32| slots[*slot as usize * stride..][..size].to_vec();
            kept.push((*slot != NO_SLOT).then(|| state(slot)));
        }
        (first, from) = (first + rows, Some(named[rows - 1]));
    }
    (out, kept)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn follows_the_recurrence_whatever_the_way(
        key_dim in 1usize..40,
        value_dim in 1usize..70,
        spans in prop::collection::vec(1usize..6, 1..6),
        from_zero: bool,
        skip in prop::option::of(-1.0f32..1.0),
        seed in 0u64..1000,
    ) {
        let rows = spans.iter().sum();
        let rule = skip.map_or(StateRule::Delta, |skip| StateRule::Additive { skip });
        let head = Head::new(rows, (key_dim, value_dim), from_zero, rule, seed);
        let plain = Way { isa: Isa::Portable, spans: vec![1; rows], tiles: 1, keep_all: true };
        let (out, states) = run(&head, &plain);
        let (expected, last) = head.reference();
        for (actual, expected) in out.iter().zip(expected) {
            prop_assert!((f64::from(*actual) - expected).abs() <= 1e-5, "{} {}", actual, expected);
        }
        let state = states[rows - 1].as_ref().unwrap();
        for i in 0..key_dim {
            for c in 0..value_dim {
                let (actual, expected) = (f64::from(state[head.place(i, c)]), last[i * value_dim + c]);
                prop_assert!((actual - expected).abs() <= 1e-5, "{} {}", actual, expected);
            }
        }
        for isa in isas() {
            for keep_all in [false, true] {
                for (spans, tiles) in [(spans.clone(), 9), (vec![rows], 1), (vec![1; rows], 2), (vec![rows], 3)] {
                    let way = Way { isa, spans, tiles, keep_all };
                    let (other, kept) = run(&head, &way);
                    prop_assert_eq!(bits(&other), bits(&out), "{:?}", way);
                    for (kept, state) in kept.iter().zip(&states) {
                        let same = kept.as_ref().is_none_or(|kept| bits(kept) == bits(state.as_ref().unwrap()));
                        prop_assert!(same, "{:?}", way);
                    }
                }
            }
        }
    }

    #[test]
    fn gates_follow_their_definitions(heads in 1usize..50, seed in 0u64..1000) {
        let mut random = Random::new(seed);
        let [a, b, a_log, dt_bias]: [Vec<f32>; 4] =
            std::array::from_fn(|_| random.floats(heads).iter().map(|x| 6.0 * x).collect());
        let mut first = None;
        for isa in isas() {
            let (mut decay, mut beta) = (a.clone(), b.clone());
            delta_gates(isa, &mut decay, &mut beta, &a_log, &dt_bias);
            for head in 0..heads {
                let time = (f64::from(a[head]) + f64::from(dt_bias[head])).exp().ln_1p();
                let expected = (-f64::from(a_log[head]).exp() * time).exp();
                // The exponent may be in the thousands, where half an ulp of it is 1e-4.
                let error = (f64::from(decay[head]) - expected).abs();
                prop_assert!(error <= 1e-5 && (0.0..=1.0).contains(&decay[head]), "{} {}", decay[head], expected);
                let expected = 1.0 / (1.0 + (-f64::from(b[head])).exp());
                prop_assert!((f64::from(beta[head]) - expected).abs() <= 1e-6);
            }
            let all = (bits(&decay), bits(&beta));
            prop_assert_eq!(first.get_or_insert(all.clone()), &all, "{}", isa);
        }
    }

    #[test]
    fn time_steps_follow_their_definitions(heads in 1usize..50, bounded: bool, seed in 0u64..1000) {
        let mut random = Random::new(seed);
        let [dt, a_log, dt_bias]: [Vec<f32>; 3] =
            std::array::from_fn(|_| random.floats(heads).iter().map(|x| 4.0 * x).collect());
        let limits = if bounded { [0.01, 2.0] } else { [0.0, f32::INFINITY] };
        let mut first = None;
        for isa in isas() {
            let (mut steps, mut decay) = (dt.clone(), vec![f32::NAN; heads]);
            time_steps(isa, &mut steps, &mut decay, &a_log, &dt_bias, limits);
            for head in 0..heads {
                let time = (f64::from(dt[head]) + f64::from(dt_bias[head])).exp().ln_1p();
                let time = time.clamp(limits[0].into(), limits[1].into());
                prop_assert!((f64::from(steps[head]) - time).abs() <= 1e-6 * time.max(1.0), "{} {}", steps[head], time);
                let expected = (-f64::from(a_log[head]).exp() * time).exp();
                prop_assert!((f64::from(decay[head]) - expected).abs() <= 1e-5, "{} {}", decay[head], expected);
            }
            let all = (bits(&steps), bits(&decay));
            prop_assert_eq!(first.get_or_insert(all.clone()), &all, "{}", isa);
        }
    }
}

#[test]
fn a_span_without_rows_touches_nothing() {
    let head = Head::new(1, (4, 16), true, StateRule::Delta, 1);
    let slots = StateSlots { base: std::ptr::null_mut(), stride: 0, start: None, out: &[] };
    let target = DeltaOutput { ptr: std::ptr::null_mut(), ld: 0 };
    // SAFETY: no row, no slot.
    unsafe { gated_delta(Isa::detect(), &head.input(0), 0..1, &slots, &mut [], target) };
}
