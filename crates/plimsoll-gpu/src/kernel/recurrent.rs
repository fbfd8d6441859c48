//! Kernels of recurrent layers: convolutions over time, and the state matrices of Gated DeltaNet and Mamba-2.
//!
//! A layer's part of a slot holds the last inputs of its convolution, the oldest first, and then each head's matrix, row after row.
//! A workgroup takes one sequence's rows in order, so that no cut of a sequence into steps changes a bit.

use plimsoll_device::NO_STATE;

use super::elements::{SOFTPLUS, each};
use super::rows::{SUM, over_all};
use super::sized;

/// Rows of `channels` at `x`. `weight` is an offset among the vectors; `bias` is 0, or 1 more than one. `before` and `after` are 0, or 1
/// more than the offset of a matrix like `x`. `seqs` has three words for each sequence of the step: its first row, its rows, and the slot
/// that it starts from or none. `outs` has a slot or none for each row.
pub const CONV: &[&str] = &["x", "channels", "weight", "bias", "before", "after", "silu", "seqs", "outs", "slot_words"];

/// `rows` rows of `width`, of which the first `heads` heads of `head_dim` are normalised. The first `scaled` heads are also multiplied by
/// `scale_f`.
pub const NORM: &[&str] = &["x", "rows", "heads", "head_dim", "width", "scaled", "scale_f"];

/// `count` elements of rows of `heads` at `a` and `b`.
pub const STEPS: &[&str] = &["a", "b", "count", "heads", "a_log", "dt_bias", "least_f", "most_f"];

/// Rows at `x`, with their results at `out`; `decay` and `beta` have an element per head. `per` heads share a group's queries and keys;
/// with 0, head h takes group h modulo `groups`. `matrices` is the offset of the matrices in a slot.
pub const RECUR: &[&str] = &[
    "x",
    "out",
    "decay",
    "beta",
    "heads",
    "value_dim",
    "groups",
    "per",
    "seqs",
    "outs",
    "slot_words",
    "matrices",
    "skip",
];

/// Columns of a matrix in one workgroup, and the parts that their rows are cut into.
pub const COLUMNS: usize = 16;
const SLICES: usize = 8;

const CONVOLVE: &str = "
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = group.x * $THREADSu + thread;
    if (c >= p.channels) {
        return;
    }
    let seq = p.seqs + group.y * 3u;
    let first = sent[seq];
    let rows = sent[seq + 1u];
    let start = sent[seq + 2u];
    $HISTORY
    if (start != $NONEu) {
        let slot = start * p.slot_words + c;
        $START
    }
    $WEIGHTS
    var bias = 0.0;
    if (p.bias != 0u) {
        bias = vectors[p.bias - 1u + c];
    }
    for (var row = first; row < first + rows; row++) {
        let at = row * p.channels + c;
        var x = arena[p.x + at];
        if (p.before != 0u) {
            x = x * arena[p.before - 1u + at];
        }
        var sum = fma(w$LAST, x, bias);
        $SUM
        if (p.silu != 0u) {
            sum = sum / (1.0 + exp(-sum));
        }
        if (p.after != 0u) {
            sum = sum * arena[p.after - 1u + at];
        }
        arena[p.x + at] = sum;
        $SHIFT
        let kept = sent[p.outs + row];
        if (kept != $NONEu) {
            let slot = kept * p.slot_words + c;
            $KEEP
        }
    }
}
";

pub(super) fn conv(taps: usize) -> String {
    let history = taps - 1;
    let each = |text: &str| (0..history).map(|i| text.replace("$I", &i.to_string())).collect::<String>();
    let shift = |i: usize| match i + 1 == history {
        true => format!("h{i} = x;\n        "),
        false => format!("h{i} = h{};\n        ", i + 1),
    };
    let weights: String =
        (0..taps).map(|t| format!("let w{t} = vectors[p.weight + c * {taps}u + {t}u];\n    ")).collect();
    let text = CONVOLVE.replace("$HISTORY", &each("var h$I = 0.0;\n    ")).replace("$WEIGHTS", &weights);
    let text = text.replace("$START", &each("h$I = states[slot + $Iu * p.channels];\n        "));
    let text = text.replace("$SUM", &each("sum = fma(w$I, h$I, sum);\n        "));
    let text = text.replace("$SHIFT", &(0..history).map(shift).collect::<String>());
    let text = text.replace("$KEEP", &each("states[slot + $Iu * p.channels] = h$I;\n            "));
    filled(&text.replace("$LAST", &history.to_string()))
}

