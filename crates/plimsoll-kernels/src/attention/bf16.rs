//! One split of attention for rows that are rounded, on the matrix unit or by vectors: queries, keys, values and probabilities are rounded
//! to bfloat16, sums are single precision (`amx::strip` and `pairs::strip` say in which order), and so is everything between scores and
//! probabilities.
//!
//! The split's keys and values are laid out once for all queries of the call (`convert`); keys that are stored in
//! bfloat16 stay where they are. Sixteen queries at a time, or on the unit up to four times as many side by side, get
//! their scores, their softmax (that of all attention) and their sums. A position that a query must not see has the
//! probability 0. Values that no query sees may be anything and are replaced by zeros.

use super::{AttendParams, BF16_TILE as QUERIES, HEADER, KvPages, Queries, SPLIT, SPLIT_PAGES};
use crate::bf16::{TILE_BYTES, TILE_ROWS};
use crate::isa::Isa;
use crate::kv::{KvLayout, PAGE, PAIRS};
use crate::packing::BLOCK;
use crate::simd::LANES;
use crate::{amx, pairs};
use convert::Source;
use vectors::{CopyFinite, RoundQuery, Softmax};

mod convert;
mod vectors;

/// Groups of 32 positions in a split.
const GROUPS: usize = SPLIT / BLOCK;
/// Most tiles of queries that pass keys and values together: the unit keeps their sums. And most panels that a tile passes.
const TILES: usize = QUERIES / TILE_ROWS;
/// Floats of a tile of bfloat16.
const TILE_FLOATS: usize = TILE_BYTES / size_of::<f32>();

/// Where the parts of a call's scratch begin, in floats.
#[derive(Clone, Copy)]
struct Parts {
    /// Tiles of keys: page after page, groups of 32 dimensions. Those of the cache may do.
    keys: usize,
    /// Tiles of values: sixteen dimensions after sixteen, groups of 32 positions.
    values: usize,
    /// Tiles of queries: sixteen after sixteen, groups of 32 dimensions.
    queries: usize,
    /// Their scores: rows [`SPLIT`] apart.
    scores: usize,
    /// The probabilities as tiles: sixteen queries after sixteen, groups of 32 positions.
    weights: usize,
    /// The queries' sums.
    sums: usize,
    end: usize,
}

impl Parts {
    fn of(layout: &KvLayout) -> Parts {
        let (dim, groups) = (layout.head_dim(), layout.head_dim().div_ceil(BLOCK));
        let values = if convert::keys_stay(layout) { 0 } else { SPLIT_PAGES * groups * TILE_FLOATS };
        let queries = values + dim / LANES * GROUPS * TILE_FLOATS;
        let scores = queries + TILES * groups * TILE_FLOATS;
        let weights = scores + QUERIES * SPLIT;
        let sums = weights + TILES * GROUPS * TILE_FLOATS;
        Parts { keys: 0, values, queries, scores, weights, sums, end: sums + QUERIES * dim }
    }
}

/// Floats of scratch that a split needs.
pub(super) fn scratch_len(layout: &KvLayout) -> usize {
    Parts::of(layout).end
}

/// One split of a call.
pub(super) struct Bf16Split<'a> {
    isa: Isa,
    kv: &'a KvPages<'a>,
    queries: &'a Queries<'a>,
    params: &'a AttendParams<'a>,
    /// Its first position.
    start: usize,
    parts: Parts,
}

/// Queries of a call of [`Bf16Split::run`], and what any of them sees of the split.
struct Seen {
    first: usize,
    pages: std::ops::Range<usize>,
    blocks: std::ops::Range<usize>,
}

impl<'a> Bf16Split<'a> {
    /// Lays out what the queries see of split `split`, and sets the unit up if there is one. [`Self::done`] comes last.
    ///
    /// # Safety
    /// As for [`super::attend_split`] after its checks; the processor multiplies so; `scratch` is [`scratch_len`] long.
    pub(super) unsafe fn new(
        isa: Isa,
        kv: &'a KvPages<'a>,
        queries: &'a Queries<'a>,
        params: &'a AttendParams<'a>,
        split: usize,
        scratch: &mut [f32],
    ) -> Self {
        let (start, parts) = (split * SPLIT, Parts::of(&kv.layout));
        assert!(scratch.len() >= parts.end, "{} floats of scratch, {} needed", scratch.len(), parts.end);
        let all = Self { isa, kv, queries, params, start, parts };
        if let Some((low, high)) = all.all_seen((0..queries.count()).step_by(queries.heads)) {
            let base = scratch.as_mut_ptr();
            // SAFETY: the caller's word; the parts are within the scratch.
            unsafe {
                let (keys, values) = (base.add(parts.keys).cast(), base.add(parts.values).cast());
                convert::run(isa, Source { kv, start, low, high, keys, values });
            }
        }
        if all.by_amx() {
            amx::configure_strip(queries.count().min(TILE_ROWS));
        }
        all
    }

