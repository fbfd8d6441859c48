//! Sixteen lanes as two 256-bit registers: lanes 0..8 in the first, 8..16 in the second.

use std::arch::x86_64::*;

use super::{CodeWidth, Simd};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The processor has the features named above.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Avx2(())
    }
}

/// Sixteen floats.
#[derive(Clone, Copy)]
pub(crate) struct Floats(__m256, __m256);

/// Sixteen integers, or sixty-four bytes.
#[derive(Clone, Copy)]
pub(crate) struct Ints(__m256i, __m256i);

/// Wraps intrinsics: the token `self` proves their target features, and pointers are the caller's word.
macro_rules! intrinsic {
    ($body:expr) => {
        // SAFETY: a value of `Avx2` exists only where its features do; memory is vouched for by the method's contract.
        unsafe { $body }
    };
}

/// One intrinsic of two operands on both halves.
macro_rules! both {
    ($kind:ident, $op:ident, $a:expr, $b:expr) => {
        intrinsic!($kind($op($a.0, $b.0), $op($a.1, $b.1)))
    };
}

/// `init + codes · acts` of `R` rows over `N` quads. A quad passes all rows, so that it is loaded once; products of `run` quads are added in
/// 16 bits, which must hold them, before they are widened.
///
/// # Safety
/// The processor has AVX2; every row of `acts`, `row_bytes` apart, is valid for `4 · N` bytes.
#[inline(always)]
unsafe fn dots_in_runs<const N: usize, const R: usize>(
    run: usize,
    codes: &[Ints; N],
    (acts, row_bytes): (*const u8, usize),
    init: [Ints; R],
) -> [Ints; R] {
    intrinsic!({
        let (zero, ones) = (_mm256_setzero_si256(), _mm256_set1_epi16(1));
        let (mut sums, mut pairs) = (init, [Ints(zero, zero); R]);
        let mut n = 0;
        while n < N {
            let mut r = 0;
            while r < R {
                let quad = _mm256_set1_epi32(acts.add(r * row_bytes + 4 * n).cast::<i32>().read_unaligned());
                pairs[r].0 = _mm256_add_epi16(pairs[r].0, _mm256_maddubs_epi16(codes[n].0, quad));
                pairs[r].1 = _mm256_add_epi16(pairs[r].1, _mm256_maddubs_epi16(codes[n].1, quad));
                if (n + 1).is_multiple_of(run) || n + 1 == N {
                    sums[r].0 = _mm256_add_epi32(sums[r].0, _mm256_madd_epi16(pairs[r].0, ones));
                    sums[r].1 = _mm256_add_epi32(sums[r].1, _mm256_madd_epi16(pairs[r].1, ones));
                    pairs[r] = Ints(zero, zero);
                }
                r += 1;
            }
            n += 1;
        }
        sums
    })
}

/// The first `4 · N` numbers of `R` rows as words, of every four in the order 0, 2, 1, 3.
///
/// # Safety
/// The processor has AVX2; `N` is 4 or 8, and every row of `acts`, `row_bytes` apart, is valid for `4 · N` bytes.
#[inline(always)]
unsafe fn widened<const N: usize, const R: usize>((acts, row_bytes): (*const u8, usize)) -> [[u8; 64]; R] {
    const { assert!(N == 4 || N == 8) };
    intrinsic!({
        let order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        let mut words = [[0; 64]; R];
        for (r, words) in words.iter_mut().enumerate() {
            let mut at = 0;
            while at < 4 * N {
                let numbers = _mm_shuffle_epi8(_mm_loadu_si128(acts.add(r * row_bytes + at).cast()), order);
                _mm256_storeu_si256(words.as_mut_ptr().add(2 * at).cast(), _mm256_cvtepi8_epi16(numbers));
                at += 16;
            }
        }
        words
    })
}

/// Sixteen numbers as words, of every four in the order 0, 2, 1, 3.
///
/// # Safety
/// The processor has AVX2, and `p` is valid for writing 32 bytes.
#[inline(always)]
unsafe fn store_words(p: *mut u8, numbers: Ints) {
    intrinsic!({
        // It packs each half of a register by itself.
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(numbers.0, numbers.1));
        let ordered = _mm256_shufflehi_epi16::<0b11_01_10_00>(_mm256_shufflelo_epi16::<0b11_01_10_00>(words));
        _mm256_storeu_si256(p.cast(), ordered);
    })
}

impl Simd for Avx2 {
    type F = Floats;
    type I = Ints;
    type B = Ints;

