//! Packed data is read back exactly, for every kind; data that does not fit is refused by name.

use proptest::prelude::*;

use crate::support::{Random, bits};
use plimsoll_kernels::*;

/// The rounding of a value when it is stored.
pub(super) type Rounding = fn(f32) -> f32;

/// The float kinds, each with its rounding.
pub(super) const FLOAT_KINDS: [(PackKind, Rounding); 3] = [
    (PackKind::F32, |v| v),
    (PackKind::F16, |v| f16_to_f32(f32_to_f16(v))),
    (PackKind::Bf16, |v| bf16_to_f32(f32_to_bf16(v))),
];

/// Rows of quantized weights of any packing, owned.
pub(crate) struct Source {
    pub(crate) packing: Packing,
    pub(crate) quant: QuantPacking,
    codes: Vec<Vec<u8>>,
    /// d or scale, then dmin or offset; sc and m in `small`.
    halves: [Vec<Vec<u16>>; 2],
    floats: [Vec<Vec<f32>>; 2],
    sc: Vec<Vec<i8>>,
    m: Vec<Vec<u8>>,
    bytes: Vec<Vec<u8>>,
}

impl Source {
    pub(crate) fn new(quant: QuantPacking, out: usize, k: usize, seed: u64) -> Source {
        let mut random = Random::new(seed);
        let packing = Packing::new(PackKind::Quant(quant), out, k).unwrap();
        let groups = k.div_ceil(usize::from(quant.group));
        let supers = k.div_ceil(SUPER);
        let of_supers = matches!(quant.scales, PackScales::Super | PackScales::SuperF32);
        let per_row = if of_supers { supers } else { groups };
        let offsets = usize::from(quant.offset);
        let mask = (0xffu16 >> (8 - quant.bits)) as u8;
        let mut half = |n: usize| -> Vec<u16> { (0..n).map(|_| f32_to_f16(random.uniform() * 0.1)).collect() };
        let scale_halves = (0..out).map(|_| half(per_row)).collect();
        let offset_halves = (0..out).map(|_| half(per_row * offsets)).collect();
        let scale_floats = (0..out).map(|_| random.awkward(per_row)).collect();
        let offset_floats = (0..out).map(|_| random.awkward(per_row * offsets)).collect();
        Source {
            packing,
            quant,
            codes: (0..out).map(|_| (0..k).map(|_| random.next() as u8 & mask).collect()).collect(),
            halves: [scale_halves, offset_halves],
            floats: [scale_floats, offset_floats],
            sc: (0..out).map(|_| (0..groups).map(|_| random.next() as i8).collect()).collect(),
            m: (0..out).map(|_| (0..groups * offsets).map(|_| random.next() as u8).collect()).collect(),
            // Mostly exponents near that of one: products of what is huge or subnormal tell nothing.
            bytes: (0..out).map(|_| (0..groups).map(|_| byte(quant.scales, random.next())).collect()).collect(),
        }
    }

    /// Sets all bits of a row's first scale.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the matrix unit's alone"))]
    pub(crate) fn damage(&mut self, row: usize) {
        self.halves[0][row][0] = 0xffff;
    }