    /// Whether the matrix unit multiplies, or vectors do.
    fn by_amx(&self) -> bool {
        self.isa == Isa::Amx
    }

    /// The positions of the split that a query sees.
    fn seen(&self, query: usize) -> (usize, usize) {
        let (low, high) = self.queries.span(query);
        (low.max(self.start), high.min(self.start + SPLIT))
    }

    /// Runs the queries `first ..` of as many partial results as are given, at most [`QUERIES`].
    ///
    /// # Safety
    /// As for [`Self::new`], with the same scratch.
    pub(super) unsafe fn run(&self, first: usize, scratch: &mut [f32], partials: &mut [f32]) {
        let (dim, parts) = (self.kv.layout.head_dim(), self.parts);
        let len = HEADER + dim;
        let count = partials.len() / len;
        assert!(count <= QUERIES && scratch.len() >= parts.end, "{count} queries in {} floats", scratch.len());
        let Some((low, high)) = self.all_seen(first..first + count) else { return };
        let (low, high) = (low - self.start, high - self.start);
        let (pages, blocks) = (low / PAGE..high.div_ceil(PAGE), low / BLOCK..high.div_ceil(BLOCK));
        let seen = Seen { first, pages, blocks };
        let base = scratch.as_mut_ptr();
        // SAFETY: all parts are within the scratch, as `Parts` has it; keys and values are there for these positions.
        unsafe {
            self.round_queries(first, count, base);
            let tiles = count.div_ceil(TILE_ROWS);
            match tiles {
                tiles if tiles == 1 || !self.by_amx() => {
                    let rows = |tile| TILE_ROWS.min(count - tile * TILE_ROWS);
                    (0..tiles).for_each(|tile| self.scores_of_one(&seen, (tile, rows(tile)), base));
                    self.softmax(&seen, base, partials);
                    (0..tiles).for_each(|tile| self.sums_of_one(&seen, (tile, rows(tile)), base));
                }
                2 => self.side_by_side::<2>(&seen, base, partials),
                3 => self.side_by_side::<3>(&seen, base, partials),
                _ => self.side_by_side::<TILES>(&seen, base, partials),
            }
        }
        for (q, partial) in partials.chunks_exact_mut(len).enumerate() {
            let (low, high) = self.seen(first + q);
            let (sums, to) = (&scratch[parts.sums + q * dim..][..dim], &mut partial[HEADER..]);
            if low < high && !self.isa.run_widest(CopyFinite { sums, to }) {
                self.sum_alone(q, (low, high), scratch, to);
            }
        }
    }

    /// The positions of the split from the first to the last that any of some queries sees; None if there is none.
    fn all_seen(&self, queries: impl Iterator<Item = usize>) -> Option<(usize, usize)> {
        let spans = queries.map(|query| self.seen(query)).filter(|(low, high)| low < high);
        spans.reduce(|(low, high), (from, to)| (low.min(from), high.max(to)))
    }

    /// `N` tiles of queries, from scores to sums.
    ///
    /// # Safety
    /// `base` is that of the scratch; queries, keys and values are there.
    unsafe fn side_by_side<const N: usize>(&self, seen: &Seen, base: *mut f32, partials: &mut [f32]) {
        // SAFETY: the caller's word.
        unsafe {
            self.scores::<N>(seen, base);
            self.softmax(seen, base, partials);
            self.sums::<N>(seen, base);
        }
    }

    /// # Safety
    /// `base` is that of the scratch.
    unsafe fn round_queries(&self, first: usize, count: usize, base: *mut f32) {
        let groups = self.kv.layout.head_dim().div_ceil(BLOCK);
        for q in 0..count {
            let x = self.queries.get(first + q, self.kv.layout.width());
            // SAFETY: the part has a line in every group for so many queries.
            unsafe {
                let tile = base.add(self.parts.queries + q / TILE_ROWS * groups * TILE_FLOATS);
                let to = tile.add(q % TILE_ROWS * LANES).cast();
                self.isa.run_widest(RoundQuery { x, scale: self.params.scale, groups, to });
            }
        }
    }

