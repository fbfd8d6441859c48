//! One split of attention on the matrix unit, for rows that are rounded: queries, keys, values and probabilities are rounded to
//! bfloat16, sums are single precision (`unit::strip` says in which order), and so is everything between scores and probabilities.
//!
//! The split's keys and values are converted once for all queries of the call. Then sixteen queries at a time have their scores, their
//! softmax, which is that of all attention, and their sums. What a query must not see has the probability 0; what nobody sees,
//! which may be anything, is replaced by zeros.

use super::tile::{BF16, F16, F32, Q8, load, visible};
use super::{AttendParams, HEADER, KvPages, Queries, SPLIT, clear};
use crate::isa::{Isa, Kernel};
use crate::kv::{KV_BLOCK, KvDtype, KvLayout, PAGE};
use crate::math;
use crate::packing::BLOCK;
use crate::rounded::{QUAD_BYTES, TILE_BYTES, TILE_ROWS, round_up, store_half, store_quad};
use crate::simd::{LANES, Simd};
use crate::unit;

/// Groups of 32 positions in a split.
const GROUPS: usize = SPLIT / BLOCK;
const _: () = assert!(TILE_ROWS == 2 * super::TILE, "queries of a tile");
/// Floats of a tile of bfloat16.
const TILE_FLOATS: usize = TILE_BYTES / size_of::<f32>();
/// Pages of a group.
const PAGES: usize = BLOCK / PAGE;

/// Where the parts of a call's scratch begin, in floats.
#[derive(Clone, Copy)]
struct Parts {
    /// Tiles of keys: page after page, groups of 32 dimensions.
    keys: usize,
    /// Tiles of values: sixteen dimensions after sixteen, groups of 32 positions.
    values: usize,
    /// A tile of queries.
    queries: usize,
    /// Its scores, then probabilities: rows [`SPLIT`] apart.
    scores: usize,
    /// The probabilities as tiles.
    weights: usize,
    /// The queries' sums.
    sums: usize,
    end: usize,
}

impl Parts {
    fn of(layout: &KvLayout) -> Parts {
        let (dim, groups) = (layout.head_dim(), layout.head_dim().div_ceil(BLOCK));
        let values = SPLIT / PAGE * groups * TILE_FLOATS;
        let queries = values + dim / LANES * GROUPS * TILE_FLOATS;
        let scores = queries + groups * TILE_FLOATS;
        let weights = scores + TILE_ROWS * SPLIT;
        let sums = weights + GROUPS * TILE_FLOATS;
        Parts { keys: 0, values, queries, scores, weights, sums, end: sums + TILE_ROWS * dim }
    }
}

/// Floats of scratch that a split needs.
pub(super) fn scratch_len(layout: &KvLayout) -> usize {
    Parts::of(layout).end
}

/// One split of a call.
pub(super) struct RoundedSplit<'a> {
    isa: Isa,
    kv: &'a KvPages<'a>,
    queries: &'a Queries<'a>,
    params: &'a AttendParams<'a>,
    /// Its first position.
    start: usize,
    parts: Parts,
}

