//! Kernels of a mixture of experts: they choose a row's experts, group rows by expert, and sum up the results.
//!
//! Whole numbers are stored in the arena as floats, exact up to 2^24.

use plimsoll_device::GPU_EXPERTS_MAX;

use super::elements::{each, each_of};
use super::rows::{GREATEST, SUM, over_all};
use super::sized;

/// `rows` rows of `experts` logits, of which `top` are chosen. `correction` and `scales` are 0, or 1 more than their offsets among the
/// vectors. `sigmoid` and `renormalise` are 0 or 1.
pub const ROUTE: &[&str] = &[
    "logits",
    "rows",
    "experts",
    "top",
    "ids",
    "weights",
    "sigmoid",
    "renormalise",
    "correction",
    "groups",
    "top_groups",
    "scales",
    "scale_f",
];

/// `choices` ids of experts at `ids`, to be ordered and cut into blocks of `rows` choices; there is room for `most` blocks.
pub const GROUP: &[&str] = &["ids", "choices", "experts", "order", "blocks", "most", "rows"];

/// `count` elements of rows of `cols` at `out`; each row is the sum of `top` rows of `y`. `add`: adds to the elements there.
pub const COMBINE: &[&str] = &["out", "y", "weights", "top", "cols", "count", "add"];

const ROUTES: &str = "
const LOWEST: f32 = -3.0e38;
const TAKEN: f32 = -3.3e38;
const NOTHING: u32 = 0xffffffffu;
$OVER_ALL
var<workgroup> place: array<u32, $THREADS>;
var<workgroup> ranks: array<f32, $EXPERTS>;
var<workgroup> chosen: array<f32, $TOP>;
var<workgroup> sums: array<f32, $GROUPS>;
var<workgroup> open: array<u32, $GROUPS>;
fn none(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}
fn sum_of_two(first: u32, size: u32) -> f32 {
    var one = LOWEST;
    var two = LOWEST;
    for (var e = first; e < first + size; e++) {
        let rank = ranks[e];
        if (rank > one) {
            two = one;
            one = rank;
        } else {
            two = max(two, rank);
        }
    }
    // Half of each, so that two lowest ones are a number.
    return 0.5 * one + 0.5 * two;
}
// Logits become what experts are ranked by.
fn probabilities(at: u32, thread: u32) {
    if (p.sigmoid != 0u) {
        for (var e = thread; e < p.experts; e += $THREADSu) {
            let logit = arena[at + e];
            arena[at + e] = 1.0 / (1.0 + exp(-logit));
            ranks[e] = logit;
        }
    } else {
        var top = LOWEST;
        for (var e = thread; e < p.experts; e += $THREADSu) {
            top = max(top, arena[at + e]);
        }
        let highest = greatest_of_all(thread, top);
        var sum = 0.0;
        for (var e = thread; e < p.experts; e += $THREADSu) {
            let x = exp(arena[at + e] - highest);
            arena[at + e] = x;
            sum = sum + x;
        }
        let total = sum_of_all(thread, sum);
        for (var e = thread; e < p.experts; e += $THREADSu) {
            arena[at + e] = arena[at + e] / total;
        }
    }
    for (var e = thread; e < p.experts; e += $THREADSu) {
        var rank = arena[at + e];
        if (p.sigmoid != 0u && p.correction == 0u && p.groups == 1u) {
            // The sigmoid of a large logit rounds to 1: logits rank the experts.
            rank = max(ranks[e], LOWEST);
        }
        if (p.correction != 0u) {
            rank = rank + vectors[p.correction - 1u + e];
        }
        // NaN is ranked below all numbers.
        ranks[e] = select(rank, LOWEST, none(rank));
    }
}
// Experts of the groups that are not among the best are out.
fn close_groups(thread: u32) {
    let size = p.experts / p.groups;
    workgroupBarrier();
    for (var g = thread; g < p.groups; g += $THREADSu) {
        sums[g] = sum_of_two(g * size, size);
        open[g] = 0u;
    }
    workgroupBarrier();
    if (thread == 0u) {
        for (var i = 0u; i < p.top_groups; i++) {
            var best = NOTHING;
            for (var g = 0u; g < p.groups; g++) {
                if (open[g] == 0u && (best == NOTHING || sums[g] > sums[min(best, p.groups - 1u)])) {
                    best = g;
                }
            }
            open[best] = 1u;
        }
    }
    workgroupBarrier();
    for (var e = thread; e < p.experts; e += $THREADSu) {
        if (open[e / size] == 0u) {
            ranks[e] = TAKEN;
        }
    }
}
fn choose(row: u32, at: u32, thread: u32) {
    for (var i = 0u; i < p.top; i++) {
        var best = NOTHING;
        var rank = TAKEN;
        for (var e = thread; e < p.experts; e += $THREADSu) {
            if (ranks[e] > rank) {
                rank = ranks[e];
                best = e;
            }
        }
        part[thread] = rank;
        place[thread] = best;
        workgroupBarrier();
        for (var width = $THREADSu / 2u; width > 0u; width = width / 2u) {
            if (thread < width) {
                let a = part[thread];
                let b = part[thread + width];
                if (b > a || (b == a && place[thread + width] < place[thread])) {
                    part[thread] = b;
                    place[thread] = place[thread + width];
                }
            }
            workgroupBarrier();
        }
        let id = place[0];
        if (id % $THREADSu == thread) {
            ranks[id] = TAKEN;
            chosen[i] = arena[at + id];
            arena[p.ids + row * p.top + i] = f32(id);
        }
        workgroupBarrier();
    }
}
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.y * $WIDTHu + group.x;
    if (row >= p.rows) {
        return;
    }
    let at = p.logits + row * p.experts;
    probabilities(at, thread);
    if (p.top_groups < p.groups) {
        close_groups(thread);
    }
    choose(row, at, thread);
    if (thread == 0u) {
        var sum = 1.0;
        if (p.renormalise != 0u) {
            sum = 0.0;
            for (var i = 0u; i < p.top; i++) {
                sum = sum + chosen[i];
            }
        }
        for (var i = 0u; i < p.top; i++) {
            chosen[i] = chosen[i] / sum * p.scale_f;
        }
    }
    workgroupBarrier();
    for (var i = thread; i < p.top; i += $THREADSu) {
        arena[p.weights + row * p.top + i] = chosen[i];
    }
}
";

