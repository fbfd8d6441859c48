//! The inner loops of attention: scores of a tile of queries over pages, softmax of one row of scores, and weighted sums of
//! values. Every result is one chain in a fixed order, whatever the tile.

#![expect(clippy::needless_range_loop, reason = "parallel arrays of registers read best by index")]

use std::ops::Range;

use super::{HEADER, KvPages, SPLIT};
use crate::isa::Kernel;
use crate::kv::{KV_BLOCK, PAGE, PAIRS};
use crate::math;
use crate::simd::{LANES, Simd, prefetch_near};

pub(super) const F32: u8 = 0;
pub(super) const F16: u8 = 1;
pub(super) const BF16: u8 = 2;
pub(super) const Q8: u8 = 3;

/// The inputs that the kernels of a tile share.
#[derive(Clone, Copy)]
pub(super) struct TileView<'a> {
    pub(super) kv: &'a KvPages<'a>,
    pub(super) softcap: Option<f32>,
    /// First position of the split, which is column 0 of the scores.
    pub(super) start: usize,
    /// Whether to prefetch pages: one row reads keys and values from memory.
    pub(super) ahead: bool,
}

/// Keys are prefetched this many pages ahead, or as many as are processed at a time if that is more.
const PAGES_AHEAD: usize = 2;

/// Number of positions that are summed for one vector of dimensions before the next vector. A vector of half floats is half
/// a cache line; the other half is still in a near cache when it is needed.
const NEAR: usize = 64;

/// Scores of `Q` queries (scaled, side by side per dimension) over pages `first..end` of a cache of format `D`, `P` pages at
/// a time. Rows of scores are [`SPLIT`] apart.
pub(super) struct Scores<'a, const D: u8, const Q: usize, const P: usize> {
    pub(super) view: TileView<'a>,
    pub(super) queries: &'a [f32],
    pub(super) scores: &'a mut [f32],
    pub(super) first: usize,
    pub(super) end: usize,
}

impl<const D: u8, const Q: usize, const P: usize> Kernel for Scores<'_, D, Q, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if self.view.ahead { self.all::<S, true>(s) } else { self.all::<S, false>(s) }
    }
}

impl<const D: u8, const Q: usize, const P: usize> Scores<'_, D, Q, P> {
    /// Runs all pages. `AHEAD` is known to the compiler, because loops with prefetches have fewer registers.
    #[inline(always)]
    fn all<S: Simd, const AHEAD: bool>(&mut self, s: S) {
        let mut page = self.first;
        while page + P <= self.end {
            self.pages::<S, P, AHEAD>(s, page);
            page += P;
        }
        while page < self.end {
            self.pages::<S, 1, AHEAD>(s, page);
            page += 1;
        }
    }

    /// Computes the scores of `N` pages: per query and position, one chain over the dimensions.
    #[inline(always)]
    fn pages<S: Simd, const N: usize, const AHEAD: bool>(&mut self, s: S, page: usize) {
        let kv = self.view.kv;
        let dim = kv.layout.head_dim();
        assert!(self.queries.len() == Q * dim);
        let (mut pages, mut later) = ([kv.base; N], [kv.base; N]);
        for n in 0..N {
            // SAFETY: the pages hold positions that a query sees, which were checked to be within the sequence.
            unsafe {
                pages[n] = kv.page(page + n);
                later[n] = kv.page((page + n + N.max(PAGES_AHEAD)).min(self.end - 1));
            }
        }
        let half = kv.layout.half_bytes();
        let bytes = half * PAIRS / dim;
        let ask_at = |d| {
            if AHEAD {
                ask(half, &pages, &later, d / PAIRS * bytes..(d / PAIRS + 1) * bytes);
            }
        };
        let queries = self.queries.as_ptr();
        let mut acc = [[s.zero(); Q]; N];
        if D == Q8 {
            for block in 0..kv.layout.scale_blocks() {
                let mut part = [[s.zero(); Q]; N];
                let from = block * KV_BLOCK;
                // SAFETY: the dimensions are below head_dim.
                unsafe { chains::<S, D, Q, N>(s, &pages, queries, from..dim.min(from + KV_BLOCK), &mut part, ask_at) };
                for n in 0..N {
                    // SAFETY: the scales of K follow its codes.
                    let scale = unsafe { s.load(pages[n].add(PAGE * dim + block * 4 * PAGE).cast()) };
                    for q in 0..Q {
                        acc[n][q] = s.fma(part[n][q], scale, acc[n][q]);
                    }
                }
            }
        } else {
            // SAFETY: the dimensions are below head_dim.
            unsafe { chains::<S, D, Q, N>(s, &pages, queries, 0..dim, &mut acc, ask_at) };
        }
        for (n, acc) in acc.into_iter().enumerate() {
            let column = (page + n) * PAGE - self.view.start;
            for (q, score) in acc.into_iter().enumerate() {
                let capped = match self.view.softcap {
                    Some(cap) => s.mul(s.splat(cap), math::tanh(s, s.div(score, s.splat(cap)))),
                    None => score,
                };
                s.store_part(&mut self.scores[q * SPLIT + column..][..LANES], capped);
            }
        }
    }
}

