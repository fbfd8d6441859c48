//! The memory layout of a packed weight matrix: kinds, sizes, offsets. `pack` converts data into this layout, `linear` multiplies with
//! it.
//!
//! A *panel* holds 16 consecutive outputs over all of k, contiguous; outputs are padded to whole panels with zeros. Lane l of
//! every vector belongs to output `16 · panel + l`.
//!
//! - Float kinds: `k` vectors of 16 values.
//! - F8: `k` vectors of 16 bytes, padded to 64 bytes; then per group 16 f32 scales, times 256.
//! - Quantized kinds: first the codes, `k / 32` *blocks*; then the scales (and offsets), each part padded to 64 bytes.
//!   A block is made of bit planes, whatever of these its width is the sum of, low bits first:
//!   8 bits: 8 × 64 bytes, quad j (elements 4j..4j+4 of the block) as byte `4 · lane + i`;
//!   4 bits: 4 × 64 bytes, quad j in the low and quad j + 4 in the high nibbles of vector j;
//!   2 bits: 2 × 64 bytes, quad j in bits `2 · (j % 4)` of vector j / 4;
//!   1 bit: 64 bytes, quad j in bit j.
//! - Scales F16, F32 or of a byte: per group 16 scales, then, if there are offsets, 16 offsets.
//! - Scales Super: per 256 elements 16 f16 `d`, 16 f16 `dmin` (if offsets), then per group 16 i8 `sc` and, if offsets, 16 u8 `m`.
//!   SuperF32: the same with `d` and `dmin` in f32.

use std::fmt;

use crate::sizes::WORD_MAX;
pub use crate::sizes::{BLOCK, PANEL, SUPER};

/// The element format of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackKind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// E4M3 numbers of 8 bits, with a single-precision scale per group; multiplied with float activations.
    F8 {
        /// Elements of k that share a scale. The last group may have fewer.
        group: usize,
    },
    /// Integer codes with scales; multiplied with quantized activations.
    Quant(QuantPacking),
}

/// The level of each code, for codes that are not levels themselves. Codes of 3 bits use the first eight.
pub type Codebook = [u8; 16];

/// A codebook in which every code is its own level.
static NO_CODEBOOK: Codebook = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The format of quantized weights. A value is `scale[g] · (level − zero) + offset[g]`, where g is the group of `group` consecutive k.
/// The level is the code, or its entry in the codebook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantPacking {
    /// Stored width of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: u8,
    /// Elements of k that share a scale: 16 or 32, or with F16 and F32 scales also 64 or 128. The last group may have fewer. Sources with
    /// other groups repeat their scales.
    pub group: u8,
    /// How scales and offsets are stored.
    pub scales: PackScales,
    /// The level with the value zero; must be 0 if there are offsets.
    pub zero: u8,
    /// Whether every group has an offset.
    pub offset: bool,
    /// The levels of codes of 3 or 4 bits, without offsets.
    pub codebook: Option<Codebook>,
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
    /// [`Self::Super`] with single-precision `d` (and `dmin`), for factors outside the range of half precision.
    SuperF32,
    /// A byte e: 2^(e − 128). This is half of E8M0, because its elements (E2M1) are stored as doubled integers. No offsets.
    E8m0Half,
    /// A byte with 4 bits of exponent and 3 of mantissa: half of an unsigned E4M3 number, for the same reason. No offsets.
    Ue4m3Half,
}

