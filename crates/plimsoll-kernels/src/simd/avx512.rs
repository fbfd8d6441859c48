//! Sixteen lanes as one 512-bit register; byte products by VNNI.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{CodeWidth, Simd, Words};

/// Proof that the processor has AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The processor has the features named above.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Avx512(())
    }
}

/// Wraps intrinsics: the token `self` proves their target features, and pointers are the caller's word.
macro_rules! intrinsic {
    ($body:expr) => {
        // SAFETY: a value of `Avx512` exists only where its features do; memory is vouched for by the method's contract.
        unsafe { $body }
    };
}

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    #[inline(always)]
    fn splat(self, v: f32) -> __m512 {
        intrinsic!(_mm512_set1_ps(v))
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> __m512i {
        intrinsic!(_mm512_set1_epi32(v))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        intrinsic!(_mm512_loadu_ps(p))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        intrinsic!(_mm512_storeu_ps(p, v))
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        intrinsic!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, v: __m512) {
        intrinsic!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }

    #[inline(always)]
    fn fraction(self, v: __m512) -> __m512 {
        // By the greatest whole number below, without exceptions.
        intrinsic!(_mm512_reduce_ps::<0x09>(v))
    }

    #[inline(always)]
    fn scale(self, v: __m512, n: __m512) -> __m512 {
        intrinsic!(_mm512_scalef_ps(v, n))
    }

    #[inline(always)]
    fn eights(self, a: __m512, b: __m512) -> [__m512; 2] {
        intrinsic!([_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b)])
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        intrinsic!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))))
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))))
    }

    #[inline(always)]
    unsafe fn load_f8(self, p: *const u8) -> __m512 {
        intrinsic!({
            let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let sign = _mm256_and_si256(_mm256_slli_epi16::<8>(words), _mm256_set1_epi16(i16::MIN));
            let rest = _mm256_and_si256(_mm256_slli_epi16::<7>(words), _mm256_set1_epi16(0x3f80));
            _mm512_cvtph_ps(_mm256_or_si256(sign, rest))
        })
    }

    #[inline(always)]
    unsafe fn load_u8_i(self, p: *const u8) -> __m512i {
        intrinsic!(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> __m512i {
        intrinsic!(_mm512_loadu_si512(p.cast()))
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: __m512i) {
        intrinsic!(_mm512_storeu_si512(p.cast(), v))
    }

    #[inline(always)]
    unsafe fn store_high_words(self, p: *mut u8, v: __m512i) {
        intrinsic!({
            let words = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(v));
            let ordered = _mm256_shufflehi_epi16::<0b11_01_10_00>(_mm256_shufflelo_epi16::<0b11_01_10_00>(words));
            _mm256_storeu_si256(p.cast(), ordered);
        })
    }

    #[inline(always)]
    unsafe fn store_words<const WIDE: bool>(self, p: *mut u8, table: &Words, v: __m512i) {
        intrinsic!({
            let mask = _mm512_set1_epi16(0xff);
            let low = _mm512_load_si512(table.0.as_ptr().cast());
            let rows = [_mm512_and_si512(v, mask), _mm512_srli_epi16::<8>(v)];
            for (row, codes) in rows.into_iter().enumerate() {
                let words = if WIDE {
                    let high = _mm512_load_si512(table.0.as_ptr().add(32).cast());
                    _mm512_permutex2var_epi16(low, codes, high)
                } else {
                    _mm512_permutexvar_epi16(codes, low)
                };
                _mm512_storeu_si512(p.add(64 * row).cast(), words);
            }
        })
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: __m512i) {
        intrinsic!(_mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        intrinsic!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }

    #[inline(always)]
    fn bits(self, v: __m512) -> __m512i {
        intrinsic!(_mm512_castps_si512(v))
    }

    #[inline(always)]
    fn as_floats(self, v: __m512i) -> __m512 {
        intrinsic!(_mm512_castsi512_ps(v))
    }

    #[inline(always)]
    fn float(self, v: __m512i) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(v))
    }

    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    fn and_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn max_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_max_epi32(a, b))
    }

    #[inline(always)]
    fn shl_i<const N: u32>(self, v: __m512i) -> __m512i {
        intrinsic!(_mm512_slli_epi32::<N>(v))
    }

    #[inline(always)]
    fn sra_i<const N: u32>(self, v: __m512i) -> __m512i {
        intrinsic!(_mm512_srai_epi32::<N>(v))
    }

    #[inline(always)]
    fn shift_mask(self, v: __m512i, shift: i32, mask: u8) -> __m512i {
        // Constant after inlining: LLVM turns the counts into immediates.
        let shifted = intrinsic!(if shift < 0 {
            _mm512_sll_epi16(v, _mm_cvtsi32_si128(-shift))
        } else {
            _mm512_srl_epi16(v, _mm_cvtsi32_si128(shift))
        });
        intrinsic!(_mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8)))
    }

    #[inline(always)]
    fn sub_bytes(self, v: __m512i, less: u8) -> __m512i {
        intrinsic!(_mm512_sub_epi8(v, _mm512_set1_epi8(less as i8)))
    }

    #[inline(always)]
    fn or_b(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], v: __m512i) -> __m512i {
        intrinsic!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v))
    }

    #[inline(always)]
    fn byte<const N: usize>(self, v: __m512i) -> __m512i {
        // A constant after inlining, as for `shift_mask`.
        intrinsic!(_mm512_and_si512(_mm512_srl_epi32(v, _mm_cvtsi32_si128(8 * N as i32)), _mm512_set1_epi32(255)))
    }

    #[inline(always)]
    fn pick<const SHIFT: u32>(self, table: __m512, v: __m512i) -> __m512 {
        // Only the lowest four bits of an index count.
        intrinsic!(_mm512_permutexvar_ps(_mm512_srli_epi32::<SHIFT>(v), table))
    }

    #[inline(always)]
    fn unzip(self, low: __m512, high: __m512) -> [__m512; 2] {
        intrinsic!({
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)]
        })
    }

    #[inline(always)]
    fn zip(self, first: __m512, second: __m512) -> [__m512; 2] {
        intrinsic!({
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            [_mm512_permutex2var_ps(first, low, second), _mm512_permutex2var_ps(first, high, second)]
        })
    }

    #[inline(always)]
    fn upper_halves(self, low: __m512, high: __m512) -> __m512 {
        // SAFETY: the value is proof of the features.
        unsafe { upper_halves(low, high) }
    }

    #[inline(always)]
    unsafe fn dots<const N: usize, const R: usize>(
        self,
        _width: CodeWidth,
        codes: &[__m512i; N],
        (acts, row_bytes): (*const u8, usize),
        init: [__m512i; R],
    ) -> [__m512i; R] {
        // Each product waits for the one before it: two chains a row.
        let mut sums = [init, [self.splat_i(0); R]];
        let mut r = 0;
        while r < R {
            let mut n = 0;
            while n < N {
                let sum = &mut sums[2 * n / N][r];
                *sum = intrinsic!({
                    let at = acts.add(r * row_bytes + 4 * n).cast::<i32>();
                    _mm512_dpbusd_epi32(*sum, codes[n], _mm512_set1_epi32(at.read_unaligned()))
                });
                n += 1;
            }
            r += 1;
        }
        let [mut sums, others] = sums;
        for (sum, other) in sums.iter_mut().zip(others) {
            *sum = self.add_i(*sum, other);
        }
        sums
    }
}

/// Written out: of the intrinsic the compiler makes a permutation of two registers, three times as slow.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper_halves(low: __m512, high: __m512) -> __m512 {
    let order = _mm512_set4_epi32(0x0f0e_0f0e, 0x0b0a_0b0a, 0x0706_0706, 0x0302_0302);
    let mut both = high;
    // SAFETY: only registers are touched.
    unsafe {
        asm!("vpshufb {both}{{{low_words}}}, {low}, {order}",
             both = inout(zmm_reg) both, low = in(zmm_reg) low, order = in(zmm_reg) order,
             low_words = in(kreg) 0x3333_3333_3333_3333u64, options(pure, nomem, nostack, preserves_flags));
    }
    both
}
