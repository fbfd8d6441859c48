//! How a weight matrix lies in memory once packed: kinds, sizes, offsets. Moving data into that shape is `pack`'s job,
//! multiplying with it `linear`'s.
//!
//! A *panel* holds 16 consecutive outputs over all of k, contiguous; outputs are padded to whole panels with zeros. Lane l of
//! every vector belongs to output `16 · panel + l`.
//!
//! - Float kinds: `k` vectors of 16 values.
//! - Quantized kinds: first the codes, `k / 32` *blocks*; then the scales (and offsets), each part padded to 64 bytes.
//!   A block is made of bit planes, whatever of these its width is the sum of, low bits first:
//!   8 bits: 8 × 64 bytes, quad j (elements 4j..4j+4 of the block) as byte `4 · lane + i`;
//!   4 bits: 4 × 64 bytes, quad j in the low and quad j + 4 in the high nibbles of vector j;
//!   2 bits: 2 × 64 bytes, quad j in bits `2 · (j % 4)` of vector j / 4;
//!   1 bit: 64 bytes, quad j in bit j.
//! - Scales F16 or F32: per group 16 scales, then, if there are offsets, 16 offsets.
//! - Scales Super: per 256 elements 16 f16 `d`, 16 f16 `dmin` (if offsets), then per group 16 i8 `sc` and, if offsets, 16 u8 `m`.

use std::fmt;

use crate::sizes::WORD_MAX;
pub use crate::sizes::{BLOCK, PANEL, SUPER};

/// What a packed weight is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackKind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Integer codes with scales; multiplied with quantized activations.
    Quant(QuantPacking),
}

/// How codes become values: `scale[g] · (code − zero) + offset[g]`, g being the group of `group` consecutive k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantPacking {
    /// Stored width of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: u8,
    /// Elements of k that share a scale: 16 or 32. Sources with larger groups repeat their scales.
    pub group: u8,
    /// How scales and offsets are stored.
    pub scales: PackScales,
    /// The code that stands for zero; must be 0 if there are offsets.
    pub zero: u8,
    /// Whether every group has an offset.
    pub offset: bool,
}

/// How the scale and offset of a group are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackScales {
    /// Half precision each.
    F16,
    /// Single precision each.
    F32,
    /// Per 256 elements half-precision `d` (and `dmin`), per group an 8-bit `sc` (and `m`): the scale is `d · sc`, the offset
    /// `−(dmin · m)`. Keeps GGUF's K-quants exact at their own size.
    Super,
}

/// Why a packing, or the data for it, was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PackError {
    /// Codes are 2, 3, 4, 5, 6 or 8 bits wide.
    Bits(u8),
    /// Groups have 16 or 32 elements.
    Group(u8),
    /// Quantized rows must be whole blocks of 32.
    K(usize),
    /// With offsets the zero point must be 0.
    ZeroWithOffset(u8),
    /// The matrix is empty or its packed size exceeds what memory can address.
    Size {
        /// Outputs asked for.
        out: usize,
        /// Inputs asked for.
        k: usize,
    },
    /// A panel was given no row or more than 16.
    Rows(usize),
    /// A slice has not the length the packing calls for.
    Length {
        /// Which slice.
        what: &'static str,
        /// The length the packing calls for.
        expected: usize,
        /// The length it has.
        actual: usize,
    },
    /// Float rows were given for quantized packing, or scales of another kind than the packing's.
    KindMismatch,
}

impl fmt::Display for PackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PackError::Bits(bits) => write!(f, "codes of {bits} bits cannot be packed; 2, 3, 4, 5, 6 and 8 can"),
            PackError::Group(group) => {
                write!(f, "groups of {group} cannot be packed; 16 and 32 can")
            }
            PackError::K(k) => write!(f, "a quantized row of {k} elements is not a multiple of {BLOCK}"),
            PackError::ZeroWithOffset(zero) => {
                write!(f, "zero point {zero} beside offsets; it must be 0 there")
            }
            PackError::Size { out, k } => write!(f, "a matrix of {out} × {k} is empty or beyond the address space"),
            PackError::Rows(rows) => write!(f, "a panel takes 1 to {PANEL} rows, not {rows}"),
            PackError::Length { what, expected, actual } => {
                write!(f, "{what} has length {actual}, the packing needs {expected}")
            }
            PackError::KindMismatch => f.write_str("rows and packing are of different kinds"),
        }
    }
}

