//! Moves weights into the panels that `packing` describes, and single rows back out of them. Scalar code: it runs once, at
//! load. Where values come from (GGUF, safetensors) is unknown here.

use crate::half::{bf16_to_f32, e8m0_half_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, ue4m3_half_to_f32};
use crate::packing::{BLOCK, PANEL, PackError, PackKind, PackScales, Packing, QuantPacking, SUPER};

/// One output's quantized weights, as a reader of a file format hands them over.
#[derive(Clone, Copy, Debug)]
pub struct QuantRow<'a> {
    /// `k` codes, one a byte, below 2^bits (higher bits are dropped).
    pub codes: &'a [u8],
    /// The scales and offsets of the row, of the packing's kind.
    pub scales: QuantRowScales<'a>,
}

/// Scales and offsets of one row. The offset slices are empty where the packing has no offsets.
#[derive(Clone, Copy, Debug)]
pub enum QuantRowScales<'a> {
    /// Half precision, as bits.
    F16 {
        /// `k / group` scales.
        scale: &'a [u16],
        /// `k / group` offsets, or none.
        offset: &'a [u16],
    },
    /// Single precision.
    F32 {
        /// `k / group` scales.
        scale: &'a [f32],
        /// `k / group` offsets, or none.
        offset: &'a [f32],
    },
    /// `k / group` scales of a byte each, of either kind.
    Bytes(&'a [u8]),
    /// scale = d · sc, offset = −(dmin · m).
    Super {
        /// `ceil(k / 256)` half-precision factors, as bits.
        d: &'a [u16],
        /// `ceil(k / 256)` half-precision factors of the offsets, or none.
        dmin: &'a [u16],
        /// `k / group` small scales.
        sc: &'a [i8],
        /// `k / group` small offsets, or none.
        m: &'a [u8],
    },
    /// The same with factors in single precision.
    SuperF32 {
        /// `ceil(k / 256)` factors.
        d: &'a [f32],
        /// `ceil(k / 256)` factors of the offsets, or none.
        dmin: &'a [f32],
        /// `k / group` small scales.
        sc: &'a [i8],
        /// `k / group` small offsets, or none.
        m: &'a [u8],
    },
}

fn expect(what: &'static str, actual: usize, expected: usize) -> Result<(), PackError> {
    if actual == expected { Ok(()) } else { Err(PackError::Length { what, expected, actual }) }
}

fn check_panel(packing: &Packing, rows: usize, dst: &[u8]) -> Result<(), PackError> {
    if rows == 0 || rows > PANEL {
        return Err(PackError::Rows(rows));
    }
    expect("panel", dst.len(), packing.panel_bytes())
}

/// Packs up to 16 rows of `k` floats into one panel of a float kind (`dst`: `panel_bytes` long); missing rows become zeros.
/// F16 and Bf16 round to nearest even. Fails on quantized packings and wrong lengths.
pub fn pack_panel_f32(packing: &Packing, rows: &[&[f32]], dst: &mut [u8]) -> Result<(), PackError> {
    check_panel(packing, rows.len(), dst)?;
    for row in rows {
        expect("row", row.len(), packing.k())?;
    }
    dst.fill(0);
    match packing.kind() {
        PackKind::F32 => transpose(rows, dst, f32::to_le_bytes),
        PackKind::F16 => transpose(rows, dst, |v| f32_to_f16(v).to_le_bytes()),
        PackKind::Bf16 => transpose(rows, dst, |v| f32_to_bf16(v).to_le_bytes()),
        PackKind::F8 { .. } | PackKind::Quant(_) => return Err(PackError::KindMismatch),
    }
    Ok(())
}

/// Writes element `k` of row `lane` as value `16 · k + lane` of `dst`.
fn transpose<T: Copy, const N: usize>(rows: &[&[T]], dst: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    for (lane, row) in rows.iter().enumerate() {
        for (value, vector) in row.iter().zip(dst.chunks_exact_mut(PANEL * N)) {
            vector[lane * N..][..N].copy_from_slice(&bytes(*value));
        }
    }
}

