//! Kernels over the pages of the KV cache.
//!
//! A layer's part of a page holds, head after head, the keys of 16 positions, one position after another, and then their values.
//! Two elements of half precision share a word; one thread reads and writes both. Under q8, four elements share a word, 32 elements of
//! a position share a scale, and the scales follow the elements.

use plimsoll_device::{KvDtype, PAGE_TOKENS, ROW_WORDS};

use super::elements::{HYPERBOLIC, each};
use super::{Q8_BLOCK, THREADS, sized};

/// Rows of keys `k` and values `v` with `pairs` pairs of elements each, heads of `half_dim` pairs. `table` has `ROW_WORDS` words for
/// every row of the step, `pages` the page ids; `page_words` is the layer's part of a page.
pub const STORE: &[&str] = &["k", "v", "half_dim", "pairs", "count", "table", "pages", "page_words"];

/// `rows` rows of queries `q` and of results `out`, of `heads` heads; `group` heads share keys and values. A row attends to positions
/// before the last word of its part of `table`. `window`, `chunk` and `cap_f` are 0 if there is none. `sinks` is 0, or 1 more than the
/// offset of the heads' sink logits among the vectors.
pub const ATTEND: &[&str] = &[
    "q",
    "out",
    "rows",
    "heads",
    "group",
    "table",
    "pages",
    "page_words",
    "window",
    "chunk",
    "sinks",
    "scale_f",
    "cap_f",
];

/// [`ATTEND`] for an encoder: keys and values are rows of `kv_cols` in the arena. A row attends to all rows of its sequence.
pub const WITHIN: &[&str] =
    &["q", "out", "rows", "heads", "group", "table", "k", "v", "kv_cols", "sinks", "scale_f", "cap_f"];

/// Positions that a workgroup computes together: one thread for each.
const TILE: u32 = THREADS;

/// Words of a pair of elements.
pub fn pair_words(dtype: KvDtype) -> usize {
    match dtype {
        KvDtype::F32 => 2,
        KvDtype::F16 | KvDtype::Bf16 => 1,
        KvDtype::Q8 => unreachable!("a word holds two pairs"),
    }
}

/// Words of the keys, and of the values, of one head of a page.
fn half_words(dtype: KvDtype, head_dim: usize) -> usize {
    match dtype {
        KvDtype::Q8 => PAGE_TOKENS * (head_dim / 4 + head_dim.div_ceil(Q8_BLOCK)),
        _ => PAGE_TOKENS * head_dim / 2 * pair_words(dtype),
    }
}

fn write(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 => {
            "
fn put_pair(at: u32, pair: vec2<f32>) {
    cache[at] = bitcast<u32>(pair.x);
    cache[at + 1u] = bitcast<u32>(pair.y);
}
"
        }
        KvDtype::Bf16 => {
            "
fn rounded(x: f32) -> u32 {
    // To nearest even; what is no number stays none.
    let bits = bitcast<u32>(x);
    let up = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(up, (bits >> 16u) | 0x40u, (bits & 0x7fffffffu) > 0x7f800000u);
}
fn put_pair(at: u32, pair: vec2<f32>) {
    cache[at] = rounded(pair.x) | (rounded(pair.y) << 16u);
}
"
        }
        _ => {
            "
fn put_pair(at: u32, pair: vec2<f32>) {
    cache[at] = pack2x16float(pair);
}
"
        }
    }
}

/// Returns the function that reads pair `d` at position `slot` of a head's keys or values, which begin at `at`.
fn read(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 => {
            "
fn pair_of(at: u32, slot: u32, d: u32) -> vec2<f32> {
    let pair = at + (slot * $PAIRSu + d) * 2u;
    return vec2<f32>(bitcast<f32>(cache[pair]), bitcast<f32>(cache[pair + 1u]));
}
"
        }
        KvDtype::Bf16 => {
            "
fn pair_of(at: u32, slot: u32, d: u32) -> vec2<f32> {
    let pair = cache[at + slot * $PAIRSu + d];
    return vec2<f32>(bitcast<f32>(pair << 16u), bitcast<f32>(pair & 0xffff0000u));
}
"
        }
        KvDtype::F16 => {
            "
fn pair_of(at: u32, slot: u32, d: u32) -> vec2<f32> {
    return unpack2x16float(cache[at + slot * $PAIRSu + d]);
}
"
        }
        KvDtype::Q8 => {
            "
fn pair_of(at: u32, slot: u32, d: u32) -> vec2<f32> {
    let word = cache[at + (slot * $PAIRSu + d) / 2u] >> (16u * (d & 1u));
    let low = f32(bitcast<i32>(word << 24u) >> 24u);
    let high = f32(bitcast<i32>(word << 16u) >> 24u);
    let scale = bitcast<f32>(cache[at + $CODESu + slot * $BLOCKSu + d / 16u]);
    return vec2<f32>(low, high) * scale;
}
"
        }
    }
}

