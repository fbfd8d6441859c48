//! Linear layers against a scalar reference that follows the documented order, bit for bit, over every packing, ragged shapes,
//! instruction set and way of cutting the work.

use proptest::prelude::*;

use crate::pack::{FLOAT_KINDS, Source, any_quant};
use crate::support::{Aligned, Random, bits, isas};
use plimsoll_kernels::*;

/// Terms that a call adds to the plain product.
#[derive(Clone, Debug)]
struct Extras {
    bias: Option<Vec<f32>>,
    /// The old contents of y; present for mode Add.
    before: Option<Vec<f32>>,
}

impl Extras {
    fn new(bias: bool, add: bool, out: usize, rows: usize, random: &mut Random) -> Extras {
        Extras { bias: bias.then(|| random.floats(out)), before: add.then(|| random.floats(rows * out)) }
    }

    fn apply(&self, out: usize, product: &mut [f32]) {
        for (i, y) in product.iter_mut().enumerate() {
            if let Some(bias) = &self.bias {
                *y += bias[i % out];
            }
            if let Some(before) = &self.before {
                *y += before[i];
            }
        }
    }
}

/// The activations: floats in rows of `ld`, or floats that each instruction set quantizes itself.
#[derive(Clone, Copy)]
enum Rows<'a> {
    Floats { data: &'a [f32], ld: usize },
    Numbers(ActForm, &'a [Vec<f32>]),
}

/// Runs `linear` panel range by panel range and row range by row range; gaps beside y stay untouched.
#[expect(clippy::too_many_arguments, reason = "a test driver")]
fn run(
    isa: Isa,
    packing: &Packing,
    data: &[u8],
    input: Rows<'_>,
    rows: usize,
    extras: &Extras,
    panel_step: usize,
    row_step: usize,
) -> Vec<f32> {
    let form = if let Rows::Numbers(form, _) = input { form } else { ActForm::Words };
    let layout = ActLayout { rows, k: packing.k().next_multiple_of(32), form };
    let mut buffer = Aligned::new(layout.bytes());
    if let Rows::Numbers(_, inputs) = input {
        for (row, x) in buffer.bytes_mut().chunks_exact_mut(layout.row_bytes()).zip(inputs) {
            quantize_acts(isa, layout, x, row);
        }
    }
    let acts = Acts::new(layout, buffer.bytes());
    let input = || match input {
        Rows::Floats { data, ld } => Input::F32 { data, ld },
        Rows::Numbers(..) => Input::Acts(&acts),
    };
    let (out, ld) = (packing.out(), packing.out() + 3);
    let mut y = vec![-77.0; rows * ld];
    if let Some(before) = &extras.before {
        for (y, before) in y.chunks_mut(ld).zip(before.chunks(out)) {
            y[..out].copy_from_slice(before);
        }
    }
    let weights = Weights { packing, data, bias: extras.bias.as_deref() };
    let mode = if extras.before.is_some() { Mode::Add } else { Mode::Store };
    let target = Target { ptr: y.as_mut_ptr(), ld, mode };
    for panel in (0..packing.panels()).step_by(panel_step) {
        for row in (0..rows).step_by(row_step) {
            let panels = panel..packing.panels().min(panel + panel_step);
            let rows = row..rows.min(row + row_step);
            // SAFETY: `y` has all rows of `ld` floats and nothing else uses it.
            unsafe { linear(isa, &weights, input(), panels, rows, target) };
        }
    }
    assert!(y.chunks(ld).all(|y| y[out..] == [-77.0; 3]), "wrote beside its outputs");
    y.chunks(ld).flat_map(|y| y[..out].to_vec()).collect()
}

/// Expects `run` to give `expected` on every instruction set, whole and cut up.
fn expect_everywhere(
    packing: &Packing,
    data: &[u8],
    input: Rows<'_>,
    rows: usize,
    extras: &Extras,
    expected: &[f32],
) -> Result<(), TestCaseError> {
    for isa in isas() {
        for (panel_step, row_step) in [(usize::MAX / 2, usize::MAX / 2), (1, 1), (2, 3), (3, 5)] {
            let y = run(isa, packing, data, input, rows, extras, panel_step, row_step);
            prop_assert_eq!(bits(&y), bits(expected), "{} {} {}", isa, panel_step, row_step);
        }
    }
    Ok(())
}

/// Quantized activations of one row: the numbers, and the scales of blocks.
fn quantized(form: ActForm, x: &[f32]) -> (Vec<i32>, Vec<f32>) {
    let (mut numbers, mut scales) = (Vec::new(), Vec::new());
    for block in x.chunks(32) {
        let amax = block.iter().fold(0f32, |m, x| m.max(x.abs()));
        let tiny = amax < 2f32.powi(-100);
        let (scale, inverse) = match form {
            _ if tiny => (0.0, 0.0),
            ActForm::Bytes => (amax / 127.0, 127.0 / amax),
            ActForm::Words | ActForm::Tiled => {
                let exponent = ((amax / 32639.0) as f64).log2().ceil() as i32;
                (2f32.powi(exponent), 2f32.powi(-exponent))
            }
        };
        numbers.extend(block.iter().map(|x| (x * inverse).round_ties_even() as i32));
        scales.push(scale);
    }
    (numbers, scales)
}

fn quant_reference(source: &Source, quant: QuantPacking, form: ActForm, x: &[f32]) -> Vec<f32> {
    let (numbers, scales) = quantized(form, x);
    // Sums are of 32 elements, however many share a scale.
    let group = usize::from(quant.group).min(32);
    let output = |row: usize| {
        let mut acc = 0f32;
        for g in 0..x.len() / group {
            let range = g * group..(g + 1) * group;
            let dot: i32 = range.clone().map(|k| source.code(row, k) * numbers[k]).sum();
            let sum: i32 = numbers[range].iter().sum();
            let (scale, offset) = source.scale(row, g * group / usize::from(quant.group));
            let act_scale = scales[g * group / 32];
            acc = (dot as f32 * act_scale).mul_add(scale, acc);
            if quant.offset {
                acc = offset.mul_add(act_scale * sum as f32, acc);
            }
        }
        acc
    };
    (0..source.packing.out()).map(output).collect()
}

const FORMS: [ActForm; 3] = [ActForm::Bytes, ActForm::Words, ActForm::Tiled];

fn any_form() -> impl Strategy<Value = ActForm> {
    prop::sample::select(&FORMS)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn quantized_layers_follow_the_reference(
        quant in any_quant(), out in 1usize..150, blocks in 1usize..20, rows in 1usize..42,
        bias: bool, add: bool, awkward: bool, form in any_form(), seed: u64,
    ) {
        let k = 32 * blocks;
        let source = Source::new(quant, out, k, seed);
        let data = source.packed();
        let mut random = Random::new(seed ^ 1);
        let inputs: Vec<Vec<f32>> =
            (0..rows).map(|_| if awkward { random.awkward(k) } else { random.floats(k) }).collect();
        let mut expected: Vec<f32> = inputs.iter().flat_map(|x| quant_reference(&source, quant, form, x)).collect();
        let extras = Extras::new(bias, add, out, rows, &mut random);
        extras.apply(out, &mut expected);
        expect_everywhere(&source.packing, &data, Rows::Numbers(form, &inputs), rows, &extras, &expected)?;
    }

    #[test]
    fn float_layers_follow_the_reference(
        kind in 0usize..3, out in 1usize..100, k in 1usize..100, rows in 1usize..20,
        bias: bool, add: bool, awkward: bool, seed: u64,
    ) {
        let mut random = Random::new(seed);
        let mut draw = |n| if awkward { random.awkward(n) } else { random.floats(n) };
        let weights: Vec<Vec<f32>> = (0..out).map(|_| draw(k)).collect();
        let ld = k + 5;
        let x = draw(rows * ld);
        let (kind, bf16) = FLOAT_KINDS[kind];
        let packing = Packing::new(kind, out, k).unwrap();
        let mut data = vec![0; packing.bytes()];
        for (rows, panel) in weights.chunks(PANEL).zip(data.chunks_exact_mut(packing.panel_bytes())) {
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            pack_panel_f32(&packing, &rows, panel).unwrap();
        }
        let mut expected = Vec::new();
        for x in x.chunks(ld) {
            let output = |w: &Vec<f32>| w.iter().zip(x).fold(0f32, |acc, (w, x)| x.mul_add(bf16(*w), acc));
            expected.extend(weights.iter().map(output));
        }
        let extras = Extras::new(bias, add, out, rows, &mut random);
        extras.apply(out, &mut expected);
        expect_everywhere(&packing, &data, Rows::Floats { data: &x, ld }, rows, &extras, &expected)?;
    }

    #[test]
    fn layers_of_eight_bit_floats_follow_the_reference(
        out in 1usize..60, k in 1usize..100, group in 1usize..70, rows in 1usize..20, bias: bool, add: bool, seed: u64,
    ) {
        let mut random = Random::new(seed);
        let groups = k.div_ceil(group);
        // Any number but NaN.
        let mut codes = |n| (0..n).map(|_| random.next() as u8).map(|c| if c & 0x7f == 0x7f { c & 0x80 } else { c }).collect();
        let codes: Vec<Vec<u8>> = (0..out).map(|_| codes(k)).collect();
        let scales: Vec<Vec<f32>> = (0..out).map(|_| random.floats(groups)).collect();
        let ld = k + 5;
        let x = random.floats(rows * ld);
        let packing = Packing::new(PackKind::F8 { group }, out, k).unwrap();
        let mut data = vec![0xa5; packing.bytes()];
        let outputs: Vec<F8Row<'_>> = codes.iter().zip(&scales).map(|(codes, scale)| F8Row { codes, scale }).collect();
        for (rows, panel) in outputs.chunks(PANEL).zip(data.chunks_exact_mut(packing.panel_bytes())) {
            pack_panel_f8(&packing, rows, panel).unwrap();
        }
        let number = |code: u8| {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
            let whole = if exponent == 0 { mantissa } else { 8.0 + mantissa };
            let magnitude = whole * 2f32.powi(exponent.max(1) - 10);
            if code < 128 { magnitude } else { -magnitude }
        };
        let mut unpacked = vec![f32::NAN; k];
        for (row, (codes, scale)) in codes.iter().zip(&scales).enumerate() {
            plimsoll_kernels::unpack_row(&packing, &data, row, &mut unpacked);
            let values: Vec<f32> = codes.iter().enumerate().map(|(k, code)| number(*code) * scale[k / group]).collect();
            prop_assert_eq!(bits(&unpacked), bits(&values), "row {}", row);
        }
        let mut expected = Vec::new();
        for x in x.chunks(ld) {
            expected.extend(codes.iter().zip(&scales).map(|(codes, scale)| {
                codes.chunks(group).zip(x[..k].chunks(group)).zip(scale).fold(0f32, |acc, ((codes, x), scale)| {
                    let sum = codes.iter().zip(x).fold(0f32, |sum, (code, x)| x.mul_add(number(*code) / 256.0, sum));
                    sum.mul_add(scale * 256.0, acc)
                })
            }));
        }
        let extras = Extras::new(bias, add, out, rows, &mut random);
        extras.apply(out, &mut expected);
        expect_everywhere(&packing, &data, Rows::Floats { data: &x, ld }, rows, &extras, &expected)?;
    }
}

/// Expects all rows at once to be each by itself, on every instruction set.
fn expect_rows_alone(quant: QuantPacking, out: usize, rows: usize, row: impl Fn(usize, &mut Random) -> Vec<f32>) {
    let mut random = Random::new(10);
    let inputs: Vec<Vec<f32>> = (0..rows).map(|number| row(number, &mut random)).collect();
    let k = inputs[0].len();
    let source = Source::new(quant, out, k, 9);
    let data = source.packed();
    for form in [ActForm::Bytes, ActForm::Tiled] {
        let input = Rows::Numbers(form, &inputs);
        let extras = Extras { bias: None, before: None };
        let single = run(Isa::Portable, &source.packing, &data, input, rows, &extras, 1, 1);
        for isa in isas().skip(1) {
            let whole = run(isa, &source.packing, &data, input, rows, &extras, 99, 999);
            assert_eq!(bits(&whole), bits(&single), "{isa} {quant:?} {form:?}");
        }
    }
}

const IQ4: [u8; 16] = [0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240];
const IQ2: [u8; 16] = [51, 68, 86, 43, 35, 18, 0, 43, 43, 43, 43, 43, 43, 43, 43, 43];
const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// The packings of GGUF's Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0, IQ4_NL, IQ2_XS, MXFP4 and NVFP4.
fn known_quants() -> [QuantPacking; 10] {
    use plimsoll_kernels::PackScales::{E8m0Half, F16, Super, SuperF32, Ue4m3Half};
    let quant = |bits, group, scales, zero, offset| QuantPacking { bits, group, scales, zero, offset, codebook: None };
    [
        quant(4, 32, F16, 8, false),
        quant(4, 32, Super, 0, true),
        quant(5, 32, F16, 16, false),
        quant(5, 32, Super, 0, true),
        quant(6, 16, Super, 32, false),
        quant(8, 32, F16, 128, false),
        QuantPacking { codebook: Some(IQ4), ..quant(4, 32, F16, 127, false) },
        QuantPacking { codebook: Some(IQ2), ..quant(3, 16, SuperF32, 43, false) },
        QuantPacking { codebook: Some(E2M1), ..quant(4, 32, E8m0Half, 12, false) },
        QuantPacking { codebook: Some(E2M1), ..quant(4, 16, Ue4m3Half, 12, false) },
    ]
}

#[test]
fn a_long_batch_is_its_rows_one_by_one() {
    // Beyond the rows that one block of the walk holds, with every size of tile behind them, and panels left over.
    for quant in known_quants() {
        expect_rows_alone(quant, 100, 280, |_, random| random.floats(512));
        expect_rows_alone(quant, 64, 44, |_, random| random.floats(96));
    }
}

#[test]
fn the_greatest_sums_are_exact() {
    // Every number is ±32639 or ±127, and now and then one of the first is one less, so that sums are odd.
    let row = |number: usize, random: &mut Random| {
        let extreme = |at: usize| 32_639.0 - f32::from(u8::from((at + number).is_multiple_of(7)));
        (0..256)
            .map(|at| if number.is_multiple_of(3) || random.below(8) > 0 { extreme(at) } else { -extreme(at) })
            .collect()
    };
    for quant in known_quants() {
        expect_rows_alone(quant, 70, 24, row);
    }
}

#[test]
fn a_row_of_nonsense_spoils_no_other() {
    for quant in known_quants() {
        expect_rows_alone(quant, 70, 24, |number, random| {
            let mut row = random.floats(256);
            match number % 5 {
                1 => row[100] = f32::NAN,
                2 => row.fill(f32::INFINITY),
                3 => row.fill(f32::NAN),
                _ => {}
            }
            row
        });
    }
}

#[test]
#[should_panic(expected = "multiply another kind")]
fn quantized_weights_refuse_floats() {
    let quant = QuantPacking {
        bits: 8,
        group: 32,
        scales: plimsoll_kernels::PackScales::F16,
        zero: 128,
        offset: false,
        codebook: None,
    };
    let source = Source::new(quant, 16, 32, 1);
    let data = source.packed();
    let extras = Extras { bias: None, before: None };
    run(Isa::Portable, &source.packing, &data, Rows::Floats { data: &[0.0; 32], ld: 32 }, 1, &extras, 1, 1);
}
