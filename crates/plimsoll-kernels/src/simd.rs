//! The sixteen-lane vector that all kernels are written against. Each operation is exactly rounded (or an integer operation), so a
//! kernel gives the same bits with every implementation. Functions built *from* these operations (exponentials, reductions, dot
//! products over whole rows) are in other modules and exist once.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;

use crate::half::f32_to_f16;
use crate::sizes::BLOCK;
pub(crate) use crate::sizes::LANES;

/// Upper limit on the codes that [`Simd::dots`] multiplies. AVX2 and NEON choose their instructions by it, since their sums of byte
/// products have 16 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodeWidth {
    /// Codes of 0..=15.
    Four,
    /// Codes of 0..=31.
    Five,
    /// Codes of 0..=63.
    Six,
    /// Codes of 0..=255.
    Eight,
}

/// The lookup table of [`Simd::store_words`].
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the matrix unit's alone"))]
#[repr(C, align(64))]
pub(crate) struct Words(pub(crate) [u16; 64]);

/// Sixteen lanes of `f32` ([`Simd::F`]) or `i32` ([`Simd::I`]), or sixteen lanes of four bytes ([`Simd::B`]).
///
/// A value of the implementing type proves that the processor has the instructions. This makes the arithmetic methods safe to call.
/// All methods are `#[inline(always)]`.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "some methods are the matrix unit's alone"))]
pub(crate) trait Simd: Copy {
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen `i32`.
    type I: Copy;
    /// Sixty-four bytes: four per lane.
    type B: Copy;

    /// All lanes `v`.
    fn splat(self, v: f32) -> Self::F;
    /// All lanes `v`.
    fn splat_i(self, v: i32) -> Self::I;

