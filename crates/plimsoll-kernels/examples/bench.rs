//! Measures the inner loops on one thread: bytes per second where weights stream, operations per second where rows share
//! them. `cargo run --release -p plimsoll-kernels --example bench -- [isa] [filter]`
//!
//! Every number is that of the fastest runs: neighbours on the machine can only make a run slower. What streams from memory is
//! timed in pieces well below a scheduler's time slice, and the twentieth fastest in a hundred counts.

use std::hint::black_box;
use std::time::Instant;

use plimsoll_kernels::*;

/// Seconds of the fastest of some runs.
fn best(mut run: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed().as_secs_f64() < 1.0 {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// A buffer aligned to 64 bytes, filled with something.
fn aligned(len: usize) -> &'static mut [u8] {
    let lines: &'static mut [[u8; 64]] = vec![[0; 64]; len / 64 + 2].leak();
    let buffer = lines.as_flattened_mut();
    let offset = buffer.as_ptr().addr().wrapping_neg() % 64;
    let buffer = &mut buffer[offset..][..len];
    for (i, byte) in buffer.iter_mut().enumerate() {
        *byte = ((i * 37) >> 5) as u8 & 0x3b;
    }
    buffer
}

fn quant(bits: u8, group: u8, scales: PackScales, zero: u8, offset: bool) -> PackKind {
    PackKind::Quant(QuantPacking { bits, group, scales, zero, offset })
}

fn kinds() -> [(&'static str, PackKind); 8] {
    [
        ("q4_0", quant(4, 32, PackScales::F16, 8, false)),
        ("q4_k", quant(4, 32, PackScales::Super, 0, true)),
        ("q5_k", quant(5, 32, PackScales::Super, 0, true)),
        ("q6_k", quant(6, 16, PackScales::Super, 32, false)),
        ("q8_0", quant(8, 32, PackScales::F16, 128, false)),
        ("f16", PackKind::F16),
        ("bf16", PackKind::Bf16),
        ("f32", PackKind::F32),
    ]
}

/// Bytes in a piece of a streaming measurement.
const PIECE: usize = 4 << 20;

/// GB/s of `run`, called with the number of one piece after another of `pieces`, each of `bytes` bytes.
fn streaming(pieces: usize, bytes: usize, mut run: impl FnMut(usize)) -> f64 {
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed().as_secs_f64() < 2.0 {
        for piece in 0..pieces {
            let start = Instant::now();
            run(piece);
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    bytes as f64 / times[times.len() / 20] / 1e9
}

fn read_bandwidth(weights: &[u8]) -> f64 {
    streaming(weights.len() / PIECE, PIECE, |piece| {
        let mut sums = [0u64; 8];
        for line in weights[piece * PIECE..][..PIECE].as_chunks::<64>().0 {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum ^= u64::from_le_bytes(*word);
            }
        }
        black_box(sums);
    })
}

/// GB/s of weights, read from memory, through `rows` rows.
fn stream_rows(isa: Isa, packing: &Packing, data: &[u8], rows: usize) -> f64 {
    let step = PIECE / packing.panel_bytes();
    let mut product = Product::new(isa, packing, data, rows);
    streaming(packing.panels() / step, step * packing.panel_bytes(), |piece| {
        product.run(piece * step..(piece + 1) * step);
    })
}

/// GFLOP/s of a product whose weights stay in the cache.
fn cached_rows(isa: Isa, packing: &Packing, data: &[u8], rows: usize) -> f64 {
    let mut product = Product::new(isa, packing, data, rows);
    let seconds = best(|| product.run(0..packing.panels()));
    2.0 * (rows * packing.out() * packing.k()) as f64 / seconds / 1e9
}

/// A product ready to run.
struct Product<'a> {
    isa: Isa,
    weights: Weights<'a>,
    x: Vec<f32>,
    acts: Option<Acts<'static>>,
    rows: usize,
    y: Vec<f32>,
}

impl<'a> Product<'a> {
    fn new(isa: Isa, packing: &'a Packing, data: &'a [u8], rows: usize) -> Product<'a> {
        let k = packing.k();
        let x: Vec<f32> = (0..rows * k).map(|i| ((i * 7919) as f32 * 1e-3).sin()).collect();
        let acts = packing.wants_acts().then(|| {
            let layout = ActLayout { rows, k, tiles: isa == Isa::Amx && packing.wants_tiles() };
            let buffer = aligned(layout.bytes());
            for (x, row) in x.chunks(k).zip(buffer.chunks_exact_mut(layout.row_bytes())) {
                quantize_acts(isa, layout, x, row);
            }
            Acts::new(layout, buffer)
        });
        let weights = Weights { packing, data, bias: None };
        Product { isa, weights, x, acts, rows, y: vec![0.0; rows * packing.out()] }
    }

    fn run(&mut self, panels: std::ops::Range<usize>) {
        let packing = self.weights.packing;
        let target = Target { ptr: self.y.as_mut_ptr(), ld: packing.out(), mode: Mode::Store };
        let input = match &self.acts {
            Some(acts) => Input::Acts(acts),
            None => Input::F32 { data: &self.x, ld: packing.k() },
        };
        // SAFETY: `y` has all rows and outputs, and is borrowed mutably.
        unsafe { linear(self.isa, &self.weights, input, panels, 0..self.rows, target) };
        black_box(&self.y);
    }
}

fn linear_layers(isa: Isa, filter: &str) {
    let memory = aligned(320 << 20);
    let k = 4096;
    for (name, kind) in kinds().into_iter().filter(|(name, _)| name.contains(filter)) {
        // Some 130 MB, beyond any cache.
        let many =
            Packing::new(kind, 16 * (130_000_000 / Packing::new(kind, 16, k).unwrap().panel_bytes()), k).unwrap();
        print!("{name:5} GB/s: read {:4.1};", read_bandwidth(&memory[..128 << 20]));
        for rows in [1, 2, 4, 8, 16] {
            print!(" {rows}: {:4.1};", stream_rows(isa, &many, &memory[..many.bytes()], rows));
        }
        print!(" GFLOP/s:");
        for rows in [1, 8, 32, 256] {
            // Short runs, see above.
            let few = Packing::new(kind, (8192 / rows).clamp(64, 256), k).unwrap();
            print!(" {rows}: {:4.0};", cached_rows(isa, &few, &memory[..few.bytes()], rows));
        }
        println!();
    }
}

fn attention(isa: Isa, filter: &str) {
    for (name, dtype) in [("f32", KvDtype::F32), ("f16", KvDtype::F16), ("bf16", KvDtype::Bf16), ("q8", KvDtype::Q8)] {
        if !format!("attend {name}").contains(filter) {
            continue;
        }
        let layout = KvLayout::new(8, 128, dtype).unwrap();
        let positions = 4096;
        let count = positions / PAGE;
        let memory = aligned(count * layout.bytes_per_page());
        let pages: Vec<u32> = (0..count as u32).map(|i| i * 37 % count as u32).collect();
        let row = vec![0.25f32; 8 * 128];
        for page in memory.chunks_exact_mut(layout.bytes_per_page()) {
            for slot in 0..PAGE {
                kv_store(isa, &layout, page, slot, &row, &row);
            }
        }
        print!("attend {name:5}");
        for (rows, heads) in [(1, 1), (1, 4), (1, 8), (16, 4)] {
            let spans: Vec<Span> =
                (0..rows).map(|r| Span { first: 0, end: (positions - rows + 1 + r) as u32 }).collect();
            let data = vec![0.1f32; rows * heads * 128];
            let mut out = vec![0f32; rows * heads * 128];
            let mut scratch = vec![0f32; attend_scratch_len(&layout, rows, heads)];
            let queries = Queries { data: &data, ld: heads * 128, heads, spans: &spans };
            let params = AttendParams { scale: 0.1, softcap: None, sinks: &[] };
            let seconds = best(|| {
                for kv_head in 0..8 {
                    let stride = layout.bytes_per_page();
                    let kv = KvPages { layout, base: memory.as_ptr(), stride, pages: &pages, kv_head };
                    let target = AttendOutput { ptr: out.as_mut_ptr(), ld: heads * 128 };
                    // SAFETY: all pages are in `memory`, and `out` has all rows.
                    unsafe { attend(isa, &kv, &queries, &params, &mut scratch, target) };
                }
            });
            let flops = 4.0 * (rows * heads * 8 * positions * 128) as f64 / seconds / 1e9;
            let bytes = memory.len() as f64 / seconds / 1e9;
            print!("  {rows}x{heads}: {bytes:5.1} GB/s {flops:4.0} GFLOP/s;");
        }
        println!();
    }
}

/// The delta rule over heads of 128 × 128: one row a sequence, whose states come from memory, and rows that stay with their state.
fn delta(isa: Isa, filter: &str) {
    if !"delta".contains(filter) {
        return;
    }
    let (dim, heads, slots) = (128, 32, 64);
    let size = dim * dim;
    let memory = aligned(4 * size * heads * slots);
    // SAFETY: aligned, and every bit pattern is a float; these are small ones.
    let states = unsafe { memory.align_to_mut::<f32>().1 };
    states.fill(0.01);
    let rows = 64;
    let qkv: Vec<f32> = (0..rows * 3 * dim).map(|i| (i as f32 * 0.7).sin() * 0.1).collect();
    let gates = vec![0.9f32; rows];
    let mut out = vec![0f32; rows * dim];
    // SAFETY: as above.
    let scratch = unsafe { aligned(4 * delta_scratch_len(dim)).align_to_mut::<f32>().1 };
    let input = DeltaInput {
        q: &qkv,
        k: &qkv[dim..],
        v: &qkv[2 * dim..],
        ld: 3 * dim,
        decay: &gates,
        beta: &gates,
        gate_ld: 1,
        key_dim: dim,
        value_dim: dim,
    };
    let mut run = |head: usize, from: u32, named: &[u32]| {
        let base = states[head * size..].as_mut_ptr();
        let slots = StateSlots { base, stride: heads * size, start: Some(from), out: named };
        let target = DeltaOutput { ptr: out.as_mut_ptr(), ld: dim };
        // SAFETY: slots are within `states`, rows within `out`.
        unsafe { gated_delta(isa, &input, 0..dim / STATE_TILE, &slots, scratch, target) };
    };
    let pieces = heads * slots;
    let in_place =
        streaming(pieces, 8 * size, |piece| run(piece % heads, (piece / heads) as u32, &[(piece / heads) as u32]));
    let next = |slot: usize| ((slot + 1) % slots) as u32;
    let moved = streaming(pieces, 8 * size, |piece| run(piece % heads, (piece / heads) as u32, &[next(piece / heads)]));
    let mut named = vec![NO_SLOT; rows];
    named[rows - 1] = 0;
    let seconds = best(|| (0..heads).for_each(|head| run(head, 0, &named)));
    // Two products, decay, update: four multiplications and four additions an element, two of them one instruction.
    let flops = 7.0 * (rows * heads * size) as f64 / seconds / 1e9;
    println!(
        "delta 128x128  one row: {in_place:.1} GB/s in place, {moved:.1} GB/s to another slot;  \
         {rows} rows: {flops:.0} GFLOP/s, {:.2} us a row and head",
        seconds * 1e6 / (rows * heads) as f64
    );
}

/// One row through eight of 128 experts of 2048 × 768 (Q4_0), ever other ones: GB/s of their weights.
fn experts(isa: Isa, filter: &str) {
    if !"experts".contains(filter) {
        return;
    }
    let kind = quant(4, 32, PackScales::F16, 8, false);
    let (wide, narrow) = (Packing::new(kind, 768, 2048).unwrap(), Packing::new(kind, 2048, 768).unwrap());
    let bytes = wide.bytes();
    let memory = aligned(3 * 128 * bytes);
    let read = read_bandwidth(&memory[..128 << 20]);
    // All share shapes: one product each, with its weights exchanged.
    let matrices: Vec<&[u8]> = memory.chunks_exact(bytes).collect();
    let mut up = Product::new(isa, &wide, matrices[0], 1);
    let mut down = Product::new(isa, &narrow, matrices[0], 1);
    let rate = streaming(128, 3 * bytes, |turn| {
        let expert = turn * 37 % 128;
        for matrix in 0..2 {
            up.weights.data = matrices[3 * expert + matrix];
            up.run(0..wide.panels());
        }
        down.weights.data = matrices[3 * expert + 2];
        down.run(0..narrow.panels());
    });
    println!("experts q4_0 2048x768  GB/s: read {read:.1}; one row an expert: {rate:.1}");
}

fn rows(isa: Isa, filter: &str) {
    let n = 4096;
    let x: Vec<f32> = (0..n).map(|i| (i as f32).sin() * 4.0).collect();
    let mut y = x.clone();
    let buffer = aligned(8 * n);
    let mut show = |name: &str, op: &mut dyn FnMut(&mut [f32])| {
        if name.contains(filter) {
            let seconds = best(|| (0..1000).for_each(|_| op(&mut y)));
            println!("{name:14} {:6.2} ns per 16 elements", seconds * 1e9 / 1000.0 / (n / 16) as f64);
        }
    };
    show("rms_norm", &mut |y| rms_norm(isa, y, &x, &x, 1e-6));
    show("silu glu", &mut |y| glu(isa, Activation::Silu, y, &x));
    let layout = ActLayout { rows: 1, k: n, tiles: isa == Isa::Amx };
    let row = &mut buffer[..layout.bytes()];
    show("quantize_acts", &mut |_| quantize_acts(isa, layout, &x, row));
    show("rope", &mut |y| rope(isa, RopeStyle::Halves, y, 128, &x[..64], &x[..64]));
    let mut router = x[..512].to_vec();
    let (mut ids, mut weights) = ([0; 10], [0.0; 10]);
    if "route".contains(filter) {
        let seconds = best(|| {
            (0..1000).for_each(|_| {
                router.copy_from_slice(&x[..512]);
                route(isa, &mut router, &mut ids, &mut weights, true);
            });
        });
        println!("route          {:6.2} us for 10 of 512 experts", seconds * 1e3);
    }
    show("log_sum_exp", &mut |_| {
        black_box(log_sum_exp(isa, &x));
    });
    show("argmax", &mut |_| {
        black_box(argmax(isa, &x));
    });
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let isa = arguments.next().map_or_else(Isa::detect, |name| name.parse().unwrap());
    let filter = arguments.next().unwrap_or_default();
    println!("{isa}");
    linear_layers(isa, &filter);
    attention(isa, &filter);
    delta(isa, &filter);
    experts(isa, &filter);
    rows(isa, &filter);
}
