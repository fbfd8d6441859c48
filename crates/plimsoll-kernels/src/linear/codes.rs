//! Reads a packed panel into registers: codes from their bit planes, scales and offsets as floats. `packing` describes the layout;
//! `quant.rs` and `bf16` compute with the values.

use crate::packing::{BLOCK, Codebook, PANEL, PackScales, QuantPacking, SUPER};
use crate::simd::{CodeWidth, Simd};

/// Distance in bytes at which parts of a panel are prefetched, if not whole panels are.
pub(super) const PREFETCH: usize = 8192;

/// Flag in a code form, beside the bits of a code: the level comes from the codebook and is below 32.
const BOOK: u8 = 16;
/// Flag in a code form: the level comes from the codebook and may have any value.
const WIDE_BOOK: u8 = 32;

/// Bits of a code of form `CODE`.
pub(super) const fn bits(code: u8) -> usize {
    (code % BOOK) as usize
}

/// Bytes of a block of codes of form `CODE`.
pub(super) const fn block_bytes(code: u8) -> usize {
    PANEL * BLOCK * bits(code) / 8
}

/// Returns the width class of the levels of codes of form `CODE`.
pub(super) const fn width(code: u8) -> CodeWidth {
    match code {
        0..=4 => CodeWidth::Four,
        6 => CodeWidth::Six,
        8 | WIDE_BOOK.. => CodeWidth::Eight,
        _ => CodeWidth::Five,
    }
}

/// An operation that is compiled once per quantization format: codes of form `CODE` (their bits and perhaps a codebook), in groups of
/// 16 (`HALVES`) or 32, with offsets (`OFFSET`) or a zero point.
pub(super) trait ByFormat: Sized {
    fn run<const CODE: u8, const HALVES: bool, const OFFSET: bool>(self);

    /// Runs the version for this quantization.
    fn run_for(self, quant: QuantPacking) {
        match (quant.bits, quant.codebook) {
            (3, Some(_)) => looked_up::<{ 3 | WIDE_BOOK }>(self, quant),
            (_, Some(_)) if quant.highest() < 32 => looked_up::<{ 4 | BOOK }>(self, quant),
            (_, Some(_)) => looked_up::<{ 4 | WIDE_BOOK }>(self, quant),
            (2, _) => sized::<2>(self, quant),
            (3, _) => sized::<3>(self, quant),
            (4, _) => sized::<4>(self, quant),
            (5, _) => sized::<5>(self, quant),
            (6, _) => sized::<6>(self, quant),
            _ => sized::<8>(self, quant),
        }
    }
}

fn looked_up<const CODE: u8>(what: impl ByFormat, quant: QuantPacking) {
    match quant.group == 16 {
        false => what.run::<CODE, false, false>(),
        true => what.run::<CODE, true, false>(),
    }
}

fn sized<const CODE: u8>(what: impl ByFormat, quant: QuantPacking) {
    match (quant.group == 16, quant.offset) {
        (false, false) => what.run::<CODE, false, false>(),
        (false, true) => what.run::<CODE, false, true>(),
        (true, false) => what.run::<CODE, true, false>(),
        (true, true) => what.run::<CODE, true, true>(),
    }
}

/// Prefetches the codes of a block and its scales (about `scale_bytes` per block). The panel may be past the end of the matrix: a
/// prefetch never faults.
#[inline(always)]
pub(super) fn prefetch_block<S: Simd, const CODE: u8>(
    s: S,
    panel: *const u8,
    k: usize,
    block: usize,
    scale_bytes: usize,
) {
    let block_bytes = block_bytes(CODE);
    let codes = panel.wrapping_add(block * block_bytes);
    for line in 0..block_bytes / 64 {
        s.prefetch(codes.wrapping_add(64 * line));
    }
    let scales = panel.wrapping_add(k / BLOCK * block_bytes + block * scale_bytes);
    for line in 0..scale_bytes.div_ceil(64) {
        s.prefetch(scales.wrapping_add(64 * line));
    }
}

/// Returns [`PREFETCH`] in blocks.
pub(super) const fn near<const CODE: u8>() -> usize {
    PREFETCH / block_bytes(CODE)
}

/// [`prefetch_block`] for the block about [`PREFETCH`] bytes later.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn prefetch<S: Simd, const CODE: u8>(s: S, panel: *const u8, k: usize, block: usize, scale_bytes: usize) {
    prefetch_block::<S, CODE>(s, panel, k, block + near::<CODE>(), scale_bytes);
}

/// Returns the levels of the 8 quads of a block, as bytes.
///
/// # Safety
/// A block of codes of form `CODE` lies at `at`.
#[inline(always)]
pub(super) unsafe fn levels<S: Simd, const CODE: u8>(s: S, at: *const u8, book: &Codebook) -> [S::B; 8] {
    // SAFETY: the caller's word.
    let mut codes = unsafe { unpack::<S, CODE>(s, at) };
    if CODE >= BOOK {
        for quad in &mut codes {
            *quad = s.look_up(book, *quad);
        }
    }
    codes
}

