//! Attention over 4096 positions of eight heads of 128, with pages in the last cache; and attention for the next tokens
//! of sixteen streams, from memory.

use std::fmt;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use plimsoll_kernels::*;

use crate::{bytes, isa};

const KV_HEADS: usize = 8;
const DIM: usize = 128;
const POSITIONS: usize = 4096;

/// One measurement: `rows` rows of `heads` query heads per key/value head.
struct Case {
    name: &'static str,
    dtype: KvDtype,
    rows: usize,
    heads: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} x {}", self.name, self.rows, self.heads)
    }
}

fn cases() -> Vec<Case> {
    let dtypes = [("f32", KvDtype::F32), ("f16", KvDtype::F16), ("bf16", KvDtype::Bf16), ("q8", KvDtype::Q8)];
    let case = |(name, dtype)| [(1, 1), (1, 4), (1, 8), (16, 4)].map(|(rows, heads)| Case { name, dtype, rows, heads });
    dtypes.into_iter().flat_map(case).collect()
}

#[divan::bench(args = cases(), max_time = 0.4)]
fn positions_4096(bencher: Bencher, case: &Case) {
    let &Case { dtype, rows, heads, .. } = case;
    let layout = KvLayout::new(KV_HEADS, DIM, dtype).unwrap();
    let count = POSITIONS / PAGE;
    let stride = layout.bytes_per_page();
    let mut memory = bytes(count * stride);
    let row = [0.25f32; KV_HEADS * DIM];
    for page in memory.chunks_exact_mut(stride) {
        (0..PAGE).for_each(|slot| kv_store(isa(), &layout, page, slot, &row, &row));
    }
    let pages: Vec<u32> = (0..count as u32).map(|i| i * 37 % count as u32).collect();
    let spans: Vec<Span> =
        (0..rows).map(|r| Span { first: 0, end: (POSITIONS - rows + 1 + r) as u32, pages_at: 0 }).collect();
    let ld = heads * DIM;
    let (data, mut out) = (vec![0.1f32; rows * ld], vec![0f32; rows * ld]);
    let mut scratch = vec![0f32; attend_scratch_len(&layout, false, rows, heads)];
    let queries = Queries { data: &data, ld, heads, spans: &spans };
    let params = AttendParams { scale: 0.1, softcap: None, bf16: false, sinks: None };
    let operations = ItemsCount::new(4 * rows * heads * KV_HEADS * POSITIONS * DIM);
    bencher.counter(operations).counter(BytesCount::new(memory.len())).bench_local(|| {
        for kv_head in 0..KV_HEADS {
            let kv = KvPages { layout, base: memory.as_ptr(), stride, pages: &pages, kv_head };
            let target = AttendOutput { ptr: out.as_mut_ptr(), ld };
            // SAFETY: all pages are in `memory`, and `out` has all rows.
            unsafe { attend(isa(), &kv, &queries, &params, &mut scratch, target) };
        }
    });
}

fn decode_cases() -> Vec<Case> {
    let case = |name, dtype, heads| Case { name, dtype, rows: SEQUENCES, heads };
    let f16 = [1, 3, 4, 8].map(|heads| case("f16", KvDtype::F16, heads));
    let three = [("f32", KvDtype::F32), ("bf16", KvDtype::Bf16), ("q8", KvDtype::Q8)];
    f16.into_iter().chain(three.map(|(name, dtype)| case(name, dtype, 3))).collect()
}

const SEQUENCES: usize = 16;

/// A row for each of sixteen sequences of 256 positions, through thirty layers of three heads of 64: more than the last cache holds.
#[divan::bench(args = decode_cases(), max_time = 0.6)]
fn sixteen_from_memory(bencher: Bencher, case: &Case) {
    const LAYERS: usize = 30;
    const KV_HEADS: usize = 3;
    const DIM: usize = 64;
    const POSITIONS: usize = 256;
    let layout = KvLayout::new(KV_HEADS, DIM, case.dtype).unwrap();
    let count = SEQUENCES * POSITIONS / PAGE;
    let stride = LAYERS * layout.bytes_per_page();
    let mut memory = bytes(count * stride);
    let row = [0.25f32; KV_HEADS * DIM];
    for page in memory.chunks_exact_mut(layout.bytes_per_page()) {
        (0..PAGE).for_each(|slot| kv_store(isa(), &layout, page, slot, &row, &row));
    }
    let pages: Vec<u32> = (0..count as u32).map(|i| i * 37 % count as u32).collect();
    let (width, ld) = (case.heads * DIM, KV_HEADS * case.heads * DIM);
    let (data, mut out) = (vec![0.1f32; SEQUENCES * ld], vec![0f32; SEQUENCES * ld]);
    let mut scratch = vec![0f32; attend_scratch_len(&layout, false, 1, case.heads)];
    let params = AttendParams { scale: 0.1, softcap: None, bf16: false, sinks: None };
    bencher.counter(BytesCount::new(memory.len())).bench_local(|| {
        for unit in 0..LAYERS * SEQUENCES * KV_HEADS {
            let (layer, row, kv_head) = (unit / KV_HEADS / SEQUENCES, unit / KV_HEADS % SEQUENCES, unit % KV_HEADS);
            let base = memory[layer * layout.bytes_per_page()..].as_ptr();
            let kv = KvPages { layout, base, stride, pages: &pages, kv_head };
            let at = row * ld + kv_head * width;
            let spans = [Span { first: 0, end: POSITIONS as u32, pages_at: (row * POSITIONS / PAGE) as u32 }];
            let queries = Queries { data: &data[at..], ld, heads: case.heads, spans: &spans };
            let target = AttendOutput { ptr: out[at..].as_mut_ptr(), ld };
            // SAFETY: all pages are in `memory`, and `out` has all rows.
            unsafe { attend(isa(), &kv, &queries, &params, &mut scratch, target) };
        }
    });
}
