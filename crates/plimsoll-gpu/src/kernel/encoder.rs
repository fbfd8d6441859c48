//! Kernels of image and audio encoders, beside those of language models.

use super::elements::{HYPERBOLIC, each};
use super::sized;

/// `count` elements of rows of `cols`. At `rows` of the upload, each row follows its offset in the arena. `add`: adds to the elements
/// there.
pub const PLACE: &[&str] = &["rows", "cols", "count", "add"];

/// `count` elements of rows of `x`, points of `channels` each, `inner` by `outer` of them; `windows` to a line of `out`. The names that
/// end in `0` belong to the outer axis, those in `1` to the inner.
pub const UNFOLD: &[&str] =
    &["out", "x", "count", "channels", "inner", "outer", "windows", "taps0", "taps1", "step0", "step1", "pad0", "pad1"];

/// `rows` rows of `heads` heads of `dim` elements. Each row attends to at most `seen` rows of its sequence, itself included. Row d of
/// `distances` is the key of distance d; `table` has the place of a row in its sequence.
pub const NEAR: &[&str] = &["out", "q", "k", "v", "distances", "table", "rows", "heads", "dim", "seen", "cap_f"];

pub(super) fn place() -> String {
    let body = "let row = p.rows + i / p.cols * (p.cols + 1u);
    let out = sent[row] + i % p.cols;
    let value = bitcast<f32>(sent[row + 1u + i % p.cols]);
    if (p.add == 0u) {
        arena[out] = value;
    } else {
        arena[out] = arena[out] + value;
    }";
    each("", body)
}

/// Points before the first one wrap around to a great number, so they are outside, too.
pub(super) fn unfold() -> String {
    let body = "let taps = p.taps0 * p.taps1;
    let row = i / (p.channels * taps);
    let channel = i / taps % p.channels;
    let tap = i % taps;
    let outer = row / p.windows * p.step0 + tap % p.taps0 - p.pad0;
    let inner = row % p.windows * p.step1 + tap / p.taps0 - p.pad1;
    var value = 0.0;
    if (outer < p.outer && inner < p.inner) {
        value = arena[p.x + (outer * p.inner + inner) * p.channels + channel];
    }
    arena[p.out + i] = value;";
    each("", body)
}

/// A workgroup computes a head of a row. Every thread computes a score, then some elements: [`plimsoll_kernels::NEAR_MAX`] is the number
/// of threads.
pub(super) fn near() -> String {
    const { assert!(plimsoll_kernels::NEAR_MAX == super::THREADS as usize) };
    let text = "
var<workgroup> scores: array<f32, $THREADS>;
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let one = group.y * $WIDTHu + group.x;
    let head = one % p.heads;
    let row = one / p.heads;
    if (row >= p.rows) {
        return;
    }
    let width = p.heads * p.dim;
    let count = min(p.seen, sent[p.table + 4u * row] + 1u);
    let first = row + 1u - count;
    let query = p.q + row * width + head * p.dim;
    if (thread < count) {
        let key = p.k + (first + thread) * width + head * p.dim;
        let distance = p.distances + (count - 1u - thread) * width + head * p.dim;
        var score = 0.0;
        for (var d = 0u; d < p.dim; d++) {
            score = fma(arena[query + d], arena[key + d] + arena[distance + d], score);
        }
        scores[thread] = p.cap_f * hyperbolic(score / p.cap_f);
    }
    workgroupBarrier();
    var top = scores[0];
    for (var j = 1u; j < count; j++) {
        top = max(top, scores[j]);
    }
    workgroupBarrier();
    if (thread < count) {
        scores[thread] = exp(scores[thread] - top);
    }
    workgroupBarrier();
    var total = 0.0;
    for (var j = 0u; j < count; j++) {
        total = total + scores[j];
    }
    for (var d = thread; d < p.dim; d += $THREADSu) {
        var sum = 0.0;
        for (var j = 0u; j < count; j++) {
            sum = fma(scores[j], arena[p.v + (first + j) * width + head * p.dim + d], sum);
        }
        arena[p.out + row * width + head * p.dim + d] = sum / total;
    }
}
";
    sized(&[HYPERBOLIC, text].concat())
}
