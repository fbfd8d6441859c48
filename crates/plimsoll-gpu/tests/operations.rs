//! Every operation of the GPU device against the CPU device, at odd shapes; and what a row's result depends on.

#[path = "operations/candidates.rs"]
mod candidates;
mod common;
#[path = "operations/encoder.rs"]
mod encoder;
#[path = "operations/segments.rs"]
mod segments;

use std::sync::Arc;

use common::random::Random;
use common::{Rig, alone, checkpoint, close, cpu, gpu};
use plimsoll_device::{
    Activation, Attention, Buf, Declare, Device, DtypePolicy, EncoderShape, KvDtype, KvLayer, KvShape, LinearId, Mode,
    ModelShape, Rotary, SeqSpan, StepInput, VectorId, WeightTable,
};
use plimsoll_gpu::{Adapter, AdapterChoice, Context, GpuMemory, Sizes};
use plimsoll_memory::{Component, Ledger};

/// Fixtures that together have every packing.
const PACKED: [&str; 22] = [
    "llama",
    "llama-bf16",
    "llama-f16",
    "gguf-llama-q4_0",
    "gguf-llama-q8_0",
    "gguf-llama-codebooks",
    "gguf-qwen3-mixed",
    "mlx-llama-3bit-g64",
    "mlx-llama-4bit-g32",
    "mlx-llama-4bit-g64",
    "mlx-llama-5bit-g32",
    "mlx-llama-6bit-g64",
    "mlx-llama-8bit-g32",
    "mlx-llama-mixed",
    "fp8-llama",
    "awq-llama",
    "ct-llama-w4a16",
    "ct-llama-w4a16-asym",
    "ct-llama-nvfp4",
    "gptq-qwen2-8bit",
    "gguf-gpt-oss-q8_0",
    "gpt-oss-mxfp4",
];

/// Rows of products: around the sizes of every tile.
const COMPANY: [usize; 15] = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65];

fn shape_of(kv: KvShape) -> ModelShape {
    ModelShape { kv, state: None, hidden: 1024, encoder: Some(EncoderShape::new(16, 1024)), bf16: false }
}

fn small_shape() -> ModelShape {
    shape_of(KvShape::new(KvDtype::F16, [KvLayer { kv_heads: 2, head_dim: 16, heads: 4, window: None }]))
}

/// Declares all that a fixture's model does.
fn table_of(name: &str) -> WeightTable {
    let checkpoint = checkpoint(name);
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    declare.finish()
}

/// Ids of the matrices of a table: those that another declaration of the same names gives.
fn some_linears(name: &str) -> (WeightTable, Vec<LinearId>) {
    let full = table_of(name);
    let checkpoint = checkpoint(name);
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    // One of every packing and shape.
    let mut seen = Vec::new();
    let ids = full.linears.iter().filter_map(|linear| {
        let whole = matches!(&linear.form, plimsoll_device::Form::Rows(pieces) if pieces.is_empty());
        let new = whole && !seen.contains(&linear.packing);
        new.then(|| seen.push(linear.packing))?;
        declare.linear(&linear.name, linear.packing.out(), linear.packing.k()).ok()
    });
    let ids = ids.collect();
    (declare.finish(), ids)
}

