//! Attention against a double-precision reference, and against itself: tiles, splits and instruction sets must not show, and
//! what lies beyond the visible positions must not leak.

use crate::kv::{DTYPES, read};
use crate::support::{Aligned, Random, bits, isas};
use plimsoll_kernels::*;

/// A cache of shuffled pages with some positions stored and poison everywhere else.
pub(super) struct Cache {
    layout: KvLayout,
    pub(super) memory: Aligned,
    pub(super) stride: usize,
    pub(super) pages: Vec<u32>,
}

impl Cache {
    pub(super) fn new(layout: KvLayout, positions: usize, seed: u64) -> Cache {
        let mut random = Random::new(seed);
        let count = positions.div_ceil(PAGE);
        let stride = layout.bytes_per_page() + 64;
        let mut memory = Aligned::new((count + 2) * stride);
        memory.bytes_mut().fill(0xff); // NaN in every float format.
        let mut pages: Vec<u32> = (1..=count as u32).collect();
        for i in (1..count).rev() {
            pages.swap(i, random.below(i + 1));
        }
        let width = layout.kv_heads() * layout.width();
        for position in 0..positions {
            let (k, v) = (random.floats(width), random.floats(width));
            let page = &mut memory.bytes_mut()[pages[position / PAGE] as usize * stride..][..layout.bytes_per_page()];
            kv_store(Isa::detect(), &layout, page, position % PAGE, &k, &v);
        }
        Cache { layout, memory, stride, pages }
    }

    pub(super) fn view(&self, kv_head: usize) -> KvPages<'_> {
        let base = self.memory.bytes().as_ptr();
        KvPages { layout: self.layout, base, stride: self.stride, pages: &self.pages, kv_head }
    }

    fn get(&self, kv_head: usize, position: usize, d: usize, value: bool) -> f64 {
        let page = &self.memory.bytes()[self.pages[position / PAGE] as usize * self.stride..];
        read(&self.layout, &page[..self.layout.bytes_per_page()], kv_head, position % PAGE, d, value).into()
    }
}

pub(super) const PLAIN: AttendParams = AttendParams { scale: 0.3, softcap: None, bf16: false, sinks: None };

/// Attention of all rows at once; the output is rows × heads × head_dim.
pub(super) fn run(isa: Isa, kv: &KvPages<'_>, queries: &Queries<'_>, params: &AttendParams) -> Vec<f32> {
    let dim = kv.layout.width();
    let (rows, width) = (queries.spans.len(), queries.heads * dim);
    let mut out = vec![-77.0; rows * (width + 2)];
    let mut scratch = vec![f32::NAN; attend_scratch_len(&kv.layout, params.bf16, rows, queries.heads)];
    let target = AttendOutput { ptr: out.as_mut_ptr(), ld: width + 2 };
    // SAFETY: the cache is whole and the output is this function's own.
    unsafe { attend(isa, kv, queries, params, &mut scratch, target) };
    assert!(out.chunks(width + 2).all(|row| row[width..] == [-77.0; 2]));
    out.chunks(width + 2).flat_map(|row| row[..width].to_vec()).collect()
}

/// The same through splits computed apart.
pub(super) fn run_splits(
    isa: Isa,
    kv: &KvPages<'_>,
    queries: &Queries<'_>,
    params: &AttendParams,
    splits: usize,
) -> Vec<f32> {
    let (dim, rows) = (kv.layout.width(), queries.spans.len());
    let len = rows * queries.heads * attend_partial_len(&kv.layout);
    let mut partials = vec![f32::NAN; splits * len];
    let mut scratch = vec![f32::NAN; attend_scratch_len(&kv.layout, params.bf16, rows, queries.heads)];
    let mut out = vec![0.0; rows * queries.heads * dim];
    let target = AttendOutput { ptr: out.as_mut_ptr(), ld: queries.heads * dim };
    // SAFETY: as above.
    unsafe {
        for split in (0..splits).rev() {
            attend_split(isa, kv, queries, params, split, &mut scratch, &mut partials[split * len..][..len]);
        }
        attend_combine(isa, &kv.layout, rows, queries.heads, &mut partials, params.sinks, target);
    }
    out
}

