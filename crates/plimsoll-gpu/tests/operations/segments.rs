//! Weights in several segments: products, rows of tables and experts have the bits that they have in one segment.

use plimsoll_device::weights::RowPiece;
use plimsoll_device::{Activation, Declare, DtypePolicy, Experts, LinearId, Mode, WeightTable};
use plimsoll_gpu::Context;
use plimsoll_gpu::segments::Segments;
use plimsoll_kernels::{PANEL, Packing};

use super::common::random::Random;
use super::common::{Rig, alone, checkpoint, close, cpu, gpu_on, opened};
use super::{PACKED, product, rows_by_token, small_shape, some_linears};

/// Panels that are packed together, and so the fewest of a segment.
const TASK: usize = 8;

/// Experts of a set, and how many of them a row takes.
const EXPERTS: usize = 4;
const TOP: usize = 2;

/// A long matrix with a bias, and experts.
struct Declared {
    table: WeightTable,
    long: LinearId,
    gate: Vec<LinearId>,
    up: Vec<LinearId>,
    down: Vec<LinearId>,
    /// Segments of at most so many bytes hold the long matrix in four pieces, or in two.
    four: u64,
    two: u64,
}

/// The rows of a fixture's matrix over and over, so that a matrix of any packing fills several segments.
fn declared(name: &str, tensor: &str, packing: Packing) -> Declared {
    let checkpoint = checkpoint(name);
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let (stored, k) = ([packing.out(), packing.k()], packing.k());
    let stacked = |first: usize, rows: usize| RowPiece { first, rows, run: packing.out() - first, stride: 0 };
    // Three whole segments and a panel of which a part is padding.
    let unit = k.div_ceil(PANEL).next_multiple_of(TASK);
    let out = 3 * unit * PANEL + 11;
    let bias = declare.values(Random::new(5).floats(out));
    let set = |declare: &mut Declare<'_>, from: usize| {
        let expert = |i| declare.linear_rows(tensor, &stored, &[stacked(from + i, k)], k).unwrap();
        let ids: Vec<LinearId> = (0..EXPERTS).map(expert).collect();
        declare.experts(&ids);
        ids
    };
    let gate = set(&mut declare, 0);
    let long = declare.biased_rows(tensor, &stored, stacked(0, out), k, Some(bias)).unwrap();
    let (up, down) = (set(&mut declare, 7), set(&mut declare, 13));
    // The last panel has room behind the third piece, and no room behind the second of two halves.
    let [four, two] = [unit + 2, 2 * unit].map(|panels| (panels * packing.panel_bytes()) as u64);
    Declared { table: declare.finish(), long, gate, up, down, four, two }
}

/// Segments that hold a part of these matrices.
fn segments_of(segments: &Segments, ids: &[LinearId]) -> usize {
    let mut used: Vec<usize> = ids.iter().flat_map(|id| segments.pieces(*id)).map(|piece| piece.segment).collect();
    used.sort_unstable();
    used.dedup();
    used.len()
}

impl Declared {
    fn experts_of(&self, device: &mut dyn Rig, x: &[Vec<f32>], router: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let scope = device.mark();
        let (x, router) = (device.put_rows(x), device.put_rows(router));
        let out = device.temp(x.rows, x.cols).unwrap();
        let spec = Experts {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            top_k: TOP,
            renormalise: true,
            act: Activation::Silu,
            scoring: None,
            weighs_inputs: false,
        };
        device.experts(&spec, out, x, router, Mode::Store).unwrap();
        let rows = device.rows_of(&[out]).remove(0);
        device.release(scope);
        rows
    }

    /// Sums of four rows of the long matrix each.
    fn blended(&self, device: &mut dyn Rig, rows: usize) -> Vec<Vec<f32>> {
        let packing = self.table.linear(self.long).packing;
        let scope = device.mark();
        let x = device.put_rows(&vec![vec![0.25; packing.k()]; rows]);
        let row = |i: usize| (i * packing.out() / rows) as u32;
        device.add_blended(x, self.long, &|i| [0, 1, 2, 3].map(|j| (row((i + j) % rows), 0.4 - 0.1 * j as f32)));
        let rows = device.rows_of(&[x]).remove(0);
        device.release(scope);
        rows
    }

