//! Sixteen lanes as four 128-bit registers, in order. The instructions are those of every 64-bit ARM processor; the byte
//! products of later ones (`sdot`) have no stable intrinsics yet.

use std::arch::aarch64::*;

use super::{CodeWidth, Simd};

/// Proof that the processor has NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    /// # Safety
    /// The processor has NEON.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Neon(())
    }
}

/// Sixteen floats.
#[derive(Clone, Copy)]
pub(crate) struct Floats([float32x4_t; 4]);

/// Sixteen integers.
#[derive(Clone, Copy)]
pub(crate) struct Ints([int32x4_t; 4]);

/// Sixty-four bytes.
#[derive(Clone, Copy)]
pub(crate) struct Bytes([uint8x16_t; 4]);

/// Wraps intrinsics: the token `self` proves their target feature, and pointers are the caller's word.
macro_rules! intrinsic {
    ($body:expr) => {
        // SAFETY: a value of `Neon` exists only where its feature does; memory is vouched for by the method's contract.
        unsafe { $body }
    };
}

/// An expression for each of the four registers, which it names by `$i`.
macro_rules! each {
    ($i:ident => $body:expr) => {
        each!($i => $body; 0, 1, 2, 3)
    };
    ($i:ident => $body:expr; $($number:literal),+) => {
        [$({
            const $i: usize = $number;
            intrinsic!($body)
        }),+]
    };
}

/// `init + codes · acts` over `N` quads of one register, in sums of products that cannot overflow 16 bits.
///
/// # Safety
/// The processor has NEON; `acts` is valid for `4 · N` bytes; codes are no wider than `width`.
#[inline(always)]
unsafe fn dot_quarter<const N: usize>(
    width: CodeWidth,
    codes: &[uint8x16_t; N],
    acts: *const u8,
    init: int32x4_t,
) -> int32x4_t {
    // Codes of eight bits are taken less 128, so that they fit a signed byte; 128 · Σ acts is added behind.
    let (products, less) = match width {
        // 8 products · 31 · 128 = 31,744.
        CodeWidth::Four | CodeWidth::Five => (8, 0),
        // 4 products · 63 · 128 = 32,256: fits, but only just.
        CodeWidth::Six => (4, 0),
        // 128 · 128 = 16,384: two of them would not fit.
        CodeWidth::Eight => (1, 128),
    };
    intrinsic!({
        let (mut low, mut high, mut all) = (vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s16(0));
        let (mut low_sum, mut high_sum) = (vdupq_n_s32(0), vdupq_n_s32(0));
        let mut n = 0;
        while n < N {
            let quad = vreinterpretq_s8_s32(vdupq_n_s32(acts.add(4 * n).cast::<i32>().read_unaligned()));
            let code = vreinterpretq_s8_u8(veorq_u8(codes[n], vdupq_n_u8(less)));
            low = vmlal_s8(low, vget_low_s8(code), vget_low_s8(quad));
            high = vmlal_high_s8(high, code, quad);
            all = vpadalq_s8(all, quad);
            n += 1;
            if n % products == 0 || n == N {
                (low_sum, high_sum) = (vpadalq_s16(low_sum, low), vpadalq_s16(high_sum, high));
                (low, high) = (vdupq_n_s16(0), vdupq_n_s16(0));
            }
        }
        let sum = vaddq_s32(init, vpaddq_s32(low_sum, high_sum));
        if width == CodeWidth::Eight { vaddq_s32(sum, vshlq_n_s32::<7>(vpaddlq_s16(all))) } else { sum }
    })
}

impl Simd for Neon {
    type F = Floats;
    type I = Ints;
    type B = Bytes;