const HEADS: &str = "
$SUM
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = group.y * $WIDTHu + group.x;
    if (i >= p.rows * p.heads) {
        return;
    }
    let head = i % p.heads;
    let x = p.x + i / p.heads * p.width + head * p.head_dim;
    var squares = 0.0;
    for (var c = thread; c < p.head_dim; c += $THREADSu) {
        squares = fma(arena[x + c], arena[x + c], squares);
    }
    let scale = select(1.0, p.scale_f, head < p.scaled) / sqrt(sum_of_all(thread, squares) + 1e-6);
    for (var c = thread; c < p.head_dim; c += $THREADSu) {
        arena[x + c] = arena[x + c] * scale;
    }
}
";

pub(super) fn normalise() -> String {
    sized(&HEADS.replace("$SUM", &over_all([SUM])))
}

/// The first lines of kernels with one element per head.
const RATE: &str = "let head = i % p.heads;
    let rate = exp(vectors[p.a_log + head]);
    ";

pub(super) fn gates() -> String {
    let body = "arena[p.a + i] = exp(-rate * softplus(arena[p.a + i] + vectors[p.dt_bias + head]));
    arena[p.b + i] = 1.0 / (1.0 + exp(-arena[p.b + i]));";
    each(SOFTPLUS, &(RATE.to_owned() + body))
}

pub(super) fn time_steps() -> String {
    let body = "let time = min(max(softplus(arena[p.a + i] + vectors[p.dt_bias + head]), p.least_f), p.most_f);
    arena[p.a + i] = time;
    arena[p.b + i] = exp(-rate * time);";
    each(SOFTPLUS, &(RATE.to_owned() + body))
}

/// A thread has one column, and one slice of its rows.
const UPDATE: &str = "
var<workgroup> keys: array<f32, $PADDED>;
var<workgroup> queries: array<f32, $PADDED>;
var<workgroup> kept: array<f32, $ALL>;
var<workgroup> asked: array<f32, $ALL>;
var<workgroup> both: array<f32, $SLICES>;
@compute @workgroup_size($ALL)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let tiles = (p.value_dim + $COLUMNSu - 1u) / $COLUMNSu;
    let head = group.x / tiles;
    let lane = thread % $COLUMNSu;
    let slice = thread / $COLUMNSu;
    let column = group.x % tiles * $COLUMNSu + lane;
    let mine = column < p.value_dim;
    let shared_by = select(head % p.groups, head / max(p.per, 1u), p.per != 0u);
    $PLACES
    let seq = p.seqs + group.y * 3u;
    let first = sent[seq];
    let rows = sent[seq + 1u];
    let start = sent[seq + 2u];
    let matrix = p.matrices + head * $KEYu * p.value_dim + column;
    $BEGIN
    if (start != $NONEu && mine) {
        let slot = start * p.slot_words + matrix;
        $START
    }
    for (var row = first; row < first + rows; row++) {
        let x = p.x + row * width;
        for (var i = thread; i < $PADDEDu; i += $ALLu) {
            let inside = i < $KEYu;
            keys[i] = select(0.0, arena[x + k + min(i, $KEYu - 1u)], inside);
            queries[i] = select(0.0, arena[x + q + min(i, $KEYu - 1u)], inside);
        }
        workgroupBarrier();
        var own_kept = 0.0;
        var own_asked = 0.0;
        var own_both = 0.0;
        $PRODUCTS
        kept[thread] = own_kept;
        asked[thread] = own_asked;
        if (lane == 0u) {
            both[slice] = own_both;
        }
        workgroupBarrier();
        var all_kept = kept[lane];
        var all_asked = asked[lane];
        var all_both = both[0];
        for (var s = 1u; s < $SLICESu; s++) {
            all_kept = all_kept + kept[s * $COLUMNSu + lane];
            all_asked = all_asked + asked[s * $COLUMNSu + lane];
            all_both = all_both + both[s];
        }
        let decay = arena[p.decay + row * p.heads + head];
        let beta = arena[p.beta + row * p.heads + head];
        let value = arena[x + v + min(column, p.value_dim - 1u)];
        $RULE
        $UPDATE
        if (slice == 0u && mine) {
            arena[p.out + (row * p.heads + head) * p.value_dim + column] = result;
        }
        let next = sent[p.outs + row];
        if (next != $NONEu && mine) {
            let slot = next * p.slot_words + matrix;
            $KEEP
        }
        workgroupBarrier();
    }
}
";

