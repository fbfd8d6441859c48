//! The oracle: sixteen lanes in plain Rust, for any processor. `f32::mul_add` is exactly rounded everywhere, if slow where
//! the compiler may not assume a fused instruction. There are no target features to inherit, so nothing here need be inlined.

use super::{CodeWidth, LANES, Simd, Words};
use crate::half::{bf16_to_f32, f16_to_f32};

/// Plain Rust; needs nothing from the processor.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// Applies `f` lane by lane.
#[inline]
fn map<A: Copy, R: Copy + Default>(a: [A; LANES], f: impl Fn(A) -> R) -> [R; LANES] {
    let mut out = [R::default(); LANES];
    for (out, a) in out.iter_mut().zip(a) {
        *out = f(a);
    }
    out
}

/// Applies `f` lane by lane to two vectors.
#[inline]
fn zip<A: Copy, R: Copy + Default>(a: [A; LANES], b: [A; LANES], f: impl Fn(A, A) -> R) -> [R; LANES] {
    let mut out = [R::default(); LANES];
    for (out, (a, b)) in out.iter_mut().zip(a.into_iter().zip(b)) {
        *out = f(a, b);
    }
    out
}

/// Reads 16 little-endian half words.
///
/// # Safety
/// `p` is valid for 32 bytes.
#[inline]
unsafe fn half_words(p: *const u8) -> [u16; LANES] {
    // SAFETY: the caller vouches for 32 bytes; an array of bytes has no alignment.
    let bytes = unsafe { p.cast::<[[u8; 2]; LANES]>().read() };
    map(bytes, u16::from_le_bytes)
}

