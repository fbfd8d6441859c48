//! Layers of unlike heads share one cache, in the pages of the whole context or in those of a window.

use crate::common::random::Random;
use crate::common::{checkpoint, device_of, matrix, rows, shape};
use plimsoll_device::{
    Attention, CpuDevice, Declare, Device, DtypePolicy, Encoded, Isa, KvDtype, KvGroup, KvLayer, KvShape, ModelShape,
    PAGE_TOKENS, Rotary, SeqSpan, StepInput,
};

/// The layers of the cache: two geometries without a window, two with one.
const LAYERS: [KvLayer; 4] = [
    KvLayer { kv_heads: 2, head_dim: 16, heads: 4, window: None },
    KvLayer { kv_heads: 1, head_dim: 48, heads: 6, window: Some(WINDOW) },
    KvLayer { kv_heads: 3, head_dim: 32, heads: 3, window: None },
    KvLayer { kv_heads: 2, head_dim: 64, heads: 2, window: Some(20) },
];
const WINDOW: usize = 40;
const POSITIONS: usize = 150;
/// Rows of each step.
const CHUNKS: [usize; 9] = [17, 1, 1, 40, 3, 16, 31, 1, 40];

fn device(layers: &[KvLayer], pages: [usize; 2], threads: usize) -> CpuDevice {
    let checkpoint = checkpoint("llama");
    let table = Declare::new(&checkpoint, DtypePolicy::Auto).finish();
    let kv = KvShape::grouped(KvDtype::F16, layers.iter().copied());
    device_of(&table, &checkpoint, &ModelShape { kv, ..shape(None) }, pages, threads, Isa::detect())
}

fn spec(layer: usize, of: &KvLayer) -> Attention {
    Attention { layer, heads: of.heads, scale: 0.2, window: of.window, ..Attention::WHOLE }
}

/// Queries, keys and values of one layer at every position.
fn filled(seed: usize, of: &KvLayer) -> [Vec<Vec<f32>>; 3] {
    let mut random = Random::new(seed as u64 + 1);
    [of.heads, of.kv_heads, of.kv_heads]
        .map(|heads| (0..POSITIONS).map(|_| random.floats(heads * of.head_dim)).collect())
}

/// Every row's output of one layer, chunk by chunk; `table` names the pages for the rows from `start` to `end`.
fn run(
    device: &mut CpuDevice,
    spec: &Attention,
    of: &KvLayer,
    [q, k, v]: &[Vec<Vec<f32>>; 3],
    table: impl Fn(usize, usize) -> [Vec<u32>; 2],
) -> Vec<Vec<u32>> {
    let (mut start, mut all) = (0, Vec::new());
    for count in CHUNKS {
        device.begin_step();
        let end = start + count;
        let [q, k, v] = [q, k, v].map(|values| matrix(device, &values[start..end]));
        let out = device.temp(count, of.heads * of.head_dim).unwrap();
        let [pages, window_pages] = table(start, end);
        let seqs =
            [SeqSpan { first_row: 0, rows: count, start, pages_at: 0, pages: pages.len(), seen_from: 0, state: None }];
        let step = StepInput { seqs: &seqs, pages: &pages, window_pages: &window_pages, ..StepInput::default() };
        device.attention(spec, None, out, q, Some([k, v]), &step);
        all.extend(rows(device, out));
        start = end;
    }
    all
}

/// Returns the pages, from a ring of `ring` pages, that rows from `start` to `end` see through the widest window; page 0 before it.
fn ring(start: usize, end: usize, ring: usize) -> Vec<u32> {
    let first = (start + 1).saturating_sub(WINDOW) / PAGE_TOKENS;
    (0..end.div_ceil(PAGE_TOKENS)).map(|page| if page < first { 0 } else { (page % ring) as u32 }).collect()
}

