//! Panels of E4M3 numbers: a sign, 4 bits of exponent, 3 of mantissa; no infinities.
//!
//! Read as half floats, seven bits to the left, they are 2^-8 times as much: scales are stored times 256.

use super::{check_panel, expect, float_at, float_bytes};
use crate::half::f16_to_f32;
use crate::packing::{PANEL, PackError, PackKind, Packing, f8_code_bytes};

/// One output's weights, as a reader of a file format hands them over.
#[derive(Clone, Copy, Debug)]
pub struct F8Row<'a> {
    /// `k` E4M3 numbers, none of them NaN.
    pub codes: &'a [u8],
    /// One scale a group.
    pub scale: &'a [f32],
}

/// The half float that stands for an E4M3 number, divided by 256.
pub(crate) fn f8_as_f16(code: u8) -> u16 {
    u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7
}

/// Packs up to 16 rows of E4M3 numbers into one panel (`dst`: `panel_bytes` long); missing rows become zeros. Fails on other
/// packings and wrong lengths.
pub fn pack_panel_f8(packing: &Packing, rows: &[F8Row<'_>], dst: &mut [u8]) -> Result<(), PackError> {
    let PackKind::F8 { group } = packing.kind() else { return Err(PackError::KindMismatch) };
    check_panel(packing, rows.len(), dst)?;
    for row in rows {
        expect("codes", row.codes.len(), packing.k())?;
        expect("scales", row.scale.len(), packing.k().div_ceil(group))?;
    }
    dst.fill(0);
    let (codes, scales) = dst.split_at_mut(f8_code_bytes(packing.k()));
    for (lane, row) in rows.iter().enumerate() {
        for (code, vector) in row.codes.iter().zip(codes.chunks_exact_mut(PANEL)) {
            vector[lane] = *code;
        }
        for (scale, vector) in row.scale.iter().zip(scales.chunks_exact_mut(4 * PANEL)) {
            vector[4 * lane..][..4].copy_from_slice(&float_bytes(scale * 256.0));
        }
    }
    Ok(())
}

/// One row of a panel: number · scale, rounded.
pub(super) fn unpack(group: usize, panel: &[u8], lane: usize, out: &mut [f32]) {
    let (codes, scales) = panel.split_at(f8_code_bytes(out.len()));
    for (k, (out, vector)) in out.iter_mut().zip(codes.chunks_exact(PANEL)).enumerate() {
        let scale = float_at(scales, (k / group * PANEL + lane) * 4);
        *out = f16_to_f32(f8_as_f16(vector[lane])) * scale;
    }
}