impl std::error::Error for PackError {}

/// The shape of a packed matrix of `out` rows (outputs) by `k` columns (inputs): checked once, then trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packing {
    kind: PackKind,
    out: usize,
    k: usize,
    panel_bytes: usize,
}

impl Packing {
    /// Describes a matrix. Fails if the kind is not one this crate multiplies, or if the size overflows.
    pub fn new(kind: PackKind, out: usize, k: usize) -> Result<Packing, PackError> {
        let size = PackError::Size { out, k };
        if out == 0 || k == 0 {
            return Err(size);
        }
        let panel_bytes = match kind {
            PackKind::F32 => k.checked_mul(4 * PANEL),
            PackKind::F16 | PackKind::Bf16 => k.checked_mul(2 * PANEL),
            PackKind::Quant(quant) => {
                quant.check(k)?;
                // No quantized kind takes more than 16 bytes an element.
                k.checked_mul(16 * PANEL).map(|_| quant.code_bytes(k) + quant.scale_bytes(k))
            }
        };
        let panel_bytes = panel_bytes.ok_or_else(|| size.clone())?;
        let bytes = panel_bytes.checked_mul(out.div_ceil(PANEL)).ok_or_else(|| size.clone())?;
        // Row buffers are addressed in bytes too.
        if bytes > isize::MAX as usize || out > isize::MAX as usize / 8 {
            return Err(size);
        }
        Ok(Packing { kind, out, k, panel_bytes })
    }

    /// What the weights are made of.
    pub fn kind(&self) -> PackKind {
        self.kind
    }

    /// Outputs (rows of the matrix).
    pub fn out(&self) -> usize {
        self.out
    }

    /// Inputs (columns of the matrix).
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of panels of 16 outputs.
    pub fn panels(&self) -> usize {
        self.out.div_ceil(PANEL)
    }

    /// Bytes of one panel.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Bytes of the whole packed matrix.
    pub fn bytes(&self) -> usize {
        self.panel_bytes * self.panels()
    }

    /// Whether the matrix unit multiplies this matrix by activations in tiles ([`crate::ActForm::Tiled`]).
    pub fn wants_tiles(&self) -> bool {
        matches!(self.kind, PackKind::Quant(quant) if quant.fits_floats())
    }

    /// Whether the matrix unit multiplies this matrix by rounded activations ([`crate::Bf16Acts`]).
    pub fn takes_rounded(&self) -> bool {
        matches!(self.kind, PackKind::Quant(_) | PackKind::Bf16) && self.k.is_multiple_of(BLOCK)
    }

    /// Whether the matrix multiplies quantized activations ([`crate::Acts`]) rather than floats.
    pub fn wants_acts(&self) -> bool {
        matches!(self.kind, PackKind::Quant(_))
    }
}

impl QuantPacking {
    fn check(self, k: usize) -> Result<(), PackError> {
        if !matches!(self.bits, 2..=6 | 8) {
            return Err(PackError::Bits(self.bits));
        }
        if !matches!(self.group, 16 | 32) {
            return Err(PackError::Group(self.group));
        }
        if !k.is_multiple_of(BLOCK) {
            return Err(PackError::K(k));
        }
        if self.offset && self.zero != 0 {
            return Err(PackError::ZeroWithOffset(self.zero));
        }
        Ok(())
    }

    /// Whether a group's sum of codes (less the zero point) times activations has an exact single-precision value, and so has
    /// every part of it: then it may be summed in floats, in any order.
    pub(crate) fn fits_floats(self) -> bool {
        let (highest, zero) = ((1u64 << self.bits) - 1, u64::from(self.zero));
        let widest = zero.max(highest.saturating_sub(zero));
        zero <= highest && widest * u64::from(self.group) * WORD_MAX as u64 <= 1 << 24
    }

    /// Bytes of one block of codes: 32 elements of 16 outputs.
    pub(crate) fn block_bytes(self) -> usize {
        BLOCK * PANEL * usize::from(self.bits) / 8
    }

    /// Bytes of the codes of a panel: the offset of its scales.
    pub(crate) fn code_bytes(self, k: usize) -> usize {
        k / BLOCK * self.block_bytes()
    }

