//! Rounded layers against a scalar reference that follows the documented order, bit for bit, wherever there is the unit.

use proptest::prelude::*;

use crate::pack::{Source, any_quant};
use crate::support::{Aligned, Random, bits};
use plimsoll_kernels::{
    Bf16Acts, Bf16Layout, Input, Isa, Mode, PANEL, PackKind, PackScales, Packing, Target, Weights, bf16_to_f32,
    f32_to_bf16, linear, linear_glu, pack_panel_f32, round_row,
};

/// The nearest bfloat16, ties away from zero; subnormals count as 0, as the unit has it.
fn bf16(value: f32) -> f32 {
    let bf16 = f32::from_bits((value.to_bits() + 0x8000) & !0xffff);
    if bf16.abs() < f32::MIN_POSITIVE { 0.0 } else { bf16 }
}

fn reference(weights: &[f32], x: &[f32]) -> f32 {
    let mut acc = 0f32;
    for (weights, x) in weights.chunks(32).zip(x.chunks(32)) {
        let mut sums = [0f32; 2];
        for (i, (weight, x)) in weights.iter().zip(x).enumerate() {
            let sum = &mut sums[i % 4 / 2];
            *sum = bf16(*x).mul_add(bf16(*weight), *sum);
        }
        acc += sums[0] + sums[1];
    }
    acc
}

/// A quantized weight, as documented.
fn weight(source: &Source, row: usize, k: usize) -> f32 {
    let (quant, zero) = (source.quant, i32::from(source.quant.zero));
    let (scale, offset) = source.scale(row, k / usize::from(quant.group));
    let offset = if quant.offset { offset } else { -(zero as f32) * scale };
    ((source.code(row, k) + zero) as f32).mul_add(scale, offset)
}

/// Rows of activations, rounded, in a buffer with an unused part full of bytes that must not matter.
fn round(layout: Bf16Layout, x: &[f32]) -> Aligned {
    let mut buffer = Aligned::new(layout.bytes());
    buffer.bytes_mut().fill(0xff);
    for (row, x) in x.chunks_exact(layout.k).enumerate() {
        // SAFETY: the buffer is whole and this function's own.
        unsafe { round_row(Isa::detect(), layout, x, buffer.bytes_mut().as_mut_ptr(), row) };
    }
    buffer
}

#[derive(Clone, Copy)]
struct Call<'a> {
    packing: &'a Packing,
    data: &'a [u8],
    bias: Option<&'a [f32]>,
    before: &'a [f32],
}

