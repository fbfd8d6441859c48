//! Activations quantized for the integer dot products: per row and 32 elements, 16-bit numbers with one scale, split into two
//! signed bytes, and the sums that zero points and offsets need. Weights are `packing`'s.
//!
//! Sixteen bits, because eight are not enough: on SmolLM2 (Q4_1) 8-bit activations move a log-probability by 0.061 on average and
//! change the most likely token at 3 of 100 positions; with 16 bits the answers are those of the f32 reference (0.001, none;
//! `cargo test -p plimsoll-engine --test real_model -- --nocapture`). A decode step waits for memory either way.

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::packing::BLOCK;
use crate::simd::{LANES, Simd};

/// Bytes of a quantized block.
pub(crate) const ACT_BLOCK_BYTES: usize = 96;
/// The largest quantized activation: its upper byte is 127 and its lower one may still round up to it.
pub(crate) const ACT_MAX: f32 = 32_639.0;

/// One block of 32 quantized activations, as it lies in the buffer.
///
/// value[i] ≈ scale · number[i], number[i] = 256 · high[i] + low[i], scale = max |value| / 32639.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct ActBlock {
    pub(crate) high: [i8; BLOCK],
    pub(crate) low: [i8; BLOCK],
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

const _: () = assert!(size_of::<ActBlock>() == ACT_BLOCK_BYTES);

/// The shape of a buffer of quantized activations: `rows` rows of `k` elements, row after row, 3 bytes an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActLayout {
    /// Rows (tokens).
    pub rows: usize,
    /// Elements per row; a multiple of 32.
    pub k: usize,
}

impl ActLayout {
    /// Bytes of the buffer, which must be aligned to 32. Panics if `k` is not a multiple of 32 or the size overflows.
    pub fn bytes(self) -> usize {
        self.rows.checked_mul(self.row_bytes()).expect("activation buffer exceeds the address space")
    }

    /// Bytes of one row.
    pub fn row_bytes(self) -> usize {
        assert!(self.k.is_multiple_of(BLOCK), "{} activations are not a multiple of {BLOCK}", self.k);
        self.k.checked_mul(ACT_BLOCK_BYTES / BLOCK).expect("activation row exceeds the address space")
    }
}

/// Quantized activations, borrowed from the caller's buffer.
#[derive(Clone, Copy)]
pub struct Acts<'a> {
    layout: ActLayout,
    blocks: &'a [ActBlock],
}

impl<'a> Acts<'a> {
    /// Reads a buffer that [`quantize_acts`] has filled. Panics if it is shorter than the layout or not aligned to 32.
    pub fn new(layout: ActLayout, buffer: &'a [u8]) -> Acts<'a> {
        let bytes = layout.bytes();
        assert!(buffer.len() >= bytes, "activation buffer of {} bytes, {bytes} needed", buffer.len());
        assert!(buffer.as_ptr().addr().is_multiple_of(32), "activation buffer not aligned to 32");
        let count = bytes / ACT_BLOCK_BYTES;
        // SAFETY: length and alignment were just checked, the lifetime is kept, and any bytes are a valid `ActBlock`.
        let blocks = unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast::<ActBlock>(), count) };
        Acts { layout, blocks }
    }

    /// Rows and elements per row.
    pub fn layout(&self) -> ActLayout {
        self.layout
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.blocks.as_ptr().cast()
    }
}

/// Quantizes one row of `k` floats into `dst`, one row of an [`ActLayout`] buffer (32-byte aligned, `row_bytes` long).
///
/// Per block of 32: scale = amax / 32639; number = x · (32639 / amax), rounded to nearest even. Blocks whose amax is below 2⁻¹⁰⁰
/// become zeros. A NaN or infinity makes its block's scale NaN or infinite, so that it cannot pass unnoticed.
///
/// Panics if the lengths disagree.
pub fn quantize_acts(isa: Isa, x: &[f32], dst: &mut [u8]) {
    let layout = ActLayout { rows: 1, k: x.len() };
    assert_eq!(dst.len(), layout.bytes(), "bytes for {} quantized activations", x.len());
    assert!(dst.as_ptr().addr().is_multiple_of(32), "activation buffer not aligned to 32");
    // SAFETY: length and alignment were just checked, the borrow is kept, and any bytes are a valid `ActBlock`.
    let blocks = unsafe { std::slice::from_raw_parts_mut(dst.as_mut_ptr().cast::<ActBlock>(), x.len() / BLOCK) };
    isa.run(QuantizeRow { x, blocks });
}

struct QuantizeRow<'a> {
    x: &'a [f32],
    blocks: &'a mut [ActBlock],
}

impl Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, block) in self.x.as_chunks::<BLOCK>().0.iter().zip(self.blocks) {
            quantize_block(s, x, block);
        }
    }
}

#[inline(always)]
fn quantize_block<S: Simd>(s: S, x: &[f32; BLOCK], block: &mut ActBlock) {
    // SAFETY: `x` has two vectors of 16 floats.
    let halves = unsafe { [s.load(x.as_ptr()), s.load(x.as_ptr().add(LANES))] };
    let (scale, inverse) = block_scale(s, halves[0], halves[1], ACT_MAX);
    let mut sums = [0i32; 2];
    for (half, values) in halves.into_iter().enumerate() {
        let number = math::round(s, s.mul(values, s.splat(inverse)));
        // Rounded, so that the lower byte is signed like the upper one.
        let high = s.sra_i::<8>(s.add_i(number, s.splat_i(128)));
        let range = half * LANES..(half + 1) * LANES;
        let (high_bytes, low_bytes) = (&mut block.high[range.clone()], &mut block.low[range]);
        // SAFETY: both are vectors of 16 bytes.
        unsafe {
            s.store_low_bytes(high_bytes.as_mut_ptr().cast(), high);
            s.store_low_bytes(low_bytes.as_mut_ptr().cast(), number);
        }
        for (high, low) in high_bytes.iter().zip(low_bytes) {
            sums[half] += 256 * i32::from(*high) + i32::from(*low);
        }
    }
    block.scale = scale;
    block.minus_sum = -(sums[0] + sums[1]);
    block.minus_half_sums = [-sums[0], -sums[1]];
    block.scaled_sum = scale * (sums[0] + sums[1]) as f32;
    block.scaled_half_sums = [scale * sums[0] as f32, scale * sums[1] as f32];
    block._pad = 0;
}

/// The scale amax / steps of 32 values, and steps / amax.
#[inline(always)]
pub(crate) fn block_scale<S: Simd>(s: S, low: S::F, high: S::F, steps: f32) -> (f32, f32) {
    // Magnitudes compare as their bits do, and NaN is the greatest of them: it cannot get lost.
    let bits = s.max_i(s.bits(s.abs(low)), s.bits(s.abs(high)));
    let lanes = s.to_array(s.as_floats(bits));
    let mut amax = 0u32;
    for lane in lanes {
        amax = amax.max(lane.to_bits());
    }
    let amax = f32::from_bits(amax);
    // steps / amax must not overflow.
    if amax < f32::from_bits((127 - 100) << 23) { (0.0, 0.0) } else { (amax / steps, steps / amax) }
}

#[cfg(test)]
mod tests;