    /// A page's tiles of keys: one for every group of dimensions.
    ///
    /// # Safety
    /// `base` is that of the scratch, and the page, counted from the split's first, is seen.
    unsafe fn keys(&self, page: usize, base: *mut f32) -> *const u8 {
        // SAFETY: the caller's word.
        unsafe {
            if convert::keys_stay(&self.kv.layout) {
                self.kv.page(self.start / PAGE + page)
            } else {
                let groups = self.kv.layout.head_dim().div_ceil(BLOCK);
                base.add(self.parts.keys + page * groups * TILE_FLOATS).cast::<u8>().cast_const()
            }
        }
    }

    /// Scores of one tile of queries, of so many rows: four pages at a time.
    ///
    /// # Safety
    /// `base` is that of the scratch; queries and keys are there.
    unsafe fn scores_of_one(&self, seen: &Seen, (tile, rows): (usize, usize), base: *mut f32) {
        let groups = self.kv.layout.head_dim().div_ceil(BLOCK);
        for page in seen.pages.clone().step_by(TILES) {
            let n = (seen.pages.end - page).min(TILES);
            // SAFETY: the caller's word.
            unsafe {
                let mut keys = [std::ptr::null(); TILES];
                for (i, keys) in keys[..n].iter_mut().enumerate() {
                    *keys = self.keys(page + i, base);
                }
                let queries = base.add(self.parts.queries + tile * groups * TILE_FLOATS).cast();
                let to = base.add(self.parts.scores + tile * TILE_ROWS * SPLIT + page * PAGE);
                self.strip(n, (queries, rows), keys, groups, (to, SPLIT * size_of::<f32>()));
            }
        }
    }

    /// Scores of `N` tiles of queries: each page's keys are loaded once for all of them.
    ///
    /// # Safety
    /// As for [`Self::scores_of_one`].
    unsafe fn scores<const N: usize>(&self, seen: &Seen, base: *mut f32) {
        let groups = self.kv.layout.head_dim().div_ceil(BLOCK);
        for page in seen.pages.clone() {
            // SAFETY: the caller's word.
            unsafe {
                let (keys, queries) = (self.keys(page, base), base.add(self.parts.queries).cast::<u8>());
                amx::begin_sums::<N>();
                for group in 0..groups {
                    let queries = queries.add(group * TILE_BYTES).cast_const();
                    amx::column::<N>(keys.add(group * TILE_BYTES), (queries, groups * TILE_BYTES));
                }
                let to = base.add(self.parts.scores + page * PAGE);
                amx::end_sums::<N>(to, TILE_ROWS * SPLIT, SPLIT * size_of::<f32>());
            }
        }
    }

    /// # Safety
    /// `base` is that of the scratch; scores are there.
    unsafe fn softmax(&self, seen: &Seen, base: *mut f32, partials: &mut [f32]) {
        let len = HEADER + self.kv.layout.head_dim();
        for (q, partial) in partials.chunks_exact_mut(len).enumerate() {
            let (low, high) = self.seen(seen.first + q);
            let span = (low.max(self.start) - self.start, high.max(self.start) - self.start);
            // SAFETY: rows of scores, and lines of tiles, for so many queries.
            let (scores, to) = unsafe {
                let scores = base.add(self.parts.scores + q * SPLIT);
                let tile = base.add(self.parts.weights + q / TILE_ROWS * GROUPS * TILE_FLOATS);
                (std::slice::from_raw_parts_mut(scores, SPLIT), tile.add(q % TILE_ROWS * LANES).cast())
            };
            let (softcap, blocks) = (self.params.softcap, seen.blocks.clone());
            (partial[0], partial[1]) = self.isa.run_widest(Softmax { scores, softcap, span, blocks, to });
        }
    }

    /// Sums of one tile of queries, of so many rows: sixty-four dimensions at a time.
    ///
    /// # Safety
    /// `base` is that of the scratch; probabilities and values are there.
    unsafe fn sums_of_one(&self, seen: &Seen, (tile, rows): (usize, usize), base: *mut f32) {
        let dim = self.kv.layout.head_dim();
        for vector in (0..dim / LANES).step_by(TILES) {
            let n = (dim / LANES - vector).min(TILES);
            // SAFETY: the caller's word.
            unsafe {
                let weights = self.parts.weights + (tile * GROUPS + seen.blocks.start) * TILE_FLOATS;
                let values = std::array::from_fn(|i| self.values(vector + i.min(n - 1), seen.blocks.start, base));
                let to = base.add(self.parts.sums + tile * TILE_ROWS * dim + vector * LANES);
                let weights = (base.add(weights).cast::<u8>().cast_const(), rows);
                self.strip(n, weights, values, seen.blocks.len(), (to, dim * size_of::<f32>()));
            }
        }
    }

