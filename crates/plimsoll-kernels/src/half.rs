//! Half precision and bfloat16 to and from `f32`, exactly as the hardware converts them: round to nearest even, subnormals
//! kept, NaN stays NaN.

/// The value of an IEEE half float; exact.
#[inline(always)]
pub fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let exponent = u32::from(half >> 10) & 0x1f;
    let mantissa = u32::from(half) & 0x3ff;
    let magnitude = match exponent {
        // Subnormal: the mantissa counts units of 2⁻²⁴, which a float holds exactly.
        0 => (mantissa as f32 * f32::from_bits(103 << 23)).to_bits(),
        31 if mantissa == 0 => 0x7f80_0000,
        // The hardware makes every NaN quiet.
        31 => 0x7fc0_0000 | mantissa << 13,
        _ => (exponent + 112) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// The nearest IEEE half float, ties to even; beyond 65,504 it is infinite.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let half = if magnitude > 0x7f80_0000 {
        0x7e00 | (magnitude >> 13) as u16 & 0x3ff
    } else if magnitude >= 0x4780_0000 {
        // 2¹⁶ and above; what rounds up to it from below overflows by itself in the last branch.
        0x7c00
    } else if magnitude < 0x3880_0000 {
        // Below 2⁻¹⁴: adding 0.5 leaves the count of 2⁻²⁴ units, rounded, in the low bits.
        (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits()) as u16
    } else {
        let odd = magnitude >> 13 & 1;
        ((magnitude + 0xfff + odd - (112 << 23)) >> 13) as u16
    };
    sign | half
}

/// The value of a bfloat16; exact.
#[inline(always)]
pub fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// The nearest bfloat16, ties to even.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// 2^(e − 128): half of what the exponent byte of an MX block says.
pub fn e8m0_half_to_f32(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// Half of the unsigned number of 4 bits of exponent and 3 of mantissa in the lower seven bits. None of them is NaN.
pub fn ue4m3_half_to_f32(bits: u8) -> f32 {
    // As the bits of a half float it is 2⁻⁸ times as much.
    f16_to_f32(u16::from(bits & 0x7f) << 7) * 128.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_round_trip() {
        for half in 0..=u16::MAX {
            let value = f16_to_f32(half);
            if value.is_nan() {
                assert!(f16_to_f32(f32_to_f16(value)).is_nan());
            } else {
                assert_eq!(f32_to_f16(value), half, "{half:#x} {value}");
            }
            let value = bf16_to_f32(half);
            if !value.is_nan() {
                assert_eq!(f32_to_bf16(value), half);
            }
        }
    }

    #[test]
    fn bytes_of_scales_are_what_their_formats_say() {
        assert_eq!([0, 1, 2, 128].map(e8m0_half_to_f32), [-128, -127, -126, 0].map(|n| 2f64.powi(n) as f32));
        assert_eq!(e8m0_half_to_f32(255), 2f32.powi(127));
        // The least, the greatest subnormal, one, the greatest.
        let values = [0, 1, 7, 0x38, 0x7e, 0x7f].map(ue4m3_half_to_f32);
        assert_eq!(values, [0.0, 1.0 / 1024.0, 7.0 / 1024.0, 0.5, 224.0, 240.0]);
    }

    #[test]
    fn halves_round_to_nearest_even() {
        assert_eq!(f32_to_f16(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(f32_to_f16(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(f32_to_f16(65_519.0), 0x7bff);
        assert_eq!(f32_to_f16(65_520.0), 0x7c00);
        assert_eq!(f32_to_f16(-1e9), 0xfc00);
        assert_eq!(f32_to_f16(2f32.powi(-25)), 0);
        assert_eq!(f32_to_f16(1.5 * 2f32.powi(-25)), 1);
        assert_eq!(f32_to_bf16(1.0 + 1.0 / 256.0), 0x3f80);
        assert_eq!(f32_to_bf16(1.0 + 3.0 / 256.0), 0x3f82);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn halves_convert_as_the_hardware_does() {
        if !crate::Isa::Avx2.available() {
            return;
        }
        #[target_feature(enable = "f16c")]
        fn hardware(value: f32) -> u16 {
            use std::arch::x86_64::*;
            _mm_extract_epi16::<0>(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(value))) as u16
        }
        let mut bits = 0u32;
        loop {
            let value = f32::from_bits(bits);
            // SAFETY: AVX2 is only available here together with F16C.
            let expected = unsafe { hardware(value) };
            assert_eq!(f32_to_f16(value), expected, "{value} {bits:#x}");
            match bits.checked_add(40_503) {
                Some(next) => bits = next,
                None => break,
            }
        }
    }
}
