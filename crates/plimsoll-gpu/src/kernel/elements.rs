//! Kernels in which every thread computes one element.

use super::sized;

/// ln(1 + eˣ).
pub(super) const SOFTPLUS: &str = "
fn softplus(x: f32) -> f32 {
    // ln(1 + e) = 2 artanh(e / (2 + e)), whose argument is 1/3 at most: the logarithm of drivers is not good enough near 1.
    let e = exp(-abs(x));
    let s = e / (2.0 + e);
    let t = s * s;
    var q = fma(t, 0.0769230769, 0.0909090909);
    q = fma(t, q, 0.1111111111);
    q = fma(t, q, 0.1428571429);
    q = fma(t, q, 0.2);
    q = fma(t, q, 0.3333333333);
    q = fma(t, q, 1.0);
    return max(x, 0.0) + 2.0 * s * q;
}
";

/// The hyperbolic tangent.
pub(super) const HYPERBOLIC: &str = "
fn hyperbolic(x: f32) -> f32 {
    // Beyond 15 it is 1 in single precision; exp would overflow.
    let e = exp(2.0 * clamp(x, -15.0, 15.0));
    return (e - 1.0) / (e + 1.0);
}
";

/// `x` and `y` are matrices of `count` elements.
pub const PLAIN: &[&str] = &["x", "y", "count", "act", "cap_f"];

/// A matrix of `count` elements, which are clamped between two finite bounds.
pub const CLAMP: &[&str] = &["x", "count", "low_f", "high_f"];

/// `count` elements of rows of `cols`. Rows of `width` elements, from `column` on, are those of `out` (it may be `x`), or those of `x` in
/// a kernel that takes columns. `by` is the operand for rows or columns: among the vectors, in the upload, or in the arena.
pub const BY_ROW: &[&str] = &["out", "x", "by", "cols", "count", "width", "column"];

/// Heads of `head_dim` elements, `heads` per row; the first `2 · half_dim` elements are rotated.
pub const ROPE: &[&str] = &["x", "angles", "heads", "head_dim", "half_dim", "count", "pairs"];

/// The functions that `act` selects, by its number in [`plimsoll_device::Activation`].
const ACTIVATIONS: &str = "
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(-x));
}
fn error_function(x: f32) -> f32 {
    // Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most.
    let a = abs(x);
    let t = 1.0 / fma(0.3275911, a, 1.0);
    var q = fma(1.061405429, t, -1.453152027);
    q = fma(q, t, 1.421413741);
    q = fma(q, t, -0.284496736);
    q = fma(q, t, 0.254829592);
    let e = 1.0 - q * t * exp(-a * a);
    return select(e, -e, x < 0.0);
}
fn activation(act: u32, x: f32) -> f32 {
    switch act {
        case 0u: { return x * sigmoid(x); }
        case 1u: { return 0.5 * x * (1.0 + hyperbolic(0.7978845608 * (x + 0.044715 * x * x * x))); }
        case 2u: { return 0.5 * x * (1.0 + error_function(x * 0.7071067812)); }
        case 3u: { return x * sigmoid(1.702 * x); }
        case 4u: { return hyperbolic(x); }
        case 5u: { return sigmoid(x); }
        case 7u: {
            let r = max(x, 0.0);
            return r * r;
        }
        case 8u: { return softplus(x); }
        default: {
            let c = min(x, 7.0);
            return c * sigmoid(1.702 * c);
        }
    }
}
";

fn activations() -> String {
    [SOFTPLUS, HYPERBOLIC, ACTIVATIONS].concat()
}

/// Returns a kernel that runs `body` with the element's number in `i`, for numbers below `p.count`.
pub(super) fn each(functions: &str, body: &str) -> String {
    each_of("p.count", functions, body)
}

/// Returns a kernel as [`each`], for `count` elements, an expression.
pub(super) fn each_of(count: &str, functions: &str, body: &str) -> String {
    let text = "$FUNCTIONS
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = (group.y * $WIDTHu + group.x) * $THREADSu + thread;
    if (i >= $COUNT) {
        return;
    }
    $BODY
}
";
    let text = text.replace("$FUNCTIONS", functions).replace("$COUNT", count);
    sized(&text.replace("$BODY", body))
}

pub(super) fn glu() -> String {
    // The experts of gpt-oss clamp the gated factor, too, and add 1.
    let body = "var up = arena[p.y + i];
    if (p.act == 6u) {
        up = clamp(up, -7.0, 7.0) + 1.0;
    }
    arena[p.x + i] = activation(p.act, arena[p.x + i]) * up;";
    each(&activations(), body)
}

pub(super) fn activate() -> String {
    each(&activations(), "arena[p.x + i] = activation(p.act, arena[p.x + i]);")
}

pub(super) fn add() -> String {
    each("", "arena[p.x + i] = arena[p.x + i] + arena[p.y + i];")
}

pub(super) fn fetch() -> String {
    each("", "arena[p.x + i] = bitcast<f32>(sent[p.y + i]);")
}

pub(super) fn softcap() -> String {
    each(HYPERBOLIC, "arena[p.x + i] = p.cap_f * hyperbolic(arena[p.x + i] / p.cap_f);")
}

pub(super) fn clamp() -> String {
    each("", "arena[p.x + i] = min(max(arena[p.x + i], p.low_f), p.high_f);")
}

pub(super) fn multiply() -> String {
    each("", "arena[p.x + i] = arena[p.x + i] * vectors[p.by + i % p.cols];")
}

/// `column` is the offset of the vector.
pub(super) fn add_rows() -> String {
    each("", "arena[p.x + i] = arena[p.x + i] + vectors[p.column + sent[p.by + i / p.cols] * p.cols + i % p.cols];")
}

pub(super) fn scale_rows() -> String {
    each("", "arena[p.x + i] = arena[p.x + i] * bitcast<f32>(sent[p.by + i / p.cols]);")
}

pub(super) fn scale_by() -> String {
    each("", "arena[p.x + i] = arena[p.x + i] * arena[p.by + i / p.cols];")
}

pub(super) fn add_gated() -> String {
    let body = "let gate = sigmoid(arena[p.by + i / p.cols]);
    arena[p.out + i] = fma(gate, arena[p.x + i], arena[p.out + i]);";
    each(&activations(), body)
}

pub(super) fn put() -> String {
    each("", "arena[p.out + i / p.cols * p.width + p.column + i % p.cols] = arena[p.x + i];")
}

pub(super) fn take() -> String {
    each("", "arena[p.out + i] = arena[p.x + i / p.cols * p.width + p.column + i % p.cols];")
}

pub(super) fn gather() -> String {
    let body = "let source = p.x + sent[p.by + i / p.cols] * p.cols;
    arena[p.out + i / p.cols * p.width + i % p.cols] = arena[source + i % p.cols];";
    each("", body)
}

pub(super) fn rope() -> String {
    let body = "let pair = i % p.half_dim;
    let head = i / p.half_dim;
    let row = p.angles + head / p.heads * 2u * p.half_dim;
    let cosine = arena[row + pair];
    let sine = arena[row + p.half_dim + pair];
    let base = p.x + head * p.head_dim;
    let first = base + select(pair, 2u * pair, p.pairs == 1u);
    let second = select(first + p.half_dim, first + 1u, p.pairs == 1u);
    let a = arena[first];
    let b = arena[second];
    arena[first] = fma(a, cosine, -(b * sine));
    arena[second] = fma(b, cosine, a * sine);";
    each("", body)
}
