//! Activations quantized for the integer dot products: per row and 32 elements, numbers of 16 or 8 bits with one scale, as signed bytes
//! (on AVX2 16 bits as words), and the sums that zero points and offsets need. Weights are `packing`'s.
//!
//! Sixteen bits unless a server was told otherwise, because eight are not enough: on SmolLM2 (Q4_1) 8-bit activations move a log-probability
//! by 0.055 on average and change the most likely token at 3 of 100 positions; with 16 bits by 0.0009 and at 2 of 10,000
//! (`benches/quality.md`).

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::packing::BLOCK;
use crate::simd::{LANES, ROUNDER, Simd};

/// Bytes of a block's numbers as the matrix unit takes them: two planes of bfloat16.
pub(crate) const ACT_TILE_BYTES: usize = 2 * 2 * BLOCK;
/// Bytes of a line of the cache.
const LINE: usize = 64;
/// The largest number of 16 bits: its upper byte is 127 and its lower one may still round up to it.
pub(crate) const WORD_MAX: f32 = 32_639.0;
/// The largest number of 8 bits.
pub(crate) const BYTE_MAX: f32 = 127.0;

/// One block of 32 quantized activations, as it lies in the buffer: value[i] ≈ scale · number[i].
///
/// Of two planes, number[i] = 256 · planes[0][i] + planes[1][i], but for AVX2, where both together are words, of every four in the order
/// 0, 2, 1, 3 ([`Simd::store_numbers`]); scale is the least power of two for which no number exceeds 32639. A power of two, so that
/// scaling rounds nothing, wherever in a product it takes place. Of one, number[i] = planes[0][i] and scale is the greatest magnitude / 127.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct ActBlock<const PLANES: usize> {
    pub(crate) planes: [[i8; BLOCK]; PLANES],
    pub(crate) sums: ActSums,
}

/// What else is known of a block.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ActSums {
    pub(crate) scale: f32,
    /// −Σ number, of the whole block.
    pub(crate) minus_sum: i32,
    /// −Σ number, of either half.
    pub(crate) minus_half_sums: [i32; 2],
    /// scale · Σ number, of the whole block.
    pub(crate) scaled_sum: f32,
    /// scale · Σ number, of either half.
    pub(crate) scaled_half_sums: [f32; 2],
    _pad: u32,
}

const _: () = assert!(size_of::<ActBlock<1>>() == 64 && size_of::<ActBlock<2>>() == 96);

/// What a block's numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActForm {
    /// 8 bits; 2 bytes an element, and a line at most.
    Bytes,
    /// 16 bits; 3 bytes an element, and two lines at most.
    Words,
    /// 16 bits, and a row's blocks are followed by their numbers once more, as the matrix unit takes them ([`crate::Packing::wants_tiles`]):
    /// for every block 32 times scale · 256 · upper byte, then 32 times scale · lower byte, in bfloat16, which holds both exactly, of every
    /// four in the order 0, 2, 1, 3; then every block's scaled sum. Some 7 bytes an element.
    Tiled,
}

/// The shape of a buffer of quantized activations: `rows` rows of `k` elements, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActLayout {
    /// Rows (tokens).
    pub rows: usize,
    /// Elements per row; a multiple of 32.
    pub k: usize,
    /// Its numbers.
    pub form: ActForm,
}

impl ActLayout {
    /// Bytes of the buffer, which must be aligned to 32, with tiles to 64. Panics if `k` is not a multiple of 32 or the size overflows.
    pub fn bytes(self) -> usize {
        self.rows.checked_mul(self.row_bytes()).expect("activation buffer exceeds the address space")
    }

    /// Bytes of one row.
    pub fn row_bytes(self) -> usize {
        assert!(self.k.is_multiple_of(BLOCK), "{} activations are not a multiple of {BLOCK}", self.k);
        let blocks = self.k / BLOCK;
        let bytes = match self.form {
            ActForm::Bytes | ActForm::Words => blocks.checked_mul(self.block_bytes()).map(odd_lines),
            ActForm::Tiled => {
                let sums = blocks.checked_mul(size_of::<f32>());
                sums.and_then(|sums| sums.checked_add(self.sums_at())).map(odd_lines)
            }
        };
        bytes.expect("activation row exceeds the address space")
    }

    /// Bytes of a block.
    pub(crate) fn block_bytes(self) -> usize {
        if self.form == ActForm::Bytes { size_of::<ActBlock<1>>() } else { size_of::<ActBlock<2>>() }
    }

    /// Panics unless a buffer of this layout begins where its parts want to lie.
    fn check_alignment(self, buffer: &[u8]) {
        let alignment = if self.form == ActForm::Tiled { LINE } else { align_of::<ActBlock<2>>() };
        assert!(buffer.as_ptr().addr().is_multiple_of(alignment), "activation buffer not aligned to {alignment}");
    }

