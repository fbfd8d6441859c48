//! Kernels that find the most likely tokens of rows, so that not all logits need be fetched.
//!
//! The first kernel finds the greatest logit of every block of tokens. In the second, a workgroup takes a row's candidates one after
//! another: the block with the greatest logit, the first token with this logit, and the greatest logit of the block behind that one.
//! Logits are compared as whole numbers, which no driver rounds. Columns are stored in the arena as floats, exact up to 2^24.

use plimsoll_device::CANDIDATE_BLOCK;

use super::elements::each;
use super::{THREADS, sized};

/// `count` blocks, or rows with candidates, of rows of `cols` at `x`; `blocks` per row, with their greatest elements at `maxima`. At
/// `sent` of the upload, each row has its number, its count of candidates, and the first candidate's index at `out`.
pub const CANDIDATES: &[&str] = &["x", "maxima", "out", "cols", "blocks", "count", "sent"];

/// One thread reads each element of a block.
const _: () = assert!(CANDIDATE_BLOCK == THREADS as usize, "threads of a workgroup");

/// Logits as whole numbers in the same order. -0 is 0; -infinity and NaN are `NOTHING`.
const KEYS: &str = "
const NOTHING: u32 = 0x007fffffu;
const NOWHERE: u32 = 0xffffffffu;
fn key_of(logit: f32) -> u32 {
    let bits = bitcast<u32>(logit);
    let size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) {
        return NOTHING;
    }
    if (size == 0u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}
fn logit_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key >> 31u) == 1u));
}
";

pub(super) fn block_maxima() -> String {
    let body = "let x = p.x + sent[p.sent + 3u * (i / p.blocks)] * p.cols;
    let first = i % p.blocks * $THREADSu;
    var greatest = NOTHING;
    for (var c = first; c < min(first + $THREADSu, p.cols); c++) {
        greatest = max(greatest, key_of(arena[x + c]));
    }
    arena[p.maxima + i] = logit_of(greatest);";
    sized(&each(KEYS, body))
}

/// One thread alone reads a block's greatest element, always the same thread.
const FIND: &str = "$KEYS
var<workgroup> key_found: atomic<u32>;
var<workgroup> block_found: atomic<u32>;
var<workgroup> id_found: atomic<u32>;
var<workgroup> next_key: atomic<u32>;
@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = group.y * $WIDTHu + group.x;
    if (row >= p.count) {
        return;
    }
    let x = p.x + sent[p.sent + 3u * row] * p.cols;
    let wanted = sent[p.sent + 3u * row + 1u];
    let out = p.out + 2u * sent[p.sent + 3u * row + 2u];
    let maxima = p.maxima + row * p.blocks;
    var own = NOTHING;
    var own_block = 0u;
    for (var b = thread; b < p.blocks; b += $THREADSu) {
        let key = key_of(arena[maxima + b]);
        if (key > own) {
            own = key;
            own_block = b;
        }
    }
    // The candidate taken last: all others that are left are ranked below it.
    var last_key = NOWHERE;
    var last_id = 0u;
    for (var i = 0u; i < wanted; i++) {
        if (thread == 0u) {
            atomicStore(&key_found, NOTHING);
            atomicStore(&block_found, NOWHERE);
            atomicStore(&id_found, NOWHERE);
            atomicStore(&next_key, NOTHING);
        }
        workgroupBarrier();
        atomicMax(&key_found, own);
        workgroupBarrier();
        let key = atomicLoad(&key_found);
        if (own == key) {
            atomicMin(&block_found, own_block);
        }
        workgroupBarrier();
        let block = min(atomicLoad(&block_found), p.blocks - 1u);
        let id = block * $THREADSu + thread;
        var mine = NOTHING;
        if (id < p.cols) {
            mine = key_of(arena[x + id]);
        }
        if (mine == key && (key < last_key || id > last_id)) {
            atomicMin(&id_found, id);
        }
        workgroupBarrier();
        let taken = atomicLoad(&id_found);
        if (mine < key || (mine == key && id > taken)) {
            atomicMax(&next_key, mine);
        }
        workgroupBarrier();
        if (block % $THREADSu == thread) {
            arena[maxima + block] = logit_of(atomicLoad(&next_key));
            own = NOTHING;
            own_block = 0u;
            for (var b = thread; b < p.blocks; b += $THREADSu) {
                let key = key_of(arena[maxima + b]);
                if (key > own) {
                    own = key;
                    own_block = b;
                }
            }
        }
        if (thread == 0u) {
            let found = key > NOTHING;
            arena[out + 2u * i] = select(0.0, arena[x + min(taken, p.cols - 1u)], found);
            arena[out + 2u * i + 1u] = select(-1.0, f32(taken), found);
        }
        last_key = key;
        last_id = taken;
        workgroupBarrier();
    }
}
";

pub(super) fn candidates() -> String {
    sized(&FIND.replace("$KEYS", KEYS))
}
