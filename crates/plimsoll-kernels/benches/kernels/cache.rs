//! Products with weights that stay in the cache.

use divan::Bencher;
use divan::counter::ItemsCount;
use plimsoll_kernels::{Isa, PackKind, Packing};

use crate::product::{Case, Product, cases, k, quantized_cases};
use crate::{bytes, isa};

/// How many rows meet the weights.
const ROWS: [usize; 7] = [1, 4, 8, 12, 16, 32, 256];

#[divan::bench(args = cases(&ROWS), max_time = 0.4)]
fn linear(bencher: Bencher, case: &Case) {
    measure(bencher, case, |packing, rows| Product::new(packing, rows));
}

/// The same of rows quantized to 8 bits.
#[divan::bench(args = quantized_cases(&ROWS), max_time = 0.4)]
fn eight_bits(bencher: Bencher, case: &Case) {
    measure(bencher, case, |packing, rows| Product::eight_bits(packing, rows));
}

/// The same of rows rounded to bfloat16, where there is a matrix unit.
#[divan::bench(args = bf16_cases(), max_time = 0.4)]
fn bf16(bencher: Bencher, case: &Case) {
    measure(bencher, case, |packing, rows| Product::bf16(packing, rows));
}

fn measure(bencher: Bencher, case: &Case, product: fn(&Packing, usize) -> Product<'_>) {
    // Short runs, so that few of them are disturbed.
    let packing = Packing::new(case.kind, (8192 / case.rows).clamp(64, 256), k()).unwrap();
    let data = bytes(packing.bytes());
    let mut product = product(&packing, case.rows);
    let operations = ItemsCount::new(2 * case.rows * packing.out() * k());
    bencher.counter(operations).bench_local(|| product.run(&data, 0..packing.panels()));
}

/// Weights that can be rounded, if there is the unit.
fn bf16_cases() -> Vec<Case> {
    let can = |case: &Case| isa() == Isa::Amx && !matches!(case.kind, PackKind::F16 | PackKind::F32);
    cases(&[1, 16, 32, 64, 256, 512]).into_iter().filter(can).collect()
}
