//! Integer codes with a scale and a zero point per group: AWQ, GPTQ, compressed-tensors.
//!
//! The formats differ in the place of a code, not in its value: value = scale · (code − zero).

use super::{affine, float};
use crate::encoding::{Encoding, QuantLayout, ScaleKind};
use crate::row::RowBuf;

/// The layout of a matrix of small integers. A row is an output; a column is an input, or a group of inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cells {
    /// Bits of an integer.
    pub(crate) bits: u8,
    /// The arrangement of integers in words.
    pub(crate) order: Order,
    /// The mask of an exclusive or with every stored integer: 128 makes a signed byte an unsigned code.
    pub(crate) flip: u8,
    /// The number that is added to every stored integer, modulo 2^bits.
    pub(crate) plus: u8,
}

/// The arrangement of integers in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// A row is one little-endian bit stream of this many bytes.
    Stream(usize),
    /// A 32-bit word holds neighbouring columns of one row, low bits first. There are this many rows. The words of all rows for the first
    /// columns come first.
    Columns(usize),
    /// A 32-bit word holds neighbouring rows of one column, low bits first. The distances are in words.
    Rows {
        /// The distance to the word of the next rows.
        row: usize,
        /// The distance to the word of the next column.
        column: usize,
        /// Whether the eight 4-bit rows of a word are in AWQ's order: 0, 2, 4, 6, 1, 3, 5, 7.
        interleaved: bool,
    },
}

/// The layout of a matrix of scales. Distances are in scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scales {
    /// The float type of the scales.
    pub(crate) encoding: Encoding,
    /// The distance to the next row.
    pub(crate) row: usize,
    /// The distance to the next group of the same row.
    pub(crate) group: usize,
}

/// Row in a group of eight → its place in a word of AWQ.
const AWQ_PLACE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl Cells {
    /// Appends the first `count` integers of row `row`. `bytes` is the whole tensor, whose size the reader has checked.
    pub(crate) fn read(&self, bytes: &[u8], row: usize, count: usize, out: &mut Vec<u8>) {
        let (bits, start) = (u32::from(self.bits), out.len());
        let per = (32 / bits) as usize;
        let mask = (0xFFu16 >> (8 - bits)) as u8;
        match self.order {
            Order::Stream(row_bytes) => {
                affine::unpack(&bytes[row * row_bytes..(row + 1) * row_bytes], bits, out);
            }
            Order::Columns(rows) => {
                for at in 0..count.div_ceil(per) {
                    let word = word(bytes, at * rows + row);
                    out.extend((0..per as u32).map(|i| (word >> (i * bits)) as u8 & mask));
                }
            }
            Order::Rows { row: rows, column, interleaved } => {
                let place = if interleaved { AWQ_PLACE[row % 8] } else { row % per };
                let (first, shift) = (row / per * rows, place as u32 * bits);
                out.extend((0..count).map(|at| (word(bytes, first + at * column) >> shift) as u8 & mask));
            }
        }
        out.truncate(start + count);
        for code in &mut out[start..] {
            *code = (*code ^ self.flip).wrapping_add(self.plus) & mask;
        }
    }
}

/// The 32-bit word at index `at`.
fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = &bytes[at * 4..at * 4 + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

impl Scales {
    /// Appends the first `count` scales of row `row` as f32. Scales of 16 bits are also appended as stored bits.
    pub(super) fn read(&self, bytes: &[u8], row: usize, count: usize, out: &mut RowBuf) {
        let size = if self.encoding == Encoding::F32 { 4 } else { 2 };
        for group in 0..count {
            let at = (row * self.row + group * self.group) * size;
            let bytes = &bytes[at..at + size];
            float::widen(self.encoding, bytes, &mut out.scale);
            if size == 2 {
                out.scale_bits.push(u16::from_le_bytes([bytes[0], bytes[1]]));
            }
        }
    }
}

/// Decodes row `row` of `cols` elements from its parts. Each part has the bytes of its whole tensor.
pub(crate) fn decode(
    layout: QuantLayout,
    (row, cols): (usize, usize),
    (codes, code_bytes): (&Cells, &[u8]),
    (scales, scale_bytes): (&Scales, &[u8]),
    zeros: Option<(&Cells, &[u8])>,
    out: &mut RowBuf,
) {
    out.begin(Some(layout));
    let groups = cols.div_ceil(layout.group);
    codes.read(code_bytes, row, cols, &mut out.codes);
    scales.read(scale_bytes, row, groups, out);
    let Some((zeros, bytes)) = zeros else { return };
    zeros.read(bytes, row, groups, &mut out.zeros);
    let offsets = out.scale.iter().zip(&out.zeros).map(|(scale, zero)| -(scale * f32::from(*zero)));
    out.offset.extend(offsets);
    if layout.scales == ScaleKind::F32 {
        // Computed offsets have no 16-bit form, so the scales' stored bits are dropped too.
        out.scale_bits.clear();
    }
}
