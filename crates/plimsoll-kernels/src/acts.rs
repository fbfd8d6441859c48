//! Activations quantized for the integer dot products. Each row has blocks of 32 elements: numbers of 16 or 8 bits with one scale,
//! stored as signed bytes (16 bits on AVX2 as words), and the sums that zero points and offsets need. The weights are described in
//! `packing`.
//!
//! Sixteen bits are the default, because eight are not enough. On SmolLM2 (Q4_1) 8-bit activations change a log-probability by 0.055 on
//! average, and the most likely token at 3 of 100 positions; 16-bit ones by 0.0009, and at 2 of 10,000
//! (`benches/quality.md`).

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};
use crate::sizes::{BLOCK, WORD_MAX};

/// Bytes of a block's numbers in the matrix unit's layout: two planes of bfloat16.
pub(crate) const ACT_TILE_BYTES: usize = 2 * 2 * BLOCK;
/// Bytes of a cache line.
const LINE: usize = 64;
/// The largest number of 8 bits.
pub(crate) const BYTE_MAX: f32 = 127.0;

/// One block of 32 quantized activations, as it lies in the buffer: value[i] ≈ scale · number[i].
///
/// With two planes, number[i] = 256 · planes[0][i] + planes[1][i]. On AVX2 both planes together hold 16-bit words instead, every four
/// in the order 0, 2, 1, 3 ([`Simd::store_numbers`]). The scale is the least power of two for which no number exceeds 32639. As a power
/// of two, it causes no rounding, wherever in a product it is applied. With one plane, number[i] = planes[0][i], and the scale is the
/// greatest magnitude / 127.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct ActBlock<const PLANES: usize> {
    pub(crate) planes: [[i8; BLOCK]; PLANES],
    pub(crate) sums: ActSums,
}

/// The scale of a block and the sums of its numbers.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ActSums {
    pub(crate) scale: f32,
    /// −Σ number over the whole block.
    pub(crate) minus_sum: i32,
    /// −Σ number over each half.
    pub(crate) minus_half_sums: [i32; 2],
    /// scale · Σ number over the whole block.
    pub(crate) scaled_sum: f32,
    /// scale · Σ number over each half.
    pub(crate) scaled_half_sums: [f32; 2],
    _pad: u32,
}

const _: () = assert!(size_of::<ActBlock<1>>() == 64 && size_of::<ActBlock<2>>() == 96);

/// The format of a block's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActForm {
    /// 8 bits; 2 bytes per element, and up to a cache line more per row.
    Bytes,
    /// 16 bits; 3 bytes per element, and up to two cache lines more per row.
    Words,
    /// 16 bits. A row's blocks are followed by their numbers once more, in the matrix unit's layout ([`crate::Packing::takes_tiles`]).
    /// For every block these are 32 values of scale · 256 · upper byte, then 32 of scale · lower byte, every four ordered 0, 2, 1, 3.
    /// They are stored in bfloat16, which holds both exactly. Then follow the scaled sums of all blocks. About 7 bytes per element.
    Tiled,
}

/// The shape of a buffer of quantized activations: `rows` rows of `k` elements, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActLayout {
    /// Rows (tokens).
    pub rows: usize,
    /// Elements per row; a multiple of 32.
    pub k: usize,
    /// The format of the numbers.
    pub form: ActForm,
}

impl ActLayout {
    /// Bytes of the buffer, which must be aligned to 32, or with tiles to 64. Panics if `k` is not a multiple of 32 or the size
    /// overflows.
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

    /// Panics unless the buffer has the alignment of this layout.
    fn check_alignment(self, buffer: &[u8]) {
        let alignment = if self.form == ActForm::Tiled { LINE } else { align_of::<ActBlock<2>>() };
        assert!(buffer.as_ptr().addr().is_multiple_of(alignment), "activation buffer not aligned to {alignment}");
    }

    /// Byte offset of a row's tiles in the row.
    pub(crate) fn tiles_at(self) -> usize {
        (self.k / BLOCK).saturating_mul(self.block_bytes()).saturating_add(LINE - 1) / LINE * LINE
    }

    /// Byte offset of the blocks' sums in a row.
    pub(crate) fn sums_at(self) -> usize {
        (self.k / BLOCK).saturating_mul(ACT_TILE_BYTES).saturating_add(self.tiles_at())
    }
}