/// Why a packing, or the data for it, was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PackError {
    /// The width of codes is not 2, 3, 4, 5, 6 or 8 bits.
    Bits(u8),
    /// The group size is not 16 or 32, nor 64 or 128 with F16 or F32 scales.
    Group(u8),
    /// The length of a quantized row is not a multiple of 32.
    K(usize),
    /// The zero point is not 0 although there are offsets.
    ZeroWithOffset(u8),
    /// Scales of one byte were combined with offsets.
    ScalesWithOffset(PackScales),
    /// A codebook for codes of another width than 3 or 4 bits, or beside offsets.
    Codebook {
        /// The codes' width.
        bits: u8,
        /// Whether there are offsets.
        offset: bool,
    },
    /// The matrix is empty or its packed size exceeds what memory can address.
    Size {
        /// Outputs asked for.
        out: usize,
        /// Inputs asked for.
        k: usize,
    },
    /// A panel was given no row or more than 16.
    Rows(usize),
    /// A slice has another length than the packing needs.
    Length {
        /// Which slice.
        what: &'static str,
        /// The length that the packing needs.
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
                write!(f, "groups of {group} cannot be packed; 16 and 32 can, and 64 and 128 with F16 or F32 scales")
            }
            PackError::K(k) => write!(f, "a quantized row of {k} elements is not a multiple of {BLOCK}"),
            PackError::ZeroWithOffset(zero) => {
                write!(f, "zero point {zero} beside offsets; it must be 0 there")
            }
            PackError::ScalesWithOffset(scales) => write!(f, "offsets beside {scales:?} scales, which have none"),
            PackError::Codebook { bits, offset } => {
                let offsets = if *offset { "" } else { "out" };
                write!(
                    f,
                    "a codebook for codes of {bits} bits with{offsets} offsets; those of 3 and 4 without can have one"
                )
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
            PackKind::F8 { group: 0 } => return Err(PackError::Group(0)),
            // The size is largest with a scale for every element.
            PackKind::F8 { group } => {
                k.checked_mul(8 * PANEL).map(|_| f8_code_bytes(k) + k.div_ceil(group) * 4 * PANEL)
            }
            PackKind::Quant(quant) => {
                quant.check(k)?;
                // No quantized kind takes more than 16 bytes an element.
                k.checked_mul(16 * PANEL).map(|_| quant.code_bytes(k) + quant.scale_bytes(k))
            }
        };
        let panel_bytes = panel_bytes.ok_or_else(|| size.clone())?;
        let bytes = panel_bytes.checked_mul(out.div_ceil(PANEL)).ok_or_else(|| size.clone())?;
        // Row buffers are addressed in bytes, too.
        if bytes > isize::MAX as usize || out > isize::MAX as usize / 8 {
            return Err(size);
        }
        Ok(Packing { kind, out, k, panel_bytes })
    }

    /// The element format of the weights.
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
    pub fn takes_tiles(&self) -> bool {
        matches!(self.kind, PackKind::Quant(quant) if quant.fits_floats())
    }

    /// Whether the matrix unit multiplies this matrix by rounded activations ([`crate::Bf16Acts`]).
    pub fn takes_bf16(&self) -> bool {
        matches!(self.kind, PackKind::Quant(_) | PackKind::Bf16) && self.k.is_multiple_of(BLOCK)
    }

    /// Whether the matrix multiplies quantized activations ([`crate::Acts`]) rather than floats.
    pub fn takes_acts(&self) -> bool {
        matches!(self.kind, PackKind::Quant(_))
    }
}

/// Bytes of the codes of a panel of F8: the offset of its scales.
pub(crate) fn f8_code_bytes(k: usize) -> usize {
    (k * PANEL).next_multiple_of(64)
}

impl QuantPacking {
    fn check(self, k: usize) -> Result<(), PackError> {
        if !matches!(self.bits, 2..=6 | 8) {
            return Err(PackError::Bits(self.bits));
        }
        let wide = matches!(self.scales, PackScales::F16 | PackScales::F32) && matches!(self.group, 64 | 128);
        if !matches!(self.group, 16 | 32) && !wide {
            return Err(PackError::Group(self.group));
        }
        if !k.is_multiple_of(BLOCK) {
            return Err(PackError::K(k));
        }
        if self.offset && self.zero != 0 {
            return Err(PackError::ZeroWithOffset(self.zero));
        }
        if self.offset && matches!(self.scales, PackScales::E8m0Half | PackScales::Ue4m3Half) {
            return Err(PackError::ScalesWithOffset(self.scales));
        }
        if self.codebook.is_some() && (self.offset || !matches!(self.bits, 3 | 4)) {
            return Err(PackError::Codebook { bits: self.bits, offset: self.offset });
        }
        Ok(())
    }

