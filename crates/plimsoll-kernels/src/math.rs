//! Elementary functions from multiplications, additions and bit moves only, so that they give the same bits on every
//! instruction set. Polynomials are Chebyshev fits of our own; the comments give their errors. No slices here.

use crate::simd::{ROUNDER, Simd};

const LN2_HIGH: f32 = 0.693_145_75;
const LN2_LOW: f32 = 1.428_606_8e-6;

/// `c[0] · x^(n−1) + … + c[n−1]` by Horner's rule.
#[inline(always)]
fn poly<S: Simd, const N: usize>(s: S, x: S::F, coefficients: [f32; N]) -> S::F {
    let mut sum = s.splat(coefficients[0]);
    let mut i = 1;
    while i < N {
        sum = s.fma(sum, x, s.splat(coefficients[i]));
        i += 1;
    }
    sum
}

/// The nearest integers, ties to even, for |x| < 2²²; for NaN some integer.
#[inline(always)]
pub(crate) fn round<S: Simd>(s: S, x: S::F) -> S::I {
    let rounder = s.splat(ROUNDER);
    s.sub_i(s.bits(s.add(x, rounder)), s.bits(rounder))
}

/// eˣ within 2 ulp; subnormal results included, 0 below −104, ∞ above 88.73, NaN for NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // The order of operands lets NaN through the clamps.
    let x = s.max(s.splat(-104.5), s.min(s.splat(89.0), x));
    let rounder = s.splat(ROUNDER);
    let shifted = s.fma(x, s.splat(std::f32::consts::LOG2_E), rounder);
    let n = s.sub(shifted, rounder);
    let r = s.fma(n, s.splat(-LN2_LOW), s.fma(n, s.splat(-LN2_HIGH), x));
    // (eʳ − 1 − r) / r² on |r| ≤ ln 2 / 2, within 6.5e-8.
    let p = poly(s, r, [0.001_392_617_6, 0.008_363_173, 0.041_666_556, 0.166_665_77, 0.5]);
    let e = s.add(s.fma(s.mul(r, r), p, r), s.splat(1.0));
    // Two factors of about 2^(n/2): their product may leave the range of normal numbers, they do not.
    let n = s.sub_i(s.bits(shifted), s.bits(rounder));
    let half = s.sra_i::<1>(n);
    let power = s.as_floats(s.shl_i::<23>(s.add_i(half, s.splat_i(127))));
    let rest = s.as_floats(s.shl_i::<23>(s.add_i(s.sub_i(n, half), s.splat_i(127))));
    s.mul(s.mul(e, power), rest)
}

/// 2ˣ for x ≤ 0, for results that are rounded to a few digits: relative error of a few millionths, 0 below −150, NaN
/// for NaN.
#[inline(always)]
pub(crate) fn exp2_rough<S: Simd>(s: S, x: S::F) -> S::F {
    // 2ʳ on 0 ≤ r ≤ 1, within 3e-6.
    let p = [0.013_426_685, 0.052_242_473, 0.241_280_2, 0.693_044_84, 1.0];
    s.scale(poly(s, s.fraction(x), p), x)
}

/// ln x within 2 ulp for normal positive x; undefined for other x.
#[inline(always)]
pub(crate) fn ln<S: Simd>(s: S, x: S::F) -> S::F {
    // x = 2ⁿ · (1 + f) with 1 + f in √½..√2.
    let offset = s.splat_i(0x3f35_04f3);
    let bits = s.sub_i(s.bits(x), offset);
    let n = s.float(s.sra_i::<23>(bits));
    let mantissa = s.as_floats(s.add_i(s.and_i(bits, s.splat_i(0x7f_ffff)), offset));
    let f = s.sub(mantissa, s.splat(1.0));
    // (ln(1 + f) − f) / f² within 3.2e-8.
    let p = poly(
        s,
        f,
        [
            -0.076_736_42,
            0.127_226_73,
            -0.131_275_56,
            0.142_048_56,
            -0.166_266_45,
            0.200_012_34,
            -0.250_007_8,
            0.333_333_3,
            -0.499_999_98,
        ],
    );
    let low = s.fma(n, s.splat(LN2_LOW), s.mul(s.mul(f, f), p));
    s.fma(n, s.splat(LN2_HIGH), s.add(f, low))
}

/// tanh x within 2 ulp.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let size = s.abs(x);
    let square = s.mul(x, x);
    // (tanh x − x) / x³ in x² up to 0.65², within 2.5e-9.
    let p =
        poly(s, square, [0.002_214_902_7, -0.008_272_457, 0.021_746_187, -0.053_956_35, 0.133_332_9, -0.333_333_34]);
    let small = s.fma(s.mul(square, x), p, x);
    let e = exp(s, s.add(size, size));
    let one = s.splat(1.0);
    let large = s.sub(one, s.div(s.splat(2.0), s.add(e, one)));
    let sign = s.and_i(s.bits(x), s.splat_i(i32::MIN));
    let large = s.as_floats(s.or_i(s.bits(large), sign));
    // NaN compares false and takes the second branch, which is NaN too.
    s.select_lt(size, s.splat(0.625), small, large)
}