/// Rounds up to an odd number of cache lines, so that the rows of a tile do not map to the same set of the cache.
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
    /// Wraps a buffer that [`quantize_acts`] has filled on the instruction set that will multiply it. The layout of 16-bit numbers
    /// depends on the instruction set; another one would compute wrong sums. Panics if the buffer is shorter than the layout, or not
    /// aligned to its blocks (32 bytes; with tiles 64).
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
/// Per block of 32 with 16 bits, the scale is the least power of two with amax / 32639 ≤ scale, and number = x / scale, rounded to
/// nearest even. With 8 bits, scale = amax / 127 and number = x · (127 / amax), rounded likewise. Blocks with amax below 2⁻¹⁰⁰ become
/// zeros. A block with a NaN, an infinity or a magnitude of 2¹⁰⁰ or more gets the scale NaN, so that the fault shows in the result.
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
    /// One per block, or none; only with two planes.
    tiles: &'a mut [[u8; ACT_TILE_BYTES]],
}

impl<const PLANES: usize> Kernel for QuantizeRow<'_, PLANES> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let x = self.x.as_chunks::<BLOCK>().0.chunks(TOGETHER);
        let mut tiles = self.tiles.chunks_mut(TOGETHER);
        for (x, blocks) in x.zip(self.blocks.chunks_mut(TOGETHER)) {
            quantize_blocks(s, x, blocks, tiles.next().unwrap_or_default());
        }
    }
}

/// Number of blocks whose greatest magnitudes and sums are found together: their halves fill a vector.
const TOGETHER: usize = LANES / 2;

#[inline(always)]
fn quantize_blocks<S: Simd, const PLANES: usize>(
    s: S,
    x: &[[f32; BLOCK]],
    blocks: &mut [ActBlock<PLANES>],
    tiles: &mut [[u8; ACT_TILE_BYTES]],
) {
    // Magnitudes compare like their bits, and NaN is the greatest: it cannot get lost.
    let mut most = [s.splat_i(0); TOGETHER];
    for (most, x) in most.iter_mut().zip(x) {
        let [low, high] = load_block(s, x);
        *most = s.max_i(s.bits(s.abs(low)), s.bits(s.abs(high)));
    }
    let most = halves_of::<S, MAX>(s, most);
    let (scales, inverses) = act_scales::<S, PLANES>(s, s.as_floats(fold::<S, MAX>(s, most, most)));
    let (scale_of, inverse_of) = (s.to_array(scales), s.to_array(inverses));
    let mut sums = [s.splat_i(0); TOGETHER];
    for (index, ((x, block), sum)) in x.iter().zip(&mut *blocks).zip(&mut sums).enumerate() {
        let ([low, high], inverse) = (load_block(s, x), s.splat(inverse_of[index]));
        let numbers = [math::round(s, s.mul(low, inverse)), math::round(s, s.mul(high, inverse))];
        store_numbers(s, numbers, block);
        if let Some(tile) = tiles.get_mut(index) {
            store_tile(s, numbers, scale_of[index], tile);
        }
        *sum = fold::<S, ADD>(s, numbers[0], numbers[1]);
    }
    let halves = halves_of::<S, ADD>(s, sums);
    let whole = fold::<S, ADD>(s, halves, halves);
    let [scales_of_halves, _] = s.zip(scales, scales);
    let (minus_sums, minus_half_sums) = (negated(s, whole), negated(s, halves));
    let scaled_sums = s.to_array(s.mul(s.float(whole), scales));
    let scaled_half_sums = s.to_array(s.mul(s.float(halves), scales_of_halves));
    for (index, block) in blocks.iter_mut().enumerate() {
        block.sums = ActSums {
            scale: scale_of[index],
            minus_sum: minus_sums[index],
            minus_half_sums: [minus_half_sums[2 * index], minus_half_sums[2 * index + 1]],
            scaled_sum: scaled_sums[index],
            scaled_half_sums: [scaled_half_sums[2 * index], scaled_half_sums[2 * index + 1]],
            _pad: 0,
        };
    }
}

/// Mode of [`fold`]: the greater of two lanes.
const MAX: bool = false;
/// Mode of [`fold`]: the sum of two lanes.
const ADD: bool = true;

/// Combines each pair of neighbouring lanes into one: eight results from the first vector, then eight from the second.
#[inline(always)]
fn fold<S: Simd, const HOW: bool>(s: S, low: S::I, high: S::I) -> S::I {
    let [even, odd] = s.unzip(s.as_floats(low), s.as_floats(high));
    let (even, odd) = (s.bits(even), s.bits(odd));
    if HOW == ADD { s.add_i(even, odd) } else { s.max_i(even, odd) }
}