/// Packs up to 16 quantized rows into one panel (`dst`: `panel_bytes` long); missing rows become zeros. Fails on float
/// packings, scales of another kind than the packing's, and wrong lengths.
pub fn pack_panel_quant(packing: &Packing, rows: &[QuantRow<'_>], dst: &mut [u8]) -> Result<(), PackError> {
    let PackKind::Quant(quant) = packing.kind() else {
        return Err(PackError::KindMismatch);
    };
    check_panel(packing, rows.len(), dst)?;
    for row in rows {
        expect("codes", row.codes.len(), packing.k())?;
        check_scales(quant, packing.k(), row.scales)?;
    }
    dst.fill(0);
    let (codes, scales) = dst.split_at_mut(quant.code_bytes(packing.k()));
    for (lane, row) in rows.iter().enumerate() {
        for (source, block) in row.codes.chunks_exact(BLOCK).zip(codes.chunks_exact_mut(quant.block_bytes())) {
            pack_block(quant.bits, lane, source, block);
        }
        pack_scales(quant, lane, row.scales, scales);
    }
    // A missing row is all zeros by its scales, whatever its codes and zero point are.
    Ok(())
}

fn check_scales(quant: QuantPacking, k: usize, scales: QuantRowScales<'_>) -> Result<(), PackError> {
    let groups = k.div_ceil(usize::from(quant.group));
    let supers = k.div_ceil(SUPER);
    let if_offset = |n: usize| if quant.offset { n } else { 0 };
    match (quant.scales, scales) {
        (PackScales::F16, QuantRowScales::F16 { scale, offset }) => {
            expect("scales", scale.len(), groups)?;
            expect("offsets", offset.len(), if_offset(groups))
        }
        (PackScales::F32, QuantRowScales::F32 { scale, offset }) => {
            expect("scales", scale.len(), groups)?;
            expect("offsets", offset.len(), if_offset(groups))
        }
        (PackScales::E8m0Half | PackScales::Ue4m3Half, QuantRowScales::Bytes(scale)) => {
            expect("scales", scale.len(), groups)
        }
        (PackScales::Super, QuantRowScales::Super { d, dmin, sc, m }) => {
            expect("d", d.len(), supers)?;
            expect("dmin", dmin.len(), if_offset(supers))?;
            expect("sc", sc.len(), groups)?;
            expect("m", m.len(), if_offset(groups))
        }
        (PackScales::SuperF32, QuantRowScales::SuperF32 { d, dmin, sc, m }) => {
            expect("d", d.len(), supers)?;
            expect("dmin", dmin.len(), if_offset(supers))?;
            expect("sc", sc.len(), groups)?;
            expect("m", m.len(), if_offset(groups))
        }
        _ => Err(PackError::KindMismatch),
    }
}

/// The bit planes a code is split into: (bits of the plane, position of its lowest bit in the code), lowest first.
fn planes(bits: u8) -> impl Iterator<Item = (u8, u8)> {
    let mut position = 0;
    [8u8, 4, 2, 1].into_iter().filter(move |plane| bits & plane != 0).map(move |plane| {
        position += plane;
        (plane, position - plane)
    })
}

/// Where quad `quad` of a plane lies: the vector of 64 bytes, and the lowest bit within each byte.
fn place(plane: u8, quad: usize) -> (usize, usize) {
    match plane {
        8 => (quad, 0),
        4 => (quad % 4, quad / 4 * 4),
        2 => (quad / 4, quad % 4 * 2),
        _ => (0, quad),
    }
}

/// Ors 32 codes of one lane into a zeroed block.
fn pack_block(bits: u8, lane: usize, source: &[u8], block: &mut [u8]) {
    let mut base = 0;
    for (plane, position) in planes(bits) {
        let mask = (0xffu16 >> (8 - plane)) as u8;
        for (quad, codes) in source.chunks_exact(4).enumerate() {
            let (vector, bit) = place(plane, quad);
            let dst = &mut block[base + vector * 64 + lane * 4..][..4];
            for (dst, code) in dst.iter_mut().zip(codes) {
                *dst |= (code >> position & mask) << bit;
            }
        }
        base += usize::from(plane) * 64;
    }
}

/// Reads 32 codes of one lane out of a block.
fn unpack_block(bits: u8, lane: usize, block: &[u8]) -> [u8; BLOCK] {
    let mut codes = [0; BLOCK];
    let mut base = 0;
    for (plane, position) in planes(bits) {
        let mask = (0xffu16 >> (8 - plane)) as u8;
        for (quad, codes) in codes.chunks_exact_mut(4).enumerate() {
            let (vector, bit) = place(plane, quad);
            let src = &block[base + vector * 64 + lane * 4..][..4];
            for (code, src) in codes.iter_mut().zip(src) {
                *code |= (src >> bit & mask) << position;
            }
        }
        base += usize::from(plane) * 64;
    }
    codes
}

/// Byte offsets of the scale and the offset of a group within the scales of a panel (F16 and F32), lane 0.
fn group_place(quant: QuantPacking, group: usize, size: usize) -> (usize, usize) {
    let parts = 1 + usize::from(quant.offset);
    let base = group * parts * size * PANEL;
    (base, base + size * PANEL)
}

/// Byte offsets of `d`, `dmin`, `sc` and `m` of a group, lane 0, under [`PackScales::Super`] (`size` 2) or
/// [`PackScales::SuperF32`] (`size` 4).
fn super_place(quant: QuantPacking, group: usize, size: usize) -> [usize; 4] {
    let groups = SUPER / usize::from(quant.group);
    let base = group / groups * quant.super_bytes();
    let small = base + size * PANEL * (1 + usize::from(quant.offset));
    let sc = small + group % groups * PANEL;
    [base, base + size * PANEL, sc, sc + groups * PANEL]
}

fn pack_scales(quant: QuantPacking, lane: usize, row: QuantRowScales<'_>, dst: &mut [u8]) {
    match row {
        QuantRowScales::F16 { scale, offset } => put_groups(quant, lane, scale, offset, dst, half_bytes),
        QuantRowScales::F32 { scale, offset } => put_groups(quant, lane, scale, offset, dst, float_bytes),
        QuantRowScales::Bytes(scale) => put_groups(quant, lane, scale, &[], dst, |byte| {
            // The sign is no part of it.
            [if quant.scales == PackScales::Ue4m3Half { byte & 0x7f } else { byte }]
        }),
        QuantRowScales::Super { d, dmin, sc, m } => put_supers(quant, lane, [d, dmin], (sc, m), dst, half_bytes),
        QuantRowScales::SuperF32 { d, dmin, sc, m } => put_supers(quant, lane, [d, dmin], (sc, m), dst, float_bytes),
    }
}

fn put_supers<T: Copy, const N: usize>(
    quant: QuantPacking,
    lane: usize,
    [d, dmin]: [&[T]; 2],
    (sc, m): (&[i8], &[u8]),
    dst: &mut [u8],
    bytes: impl Fn(T) -> [u8; N],
) {
    let groups = SUPER / usize::from(quant.group);
    for (group, sc) in sc.iter().enumerate() {
        let [at_d, at_dmin, at_sc, at_m] = super_place(quant, group, N);
        dst[at_d + N * lane..][..N].copy_from_slice(&bytes(d[group / groups]));
        dst[at_sc + lane] = *sc as u8;
        if quant.offset {
            dst[at_dmin + N * lane..][..N].copy_from_slice(&bytes(dmin[group / groups]));
            dst[at_m + lane] = m[group];
        }
    }
}

/// A half-precision scale; what is no number without bits of its own, which rounding would carry on to a number.
fn half_bytes(value: u16) -> [u8; 2] {
    let number = value & 0x7fff <= 0x7c00;
    if number { value } else { 0x7e00 }.to_le_bytes()
}

/// The same of a float.
fn float_bytes(value: f32) -> [u8; 4] {
    if value.is_nan() { f32::NAN } else { value }.to_le_bytes()
}

fn put_groups<T: Copy, const N: usize>(
    quant: QuantPacking,
    lane: usize,
    scales: &[T],
    offsets: &[T],
    dst: &mut [u8],
    bytes: impl Fn(T) -> [u8; N],
) {
    for (group, scale) in scales.iter().enumerate() {
        let (at, _) = group_place(quant, group, N);
        dst[at + N * lane..][..N].copy_from_slice(&bytes(*scale));
    }
    for (group, offset) in offsets.iter().enumerate() {
        let (_, at) = group_place(quant, group, N);
        dst[at + N * lane..][..N].copy_from_slice(&bytes(*offset));
    }
}

fn half_at(src: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([src[at], src[at + 1]]))
}

