//! Kernels that encoders of images and audio need beside those of language models.

use super::elements::each;

/// `count` elements of rows of `cols`, which lie at `rows` of what was sent, behind the place in the arena of each. `add`: to what is there.
pub const PLACE: &[&str] = &["rows", "cols", "count", "add"];

/// `count` elements of rows of `x`, points of `channels` each, `inner` by `outer` of them; `windows` to a line of `out`. The names that
/// end in `0` are of the outer axis, those in `1` of the inner.
pub const UNFOLD: &[&str] =
    &["out", "x", "count", "channels", "inner", "outer", "windows", "taps0", "taps1", "step0", "step1", "pad0", "pad1"];

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

/// What lies before the first point is a great number, and so is not inside either.
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
