//! The row operations from outside: against double precision, over ragged lengths, and every instruction set against the
//! portable one.

use plimsoll_kernels::*;
use proptest::prelude::*;

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

fn row(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![8 => -8.0f32..8.0, 1 => Just(0.0), 1 => Just(-1e-40), 1 => -1e4f32..1e4];
    prop::collection::vec(value, len)
}

/// Runs `op` on a copy of `x` for every instruction set; the results must agree. Returns the common one.
fn agreed(x: &[f32], op: impl Fn(Isa, &mut [f32])) -> Vec<f32> {
    let mut expected: Option<Vec<f32>> = None;
    for isa in isas() {
        let mut y = x.to_vec();
        op(isa, &mut y);
        let expected = expected.get_or_insert_with(|| y.clone());
        assert_eq!(bits(&y), bits(expected), "{isa}");
    }
    expected.unwrap()
}

fn close(actual: &[f32], expected: impl IntoIterator<Item = f64>, relative: f64) {
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(*actual) - expected).abs();
        assert!(error <= relative * expected.abs().max(1e-30), "[{index}] {actual} instead of {expected}");
    }
}

proptest! {
    #[test]
    fn norms(x in row(1..300), seed in 0u32..100) {
        let w: Vec<f32> = (0..x.len()).map(|i| ((i as u32 * 7 + seed) % 13) as f32 * 0.3 - 1.0).collect();
        let b: Vec<f32> = w.iter().map(|w| 0.5 - w).collect();
        let n = x.len() as f64;
        let square = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n;
        let y = agreed(&x, |isa, y| { let x = y.to_vec(); rms_norm(isa, y, &x, &w, 1e-5) });
        let factor = 1.0 / (square + 1e-5).sqrt();
        close(&y, x.iter().zip(&w).map(|(x, w)| f64::from(*x) * factor * f64::from(*w)), 1e-6);

        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
        let y = agreed(&x, |isa, y| { let x = y.to_vec(); layer_norm(isa, y, &x, &w, &b, 1e-5) });
        for (i, y) in y.iter().enumerate() {
            let normed = (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt();
            let expected = normed * f64::from(w[i]) + f64::from(b[i]);
            prop_assert!((f64::from(*y) - expected).abs() <= 1e-4, "{} {}", y, expected);
        }
        let bare = agreed(&x, |isa, y| { let x = y.to_vec(); layer_norm(isa, y, &x, &w, &[], 1e-5) });
        let zero = vec![0.0; x.len()];
        let biased = agreed(&x, |isa, y| { let x = y.to_vec(); layer_norm(isa, y, &x, &w, &zero, 1e-5) });
        prop_assert!(bare.iter().zip(&biased).all(|(a, b)| a == b));
    }

    #[test]
    fn elementwise(x in row(1..100)) {
        let other: Vec<f32> = x.iter().rev().map(|x| x * 0.5 + 1.0).collect();
        let y = agreed(&x, |isa, y| add(isa, y, &other));
        prop_assert!(y.iter().zip(x.iter().zip(&other)).all(|(y, (a, b))| *y == a + b));
        let y = agreed(&x, |isa, y| mul(isa, y, &other));
        prop_assert!(y.iter().zip(x.iter().zip(&other)).all(|(y, (a, b))| *y == a * b));
        let y = agreed(&x, |isa, y| scale(isa, y, 0.3));
        prop_assert!(y.iter().zip(&x).all(|(y, x)| *y == x * 0.3));
        let y = agreed(&x, |isa, y| softcap(isa, y, 30.0));
        close(&y, x.iter().map(|x| 30.0 * (f64::from(*x) / 30.0).tanh()), 1e-6);
    }

    #[test]
    fn activations(x in prop::collection::vec(-20.0f32..20.0, 1..100)) {
        let up: Vec<f32> = x.iter().rev().copied().collect();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let known: [(Activation, &dyn Fn(f64) -> f64); 5] = [
            (Activation::Silu, &|x| x * sigmoid(x)),
            (Activation::GeluQuick, &|x| x * sigmoid(1.702 * x)),
            (Activation::Sigmoid, &sigmoid),
            (Activation::Softplus, &|x| x.exp().ln_1p()),
            (Activation::ReluSquared, &|x| x.max(0.0) * x.max(0.0)),
        ];
        for (activation, reference) in known {
            let y = agreed(&x, |isa, y| activate(isa, activation, y));
            close(&y, x.iter().map(|x| reference(f64::from(*x))), 4e-6);
        }
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
            let alone = agreed(&x, |isa, y| activate(isa, activation, y));
            let gated = agreed(&x, |isa, y| glu(isa, activation, y, &up));
            prop_assert!(gated.iter().zip(alone.iter().zip(&up)).all(|(g, (a, u))| *g == a * u));
        }
    }

    #[test]
    fn rotation(heads in 1usize..4, half in 1usize..40, rest in 0usize..9, pairs: bool, seed in 0u32..1000) {
        let head_dim = 2 * half + rest;
        let x: Vec<f32> = (0..heads * head_dim).map(|i| ((i as f32 + seed as f32) * 0.37).sin()).collect();
        let angles: Vec<f32> = (0..half).map(|i| i as f32 * 0.21 + seed as f32).collect();
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        let style = if pairs { RopeStyle::Pairs } else { RopeStyle::Halves };
        let y = agreed(&x, |isa, y| rope(isa, style, y, head_dim, &cos, &sin));
        let mut expected = x.clone();
        for head in 0..heads {
            for i in 0..half {
                let (a, b) = if pairs { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let (a, b) = (head * head_dim + a, head * head_dim + b);
                expected[a] = x[a].mul_add(cos[i], -(x[b] * sin[i]));
                expected[b] = x[b].mul_add(cos[i], x[a] * sin[i]);
            }
        }
        prop_assert_eq!(bits(&y), bits(&expected));
    }

    #[test]
    fn probabilities(x in row(1..500)) {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = x.iter().map(|x| (f64::from(*x) - f64::from(max)).exp()).sum();
        let y = agreed(&x, softmax);
        for (x, y) in x.iter().zip(y) {
            let expected = (f64::from(*x) - f64::from(max)).exp() / sum;
            prop_assert!((f64::from(y) - expected).abs() <= 1e-5 * expected + 1e-37, "{} {}", y, expected);
        }
    }
}