fn float_at(src: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([src[at], src[at + 1], src[at + 2], src[at + 3]])
}

/// The scale and offset of a group of one lane.
fn group_scale(quant: QuantPacking, lane: usize, group: usize, src: &[u8]) -> (f32, f32) {
    let if_offset = |value: &dyn Fn() -> f32| if quant.offset { value() } else { 0.0 };
    match quant.scales {
        PackScales::F16 => {
            let (scale, offset) = group_place(quant, group, 2);
            (half_at(src, scale + 2 * lane), if_offset(&|| half_at(src, offset + 2 * lane)))
        }
        PackScales::F32 => {
            let (scale, offset) = group_place(quant, group, 4);
            (float_at(src, scale + 4 * lane), if_offset(&|| float_at(src, offset + 4 * lane)))
        }
        PackScales::E8m0Half => (e8m0_half_to_f32(src[group_place(quant, group, 1).0 + lane]), 0.0),
        PackScales::Ue4m3Half => (ue4m3_half_to_f32(src[group_place(quant, group, 1).0 + lane]), 0.0),
        PackScales::Super => {
            let [d, dmin, sc, m] = super_place(quant, group, 2);
            let scale = half_at(src, d + 2 * lane) * f32::from(src[sc + lane] as i8);
            (scale, if_offset(&|| -(half_at(src, dmin + 2 * lane) * f32::from(src[m + lane]))))
        }
        PackScales::SuperF32 => {
            let [d, dmin, sc, m] = super_place(quant, group, 4);
            let scale = float_at(src, d + 4 * lane) * f32::from(src[sc + lane] as i8);
            (scale, if_offset(&|| -(float_at(src, dmin + 4 * lane) * f32::from(src[m + lane]))))
        }
    }
}

