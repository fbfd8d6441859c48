//! Keys and values of a split as the matrix unit takes its second operand: of every sixteen dimensions of keys, and of every sixteen
//! positions of values, the first eight are paired with the others, a line for each pair. A cache in bfloat16 is stored like that
//! (`kv.rs`): its keys stay where they are, and lines of values are only copied.

use super::super::KvPages;
use super::super::tile::{BF16, F16, F32, Q8, load_key, load_value};
use super::{GROUPS, TILE_BYTES};
use crate::bf16::{TILE_LINE, round_any};
use crate::isa::{Isa, Kernel};
use crate::kv::{KV_BLOCK, KvDtype, KvLayout, PAGE, PAIRS};
use crate::packing::BLOCK;
use crate::simd::{LANES, Simd};

/// Whether a page's keys are tiles as they are stored.
pub(super) fn keys_stay(layout: &KvLayout) -> bool {
    layout.dtype() == KvDtype::Bf16 && layout.head_dim().is_multiple_of(BLOCK)
}

/// Positions `low..high`, which are of one split, and where their tiles go.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) kv: &'a KvPages<'a>,
    /// The split's first position.
    pub(super) start: usize,
    pub(super) low: usize,
    pub(super) high: usize,
    pub(super) keys: *mut u8,
    pub(super) values: *mut u8,
}

impl Source<'_> {
    /// Whether all positions of a page are among these.
    fn whole(&self, page: usize) -> bool {
        page * PAGE >= self.low && (page + 1) * PAGE <= self.high
    }
}

/// Writes the tiles of keys, unless they stay, and of values, with zeros where positions are not among them.
///
/// # Safety
/// All pages of the positions are readable; there is room for the tiles of a split.
pub(super) unsafe fn run(isa: Isa, source: Source<'_>) {
    match source.kv.layout.dtype() {
        KvDtype::F32 => isa.run_widest(Convert::<F32>(source)),
        KvDtype::F16 => isa.run_widest(Convert::<F16>(source)),
        KvDtype::Bf16 => isa.run_widest(Convert::<BF16>(source)),
        KvDtype::Q8 => isa.run_widest(Convert::<Q8>(source)),
    }
}

struct Convert<'a, const D: u8>(Source<'a>);

impl<const D: u8> Kernel for Convert<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Source { kv, low, high, .. } = self.0;
        let pages = low / PAGE..high.div_ceil(PAGE);
        // SAFETY: pages that hold a position that is seen, and those that complete a block of two.
        unsafe {
            if !keys_stay(&kv.layout) {
                pages.clone().for_each(|page| self.keys(s, page));
            }
            for page in low / BLOCK * 2..high.div_ceil(BLOCK) * 2 {
                if !pages.contains(&page) {
                    self.no_values(s, page);
                } else if D == BF16 && self.0.whole(page) {
                    self.copy_values(s, page);
                } else {
                    self.values(s, page);
                }
            }
        }
    }
}