impl Call<'_> {
    /// All rows, cut up into calls of so many panels and so many tiles of rows.
    fn run(&self, layout: Bf16Layout, x: &[f32], panel_step: usize, tile_step: usize) -> Vec<f32> {
        let buffer = round(layout, x);
        let acts = Bf16Acts::new(layout, buffer.bytes());
        let (packing, out) = (self.packing, self.packing.out());
        let weights = Weights { packing, data: self.data, bias: self.bias };
        let mut y = self.before.to_vec();
        for panel in (0..packing.panels()).step_by(panel_step) {
            for row in (0..layout.rows).step_by(16 * tile_step) {
                let panels = panel..packing.panels().min(panel + panel_step);
                let rows = row..layout.rows.min(row + 16 * tile_step);
                let target = Target { ptr: y.as_mut_ptr(), ld: out, mode: Mode::Add };
                // SAFETY: `y` has all rows of `out` floats and nothing else uses it.
                unsafe { linear(Isa::Amx, &weights, Input::Bf16(&acts), panels, rows, target) };
            }
        }
        y
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn quantized_weights_follow_the_reference(
        quant in any_quant(), out in 1usize..70, blocks in 1usize..30, rows in 1usize..100, seed: u64,
    ) {
        if !Isa::Amx.available() {
            return Ok(());
        }
        let k = 32 * blocks;
        let source = Source::new(quant, out, k, seed);
        let data = source.packed();
        let mut random = Random::new(seed ^ 1);
        let (x, bias, before) = (random.floats(rows * k), random.floats(out), random.floats(rows * out));
        let weights: Vec<Vec<f32>> = (0..out).map(|row| (0..k).map(|k| weight(&source, row, k)).collect()).collect();
        let sums = x.chunks(k).flat_map(|x| weights.iter().map(|weights| reference(weights, x)));
        let expected: Vec<f32> =
            sums.zip(&before).enumerate().map(|(i, (sum, before))| before + (sum + bias[i % out])).collect();
        let call = Call { packing: &source.packing, data: &data, bias: Some(&bias), before: &before };
        for (panels, tiles) in [(99, 99), (1, 1), (3, 2)] {
            let y = call.run(Bf16Layout { rows, k }, &x, panels, tiles);
            prop_assert_eq!(bits(&y), bits(&expected), "{} panels, {} tiles", panels, tiles);
        }
    }

    #[test]
    fn weights_in_bfloat16_follow_the_reference(
        out in 1usize..70, blocks in 1usize..30, rows in 1usize..100, awkward: bool, seed: u64,
    ) {
        if !Isa::Amx.available() {
            return Ok(());
        }
        let k = 32 * blocks;
        let mut random = Random::new(seed);
        // Not what is awkward beyond measure: where a product is subnormal the unit and this processor's arithmetic differ.
        let mut draw = |n| if awkward { random.awkward(n).iter().map(|v| v.clamp(-1e9, 1e9)).collect() } else { random.floats(n) };
        let weights: Vec<Vec<f32>> = (0..out).map(|_| draw(k)).collect();
        let x: Vec<f32> = draw(rows * k).iter().map(|v: &f32| if v.abs() < 1e-10 { 0.0 } else { *v }).collect();
        let packing = Packing::new(PackKind::Bf16, out, k).unwrap();
        let mut data = vec![0; packing.bytes()];
        for (rows, panel) in weights.chunks(PANEL).zip(data.chunks_exact_mut(packing.panel_bytes())) {
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            pack_panel_f32(&packing, &rows, panel).unwrap();
        }
        let stored: Vec<Vec<f32>> =
            weights.iter().map(|row| row.iter().map(|v| bf16_to_f32(f32_to_bf16(*v))).collect()).collect();
        let before = vec![0.0; rows * out];
        let expected: Vec<f32> = x.chunks(k).flat_map(|x| stored.iter().map(|row| reference(row, x))).collect();
        let call = Call { packing: &packing, data: &data, bias: None, before: &before };
        let y = call.run(Bf16Layout { rows, k }, &x, 99, 99);
        prop_assert_eq!(bits(&y), bits(&expected));
    }
}

#[test]
fn more_rows_than_one_unpacking_serves_are_the_same_rows() {
    if !Isa::Amx.available() {
        return;
    }
    // The last block is of six tiles, or of five rows.
    for rows in [600, 517] {
        many(rows);
    }
}

fn many(rows: usize) {
    let (k, out) = (416, 40);
    let quant = plimsoll_kernels::QuantPacking {
        bits: 4,
        group: 32,
        scales: plimsoll_kernels::PackScales::F16,
        zero: 0,
        offset: true,
        codebook: None,
    };
    let source = Source::new(quant, out, k, 5);
    let data = source.packed();
    let x = Random::new(6).floats(rows * k);
    let before = vec![0.0; rows * out];
    let call = Call { packing: &source.packing, data: &data, bias: None, before: &before };
    let whole = call.run(Bf16Layout { rows, k }, &x, 99, 99);
    for row in [0, 1, 17, 511, 512, 514, rows - 1] {
        let alone = Call { before: &before[..out], ..call };
        let alone = alone.run(Bf16Layout { rows: 1, k }, &x[row * k..][..k], 99, 99);
        assert_eq!(bits(&whole[row * out..][..out]), bits(&alone), "row {row}");
    }
}