    /// Where in a row its tiles begin.
    pub(crate) fn tiles_at(self) -> usize {
        (self.k / BLOCK).saturating_mul(self.block_bytes()).saturating_add(LINE - 1) / LINE * LINE
    }

    /// Where in a row the sums of its blocks follow.
    pub(crate) fn sums_at(self) -> usize {
        (self.k / BLOCK).saturating_mul(ACT_TILE_BYTES).saturating_add(self.tiles_at())
    }
}

/// As many bytes, and as few more as make them an odd number of lines: the rows of a tile shall not meet in one set of the cache.
fn odd_lines(bytes: usize) -> usize {
    (bytes.div_ceil(LINE) | 1) * LINE
}

/// Quantized activations, borrowed from the caller's buffer.
#[derive(Clone, Copy)]
pub struct Acts<'a> {
    layout: ActLayout,
    buffer: &'a [u8],
}

impl<'a> Acts<'a> {
    /// Reads a buffer that [`quantize_acts`] has filled, on the instruction set that will multiply it: how 16 bits lie is between those two,
    /// and another set would make wrong sums of them. Panics if it is shorter than the layout or not aligned to its
    /// blocks (32 bytes; with tiles 64).
    pub fn new(layout: ActLayout, buffer: &'a [u8]) -> Acts<'a> {
        let bytes = layout.bytes();
        assert!(buffer.len() >= bytes, "activation buffer of {} bytes, {bytes} needed", buffer.len());
        layout.check_alignment(buffer);
        Acts { layout, buffer }
    }

    /// Rows and elements per row.
    pub fn layout(&self) -> ActLayout {
        self.layout
    }

    /// The first block of the first row.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.buffer.as_ptr()
    }
}

/// Quantizes one row of `k` floats into `dst`, one row of a buffer of this layout (`row_bytes` long, aligned as in
/// [`Acts::new`]).
///
/// Per block of 32, of 16 bits: scale is the least power of two with amax / 32639 ≤ scale; number = x / scale, rounded to nearest even. Of 8:
/// scale = amax / 127; number = x · (127 / amax), rounded likewise.
/// Blocks whose amax is below 2⁻¹⁰⁰ become zeros. One that holds a NaN, an infinity or anything from 2¹⁰⁰ on gets the scale
/// NaN, so that it cannot pass unnoticed.
///
/// Panics if the lengths disagree.
pub fn quantize_acts(isa: Isa, layout: ActLayout, x: &[f32], dst: &mut [u8]) {
    assert_eq!(x.len(), layout.k, "activations of a row");
    assert_eq!(dst.len(), layout.row_bytes(), "bytes for {} quantized activations", x.len());
    layout.check_alignment(dst);
    if layout.form == ActForm::Bytes {
        // SAFETY: whole blocks, of one plane as the layout says; alignment was just checked.
        let blocks = unsafe { blocks_mut::<1>(&mut dst[..x.len() / BLOCK * layout.block_bytes()]) };
        return isa.run(QuantizeRow { x, blocks, tiles: &mut [] });
    }
    let tiled = layout.form == ActForm::Tiled;
    let (blocks, tiles) = dst.split_at_mut(if tiled { layout.tiles_at() } else { dst.len() });
    // SAFETY: likewise, of two.
    let blocks = unsafe { blocks_mut::<2>(&mut blocks[..x.len() / BLOCK * layout.block_bytes()]) };
    let (tiles, sums) = tiles.split_at_mut(if tiled { layout.sums_at() - layout.tiles_at() } else { 0 });
    isa.run(QuantizeRow { x, blocks: &mut *blocks, tiles: tiles.as_chunks_mut().0 });
    for (sum, block) in sums.as_chunks_mut().0.iter_mut().zip(&*blocks) {
        *sum = block.sums.scaled_sum.to_ne_bytes();
    }
}

/// # Safety
/// The bytes are a whole number of blocks and aligned for them.
unsafe fn blocks_mut<const PLANES: usize>(bytes: &mut [u8]) -> &mut [ActBlock<PLANES>] {
    let blocks = bytes.len() / size_of::<ActBlock<PLANES>>();
    // SAFETY: the caller's word; the borrow is kept, and any bytes are a valid `ActBlock`.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), blocks) }
}

struct QuantizeRow<'a, const PLANES: usize> {
    x: &'a [f32],
    blocks: &'a mut [ActBlock<PLANES>],
    /// As many as blocks, or none; of two planes alone.
    tiles: &'a mut [[u8; ACT_TILE_BYTES]],
}