#[test]
#[ignore = "external"]
fn products_with_every_packing() {
    let _alone = alone();
    let mut packings = Vec::new();
    for name in PACKED {
        let (table, ids) = some_linears(name);
        assert!(!ids.is_empty(), "{name}");
        let (checkpoint, shape) = (checkpoint(name), small_shape());
        let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
        for id in ids {
            let packing = table.linear(id).packing;
            packings.push(packing.kind());
            let x = Random::new(7).rows(*COMPANY.iter().max().unwrap(), packing.k());
            let alone = x.iter().map(|x| product(&mut gpu, id, std::slice::from_ref(x), packing.out()));
            let alone = alone.collect::<Vec<_>>().concat();
            for rows in COMPANY {
                let what = format!("{name}: {packing:?}, {rows} rows");
                let got = product(&mut gpu, id, &x[..rows], packing.out());
                assert!(got == alone[..rows], "{what}: a row alone has other bits");
                // Other neighbours, and another place in the tile.
                let got = product(&mut gpu, id, &x[x.len() - rows..], packing.out());
                assert!(got == alone[x.len() - rows..], "{what}: a row alone has other bits than at another place");
            }
            let expected = product(&mut cpu, id, &x, packing.out());
            // Activations have 16 bits on the CPU.
            close(&format!("{name}: {packing:?}"), &alone, &expected, 2e-4);
            let tokens = [0, packing.out() as u32 - 1, packing.out() as u32 / 2];
            let [expected, got] =
                [rows_by_token(&mut cpu, id, &tokens, packing.k()), rows_by_token(&mut gpu, id, &tokens, packing.k())];
            close(&format!("{name}: rows of {packing:?}"), &got, &expected, 1e-6);
        }
    }
    packings.sort_by_key(|kind| format!("{kind:?}"));
    packings.dedup();
    assert!(packings.len() >= 16, "{} packings: {packings:?}", packings.len());
}

fn product(device: &mut dyn Rig, id: LinearId, x: &[Vec<f32>], out: usize) -> Vec<Vec<f32>> {
    let scope = device.mark();
    let x = device.put_rows(x);
    let [stored, added] = [device.temp(x.rows, out).unwrap(), device.temp(x.rows, out).unwrap()];
    device.linear(x, &[(id, stored)], Mode::Store).unwrap();
    device.linear(x, &[(id, added)], Mode::Store).unwrap();
    device.linear(x, &[(id, added)], Mode::Add).unwrap();
    let rows = device.rows_of(&[stored, added]);
    for (once, twice) in rows[0].iter().flatten().zip(rows[1].iter().flatten()) {
        assert!((2.0 * once - twice).abs() <= 1e-4 * once.abs().max(1.0), "{once} twice is {twice}");
    }
    device.release(scope);
    rows.into_iter().next().unwrap()
}

fn rows_by_token(device: &mut dyn Rig, id: LinearId, tokens: &[u32], k: usize) -> Vec<Vec<f32>> {
    let scope = device.mark();
    let out = device.temp(tokens.len(), k).unwrap();
    device.embed(out, id, tokens, 1.5);
    let rows = device.rows_of(&[out]).remove(0);
    device.release(scope);
    rows
}

/// A table with vectors to norm, rotate and bias with.
fn vectors() -> (WeightTable, LinearId, Vec<VectorId>) {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let linear = declare.linear("model.embed_tokens.weight", checkpoint.config.vocab_size, 64).unwrap();
    let mut random = Random::new(3);
    let of = |len: usize, random: &mut Random| random.floats(len);
    let lens = [64, 64, 37, 37, 16, 16, 8, 4];
    let ids = lens.map(|len| declare.values(of(len, &mut random)));
    (declare.finish(), linear, ids.to_vec())
}

/// Runs `run` on both devices and compares all that it gives.
fn both(tolerance: f32, what: &str, run: impl Fn(&mut dyn Rig, &[VectorId]) -> Vec<Buf>) {
    let (table, _, ids) = vectors();
    let (checkpoint, shape) = (checkpoint("llama"), small_shape());
    let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
    let results = |device: &mut dyn Rig| {
        let bufs = run(device, &ids);
        device.rows_of(&bufs)
    };
    let (expected, got) = (results(&mut cpu), results(&mut gpu));
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        close(&format!("{what}, result {i}"), got, expected, tolerance);
    }
}

