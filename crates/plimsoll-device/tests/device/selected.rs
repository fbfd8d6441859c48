//! Sparse attention on the CPU device: what rows select and attend to, whatever the chunks, threads, instruction sets and neighbours.

use crate::common::random::Random;
use crate::common::{checkpoint, device_of, matrix, rows, shape};
use plimsoll_device::{
    Attention, CpuDevice, Declare, Device, DtypePolicy, Isa, KvDtype, KvLayer, KvShape, ModelShape, PAGE_TOKENS,
    Selection, SeqSpan, StepInput, WeightTable,
};

/// Beyond the first split of attention.
const POSITIONS: usize = 700;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const WIDTH: usize = 16;
const INDEX_HEADS: usize = 3;
const INDEX_WIDTH: usize = 20;
/// Blocks lie across pages.
const BLOCK: usize = 5;
const BLOCKS: usize = 12;
const EPS: f32 = 1e-5;

struct Rig {
    device: CpuDevice,
    spec: Selection,
}

fn spec(declare: &mut Declare<'_>) -> Selection {
    let from = Selection::selects_from(BLOCKS, BLOCK);
    Selection {
        attention: Attention { layer: 1, heads: HEADS, scale: 0.25, selects_from: Some(from), ..Attention::WHOLE },
        heads: INDEX_HEADS,
        block: BLOCK,
        blocks: BLOCKS,
        norm: declare.values(norm()),
        eps: EPS,
        frequencies: declare.values(frequencies()),
        axes: None,
        rope_scale: 1.0,
    }
}

fn norm() -> Vec<f32> {
    (0..INDEX_WIDTH).map(|i| 0.5 + i as f32 / 16.0).collect()
}

fn frequencies() -> Vec<f32> {
    (0..4).map(|i| 0.1_f32.powi(i)).collect()
}

fn rig(dtype: KvDtype, threads: usize, isa: Isa) -> Rig {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let spec = spec(&mut declare);
    let table: WeightTable = declare.finish();
    let layer = KvLayer { kv_heads: KV_HEADS, head_dim: WIDTH, heads: HEADS, window: None };
    let kv = KvShape::new(dtype, [layer, layer]).with_index(INDEX_WIDTH);
    let device = device_of(&table, &checkpoint, &ModelShape { kv, ..shape(None) }, [128, 0], threads, isa);
    Rig { device, spec }
}

/// The inputs of a position of a sequence: query, key, value, index queries, index key.
fn inputs(sequence: usize, position: usize) -> [Vec<f32>; 5] {
    let mut random = Random::new((sequence * 10_000 + position) as u64 + 1);
    let widths = [HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH, INDEX_HEADS * INDEX_WIDTH, INDEX_WIDTH];
    widths.map(|width| random.floats(width))
}