/// Returns the codes of the 8 quads of a block, as bytes.
///
/// # Safety
/// A block of codes of form `CODE` lies at `at`.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, const CODE: u8>(s: S, at: *const u8) -> [S::B; 8] {
    let bits = bits(CODE);
    // SAFETY: the planes of the block, laid out as `packing` says, are all there.
    unsafe {
        let first = s.load_bytes(at);
        let mut codes = [first; 8];
        let mut quad = 0;
        while quad < 8 {
            let mut position = 0i32;
            let mut plane = at;
            if bits == 8 {
                codes[quad] = s.load_bytes(at.add(64 * quad));
            }
            if bits & 4 != 0 {
                let shift = if quad < 4 { 0 } else { 4 };
                codes[quad] = s.shift_mask(s.load_bytes(plane.add(64 * (quad % 4))), shift, 15);
                (position, plane) = (4, plane.add(256));
            }
            if bits & 2 != 0 {
                let pair = s.load_bytes(plane.add(64 * (quad / 4)));
                let pair = s.shift_mask(pair, 2 * (quad as i32 % 4) - position, 3 << position);
                codes[quad] = if position == 0 { pair } else { s.or_b(codes[quad], pair) };
                (position, plane) = (position + 2, plane.add(128));
            }
            if bits & 1 != 0 {
                let single = s.shift_mask(s.load_bytes(plane), quad as i32 - position, 1 << position);
                codes[quad] = s.or_b(codes[quad], single);
            }
            quad += 1;
        }
        codes
    }
}

/// Returns the scale and offset of group `group` of a panel. Groups are counted in units of 16 (`HALVES`) or 32 elements, even if
/// larger groups share a scale.
///
/// # Safety
/// `at` points to the scales of a panel that has the group.
#[inline(always)]
pub(super) unsafe fn scales<S: Simd, const HALVES: bool, const OFFSET: bool>(
    s: S,
    quant: &QuantPacking,
    at: *const u8,
    group: usize,
) -> (S::F, S::F) {
    let (kind, parts) = (quant.scales, 1 + usize::from(OFFSET));
    // SAFETY: the layout is `packing`'s.
    unsafe {
        match kind {
            PackScales::F16 | PackScales::F32 => {
                let wide = kind == PackScales::F32;
                let bytes = PANEL * if wide { 4 } else { 2 };
                let at = at.add(quant.stored_group(group) * parts * bytes);
                let offset = if OFFSET { load_scales(s, at.add(bytes), wide) } else { s.zero() };
                (load_scales(s, at, wide), offset)
            }
            PackScales::Super | PackScales::SuperF32 => {
                let wide = kind == PackScales::SuperF32;
                let factors = PANEL * if wide { 4 } else { 2 };
                let groups = if HALVES { SUPER / 16 } else { SUPER / 32 };
                let at = at.add(group / groups * parts * (factors + PANEL * groups));
                let small = at.add(parts * factors + group % groups * PANEL);
                let scale = s.mul(load_scales(s, at, wide), s.load_i8(small));
                if !OFFSET {
                    return (scale, s.zero());
                }
                let offset = s.mul(load_scales(s, at.add(factors), wide), s.load_u8(small.add(groups * PANEL)));
                (scale, s.sub(s.splat(-0.0), offset))
            }
            PackScales::E8m0Half => (e8m0_half(s, s.load_u8_i(at.add(group * PANEL))), s.zero()),
            PackScales::Ue4m3Half => (ue4m3_half(s, s.load_u8_i(at.add(group * PANEL))), s.zero()),
        }
    }
}

/// Loads 16 scales in single (`wide`) or half precision.
///
/// # Safety
/// They lie at `at`.
#[inline(always)]
unsafe fn load_scales<S: Simd>(s: S, at: *const u8, wide: bool) -> S::F {
    // SAFETY: the caller's word.
    unsafe { if wide { s.load(at.cast()) } else { s.load_f16(at) } }
}

/// [`crate::half::e8m0_half_to_f32`] of every lane.
#[inline(always)]
fn e8m0_half<S: Simd>(s: S, e: S::I) -> S::F {
    let one = s.splat_i(1);
    // Below 2⁻¹²⁶ the first operand is zero or negative; above, the second is always smaller.
    s.as_floats(s.max_i(s.shl_i::<23>(s.sub_i(e, one)), s.shl_i::<21>(s.add_i(e, one))))
}

/// [`crate::half::ue4m3_half_to_f32`] of every lane.
#[inline(always)]
fn ue4m3_half<S: Simd>(s: S, bits: S::I) -> S::F {
    // Exponent 0 stands for 2⁻⁸ here, half of its meaning in E4M3.
    let least = f32::from_bits((127 - 8) << 23);
    let value = s.as_floats(s.add_i(s.shl_i::<20>(bits), s.splat_i(least.to_bits() as i32)));
    // Subnormal numbers have no leading one, and they have the exponent of the least normal number.
    let rest = s.sub(value, s.splat(least));
    s.select_lt(value, s.splat(2.0 * least), s.add(rest, rest), value)
}
