//! Reading a packed panel into registers: codes out of their bit planes, scales and offsets as floats. The layout is
//! `packing`'s; what is computed with them is `quant.rs`'s and `rounded`'s.

use crate::packing::{BLOCK, PANEL, PackScales, QuantPacking, SUPER};
use crate::simd::Simd;

/// How far ahead of its use a part of a panel is asked for, where not whole panels are, in bytes.
pub(super) const PREFETCH: usize = 8192;

/// What is compiled once for every way to quantize: `BITS`-bit codes in groups of 16 (`HALVES`) or 32, with offsets (`OFFSET`) or a
/// zero point.
pub(super) trait ByFormat: Sized {
    fn run<const BITS: u8, const HALVES: bool, const OFFSET: bool>(self);

    /// Runs what is compiled for weights that are quantized so.
    fn run_for(self, quant: QuantPacking) {
        match quant.bits {
            2 => sized::<2>(self, quant),
            3 => sized::<3>(self, quant),
            4 => sized::<4>(self, quant),
            5 => sized::<5>(self, quant),
            6 => sized::<6>(self, quant),
            _ => sized::<8>(self, quant),
        }
    }
}

fn sized<const BITS: u8>(what: impl ByFormat, quant: QuantPacking) {
    match (quant.group == 16, quant.offset) {
        (false, false) => what.run::<BITS, false, false>(),
        (false, true) => what.run::<BITS, false, true>(),
        (true, false) => what.run::<BITS, true, false>(),
        (true, true) => what.run::<BITS, true, true>(),
    }
}

/// Asks for the codes of a block and for its scales, `scale_bytes` a block, roughly. The panel may lie behind the matrix: asking never
/// faults.
#[inline(always)]
pub(super) fn prefetch_block<S: Simd, const BITS: u8>(
    s: S,
    panel: *const u8,
    k: usize,
    block: usize,
    scale_bytes: usize,
) {
    let block_bytes = PANEL * BLOCK * BITS as usize / 8;
    let codes = panel.wrapping_add(block * block_bytes);
    for line in 0..block_bytes / 64 {
        s.prefetch(codes.wrapping_add(64 * line));
    }
    let scales = panel.wrapping_add(k / BLOCK * block_bytes + block * scale_bytes);
    for line in 0..scale_bytes.div_ceil(64) {
        s.prefetch(scales.wrapping_add(64 * line));
    }
}

/// The same in blocks.
pub(super) const fn near<const BITS: u8>() -> usize {
    PREFETCH / (PANEL * BLOCK * BITS as usize / 8)
}

/// [`prefetch_block`] of one that comes some [`PREFETCH`] later.
#[inline(always)]
pub(super) fn prefetch<S: Simd, const BITS: u8>(s: S, panel: *const u8, k: usize, block: usize, scale_bytes: usize) {
    prefetch_block::<S, BITS>(s, panel, k, block + near::<BITS>(), scale_bytes);
}

/// The 8 quads of a block, as bytes.
///
/// # Safety
/// A block of `BITS`-bit codes lies at `at`.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, const BITS: u8>(s: S, at: *const u8) -> [S::B; 8] {
    // SAFETY: the planes of the block, laid out as `packing` says, are all there.
    unsafe {
        let first = s.load_bytes(at);
        let mut codes = [first; 8];
        let mut quad = 0;
        while quad < 8 {
            let mut position = 0i32;
            let mut plane = at;
            if BITS == 8 {
                codes[quad] = s.load_bytes(at.add(64 * quad));
            }
            if BITS & 4 != 0 {
                let shift = if quad < 4 { 0 } else { 4 };
                codes[quad] = s.shift_mask(s.load_bytes(plane.add(64 * (quad % 4))), shift, 15);
                (position, plane) = (4, plane.add(256));
            }
            if BITS & 2 != 0 {
                let bits = s.load_bytes(plane.add(64 * (quad / 4)));
                let bits = s.shift_mask(bits, 2 * (quad as i32 % 4) - position, 3 << position);
                codes[quad] = if position == 0 { bits } else { s.or_b(codes[quad], bits) };
                (position, plane) = (position + 2, plane.add(128));
            }
            if BITS & 1 != 0 {
                let bits = s.shift_mask(s.load_bytes(plane), quad as i32 - position, 1 << position);
                codes[quad] = s.or_b(codes[quad], bits);
            }
            quad += 1;
        }
        codes
    }
}

/// The scale and offset of group `group` of a panel.
///
/// # Safety
/// `at` points to the scales of a panel that has the group.
#[inline(always)]
pub(super) unsafe fn scales<S: Simd, const HALVES: bool, const OFFSET: bool>(
    s: S,
    kind: PackScales,
    at: *const u8,
    group: usize,
) -> (S::F, S::F) {
    let parts = 1 + usize::from(OFFSET);
    // SAFETY: the layout is `packing`'s.
    unsafe {
        if kind == PackScales::Super {
            let groups = if HALVES { SUPER / 16 } else { SUPER / 32 };
            let at = at.add(group / groups * parts * PANEL * (2 + groups));
            let small = at.add(parts * 2 * PANEL + group % groups * PANEL);
            let scale = s.mul(s.load_f16(at), s.load_i8(small));
            if !OFFSET {
                return (scale, s.zero());
            }
            let offset = s.mul(s.load_f16(at.add(2 * PANEL)), s.load_u8(small.add(groups * PANEL)));
            return (scale, s.sub(s.splat(-0.0), offset));
        }
        let wide = kind == PackScales::F32;
        let bytes = PANEL * if wide { 4 } else { 2 };
        let at = at.add(group * parts * bytes);
        let offset = if OFFSET { load_scales(s, at.add(bytes), wide) } else { s.zero() };
        (load_scales(s, at, wide), offset)
    }
}

/// 16 scales, single (`wide`) or half precision.
///
/// # Safety
/// They lie at `at`.
#[inline(always)]
unsafe fn load_scales<S: Simd>(s: S, at: *const u8, wide: bool) -> S::F {
    // SAFETY: the caller's word.
    unsafe { if wide { s.load(at.cast()) } else { s.load_f16(at) } }
}