impl<'a> RoundedSplit<'a> {
    /// Converts what the queries see of split `split`, and sets the unit up. [`Self::done`] comes last.
    ///
    /// # Safety
    /// As for [`super::attend_split`], whose checks have been made; the processor has the unit; `scratch` is [`scratch_len`] long.
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
        let seen = (0..queries.spans.len()).map(|row| all.seen(row * queries.heads)).filter(|(low, high)| low < high);
        let (low, high) = seen.fold((usize::MAX, 0), |(low, high), (from, to)| (low.min(from), high.max(to)));
        if low < high {
            let base = scratch.as_mut_ptr();
            // SAFETY: the caller's word; the parts are within the scratch.
            let (keys, values) = unsafe { (base.add(parts.keys).cast(), base.add(parts.values).cast()) };
            match kv.layout.dtype() {
                KvDtype::F32 => isa.run_widest(Convert::<F32> { kv, start, low, high, keys, values }),
                KvDtype::F16 => isa.run_widest(Convert::<F16> { kv, start, low, high, keys, values }),
                KvDtype::Bf16 => isa.run_widest(Convert::<BF16> { kv, start, low, high, keys, values }),
                KvDtype::Q8 => isa.run_widest(Convert::<Q8> { kv, start, low, high, keys, values }),
            }
        }
        unit::configure_full();
        all
    }

    /// The positions of the split that a query sees.
    fn seen(&self, query: usize) -> (usize, usize) {
        let (low, high) = self.queries.span(query);
        (low.max(self.start), high.min(self.start + SPLIT))
    }

    /// Runs the queries `first ..` of as many partial results as are given, at most sixteen.
    ///
    /// # Safety
    /// As for [`Self::new`], with the same scratch.
    pub(super) unsafe fn run(&self, first: usize, scratch: &mut [f32], partials: &mut [f32]) {
        let (dim, parts) = (self.kv.layout.head_dim(), self.parts);
        let len = HEADER + dim;
        let count = partials.len() / len;
        assert!(count <= TILE_ROWS && scratch.len() >= parts.end, "{count} queries in {} floats", scratch.len());
        partials.chunks_exact_mut(len).for_each(clear);
        let mut spans = [(0, 0); TILE_ROWS];
        let (mut low, mut high) = (usize::MAX, 0);
        for (q, span) in spans[..count].iter_mut().enumerate() {
            *span = self.seen(first + q);
            if span.0 < span.1 {
                (low, high) = (low.min(span.0), high.max(span.1));
            }
        }
        if low >= high {
            return;
        }
        let base = scratch.as_mut_ptr();
        let groups = dim.div_ceil(BLOCK);
        let pages = (low - self.start) / PAGE..(high - self.start).div_ceil(PAGE);
        let blocks = (low - self.start) / BLOCK..(high - self.start).div_ceil(BLOCK);
        // SAFETY: all parts are within the scratch, as `Parts` has it; keys and values were converted for these positions.
        unsafe {
            for q in 0..count {
                let x = self.queries.get(first + q, self.kv.layout.width());
                let to = base.add(parts.queries).cast::<u8>().add(q * 2 * BLOCK);
                self.isa.run_widest(RoundQuery { x, scale: self.params.scale, groups, to });
            }
            let (keys, page_bytes) = (base.add(parts.keys).cast::<u8>(), groups * TILE_BYTES);
            let queries = base.add(parts.queries).cast();
            strips(pages.len(), |page, n| {
                let page = pages.start + page;
                let keys = (keys.add(page * page_bytes).cast_const(), page_bytes);
                let scores = (base.add(parts.scores + page * PAGE), SPLIT * size_of::<f32>());
                by_panels(n, queries, keys, groups, scores);
            });
            for (q, (low, high)) in spans[..count].iter().copied().enumerate() {
                let scores = std::slice::from_raw_parts_mut(base.add(parts.scores + q * SPLIT), SPLIT);
                let to = base.add(parts.weights).cast::<u8>().add(q * 2 * BLOCK);
                let span = (low.max(self.start) - self.start, high.max(self.start) - self.start);
                let softcap = self.params.softcap;
                let softmax = Softmax { scores, softcap, span, blocks: blocks.clone(), to };
                let partial = &mut partials[q * len..];
                (partial[0], partial[1]) = self.isa.run_widest(softmax);
            }
            let weights = base.add(parts.weights).cast::<u8>().add(blocks.start * TILE_BYTES);
            let values = base.add(parts.values).cast::<u8>().add(blocks.start * TILE_BYTES);
            strips(dim / LANES, |tile, n| {
                let values = (values.add(tile * GROUPS * TILE_BYTES).cast_const(), GROUPS * TILE_BYTES);
                let sums = (base.add(parts.sums + tile * LANES), dim * size_of::<f32>());
                by_panels(n, weights, values, blocks.len(), sums);
            });
        }
        for (q, partial) in partials.chunks_exact_mut(len).enumerate().filter(|(q, _)| spans[*q].0 < spans[*q].1) {
            let (sums, to) = (&scratch[parts.sums + q * dim..][..dim], &mut partial[HEADER..]);
            if !self.isa.run_widest(CopyFinite { sums, to }) {
                self.sum_alone(q, spans[q], scratch, to);
            }
        }
    }

    /// The sums of one query over what it sees and nothing else: an infinity that another sees, times the probability 0, is none of
    /// its business. In the unit's order.
    fn sum_alone(&self, q: usize, (low, high): (usize, usize), scratch: &[f32], sums: &mut [f32]) {
        let (low, high) = (low - self.start, high - self.start);
        // Of the two words there, the first or the second.
        let word = |at: usize, second: bool| {
            let bits = scratch[at].to_bits();
            f32::from_bits(if second { bits & !0xffff } else { bits << 16 })
        };
        for (d, sum) in sums.iter_mut().enumerate() {
            *sum = 0.0;
            for block in low / BLOCK..high.div_ceil(BLOCK) {
                let mut pair = [0f32; 2];
                for i in (0..BLOCK).filter(|i| (low..high).contains(&(block * BLOCK + i))) {
                    // Of every four positions 0 and 2 are the words of a first pair, 1 and 3 of a second: beside each other in a query's
                    // line of weights, in lines of their own, a pair for each dimension, in a tile of values.
                    let (line, second) = (2 * (i / 4) + i % 2, i % 4 / 2);
                    let weight = self.parts.weights + block * TILE_FLOATS + q * LANES + line;
                    let value =
                        self.parts.values + (d / LANES * GROUPS + block) * TILE_FLOATS + line * LANES + d % LANES;
                    pair[second] = word(weight, second > 0).mul_add(word(value, second > 0), pair[second]);
                }
                *sum += pair[0] + pair[1];
            }
        }
    }

    /// Gives the unit back.
    pub(super) fn done(self) {
        unit::release();
    }
}

