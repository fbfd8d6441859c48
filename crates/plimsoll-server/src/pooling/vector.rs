//! Arithmetic on embeddings: normalization, cosine and base64. Sums run in double precision, in order.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Scales to length 1; an all-zero vector stays zero.
pub(super) fn normalize(x: &mut [f32]) {
    let length = dot(x, x).sqrt();
    if length > 0.0 {
        x.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

/// Returns the cosine of the angle between two embeddings; 0 where one is zero.
pub(super) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { dot(a, b) / lengths } else { 0.0 }
}

/// 1 / (1 + e⁻ˣ).
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns little-endian f32s as base64, OpenAI's `encoding_format: base64`.
pub(super) fn base64(x: &[f32]) -> String {
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_angles() {
        let mut x = [3.0, -4.0];
        normalize(&mut x);
        assert_eq!(x, [0.6, -0.8]);
        let mut zero = [0.0, 0.0];
        normalize(&mut zero);
        assert_eq!(zero, [0.0, 0.0]);
        assert_eq!(cosine(&zero, &x), 0.0);
        assert!((cosine(&[1.0, 1.0], &[2.0, 2.0]) - 1.0).abs() < 1e-12);
        assert!((cosine(&[1.0, 0.0], &[0.0, 5.0])).abs() < 1e-12);
        assert_eq!(sigmoid(0.0), 0.5);
    }

    #[test]
    fn base64_is_little_endian_floats() {
        assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64(&[]), "");
    }
}