    /// The results of everything that reads weights: products of few rows and of many, rows of the table, experts of few rows and of many.
    fn results(&self, device: &mut dyn Rig) -> Vec<(String, Vec<Vec<f32>>)> {
        let packing = self.table.linear(self.long).packing;
        let mut random = Random::new(11);
        let (x, router) = (random.rows(48, packing.k()), random.rows(48, EXPERTS));
        let mut results = Vec::new();
        for rows in [1, 6, 37] {
            let made = product(device, self.long, &x[..rows], packing.out());
            results.push((format!("product of {rows} rows"), made));
        }
        // The first and last row of every segment, and those around.
        let tokens: Vec<u32> = (0..packing.out() as u32).filter(|row| (row + 1) % (8 * PANEL as u32) <= 2).collect();
        results.push(("rows of the table".into(), rows_by_token(device, self.long, &tokens, packing.k())));
        for rows in [3, 48] {
            let made = self.experts_of(device, &x[..rows], &router[..rows]);
            results.push((format!("experts of {rows} rows"), made));
        }
        results
    }
}

#[test]
#[ignore = "external"]
fn weights_in_several_segments_have_the_bits_of_one() {
    let _alone = alone();
    let (mut seen, mut context) = (Vec::new(), opened());
    for name in PACKED {
        let (table, ids) = some_linears(name);
        for id in ids {
            let (linear, kind) = (table.linear(id), table.linear(id).packing.kind());
            if seen.contains(&kind) {
                continue;
            }
            seen.push(kind);
            let of = declared(name, &linear.name, linear.packing);
            assert_eq!(of.table.linear(of.long).packing.kind(), kind, "{name}");
            context = in_segments(context, &format!("{name}: {kind:?}"), name, &of);
        }
    }
    assert!(seen.len() >= 16, "{} packings: {seen:?}", seen.len());
}

fn in_segments(mut context: Context, what: &str, name: &str, of: &Declared) -> Context {
    let (checkpoint, shape) = (checkpoint(name), small_shape());
    let (mut expected, mut blended) = (Vec::new(), Vec::new());
    // All in one, then the long matrix in four and in two.
    for (limit, pieces) in [(64 << 20, 1), (of.four, 4), (of.two, 2)] {
        context.cut_weights_at(limit);
        let mut gpu = gpu_on(context, &of.table, &checkpoint, &shape);
        let (got, sums) = (of.results(&mut gpu), of.blended(&mut gpu, 5));
        let (again, weights) = gpu.into_parts();
        context = again;
        let own = weights.segments().pieces(of.long);
        assert_eq!(own.len(), pieces, "{what}: {own:?}");
        assert!(pieces == 2 || own.last().is_some_and(|piece| piece.offset > 0), "{what}: {own:?}");
        if pieces > 1 {
            let sets = [&of.gate, &of.up, &of.down].map(|set| segments_of(weights.segments(), set));
            assert!(sets.iter().any(|set| *set > 1) && sets.iter().all(|set| *set <= 4), "{what}: {sets:?}");
            for ((part, expected), (_, got)) in expected.iter().zip(got) {
                assert!(got == *expected, "{what}, {part}: other bits in {pieces} segments");
            }
            // A sum of rows is added segment by segment.
            close(&format!("{what}, sums of rows in {pieces}"), &sums, &blended, 1e-6);
            continue;
        }
        let mut cpu = cpu(&of.table, &checkpoint, &shape);
        for ((part, got), (_, expected)) in got.iter().zip(of.results(&mut cpu)) {
            // As in other tests of products; an expert is three of them, one after another.
            let tolerance = if part.starts_with("experts") { 6e-4 } else { 2e-4 };
            close(&format!("{what}, {part}"), got, &expected, tolerance);
        }
        (expected, blended) = (got, of.blended(&mut cpu, 5));
        close(&format!("{what}, sums of rows"), &sums, &blended, 1e-6);
    }
    context
}
