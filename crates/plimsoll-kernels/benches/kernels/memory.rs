//! Weights that stream from memory, in pieces well below a scheduler's time slice. Together the pieces are larger than any cache, and
//! each piece is another part.

use std::sync::LazyLock;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use plimsoll_kernels::Packing;

use crate::product::{Case, Product, Q4_0, cases, k, quantized_cases};
use crate::{Aligned, bytes};

/// Bytes in a piece.
const PIECE: usize = 4 << 20;
/// Bytes of a matrix, about.
const MATRIX: usize = 130_000_000;

/// The weights of all that is measured here.
static MEMORY: LazyLock<Aligned<u8>> = LazyLock::new(|| bytes(3 * 128 * expert().0.bytes()));

/// The matrices of an expert of 2048 × 768: two like the first, one like the second, all of one size.
fn expert() -> (Packing, Packing) {
    (Packing::new(Q4_0, 768, 2048).unwrap(), Packing::new(Q4_0, 2048, 768).unwrap())
}

/// Runs pieces of `bytes` bytes in turn.
fn stream(bencher: Bencher, pieces: usize, bytes: usize, mut run: impl FnMut(usize)) {
    let mut piece = 0;
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        run(piece);
        piece = (piece + 1) % pieces;
    });
}

fn read(bytes: &[u8]) {
    let mut sums = [0u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum ^= u64::from_le_bytes(*word);
        }
    }
    black_box(sums);
}

/// Weights through few rows; before each kind the same memory, only read.
#[divan::bench(args = cases(&[0, 1, 2, 4, 8, 16]), sample_size = 1, sample_count = 2000, max_time = 0.5)]
fn linear(bencher: Bencher, case: &Case) {
    measure(bencher, case, |packing, rows| Product::new(packing, rows));
}

/// The same of rows quantized to 8 bits.
#[divan::bench(args = quantized_cases(&[0, 4, 8, 16, 32]), sample_size = 1, sample_count = 2000, max_time = 0.5)]
fn eight_bits(bencher: Bencher, case: &Case) {
    measure(bencher, case, |packing, rows| Product::eight_bits(packing, rows));
}

fn measure(bencher: Bencher, case: &Case, product: fn(&Packing, usize) -> Product<'_>) {
    // Filled here, not while the first piece is measured.
    let memory: &[u8] = &MEMORY;
    if case.rows == 0 {
        return stream(bencher, MATRIX / PIECE, PIECE, |piece| read(&memory[piece * PIECE..][..PIECE]));
    }
    let panel = Packing::new(case.kind, 16, k()).unwrap().bytes();
    let packing = Packing::new(case.kind, 16 * (MATRIX / panel), k()).unwrap();
    let step = PIECE / packing.panel_bytes();
    let mut product = product(&packing, case.rows);
    stream(bencher, packing.panels() / step, step * packing.panel_bytes(), |piece| {
        product.run(&memory[..packing.bytes()], piece * step..(piece + 1) * step);
    });
}

/// One row through one expert after another of 128, ever other ones.
#[divan::bench(sample_size = 1, sample_count = 2000, max_time = 0.5)]
fn experts(bencher: Bencher) {
    let memory: &[u8] = &MEMORY;
    let (wide, narrow) = expert();
    let bytes = wide.bytes();
    let (mut up, mut down) = (Product::new(&wide, 1), Product::new(&narrow, 1));
    stream(bencher, 128, 3 * bytes, |turn| {
        let expert = &memory[turn * 37 % 128 * 3 * bytes..][..3 * bytes];
        up.run(&expert[..bytes], 0..wide.panels());
        up.run(&expert[bytes..2 * bytes], 0..wide.panels());
        down.run(&expert[2 * bytes..], 0..narrow.panels());
    });
}