    fn row(&self, row: usize) -> QuantRow<'_> {
        let scales = match self.quant.scales {
            PackScales::F16 => QuantRowScales::F16 { scale: &self.halves[0][row], offset: &self.halves[1][row] },
            PackScales::F32 => QuantRowScales::F32 { scale: &self.floats[0][row], offset: &self.floats[1][row] },
            PackScales::Super => QuantRowScales::Super {
                d: &self.halves[0][row],
                dmin: &self.halves[1][row],
                sc: &self.sc[row],
                m: &self.m[row],
            },
            PackScales::SuperF32 => QuantRowScales::SuperF32 {
                d: &self.floats[0][row],
                dmin: &self.floats[1][row],
                sc: &self.sc[row],
                m: &self.m[row],
            },
            PackScales::E8m0Half | PackScales::Ue4m3Half => QuantRowScales::Bytes(&self.bytes[row]),
        };
        QuantRow { codes: &self.codes[row], scales }
    }

    pub(crate) fn packed(&self) -> Vec<u8> {
        let mut data = vec![0xa5; self.packing.bytes()];
        let rows: Vec<_> = (0..self.packing.out()).map(|row| self.row(row)).collect();
        for (rows, panel) in rows.chunks(PANEL).zip(data.chunks_exact_mut(self.packing.panel_bytes())) {
            pack_panel_quant(&self.packing, rows, panel).unwrap();
        }
        data
    }

    /// The scale and offset of a group, as defined.
    pub(crate) fn scale(&self, row: usize, group: usize) -> (f32, f32) {
        let at = |values: &[u16], i: usize| values.get(i).map_or(0.0, |half| f16_to_f32(*half));
        match self.quant.scales {
            PackScales::F16 => (at(&self.halves[0][row], group), at(&self.halves[1][row], group)),
            PackScales::F32 => (self.floats[0][row][group], *self.floats[1][row].get(group).unwrap_or(&0.0)),
            PackScales::Super => {
                let i = group * usize::from(self.quant.group) / SUPER;
                let m = self.m[row].get(group).copied().unwrap_or(0);
                let scale = at(&self.halves[0][row], i) * f32::from(self.sc[row][group]);
                (scale, -(at(&self.halves[1][row], i) * f32::from(m)))
            }
            PackScales::SuperF32 => {
                let i = group * usize::from(self.quant.group) / SUPER;
                let m = self.m[row].get(group).copied().unwrap_or(0);
                let scale = self.floats[0][row][i] * f32::from(self.sc[row][group]);
                (scale, -(self.floats[1][row].get(i).copied().unwrap_or(0.0) * f32::from(m)))
            }
            PackScales::E8m0Half => ((f64::from(self.bytes[row][group]) - 128.0).exp2() as f32, 0.0),
            PackScales::Ue4m3Half => {
                let byte = self.bytes[row][group];
                let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
                let value = if exponent == 0 { mantissa * 2.0 } else { 1.0 + mantissa };
                (value * 2f32.powi(exponent - 8), 0.0)
            }
        }
    }

    /// level − zero.
    pub(crate) fn code(&self, row: usize, k: usize) -> i32 {
        let code = self.codes[row][k];
        i32::from(self.quant.codebook.map_or(code, |book| book[usize::from(code)])) - i32::from(self.quant.zero)
    }

    /// The value of a weight, as defined.
    fn value(&self, row: usize, k: usize) -> f32 {
        let (scale, offset) = self.scale(row, k / usize::from(self.quant.group));
        let value = scale * self.code(row, k) as f32;
        if self.quant.offset { value + offset } else { value }
    }
}

/// A scale of a byte.
fn byte(scales: PackScales, random: u32) -> u8 {
    match (scales, random >> 16) {
        (PackScales::E8m0Half, 0..0xf000) => 118 + (random % 16) as u8,
        (PackScales::E8m0Half, _) => (random % 128) as u8,
        _ => (random % 128) as u8,
    }
}

/// A codebook, with its zero point.
fn any_book() -> impl Strategy<Value = (Codebook, u8)> {
    let level = prop::sample::select(vec![24u8, 31, 124, 240, 255]).prop_flat_map(|most| {
        any::<[u8; 16]>().prop_map(move |book| book.map(|level| (u32::from(level) * u32::from(most) / 255) as u8))
    });
    (level, any::<u8>()).prop_map(|(book, zero)| (book, book[usize::from(zero % 16)]))
}

/// Any packing this crate knows.
pub(crate) fn any_quant() -> impl Strategy<Value = QuantPacking> {
    use PackScales::{E8m0Half, F16, F32, Super, SuperF32, Ue4m3Half};
    let bits = prop::sample::select(vec![2u8, 3, 4, 5, 6, 8]);
    let group = prop::sample::select(vec![16u8, 32, 64, 128]);
    let scales = prop::sample::select(vec![F16, F32, Super, SuperF32]);
    let plain = (bits, group, scales, any::<u8>(), 0..4u8).prop_map(|(bits, group, scales, zero, form)| QuantPacking {
        bits,
        group: if matches!(scales, PackScales::F16 | PackScales::F32) { group } else { group.min(32) },
        scales,
        // Offsets, no zero point, the middle (as files have it), any.
        zero: match form {
            0 | 1 => 0,
            2 => 1 << (bits - 1),
            _ => zero & (0xffu16 >> (8 - bits)) as u8,
        },
        offset: form == 0,
        codebook: None,
    });
    let (bits, group) = (prop::sample::select(vec![3u8, 4]), prop::sample::select(vec![16u8, 32]));
    let scales = prop::sample::select(vec![F16, F32, Super, SuperF32, E8m0Half, Ue4m3Half]);
    let booked = (bits, group, scales, any_book()).prop_map(|(bits, group, scales, (book, zero))| QuantPacking {
        bits,
        group: if matches!(scales, PackScales::F16 | PackScales::F32) { group } else { group.min(32) },
        scales,
        zero,
        offset: false,
        codebook: Some(book),
    });
    prop_oneof![2 => plain, 1 => booked]
}