/// Cuts `count` panels into strips of at most four.
fn strips(count: usize, mut each: impl FnMut(usize, usize)) {
    (0..count).step_by(4).for_each(|first| each(first, (count - first).min(4)));
}

/// # Safety
/// As for [`unit::strip`].
unsafe fn by_panels(n: usize, row: *const u8, panels: (*const u8, usize), groups: usize, sums: (*mut f32, usize)) {
    // SAFETY: the caller's word.
    unsafe {
        match n {
            4 => unit::strip::<4>(row, panels, groups, sums),
            3 => unit::strip::<3>(row, panels, groups, sums),
            2 => unit::strip::<2>(row, panels, groups, sums),
            _ => unit::strip::<1>(row, panels, groups, sums),
        }
    }
}

/// Writes the keys and values of positions `low..high`, which are of one split, as the unit takes them. Values beside them are zeros.
struct Convert<'a, const D: u8> {
    kv: &'a KvPages<'a>,
    /// The split's first position.
    start: usize,
    low: usize,
    high: usize,
    keys: *mut u8,
    values: *mut u8,
}

impl<const D: u8> Kernel for Convert<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for page in self.low / PAGE..self.high.div_ceil(PAGE) {
            // SAFETY: the page holds a position that a query sees.
            unsafe { self.keys(s, page) };
        }
        for block in self.low / BLOCK..self.high.div_ceil(BLOCK) {
            // SAFETY: likewise.
            unsafe { self.values(s, block) };
        }
    }
}

impl<const D: u8> Convert<'_, D> {
    /// # Safety
    /// The page is within the sequence.
    #[inline(always)]
    unsafe fn keys<S: Simd>(&self, s: S, page: usize) {
        let dim = self.kv.layout.head_dim();
        let groups = dim.div_ceil(BLOCK);
        // SAFETY: the caller's word; the tiles are within the part for keys.
        unsafe {
            let from = self.kv.page(page);
            let to = self.keys.add((page * PAGE - self.start) / PAGE * groups * TILE_BYTES);
            let element = |d: usize| {
                if d >= dim {
                    return s.zero();
                }
                let mut key = load::<S, D>(s, from, d * PAGE);
                if D == Q8 {
                    key = s.mul(key, s.load(from.add(PAGE * dim + d / KV_BLOCK * 4 * PAGE).cast()));
                }
                round_up(s, key)
            };
            for quad in 0..groups * BLOCK / 4 {
                let at = 4 * quad;
                store_quad(
                    s,
                    to.add(QUAD_BYTES * quad),
                    [element(at), element(at + 1), element(at + 2), element(at + 3)],
                );
            }
        }
    }

    /// # Safety
    /// A position of the block is within the sequence.
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, s: S, block: usize) {
        let layout = &self.kv.layout;
        let (dim, scales) = (layout.head_dim(), layout.scale_blocks());
        let mut pages = [std::ptr::null::<u8>(); PAGES];
        for (page, at) in (block * PAGES..).zip(&mut pages) {
            if page * PAGE < self.high && (page + 1) * PAGE > self.low {
                // SAFETY: the page holds a position that a query sees.
                *at = unsafe { self.kv.page(page).add(layout.half_bytes()) };
            }
        }
        for tile in 0..dim / LANES {
            let element = |i: usize| {
                if !(self.low..self.high).contains(&(block * BLOCK + i)) {
                    return s.zero();
                }
                let (page, slot) = (pages[i / PAGE], i % PAGE);
                // SAFETY: a position that a query sees: its page is there; scales follow the codes.
                unsafe {
                    let mut value = load::<S, D>(s, page, slot * dim + tile * LANES);
                    if D == Q8 {
                        let scale = page.add(PAGE * dim).cast::<f32>().add(slot * scales + tile * LANES / KV_BLOCK);
                        value = s.mul(value, s.splat(scale.read_unaligned()));
                    }
                    round_up(s, value)
                }
            };
            // SAFETY: the tiles are within the part for values.
            unsafe {
                let to = self.values.add((tile * GROUPS + block % GROUPS) * TILE_BYTES);
                for quad in 0..BLOCK / 4 {
                    let at = 4 * quad;
                    store_quad(
                        s,
                        to.add(QUAD_BYTES * quad),
                        [element(at), element(at + 1), element(at + 2), element(at + 3)],
                    );
                }
            }
        }
    }
}

