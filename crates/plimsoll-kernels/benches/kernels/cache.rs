//! Products whose weights stay in the cache.

use divan::Bencher;
use divan::counter::ItemsCount;
use plimsoll_kernels::Packing;

use crate::bytes;
use crate::product::{Case, K, Product, cases};

#[divan::bench(args = cases(&[1, 8, 32, 256]), max_time = 0.4)]
fn linear(bencher: Bencher, case: &Case) {
    // Short runs, so that few of them are disturbed.
    let packing = Packing::new(case.kind, (8192 / case.rows).clamp(64, 256), K).unwrap();
    let data = bytes(packing.bytes());
    let mut product = Product::new(&packing, case.rows);
    let operations = ItemsCount::new(2 * case.rows * packing.out() * K);
    bencher.counter(operations).bench_local(|| product.run(&data, 0..packing.panels()));
}