    #[inline(always)]
    fn splat(self, v: f32) -> Floats {
        Floats([intrinsic!(vdupq_n_f32(v)); 4])
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> Ints {
        Ints([intrinsic!(vdupq_n_s32(v)); 4])
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Floats {
        Floats(each!(I => vld1q_f32(p.add(4 * I))))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Floats) {
        each!(I => vst1q_f32(p.add(4 * I), v.0[I]));
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> Floats {
        Floats(each!(I => vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p.add(8 * I))))))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> Floats {
        Floats(each!(I => vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(p.add(8 * I)))))))
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> Floats {
        intrinsic!({
            let bytes = vld1q_s8(p.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            self.float(Ints([
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ]))
        })
    }

    #[inline(always)]
    unsafe fn load_f8(self, p: *const u8) -> Floats {
        intrinsic!({
            let bytes = vld1q_u8(p);
            let halves = [vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)].map(|words| {
                let sign = vandq_u16(vshlq_n_u16::<8>(words), vdupq_n_u16(0x8000));
                let rest = vandq_u16(vshlq_n_u16::<7>(words), vdupq_n_u16(0x3f80));
                vreinterpretq_u8_u16(vorrq_u16(sign, rest))
            });
            Floats([
                vcvt_f32_f16(vreinterpret_f16_u8(vget_low_u8(halves[0]))),
                vcvt_f32_f16(vreinterpret_f16_u8(vget_high_u8(halves[0]))),
                vcvt_f32_f16(vreinterpret_f16_u8(vget_low_u8(halves[1]))),
                vcvt_f32_f16(vreinterpret_f16_u8(vget_high_u8(halves[1]))),
            ])
        })
    }

    #[inline(always)]
    unsafe fn load_u8_i(self, p: *const u8) -> Ints {
        intrinsic!({
            let bytes = vld1q_u8(p);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            Ints([
                vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
                vreinterpretq_s32_u32(vmovl_high_u16(low)),
                vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
                vreinterpretq_s32_u32(vmovl_high_u16(high)),
            ])
        })
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> Bytes {
        Bytes(each!(I => vld1q_u8(p.add(16 * I))))
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: Bytes) {
        each!(I => vst1q_u8(p.add(16 * I), v.0[I]));
    }

    #[inline(always)]
    unsafe fn store_high_words(self, p: *mut u8, v: Ints) {
        let [a, b, c, d] = each!(I => vreinterpretq_u16_s32(v.0[I]));
        intrinsic!({
            // Of the bytes of eight words: 0, 2, 1, 3 of every four.
            let order = vcombine_u8(vcreate_u8(0x0706_0302_0504_0100), vcreate_u8(0x0f0e_0b0a_0d0c_0908));
            vst1q_u8(p, vqtbl1q_u8(vreinterpretq_u8_u16(vuzp2q_u16(a, b)), order));
            vst1q_u8(p.add(16), vqtbl1q_u8(vreinterpretq_u8_u16(vuzp2q_u16(c, d)), order));
        })
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8, v: Ints) {
        let [a, b, c, d] = each!(I => vreinterpretq_u16_s32(v.0[I]));
        intrinsic!({
            let (low, high) = (vreinterpretq_u8_u16(vuzp1q_u16(a, b)), vreinterpretq_u8_u16(vuzp1q_u16(c, d)));
            vst1q_u8(p, vuzp1q_u8(low, high));
        })
    }

    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        Floats(each!(I => vaddq_f32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        Floats(each!(I => vsubq_f32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        Floats(each!(I => vmulq_f32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        Floats(each!(I => vdivq_f32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn fma(self, a: Floats, b: Floats, c: Floats) -> Floats {
        Floats(each!(I => vfmaq_f32(c.0[I], a.0[I], b.0[I])))
    }

    // The instructions for maxima and minima would pass NaN on and put 0 above −0.
    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        Floats(each!(I => vbslq_f32(vcgtq_f32(a.0[I], b.0[I]), a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        Floats(each!(I => vbslq_f32(vcltq_f32(a.0[I], b.0[I]), a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn select_lt(self, a: Floats, b: Floats, yes: Floats, no: Floats) -> Floats {
        Floats(each!(I => vbslq_f32(vcltq_f32(a.0[I], b.0[I]), yes.0[I], no.0[I])))
    }

    #[inline(always)]
    fn unzip(self, low: Floats, high: Floats) -> [Floats; 2] {
        let ([a, b, c, d], [e, f, g, h]) = (low.0, high.0);
        intrinsic!([
            Floats([vuzp1q_f32(a, b), vuzp1q_f32(c, d), vuzp1q_f32(e, f), vuzp1q_f32(g, h)]),
            Floats([vuzp2q_f32(a, b), vuzp2q_f32(c, d), vuzp2q_f32(e, f), vuzp2q_f32(g, h)]),
        ])
    }

    #[inline(always)]
    fn bits(self, v: Floats) -> Ints {
        Ints(each!(I => vreinterpretq_s32_f32(v.0[I])))
    }

    #[inline(always)]
    fn as_floats(self, v: Ints) -> Floats {
        Floats(each!(I => vreinterpretq_f32_s32(v.0[I])))
    }

    #[inline(always)]
    fn float(self, v: Ints) -> Floats {
        Floats(each!(I => vcvtq_f32_s32(v.0[I])))
    }

    #[inline(always)]
    fn add_i(self, a: Ints, b: Ints) -> Ints {
        Ints(each!(I => vaddq_s32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn sub_i(self, a: Ints, b: Ints) -> Ints {
        Ints(each!(I => vsubq_s32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn and_i(self, a: Ints, b: Ints) -> Ints {
        Ints(each!(I => vandq_s32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn or_i(self, a: Ints, b: Ints) -> Ints {
        Ints(each!(I => vorrq_s32(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn max_i(self, a: Ints, b: Ints) -> Ints {
        Ints(each!(I => vmaxq_s32(a.0[I], b.0[I])))
    }

    // Shifts are by a register, and to the right by a negative count: an immediate count cannot be a generic one.
    #[inline(always)]
    fn shl_i<const N: u32>(self, v: Ints) -> Ints {
        Ints(each!(I => vshlq_s32(v.0[I], vdupq_n_s32(N as i32))))
    }

    #[inline(always)]
    fn sra_i<const N: u32>(self, v: Ints) -> Ints {
        Ints(each!(I => vshlq_s32(v.0[I], vdupq_n_s32(-(N as i32)))))
    }

    #[inline(always)]
    fn shift_mask(self, v: Bytes, shift: i32, mask: u8) -> Bytes {
        Bytes(each!(I => vandq_u8(vshlq_u8(v.0[I], vdupq_n_s8(-shift as i8)), vdupq_n_u8(mask))))
    }

    #[inline(always)]
    fn sub_bytes(self, v: Bytes, less: u8) -> Bytes {
        Bytes(each!(I => vsubq_u8(v.0[I], vdupq_n_u8(less))))
    }

    #[inline(always)]
    fn or_b(self, a: Bytes, b: Bytes) -> Bytes {
        Bytes(each!(I => vorrq_u8(a.0[I], b.0[I])))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], v: Bytes) -> Bytes {
        let table = intrinsic!(vld1q_u8(table.as_ptr()));
        Bytes(each!(I => vqtbl1q_u8(table, v.0[I])))
    }

    #[inline(always)]
    unsafe fn dots<const N: usize, const R: usize>(
        self,
        width: CodeWidth,
        codes: &[Bytes; N],
        (acts, row_bytes): (*const u8, usize),
        init: [Ints; R],
    ) -> [Ints; R] {
        let mut sums = init;
        let mut r = 0;
        while r < R {
            sums[r] = Ints(each!(I => {
                let mut quarter = [codes[0].0[I]; N];
                let mut n = 1;
                while n < N {
                    quarter[n] = codes[n].0[I];
                    n += 1;
                }
                dot_quarter(width, &quarter, acts.add(r * row_bytes), sums[r].0[I])
            }));
            r += 1;
        }
        sums
    }
}