/// Writes one query, scaled, as a row of tiles.
struct RoundQuery<'a> {
    x: &'a [f32],
    scale: f32,
    groups: usize,
    to: *mut u8,
}

impl Kernel for RoundQuery<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for half in 0..2 * self.groups {
            let part = self.x.get(half * LANES..).unwrap_or(&[]);
            let value = s.mul(s.load_part(part, 0.0), s.splat(self.scale));
            // SAFETY: the row has as many halves.
            unsafe { store_half(s, self.to, half, value) };
        }
    }
}

/// The softmax of one query's scores, of which it sees those of `span`: writes exp(score − max), rounded, as a row of tiles, with zeros
/// in the rest of `blocks`. Returns the maximum and the sum of what is not rounded yet; of no position −∞ and 0.
struct Softmax<'a> {
    scores: &'a mut [f32],
    softcap: Option<f32>,
    span: (usize, usize),
    blocks: std::ops::Range<usize>,
    to: *mut u8,
}

impl Kernel for Softmax<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let Softmax { scores, softcap, span: (low, high), blocks, to } = self;
        let own = if low < high { low / LANES..high.div_ceil(LANES) } else { 0..0 };
        let scores = scores.as_chunks_mut::<LANES>().0;
        let mut best = s.splat(f32::NEG_INFINITY);
        for (vector, scores) in scores[own.clone()].iter_mut().enumerate() {
            let mut score = s.load_part(scores, 0.0);
            if let Some(cap) = softcap {
                score = s.mul(s.splat(cap), math::tanh(s, s.div(score, s.splat(cap))));
            }
            let score = visible(s, (own.start + vector) * LANES, low, high, score);
            best = s.max(score, best);
            s.store_part(scores, score);
        }
        let max = s.max_lane(best);
        let mut sum = s.zero();
        let first = 2 * blocks.start;
        for (vector, scores) in (first..).zip(&scores[first..2 * blocks.end]) {
            let mut p = s.zero();
            if own.contains(&vector) {
                p = math::exp_rough(s, s.sub(s.load_part(scores, 0.0), s.splat(max)));
                sum = s.add(sum, p);
            }
            // SAFETY: the row has as many halves as the split vectors.
            unsafe { store_half(s, to, vector, p) };
        }
        (max, s.sum(sum))
    }
}

/// Copies sums and says whether all of them are finite.
struct CopyFinite<'a> {
    sums: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel for CopyFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let mut worst = s.splat_i(0);
        for (sums, to) in self.sums.as_chunks::<LANES>().0.iter().zip(self.to.as_chunks_mut::<LANES>().0) {
            let sums = s.load_part(sums, 0.0);
            worst = s.max_i(worst, s.bits(s.abs(sums)));
            s.store_part(to, sums);
        }
        s.to_array(s.as_floats(worst)).iter().all(|worst| worst.is_finite())
    }
}

#[cfg(test)]
mod tests;