    /// Loads 16 floats. # Safety: `p` is valid for 64 bytes; no alignment needed.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// Stores 16 floats. # Safety: `p` is valid for writing 64 bytes; no alignment needed.
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// Loads 16 half floats. # Safety: `p` is valid for 32 bytes.
    unsafe fn load_f16(self, p: *const u8) -> Self::F;
    /// Loads 16 bfloat16. # Safety: `p` is valid for 32 bytes.
    unsafe fn load_bf16(self, p: *const u8) -> Self::F;
    /// Loads 16 E4M3 numbers, each divided by 256; NaN counts as 480. # Safety: `p` is valid for 16 bytes.
    unsafe fn load_f8(self, p: *const u8) -> Self::F;
    /// Loads 16 signed bytes as floats. # Safety: `p` is valid for 16 bytes.
    unsafe fn load_i8(self, p: *const u8) -> Self::F;
    /// Loads 16 unsigned bytes as integers. # Safety: `p` is valid for 16 bytes.
    unsafe fn load_u8_i(self, p: *const u8) -> Self::I;
    /// Loads 16 unsigned bytes as floats. # Safety: `p` is valid for 16 bytes.
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Self::F {
        // SAFETY: the caller's word.
        self.float(unsafe { self.load_u8_i(p) })
    }
    /// Loads 64 bytes. # Safety: `p` is valid for 64 bytes.
    unsafe fn load_bytes(self, p: *const u8) -> Self::B;
    /// Stores 64 bytes. # Safety: `p` is valid for writing 64 bytes.
    unsafe fn store_bytes(self, p: *mut u8, v: Self::B);
    /// [`prefetch`].
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        prefetch(p);
    }
    /// Stores the low byte of every lane. # Safety: `p` is valid for writing 16 bytes.
    unsafe fn store_low_bytes(self, p: *mut u8, v: Self::I);
    /// Stores the upper 16 bits of every lane, of every four in the order 0, 2, 1, 3 ([`Simd::store_words`]).
    /// # Safety: `p` is valid for writing 32 bytes.
    unsafe fn store_high_words(self, p: *mut u8, v: Self::I);
    /// Looks bytes up, all below 32, or if `WIDE` below 64, and stores the words: of every four those of bytes 0 and 2,
    /// then, 64 bytes behind, those of bytes 1 and 3. # Safety: `p` is valid for writing 128 bytes.
    #[inline(always)]
    unsafe fn store_words<const WIDE: bool>(self, p: *mut u8, table: &Words, v: Self::B) {
        // Only the matrix unit needs this, and processors with one have AVX-512, which overrides this default.
        let mut bytes = [0; 64];
        // SAFETY: `bytes` has 64 bytes, and the rest is the caller's word.
        unsafe {
            self.store_bytes(bytes.as_mut_ptr(), v);
            Portable.store_words::<WIDE>(p, table, bytes);
        }
    }

    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a − b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`, thus `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`, thus `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? yes : no`.
    fn select_lt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// The bits of the lanes.
    fn bits(self, v: Self::F) -> Self::I;
    /// The lanes with these bits.
    fn as_floats(self, v: Self::I) -> Self::F;
    /// Nearest float, ties to even.
    fn float(self, v: Self::I) -> Self::F;

    /// Wrapping `a + b`.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping `a − b`.
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise and.
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Signed maximum.
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shift left by `N` bits.
    fn shl_i<const N: u32>(self, v: Self::I) -> Self::I;
    /// Arithmetic shift right by `N` bits.
    fn sra_i<const N: u32>(self, v: Self::I) -> Self::I;

    /// Every byte shifted right by `shift` (left if negative, |shift| ≤ 7) and masked. The mask must clear the bits that a
    /// shift of wider words would drag in from the neighbour byte.
    fn shift_mask(self, v: Self::B, shift: i32, mask: u8) -> Self::B;
    /// Every byte less `less`, wrapping.
    fn sub_bytes(self, v: Self::B, less: u8) -> Self::B;
    /// Bitwise or.
    fn or_b(self, a: Self::B, b: Self::B) -> Self::B;
    /// Looks every byte up in the table. All bytes are below 16.
    fn look_up(self, table: &[u8; 16], v: Self::B) -> Self::B;
    /// Byte `N` of every lane.
    #[inline(always)]
    fn byte<const N: usize>(self, v: Self::B) -> Self::I {
        // Only the matrix unit's weights need this, and processors with one have AVX-512, which overrides this default.
        let mut bytes = [0; 4 * LANES];
        // SAFETY: as many bytes, and as many floats.
        unsafe {
            self.store_bytes(bytes.as_mut_ptr(), v);
            let lanes: [f32; LANES] = std::array::from_fn(|lane| f32::from_bits(u32::from(bytes[4 * lane + N])));
            self.bits(self.load(lanes.as_ptr()))
        }
    }
    /// Takes four bits of every lane, from bit `SHIFT` on, and looks them up among sixteen floats.
    #[inline(always)]
    fn pick<const SHIFT: u32>(self, table: Self::F, v: Self::B) -> Self::F {
        // As for `byte`.
        let (mut bytes, table) = ([0; 4 * LANES], self.to_array(table));
        // SAFETY: as many bytes, and as many floats.
        unsafe {
            self.store_bytes(bytes.as_mut_ptr(), v);
            let lanes: [f32; LANES] = std::array::from_fn(|lane| {
                let all = u32::from_le_bytes(bytes.as_chunks().0[lane]);
                table[(all >> SHIFT & 15) as usize]
            });
            self.load(lanes.as_ptr())
        }
    }
    /// Stores every lane as the nearest IEEE half, ties to even. # Safety: `p` is valid for 32 bytes.
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, v: Self::F) {
        for (lane, value) in self.to_array(v).into_iter().enumerate() {
            // SAFETY: the caller's word.
            unsafe { p.cast::<u16>().add(lane).write_unaligned(f32_to_f16(value).to_le()) };
        }
    }
    /// `v − ⌊v⌋`, rounded down: below 1, and a zero of either sign for −∞. For `v` from −250 to 2²²; for a smaller `v` the result may be
    /// any fraction.
    #[inline(always)]
    fn fraction(self, v: Self::F) -> Self::F {
        let v = self.max(self.splat(LOWEST), v);
        let whole = floor(self, v);
        let rest = self.sub(v, whole);
        let less = self.as_floats(self.sub_i(self.bits(rest), self.splat_i(1)));
        self.select_lt(v, self.add(rest, whole), less, rest)
    }
    /// `v · 2^⌊n⌋`, rounded once: for `v` from ½ to 2, and `n` from −∞ to 100.
    #[inline(always)]
    fn scale(self, v: Self::F, n: Self::F) -> Self::F {
        let n = floor(self, self.max(self.splat(LOWEST), n));
        let n = self.sub_i(self.bits(self.add(n, self.splat(ROUNDER))), self.splat_i(ROUNDER.to_bits() as i32));
        // Two factors: the product with the first one is still a normal number.
        let half = self.sra_i::<1>(n);
        let power = |n| self.as_floats(self.shl_i::<23>(self.add_i(n, self.splat_i(127))));
        self.mul(self.mul(v, power(half)), power(self.sub_i(n, half)))
    }
    /// The first eight lanes of both, and the last eight of both.
    #[inline(always)]
    fn eights(self, a: Self::F, b: Self::F) -> [Self::F; 2] {
        let (a, b) = (self.to_array(a), self.to_array(b));
        let lanes = |from: usize| -> [f32; LANES] {
            std::array::from_fn(|lane| if lane < 8 { a[from + lane] } else { b[from + lane - 8] })
        };
        // SAFETY: arrays of sixteen.
        [0, 8].map(|from| unsafe { self.load(lanes(from).as_ptr()) })
    }
    /// Splits sixteen pairs, stored in `low` and then `high`, into their first elements and their second ones.
    #[inline(always)]
    fn unzip(self, low: Self::F, high: Self::F) -> [Self::F; 2] {
        let (low, high) = (self.to_array(low), self.to_array(high));
        let (mut first, mut second) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES / 2 {
            (first[lane], second[lane]) = (low[2 * lane], low[2 * lane + 1]);
            (first[lane + LANES / 2], second[lane + LANES / 2]) = (high[2 * lane], high[2 * lane + 1]);
        }
        // SAFETY: arrays of sixteen.
        unsafe { [self.load(first.as_ptr()), self.load(second.as_ptr())] }
    }
    /// Joins these elements into sixteen pairs, stored in the first vector and then the second.
    #[inline(always)]
    fn zip(self, first: Self::F, second: Self::F) -> [Self::F; 2] {
        let (first, second) = (self.to_array(first), self.to_array(second));
        let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES / 2 {
            (low[2 * lane], low[2 * lane + 1]) = (first[lane], second[lane]);
            (high[2 * lane], high[2 * lane + 1]) = (first[lane + LANES / 2], second[lane + LANES / 2]);
        }
        // SAFETY: arrays of sixteen.
        unsafe { [self.load(low.as_ptr()), self.load(high.as_ptr())] }
    }
    /// The upper halves of the lanes of `low` in the lower halves, and the upper halves of `high` in the upper halves.
    #[inline(always)]
    fn upper_halves(self, low: Self::F, high: Self::F) -> Self::F {
        let low = self.and_i(self.sra_i::<16>(self.bits(low)), self.splat_i(0xffff));
        self.as_floats(self.or_i(low, self.and_i(self.bits(high), self.splat_i(!0xffff))))
    }
    /// `init[r][lane] + Σ_n Σ_i codes[n][4·lane + i] · acts[r][4·n + i]`: unsigned codes no wider than `width` times the signed bytes of
    /// `R` rows, exact. The rows start at `acts.0`, `acts.1` bytes apart. `N` is 4 or 8. # Safety: every row is valid for `4 · N` bytes.
    unsafe fn dots<const N: usize, const R: usize>(
        self,
        width: CodeWidth,
        codes: &[Self::B; N],
        acts: (*const u8, usize),
        init: [Self::I; R],
    ) -> [Self::I; R];

    /// Writes sixteen 16-bit numbers, the `half`-th sixteen of a block of 32, in the layout of [`Simd::dots_of_words`]: two planes of
    /// signed bytes, the upper bytes and the lower ones. # Safety: `block` is valid for writing 64 bytes.
    #[inline(always)]
    unsafe fn store_numbers(self, block: *mut u8, half: usize, numbers: Self::I) {
        // Rounded, so that the lower byte is signed like the upper one.
        let high = self.sra_i::<8>(self.add_i(numbers, self.splat_i(128)));
        // SAFETY: the caller's word.
        unsafe {
            self.store_low_bytes(block.add(LANES * half), high);
            self.store_low_bytes(block.add(BLOCK + LANES * half), numbers);
        }
    }
    /// [`Simd::dots`] of the numbers of 16 bits that [`Simd::store_numbers`] wrote, from the block's `from`-th quad on.
    /// # Safety: every row has a block.
    #[inline(always)]
    unsafe fn dots_of_words<const N: usize, const R: usize>(
        self,
        width: CodeWidth,
        codes: &[Self::B; N],
        (acts, row_bytes): (*const u8, usize),
        from: usize,
        init: [Self::I; R],
    ) -> [Self::I; R] {
        // SAFETY: the caller's word.
        unsafe {
            let acts = acts.add(4 * from);
            // Each plane has its own sums: a product waits for the one before it in the same sum.
            let high = self.dots(width, codes, (acts, row_bytes), [self.splat_i(0); R]);
            let mut sums = self.dots(width, codes, (acts.add(BLOCK), row_bytes), init);
            for (sum, high) in sums.iter_mut().zip(high) {
                *sum = self.add_i(*sum, self.shl_i::<8>(high));
            }
            sums
        }
    }

    /// All lanes zero.
    #[inline(always)]
    fn zero(self) -> Self::F {
        self.splat(0.0)
    }

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self, v: Self::F) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: the array has 16 floats.
        unsafe { self.store(out.as_mut_ptr(), v) };
        out
    }

    /// Lane `i` holds element `i` of `part`; lanes beyond its end hold `fill`.
    #[inline(always)]
    fn load_part(self, part: &[f32], fill: f32) -> Self::F {
        if part.len() >= LANES {
            // SAFETY: the slice has at least 16 floats.
            return unsafe { self.load(part.as_ptr()) };
        }
        let mut full = [fill; LANES];
        full[..part.len()].copy_from_slice(part);
        // SAFETY: the array has 16 floats.
        unsafe { self.load(full.as_ptr()) }
    }

    /// Stores as many lanes as `part` holds, at most 16.
    #[inline(always)]
    fn store_part(self, part: &mut [f32], v: Self::F) {
        if part.len() >= LANES {
            // SAFETY: the slice has at least 16 floats.
            unsafe { self.store(part.as_mut_ptr(), v) };
        } else {
            let full = self.to_array(v);
            part.copy_from_slice(&full[..part.len()]);
        }
    }

    /// |v|.
    #[inline(always)]
    fn abs(self, v: Self::F) -> Self::F {
        self.as_floats(self.and_i(self.bits(v), self.splat_i(i32::MAX)))
    }

    /// The sum of the lanes, added as one fixed tree: halves first (lane i with lane i + 8), then quarters, and so on.
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let mut lanes = self.to_array(v);
        let mut width = LANES / 2;
        while width > 0 {
            let mut lane = 0;
            while lane < width {
                lanes[lane] += lanes[lane + width];
                lane += 1;
            }
            width /= 2;
        }
        lanes[0]
    }

    /// The greatest lane, by the rule of [`Simd::max`]; lanes must not be NaN.
    #[inline(always)]
    fn max_lane(self, v: Self::F) -> f32 {
        let mut lanes = self.to_array(v);
        let mut width = LANES / 2;
        while width > 0 {
            let mut lane = 0;
            while lane < width {
                lanes[lane] = if lanes[lane + width] > lanes[lane] { lanes[lane + width] } else { lanes[lane] };
                lane += 1;
            }
            width /= 2;
        }
        lanes[0]
    }
}

/// Prefetches the cache line at `p` into the second-level cache. Any address is valid.
#[inline(always)]
pub fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which faults at no address; every such processor has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // Inline assembly, because there is no stable intrinsic.
    // SAFETY: a hint, which faults at no address.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Prefetches the cache line at `p` into the first-level cache. Any address is valid.
#[inline(always)]
pub(crate) fn prefetch_near(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// 1.5 · 2²³: adding it rounds to an integer, ties to even, which then sits in the low mantissa bits.
pub(crate) const ROUNDER: f32 = 12_582_912.0;
/// `2^LOWEST` times a number of ordinary size is 0, and `2^(LOWEST / 2)` is still a normal number.
const LOWEST: f32 = -250.0;

#[inline(always)]
fn floor<S: Simd>(s: S, v: S::F) -> S::F {
    let nearest = s.sub(s.add(v, s.splat(ROUNDER)), s.splat(ROUNDER));
    s.select_lt(v, nearest, s.sub(nearest, s.splat(1.0)), nearest)
}

#[cfg(test)]
mod tests;