    /// The levels of codes up to 4 bits wide.
    #[inline(always)]
    pub(crate) fn levels(&self) -> &Codebook {
        self.codebook.as_ref().unwrap_or(&NO_CODEBOOK)
    }

    /// The level of a code.
    pub(crate) fn level(&self, code: u8) -> u8 {
        self.codebook.map_or(code, |book| book[usize::from(code & 15)])
    }

    /// The highest level.
    pub(crate) fn highest(&self) -> u8 {
        let code = (0xffu16 >> (8 - self.bits)) as u8;
        match self.codebook {
            Some(book) => book[..=usize::from(code)].iter().copied().max().unwrap_or(code),
            None => code,
        }
    }

    /// Whether the sum of codes (minus the zero point) times activations over a group, or over 32 of its elements, is exact in single
    /// precision, partial sums included. Then it may be summed in floats, in any order.
    pub(crate) fn fits_floats(self) -> bool {
        let (highest, zero) = (u64::from(self.highest()), u64::from(self.zero));
        let widest = zero.max(highest.saturating_sub(zero));
        zero <= highest && widest * u64::from(self.group.min(BLOCK as u8)) * WORD_MAX as u64 <= 1 << 24
    }

    /// Returns the stored group of group `group`, which counts groups of 16 or, if stored groups are no smaller, 32 elements.
    #[inline(always)]
    pub(crate) fn stored_group(&self, group: usize) -> usize {
        // Kernels call this for each group, and most formats take the short branch.
        if usize::from(self.group) <= BLOCK { group } else { group >> (self.group / BLOCK as u8).trailing_zeros() }
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
            PackScales::E8m0Half | PackScales::Ue4m3Half => groups * PANEL,
            PackScales::Super => 2 * PANEL + groups * PANEL,
            PackScales::SuperF32 => 4 * PANEL + groups * PANEL,
        };
        per_part * self.parts()
    }

    /// Bytes of the scales of a panel, padded to 64; a last incomplete super-block takes only the groups it has, except
    /// under [`PackScales::Super`] and [`PackScales::SuperF32`].
    fn scale_bytes(self, k: usize) -> usize {
        let groups = k.div_ceil(usize::from(self.group));
        let bytes = match self.scales {
            PackScales::Super | PackScales::SuperF32 => k.div_ceil(SUPER) * self.super_bytes(),
            PackScales::F16 => groups * 2 * PANEL * self.parts(),
            PackScales::F32 => groups * 4 * PANEL * self.parts(),
            PackScales::E8m0Half | PackScales::Ue4m3Half => groups * PANEL,
        };
        bytes.next_multiple_of(64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quant(bits: u8, group: u8, scales: PackScales, offset: bool) -> PackKind {
        PackKind::Quant(QuantPacking { bits, group, scales, zero: 0, offset, codebook: None })
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
        // MXFP4: 4.25 bits. IQ2_XXS: 3 bits for six values, a byte per 32 elements and an f32 per 256.
        let mxfp4 = Packing::new(quant(4, 32, PackScales::E8m0Half, false), 16, 128).unwrap();
        assert_eq!(mxfp4.bytes() * 8, 16 * 128 * 17 / 4);
        let iq2 = Packing::new(quant(3, 32, PackScales::SuperF32, false), 16, 256).unwrap();
        assert_eq!(iq2.bytes() * 8, 16 * 256 * 27 / 8);
        assert_eq!(Packing::new(PackKind::F32, 17, 3).unwrap().bytes(), 2 * 3 * 64);
        // AWQ, and MLX in groups of 64: 4.5 and 5 bits. The last group may be cut.
        let wide = |group, k| Packing::new(quant(4, group, PackScales::F32, true), 16, k).unwrap().bytes();
        assert_eq!((wide(128, 1024), wide(64, 1024)), (16 * 512 + 8 * 128, 16 * 512 + 16 * 128));
        assert_eq!(wide(128, 160), 16 * 80 + 2 * 128);
        // FP8 in blocks of 128: 8.25 bits.
        assert_eq!(Packing::new(PackKind::F8 { group: 128 }, 16, 1024).unwrap().bytes(), 16 * 1024 + 8 * 64);
        assert_eq!(Packing::new(PackKind::F8 { group: 5 }, 16, 6).unwrap().bytes(), 128 + 2 * 64);
    }

    #[test]
    fn narrow_codes_are_summed_in_floats() {
        let fits = |bits, group, zero, offset| {
            QuantPacking { bits, group, scales: PackScales::F16, zero, offset, codebook: None }.fits_floats()
        };
        // Q4_0, Q4_1, Q4_K, Q5_0 (a hundredth below the limit), Q6_K.
        assert!(fits(4, 32, 8, false) && fits(4, 32, 0, true) && fits(5, 32, 16, false) && fits(6, 16, 32, false));
        // Q5_1, six bits in groups of 32, Q8_0, and a zero point beyond all codes.
        assert!(
            !fits(5, 32, 0, true) && !fits(6, 32, 32, false) && !fits(8, 32, 128, false) && !fits(4, 32, 200, false)
        );
        let book = |highest, zero| {
            let codebook = Some(std::array::from_fn(|code| (code * highest / 15) as u8));
            QuantPacking { bits: 4, group: 32, scales: PackScales::F16, zero, offset: false, codebook }.fits_floats()
        };
        // MXFP4, IQ3_S; IQ4_NL.
        assert!(book(24, 12) && book(30, 15) && !book(240, 127));
    }

    #[test]
    fn impossible_packings_name_the_offending_value() {
        let refuse = |kind, out, k| Packing::new(kind, out, k).unwrap_err();
        assert_eq!(refuse(quant(7, 32, PackScales::F16, false), 16, 32), PackError::Bits(7));
        assert_eq!(refuse(quant(4, 48, PackScales::F16, false), 16, 96), PackError::Group(48));
        assert_eq!(refuse(quant(4, 64, PackScales::Super, false), 16, 64), PackError::Group(64));
        assert_eq!(refuse(PackKind::F8 { group: 0 }, 16, 64), PackError::Group(0));
        assert!(matches!(refuse(PackKind::F8 { group: 1 }, 16, usize::MAX / 64), PackError::Size { .. }));
        assert_eq!(refuse(quant(4, 32, PackScales::F16, false), 16, 33), PackError::K(33));
        let both = QuantPacking { bits: 4, group: 32, scales: PackScales::F16, zero: 8, offset: true, codebook: None };
        assert_eq!(refuse(PackKind::Quant(both), 16, 32), PackError::ZeroWithOffset(8));
        let beside = QuantPacking { zero: 0, scales: PackScales::E8m0Half, ..both };
        assert_eq!(refuse(PackKind::Quant(beside), 16, 32), PackError::ScalesWithOffset(PackScales::E8m0Half));
        let book = QuantPacking { bits: 5, offset: false, codebook: Some([0; 16]), ..both };
        assert_eq!(refuse(PackKind::Quant(book), 16, 32), PackError::Codebook { bits: 5, offset: false });
        assert!(matches!(refuse(PackKind::F32, 0, 5), PackError::Size { .. }));
        assert!(matches!(refuse(PackKind::F32, usize::MAX, usize::MAX / 2), PackError::Size { .. }));
        assert!(matches!(refuse(quant(2, 16, PackScales::F32, true), 16, usize::MAX & !31), PackError::Size { .. }));
        assert!(matches!(refuse(PackKind::F16, usize::MAX - 3, 1), PackError::Size { .. }));
    }
}