impl Rig {
    /// Returns the results of rows from `start` to `end` of some sequences.
    fn step(&mut self, parts: &[(usize, usize, usize)]) -> Vec<Vec<u32>> {
        self.device.begin_step();
        let (mut seqs, mut pages, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for (sequence, start, end) in parts.iter().copied() {
            let count = end.div_ceil(PAGE_TOKENS);
            let (first_row, pages_at, rows) = (all.len(), pages.len(), end - start);
            seqs.push(SeqSpan { first_row, rows, start, pages_at, pages: count, seen_from: 0, state: None });
            // Pages of the sequences take turns.
            pages.extend((0..count as u32).map(|page| 2 * page + sequence as u32));
            all.extend((start..end).map(|position| inputs(sequence, position)));
        }
        let [q, k, v, queries, keys] = std::array::from_fn(|which| {
            let values: Vec<Vec<f32>> = all.iter().map(|row| row[which].clone()).collect();
            matrix(&mut self.device, &values)
        });
        let step = StepInput { seqs: &seqs, pages: &pages, ..StepInput::default() };
        let out = self.device.temp(all.len(), HEADS * WIDTH).unwrap();
        let chosen = self.device.temp(all.len(), 2 * BLOCKS).unwrap();
        self.device.attention(&self.spec.attention, None, out, q, Some([k, v]), &step);
        self.device.attend_selected(&self.spec, out, q, [queries, keys, chosen], &step);
        rows(&mut self.device, out)
    }

    /// All positions of a sequence in chunks of these lengths.
    fn in_chunks(&mut self, lengths: &[usize]) -> Vec<Vec<u32>> {
        let (mut start, mut all) = (0, Vec::new());
        for length in lengths.iter().cycle() {
            let end = (start + length).min(POSITIONS);
            all.extend(self.step(&[(0, start, end)]));
            if end == POSITIONS {
                return all;
            }
            start = end;
        }
        unreachable!("there are lengths")
    }
}

/// The same in double precision.
fn expected(position: usize) -> Vec<f64> {
    let at = |which: usize, position: usize| -> Vec<f64> {
        inputs(0, position)[which].iter().map(|x| f64::from(*x)).collect()
    };
    let (complete, query) = ((position + 1) / BLOCK, at(3, position));
    let mut scores: Vec<(f64, usize)> = (0..complete).map(|block| (score(&query, block, &at), block)).collect();
    scores.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let chosen = scores.iter().take(BLOCKS).flat_map(|(_, block)| block * BLOCK..(block + 1) * BLOCK);
    let seen: Vec<usize> = chosen.chain(complete * BLOCK..position + 1).collect();
    let q = at(0, position);
    let mut out = Vec::new();
    for head in 0..HEADS {
        let own = head / (HEADS / KV_HEADS) * WIDTH;
        let weight = |seen: &usize| -> f64 {
            let k = at(1, *seen);
            (0.25 * (0..WIDTH).map(|i| q[head * WIDTH + i] * k[own + i]).sum::<f64>()).exp()
        };
        let weights: Vec<f64> = seen.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        out.extend((0..WIDTH).map(|i| {
            seen.iter().zip(&weights).map(|(seen, weight)| weight / total * at(2, *seen)[own + i]).sum::<f64>()
        }));
    }
    out
}

/// A block's score.
fn score(query: &[f64], block: usize, at: &dyn Fn(usize, usize) -> Vec<f64>) -> f64 {
    let mut key = vec![0.0; INDEX_WIDTH];
    for position in block * BLOCK..(block + 1) * BLOCK {
        key.iter_mut().zip(at(4, position)).for_each(|(sum, x)| *sum += x / BLOCK as f64);
    }
    let mean = key.iter().map(|x| x * x).sum::<f64>() / INDEX_WIDTH as f64;
    let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
    key.iter_mut().zip(norm()).for_each(|(x, weight)| *x *= factor * f64::from(weight));
    for (i, frequency) in frequencies().iter().enumerate() {
        let (sin, cos) = (f64::from(*frequency) * (block * BLOCK) as f64).sin_cos();
        let (a, b) = (key[i], key[i + 4]);
        (key[i], key[i + 4]) = (a * cos - b * sin, b * cos + a * sin);
    }
    query.chunks(INDEX_WIDTH).map(|head| head.iter().zip(&key).map(|(a, b)| a * b).sum::<f64>().max(0.0)).sum()
}

#[test]
fn rows_attend_to_the_blocks_of_the_greatest_scores() {
    let found = rig(KvDtype::F32, 2, Isa::detect()).in_chunks(&[POSITIONS]);
    let from = Selection::selects_from(BLOCKS, BLOCK);
    for position in [0, 17, from - 1, from, from + 1, 200, 510, 511, 512, 513, 640, POSITIONS - 1] {
        for (found, expected) in found[position].iter().zip(expected(position)) {
            let found = f64::from(f32::from_bits(*found));
            assert!((found - expected).abs() < 1e-4, "position {position}: {found} instead of {expected}");
        }
    }
}

#[test]
fn chunks_threads_and_instruction_sets_do_not_show() {
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Q8] {
        let whole = rig(dtype, 1, Isa::detect()).in_chunks(&[POSITIONS]);
        for lengths in [&[64][..], &[1, 7, 16, 33], &[3, 61, 2]] {
            assert_eq!(rig(dtype, 3, Isa::detect()).in_chunks(lengths), whole, "{dtype:?}, chunks of {lengths:?}");
        }
        assert_eq!(rig(dtype, 2, Isa::Portable).in_chunks(&[128]), whole, "{dtype:?}, portable");
    }
}

/// Drafts are computed again from the first that is not accepted, also where they had completed a block.
#[test]
fn what_is_computed_again_is_the_same() {
    let whole = rig(KvDtype::F16, 1, Isa::detect()).in_chunks(&[POSITIONS]);
    let mut rig = rig(KvDtype::F16, 2, Isa::detect());
    rig.step(&[(0, 0, 301)]);
    for (start, end) in [(301, 309), (302, 306), (304, 305), (305, 311), (307, 308), (308, 330)] {
        assert_eq!(rig.step(&[(0, start, end)]), whole[start..end], "from {start} to {end}");
    }
}

#[test]
fn neighbours_do_not_show() {
    let whole = rig(KvDtype::F16, 1, Isa::detect()).in_chunks(&[POSITIONS]);
    let mut rig = rig(KvDtype::F16, 2, Isa::detect());
    let first = rig.step(&[(1, 0, 30), (0, 0, 400)]);
    assert_eq!(first[30..], whole[..400]);
    let second = rig.step(&[(0, 400, 401), (1, 30, 500)]);
    assert_eq!(second[0], whole[400]);
    let third = rig.step(&[(1, 500, 501), (0, 401, 600)]);
    assert_eq!(third[1..], whole[401..600]);
}
