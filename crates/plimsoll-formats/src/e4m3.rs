//! FP8 numbers of the form E4M3: a sign, 4 bits of exponent, 3 of mantissa, NaN and no infinities.

use half::f16;

/// The value of an E4M3 number, without its scale.
pub(crate) fn value(number: u8) -> f32 {
    // The same bits seven places further left, as a binary16, are 2^-8 times the value.
    f16::from_bits(u16::from(number & 0x80) << 8 | u16::from(number & 0x7F) << 7).to_f32() * 256.0
}

#[cfg(test)]
mod tests {
    use super::value;

    #[test]
    fn numbers_have_the_values_of_the_definition() {
        for number in (0..=255u8).filter(|number| number & 0x7F != 0x7F) {
            let (exponent, mantissa) = (i32::from(number >> 3 & 15), f32::from(number & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f32.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            let want = if number < 128 { magnitude } else { -magnitude };
            assert_eq!(value(number).to_bits(), want.to_bits(), "{number:#04x}");
        }
        assert_eq!((value(0x7E), value(0x01)), (448.0, 1.0 / 512.0));
    }
}
