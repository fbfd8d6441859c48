//! Elementwise operations on slices: each element depends on the elements at its own index only.

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// A nonlinearity between two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// x · sigmoid(1.702 x).
    GeluQuick,
    /// 1 / (1 + e⁻ˣ).
    Sigmoid,
    /// tanh x.
    Tanh,
    /// min(x, 7) · sigmoid(1.702 · min(x, 7)), and as a gate times (up clamped to ±7) + 1: gpt-oss.
    ClampedSwish,
    /// max(x, 0)²: Nemotron-H.
    ReluSquared,
    /// ln(1 + eˣ).
    Softplus,
}

impl Activation {
    #[inline(always)]
    pub(crate) fn apply<S: Simd>(self, s: S, x: S::F) -> S::F {
        match self {
            Activation::Silu => math::swish(s, x, x),
            Activation::GeluTanh => math::gelu_tanh(s, x),
            Activation::GeluErf => math::gelu_erf(s, x),
            Activation::GeluQuick => math::swish(s, x, s.mul(x, s.splat(1.702))),
            Activation::Sigmoid => math::sigmoid(s, x),
            Activation::Tanh => math::tanh(s, x),
            Activation::ClampedSwish => {
                let x = s.min(x, s.splat(CLAMP));
                math::swish(s, x, s.mul(x, s.splat(1.702)))
            }
            Activation::ReluSquared => {
                let x = s.max(x, s.zero());
                s.mul(x, x)
            }
            Activation::Softplus => math::softplus(s, x),
        }
    }

    /// Returns the factor of the activated gate.
    #[inline(always)]
    pub(crate) fn factor<S: Simd>(self, s: S, up: S::F) -> S::F {
        match self {
            Activation::ClampedSwish => s.add(s.max(s.min(up, s.splat(CLAMP)), s.splat(-CLAMP)), s.splat(1.0)),
            _ => up,
        }
    }

    /// [`Self::apply`] to at least five digits, for rows that are then rounded to bfloat16.
    #[inline(always)]
    pub(crate) fn apply_rough<S: Simd>(self, s: S, x: S::F) -> S::F {
        match self {
            Activation::Silu => s.mul(x, math::sigmoid_rough(s, x)),
            Activation::GeluTanh => math::gelu_tanh_rough(s, x),
            Activation::GeluQuick => s.mul(x, math::sigmoid_rough(s, s.mul(x, s.splat(1.702)))),
            Activation::Sigmoid => math::sigmoid_rough(s, x),
            _ => self.apply(s, x),
        }
    }
}

/// Bound of [`Activation::ClampedSwish`].
const CLAMP: f32 = 7.0;

/// An operation on an element of `out` and the element of `x` at its index.
#[derive(Clone, Copy)]
enum Op {
    Add,
    Mul,
    Glu(Activation),
    GluRough(Activation),
    Activate(Activation),
    Scale(f32),
    Softcap(f32),
}

/// out = op(out, x); for operations of one operand, `x` is empty.
struct Elementwise<'a> {
    op: Op,
    out: &'a mut [f32],
    x: &'a [f32],
}

impl Kernel for Elementwise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (index, out) in self.out.chunks_mut(LANES).enumerate() {
            let old = s.load_part(out, 0.0);
            let x = match self.op {
                Op::Add | Op::Mul | Op::Glu(_) | Op::GluRough(_) => {
                    s.load_part(&self.x[index * LANES..][..out.len()], 0.0)
                }
                Op::Activate(_) | Op::Scale(_) | Op::Softcap(_) => old,
            };
            let new = match self.op {
                Op::Add => s.add(old, x),
                Op::Mul => s.mul(old, x),
                Op::Glu(activation) => s.mul(activation.apply(s, old), activation.factor(s, x)),
                Op::GluRough(activation) => s.mul(activation.apply_rough(s, old), activation.factor(s, x)),
                Op::Activate(activation) => activation.apply(s, old),
                Op::Scale(factor) => s.mul(old, s.splat(factor)),
                Op::Softcap(cap) => s.mul(s.splat(cap), math::tanh(s, s.div(old, s.splat(cap)))),
            };
            s.store_part(out, new);
        }
    }
}

fn pair(isa: Isa, op: Op, out: &mut [f32], x: &[f32]) {
    assert_eq!(out.len(), x.len(), "elements of two operands");
    isa.run(Elementwise { op, out, x });
}

fn alone(isa: Isa, op: Op, out: &mut [f32]) {
    isa.run(Elementwise { op, out, x: &[] });
}

/// out = out + x. Panics if lengths differ.
pub fn add(isa: Isa, out: &mut [f32], x: &[f32]) {
    pair(isa, Op::Add, out, x);
}

/// out = out · x. Panics if lengths differ.
pub fn mul(isa: Isa, out: &mut [f32], x: &[f32]) {
    pair(isa, Op::Mul, out, x);
}

/// out = out · factor.
pub fn scale(isa: Isa, out: &mut [f32], factor: f32) {
    alone(isa, Op::Scale(factor), out);
}

/// gate = activation(gate) · up. Panics if lengths differ.
pub fn glu(isa: Isa, activation: Activation, gate: &mut [f32], up: &[f32]) {
    pair(isa, Op::Glu(activation), gate, up);
}

/// [`glu`] with an activation to five digits, for rows in bfloat16, as [`crate::linear_glu`] computes it.
pub fn glu_rough(isa: Isa, activation: Activation, gate: &mut [f32], up: &[f32]) {
    pair(isa, Op::GluRough(activation), gate, up);
}

/// out = activation(out).
pub fn activate(isa: Isa, activation: Activation, out: &mut [f32]) {
    alone(isa, Op::Activate(activation), out);
}

/// out = cap · tanh(out / cap).
pub fn softcap(isa: Isa, out: &mut [f32], cap: f32) {
    alone(isa, Op::Softcap(cap), out);
}
