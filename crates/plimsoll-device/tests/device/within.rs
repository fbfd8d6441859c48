//! An encoder's operations on the device: attention among the rows of each sequence against a scalar twin in double precision, the
//! same bits in any company, with any threads and on any instruction set; its planned workspace is what it takes.

use crate::common::random::Random;
use crate::common::{checkpoint, device, matrix, rows, shape};
use plimsoll_device::{
    Activation, Attention, Declare, Device, DtypePolicy, EncoderShape, Isa, KvShape, ModelShape, PAGE_TOKENS,
    PlanDevice, SeqSpan, StepInput,
};
use proptest::prelude::*;

const HEADS: usize = 4;
const DIM: usize = 16;
const WIDTH: usize = HEADS * DIM;

fn encoder() -> ModelShape {
    let encoder = Some(EncoderShape::new(DIM, 0));
    ModelShape { kv: KvShape::none(), encoder, ..shape(None) }
}

/// Sequences of these lengths, with their own pages.
fn spans(lengths: &[usize]) -> (Vec<SeqSpan>, Vec<u32>) {
    let (mut first_row, mut pages_at) = (0, 0);
    let seqs = lengths.iter().map(|rows| {
        let pages = rows.div_ceil(PAGE_TOKENS);
        let seq = SeqSpan { first_row, rows: *rows, start: 0, pages_at, pages, seen_from: 0, state: None };
        (first_row, pages_at) = (first_row + rows, pages_at + pages);
        seq
    });
    let seqs: Vec<SeqSpan> = seqs.collect();
    (seqs, (0..pages_at as u32).collect())
}

/// Queries, keys and values of a sequence.
fn filled(seed: u64, rows: usize) -> [Vec<Vec<f32>>; 3] {
    let mut random = Random::new(seed);
    std::array::from_fn(|_| (0..rows).map(|_| random.floats(WIDTH)).collect())
}

fn spec(window: Option<usize>) -> Attention {
    Attention { heads: HEADS, scale: 0.25, window, ..Attention::WHOLE }
}

/// Returns the attention of the rows of all sequences, computed in one step.
fn run(lengths: &[usize], seeds: &[u64], window: Option<usize>, threads: usize, isa: Isa) -> Vec<Vec<u32>> {
    let checkpoint = checkpoint("llama");
    let table = Declare::new(&checkpoint, DtypePolicy::Auto).finish();
    let shape = encoder();
    let mut device = device(&table, &checkpoint, &shape, 0, threads, isa);
    let (seqs, pages) = spans(lengths);
    let all: Vec<_> = lengths.iter().zip(seeds).map(|(rows, seed)| filled(*seed, *rows)).collect();
    let part = |i: usize| all.iter().flat_map(|three| three[i].clone()).collect::<Vec<_>>();
    let [q, k, v] = [0, 1, 2].map(|i| matrix(&mut device, &part(i)));
    let out = device.temp(q.rows, WIDTH).unwrap();
    let step = StepInput { seqs: &seqs, pages: &pages, ..StepInput::default() };
    device.attend_within(&spec(window), out, q, k, v, &step).unwrap();
    // The planner's device must count the same workspace, to less than 64 bytes.
    let mut plan = PlanDevice::new(&table, &shape.kv);
    let [pq, pk, pv] = [(); 3].map(|()| plan.temp(q.rows, WIDTH).unwrap());
    let planned_out = plan.temp(q.rows, WIDTH).unwrap();
    plan.attend_within(&spec(window), planned_out, pq, pk, pv, &step).unwrap();
    let scratch = plimsoll_device::cpu::scratch_bytes(&shape, threads);
    let workspace = plan.high_water() + scratch.next_multiple_of(64);
    assert!(device.memory().workspace_peak().abs_diff(workspace) < 64, "planned {workspace}");
    rows(&mut device, out)
}

