//! Elementary functions against double precision, and every instruction set against the portable one.

use super::*;
use crate::isa::Kernel;
use crate::simd::LANES;
use crate::testing::{Random, bits, isas};

/// Units in the last place between `value` and the exact `reference`, in units of the float nearest to it.
fn ulps(value: f32, reference: f64) -> f64 {
    let nearest = reference as f32;
    if nearest.is_infinite() || nearest.is_nan() {
        return if bits(&[value]) == bits(&[nearest]) { 0.0 } else { f64::INFINITY };
    }
    let step = f64::from(f32::from_bits(nearest.abs().to_bits() + 1)) - f64::from(nearest.abs());
    (f64::from(value) - reference).abs() / step
}

#[derive(Clone, Copy, Debug)]
enum Function {
    Exp,
    Exp2Rough,
    Ln,
    Tanh,
    Erf,
    Sigmoid,
    SigmoidRough,
    Softplus,
    GeluTanh,
    GeluTanhRough,
    GeluErf,
}

const ALL: [Function; 11] = [
    Function::Exp,
    Function::Exp2Rough,
    Function::Ln,
    Function::Tanh,
    Function::Erf,
    Function::Sigmoid,
    Function::SigmoidRough,
    Function::Softplus,
    Function::GeluTanh,
    Function::GeluTanhRough,
    Function::GeluErf,
];

struct Apply<'a> {
    function: Function,
    x: &'a [f32],
}

impl Kernel for Apply<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.x.len());
        for x in self.x.chunks(LANES) {
            let v = s.load_part(x, 1.0);
            let y = match self.function {
                Function::Exp => exp(s, v),
                Function::Exp2Rough => exp2_rough(s, v),
                Function::Ln => ln(s, v),
                Function::Tanh => tanh(s, v),
                Function::Erf => erf(s, v),
                Function::Sigmoid => sigmoid(s, v),
                Function::SigmoidRough => sigmoid_rough(s, v),
                Function::Softplus => softplus(s, v),
                Function::GeluTanh => gelu_tanh(s, v),
                Function::GeluTanhRough => gelu_tanh_rough(s, v),
                Function::GeluErf => gelu_erf(s, v),
            };
            out.extend_from_slice(&s.to_array(y)[..x.len()]);
        }
        out
    }
}

/// A series that converges for all x, summed in double precision: 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (2n+1)!!.
fn erf_reference(x: f64) -> f64 {
    if x.abs() > 5.5 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI
}

