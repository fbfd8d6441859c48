//! Operations on single rows of 4096 elements.

use divan::Bencher;
use divan::counter::ItemsCount;
use plimsoll_kernels::*;

use crate::{Aligned, isa};

const N: usize = 4096;

fn row() -> Vec<f32> {
    (0..N).map(|i| (i as f32).sin() * 4.0).collect()
}

/// Measures an operation on a row, with another row as input.
fn over_row(bencher: Bencher, mut op: impl FnMut(&mut [f32], &[f32])) {
    let (x, mut y) = (row(), row());
    bencher.counter(ItemsCount::new(N)).bench_local(|| op(&mut y, &x));
}

#[divan::bench(max_time = 0.3)]
fn rms_norm(bencher: Bencher) {
    over_row(bencher, |y, x| plimsoll_kernels::rms_norm(isa(), y, x, x, 1e-6));
}

#[divan::bench(max_time = 0.3)]
fn silu_glu(bencher: Bencher) {
    over_row(bencher, |y, x| glu(isa(), Activation::Silu, y, x));
}

#[divan::bench(max_time = 0.3)]
fn rope(bencher: Bencher) {
    over_row(bencher, |y, x| plimsoll_kernels::rope(isa(), RopeStyle::Halves, y, 128, &x[..64], &x[..64]));
}

#[divan::bench(max_time = 0.3, args = [8, 16])]
fn quantize_acts(bencher: Bencher, bits: usize) {
    let form = match (bits, isa()) {
        (8, _) => ActForm::Bytes,
        (_, Isa::Amx) => ActForm::Tiled,
        _ => ActForm::Words,
    };
    let layout = ActLayout { rows: 1, k: N, form };
    let mut row = Aligned::new(layout.bytes(), |_| 0);
    over_row(bencher, |_, x| plimsoll_kernels::quantize_acts(isa(), layout, x, &mut row));
}

/// A row finds its 10 of 512 experts.
#[divan::bench(max_time = 0.3)]
fn route(bencher: Bencher) {
    let (mut ids, mut weights) = ([0; 10], [0.0; 10]);
    let x = row();
    let mut router = x[..512].to_vec();
    bencher.bench_local(|| {
        router.copy_from_slice(&x[..512]);
        plimsoll_kernels::route(isa(), &mut router, &mut ids, &mut weights, true);
    });
}