fn filled(text: &str, dtype: KvDtype) -> String {
    let text = text.replace("$PAGE", &PAGE_TOKENS.to_string()).replace("$ROW", &ROW_WORDS.to_string());
    let text = match dtype {
        KvDtype::Q8 => text,
        _ => text.replace("$PAIR", &pair_words(dtype).to_string()),
    };
    sized(&text.replace("$TILE", &TILE.to_string()))
}

/// A thread writes one block of keys and one of values.
const PUT_BLOCK: &str = "
fn put_block(codes: u32, scale: u32, source: u32, count: u32) {
    var most = 0.0;
    for (var i = 0u; i < count; i++) {
        most = max(most, abs(arena[source + i]));
    }
    let by = select(0.0, 127.0 / most, most > 0.0);
    for (var quad = 0u; quad < count / 4u; quad++) {
        var word = 0u;
        for (var i = 0u; i < 4u; i++) {
            let code = i32(round(arena[source + 4u * quad + i] * by));
            word |= (bitcast<u32>(code) & 255u) << (8u * i);
        }
        cache[codes + quad] = word;
    }
    cache[scale] = bitcast<u32>(most / 127.0);
}
";

const STORE_BLOCK: &str = "let dim = 2u * p.half_dim;
    let blocks = (dim + 31u) / 32u;
    let row = i / (p.pairs / p.half_dim * blocks);
    let head = i / blocks % (p.pairs / p.half_dim);
    let block = i % blocks;
    let position = sent[p.table + row * $ROWu];
    let slot = position % $PAGEu;
    let page = sent[p.pages + sent[p.table + row * $ROWu + 1u] + position / $PAGEu];
    let all = $PAGEu * dim / 4u;
    let half = all + $PAGEu * blocks;
    let at = page * p.page_words + head * 2u * half;
    let codes = at + slot * (dim / 4u) + block * 8u;
    let scale = at + all + slot * blocks + block;
    let source = row * 2u * p.pairs + head * dim + block * 32u;
    let count = min(32u, dim - block * 32u);
    put_block(codes, scale, p.k + source, count);
    put_block(codes + half, scale + half, p.v + source, count);";

pub(super) fn store(dtype: KvDtype) -> String {
    if dtype == KvDtype::Q8 {
        return filled(&each(PUT_BLOCK, STORE_BLOCK), dtype);
    }
    let body = "let row = i / p.pairs;
    let pair = i % p.pairs;
    let position = sent[p.table + row * $ROWu];
    let page = sent[p.pages + sent[p.table + row * $ROWu + 1u] + position / $PAGEu];
    let head = pair / p.half_dim;
    let half = $PAGEu * p.half_dim * $PAIRu;
    let at = page * p.page_words + head * 2u * half + (position % $PAGEu * p.half_dim + pair % p.half_dim) * $PAIRu;
    let source = row * 2u * p.pairs + 2u * pair;
    put_pair(at, vec2<f32>(arena[p.k + source], arena[p.k + source + 1u]));
    put_pair(at + half, vec2<f32>(arena[p.v + source], arena[p.v + source + 1u]));";
    filled(&each(write(dtype), body), dtype)
}

/// Code that finds the positions of a row in pages.
const IN_PAGES: [&str; 3] = [
    "let position = sent[p.table + row * $ROWu];
    let last = sent[p.table + row * $ROWu + 3u] - 1u;
    let pages = p.pages + sent[p.table + row * $ROWu + 1u];
    var first = sent[p.table + row * $ROWu + 2u];
    if (p.window != 0u && position + 1u > p.window) {
        first = max(first, position + 1u - p.window);
    }
    if (p.chunk != 0u) {
        first = max(first, position / p.chunk * p.chunk);
    }
    let part = head / p.group * 2u * $HALFu;",
    "sent[pages + own / $PAGEu] * p.page_words + part",
    "sent[pages + (base + j) / $PAGEu] * p.page_words + part + $HALFu",
];

/// Code that finds the positions of a row in rows of the arena.
const IN_ROWS: [&str; 3] = [
    "let last = sent[p.table + row * $ROWu + 3u] - 1u;
    let first = sent[p.table + row * $ROWu + 2u];
    let part = (row - sent[p.table + row * $ROWu]) * p.kv_cols + head / p.group * $DIMu;",
    "p.k + part + own * p.kv_cols",
    "p.v + part + (base + j) * p.kv_cols",
];