/// Reads row `row` (one output) back out of the packed matrix `data` as `k` floats, e.g. a token's embedding from a matrix
/// that is also the output layer. Quantized values are `scale · (level − zero)`, rounded, plus the offset, rounded.
///
/// Panics if `row`, the data or `out` do not fit the packing.
pub fn unpack_row(packing: &Packing, data: &[u8], row: usize, out: &mut [f32]) {
    assert!(row < packing.out(), "row {row} of a matrix with {} outputs", packing.out());
    assert_eq!(data.len(), packing.bytes(), "bytes of the packed matrix");
    assert_eq!(out.len(), packing.k(), "elements of a row");
    let panel = &data[row / PANEL * packing.panel_bytes()..][..packing.panel_bytes()];
    let lane = row % PANEL;
    match packing.kind() {
        PackKind::F32 => gather(panel, lane, out, f32::from_le_bytes),
        PackKind::F16 => gather(panel, lane, out, |bytes| f16_to_f32(u16::from_le_bytes(bytes))),
        PackKind::Bf16 => gather(panel, lane, out, |bytes| bf16_to_f32(u16::from_le_bytes(bytes))),
        PackKind::F8 { group } => float8::unpack(group, panel, lane, out),
        PackKind::Quant(quant) => unpack_quant(quant, panel, lane, out),
    }
}

fn gather<const N: usize>(panel: &[u8], lane: usize, out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (out, vector) in out.iter_mut().zip(panel.as_chunks::<N>().0.chunks_exact(PANEL)) {
        *out = value(vector[lane]);
    }
}

fn unpack_quant(quant: QuantPacking, panel: &[u8], lane: usize, out: &mut [f32]) {
    let (codes, scales) = panel.split_at(quant.code_bytes(out.len()));
    let group = usize::from(quant.group).min(BLOCK);
    for (index, (block, out)) in codes.chunks_exact(quant.block_bytes()).zip(out.chunks_exact_mut(BLOCK)).enumerate() {
        let codes = unpack_block(quant.bits, lane, block);
        for (half, (codes, out)) in codes.chunks_exact(group).zip(out.chunks_exact_mut(group)).enumerate() {
            let (scale, offset) = group_scale(quant, lane, quant.stored_group(index * (BLOCK / group) + half), scales);
            for (out, code) in out.iter_mut().zip(codes) {
                let value = scale * (f32::from(quant.level(*code)) - f32::from(quant.zero));
                *out = if quant.offset { value + offset } else { value };
            }
        }
    }
}

mod float8;

pub(crate) use float8::f8_as_f16;
pub use float8::{F8Row, pack_panel_f8};