    #[inline(always)]
    fn splat(self, v: f32) -> Floats {
        let half = intrinsic!(_mm256_set1_ps(v));
        Floats(half, half)
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> Ints {
        let half = intrinsic!(_mm256_set1_epi32(v));
        Ints(half, half)
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Floats {
        intrinsic!(Floats(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Floats) {
        intrinsic!({
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> Floats {
        intrinsic!(Floats(
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast())),
        ))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, v: Floats) {
        intrinsic!({
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0));
            _mm_storeu_si128(p.add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.1));
        })
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> Floats {
        intrinsic!({
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            Floats(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        })
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> Floats {
        intrinsic!(Floats(
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()))),
        ))
    }

    #[inline(always)]
    unsafe fn load_f8(self, p: *const u8) -> Floats {
        intrinsic!({
            let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let sign = _mm256_and_si256(_mm256_slli_epi16::<8>(words), _mm256_set1_epi16(i16::MIN));
            let rest = _mm256_and_si256(_mm256_slli_epi16::<7>(words), _mm256_set1_epi16(0x3f80));
            let halves = _mm256_or_si256(sign, rest);
            Floats(
                _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
            )
        })
    }

    #[inline(always)]
    unsafe fn load_u8_i(self, p: *const u8) -> Ints {
        intrinsic!(Ints(
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast())),
        ))
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> Ints {
        intrinsic!(Ints(_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())))
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: Ints) {
        intrinsic!({
            _mm256_storeu_si256(p.cast(), v.0);
            _mm256_storeu_si256(p.add(32).cast(), v.1);
        })
    }