impl Simd for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 64];

    #[inline]
    fn splat(self, v: f32) -> Self::F {
        [v; LANES]
    }

    #[inline]
    fn splat_i(self, v: i32) -> Self::I {
        [v; LANES]
    }

    #[inline]
    unsafe fn load(self, p: *const f32) -> Self::F {
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }

    #[inline]
    unsafe fn store(self, p: *mut f32, v: Self::F) {
        // SAFETY: the caller vouches for 64 writable bytes.
        unsafe { p.cast::<Self::F>().write_unaligned(v) }
    }

    #[inline]
    unsafe fn load_f16(self, p: *const u8) -> Self::F {
        // SAFETY: the caller vouches for 32 readable bytes.
        map(unsafe { half_words(p) }, f16_to_f32)
    }

    #[inline]
    unsafe fn load_bf16(self, p: *const u8) -> Self::F {
        // SAFETY: the caller vouches for 32 readable bytes.
        map(unsafe { half_words(p) }, bf16_to_f32)
    }

    #[inline]
    unsafe fn load_f8(self, p: *const u8) -> Self::F {
        // SAFETY: the caller vouches for 16 readable bytes.
        map(unsafe { p.cast::<[u8; LANES]>().read() }, |code| f16_to_f32(crate::pack::f8_as_f16(code)))
    }

    #[inline]
    unsafe fn load_i8(self, p: *const u8) -> Self::F {
        // SAFETY: the caller vouches for 16 readable bytes.
        map(unsafe { p.cast::<[i8; LANES]>().read() }, f32::from)
    }

    #[inline]
    unsafe fn load_u8_i(self, p: *const u8) -> Self::I {
        // SAFETY: the caller vouches for 16 readable bytes.
        map(unsafe { p.cast::<[u8; LANES]>().read() }, i32::from)
    }

    #[inline]
    unsafe fn load_bytes(self, p: *const u8) -> Self::B {
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe { p.cast::<Self::B>().read() }
    }

    #[inline]
    unsafe fn store_bytes(self, p: *mut u8, v: Self::B) {
        // SAFETY: the caller vouches for 64 writable bytes.
        unsafe { p.cast::<Self::B>().write(v) }
    }

    #[inline]
    unsafe fn store_high_words(self, p: *mut u8, v: Self::I) {
        let words = map(v, |v| ((v >> 16) as u16).to_le_bytes());
        let ordered: [[u8; 2]; LANES] = std::array::from_fn(|i| words[i / 4 * 4 + [0, 2, 1, 3][i % 4]]);
        // SAFETY: the caller vouches for 32 writable bytes.
        unsafe { p.cast::<[[u8; 2]; LANES]>().write(ordered) }
    }

    #[inline]
    unsafe fn store_words<const WIDE: bool>(self, p: *mut u8, table: &Words, v: Self::B) {
        for (i, code) in v.into_iter().enumerate() {
            let [odd, pair] = [i % 2, i / 2];
            // SAFETY: the caller vouches for 128 writable bytes.
            unsafe { p.add(64 * odd + 2 * pair).cast::<u16>().write_unaligned(table.0[usize::from(code)].to_le()) };
        }
    }

    #[inline]
    unsafe fn store_low_bytes(self, p: *mut u8, v: Self::I) {
        // SAFETY: the caller vouches for 16 writable bytes.
        unsafe { p.cast::<[u8; LANES]>().write(map(v, |v| v as u8)) }
    }

    #[inline]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }

    #[inline]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }

    #[inline]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }

    #[inline]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }

    #[inline]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for (lane, out) in out.iter_mut().enumerate() {
            *out = a[lane].mul_add(b[lane], *out);
        }
        out
    }

    #[inline]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline]
    fn select_lt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        let mut out = no;
        for (lane, out) in out.iter_mut().enumerate() {
            if a[lane] < b[lane] {
                *out = yes[lane];
            }
        }
        out
    }

    #[inline]
    fn bits(self, v: Self::F) -> Self::I {
        map(v, |v| v.to_bits() as i32)
    }

    #[inline]
    fn as_floats(self, v: Self::I) -> Self::F {
        map(v, |v| f32::from_bits(v as u32))
    }

    #[inline]
    fn float(self, v: Self::I) -> Self::F {
        map(v, |v| v as f32)
    }

    #[inline]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, i32::wrapping_add)
    }

    #[inline]
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, i32::wrapping_sub)
    }

    #[inline]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| a & b)
    }

    #[inline]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| a | b)
    }

    #[inline]
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, i32::max)
    }

    #[inline]
    fn shl_i<const N: u32>(self, v: Self::I) -> Self::I {
        map(v, |v| v << N)
    }

    #[inline]
    fn sra_i<const N: u32>(self, v: Self::I) -> Self::I {
        map(v, |v| v >> N)
    }

    #[inline]
    fn shift_mask(self, v: Self::B, shift: i32, mask: u8) -> Self::B {
        let mut out = v;
        for byte in &mut out {
            *byte = mask & if shift < 0 { *byte << -shift } else { *byte >> shift };
        }
        out
    }

    #[inline]
    fn sub_bytes(self, v: Self::B, less: u8) -> Self::B {
        v.map(|v| v.wrapping_sub(less))
    }

    #[inline]
    fn or_b(self, a: Self::B, b: Self::B) -> Self::B {
        let mut out = a;
        for (out, b) in out.iter_mut().zip(b) {
            *out |= b;
        }
        out
    }

    #[inline]
    fn look_up(self, table: &[u8; 16], v: Self::B) -> Self::B {
        v.map(|v| table[usize::from(v & 15)])
    }

    #[inline]
    unsafe fn dots<const N: usize, const R: usize>(
        self,
        _width: CodeWidth,
        codes: &[Self::B; N],
        (acts, row_bytes): (*const u8, usize),
        init: [Self::I; R],
    ) -> [Self::I; R] {
        let mut sums = init;
        for (r, sum) in sums.iter_mut().enumerate() {
            for (n, codes) in codes.iter().enumerate() {
                // SAFETY: the caller vouches for 4 · N bytes of every row.
                let quad = unsafe { acts.add(r * row_bytes + 4 * n).cast::<[i8; 4]>().read() };
                for (lane, sum) in sum.iter_mut().enumerate() {
                    for (i, act) in quad.into_iter().enumerate() {
                        *sum = sum.wrapping_add(i32::from(codes[4 * lane + i]) * i32::from(act));
                    }
                }
            }
        }
        sums
    }
}
