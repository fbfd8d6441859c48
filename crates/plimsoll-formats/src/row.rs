//! One decoded row: owned, reusable buffers, and views of them in the form that packers read.
//!
//! The arithmetic of [`RowBuf::dequantize`] is the reference for every kernel. This module knows no file layout.

use crate::e4m3;
use crate::encoding::{QuantLayout, ScaleKind};
use half::f16;

/// Elements that share one super-scale in the K-quants of GGUF.
pub(crate) const SUPER: usize = 256;

/// A reusable buffer for one decoded row. It grows to the longest row it has held, and then allocates no more.
#[derive(Debug, Default, Clone)]
pub struct RowBuf {
    /// The layout of the row held; `None` for a row of plain floats.
    pub(crate) layout: Option<QuantLayout>,
    pub(crate) values: Vec<f32>,
    pub(crate) codes: Vec<u8>,
    pub(crate) scale: Vec<f32>,
    pub(crate) offset: Vec<f32>,
    pub(crate) scale_bits: Vec<u16>,
    pub(crate) offset_bits: Vec<u16>,
    pub(crate) d: Vec<u16>,
    pub(crate) dmin: Vec<u16>,
    pub(crate) d_f32: Vec<f32>,
    pub(crate) dmin_f32: Vec<f32>,
    pub(crate) sc: Vec<i8>,
    pub(crate) m: Vec<u8>,
    /// Elements of a group, if the row held is one of FP8 numbers.
    pub(crate) f8_group: Option<usize>,
    /// Zero points of the row that is being decoded.
    pub(crate) zeros: Vec<u8>,
}

/// A view of the row that a [`RowBuf`] holds.
#[derive(Debug, Clone, Copy)]
pub enum Row<'a> {
    /// A row of a float tensor, widened to f32 without loss.
    Float(&'a [f32]),
    /// A row of FP8 numbers (E4M3), none of them NaN.
    F8 {
        /// Elements that share a scale.
        group: usize,
        /// One byte an element.
        numbers: &'a [u8],
        /// One scale a group.
        scale: &'a [f32],
    },
    /// A row of a quantized tensor.
    Quant {
        /// The layout that says how codes and scales combine.
        layout: QuantLayout,
        /// One unsigned code per element.
        codes: &'a [u8],
        /// The scales, one entry per group.
        scales: RowScales<'a>,
    },
}

/// The scales of a quantized row.
#[derive(Debug, Clone, Copy)]
pub enum RowScales<'a> {
    /// One stored number per group.
    Group {
        /// Scale per group, widened to f32.
        scale: &'a [f32],
        /// Offset per group, widened to f32; empty when the layout has none.
        offset: &'a [f32],
        /// The scale as stored (binary16 or bfloat16 bits, or a byte); empty when the file stores f32.
        scale_bits: &'a [u16],
        /// The offset as stored; empty when the layout has none or the file stores f32.
        offset_bits: &'a [u16],
    },
    /// Two-level scales: `scale = d * sc`, `offset = -(dmin * m)`.
    Super {
        /// Binary16 bits of the super-scale, one per 256 elements.
        d: &'a [u16],
        /// Binary16 bits of the super-offset, one per 256 elements; empty when the layout has no offset.
        dmin: &'a [u16],
        /// Small integer scale per group, -128 to 127.
        sc: &'a [i8],
        /// Small integer offset per group, 0 to 63; empty when the layout has no offset.
        m: &'a [u8],
    },
    /// As `Super`, with binary32 factors.
    SuperF32 {
        /// The super-scale, one per 256 elements.
        d: &'a [f32],
        /// The super-offset, one per 256 elements; empty when the layout has no offset.
        dmin: &'a [f32],
        /// Small integer scale per group.
        sc: &'a [i8],
        /// Small integer offset per group; empty when the layout has no offset.
        m: &'a [u8],
    },
}

impl RowBuf {
    /// An empty buffer.
    pub fn new() -> RowBuf {
        RowBuf::default()
    }

    /// Length of the row held, in elements.
    pub fn len(&self) -> usize {
        match (self.layout, self.f8_group) {
            (None, None) => self.values.len(),
            _ => self.codes.len(),
        }
    }