/// The error function within 4 ulp.
#[inline(always)]
pub(crate) fn erf<S: Simd>(s: S, x: S::F) -> S::F {
    let size = s.abs(x);
    let square = s.mul(x, x);
    // erf(x) / x in x² up to 1, within 1.3e-9.
    let p = poly(
        s,
        square,
        [
            7.875_875e-5,
            -0.000_801_686_43,
            0.005_189_087_4,
            -0.026_854_213,
            0.112_835_95,
            -0.376_126_26,
            std::f32::consts::FRAC_2_SQRT_PI,
        ],
    );
    let small = s.mul(x, p);
    // erfc(x) · eˣ² / t in t = 1 / (1 + x/2), x of 0.98..4.2, within 5.2e-9; beyond that erfc is less than half an ulp.
    let one = s.splat(1.0);
    let far = s.max(s.splat(0.98), s.min(s.splat(4.2), size));
    let t = s.div(one, s.fma(far, s.splat(0.5), one));
    let q =
        poly(s, t, [0.093_350_74, -0.380_875_6, 0.430_149_14, 0.004_239_372, 0.295_938_9, 0.274_488_2, 0.282_592_03]);
    let rest = s.mul(s.mul(t, q), exp(s, s.sub(s.zero(), s.mul(far, far))));
    let sign = s.and_i(s.bits(x), s.splat_i(i32::MIN));
    let large = s.as_floats(s.or_i(s.bits(s.sub(one, rest)), sign));
    s.select_lt(size, one, small, large)
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.zero(), x))))
}

/// ln(1 + eˣ); beyond 20, where the two are the same float, x.
#[inline(always)]
pub(crate) fn softplus<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    let e = exp(s, x);
    // 1 + e rounds away part of a small e. The lost part, divided by the sum (the logarithm's derivative), is added to the result.
    let sum = s.add(one, e);
    let lost = s.sub(e, s.sub(sum, one));
    let log = s.add(ln(s, sum), s.div(lost, sum));
    s.select_lt(s.splat(20.0), x, x, log)
}

/// x · sigmoid(scale · x): SiLU for 1, the tanh form of GELU for √(8/π)-scaled arguments, by one division.
#[inline(always)]
pub(crate) fn swish<S: Simd>(s: S, x: S::F, gate: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(x, s.add(one, exp(s, s.sub(s.zero(), gate))))
}

/// 1 / (1 + e⁻ˣ) for results that are rounded to a few digits: relative error of a hundred-thousandth while the result
/// is a normal number.
#[inline(always)]
pub(crate) fn sigmoid_rough<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    let below = s.as_floats(s.or_i(s.bits(x), s.splat_i(i32::MIN)));
    let e = exp2_rough(s, s.mul(below, s.splat(std::f32::consts::LOG2_E)));
    // 1 / d on 1 ≤ d ≤ 2 in −d, within 1/99 of itself, and what Newton makes of it, twice.
    let minus = s.sub(s.splat(-1.0), e);
    let mut inverse = poly(s, minus, [32.0 / 99.0, 144.0 / 99.0, 210.0 / 99.0]);
    inverse = s.fma(inverse, s.fma(minus, inverse, one), inverse);
    inverse = s.fma(inverse, s.fma(minus, inverse, one), inverse);
    s.mul(s.select_lt(x, s.zero(), e, one), inverse)
}

/// The argument of the sigmoid in GELU's tanh form: √(8/π) · (x + 0.044715 · x³).
#[inline(always)]
fn gelu_gate<S: Simd>(s: S, x: S::F) -> S::F {
    s.mul(s.mul(x, s.splat(1.595_769)), s.fma(s.mul(x, x), s.splat(0.044_715), s.splat(1.0)))
}

/// 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), written as x · sigmoid of twice the argument of tanh.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    swish(s, x, gelu_gate(s, x))
}

/// GELU's tanh form, computed with [`sigmoid_rough`].
#[inline(always)]
pub(crate) fn gelu_tanh_rough<S: Simd>(s: S, x: S::F) -> S::F {
    s.mul(x, sigmoid_rough(s, gelu_gate(s, x)))
}

/// 0.5 · x · (1 + erf(x / √2)).
#[inline(always)]
pub(crate) fn gelu_erf<S: Simd>(s: S, x: S::F) -> S::F {
    let e = erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2)));
    s.mul(s.mul(x, s.splat(0.5)), s.add(e, s.splat(1.0)))
}

#[cfg(test)]
mod tests;