    #[inline(always)]
    unsafe fn store_high_words(self, p: *mut u8, v: Ints) {
        // Shifted with their sign, so that packing saturates nothing.
        intrinsic!(store_words(p, Ints(_mm256_srai_epi32::<16>(v.0), _mm256_srai_epi32::<16>(v.1))))
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: Ints) {
        // Rare (quantizing activations), so through memory: no saturating pack changes the low bytes.
        let mut lanes = [0i32; 16];
        intrinsic!({
            _mm256_storeu_si256(lanes.as_mut_ptr().cast(), v.0);
            _mm256_storeu_si256(lanes.as_mut_ptr().add(8).cast(), v.1);
            let mut lane = 0;
            while lane < 16 {
                p.add(lane).write(lanes[lane] as u8);
                lane += 1;
            }
        })
    }

    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        both!(Floats, _mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        both!(Floats, _mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        both!(Floats, _mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        both!(Floats, _mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn fma(self, a: Floats, b: Floats, c: Floats) -> Floats {
        intrinsic!(Floats(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)))
    }

    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        both!(Floats, _mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        both!(Floats, _mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn select_lt(self, a: Floats, b: Floats, yes: Floats, no: Floats) -> Floats {
        intrinsic!(Floats(
            _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
            _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
        ))
    }

    #[inline(always)]
    fn unzip(self, low: Floats, high: Floats) -> [Floats; 2] {
        // Of every four lanes two come from the first register, then two from the second one: pairs are out of order.
        macro_rules! each {
            ($which:literal, $of:expr) => {{
                let pairs = _mm256_castps_pd(_mm256_shuffle_ps::<$which>($of.0, $of.1));
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(pairs))
            }};
        }
        intrinsic!([
            Floats(each!(0b10_00_10_00, low), each!(0b10_00_10_00, high)),
            Floats(each!(0b11_01_11_01, low), each!(0b11_01_11_01, high)),
        ])
    }

    #[inline(always)]
    fn bits(self, v: Floats) -> Ints {
        intrinsic!(Ints(_mm256_castps_si256(v.0), _mm256_castps_si256(v.1)))
    }

    #[inline(always)]
    fn as_floats(self, v: Ints) -> Floats {
        intrinsic!(Floats(_mm256_castsi256_ps(v.0), _mm256_castsi256_ps(v.1)))
    }

    #[inline(always)]
    fn float(self, v: Ints) -> Floats {
        intrinsic!(Floats(_mm256_cvtepi32_ps(v.0), _mm256_cvtepi32_ps(v.1)))
    }

    #[inline(always)]
    fn add_i(self, a: Ints, b: Ints) -> Ints {
        both!(Ints, _mm256_add_epi32, a, b)
    }

    #[inline(always)]
    fn sub_i(self, a: Ints, b: Ints) -> Ints {
        both!(Ints, _mm256_sub_epi32, a, b)
    }

    #[inline(always)]
    fn and_i(self, a: Ints, b: Ints) -> Ints {
        both!(Ints, _mm256_and_si256, a, b)
    }

    #[inline(always)]
    fn or_i(self, a: Ints, b: Ints) -> Ints {
        both!(Ints, _mm256_or_si256, a, b)
    }

    #[inline(always)]
    fn max_i(self, a: Ints, b: Ints) -> Ints {
        both!(Ints, _mm256_max_epi32, a, b)
    }

    #[inline(always)]
    fn shl_i<const N: u32>(self, v: Ints) -> Ints {
        let count = intrinsic!(_mm_cvtsi32_si128(N as i32));
        intrinsic!(Ints(_mm256_sll_epi32(v.0, count), _mm256_sll_epi32(v.1, count)))
    }

    #[inline(always)]
    fn sra_i<const N: u32>(self, v: Ints) -> Ints {
        let count = intrinsic!(_mm_cvtsi32_si128(N as i32));
        intrinsic!(Ints(_mm256_sra_epi32(v.0, count), _mm256_sra_epi32(v.1, count)))
    }

    #[inline(always)]
    fn shift_mask(self, v: Ints, shift: i32, mask: u8) -> Ints {
        intrinsic!({
            let count = _mm_cvtsi32_si128(shift.abs());
            let mask = _mm256_set1_epi8(mask as i8);
            let shifted = if shift < 0 {
                Ints(_mm256_sll_epi16(v.0, count), _mm256_sll_epi16(v.1, count))
            } else {
                Ints(_mm256_srl_epi16(v.0, count), _mm256_srl_epi16(v.1, count))
            };
            Ints(_mm256_and_si256(shifted.0, mask), _mm256_and_si256(shifted.1, mask))
        })
    }

    #[inline(always)]
    fn sub_bytes(self, v: Ints, less: u8) -> Ints {
        let less = intrinsic!(_mm256_set1_epi8(less as i8));
        both!(Ints, _mm256_sub_epi8, v, Ints(less, less))
    }

    #[inline(always)]
    fn or_b(self, a: Ints, b: Ints) -> Ints {
        both!(Ints, _mm256_or_si256, a, b)
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], v: Ints) -> Ints {
        let table = intrinsic!(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())));
        both!(Ints, _mm256_shuffle_epi8, Ints(table, table), v)
    }

    #[inline(always)]
    unsafe fn dots<const N: usize, const R: usize>(
        self,
        width: CodeWidth,
        codes: &[Ints; N],
        acts: (*const u8, usize),
        init: [Ints; R],
    ) -> [Ints; R] {
        // SAFETY: the caller's word.
        unsafe {
            match width {
                // 8 quads · 2 products · 15 · 128 = 30,720.
                CodeWidth::Four => dots_in_runs(8, codes, acts, init),
                // 4 quads · 2 products · 31 · 128 = 31,744.
                CodeWidth::Five => dots_in_runs(4, codes, acts, init),
                // 2 quads · 2 products · 63 · 128 = 32,256.
                CodeWidth::Six => dots_in_runs(2, codes, acts, init),
                // Two products of 255 · 128 exceed 16 bits.
                CodeWidth::Eight => {
                    let words = widened::<N, R>(acts);
                    self.dots_of_words(width, codes, (words.as_ptr().cast(), size_of_val(&words[0])), 0, init)
                }
            }
        }
    }

    // As words, of every four in the order 0, 2, 1, 3: their products need no widening, half the instructions for codes of eight bits.

    #[inline(always)]
    unsafe fn store_numbers(self, block: *mut u8, half: usize, numbers: Ints) {
        // SAFETY: the caller's word.
        unsafe { store_words(block.add(32 * half), numbers) }
    }

    #[inline(always)]
    unsafe fn dots_of_words<const N: usize, const R: usize>(
        self,
        _width: CodeWidth,
        codes: &[Ints; N],
        (acts, row_bytes): (*const u8, usize),
        from: usize,
        init: [Ints; R],
    ) -> [Ints; R] {
        intrinsic!({
            let even = _mm256_set1_epi16(255);
            let mut sums = init;
            let mut n = 0;
            while n < N {
                let first = Ints(_mm256_and_si256(codes[n].0, even), _mm256_and_si256(codes[n].1, even));
                let second = Ints(_mm256_srli_epi16::<8>(codes[n].0), _mm256_srli_epi16::<8>(codes[n].1));
                let mut r = 0;
                while r < R {
                    let at = acts.add(r * row_bytes + 8 * (from + n)).cast::<i32>();
                    let numbers = _mm256_set1_epi32(at.read_unaligned());
                    sums[r].0 = _mm256_add_epi32(sums[r].0, _mm256_madd_epi16(first.0, numbers));
                    sums[r].1 = _mm256_add_epi32(sums[r].1, _mm256_madd_epi16(first.1, numbers));
                    let numbers = _mm256_set1_epi32(at.add(1).read_unaligned());
                    sums[r].0 = _mm256_add_epi32(sums[r].0, _mm256_madd_epi16(second.0, numbers));
                    sums[r].1 = _mm256_add_epi32(sums[r].1, _mm256_madd_epi16(second.1, numbers));
                    r += 1;
                }
                n += 1;
            }
            sums
        })
    }
}