/// Combines the lanes of each half of a vector into one, vector after vector.
#[inline(always)]
fn halves_of<S: Simd, const HOW: bool>(s: S, v: [S::I; TOGETHER]) -> S::I {
    let [a, b, c, d, e, f, g, h] = v;
    let (ab, cd) = (fold::<S, HOW>(s, a, b), fold::<S, HOW>(s, c, d));
    let (ef, gh) = (fold::<S, HOW>(s, e, f), fold::<S, HOW>(s, g, h));
    fold::<S, HOW>(s, fold::<S, HOW>(s, ab, cd), fold::<S, HOW>(s, ef, gh))
}

#[inline(always)]
fn negated<S: Simd>(s: S, v: S::I) -> [i32; LANES] {
    let mut out = [0; LANES];
    // SAFETY: sixteen of four bytes each.
    unsafe { s.store(out.as_mut_ptr().cast(), s.as_floats(s.sub_i(s.splat_i(0), v))) };
    out
}

#[inline(always)]
fn load_block<S: Simd>(s: S, x: &[f32; BLOCK]) -> [S::F; 2] {
    // SAFETY: two vectors of 16 floats.
    unsafe { [s.load(x.as_ptr()), s.load(x.as_ptr().add(LANES))] }
}

#[inline(always)]
fn store_numbers<S: Simd, const PLANES: usize>(s: S, numbers: [S::I; 2], block: &mut ActBlock<PLANES>) {
    let to = block.planes.as_mut_ptr().cast::<u8>();
    for (half, numbers) in numbers.into_iter().enumerate() {
        // SAFETY: a plane has two vectors of 16 bytes, and 16 bits have two planes.
        unsafe {
            match PLANES {
                1 => s.store_low_bytes(to.add(half * LANES), numbers),
                _ => s.store_numbers(to, half, numbers),
            }
        }
    }
}

#[inline(always)]
fn store_tile<S: Simd>(s: S, numbers: [S::I; 2], scale: f32, tile: &mut [u8; ACT_TILE_BYTES]) {
    for (half, number) in numbers.into_iter().enumerate() {
        let high = s.and_i(s.add_i(number, s.splat_i(128)), s.splat_i(!255));
        for (plane, numbers) in [high, s.sub_i(number, high)].into_iter().enumerate() {
            let values = s.mul(s.float(numbers), s.splat(scale));
            let to = &mut tile[2 * (plane * BLOCK + half * LANES)..][..2 * LANES];
            // SAFETY: sixteen words.
            unsafe { s.store_high_words(to.as_mut_ptr(), s.bits(values)) };
        }
    }
}

/// Returns the scales of blocks, and the factors that turn values into numbers.
#[inline(always)]
fn act_scales<S: Simd, const PLANES: usize>(s: S, amax: S::F) -> (S::F, S::F) {
    // Within these limits the scale, its inverse and all sums of scaled products stay normal floats.
    let (little, much) = (s.splat(f32::from_bits((127 - 100) << 23)), s.splat(f32::from_bits((127 + 100) << 23)));
    let (scale, inverse) = match PLANES {
        1 => (s.div(amax, s.splat(BYTE_MAX)), s.div(s.splat(BYTE_MAX), amax)),
        _ => word_scales(s, amax),
    };
    // A NaN fails the comparison and gets the scale NaN, like an infinity.
    let scale = s.select_lt(amax, much, scale, s.splat(f32::NAN));
    let inverse = s.select_lt(amax, much, inverse, s.zero());
    (s.select_lt(amax, little, s.zero(), scale), s.select_lt(amax, little, s.zero(), inverse))
}

/// [`act_scales`] for 16 bits, for values within its limits.
#[inline(always)]
fn word_scales<S: Simd>(s: S, amax: S::F) -> (S::F, S::F) {
    const MANTISSA: i32 = (1 << 23) - 1;
    const EXPONENT: i32 = 14;
    const MOST: i32 = WORD_MAX.to_bits().cast_signed() & MANTISSA;
    const _: () = assert!(WORD_MAX.to_bits().cast_signed() >> 23 == 127 + EXPONENT);
    // The largest number · scale has the exponent of amax, or the next one if amax has the greater mantissa.
    let power = s.and_i(s.add_i(s.bits(amax), s.splat_i(MANTISSA - MOST)), s.splat_i(!MANTISSA));
    let bits = s.sub_i(power, s.splat_i(EXPONENT << 23));
    (s.as_floats(bits), s.as_floats(s.sub_i(s.splat_i((2 * 127) << 23), bits)))
}

#[cfg(test)]
mod tests;
