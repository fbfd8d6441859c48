//! Museum T-9, lightllm 907: indices of 32 bits overflowed in a large pool of keys and values; illegal access. The last pages of a
//! pool of more than 2³¹ elements and 2³² bytes are as good as the first.

use crate::common::random::Random;
use crate::common::{checkpoint, device_of, matrix, rows, shape};
use plimsoll_device::{Attention, Declare, Device, DtypePolicy, Isa, KvGroup, PAGE_TOKENS, SeqSpan, StepInput};

/// Rows of the prompt, in steps of this many.
const CHUNK: usize = 100;

/// The attention output of 300 positions, with their keys and values in the pages that `page` names.
fn run(pages: usize, page: impl Fn(u32) -> u32) -> Vec<Vec<u32>> {
    let checkpoint = checkpoint("llama");
    let table = Declare::new(&checkpoint, DtypePolicy::Auto).finish();
    let mut device = device_of(&table, &checkpoint, &shape(None), [pages, 0], 2, Isa::detect());
    let used: Vec<u32> = (0..3 * CHUNK.div_ceil(PAGE_TOKENS) as u32).map(page).collect();
    let mut random = Random::new(7);
    let mut all = Vec::new();
    for start in [0, CHUNK, 2 * CHUNK] {
        device.begin_step();
        let pages = (start + CHUNK).div_ceil(PAGE_TOKENS);
        let seqs = [SeqSpan { first_row: 0, rows: CHUNK, start, pages_at: 0, pages, seen_from: 0, state: None }];
        let mut filled = |cols: usize| -> Vec<Vec<f32>> { (0..CHUNK).map(|_| random.floats(cols)).collect() };
        let (q, k, v) = (filled(64), filled(32), filled(32));
        let [q, k, v] = [q, k, v].map(|rows| matrix(&mut device, &rows));
        let out = device.temp(CHUNK, 64).unwrap();
        let step = StepInput { seqs: &seqs, pages: &used, ..StepInput::default() };
        let spec = Attention { layer: 0, heads: 4, scale: 0.25, ..Attention::WHOLE };
        device.attention(&spec, None, out, q, Some([k, v]), &step);
        all.extend(rows(&mut device, out));
    }
    all
}

#[test]
fn t_09_the_last_pages_of_a_pool_beyond_32_bits_are_as_good_as_the_first() {
    let elements = shape(None).kv.page_bytes(KvGroup::Whole) / 2;
    let pages = (1 << 31) / elements + 64;
    assert!(pages * elements > 1 << 31 && pages * elements * 2 > 1 << 32);
    let last = pages as u32 - 1;
    let expected = run(256, |i| i);
    assert!(expected.iter().flatten().any(|bits| *bits != 0), "something was computed");
    assert_eq!(run(pages, |i| last - i), expected);
    // An index that lost its upper bits would find the first pages.
    assert_eq!(run(pages, |i| if i % 2 == 0 { i } else { last - i }), expected);
}