impl<const PLANES: usize> Kernel for QuantizeRow<'_, PLANES> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (index, (x, block)) in self.x.as_chunks::<BLOCK>().0.iter().zip(self.blocks).enumerate() {
            quantize_block(s, x, block, self.tiles.get_mut(index));
        }
    }
}

#[inline(always)]
fn quantize_block<S: Simd, const PLANES: usize>(
    s: S,
    x: &[f32; BLOCK],
    block: &mut ActBlock<PLANES>,
    mut tile: Option<&mut [u8; ACT_TILE_BYTES]>,
) {
    // SAFETY: `x` has two vectors of 16 floats.
    let halves = unsafe { [s.load(x.as_ptr()), s.load(x.as_ptr().add(LANES))] };
    let (scale, inverse) = act_scale::<PLANES>(amax(s, halves[0], halves[1]));
    let mut sums = [0.0; 2];
    for (half, values) in halves.into_iter().enumerate() {
        let number = math::round(s, s.mul(values, s.splat(inverse)));
        // As floats, which hold all sums of such numbers: of a tree of integers the compiler makes three times as much.
        sums[half] = s.sum(s.float(number));
        let numbers = block.planes.as_mut_ptr().cast::<u8>();
        // SAFETY: a plane has two vectors of 16 bytes, and 16 bits have two planes.
        unsafe {
            match PLANES {
                1 => s.store_low_bytes(numbers.add(half * LANES), number),
                _ => s.store_numbers(numbers, half, number),
            }
        }
        if let Some(tile) = &mut tile {
            let high = s.and_i(s.add_i(number, s.splat_i(128)), s.splat_i(!255));
            for (plane, numbers) in [high, s.sub_i(number, high)].into_iter().enumerate() {
                let values = s.mul(s.float(numbers), s.splat(scale));
                let to = &mut tile[2 * (plane * BLOCK + half * LANES)..][..2 * LANES];
                // SAFETY: sixteen words.
                unsafe { s.store_high_words(to.as_mut_ptr(), s.bits(values)) };
            }
        }
    }
    let sum = sums[0] + sums[1];
    block.sums = ActSums {
        scale,
        minus_sum: minus(sum),
        minus_half_sums: sums.map(minus),
        scaled_sum: scale * sum,
        scaled_half_sums: sums.map(|sum| scale * sum),
        _pad: 0,
    };
}

/// Of a whole number below 2²² the negative; anything of nonsense, whose scale is NaN.
#[inline(always)]
fn minus(sum: f32) -> i32 {
    ROUNDER.to_bits().wrapping_sub((ROUNDER + sum).to_bits()).cast_signed()
}

/// The scale of a block, and what to multiply by for its numbers.
#[inline(always)]
fn act_scale<const PLANES: usize>(amax: f32) -> (f32, f32) {
    // Between these neither the scale nor its inverse, nor any sum of scaled products, leaves the range of normal floats.
    if amax < f32::from_bits((127 - 100) << 23) {
        (0.0, 0.0)
    } else if amax < f32::from_bits((127 + 100) << 23) {
        if PLANES == 1 { (amax / BYTE_MAX, BYTE_MAX / amax) } else { word_scale(amax) }
    } else {
        (f32::NAN, 0.0)
    }
}

/// The same of 16 bits, for what is neither too little nor too much.
#[inline(always)]
fn word_scale(amax: f32) -> (f32, f32) {
    const MANTISSA: u32 = (1 << 23) - 1;
    const EXPONENT: u32 = 14;
    const MOST: u32 = WORD_MAX.to_bits() & MANTISSA;
    const _: () = assert!(WORD_MAX.to_bits() >> 23 == 127 + EXPONENT);
    // The largest number · scale has the exponent of amax, or, where amax has the greater mantissa, the next one.
    let bits = ((amax.to_bits() + (MANTISSA - MOST)) & !MANTISSA) - (EXPONENT << 23);
    (f32::from_bits(bits), f32::from_bits(((2 * 127) << 23) - bits))
}

/// The greatest magnitude among 32 values; NaN if there is one.
#[inline(always)]
pub(crate) fn amax<S: Simd>(s: S, low: S::F, high: S::F) -> f32 {
    // Magnitudes compare as their bits do, and NaN is the greatest of them: it cannot get lost.
    let bits = s.max_i(s.bits(s.abs(low)), s.bits(s.abs(high)));
    let mut lanes = s.to_array(s.as_floats(bits)).map(f32::to_bits);
    // Halves first: the compiler makes vector operations of it.
    let mut width = LANES / 2;
    while width > 0 {
        let mut lane = 0;
        while lane < width {
            lanes[lane] = lanes[lane].max(lanes[lane + width]);
            lane += 1;
        }
        width /= 2;
    }
    f32::from_bits(lanes[0])
}

#[cfg(test)]
mod tests;