const READ_ROWS: &str = "
fn pair_of(at: u32, slot: u32, d: u32) -> vec2<f32> {
    return vec2<f32>(arena[at + 2u * d], arena[at + 2u * d + 1u]);
}
";

pub(super) fn attend(dtype: KvDtype, head_dim: usize) -> String {
    let text = attention(read(dtype), IN_PAGES, head_dim).replace("$HALF", &half_words(dtype, head_dim).to_string());
    let codes = PAGE_TOKENS * head_dim / 4;
    let text = text.replace("$CODES", &codes.to_string());
    filled(&text.replace("$BLOCKS", &head_dim.div_ceil(Q8_BLOCK).to_string()), dtype)
}

pub(super) fn within(head_dim: usize) -> String {
    filled(&attention(READ_ROWS, IN_ROWS, head_dim), KvDtype::F32)
}

/// Attention over positions that `place` finds: code before the loop, a key's place, and a value's.
fn attention(read: &str, place: [&str; 3], head_dim: usize) -> String {
    let pairs = head_dim / 2;
    // Pairs of the result that one thread holds.
    let held = pairs.div_ceil(THREADS as usize);
    let each = |text: &str| {
        let one = |i: usize| {
            let text = text.replace("$IF", if (i + 1) * THREADS as usize > pairs { "if ($C < $PAIRSu) " } else { "" });
            text.replace("$C", &format!("(thread + {}u)", i * THREADS as usize)).replace("$I", &i.to_string())
        };
        (0..held).map(one).collect::<String>()
    };
    let main = "
const LOWEST: f32 = -3.0e38;
var<workgroup> query: array<f32, $DIM>;
var<workgroup> scores: array<f32, $TILE>;
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let one = group.y * $WIDTHu + group.x;
    let head = one % p.heads;
    let row = one / p.heads;
    if (row >= p.rows) {
        return;
    }
    $PLACE
    let q = p.q + (row * p.heads + head) * $DIMu;
    for (var d = thread; d < $DIMu; d += $THREADSu) {
        query[d] = arena[q + d] * p.scale_f;
    }
    workgroupBarrier();
    var highest = LOWEST;
    var total = 0.0;
    $BEGIN
    for (var base = first / $TILEu * $TILEu; base <= last; base += $TILEu) {
        let own = base + thread;
        var score = LOWEST;
        if (own >= first && own <= last) {
            let at = $KEY;
            var sums = vec2<f32>();
            for (var d = 0u; d < $PAIRSu; d++) {
                sums = fma(vec2<f32>(query[2u * d], query[2u * d + 1u]), pair_of(at, own % $PAGEu, d), sums);
            }
            score = sums.x + sums.y;
            if (p.cap_f != 0.0) {
                score = p.cap_f * hyperbolic(score / p.cap_f);
            }
        }
        scores[thread] = score;
        workgroupBarrier();
        let begin = max(first, base) - base;
        let end = min(last - base, $TILEu - 1u);
        var top = highest;
        for (var j = begin; j <= end; j++) {
            top = max(top, scores[j]);
        }
        workgroupBarrier();
        scores[thread] = exp(score - top);
        workgroupBarrier();
        let fade = exp(highest - top);
        highest = top;
        total = total * fade;
        $FADE
        for (var j = begin; j <= end; j++) {
            let weight = scores[j];
            total = total + weight;
            let at = $VALUE;
            $GATHER
        }
        workgroupBarrier();
    }
    if (p.sinks != 0u) {
        let sink = vectors[p.sinks - 1u + head];
        let top = max(highest, sink);
        let fade = exp(highest - top);
        total = fma(total, fade, exp(sink - top));
        $FADE
    }
    let out = p.out + (row * p.heads + head) * $DIMu;
    $END
}
";
    let [before, key, value] = place;
    let main = main.replace("$PLACE", before).replace("$KEY", key).replace("$VALUE", value);
    let main = main.replace("$BEGIN", &each("var sum$I = vec2<f32>();\n    "));
    let main = main.replace("$FADE", &each("sum$I = sum$I * fade;\n        "));
    let gather = "$IF{ sum$I = fma(vec2<f32>(weight), pair_of(at, (base + j) % $PAGEu, $C), sum$I); }\n            ";
    let main = main.replace("$GATHER", &each(gather));
    let end = "$IF{\n        arena[out + 2u * $C] = sum$I.x / total;\n        arena[out + 2u * $C + 1u] = sum$I.y / total;\n    }\n    ";
    let main = main.replace("$END", &each(end));
    let main = [read, HYPERBOLIC, &main].concat();
    main.replace("$PAIRS", &pairs.to_string()).replace("$DIM", &head_dim.to_string())
}
