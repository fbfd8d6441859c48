//! The activation functions.

/// The activation between the gate and the up projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU through its tanh approximation.
    GeluTanh,
    /// GELU through the error function.
    Gelu,
    /// `x * sigmoid(1.702 * x)`.
    GeluQuick,
    /// `min(x, 7) * sigmoid(1.702 * min(x, 7))`, multiplied with the up projection clamped to ±7, plus 1: gpt-oss.
    ClampedSwish,
    /// `max(x, 0)²`.
    ReluSquared,
    /// `tanh(x)`, of a classifier.
    Tanh,
}