proptest! {
    #[test]
    fn quantized_rows_come_back_exactly(quant in any_quant(), out in 1usize..40, blocks in 1usize..20, seed: u64) {
        let source = Source::new(quant, out, 32 * blocks, seed);
        let data = source.packed();
        let mut actual = vec![f32::NAN; 32 * blocks];
        for row in 0..out {
            unpack_row(&source.packing, &data, row, &mut actual);
            let expected: Vec<f32> = (0..actual.len()).map(|k| source.value(row, k)).collect();
            prop_assert_eq!(bits(&actual), bits(&expected), "row {}", row);
        }
    }

    #[test]
    fn float_rows_come_back(out in 1usize..40, k in 1usize..70, seed: u64) {
        let mut random = Random::new(seed);
        let rows: Vec<Vec<f32>> = (0..out).map(|_| random.awkward(k)).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        for (kind, bf16) in FLOAT_KINDS {
            let packing = Packing::new(kind, out, k).unwrap();
            let mut data = vec![0xa5; packing.bytes()];
            for (rows, panel) in rows.chunks(PANEL).zip(data.chunks_exact_mut(packing.panel_bytes())) {
                pack_panel_f32(&packing, rows, panel).unwrap();
            }
            let mut actual = vec![f32::NAN; k];
            for (row, source) in rows.iter().enumerate() {
                unpack_row(&packing, &data, row, &mut actual);
                let expected: Vec<f32> = source.iter().map(|v| bf16(*v)).collect();
                prop_assert_eq!(bits(&actual), bits(&expected));
            }
        }
    }
}

#[test]
fn misfits_are_named() {
    let quant = QuantPacking { bits: 4, group: 32, scales: PackScales::F16, zero: 8, offset: false, codebook: None };
    let packing = Packing::new(PackKind::Quant(quant), 16, 64).unwrap();
    let mut panel = vec![0; packing.panel_bytes()];
    let scales = QuantRowScales::F16 { scale: &[0; 2], offset: &[] };
    let row = QuantRow { codes: &[0; 64], scales };
    let mut pack = |rows: &[QuantRow<'_>]| pack_panel_quant(&packing, rows, &mut panel);
    assert_eq!(pack(&[row]), Ok(()));
    assert_eq!(pack(&[]), Err(PackError::Rows(0)));
    assert_eq!(pack(&[row; 17]), Err(PackError::Rows(17)));
    let short = pack(&[QuantRow { codes: &[0; 32], scales }]);
    assert_eq!(short, Err(PackError::Length { what: "codes", expected: 64, actual: 32 }));
    let scales = QuantRowScales::F16 { scale: &[0; 2], offset: &[0; 2] };
    let extra = pack(&[QuantRow { codes: &[0; 64], scales }]);
    assert_eq!(extra, Err(PackError::Length { what: "offsets", expected: 0, actual: 2 }));
    let scales = QuantRowScales::F32 { scale: &[0.0; 2], offset: &[] };
    assert_eq!(pack(&[QuantRow { codes: &[0; 64], scales }]), Err(PackError::KindMismatch));
    assert_eq!(pack_panel_f32(&packing, &[&[0.0; 64]], &mut panel), Err(PackError::KindMismatch));
    assert!(matches!(pack_panel_quant(&packing, &[row], &mut panel[1..]), Err(PackError::Length { .. })));
    let floats = Packing::new(PackKind::F8 { group: 40 }, 16, 64).unwrap();
    let mut panel = vec![0; floats.panel_bytes()];
    let row = F8Row { codes: &[0; 64], scale: &[1.0; 2] };
    assert_eq!(pack_panel_f8(&floats, &[row], &mut panel), Ok(()));
    assert_eq!(pack_panel_f8(&packing, &[row], &mut panel), Err(PackError::KindMismatch));
    let few = pack_panel_f8(&floats, &[F8Row { scale: &[1.0], ..row }], &mut panel);
    assert_eq!(few, Err(PackError::Length { what: "scales", expected: 2, actual: 1 }));
    assert_eq!(pack_panel_f32(&floats, &[&[0.0; 64]], &mut panel), Err(PackError::KindMismatch));
}
