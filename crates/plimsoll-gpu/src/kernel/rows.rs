//! Kernels in which a workgroup computes a row.

use super::sized;

/// `rows` rows of `cols` elements, from `x` to `out`, with a vector `weight` and, of layer norms, a vector `bias`.
pub const NORM: &[&str] = &["out", "x", "rows", "cols", "weight", "bias", "eps_f"];

/// `kept` rows of `x`; the upload has their numbers at `which`.
pub const KEEP: &[&str] = &["x", "cols", "kept", "which"];

/// Returns functions that take one value of every thread of the workgroup and reduce them by `of`, two at a time, in one order.
pub(super) fn over_all<const N: usize>(functions: [(&str, &str); N]) -> String {
    let function = |(name, of): (&str, &str)| {
        let text = "
fn $NAME(thread: u32, value: f32) -> f32 {
    workgroupBarrier();
    part[thread] = value;
    workgroupBarrier();
    for (var width = $THREADSu / 2u; width > 0u; width = width / 2u) {
        if (thread < width) {
            let a = part[thread];
            let b = part[thread + width];
            part[thread] = $OF;
        }
        workgroupBarrier();
    }
    return part[0];
}
";
        text.replace("$NAME", name).replace("$OF", of)
    };
    "var<workgroup> part: array<f32, $THREADS>;".to_owned() + &functions.map(function).concat()
}

/// The sum of all threads' values.
pub(super) const SUM: (&str, &str) = ("sum_of_all", "a + b");

/// The greatest of all threads' values.
pub(super) const GREATEST: (&str, &str) = ("greatest_of_all", "max(a, b)");

const NORMS: &str = "$SUM
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.y * $WIDTHu + group.x;
    if (row >= p.rows) {
        return;
    }
    let x = p.x + row * p.cols;
    let out = p.out + row * p.cols;
    $MEAN
    var squares = 0.0;
    for (var c = thread; c < p.cols; c += $THREADSu) {
        let value = arena[x + c] $LESS_MEAN;
        squares = fma(value, value, squares);
    }
    let scale = 1.0 / sqrt(sum_of_all(thread, squares) / f32(p.cols) + p.eps_f);
    for (var c = thread; c < p.cols; c += $THREADSu) {
        arena[out + c] = (arena[x + c] $LESS_MEAN) * scale * vectors[p.weight + c] $BIAS;
    }
}
";

const MEAN: &str = "var sum = 0.0;
    for (var c = thread; c < p.cols; c += $THREADSu) {
        sum = sum + arena[x + c];
    }
    let mean = sum_of_all(thread, sum) / f32(p.cols);";

fn norm(mean: &str, less_mean: &str, bias: &str) -> String {
    let text = NORMS.replace("$SUM", &over_all([SUM])).replace("$MEAN", mean);
    sized(&text.replace("$LESS_MEAN", less_mean).replace("$BIAS", bias))
}

pub(super) fn rms_norm() -> String {
    norm("", "", "")
}

pub(super) fn layer_norm() -> String {
    norm(MEAN, "- mean", "+ vectors[p.bias + c]")
}

/// A thread moves one column, row after row. It reads no element that it has written before, since rows ascend.
pub(super) fn keep_rows() -> String {
    let text = "
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.x * $THREADSu + thread;
    if (c >= p.cols) {
        return;
    }
    for (var i = 0u; i < p.kept; i++) {
        arena[p.x + i * p.cols + c] = arena[p.x + sent[p.which + i] * p.cols + c];
    }
}
";
    sized(text)
}