/// Prefetches a part of later pages' keys and an equal part of these pages' values. The values are `half` bytes after the keys and are
/// used after all keys. The prefetches are spread over the products, since a processor stalls on many at once.
#[inline(always)]
fn ask<const N: usize>(half: usize, pages: &[*const u8; N], later: &[*const u8; N], part: Range<usize>) {
    for at in (part.start.next_multiple_of(64)..part.end).step_by(64) {
        for n in 0..N {
            prefetch_near(later[n].wrapping_add(at));
            prefetch_near(pages[n].wrapping_add(half + at));
        }
    }
}

/// acc[n][q] = fma(query[d][q], K[n][d], acc[n][q]) for d in `dims`. Calls `ask` before every [`PAIRS`] dimensions.
///
/// # Safety
/// `pages` point to K, `queries` to `Q` floats per dimension, and `dims` are below head_dim.
#[inline(always)]
unsafe fn chains<S: Simd, const D: u8, const Q: usize, const N: usize>(
    s: S,
    pages: &[*const u8; N],
    queries: *const f32,
    dims: Range<usize>,
    acc: &mut [[S::F; Q]; N],
    ask: impl Fn(usize),
) {
    // A copy that is never borrowed stays in registers.
    let mut sums = *acc;
    for first in dims.step_by(PAIRS) {
        ask(first);
        for d in first..first + PAIRS {
            // SAFETY: the caller's word; the dimensions are a multiple of sixteen.
            unsafe {
                let mut keys = [s.zero(); N];
                for n in 0..N {
                    keys[n] = load_key::<S, D>(s, pages[n], (first, d - first));
                }
                for q in 0..Q {
                    let query = s.splat(*queries.add(d * Q + q));
                    for n in 0..N {
                        sums[n][q] = s.fma(query, keys[n], sums[n][q]);
                    }
                }
            }
        }
    }
    *acc = sums;
}

/// Turns the scores of one query into exp(score − max), zero outside positions `low..high` (but within their pages). Returns
/// the maximum and the sum.
pub(super) struct Softmax<'a> {
    pub(super) scores: &'a mut [f32],
    pub(super) start: usize,
    pub(super) low: usize,
    pub(super) high: usize,
}

impl Kernel for Softmax<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let (first, end) = (self.low / PAGE * PAGE, self.high.next_multiple_of(PAGE));
        let scores = &mut self.scores[first - self.start..end - self.start];
        let mut best = s.splat(f32::NEG_INFINITY);
        for (index, scores) in scores.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let visible = visible(s, first + index * LANES, self.low, self.high, s.load_part(scores, 0.0));
            best = s.max(visible, best);
            s.store_part(scores, visible);
        }
        let max = s.max_lane(best);
        let mut sum = s.zero();
        for scores in scores.as_chunks_mut::<LANES>().0 {
            let p = math::exp(s, s.sub(s.load_part(scores, 0.0), s.splat(max)));
            sum = s.add(sum, p);
            s.store_part(scores, p);
        }
        (max, s.sum(sum))
    }
}

/// Lanes with a position (`at` + lane) in `low..high` keep their score, the others become −∞.
#[inline(always)]
pub(super) fn visible<S: Simd>(s: S, at: usize, low: usize, high: usize, score: S::F) -> S::F {
    if at >= low && at + LANES <= high {
        return score;
    }
    const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    let lane = s.load_part(&LANE, 0.0);
    let none = s.splat(f32::NEG_INFINITY);
    // Small differences, exact as floats.
    let score = s.select_lt(lane, s.splat(low.saturating_sub(at) as f32), none, score);
    s.select_lt(lane, s.splat(high.saturating_sub(at).min(LANES) as f32), score, none)
}

/// Adds Σ p · V over positions `low..high` to the sums of `N` queries, `M` vectors of dimensions at a time. All of these queries see
/// all of these positions.
pub(super) struct Values<'a, const D: u8, const N: usize, const M: usize> {
    pub(super) view: TileView<'a>,
    /// The exponentials, rows [`SPLIT`] apart.
    pub(super) scores: &'a [f32],
    /// The partial results.
    pub(super) partials: &'a mut [f32],
    pub(super) low: usize,
    pub(super) high: usize,
}

impl<const D: u8, const N: usize, const M: usize> Kernel for Values<'_, D, N, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let vectors = self.view.kv.layout.head_dim() / LANES;
        assert!(self.partials.len() >= N * (HEADER + vectors * LANES) && self.scores.len() >= N * SPLIT);
        assert!(self.low >= self.view.start && self.high <= self.view.start + SPLIT);
        let (high, at_a_time) = (self.high, if M == 1 { NEAR } else { SPLIT });
        while self.low < high {
            self.high = high.min((self.low / at_a_time + 1) * at_a_time);
            let mut vector = 0;
            while vector + M <= vectors {
                self.vectors::<S, M>(s, vector);
                vector += M;
            }
            while vector < vectors {
                self.vectors::<S, 1>(s, vector);
                vector += 1;
            }
            self.low = self.high;
        }
    }
}