#[test]
fn a_layer_computes_the_same_in_any_cache() {
    // A chunk of 40 rows sees its own positions and 39 before it.
    let need = (WINDOW - 1 + 40).div_ceil(PAGE_TOKENS) + 1;
    let pages = POSITIONS.div_ceil(PAGE_TOKENS);
    for threads in [1, 3] {
        let mut mixed = device(&LAYERS, [pages, need], threads);
        assert_eq!([KvGroup::Whole, KvGroup::Window].map(|group| mixed.memory().pages(group)), [pages, need]);
        for (layer, of) in LAYERS.iter().enumerate() {
            let alone = KvLayer { window: None, ..*of };
            let values = filled(layer, of);
            let all = |_, end: usize| [(0..end.div_ceil(PAGE_TOKENS) as u32).collect(), Vec::new()];
            let expected = run(&mut device(&[alone], [pages, 0], 1), &spec(0, of), of, &values, all);
            // The pages of the whole context, in reverse order.
            let whole = |end: usize| (0..end.div_ceil(PAGE_TOKENS)).map(|page| (pages - 1 - page) as u32).collect();
            let found =
                run(&mut mixed, &spec(layer, of), of, &values, |start, end| [whole(end), ring(start, end, need)]);
            assert_eq!(found, expected, "layer {layer} on {threads} threads");
        }
    }
}

#[test]
fn layers_lie_one_after_another_in_the_pages_of_their_group() {
    let kv = KvShape::grouped(KvDtype::F16, LAYERS);
    // Two bytes an element, keys and values.
    let bytes = |heads: usize, dim: usize| 2 * 2 * heads * dim * PAGE_TOKENS;
    assert_eq!(kv.page_bytes(KvGroup::Whole), bytes(2, 16) + bytes(3, 32));
    assert_eq!(kv.page_bytes(KvGroup::Window), bytes(1, 48) + bytes(2, 64));
    assert_eq!(kv.layers().iter().map(|layer| layer.offset).collect::<Vec<_>>(), [0, 0, bytes(2, 16), bytes(1, 48)]);
    assert_eq!((kv.window(), kv.count(KvGroup::Whole), kv.count(KvGroup::Window)), (Some(WINDOW), 2, 2));
    assert_eq!(kv.bytes(3, 5), 3 * (bytes(2, 16) + bytes(3, 32)) + 5 * (bytes(1, 48) + bytes(2, 64)));
    let plain = KvShape::new(KvDtype::F16, LAYERS);
    assert_eq!((plain.window(), plain.page_bytes(KvGroup::Window)), (None, 0));
    assert_eq!(plain.page_bytes(KvGroup::Whole), kv.bytes(1, 1));
}

/// A row sees its chunk up to itself, in pages of the whole context and in those of a window: what a window of its own length leaves.
#[test]
fn a_row_sees_its_chunk_and_nothing_before() {
    let (of, pages) = (LAYERS[3], POSITIONS.div_ceil(PAGE_TOKENS));
    let chunk = of.window.expect("it has one");
    let need = (WINDOW - 1 + 40).div_ceil(PAGE_TOKENS) + 1;
    let (mut whole, values) = (device(&[KvLayer { window: None, ..of }], [pages, 0], 2), filled(3, &of));
    let all = |_: usize, end: usize| [(0..end.div_ceil(PAGE_TOKENS) as u32).collect(), Vec::new()];
    let chunked = |layer| Attention { chunked: true, ..spec(layer, &of) };
    let found = run(&mut whole, &chunked(0), &of, &values, all);
    for seen in 1..=chunk {
        let sliding = run(&mut whole, &Attention { window: Some(seen), ..spec(0, &of) }, &of, &values, all);
        for row in (seen - 1..POSITIONS).step_by(chunk) {
            assert_eq!(found[row], sliding[row], "row {row} sees {seen}");
        }
    }
    let mut mixed = device(&LAYERS, [pages, need], 3);
    let ringed =
        run(&mut mixed, &chunked(3), &of, &values, |start, end| [all(0, end)[0].clone(), ring(start, end, need)]);
    assert_eq!(ringed, found);
}

