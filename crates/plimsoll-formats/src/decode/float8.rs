//! Rows of FP8 numbers (E4M3) with the scales of their blocks.
//!
//! The value is number · scale, rounded once to f32.

use super::grouped::Scales;
use crate::row::RowBuf;

/// Decodes a row of numbers in groups of `group`. Its scales are those of row `row` of blocks. Returns false if a number is NaN.
pub(crate) fn decode(
    group: usize,
    numbers: &[u8],
    row: usize,
    (scales, bytes): (&Scales, &[u8]),
    out: &mut RowBuf,
) -> bool {
    out.begin_f8(group);
    scales.read(bytes, row, numbers.len().div_ceil(group), out);
    out.codes.extend_from_slice(numbers);
    numbers.iter().all(|number| number & 0x7F != 0x7F)
}