impl<const D: u8, const N: usize, const M: usize> Values<'_, D, N, M> {
    /// Adds `W` vectors of dimensions from `vector` on.
    #[inline(always)]
    fn vectors<S: Simd, const W: usize>(&mut self, s: S, vector: usize) {
        let dim = self.view.kv.layout.head_dim();
        let weights = self.scores.as_ptr();
        // SAFETY: positions are visible, thus within the pages, and within this split, thus within the scores; vectors are
        // below head_dim / 16 and there are `N` partial results, as `run` has checked.
        unsafe {
            let sums = self.partials.as_mut_ptr().add(HEADER + vector * LANES);
            let mut acc = [[s.zero(); W]; N];
            for n in 0..N {
                for w in 0..W {
                    acc[n][w] = s.load(sums.add(n * (HEADER + dim) + w * LANES));
                }
            }
            let mut at = self.low;
            while at < self.high {
                let page = self.view.kv.page(at / PAGE).add(self.view.kv.layout.half_bytes());
                let stop = self.high.min((at / PAGE + 1) * PAGE);
                while at < stop {
                    let values = self.load_values::<S, W>(s, page, at % PAGE, vector);
                    for n in 0..N {
                        let p = s.splat(*weights.add(n * SPLIT + at - self.view.start));
                        for w in 0..W {
                            let p = if D == Q8 { s.mul(p, values[w].1) } else { p };
                            acc[n][w] = s.fma(p, values[w].0, acc[n][w]);
                        }
                    }
                    at += 1;
                }
            }
            for n in 0..N {
                for w in 0..W {
                    s.store(sums.add(n * (HEADER + dim) + w * LANES), acc[n][w]);
                }
            }
        }
    }

    /// Loads V of one position in `W` vectors of dimensions, each with its scale (used for Q8 only).
    ///
    /// # Safety
    /// `page` points to V, and the vectors are below head_dim / 16.
    #[inline(always)]
    unsafe fn load_values<S: Simd, const W: usize>(
        &self,
        s: S,
        page: *const u8,
        slot: usize,
        vector: usize,
    ) -> [(S::F, S::F); W] {
        let (dim, blocks) = (self.view.kv.layout.head_dim(), self.view.kv.layout.scale_blocks());
        let mut values = [(s.zero(), s.zero()); W];
        for (w, value) in values.iter_mut().enumerate() {
            // SAFETY: the caller's word; scales follow the codes.
            unsafe {
                value.0 = load_value::<S, D>(s, page, dim, slot, (vector + w) * LANES);
                if D == Q8 {
                    let scale = page.add(PAGE * dim).cast::<f32>().add(slot * blocks + (vector + w) * LANES / KV_BLOCK);
                    value.1 = s.splat(scale.read_unaligned());
                }
            }
        }
        values
    }
}

/// Loads dimension `first + i` of a page's keys of format `D`, for Q8 the codes. `first` is a multiple of eight, and `i` is below
/// eight.
///
/// # Safety
/// The page has the dimension.
#[inline(always)]
pub(super) unsafe fn load_key<S: Simd, const D: u8>(s: S, keys: *const u8, (first, i): (usize, usize)) -> S::F {
    // SAFETY: the caller's word.
    unsafe {
        match D {
            BF16 => load_half(s, keys.add(4 * PAGE * (first / LANES * PAIRS + i)), first % LANES >= PAIRS),
            _ => load::<S, D>(s, keys, (first + i) * PAGE),
        }
    }
}

/// Loads sixteen dimensions of a page's values of format `D` from `d` on, at one position; for Q8 the codes.
///
/// # Safety
/// The page has heads of `dim` dimensions, these among them.
#[inline(always)]
pub(super) unsafe fn load_value<S: Simd, const D: u8>(
    s: S,
    values: *const u8,
    dim: usize,
    slot: usize,
    d: usize,
) -> S::F {
    // SAFETY: the caller's word.
    unsafe {
        match D {
            BF16 => load_half(s, values.add(4 * (slot % PAIRS * dim + d)), slot >= PAIRS),
            _ => load::<S, D>(s, values, slot * dim + d),
        }
    }
}

/// Loads the first or the second elements of sixteen pairs of bfloat16.
///
/// # Safety
/// They lie there.
#[inline(always)]
unsafe fn load_half<S: Simd>(s: S, pairs: *const u8, second: bool) -> S::F {
    // SAFETY: the caller's word.
    let pairs = s.bits(unsafe { s.load(pairs.cast()) });
    s.as_floats(if second { s.and_i(pairs, s.splat_i(!0xffff)) } else { s.shl_i::<16>(pairs) })
}

/// Loads 16 values of format `D` from `index` on; for Q8 the codes.
///
/// # Safety
/// They lie there, counted from `base`.
#[inline(always)]
unsafe fn load<S: Simd, const D: u8>(s: S, base: *const u8, index: usize) -> S::F {
    // SAFETY: the caller's word.
    unsafe {
        match D {
            F32 => s.load(base.add(4 * index).cast()),
            F16 => s.load_f16(base.add(2 * index)),
            _ => s.load_i8(base.add(index)),
        }
    }
}