impl<const D: u8> Convert<'_, D> {
    /// # Safety
    /// The page is within the sequence.
    #[inline(always)]
    unsafe fn keys<S: Simd>(&self, s: S, page: usize) {
        let Source { kv, start, .. } = self.0;
        let dim = kv.layout.head_dim();
        let groups = dim.div_ceil(BLOCK);
        // SAFETY: the caller's word; the tiles are within the part for keys.
        unsafe {
            let from = kv.page(page);
            let to = self.0.keys.add((page - start / PAGE) * groups * TILE_BYTES);
            for first in (0..groups * BLOCK).step_by(LANES) {
                for i in 0..PAIRS {
                    let line = to.add((first / 2 + i) * TILE_LINE);
                    if first < dim {
                        let pair = [self.key(s, from, (first, i)), self.key(s, from, (first + PAIRS, i))];
                        s.store(line.cast(), s.upper_halves(pair[0], pair[1]));
                    } else {
                        s.store(line.cast(), s.zero());
                    }
                }
            }
        }
    }

    /// A dimension of a page's keys, to be cut to bfloat16.
    ///
    /// # Safety
    /// As for [`load_key`].
    #[inline(always)]
    unsafe fn key<S: Simd>(&self, s: S, from: *const u8, (first, i): (usize, usize)) -> S::F {
        // SAFETY: the caller's word; scales follow the codes.
        unsafe {
            let key = load_key::<S, D>(s, from, (first, i));
            if D == BF16 {
                return key;
            }
            if D == Q8 {
                let scales = from.add(PAGE * self.0.kv.layout.head_dim() + first / KV_BLOCK * 4 * PAGE);
                return round_any(s, s.mul(key, s.load(scales.cast())));
            }
            round_any(s, key)
        }
    }

    /// Where a page's lines of sixteen dimensions of values go.
    fn lines(&self, page: usize, tile: usize) -> *mut u8 {
        let page = page - self.0.start / PAGE;
        self.0.values.wrapping_add((tile * GROUPS + page / 2) * TILE_BYTES + page % 2 * PAIRS * TILE_LINE)
    }

    /// # Safety
    /// The page's block is within the split.
    #[inline(always)]
    unsafe fn no_values<S: Simd>(&self, s: S, page: usize) {
        for tile in 0..self.0.kv.layout.head_dim() / LANES {
            let to = self.lines(page, tile);
            // SAFETY: the lines are within the part for values.
            (0..PAIRS).for_each(|line| unsafe { s.store(to.add(line * TILE_LINE).cast(), s.zero()) });
        }
    }

    /// Copies the values of a page in bfloat16 that is seen in full. Prefetches the next page's values and, if keys
    /// stay in place, this page's keys, which are read next.
    ///
    /// # Safety
    /// The page is within the sequence.
    #[inline(always)]
    unsafe fn copy_values<S: Simd>(&self, s: S, page: usize) {
        let Source { kv, high, .. } = self.0;
        let (tiles, half) = (kv.layout.head_dim() / LANES, kv.layout.half_bytes());
        // SAFETY: the caller's word; the lines are within the part for values.
        unsafe {
            let (keys, next) = (kv.page(page), kv.page((page + 1).min(high.div_ceil(PAGE) - 1)).wrapping_add(half));
            for line in 0..PAIRS {
                for tile in 0..tiles {
                    let at = (line * tiles + tile) * TILE_LINE;
                    if keys_stay(&kv.layout) {
                        s.prefetch(keys.wrapping_add(at));
                    }
                    s.prefetch(next.wrapping_add(at));
                    let values = s.load(keys.add(half + at).cast());
                    s.store(self.lines(page, tile).add(line * TILE_LINE).cast(), values);
                }
            }
        }
    }

    /// # Safety
    /// A position of the page is seen.
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, s: S, page: usize) {
        let Source { kv, low, high, .. } = self.0;
        // SAFETY: the caller's word.
        let from = unsafe { kv.page(page).add(kv.layout.half_bytes()) };
        let whole = self.0.whole(page);
        let seen = |slot: usize| whole || (low..high).contains(&(page * PAGE + slot));
        for tile in 0..kv.layout.head_dim() / LANES {
            let to = self.lines(page, tile);
            for line in 0..PAIRS {
                let mut pair = [s.zero(); 2];
                for (half, value) in pair.iter_mut().enumerate() {
                    let slot = line + half * PAIRS;
                    if seen(slot) {
                        // SAFETY: the caller's word.
                        *value = unsafe { self.value(s, from, slot, tile) };
                    }
                }
                // SAFETY: the lines are within the part for values.
                unsafe { s.store(to.add(line * TILE_LINE).cast(), s.upper_halves(pair[0], pair[1])) };
            }
        }
    }

    /// Sixteen dimensions of one position, to be cut to bfloat16.
    ///
    /// # Safety
    /// `from` is a page's values, and the position is stored there.
    #[inline(always)]
    unsafe fn value<S: Simd>(&self, s: S, from: *const u8, slot: usize, tile: usize) -> S::F {
        let layout = &self.0.kv.layout;
        let (dim, scales) = (layout.head_dim(), layout.scale_blocks());
        // SAFETY: the caller's word; scales follow the codes.
        unsafe {
            let mut value = load_value::<S, D>(s, from, dim, slot, tile * LANES);
            if D == BF16 {
                return value;
            }
            if D == Q8 {
                let scale = from.add(PAGE * dim).cast::<f32>().add(slot * scales + tile * LANES / KV_BLOCK);
                value = s.mul(value, s.splat(scale.read_unaligned()));
            }
            round_any(s, value)
        }
    }
}