/// Behind an encoder's output a row sees the output alone or what follows it, in any chunks: what a window of that length leaves, and what
/// the last row of the output sees.
#[test]
fn a_row_sees_an_encoders_output_or_what_follows_it() {
    let (of, pages, output) = (LAYERS[0], POSITIONS.div_ceil(PAGE_TOKENS), 51);
    let (mut device, mut values) = (device(&[of], [pages, 0], 3), filled(4, &of));
    let all = |_: usize, end: usize| [(0..end.div_ceil(PAGE_TOKENS) as u32).collect(), Vec::new()];
    let encoded = |encoded| Attention { encoded: Some(encoded), ..spec(0, &of) };
    let behind = run(&mut device, &encoded(Encoded::Behind(output)), &of, &values, all);
    for seen in 1..=POSITIONS - output {
        let row = output + seen - 1;
        let sliding = run(&mut device, &Attention { window: Some(seen), ..spec(0, &of) }, &of, &values, all);
        assert_eq!(behind[row], sliding[row], "row {row} sees {seen}");
    }
    let within = run(&mut device, &encoded(Encoded::Within(output)), &of, &values, all);
    for row in (output..POSITIONS).step_by(7) {
        values[0][output - 1] = values[0][row].clone();
        let plain = run(&mut device, &spec(0, &of), &of, &values, all);
        assert_eq!(within[row], plain[output - 1], "row {row}");
    }
    let alone = run(&mut device, &Attention { window: Some(1), ..spec(0, &of) }, &of, &filled(4, &of), all);
    assert_eq!(behind[..output], alone[..output], "a row of the output sees itself");
}

/// A layer without keys and values of its own reads another's, and makes its queries ready as it would with them.
#[test]
fn a_layer_reads_what_another_has_stored() {
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let norms = [declare.values(vec![0.7; 16]), declare.values(vec![1.1; 16])];
    let table = declare.finish();
    let of = LAYERS[0];
    let mut device = device_of(&table, &checkpoint, &shape(None), [4, 0], 2, Isa::detect());
    let [q, k, v] = filled(9, &of).map(|values| matrix(&mut device, &values[..40]));
    let copy = filled(9, &of);
    let again = matrix(&mut device, &copy[0][..40]);
    let angles = matrix(
        &mut device,
        &(0..40).map(|i| [[(i as f32).cos(); 8], [(i as f32).sin(); 8]].concat()).collect::<Vec<_>>(),
    );
    let rotary = Rotary { norms: Some(norms), eps: 1e-6, angles, interleaved: false };
    let seqs = [SeqSpan { first_row: 0, rows: 40, start: 0, pages_at: 0, pages: 3, seen_from: 0, state: None }];
    let step = StepInput { seqs: &seqs, pages: &[2, 0, 1], ..StepInput::default() };
    let [own, shared] = [(); 2].map(|()| device.temp(40, q.cols).unwrap());
    device.attention(&spec(0, &of), Some(&rotary), own, q, Some([k, v]), &step);
    device.attention(&spec(0, &of), Some(&rotary), shared, again, None, &step);
    assert_eq!(rows(&mut device, own), rows(&mut device, shared));
}

/// `ends` lets a row attend to later rows, with and without a window. Other rows do not change.
#[test]
fn rows_of_an_image_see_each_other() {
    for (layer, window) in [(0, None), (1, Some(7))] {
        let of = KvLayer { window, ..LAYERS[layer] };
        let mut device = device(&[of], [4, 4], 2);
        let [q, k, v] = filled(9, &of).map(|values| values[..40].to_vec());
        let seqs = [SeqSpan { first_row: 0, rows: 40, start: 0, pages_at: 0, pages: 3, seen_from: 0, state: None }];
        let mut attend = |[q, k, v]: [&[Vec<f32>]; 3], ends: &[u32]| {
            device.begin_step();
            let [q, k, v] = [q, k, v].map(|values| matrix(&mut device, values));
            let pages = &[2, 0, 1];
            let step = StepInput { seqs: &seqs, pages, window_pages: pages, ends, ..StepInput::default() };
            let out = device.temp(40, q.cols).unwrap();
            device.attention(&spec(0, &of), None, out, q, Some([k, v]), &step);
            rows(&mut device, out)
        };
        let ends: Vec<u32> = (0..40).map(|row| if (11..31).contains(&row) { 31 } else { row + 1 }).collect();
        let (plain, seen) = (attend([&q, &k, &v], &[]), attend([&q, &k, &v], &ends));
        for row in 0..40 {
            assert_eq!(plain[row] == seen[row], !(11..30).contains(&row), "layer {layer}, row {row}");
        }
        // Every row of the image attends to the same keys: the query of row 15 has one result in row 15 and in the last row.
        let mut moved = q.clone();
        moved[30] = q[15].clone();
        if window.is_none() {
            assert_eq!(attend([&moved, &k, &v], &[])[30], seen[15], "row 15 sees all that row 30 sees");
        }
    }
}
