//! A stored position is where the layout says, within the precision of its type, and nothing else changes.

use crate::support::{Random, isas};
use plimsoll_kernels::*;

/// K[d] or V[d] of one slot and head, read by the documented layout.
pub(crate) fn read(layout: &KvLayout, page: &[u8], head: usize, slot: usize, d: usize, value: bool) -> f32 {
    let part = &page[head * layout.head_bytes() + if value { layout.half_bytes() } else { 0 }..][..layout.half_bytes()];
    let dim = layout.head_dim();
    let index = match (layout.dtype(), value) {
        (KvDtype::Bf16, true) => 2 * (slot % 8 * dim + d) + slot / 8,
        (KvDtype::Bf16, false) => 2 * ((d / 16 * 8 + d % 8) * PAGE + slot) + d / 8 % 2,
        (_, true) => slot * dim + d,
        (_, false) => d * PAGE + slot,
    };
    let half = || u16::from_le_bytes([part[2 * index], part[2 * index + 1]]);
    let float = |at: usize| f32::from_le_bytes(part[at..at + 4].try_into().unwrap());
    match layout.dtype() {
        KvDtype::F32 => float(4 * index),
        KvDtype::F16 => f16_to_f32(half()),
        KvDtype::Bf16 => bf16_to_f32(half()),
        KvDtype::Q8 => {
            let blocks = dim.div_ceil(32);
            let scale = if value { slot * blocks + d / 32 } else { d / 32 * PAGE + slot };
            f32::from(part[index] as i8) * float(PAGE * dim + 4 * scale)
        }
    }
}

pub(crate) const DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Q8];

#[test]
fn positions_land_where_the_layout_says() {
    let mut random = Random::new(20);
    for dtype in DTYPES {
        for head_dim in [16, 48, 64, 128] {
            let layout = KvLayout::new(3, head_dim, dtype).unwrap();
            for isa in isas() {
                let mut page = vec![0; layout.bytes_per_page()];
                let rows: Vec<_> =
                    (0..PAGE).map(|_| (random.floats(3 * head_dim), random.floats(3 * head_dim))).collect();
                // Out of order, and one of them twice: a slot may be rewritten.
                kv_store(isa, &layout, &mut page, 4, &rows[1].0, &rows[1].1);
                for slot in (0..PAGE).rev() {
                    kv_store(isa, &layout, &mut page, slot, &rows[slot].0, &rows[slot].1);
                }
                let tolerance = match dtype {
                    KvDtype::F32 => 0.0,
                    KvDtype::F16 => 5e-4,
                    KvDtype::Bf16 => 4e-3,
                    KvDtype::Q8 => 4e-3,
                };
                for (slot, (k, v)) in rows.iter().enumerate() {
                    for i in 0..3 * head_dim {
                        let (head, d) = (i / head_dim, i % head_dim);
                        assert!((read(&layout, &page, head, slot, d, false) - k[i]).abs() <= tolerance);
                        assert!((read(&layout, &page, head, slot, d, true) - v[i]).abs() <= tolerance);
                        if dtype == KvDtype::Bf16 {
                            let stored =
                                [false, true].map(|value| f32_to_bf16(read(&layout, &page, head, slot, d, value)));
                            assert_eq!(stored, [k[i], v[i]].map(f32_to_bf16), "the nearest, ties to even");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bfloat16_is_what_conversion_gives() {
    let mut random = Random::new(22);
    let layout = KvLayout::new(4, 1024, KvDtype::Bf16).unwrap();
    let mut row = || random.any(4096).into_iter().chain(AWKWARD).skip(AWKWARD.len()).collect::<Vec<_>>();
    for isa in isas() {
        let mut page = vec![0; layout.bytes_per_page()];
        for slot in [3, 11, 12] {
            let (k, v) = (row(), row());
            kv_store(isa, &layout, &mut page, slot, &k, &v);
            for i in 0..4096 {
                let stored =
                    [false, true].map(|value| read(&layout, &page, i / 1024, slot, i % 1024, value).to_bits() >> 16);
                assert_eq!(stored, [k[i], v[i]].map(|x| u32::from(f32_to_bf16(x))), "{isa}: {} and {}", k[i], v[i]);
            }
        }
    }
}

/// Values at which rounding can overflow or turn a NaN into another value.
const AWKWARD: [f32; 6] = [
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MAX,
    f32::from_bits(0x7fff_ffff),
    f32::from_bits(0xff80_0001),
    f32::from_bits(0x3f80_8000),
];

#[test]
fn instruction_sets_store_the_same_bytes() {
    let mut random = Random::new(21);
    for dtype in DTYPES {
        let layout = KvLayout::new(2, 80, dtype).unwrap();
        let (k, v) = (random.awkward(160), random.awkward(160));
        let mut expected = None;
        for isa in isas() {
            let mut page = vec![0x5a; layout.bytes_per_page()];
            kv_store(isa, &layout, &mut page, 7, &k, &v);
            assert_eq!(&page, expected.get_or_insert_with(|| page.clone()), "{isa}");
        }
    }
}

#[test]
fn impossible_layouts_are_named() {
    assert_eq!(KvLayout::new(1, 72, KvDtype::F16), Err(KvLayoutError::HeadDim(72)));
    assert_eq!(KvLayout::new(1, 0, KvDtype::F16), Err(KvLayoutError::HeadDim(0)));
    assert_eq!(KvLayout::new(0, 64, KvDtype::F16), Err(KvLayoutError::KvHeads(0)));
    assert!(KvLayout::new(1, 72, KvDtype::F16).unwrap_err().to_string().contains("72"));
}