const DELTA_PLACES: &str = "let q = shared_by * $KEYu;
    let k = (p.groups + shared_by) * $KEYu;
    let v = 2u * p.groups * $KEYu + head * p.value_dim;
    let width = 2u * p.groups * $KEYu + p.heads * p.value_dim;";

const ADDED_PLACES: &str = "let k = p.heads * p.value_dim + shared_by * $KEYu;
    let q = k + p.groups * $KEYu;
    let v = head * p.value_dim;
    let width = p.heads * p.value_dim + 2u * p.groups * $KEYu;";

const DELTA_RULE: &str = "let change = (value - decay * all_kept) * beta;
        let result = fma(decay, all_asked, change * all_both);";

const ADDED_RULE: &str = "let change = value * beta;
        let result = fma(vectors[p.skip + head], value, fma(decay, all_asked, change * all_both));";

pub(super) fn update(key_dim: usize, added: bool) -> String {
    let held = key_dim.div_ceil(SLICES);
    let each = |text: &str| (0..held).map(|i| text.replace("$I", &i.to_string())).collect::<String>();
    let stored = |text: &str| {
        let one = |i: usize| {
            let guard = if held * SLICES == key_dim { "" } else { "if ($R < $KEYu) " };
            (guard.to_owned() + text).replace("$R", &format!("(slice * {held}u + {i}u)")).replace("$I", &i.to_string())
        };
        (0..held).map(one).collect::<String>()
    };
    let products = each(&format!(
        "let k$I = keys[slice * {held}u + $Iu];
        let q$I = queries[slice * {held}u + $Iu];
        own_kept = fma(s$I, k$I, own_kept);
        own_asked = fma(s$I, q$I, own_asked);
        own_both = fma(k$I, q$I, own_both);
        "
    ));
    let (places, rule) = if added { (ADDED_PLACES, ADDED_RULE) } else { (DELTA_PLACES, DELTA_RULE) };
    let text = UPDATE.replace("$PLACES", places).replace("$RULE", rule).replace("$PRODUCTS", &products);
    let text = text.replace("$BEGIN", &each("var s$I = 0.0;\n    "));
    let text = text.replace("$START", &stored("{ s$I = states[slot + $R * p.value_dim]; }\n        "));
    let text = text.replace("$UPDATE", &each("s$I = fma(decay, s$I, k$I * change);\n        "));
    let text = text.replace("$KEEP", &stored("{ states[slot + $R * p.value_dim] = s$I; }\n            "));
    let text = text.replace("$KEY", &key_dim.to_string()).replace("$PADDED", &(held * SLICES).to_string());
    let text = text.replace("$ALL", &(COLUMNS * SLICES).to_string()).replace("$SLICES", &SLICES.to_string());
    filled(&text.replace("$COLUMNS", &COLUMNS.to_string()))
}

fn filled(text: &str) -> String {
    sized(&text.replace("$NONE", &NO_STATE.to_string()))
}