    /// Whether the row held has no elements, as before the first decode.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The row in its stored form.
    pub fn row(&self) -> Row<'_> {
        if let Some(group) = self.f8_group {
            return Row::F8 { group, numbers: &self.codes, scale: &self.scale };
        }
        let Some(layout) = self.layout else {
            return Row::Float(&self.values);
        };
        let scales = match layout.scales {
            ScaleKind::Super => RowScales::Super { d: &self.d, dmin: &self.dmin, sc: &self.sc, m: &self.m },
            ScaleKind::SuperF32 => {
                RowScales::SuperF32 { d: &self.d_f32, dmin: &self.dmin_f32, sc: &self.sc, m: &self.m }
            }
            _ => RowScales::Group {
                scale: &self.scale,
                offset: &self.offset,
                scale_bits: &self.scale_bits,
                offset_bits: &self.offset_bits,
            },
        };
        Row::Quant { layout, codes: &self.codes, scales }
    }

    /// Writes the reference values of the row into `out`. For GGUF types they equal, bit for bit, the results of the `gguf` Python package.
    /// For MLX types they equal `scale * code + bias` in f32. For codes with zero points they are `scale * (code - zero)`, which is exact
    /// in f32 with 16-bit scales. For FP8 they are `number * scale`.
    ///
    /// # Panics
    ///
    /// When `out.len()` is not [`RowBuf::len`]: the caller's mistake, never the file's.
    pub fn dequantize(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.len(), "dequantize needs an output as long as the row");
        if let Some(group) = self.f8_group {
            let groups = out.chunks_mut(group).zip(self.codes.chunks(group)).zip(&self.scale);
            for ((out, numbers), scale) in groups {
                out.iter_mut().zip(numbers).for_each(|(out, number)| *out = e4m3::value(*number) * scale);
            }
            return;
        }
        let Some(layout) = self.layout else {
            out.copy_from_slice(&self.values);
            return;
        };
        let groups = out.chunks_mut(layout.group).zip(self.codes.chunks(layout.group));
        for (g, (out, codes)) in groups.enumerate() {
            let (scale, offset) = self.scale_and_offset(layout, g);
            for (value, &code) in out.iter_mut().zip(codes) {
                let product = scale * f32::from(i16::from(layout.level(code)) - i16::from(layout.zero));
                *value = match offset {
                    Some(offset) => product + offset,
                    None => product,
                };
            }
        }
    }

    /// Scale and offset of group `g` of the quantized row held.
    fn scale_and_offset(&self, layout: QuantLayout, g: usize) -> (f32, Option<f32>) {
        let block = g * layout.group / SUPER;
        let half = |bits: &[u16]| f16::from_bits(bits[block]).to_f32();
        match layout.scales {
            ScaleKind::Super => {
                let offset = layout.offset.then(|| -(half(&self.dmin) * f32::from(self.m[g])));
                (half(&self.d) * f32::from(self.sc[g]), offset)
            }
            ScaleKind::SuperF32 => {
                let offset = layout.offset.then(|| -(self.dmin_f32[block] * f32::from(self.m[g])));
                (self.d_f32[block] * f32::from(self.sc[g]), offset)
            }
            _ => (self.scale[g], layout.offset.then(|| self.offset[g])),
        }
    }

    /// Empties the buffer and sets the layout of the row that is decoded into it next.
    pub(crate) fn begin(&mut self, layout: Option<QuantLayout>) {
        self.layout = layout;
        self.f8_group = None;
        self.values.clear();
        self.codes.clear();
        self.scale.clear();
        self.offset.clear();
        self.scale_bits.clear();
        self.offset_bits.clear();
        self.d.clear();
        self.dmin.clear();
        self.d_f32.clear();
        self.dmin_f32.clear();
        self.sc.clear();
        self.m.clear();
        self.zeros.clear();
    }

    /// Empties the buffer for a row of FP8 numbers with `group` elements per scale.
    pub(crate) fn begin_f8(&mut self, group: usize) {
        self.begin(None);
        self.f8_group = Some(group);
    }

    /// Appends one group's binary16 scale.
    pub(crate) fn push_scale_f16(&mut self, bits: u16) {
        self.scale_bits.push(bits);
        self.scale.push(f16::from_bits(bits).to_f32());
    }

    /// Appends one group's scale of an exponent: half of E8M0.
    pub(crate) fn push_scale_e8m0(&mut self, e: u8) {
        self.scale_bits.push(e.into());
        // 2^-128 and 2^-127 are subnormal.
        let bits = if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 };
        self.scale.push(f32::from_bits(bits));
    }

    /// Appends one group's scale of seven bits: half of an unsigned E4M3 number.
    pub(crate) fn push_scale_ue4m3(&mut self, bits: u8) {
        self.scale_bits.push(bits.into());
        // The same bits read as a binary16 are 2^-8 times the value; the factor 128 also halves it.
        self.scale.push(f16::from_bits(u16::from(bits) << 7).to_f32() * 128.0);
    }

    /// Replaces each group's scale with a function of it. The new scale is a binary32, so its stored bits are dropped.
    pub(crate) fn scale_groups(&mut self, scaled: impl Fn(f32) -> f32) {
        if let Some(layout) = &mut self.layout {
            layout.scales = ScaleKind::F32;
        }
        self.scale_bits.clear();
        self.scale.iter_mut().for_each(|scale| *scale = scaled(*scale));
    }

    /// Appends one group's binary16 offset.
    pub(crate) fn push_offset_f16(&mut self, bits: u16) {
        self.offset_bits.push(bits);
        self.offset.push(f16::from_bits(bits).to_f32());
    }
}