    /// Vectors per group: the scale, and perhaps the offset.
    fn parts(self) -> usize {
        1 + usize::from(self.offset)
    }

    /// Bytes of the scales of 256 elements.
    pub(crate) fn super_bytes(self) -> usize {
        let groups = SUPER / usize::from(self.group);
        let per_part = match self.scales {
            PackScales::F16 => groups * 2 * PANEL,
            PackScales::F32 => groups * 4 * PANEL,
            PackScales::Super => 2 * PANEL + groups * PANEL,
        };
        per_part * self.parts()
    }

    /// Bytes of the scales of a panel, padded to 64; a last incomplete super-block takes only the groups it has, except
    /// under [`PackScales::Super`].
    fn scale_bytes(self, k: usize) -> usize {
        let bytes = match self.scales {
            PackScales::Super => k.div_ceil(SUPER) * self.super_bytes(),
            PackScales::F16 => k / usize::from(self.group) * 2 * PANEL * self.parts(),
            PackScales::F32 => k / usize::from(self.group) * 4 * PANEL * self.parts(),
        };
        bytes.next_multiple_of(64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quant(bits: u8, group: u8, scales: PackScales, offset: bool) -> PackKind {
        PackKind::Quant(QuantPacking { bits, group, scales, zero: 0, offset })
    }

    #[test]
    fn known_formats_take_the_bytes_they_should() {
        // Q4_0: 4 bits and an f16 per 32 elements, 4.5 bits a weight.
        let q4 = Packing::new(quant(4, 32, PackScales::F16, false), 32, 256).unwrap();
        assert_eq!(q4.bytes() * 8, 32 * 256 * 9 / 2);
        // Q4_K: 4.625 bits.
        let q4k = Packing::new(quant(4, 32, PackScales::Super, true), 16, 256).unwrap();
        assert_eq!(q4k.bytes(), 16 * 128 + 320);
        // Q6_K: 6.5625 bits.
        let q6k = Packing::new(quant(6, 16, PackScales::Super, false), 16, 1024).unwrap();
        assert_eq!(q6k.bytes(), 16 * 768 + 4 * 288);
        assert_eq!(Packing::new(PackKind::F32, 17, 3).unwrap().bytes(), 2 * 3 * 64);
    }

    #[test]
    fn narrow_codes_are_summed_in_floats() {
        let fits = |bits, group, zero, offset| {
            QuantPacking { bits, group, scales: PackScales::F16, zero, offset }.fits_floats()
        };
        // Q4_0, Q4_1, Q4_K, Q5_0 (a hundredth below the limit), Q6_K.
        assert!(fits(4, 32, 8, false) && fits(4, 32, 0, true) && fits(5, 32, 16, false) && fits(6, 16, 32, false));
        // Q5_1, six bits in groups of 32, Q8_0, and a zero point beyond all codes.
        assert!(
            !fits(5, 32, 0, true) && !fits(6, 32, 32, false) && !fits(8, 32, 128, false) && !fits(4, 32, 200, false)
        );
    }

    #[test]
    fn impossible_packings_name_the_offending_value() {
        let refuse = |kind, out, k| Packing::new(kind, out, k).unwrap_err();
        assert_eq!(refuse(quant(7, 32, PackScales::F16, false), 16, 32), PackError::Bits(7));
        assert_eq!(refuse(quant(4, 64, PackScales::F16, false), 16, 64), PackError::Group(64));
        assert_eq!(refuse(quant(4, 32, PackScales::F16, false), 16, 33), PackError::K(33));
        let both = QuantPacking { bits: 4, group: 32, scales: PackScales::F16, zero: 8, offset: true };
        assert_eq!(refuse(PackKind::Quant(both), 16, 32), PackError::ZeroWithOffset(8));
        assert!(matches!(refuse(PackKind::F32, 0, 5), PackError::Size { .. }));
        assert!(matches!(refuse(PackKind::F32, usize::MAX, usize::MAX / 2), PackError::Size { .. }));
        assert!(matches!(refuse(quant(2, 16, PackScales::F32, true), 16, usize::MAX & !31), PackError::Size { .. }));
        assert!(matches!(refuse(PackKind::F16, usize::MAX - 3, 1), PackError::Size { .. }));
    }
}