#[test]
fn a_gate_is_what_its_parts_are() {
    if !Isa::Amx.available() {
        return;
    }
    let quant = plimsoll_kernels::QuantPacking {
        bits: 4,
        group: 32,
        scales: plimsoll_kernels::PackScales::F16,
        zero: 8,
        offset: false,
        codebook: None,
    };
    let (rows, k, out) = (77, 160, 96);
    let sources = [1, 2].map(|seed| Source::new(quant, out, k, seed));
    let data = sources.each_ref().map(|source| source.packed());
    let mut random = Random::new(6);
    let (x, bias, before) = (random.floats(rows * k), random.floats(out), vec![0.0; rows * out]);
    let biases = [Some(&bias[..]), None];
    let of = |i: usize| {
        let call = Call { packing: &sources[i].packing, data: &data[i], bias: biases[i], before: &before };
        call.run(Bf16Layout { rows, k }, &x, 99, 99)
    };
    let (gate, up) = (of(0), of(1));
    let layout = Bf16Layout { rows, k: out };
    let buffer = round(Bf16Layout { rows, k }, &x);
    let acts = Bf16Acts::new(Bf16Layout { rows, k }, buffer.bytes());
    let weights = [0, 1].map(|i| Weights { packing: &sources[i].packing, data: &data[i], bias: biases[i] });
    use plimsoll_kernels::Activation::{GeluQuick, GeluTanh, Silu, Tanh};
    for (activation, (panel_step, tile_step)) in
        [(Silu, (6, 5)), (Silu, (1, 2)), (GeluTanh, (6, 5)), (GeluQuick, (6, 5)), (Tanh, (6, 5))]
    {
        let mut expected = gate.clone();
        plimsoll_kernels::glu_rough(Isa::Amx, activation, &mut expected, &up);
        let mut found = Aligned::new(layout.bytes());
        found.bytes_mut().fill(0xff);
        for panel in (0..6).step_by(panel_step) {
            for row in (0..rows).step_by(16 * tile_step) {
                let (panels, rows) = (panel..panel + panel_step, row..rows.min(row + 16 * tile_step));
                let to = found.bytes_mut().as_mut_ptr();
                // SAFETY: the buffer is whole and this test's own.
                unsafe { linear_glu(Isa::Amx, weights.each_ref(), activation, &acts, panels, rows, to) };
            }
        }
        assert_eq!(
            found.bytes(),
            round(layout, &expected).bytes(),
            "{activation:?}: {panel_step} panels, {tile_step} tiles"
        );
    }
}

#[test]
fn what_is_not_a_number_spoils_no_other_row() {
    if !Isa::Amx.available() {
        return;
    }
    // As few rows multiply, and as many do.
    for rows in [20, 80] {
        spoil(rows);
    }
}

/// Scales with all bits set, as a damaged file has them, are no numbers, and neither is what is made of them.
#[test]
fn weights_that_are_no_numbers_make_none() {
    if !Isa::Amx.available() {
        return;
    }
    for (scales, offset) in [(PackScales::F16, false), (PackScales::F16, true), (PackScales::Super, true)] {
        let quant = plimsoll_kernels::QuantPacking {
            bits: 4,
            group: 32,
            scales,
            zero: if offset { 0 } else { 8 },
            offset,
            codebook: None,
        };
        let (rows, k, out) = (3, 256, 17);
        let mut source = Source::new(quant, out, k, 5);
        source.damage(2);
        let data = source.packed();
        let x = Random::new(6).floats(rows * k);
        let call = Call { packing: &source.packing, data: &data, bias: None, before: &vec![0.0; rows * out] };
        for (i, y) in call.run(Bf16Layout { rows, k }, &x, 99, 99).into_iter().enumerate() {
            assert_eq!(y.is_nan(), i % out == 2, "{scales:?}, {offset}: output {}: {y}", i % out);
        }
    }
}

fn spoil(rows: usize) {
    let quant = plimsoll_kernels::QuantPacking {
        bits: 6,
        group: 16,
        scales: plimsoll_kernels::PackScales::Super,
        zero: 32,
        offset: false,
        codebook: None,
    };
    let (k, out) = (256, 17);
    let source = Source::new(quant, out, k, 5);
    let data = source.packed();
    let mut x = Random::new(6).floats(rows * k);
    let before = vec![0.0; rows * out];
    let call = Call { packing: &source.packing, data: &data, bias: None, before: &before };
    let clean = call.run(Bf16Layout { rows, k }, &x, 99, 99);
    x[3 * k + 100] = f32::NAN;
    x[18 * k + 7] = f32::INFINITY;
    // Rounding must not carry these on to zeros.
    x[11 * k + 7] = f32::from_bits(0xffff_e000);
    x[12 * k + 9] = f32::from_bits(0x7fff_ffff);
    let spoilt = call.run(Bf16Layout { rows, k }, &x, 99, 99);
    for row in 0..rows {
        let (clean, spoilt) = (&clean[row * out..][..out], &spoilt[row * out..][..out]);
        match row {
            3 | 11 | 12 | 18 => assert!(spoilt.iter().all(|y| !y.is_finite()), "row {row}: {spoilt:?}"),
            _ => assert_eq!(bits(clean), bits(spoilt), "row {row}"),
        }
    }
}