#[test]
#[ignore = "external"]
fn norms_and_elements() {
    let _alone = alone();
    both(2e-6, "norms", |device, ids| {
        let mut random = Random::new(1);
        let [a, b] = [random.rows(5, 64), random.rows(3, 37)];
        let (a, b) = (device.put_rows(&a), device.put_rows(&b));
        let other = device.temp(5, 64).unwrap();
        device.rms_norm(other, a, ids[0], 1e-5);
        device.rms_norm(a, a, ids[1], 1e-6);
        let normed = device.temp(3, 37).unwrap();
        device.layer_norm(normed, b, ids[2], ids[3], 1e-5);
        device.rms_norm(b, b, ids[3], 1e-5);
        vec![other, a, normed, b]
    });
    let acts = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::Gelu,
        Activation::GeluQuick,
        Activation::Tanh,
        Activation::Sigmoid,
        Activation::ClampedSwish,
        Activation::ReluSquared,
        Activation::Softplus,
    ];
    for act in acts {
        both(2e-6, &format!("{act:?}"), |device, _| {
            let mut random = Random::new(2);
            let mut wide = |rows| {
                random
                    .rows(rows, 37)
                    .iter()
                    .map(|row| row.iter().map(|x| 20.0 * x).collect())
                    .collect::<Vec<Vec<f32>>>()
            };
            let [x, gate, up] = [wide(4), wide(4), wide(4)].map(|rows| device.put_rows(&rows));
            device.glu(gate, up, act);
            if act != Activation::ClampedSwish {
                device.activate(x, act);
            }
            vec![x, gate]
        });
    }
    both(1e-6, "elements", |device, ids| {
        let mut random = Random::new(4);
        let rows = |n: usize, random: &mut Random| random.rows(n, 37);
        let [a, b, c, d, e] = [0; 5].map(|_| rows(6, &mut random)).map(|rows| device.put_rows(&rows));
        let gate = device.put_rows(&Random::new(5).rows(6, 1));
        device.add(a, b);
        device.multiply(c, ids[2]);
        device.scale_rows(d, &|row| 0.5 + row as f32);
        device.softcap(e, 0.3);
        device.add_gated(b, a, gate);
        let scaled = device.put_rows(&Random::new(9).rows(6, 37));
        device.scale_by(scaled, gate);
        let [between, below] = [(); 2].map(|()| device.put_rows(&Random::new(8).rows(6, 37)));
        device.clamp(between, -0.25, 0.5);
        device.clamp(below, f32::NEG_INFINITY, 0.125);
        let wide = device.put_rows(&Random::new(6).rows(6, 50));
        device.put(wide, c, 9);
        let taken = device.temp(6, 11).unwrap();
        device.take(taken, wide, 7);
        let gathered = device.temp(4, 37).unwrap();
        device.gather(gathered, d, &[5, 0, 3, 3]);
        let kept = device.keep_rows(e, &[1, 2, 5]);
        let moved = device.put_rows(&Random::new(7).rows(70, 3));
        let moved = device.keep_rows(moved, &(0..70).step_by(3).collect::<Vec<u32>>());
        vec![a, b, c, d, scaled, between, below, wide, taken, gathered, kept, moved]
    });
}

#[test]
#[ignore = "external"]
fn rotations_at_near_and_far_positions() {
    let _alone = alone();
    for interleaved in [false, true] {
        both(1e-6, "rope", |device, ids| {
            let mut random = Random::new(8);
            let [x, y] = [random.rows(3, 64), random.rows(3, 96)].map(|rows| device.put_rows(&rows));
            let angles = device.temp(3, 16).unwrap();
            device.rope_angles(angles, ids[6], &[0, 131, 1_000_001], 1.25);
            device.rope(x, angles, 32, interleaved);
            device.rope(y, angles, 16, interleaved);
            vec![angles, x, y]
        });
    }
}

/// A sequence's part of a step: its first position, its rows, its pages, and the first position it sees.
type Part = (usize, usize, Vec<u32>, usize);

struct Attending {
    dtype: KvDtype,
    kv_heads: usize,
    head_dim: usize,
    spec: Attention,
    norms: bool,
}