/// Another factor of an expert's weight. It is read by the written id, so it needs a pass of its own.
const SCALES: &str = "let id = u32(arena[p.ids + i]);
    arena[p.weights + i] = arena[p.weights + i] * vectors[p.scales - 1u + id];";

/// A thread has some experts and reads all choices in order.
const GROUPS: &str = "
var<workgroup> count: array<u32, $EXPERTS>;
var<workgroup> block: array<u32, $EXPERTS>;
var<workgroup> blocks: u32;
@compute @workgroup_size($THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    for (var e = thread; e < p.experts; e += $THREADSu) {
        var n = 0u;
        for (var c = 0u; c < p.choices; c++) {
            n = n + select(0u, 1u, u32(arena[p.ids + c]) == e);
        }
        count[e] = n;
    }
    workgroupBarrier();
    if (thread == 0u) {
        var first = 0u;
        var made = 0u;
        for (var e = 0u; e < p.experts; e++) {
            let n = count[e];
            count[e] = first;
            block[e] = made;
            first = first + n;
            made = made + (n + p.rows - 1u) / p.rows;
        }
        blocks = made;
    }
    workgroupBarrier();
    for (var e = thread; e < p.experts; e += $THREADSu) {
        var next = count[e];
        for (var c = 0u; c < p.choices; c++) {
            if (u32(arena[p.ids + c]) == e) {
                arena[p.order + next] = f32(c);
                next = next + 1u;
            }
        }
        var at = p.blocks + block[e] * 3u;
        for (var first = count[e]; first < next; first += p.rows) {
            arena[at] = f32(e);
            arena[at + 1u] = f32(first);
            arena[at + 2u] = f32(min(p.rows, next - first));
            at = at + 3u;
        }
    }
    for (var b = blocks + thread; b < p.most; b += $THREADSu) {
        arena[p.blocks + b * 3u] = 0.0;
        arena[p.blocks + b * 3u + 1u] = 0.0;
        arena[p.blocks + b * 3u + 2u] = 0.0;
    }
}
";

const COMBINES: &str = "let row = i / p.cols;
    let y = p.y + row * p.top * p.cols + i % p.cols;
    var sum = 0.0;
    for (var j = 0u; j < p.top; j++) {
        sum = fma(arena[p.weights + row * p.top + j], arena[y + j * p.cols], sum);
    }
    if (p.add != 0u) {
        sum = arena[p.out + i] + sum;
    }
    arena[p.out + i] = sum;";

fn filled(text: &str) -> String {
    let [experts, top, groups] = GPU_EXPERTS_MAX;
    let text = text.replace("$EXPERTS", &experts.to_string()).replace("$TOP", &top.to_string());
    let text = text.replace("$GROUPS", &groups.to_string());
    sized(&text)
}

pub(super) fn route() -> String {
    filled(&ROUTES.replace("$OVER_ALL", &over_all([SUM, GREATEST])))
}

pub(super) fn scale() -> String {
    each_of("p.rows * p.top", "", SCALES)
}

pub(super) fn group() -> String {
    filled(GROUPS)
}

pub(super) fn combine() -> String {
    each("", COMBINES)
}