/// softmax(q·k / 4)·v of one sequence, in double precision; a row sees `window / 2` rows to either side.
fn twin([q, k, v]: &[Vec<Vec<f32>>; 3], window: Option<usize>) -> Vec<Vec<f64>> {
    let head = |row: &[f32], h: usize| row[h * DIM..][..DIM].iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let one = |(row, q): (usize, &Vec<f32>)| {
        let reach = window.map_or(q.len() + k.len(), |window| window / 2);
        let near = |(other, _): &(usize, &Vec<f32>)| row.abs_diff(*other) <= reach;
        let [k, v] = [k, v].map(|all| all.iter().enumerate().filter(near).map(|(_, x)| x).collect::<Vec<_>>());
        (0..HEADS)
            .flat_map(|h| {
                let q = head(q, h);
                let scores: Vec<f64> =
                    k.iter().map(|k| 0.25 * q.iter().zip(head(k, h)).map(|(a, b)| a * b).sum::<f64>()).collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let v = &v;
                (0..DIM)
                    .map(|d| weights.iter().zip(v).map(|(w, v)| w / sum * f64::from(v[h * DIM + d])).sum::<f64>())
                    .collect::<Vec<f64>>()
            })
            .collect()
    };
    q.iter().enumerate().map(one).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_sees_its_sequence_or_a_window_of_it_and_nothing_else(
        lengths in prop::collection::vec(1usize..90, 1..7), seed in 0u64..1000, threads in 1usize..4,
        window in prop::option::of(1usize..70),
    ) {
        let seeds: Vec<u64> = (0..lengths.len() as u64).map(|i| seed * 10 + i).collect();
        let together = run(&lengths, &seeds, window, threads, Isa::detect());
        prop_assert_eq!(&run(&lengths, &seeds, window, 1, Isa::Portable), &together);
        let mut first = 0;
        for (length, seed) in lengths.iter().zip(&seeds) {
            let own = &together[first..first + length];
            prop_assert_eq!(&run(&[*length], &[*seed], window, 2, Isa::detect())[..], own);
            for (row, expected) in own.iter().zip(twin(&filled(*seed, *length), window)) {
                for (bits, expected) in row.iter().zip(expected) {
                    let found = f64::from(f32::from_bits(*bits));
                    prop_assert!((found - expected).abs() <= 2e-6, "{} instead of {}", found, expected);
                }
            }
            first += length;
        }
    }
}

#[test]
fn a_long_sequence_is_cut_among_threads_without_a_trace() {
    for window in [None, Some(1200)] {
        let alone = run(&[1500], &[3], window, 1, Isa::detect());
        for threads in 2..=4 {
            assert!(run(&[1500], &[3], window, threads, Isa::detect()) == alone, "{threads} threads");
        }
    }
}

#[test]
fn norms_with_a_bias_and_activations_are_their_formulas() {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let mut random = Random::new(5);
    let (weight, bias) = (random.floats(WIDTH), random.floats(WIDTH));
    let (w, b) = (declare.values(weight.clone()), declare.values(bias.clone()));
    let mut device = device(&declare.finish(), &checkpoint, &encoder(), 0, 2, Isa::detect());
    let given: Vec<Vec<f32>> = (0..40).map(|_| random.floats(WIDTH).iter().map(|x| 3.0 * x + 1.0).collect()).collect();
    let x = matrix(&mut device, &given);
    device.layer_norm(x, x, w, b, 1e-5);
    let normed = floats(&mut device, x);
    for (row, found) in given.iter().zip(&normed) {
        let n = row.len() as f64;
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
        for (i, found) in found.iter().enumerate() {
            let unit = (f64::from(row[i]) - mean) / (variance + 1e-5).sqrt();
            let expected = unit * f64::from(weight[i]) + f64::from(bias[i]);
            assert!((f64::from(*found) - expected).abs() < 2e-6, "{found} instead of {expected}");
        }
    }
    for (act, expected) in [
        (Activation::Tanh, f64::tanh as fn(f64) -> f64),
        (Activation::Gelu, |x| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2))),
    ] {
        let x = matrix(&mut device, &given);
        device.activate(x, act);
        for (row, found) in given.iter().zip(floats(&mut device, x)) {
            for (x, found) in row.iter().zip(found) {
                let expected = expected(f64::from(*x));
                assert!((f64::from(found) - expected).abs() < 2e-6, "{act:?}({x}) is {found} instead of {expected}");
            }
        }
    }
}

/// A series that converges for all x: 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (2n+1)!!.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI
}

fn floats(device: &mut plimsoll_device::CpuDevice, x: plimsoll_device::Buf) -> Vec<Vec<f32>> {
    rows(device, x).into_iter().map(|row| row.into_iter().map(f32::from_bits).collect()).collect()
}