/// The step of these parts, through the attention of one layer.
fn attend(
    device: &mut dyn Rig,
    ids: &[VectorId],
    of: &Attending,
    parts: &[Part],
    qkv: &[Vec<Vec<f32>>; 3],
) -> Vec<Vec<f32>> {
    let (mut seqs, mut pages, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    for (start, rows, own, seen_from) in parts {
        seqs.push(SeqSpan {
            first_row: positions.len(),
            rows: *rows,
            start: *start,
            pages_at: pages.len(),
            pages: own.len(),
            seen_from: *seen_from,
            state: None,
        });
        positions.extend(*start as u32..(start + rows) as u32);
        pages.extend_from_slice(own);
    }
    let tokens = vec![0; positions.len()];
    let step = StepInput {
        tokens: &tokens,
        positions: &positions,
        seqs: &seqs,
        pages: &pages,
        window_pages: &pages,
        ..StepInput::default()
    };
    let scope = device.mark();
    let [q, k, v] = [0, 1, 2].map(|i| device.put_rows(&qkv[i]));
    let out = device.temp(q.rows, q.cols).unwrap();
    let angles = device.temp(q.rows, 16).unwrap();
    device.rope_angles(angles, ids[6], &positions, 1.0);
    let norms = of.norms.then(|| [ids[4], ids[5]]);
    let rotary = Rotary { norms, eps: 1e-5, angles, interleaved: false };
    device.attention(&of.spec, Some(&rotary), out, q, Some([k, v]), &step);
    let rows = device.rows_of(&[out]).remove(0);
    device.release(scope);
    rows
}

fn check_attention(of: &Attending, tolerance: f32) {
    let (table, _, ids) = vectors();
    let layer = KvLayer { kv_heads: of.kv_heads, head_dim: of.head_dim, heads: of.spec.heads, window: of.spec.window };
    let (checkpoint, shape) = (checkpoint("llama"), shape_of(KvShape::grouped(of.dtype, [layer])));
    let (mut cpu, mut gpu) = (cpu(&table, &checkpoint, &shape), gpu(&table, &checkpoint, &shape));
    let mut random = Random::new(of.head_dim as u64);
    let pages = |first: u32, count: u32| (0..count).map(|i| first + (i * 5) % count).collect::<Vec<u32>>();
    // A long prompt in two chunks, then an answer beside another sequence that begins.
    let steps: [Vec<Part>; 4] = [
        vec![(0, 50, pages(0, 8), 0)],
        vec![(50, 37, pages(0, 8), 0), (0, 3, pages(20, 4), 0)],
        vec![(87, 1, pages(0, 8), 0), (3, 1, pages(20, 4), 0), (0, 20, pages(30, 2), 0)],
        vec![(88, 2, pages(0, 8), 5), (4, 1, pages(20, 4), 2)],
    ];
    for (i, parts) in steps.iter().enumerate() {
        let rows = parts.iter().map(|part| part.1).sum();
        let width = of.kv_heads * of.head_dim;
        let qkv = [random.rows(rows, of.spec.heads * of.head_dim), random.rows(rows, width), random.rows(rows, width)];
        let what = format!("{:?}, {} heads of {}, {:?}, step {i}", of.dtype, of.spec.heads, of.head_dim, of.spec);
        let expected = attend(&mut cpu, &ids, of, parts, &qkv);
        let got = attend(&mut gpu, &ids, of, parts, &qkv);
        close(&what, &got, &expected, tolerance);
        // Every sequence alone, and its rows one by one, give the same bits: what they store is what is there already.
        let mut first = 0;
        for part in parts {
            for row in 0..part.1 {
                let one = qkv.each_ref().map(|rows| vec![rows[first + row].clone()]);
                let alone = attend(&mut gpu, &ids, of, &[(part.0 + row, 1, part.2.clone(), part.3)], &one);
                assert_eq!(alone[0], got[first + row], "{what}: row {row} of the sequence at {} alone", part.0);
            }
            first += part.1;
        }
    }
}

#[test]
#[ignore = "external"]
fn attention_over_pages() {
    let _alone = alone();
    let plain = Attention { layer: 0, heads: 4, scale: 0.25, ..Attention::WHOLE };
    let (_, _, ids) = vectors();
    for dtype in [KvDtype::F16, KvDtype::F32, KvDtype::Bf16, KvDtype::Q8] {
        for (heads, kv_heads, head_dim) in [(4, 2, 16), (3, 1, 80), (2, 2, 256)] {
            let spec = Attention { heads, ..plain };
            // The CPU multiplies codes by codes.
            let tolerance = if dtype == KvDtype::Q8 { 1e-2 } else { 2e-5 };
            check_attention(&Attending { dtype, kv_heads, head_dim, spec, norms: head_dim == 16 }, tolerance);
        }
    }
    for spec in [
        Attention { window: Some(20), ..plain },
        Attention { window: Some(1), ..plain },
        Attention { window: Some(20), chunked: true, ..plain },
        Attention { softcap: Some(0.7), ..plain },
        Attention { sinks: Some(ids[7]), ..plain },
        Attention { sinks: Some(ids[7]), window: Some(33), softcap: Some(2.0), ..plain },
    ] {
        check_attention(&Attending { dtype: KvDtype::F16, kv_heads: 2, head_dim: 16, spec, norms: false }, 2e-5);
    }
}

#[test]
#[ignore = "external"]
fn steps_take_no_memory_and_too_much_is_refused() {
    let _alone = alone();
    let (table, id, ids) = vectors();
    let (checkpoint, shape) = (checkpoint("llama"), small_shape());
    let mut gpu = gpu(&table, &checkpoint, &shape);
    let step = |gpu: &mut plimsoll_gpu::GpuDevice, rows: usize| {
        gpu.begin_step();
        let x = gpu.temp(rows, 64).unwrap();
        let tokens = vec![1; rows];
        gpu.embed(x, id, &tokens, 1.0);
        gpu.rms_norm(x, x, ids[0], 1e-5);
        gpu.finish(&[x]).unwrap();
        gpu.context().allocated()
    };
    let first = step(&mut gpu, 300);
    assert!(first.is_some(), "the allocator reports");
    for rows in [1, 2, 300, 17] {
        for _ in 0..50 {
            assert_eq!(step(&mut gpu, rows), first, "bytes on the device");
        }
    }
    gpu.begin_step();
    let x = gpu.temp(1 << 16, 64).unwrap();
    gpu.fill(x, &vec![0.0; 1 << 22]);
    let error = gpu.finish(&[]).unwrap_err().to_string();
    assert!(error.contains("16777216 bytes needed"), "{error}");
    let error = gpu.finish(&[x, x]).unwrap_err().to_string();
    assert!(error.contains("33554432 bytes needed"), "{error}");
    assert_eq!(step(&mut gpu, 300), first, "it goes on");
}

#[test]
#[ignore = "external"]
fn memory_that_cannot_be_had_is_named_and_given_back() {
    let _alone = alone();
    let ledger = Arc::new(Ledger::new());
    Component::ALL.iter().for_each(|component| ledger.plan(*component, u64::MAX / 2));
    let adapter = Adapter::find(AdapterChoice { index: None, allow_software: true }).unwrap();
    let mut context = Context::open(&adapter).unwrap();
    let (upload, readback) = (1 << 16, 1 << 16);
    let sizes = Sizes { pages: [16, 0], slots: 0, arena: 1 << 20, upload, readback, calls: 64, outputs: 4 };
    let mut build = |sizes| GpuMemory::new(&mut context, &ledger, &small_shape(), sizes).map(drop);
    build(sizes).unwrap();
    assert_eq!(ledger.committed_total(), 0, "a generation that is gone holds nothing");
    for (component, sizes) in [
        ("kv_pages", Sizes { pages: [1 << 40, 0], ..sizes }),
        ("step_workspace", Sizes { arena: 1 << 44, ..sizes }),
        ("step_workspace", Sizes { readback: 1 << 44, ..sizes }),
    ] {
        let error = build(sizes).unwrap_err().to_string();
        assert!(error.starts_with(component) && error.contains("refused"), "{error}");
        assert_eq!(ledger.committed_total(), 0, "{component}: what was there before the refusal");
    }
    build(sizes).unwrap();
    ledger.seal();
    let error = build(sizes).unwrap_err().to_string();
    assert!(error.contains("the server is ready"), "{error}");
    assert_eq!(ledger.allocations().1, 1);
}