fn worst(function: Function, x: &[f32], reference: impl Fn(f64) -> f64) -> (f64, f32) {
    let y = crate::Isa::detect().run(Apply { function, x });
    let error = |(x, y): (&f32, &f32)| (ulps(*y, reference(f64::from(*x))), *x);
    x.iter().zip(&y).map(error).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

fn grid(low: f32, high: f32, n: usize) -> Vec<f32> {
    (0..=n).map(|i| low + (high - low) * (i as f32 / n as f32)).collect()
}

#[test]
fn errors_are_a_few_units_in_the_last_place() {
    let check = |function: Function, x: &[f32], reference: fn(f64) -> f64, limit: f64| {
        let (error, x) = worst(function, x, reference);
        println!("{function:?}: {error:.2} ulp at {x}");
        assert!(error <= limit, "{function:?}({x}) is {error} ulp off");
    };
    check(Function::Exp, &grid(-105.0, 89.5, 2_000_000), f64::exp, 1.5);
    check(Function::Exp, &grid(-1.0, 1.0, 1_000_000), f64::exp, 1.5);
    // Sixty of them are seven millionths, or less.
    check(Function::Exp2Rough, &grid(-126.0, 0.0, 2_000_000), f64::exp2, 60.0);
    check(Function::Ln, &grid(1e-3, 40.0, 1_000_000), f64::ln, 1.5);
    check(Function::Ln, &grid(1.0, 3e38, 1_000_000), f64::ln, 1.5);
    check(Function::Tanh, &grid(-12.0, 12.0, 1_000_000), f64::tanh, 2.0);
    check(Function::Tanh, &grid(-0.7, 0.7, 1_000_000), f64::tanh, 2.0);
    check(Function::Erf, &grid(-7.0, 7.0, 200_000), erf_reference, 3.0);
    check(Function::Sigmoid, &grid(-80.0, 80.0, 1_000_000), |x| 1.0 / (1.0 + (-x).exp()), 2.5);
    check(Function::SigmoidRough, &grid(-80.0, 80.0, 1_000_000), |x| 1.0 / (1.0 + (-x).exp()), 120.0);
    check(Function::Softplus, &grid(-80.0, 40.0, 1_000_000), |x| x.exp().ln_1p(), 2.5);
}

#[test]
fn geluses_follow_their_definitions() {
    let x = grid(-12.0, 12.0, 100_000);
    let tanh_form = crate::Isa::detect().run(Apply { function: Function::GeluTanh, x: &x });
    let erf_form = crate::Isa::detect().run(Apply { function: Function::GeluErf, x: &x });
    let rough = crate::Isa::detect().run(Apply { function: Function::GeluTanhRough, x: &x });
    let off = tanh_form.iter().zip(&rough).map(|(exact, rough)| (exact - rough).abs() / exact.abs().max(1e-30));
    assert!(off.fold(0.0, f32::max) < 2e-5);
    for ((x, tanh_form), erf_form) in x.iter().zip(tanh_form).zip(erf_form) {
        let x = f64::from(*x);
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        let reference = 0.5 * x * (1.0 + inner.tanh());
        assert!((f64::from(tanh_form) - reference).abs() <= 1e-6 * x.abs().max(1e-3), "{x} {tanh_form} {reference}");
        let reference = 0.5 * x * (1.0 + erf_reference(x * std::f64::consts::FRAC_1_SQRT_2));
        assert!((f64::from(erf_form) - reference).abs() <= 3e-7 * x.abs().max(1e-3), "{x} {erf_form} {reference}");
    }
}

#[test]
fn limits_are_what_they_should_be() {
    let x = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 0.0, -0.0, -1e30, 1e30];
    let run = |function| crate::Isa::Portable.run(Apply { function, x: &x });
    assert_eq!(bits(&run(Function::Exp)), bits(&[0.0, f32::INFINITY, f32::NAN, 1.0, 1.0, 0.0, f32::INFINITY]));
    let rough = run(Function::Exp2Rough);
    assert_eq!(bits(&[rough[0], rough[2], rough[3], rough[5]]), bits(&[0.0, f32::NAN, 1.0, 0.0]));
    assert_eq!(crate::Isa::Portable.run(Apply { function: Function::Exp2Rough, x: &[-151.0; 3] }), [0.0; 3]);
    assert_eq!(bits(&run(Function::Tanh)), bits(&[-1.0, 1.0, f32::NAN, 0.0, 0.0, -1.0, 1.0]));
    assert_eq!(bits(&run(Function::Erf)), bits(&[-1.0, 1.0, f32::NAN, 0.0, -0.0, -1.0, 1.0]));
    let softplus = run(Function::Softplus);
    assert_eq!(bits(&softplus[..3]), bits(&[0.0, f32::INFINITY, f32::NAN]));
    assert_eq!(bits(&softplus[5..]), bits(&[0.0, 1e30]));
    assert_eq!(bits(&run(Function::Sigmoid)), bits(&[0.0, 1.0, f32::NAN, 0.5, 0.5, 0.0, 1.0]));
    let rough = run(Function::SigmoidRough);
    assert_eq!(bits(&[rough[0], rough[2], rough[5]]), bits(&[0.0, f32::NAN, 0.0]));
    assert!([rough[1], rough[6], 2.0 * rough[3], 2.0 * rough[4]].iter().all(|y| ulps(*y, 1.0) <= 1.0), "{rough:?}");
}

#[test]
fn instruction_sets_agree() {
    let mut random = Random::new(4);
    let mut x = random.any(20_000);
    x.extend(random.awkward(5_000));
    x.extend(random.floats(20_000).iter().map(|x| x * 20.0));
    let below: Vec<f32> = x.iter().map(|x| -x.abs()).collect();
    for function in ALL {
        // The rough one is for these.
        let x = if let Function::Exp2Rough = function { &below } else { &x };
        let expected = bits(&crate::Isa::Portable.run(Apply { function, x }));
        for isa in isas() {
            let actual = bits(&isa.run(Apply { function, x }));
            let differs = actual.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differs.map(|i| x[i]), None, "{isa} {function:?}");
        }
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    struct Round<'a>(&'a [f32]);
    impl Kernel for Round<'_> {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [f32; LANES] {
            s.to_array(s.float(round(s, s.load_part(self.0, 0.0))))
        }
    }
    for isa in isas() {
        let y = isa.run(Round(&[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, 0.49999997, 127.0, -127.0]));
        assert_eq!(y[..10], [0.0, 2.0, 2.0, 0.0, -2.0, 126.0, -126.0, 0.0, 127.0, -127.0], "{isa}");
    }
}