    /// Sums of `N` tiles of queries: each tile of values is loaded once for all of them.
    ///
    /// # Safety
    /// As for [`Self::sums_of_one`].
    unsafe fn sums<const N: usize>(&self, seen: &Seen, base: *mut f32) {
        let dim = self.kv.layout.head_dim();
        for tile in 0..dim / LANES {
            // SAFETY: the caller's word.
            unsafe {
                amx::begin_sums::<N>();
                for block in seen.blocks.clone() {
                    let weights = base.add(self.parts.weights + block * TILE_FLOATS).cast::<u8>().cast_const();
                    amx::column::<N>(self.values(tile, block, base), (weights, GROUPS * TILE_BYTES));
                }
                let to = base.add(self.parts.sums + tile * LANES);
                amx::end_sums::<N>(to, TILE_ROWS * dim, dim * size_of::<f32>());
            }
        }
    }

    /// The tile of values of sixteen dimensions and 32 positions.
    ///
    /// # Safety
    /// `base` is that of the scratch, which has the tile.
    unsafe fn values(&self, tile: usize, block: usize, base: *mut f32) -> *const u8 {
        // SAFETY: the caller's word.
        unsafe { base.add(self.parts.values + (tile * GROUPS + block) * TILE_FLOATS).cast::<u8>().cast_const() }
    }

    /// `rows` lines of a tile times `n` panels, as [`amx::strip`] and [`pairs::strip`] say.
    ///
    /// # Safety
    /// As for these.
    unsafe fn strip(
        &self,
        n: usize,
        (row, rows): (*const u8, usize),
        panels: [*const u8; TILES],
        groups: usize,
        sums: (*mut f32, usize),
    ) {
        // SAFETY: the caller's word.
        unsafe {
            match (n, self.by_amx()) {
                (4, true) => amx::strip::<4>(row, panels, groups, sums),
                (3, true) => amx::strip::<3>(row, panels, groups, sums),
                (2, true) => amx::strip::<2>(row, panels, groups, sums),
                (_, true) => amx::strip::<1>(row, panels, groups, sums),
                (4, false) => pairs::strip::<4>(rows, row, panels, groups, sums),
                (3, false) => pairs::strip::<3>(rows, row, panels, groups, sums),
                (2, false) => pairs::strip::<2>(rows, row, panels, groups, sums),
                (_, false) => pairs::strip::<1>(rows, row, panels, groups, sums),
            }
        }
    }

    /// The sums of one query over what it sees and nothing else: an infinity that another sees, times the probability 0, is none of
    /// its business. In the order of the unit or the vectors, and with 0 for what is smaller than normal numbers, as both have it.
    fn sum_alone(&self, q: usize, (low, high): (usize, usize), scratch: &[f32], sums: &mut [f32]) {
        let (low, high) = (low - self.start, high - self.start);
        // Of the two words there, the first or the second.
        let normal = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
        let word = |at: usize, second: bool| {
            let bits = scratch[at].to_bits();
            normal(f32::from_bits(if second { bits & !0xffff } else { bits << 16 }))
        };
        let weights = self.parts.weights + q / TILE_ROWS * GROUPS * TILE_FLOATS + q % TILE_ROWS * LANES;
        for (d, sum) in sums.iter_mut().enumerate() {
            *sum = 0.0;
            for block in low / BLOCK..high.div_ceil(BLOCK) {
                let values = self.parts.values + (d / LANES * GROUPS + block) * TILE_FLOATS + d % LANES;
                // The unit has a sum for either word, and adds both to all sums; vectors have one, to which they add the second word's first.
                let mut pair = if self.by_amx() { [0f32; 2] } else { [*sum; 2] };
                // Of every sixteen positions the first eight are paired with the others: words beside each other in a query's line of
                // weights, in lines of their own, a pair for each dimension, in a tile of values.
                for (line, second) in (0..BLOCK / 2).flat_map(|line| [(line, 1), (line, 0)]) {
                    let i = line / PAIRS * LANES + second * PAIRS + line % PAIRS;
                    if (low..high).contains(&(block * BLOCK + i)) {
                        let (weight, value) = (weights + block * TILE_FLOATS + line, values + line * LANES);
                        let to = if self.by_amx() { second } else { 0 };
                        pair[to] = normal(word(weight, second > 0).mul_add(word(value, second > 0), pair[to]));
                    }
                }
                *sum = if self.by_amx() { normal(*sum + normal(pair[0] + pair[1])) } else { pair[0] };
            }
        }
    }

    /// Gives the unit back.
    pub(super) fn done(self) {
        if self.by_amx() {
            amx::release();
        }
    }
}