/// One query in double precision; `params` have the sink of its head alone.
fn reference(cache: &Cache, kv_head: usize, q: &[f32], span: Span, params: &AttendParams) -> Vec<f64> {
    let positions = span.first as usize..span.end as usize;
    let score = |position: usize| {
        let dot = |(d, q): (usize, &f32)| f64::from(*q) * cache.get(kv_head, position, d, false);
        let score = q.iter().enumerate().map(dot).sum::<f64>() * f64::from(params.scale);
        params.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    let scores: Vec<f64> = positions.clone().map(score).collect();
    let sink: f64 = params.sinks.iter().map(|sinks| f64::from(sinks[0]).exp()).sum();
    let sum = sink + scores.iter().map(|score| score.exp()).sum::<f64>();
    let value = |d: usize| {
        let term = |(position, score): (usize, &f64)| score.exp() / sum * cache.get(kv_head, position, d, true);
        positions.clone().zip(&scores).map(term).sum()
    };
    (0..q.len()).map(value).collect()
}

/// Rows at consecutive positions up to `end`, seeing at most `window` positions.
pub(super) fn causal(rows: usize, end: usize, window: usize) -> Vec<Span> {
    let row = |r: usize| end - rows + 1 + r;
    let span = |r: usize| Span { first: row(r).saturating_sub(window) as u32, end: row(r) as u32, pages_at: 0 };
    (0..rows).map(span).collect()
}

/// Expects results within `limit` of the reference, over formats, shapes, softcaps and windows.
pub(super) fn expect_near_double_precision(isa: Isa, plain: AttendParams, limit: f64) {
    let mut random = Random::new(30);
    for dtype in DTYPES {
        for (head_dim, positions, rows, heads) in [
            (64, 1100, 3, 5),
            (48, 40, 4, 1),
            (128, 530, 1, 1),
            (80, 17, 9, 2),
            // No multiples of sixteen.
            (72, 600, 9, 1),
            (20, 33, 3, 2),
            (4, 40, 8, 1),
        ] {
            let cache = Cache::new(KvLayout::padded(2, head_dim, dtype).unwrap(), positions, 31);
            // Of no weight, and of more than all positions.
            let sinks = Some(&[-40.0, 0.4, 3.0, 9.0, 2.0][..heads]);
            for params in [plain, AttendParams { softcap: Some(1.5), ..plain }, AttendParams { sinks, ..plain }] {
                for window in [usize::MAX, 20] {
                    let spans = causal(rows, positions, window);
                    let data = random.floats(rows * heads * head_dim);
                    let queries = Queries { data: &data, ld: heads * head_dim, heads, spans: &spans };
                    let out = run(isa, &cache.view(1), &queries, &params);
                    for (query, (q, out)) in data.chunks(head_dim).zip(out.chunks(head_dim)).enumerate() {
                        let sinks = params.sinks.map(|sinks| &sinks[query % heads..][..1]);
                        let one = AttendParams { sinks, ..params };
                        let expected = reference(&cache, 1, q, spans[query / heads], &one);
                        for (actual, expected) in out.iter().zip(expected) {
                            assert!((f64::from(*actual) - expected).abs() < limit, "{dtype:?} {actual} {expected}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn results_match_double_precision() {
    expect_near_double_precision(Isa::detect(), PLAIN, 3e-6);
}

#[test]
fn a_row_is_the_same_alone_and_in_a_tile() {
    let mut random = Random::new(32);
    for dtype in DTYPES {
        for (head_dim, positions, rows, heads, window) in
            [(64, 1050, 30, 3, usize::MAX), (32, 530, 40, 2, 10), (16, 600, 37, 1, 500), (144, 33, 33, 4, 17)]
        {
            let cache = Cache::new(KvLayout::new(2, head_dim, dtype).unwrap(), positions, 33);
            let spans = causal(rows, positions, window);
            let width = heads * head_dim;
            let data = random.floats(rows * width);
            let queries = Queries { data: &data, ld: width, heads, spans: &spans };
            let params = AttendParams { softcap: Some(5.0), ..PLAIN };
            let expected = run(Isa::Portable, &cache.view(0), &queries, &params);
            assert!(expected.iter().all(|y| y.is_finite()), "{dtype:?}: poison leaked");
            for isa in isas() {
                let whole = run(isa, &cache.view(0), &queries, &params);
                assert_eq!(bits(&whole), bits(&expected), "{isa} {dtype:?}");
                let splits = positions.div_ceil(SPLIT);
                let split = run_splits(isa, &cache.view(0), &queries, &params, splits);
                assert_eq!(bits(&split), bits(&expected), "{isa} {dtype:?} by splits");
                for row in 0..rows {
                    let one = Queries { data: &data[row * width..], ld: width, heads, spans: &spans[row..][..1] };
                    let alone = run(isa, &cache.view(0), &one, &params);
                    assert_eq!(bits(&alone), bits(&expected[row * width..][..width]), "{isa} {dtype:?} row {row}");
                }
            }
        }
    }
}

/// Expects that sequences that begin alike, each with what follows of its own, get together what each gets alone.
pub(super) fn expect_the_same_beside_those_that_begin_alike(isa: Isa, plain: AttendParams) {
    let (heads, dim) = (3, 32);
    let mut random = Random::new(39);
    for dtype in DTYPES {
        let cache = Cache::new(KvLayout::new(2, dim, dtype).unwrap(), 4096, 40);
        // How many pages each has of the list that begins all of them, where its own begin, how many positions it has, and rows.
        let sequences = [
            (64, 100, 1029_usize, 1),
            (64, 140, 1300, 2),
            (32, 180, 530, 1),
            (32, 200, 512, 1),
            (70, 100, 1120, 1),
            (0, 60, 700, 3),
        ];
        let (mut pages, mut spans) = (Vec::new(), Vec::new());
        for (common, own, positions, rows) in sequences {
            let at = pages.len() as u32;
            pages.extend_from_slice(&cache.pages[..common]);
            pages.extend_from_slice(&cache.pages[own..][..positions.div_ceil(PAGE) - common]);
            spans.extend(causal(rows, positions, usize::MAX).into_iter().map(|span| Span { pages_at: at, ..span }));
        }
        let kv = KvPages { pages: &pages, ..cache.view(1) };
        let split_0: Vec<_> = attend_runs(&kv, &spans, 0).collect();
        let split_1: Vec<_> = attend_runs(&kv, &spans, 1).collect();
        assert_eq!(split_0, [(0, 6), (6, 3)], "all but the last begin alike");
        assert_eq!(split_1, [(0, 3), (3, 1), (5, 1), (6, 3)], "the fourth sees nothing there");
        let width = heads * dim;
        let data = random.floats(spans.len() * width);
        let queries = Queries { data: &data, ld: width, heads, spans: &spans };
        let together = run(isa, &kv, &queries, &plain);
        let splits = run_splits(isa, &kv, &queries, &plain, 3);
        assert_eq!(bits(&splits), bits(&together), "{isa} {dtype:?} by splits");
        for row in 0..spans.len() {
            let alone = run(isa, &kv, &queries.rows(row, 1), &plain);
            assert_eq!(bits(&alone), bits(&together[row * width..][..width]), "{isa} {dtype:?} row {row}");
        }
    }
}

#[test]
fn sequences_that_begin_alike_do_not_see_each_other() {
    isas().for_each(|isa| expect_the_same_beside_those_that_begin_alike(isa, PLAIN));
}

/// Expects that rows of one run that see other parts of a split get what each gets alone, whatever lies between and whatever one of
/// them must see.
pub(super) fn expect_parts_of_a_split_apart(isa: Isa, plain: AttendParams) {
    let (heads, mut random) = (2, Random::new(41));
    for (dtype, dim) in DTYPES.into_iter().flat_map(|dtype| [(dtype, 64), (dtype, 48)]) {
        let layout = KvLayout::new(1, dim, dtype).unwrap();
        let mut cache = Cache::new(layout, 512, 42);
        for position in 150..350 {
            let page = cache.pages[position / PAGE] as usize * cache.stride;
            let page = &mut cache.memory.bytes_mut()[page..][..layout.bytes_per_page()];
            let bad = vec![if position < 300 { f32::INFINITY } else { f32::NAN }; dim];
            kv_store(isa, &layout, page, position % PAGE, &bad, &bad);
        }
        let spans: Vec<Span> = [(0, 100), (400, 512), (90, 150), (0, 512), (355, 399), (7, 8)]
            .into_iter()
            .zip((0..).step_by(32))
            .map(|((first, end), pages_at)| Span { first, end, pages_at })
            .collect();
        let pages = cache.pages.repeat(spans.len());
        let kv = KvPages { pages: &pages, ..cache.view(0) };
        assert_eq!(attend_runs(&kv, &spans, 0).collect::<Vec<_>>(), [(0, 6)]);
        let data = random.floats(spans.len() * heads * dim);
        let queries = Queries { data: &data, ld: heads * dim, heads, spans: &spans };
        for params in [plain, AttendParams { softcap: Some(2.0), ..plain }] {
            let together = run(isa, &kv, &queries, &params);
            for (row, together) in together.chunks(heads * dim).enumerate().filter(|(row, _)| *row != 3) {
                assert!(together.iter().all(|y| y.is_finite()), "{isa} {dtype:?} row {row}: poison leaked");
                let alone = run(isa, &kv, &queries.rows(row, 1), &params);
                assert_eq!(bits(&alone), bits(together), "{isa} {dtype:?} row {row}");
            }
        }
    }
}

#[test]
fn rows_of_one_run_see_what_is_theirs() {
    isas().for_each(|isa| expect_parts_of_a_split_apart(isa, PLAIN));
}

#[test]
fn single_heads_equal_their_group() {
    let cache = Cache::new(KvLayout::new(1, 64, KvDtype::Bf16).unwrap(), 700, 34);
    let data = Random::new(35).floats(7 * 64);
    let spans = causal(1, 700, usize::MAX);
    let queries = Queries { data: &data, ld: 7 * 64, heads: 7, spans: &spans };
    let group = run(Isa::detect(), &cache.view(0), &queries, &PLAIN);
    for head in 0..7 {
        let one = Queries { data: &data[head * 64..][..64], ld: 64, heads: 1, spans: &spans };
        let alone = run(Isa::detect(), &cache.view(0), &one, &PLAIN);
        assert_eq!(bits(&alone), bits(&group[head * 64..][..64]));
    }
}

#[test]
fn infinite_values_outside_the_span_do_not_leak() {
    // Rows of one tile with different spans: what only some may see is stored, but infinite.
    let layout = KvLayout::new(1, 16, KvDtype::F32).unwrap();
    let mut cache = Cache::new(layout, 64, 36);
    let page = cache.pages[1] as usize * cache.stride;
    let bad = [f32::INFINITY; 16];
    for isa in isas() {
        let page = &mut cache.memory.bytes_mut()[page..][..layout.bytes_per_page()];
        kv_store(isa, &layout, page, 4, &bad, &bad);
        let spans = [
            Span { first: 0, end: 20, pages_at: 0 },
            Span { first: 3, end: 19, pages_at: 0 },
            Span { first: 21, end: 64, pages_at: 0 },
            Span { first: 0, end: 64, pages_at: 0 },
        ];
        let data = vec![0.5; 4 * 16];
        let out = run(isa, &cache.view(0), &Queries { data: &data, ld: 16, heads: 1, spans: &spans }, &PLAIN);
        assert!(out[..48].iter().all(|y| y.is_finite()), "{isa}");
        assert!(out[48..].iter().all(|y| !y.is_finite()), "{isa}: a visible infinity must show");
    }
}

#[test]
fn seeing_nothing_gives_zeros() {
    let cache = Cache::new(KvLayout::new(1, 32, KvDtype::Q8).unwrap(), 16, 37);
    let spans = [Span { first: 5, end: 5, pages_at: 0 }, Span { first: 0, end: 3, pages_at: 0 }];
    let queries = Queries { data: &[1.0; 64], ld: 32, heads: 1, spans: &spans };
    let out = run(Isa::detect(), &cache.view(0), &queries, &PLAIN);
    assert_eq!(out[..32], [0.0; 32]);
    assert!(out[32..].iter().any(|y| *y != 0.0));
}

#[test]
#[should_panic(expected = "beyond the 1 pages")]
fn spans_beyond_the_pages_are_refused() {
    let cache = Cache::new(KvLayout::new(1, 32, KvDtype::F32).unwrap(), 16, 38);
    let spans = [Span { first: 0, end: 17, pages_at: 0 }];
    run(Isa::Portable, &cache.view(0), &Queries { data: &[1.0; 32], ld: 32, heads: 1, spans: &spans }, &PLAIN);
}
