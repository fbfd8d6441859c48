//! Rounded attention: near the reference, and independent of tiles, splits and neighbours, on all that this processor has for it.

use crate::attention::{
    Cache, PLAIN, causal, expect_near_double_precision, expect_parts_of_a_split_apart,
    expect_the_same_beside_those_that_begin_alike, run, run_splits,
};
use crate::kv::DTYPES;
use crate::support::{Random, bits};
use plimsoll_kernels::*;

const BF16: AttendParams = AttendParams { bf16: true, ..PLAIN };

/// The matrix unit and vectors, where there are.
fn all() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available() && isa.rounds_attention())
}

#[test]
fn results_are_near_double_precision() {
    // Eight bits of everything: some thousandths of values up to 1.
    all().for_each(|isa| expect_near_double_precision(isa, BF16, 8e-3));
}

#[test]
fn a_row_is_the_same_alone_and_in_a_tile() {
    all().for_each(rows_alone_and_in_a_tile);
}

fn rows_alone_and_in_a_tile(isa: Isa) {
    let mut random = Random::new(32);
    for dtype in DTYPES {
        for (head_dim, positions, rows, heads, window) in
            [(64, 1050, 70, 3, usize::MAX), (32, 530, 40, 2, 10), (16, 600, 37, 1, 500), (144, 33, 33, 4, 17)]
        {
            let cache = Cache::new(KvLayout::new(2, head_dim, dtype).unwrap(), positions, 33);
            let spans = causal(rows, positions, window);
            let width = heads * head_dim;
            let data = random.floats(rows * width);
            let queries = Queries { data: &data, ld: width, heads, spans: &spans };
            let params = AttendParams { softcap: Some(5.0), ..BF16 };
            let whole = run(isa, &cache.view(0), &queries, &params);
            assert!(whole.iter().all(|y| y.is_finite()), "{dtype:?}: poison leaked");
            let splits = run_splits(isa, &cache.view(0), &queries, &params, positions.div_ceil(SPLIT));
            assert_eq!(bits(&splits), bits(&whole), "{dtype:?} by splits");
            for row in 0..rows {
                let one = Queries { data: &data[row * width..], ld: width, heads, spans: &spans[row..][..1] };
                let alone = run(isa, &cache.view(0), &one, &params);
                assert_eq!(bits(&alone), bits(&whole[row * width..][..width]), "{dtype:?} row {row}");
            }
        }
    }
}

#[test]
fn sequences_that_begin_alike_do_not_see_each_other() {
    all().for_each(|isa| expect_the_same_beside_those_that_begin_alike(isa, BF16));
}

#[test]
fn rows_of_one_run_see_what_is_theirs() {
    all().for_each(|isa| expect_parts_of_a_split_apart(isa, BF16));
}

/// Weights below normal numbers count as nothing, with an infinity beside them or without.
#[test]
fn tiny_weights_count_as_zero_on_every_isa() {
    all().for_each(tiny_weights);
}

fn tiny_weights(isa: Isa) {
    let layout = KvLayout::new(1, 16, KvDtype::F32).unwrap();
    let mut cache = Cache::new(layout, 16, 43);
    let page = cache.pages[0] as usize * cache.stride;
    // Scores 88 apart: e⁻⁸⁸ is no normal number, and times such values it would be seen.
    for position in 0..16 {
        let (k, v) = if position == 0 { ([1.0; 16], [0.0; 16]) } else { ([-0.5; 16], [3e38; 16]) };
        kv_store(isa, &layout, &mut cache.memory.bytes_mut()[page..][..layout.bytes_per_page()], position, &k, &v);
    }
    let bad = [f32::INFINITY; 16];
    let mut infinite = Cache::new(layout, 16, 43);
    infinite.memory.bytes_mut().copy_from_slice(cache.memory.bytes());
    kv_store(isa, &layout, &mut infinite.memory.bytes_mut()[page..][..layout.bytes_per_page()], 15, &[0.0; 16], &bad);
    let spans = [Span { first: 0, end: 8, pages_at: 0 }, Span { first: 0, end: 16, pages_at: 0 }];
    let data = [88.0 / 24.0; 32];
    let queries = Queries { data: &data, ld: 16, heads: 1, spans: &spans };
    let params = AttendParams { scale: 1.0, ..BF16 };
    let (out, beside) = (run(isa, &cache.view(0), &queries, &params), run(isa, &infinite.view(0), &queries, &params));
    assert!(beside[16..].iter().all(|y| !y.is_finite()), "the second row sees an infinity");
    assert_eq!(bits(&out[..16]), bits(&beside[..16]));
    assert_eq!(out[..16], [0.0; 16]);
}

#[test]
fn infinite_values_outside_the_span_do_not_leak() {
    all().for_each(infinite_values);
}

fn infinite_values(isa: Isa) {
    let layout = KvLayout::new(1, 16, KvDtype::F32).unwrap();
    let clean = Cache::new(layout, 64, 36);
    let mut cache = Cache::new(layout, 64, 36);
    let page = cache.pages[1] as usize * cache.stride;
    let bad = [f32::INFINITY; 16];
    kv_store(isa, &layout, &mut cache.memory.bytes_mut()[page..][..layout.bytes_per_page()], 4, &bad, &bad);
    let span = |first, end| Span { first, end, pages_at: 0 };
    let spans = [span(0, 20), span(3, 19), span(21, 64), span(0, 64)];
    let data = vec![0.5; 4 * 16];
    let queries = Queries { data: &data, ld: 16, heads: 1, spans: &spans };
    let out = run(isa, &cache.view(0), &queries, &BF16);
    let without = run(isa, &clean.view(0), &queries, &BF16);
    assert_eq!(bits(&out[..48]), bits(&without[..48]));
    assert!(out[48..].iter().all(|y| !y.is_finite()), "a visible infinity must show");
}

#[test]
fn seeing_nothing_gives_zeros() {
    all().for_each(seeing_nothing);
}

fn seeing_nothing(isa: Isa) {
    let cache = Cache::new(KvLayout::new(1, 32, KvDtype::Q8).unwrap(), 16, 37);
    let spans = [Span { first: 5, end: 5, pages_at: 0 }, Span { first: 0, end: 3, pages_at: 0 }];
    let queries = Queries { data: &[1.0; 64], ld: 32, heads: 1, spans: &spans };
    let out = run(isa, &cache.view(0), &queries, &BF16);
    assert_eq!(out[..32], [0.0; 32]);
    assert!(out[32..].iter().any(|y| *y != 0.0));
}
