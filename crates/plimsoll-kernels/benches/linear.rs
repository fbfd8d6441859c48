//! Linear layers on one thread: how many multiplications a second, by instruction set, kind of weights and rows.
//!
//! `cargo bench -p plimsoll-kernels --bench linear`

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use plimsoll_kernels::{
    ActLayout, Acts, Input, Isa, Mode, PackKind, PackScales, Packing, QuantPacking, Target, Weights, linear,
    quantize_acts,
};

/// A matrix that stays in the second-level cache: what is measured is arithmetic. Decoding from memory is `reads`.
const SHAPE: (usize, usize) = (576, 1536);
/// 64 MiB of 4-bit codes: far more than the caches hold.
const LARGE: (usize, usize) = (32_768, 4096);

const KINDS: [(&str, QuantPacking); 4] = [
    ("q4_0", QuantPacking { bits: 4, group: 32, scales: PackScales::F16, zero: 8, offset: false }),
    ("q4_1", QuantPacking { bits: 4, group: 32, scales: PackScales::F16, zero: 0, offset: true }),
    ("q6_k", QuantPacking { bits: 6, group: 16, scales: PackScales::Super, zero: 32, offset: false }),
    ("q8_0", QuantPacking { bits: 8, group: 32, scales: PackScales::F16, zero: 128, offset: false }),
];

fn main() {
    divan::main();
}

/// Bytes on a cache line's boundary, as an arena gives them.
struct Lines {
    memory: Vec<u8>,
    from: usize,
    len: usize,
}

impl Lines {
    fn new(len: usize, fill: impl Fn(usize) -> u8) -> Lines {
        let mut lines = Lines { memory: vec![0; len + 64], from: 0, len };
        lines.from = lines.memory.as_ptr().addr().wrapping_neg() % 64;
        lines.bytes_mut().iter_mut().enumerate().for_each(|(i, byte)| *byte = fill(i));
        lines
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.from..][..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.from..][..self.len]
    }
}

/// Activations of `rows` rows.
fn activations(layout: ActLayout) -> Lines {
    let mut acts = Lines::new(layout.bytes(), |_| 0);
    for (row, bytes) in acts.bytes_mut().chunks_exact_mut(layout.row_bytes()).enumerate() {
        let x: Vec<f32> = (0..layout.k).map(|i| ((i * 31 + row * 17) % 201) as f32 - 100.0).collect();
        quantize_acts(Isa::Portable, layout, &x, bytes);
    }
    acts
}

fn multiply(bencher: Bencher<'_, '_>, isa: Isa, kind: &str, (out, k): (usize, usize), rows: usize) {
    let quant = KINDS.iter().find(|(name, _)| *name == kind).expect("one of the kinds").1;
    let packing = Packing::new(PackKind::Quant(quant), out, k).expect("a packing of ours");
    // Small bytes: whatever they are read as, no scale is infinite.
    let data = Lines::new(packing.bytes(), |i| (i * 7 % 61) as u8 & 0x3f);
    let layout = ActLayout { rows, k, tiles: isa == Isa::Amx && packing.wants_tiles() };
    let input = activations(layout);
    let acts = Acts::new(layout, input.bytes());
    let mut y = vec![0f32; rows * out];
    let weights = Weights { packing: &packing, data: data.bytes(), bias: None };
    bencher.counter(ItemsCount::new(rows * out * k)).bench_local(|| {
        let target = Target { ptr: y.as_mut_ptr(), ld: out, mode: Mode::Store };
        // SAFETY: `y` has all rows and outputs, and nobody else looks at it.
        unsafe { linear(isa, &weights, Input::Acts(&acts), 0..packing.panels(), 0..rows, target) };
        black_box(&y);
    });
}

/// Every instruction set this machine has.
fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available() && *isa != Isa::Portable)
}

fn cases(kinds: &'static [&'static str], rows: &'static [usize]) -> impl Iterator<Item = String> {
    isas().flat_map(move |isa| {
        kinds.iter().flat_map(move |kind| rows.iter().map(move |rows| format!("{isa} {kind} {rows}")))
    })
}

fn parts(case: &str) -> (Isa, &str, usize) {
    let mut words = case.split(' ');
    let mut word = || words.next().expect("three words");
    (word().parse().expect("a name"), word(), word().parse().expect("a number"))
}

/// Items are multiplications with their additions.
#[divan::bench(args = cases(&["q4_0", "q4_1", "q6_k", "q8_0"], &[1, 4, 8, 16, 64]), sample_count = 20, min_time = 0.05)]
fn arithmetic(bencher: Bencher<'_, '_>, case: &str) {
    let (isa, kind, rows) = parts(case);
    multiply(bencher, isa, kind, SHAPE, rows);
}

/// From memory: divide the items a second by 2 for q4 to get bytes a second, roughly.
#[divan::bench(args = cases(&["q4_1"], &[1, 2, 4, 8, 16, 32]), sample_count = 10)]
fn reads(bencher: Bencher<'_, '_>, case: &str) {
    let (isa, kind, rows) = parts(case);
    multiply(bencher, isa, kind, LARGE, rows);
}
