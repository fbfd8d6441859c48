//! Tiles over quantized panels: exact integer dot products per group, scaled into float sums.

use std::ops::Range;

use super::{Target, TileTarget, Weights};
use crate::acts::{ACT_BLOCK_BYTES, ActBlock, Acts};
use crate::isa::{Isa, Kernel};
use crate::packing::{BLOCK, PANEL, PackScales, QuantPacking, SUPER};
use crate::simd::{CodeWidth, Simd};

/// Quantized rows that stay in cache while panels stream by, in bytes.
const ROW_BLOCK_BYTES: usize = 256 << 10;

/// `R` rows times `P` panels of `BITS`-bit codes, in groups of 16 (`HALVES`) or 32, with offsets (`OFFSET`) or a zero point.
///
/// The panels advance together, a block each in turn: several streams get more out of the memory than one.
struct Tile<const BITS: u8, const HALVES: bool, const OFFSET: bool, const R: usize, const P: usize> {
    quant: QuantPacking,
    k: usize,
    /// The first panel; the others follow at `panel_bytes`.
    panel: *const u8,
    panel_bytes: usize,
    /// The first row of activations; the others follow at `act_row_bytes`.
    acts: *const u8,
    act_row_bytes: usize,
    targets: [TileTarget; P],
}

impl<const BITS: u8, const HALVES: bool, const OFFSET: bool, const R: usize, const P: usize> Kernel
    for Tile<BITS, HALVES, OFFSET, R, P>
{
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut acc = [[s.zero(); R]; P];
        for block in 0..self.k / BLOCK {
            for (p, acc) in acc.iter_mut().enumerate() {
                // SAFETY: `multiply` only makes tiles of whole panels within the matrix and of rows within the activations.
                unsafe { self.block(s, p, block, acc) };
            }
        }
        for (target, acc) in self.targets.iter().zip(acc) {
            for (r, acc) in acc.into_iter().enumerate() {
                // SAFETY: the tile's rows are within the target.
                unsafe { target.write(s, r, acc) };
            }
        }
    }
}

impl<const BITS: u8, const HALVES: bool, const OFFSET: bool, const R: usize, const P: usize>
    Tile<BITS, HALVES, OFFSET, R, P>
{
    /// Adds a block of panel `p` to the sums of all rows.
    ///
    /// # Safety
    /// The panel has the block, and so have the rows of activations.
    #[inline(always)]
    unsafe fn block<S: Simd>(&self, s: S, p: usize, block: usize, acc: &mut [S::F; R]) {
        let block_bytes = PANEL * BLOCK * BITS as usize / 8;
        let halves = if HALVES { 2 } else { 1 };
        // SAFETY: codes, scales and activations of the block are there, by this function's contract.
        unsafe {
            let panel = self.panel.add(p * self.panel_bytes);
            let codes = unpack::<S, BITS>(s, panel.add(block * block_bytes));
            let all_scales = panel.add(self.k / BLOCK * block_bytes);
            let mut scales = [(s.zero(), s.zero()); 2];
            for (half, scales) in scales[..halves].iter_mut().enumerate() {
                *scales = self.scales(s, all_scales, block * halves + half);
            }
            let acts = self.acts.add(block * ACT_BLOCK_BYTES);
            for (r, acc) in acc.iter_mut().enumerate() {
                let acts = acts.add(r * self.act_row_bytes).cast::<ActBlock>();
                *acc = self.row(s, &codes, &scales, &*acts, *acc);
            }
        }
    }

    /// Adds a block to the sum of one row.
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, codes: &[S::B; 8], scales: &[(S::F, S::F); 2], acts: &ActBlock, acc: S::F) -> S::F {
        let width = match BITS {
            0..=4 => CodeWidth::Four,
            5..=6 => CodeWidth::Six,
            _ => CodeWidth::Eight,
        };
        let bytes = acts.codes.as_ptr().cast::<u8>();
        let act_scale = s.splat(acts.scale);
        if !HALVES {
            let start = self.start(s, acts.minus_sum);
            // SAFETY: eight quads of activations lie at `bytes`.
            let dot = unsafe { s.dot(width, codes, bytes, start) };
            return scaled::<S, OFFSET>(s, dot, scales[0], act_scale, acts.scaled_sum, acc);
        }
        let mut acc = acc;
        let mut half = 0;
        while half < 2 {
            let group = [codes[4 * half], codes[4 * half + 1], codes[4 * half + 2], codes[4 * half + 3]];
            let start = self.start(s, acts.minus_half_sums[half]);
            // SAFETY: four quads of activations lie at `bytes + 16 · half`.
            let dot = unsafe { s.dot(width, &group, bytes.add(16 * half), start) };
            acc = scaled::<S, OFFSET>(s, dot, scales[half], act_scale, acts.scaled_half_sums[half], acc);
            half += 1;
        }
        acc
    }

    /// What an integer sum starts from: −zero · Σ act.
    #[inline(always)]
    fn start<S: Simd>(&self, s: S, minus_sum: i32) -> S::I {
        if OFFSET { s.splat_i(0) } else { s.mul_i(s.splat_i(minus_sum), s.splat_i(i32::from(self.quant.zero))) }
    }

    /// The scale and offset of group `group` of a panel.
    ///
    /// # Safety
    /// `at` points to the scales of a panel that has the group.
    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, s: S, at: *const u8, group: usize) -> (S::F, S::F) {
        let parts = 1 + usize::from(OFFSET);
        // SAFETY: the layout is `packing`'s.
        unsafe {
            if self.quant.scales == PackScales::Super {
                let groups = if HALVES { SUPER / 16 } else { SUPER / 32 };
                let at = at.add(group / groups * parts * PANEL * (2 + groups));
                let small = at.add(parts * 2 * PANEL + group % groups * PANEL);
                let scale = s.mul(s.load_f16(at), s.load_i8(small));
                if !OFFSET {
                    return (scale, s.zero());
                }
                let offset = s.mul(s.load_f16(at.add(2 * PANEL)), s.load_u8(small.add(groups * PANEL)));
                return (scale, s.sub(s.splat(-0.0), offset));
            }
            let wide = self.quant.scales == PackScales::F32;
            let bytes = PANEL * if wide { 4 } else { 2 };
            let at = at.add(group * parts * bytes);
            let offset = if OFFSET { load_scales(s, at.add(bytes), wide) } else { s.zero() };
            (load_scales(s, at, wide), offset)
        }
    }
}

/// Scales an integer sum and adds it, then the offset's part.
#[inline(always)]
fn scaled<S: Simd, const OFFSET: bool>(
    s: S,
    dot: S::I,
    (scale, offset): (S::F, S::F),
    act_scale: S::F,
    scaled_sum: f32,
    acc: S::F,
) -> S::F {
    let acc = s.fma(s.float(dot), s.mul(scale, act_scale), acc);
    if OFFSET { s.fma(offset, s.splat(scaled_sum), acc) } else { acc }
}

/// 16 scales, single (`wide`) or half precision.
///
/// # Safety
/// They lie at `at`.
#[inline(always)]
unsafe fn load_scales<S: Simd>(s: S, at: *const u8, wide: bool) -> S::F {
    // SAFETY: the caller's word.
    unsafe { if wide { s.load(at.cast()) } else { s.load_f16(at) } }
}

/// The 8 quads of a block, as bytes.
///
/// # Safety
/// A block of `BITS`-bit codes lies at `at`.
#[inline(always)]
unsafe fn unpack<S: Simd, const BITS: u8>(s: S, at: *const u8) -> [S::B; 8] {
    // SAFETY: the planes of the block, laid out as `packing` says, are all there.
    unsafe {
        let first = s.load_bytes(at);
        let mut codes = [first; 8];
        let mut quad = 0;
        while quad < 8 {
            let mut position = 0i32;
            let mut plane = at;
            if BITS == 8 {
                codes[quad] = s.load_bytes(at.add(64 * quad));
            }
            if BITS & 4 != 0 {
                let shift = if quad < 4 { 0 } else { 4 };
                codes[quad] = s.shift_mask(s.load_bytes(plane.add(64 * (quad % 4))), shift, 15);
                (position, plane) = (4, plane.add(256));
            }
            if BITS & 2 != 0 {
                let bits = s.load_bytes(plane.add(64 * (quad / 4)));
                let bits = s.shift_mask(bits, 2 * (quad as i32 % 4) - position, 3 << position);
                codes[quad] = if position == 0 { bits } else { s.or_b(codes[quad], bits) };
                (position, plane) = (position + 2, plane.add(128));
            }
            if BITS & 1 != 0 {
                let bits = s.shift_mask(s.load_bytes(plane), quad as i32 - position, 1 << position);
                codes[quad] = s.or_b(codes[quad], bits);
            }
            quad += 1;
        }
        codes
    }
}

/// What all tiles of one call share.
struct Job<'a> {
    isa: Isa,
    weights: &'a Weights<'a>,
    quant: QuantPacking,
    acts: &'a Acts<'a>,
    target: Target,
}

impl Job<'_> {
    /// # Safety
    /// `P` panels from `panel` and `R` rows from `row` are within what `linear` has checked.
    unsafe fn tile<const BITS: u8, const HALVES: bool, const OFFSET: bool, const R: usize, const P: usize>(
        &self,
        panel: usize,
        row: usize,
    ) -> Tile<BITS, HALVES, OFFSET, R, P> {
        let (packing, acts) = (self.weights.packing, self.acts);
        let act_row_bytes = acts.layout().row_bytes();
        // SAFETY: panels and rows are within the matrix, the activations and the target, by this function's contract.
        let (targets, first, acts) = unsafe {
            (
                std::array::from_fn(|p| TileTarget::new(self.weights, self.target, panel + p, row)),
                self.weights.data.as_ptr().add(panel * packing.panel_bytes()),
                acts.as_ptr().add(row * act_row_bytes),
            )
        };
        let panel_bytes = packing.panel_bytes();
        Tile { quant: self.quant, k: packing.k(), panel: first, panel_bytes, acts, act_row_bytes, targets }
    }

    /// Rows times panels: a few panels together for all rows, then the next few. Tiles are the largest that fit and that the
    /// instruction set has registers for, with at least two panels where there are, as streams from memory.
    ///
    /// # Safety
    /// As for [`Job::tile`].
    unsafe fn tiles<const BITS: u8, const HALVES: bool, const OFFSET: bool>(
        &self,
        panels: Range<usize>,
        rows: Range<usize>,
    ) {
        let mut panel = panels.start;
        while panel < panels.end {
            let step = match panels.end - panel {
                4.. if self.isa != Isa::Portable => 4,
                2.. if self.isa == Isa::Avx512 => 2,
                _ => 1,
            };
            let mut row = rows.start;
            while row < rows.end {
                // SAFETY: no tile goes beyond `panels` or `rows`; the rest is the caller's word.
                row += unsafe { self.few_panels::<BITS, HALVES, OFFSET>(panel..panel + step, row, rows.end - row) };
            }
            panel += step;
        }
    }

    /// Some of the `left` rows from `row` on times 1, 2 or 4 panels; returns how many rows.
    ///
    /// # Safety
    /// As for [`Job::tile`].
    unsafe fn few_panels<const BITS: u8, const HALVES: bool, const OFFSET: bool>(
        &self,
        panels: Range<usize>,
        row: usize,
        left: usize,
    ) -> usize {
        let (isa, first) = (self.isa, panels.start);
        // SAFETY: every tile is within `panels` and the `left` rows; the rest is the caller's word.
        unsafe {
            match (isa, panels.len(), left) {
                (Isa::Avx512, 2.., 8..) => {
                    for panel in panels.step_by(2) {
                        isa.run_widest(self.tile::<BITS, HALVES, OFFSET, 8, 2>(panel, row));
                    }
                    8
                }
                (Isa::Avx512, 2.., 4..) => {
                    for panel in panels.step_by(2) {
                        isa.run_widest(self.tile::<BITS, HALVES, OFFSET, 4, 2>(panel, row));
                    }
                    4
                }
                (Isa::Avx2, _, 4..) => {
                    for panel in panels {
                        isa.run_vector(self.tile::<BITS, HALVES, OFFSET, 4, 1>(panel, row));
                    }
                    4
                }
                (_, 4, _) => {
                    isa.run_vector(self.tile::<BITS, HALVES, OFFSET, 1, 4>(first, row));
                    1
                }
                _ => {
                    for panel in panels {
                        isa.run(self.tile::<BITS, HALVES, OFFSET, 1, 1>(panel, row));
                    }
                    1
                }
            }
        }
    }

    /// # Safety
    /// As for [`Job::tile`].
    unsafe fn bits<const BITS: u8>(&self, panels: Range<usize>, rows: Range<usize>) {
        // SAFETY: the caller's word.
        unsafe {
            match (self.quant.group == 16, self.quant.offset) {
                (false, false) => self.tiles::<BITS, false, false>(panels, rows),
                (false, true) => self.tiles::<BITS, false, true>(panels, rows),
                (true, false) => self.tiles::<BITS, true, false>(panels, rows),
                (true, true) => self.tiles::<BITS, true, true>(panels, rows),
            }
        }
    }
}

/// # Safety
/// As for [`super::linear`], which has checked the shapes.
pub(super) unsafe fn multiply(
    isa: Isa,
    weights: &Weights<'_>,
    quant: QuantPacking,
    acts: &Acts<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
    target: Target,
) {
    let job = Job { isa, weights, quant, acts, target };
    let step = (ROW_BLOCK_BYTES / acts.layout().row_bytes()).next_multiple_of(8).max(8);
    for start in rows.clone().step_by(step) {
        let (panels, rows) = (panels.clone(), start..rows.end.min(start + step));
        // SAFETY: within the ranges that `linear` has checked.
        unsafe {
            match quant.bits {
                2 => job.bits::<2>(panels, rows),
                3 => job.bits::<3>(panels, rows),
                4 => job.bits::<4>(panels, rows),
                5 => job.bits::<5>(panels, rows),
                6 => job.bits::<6>(panels, rows),
                _ => job.bits::<8>(panels, rows),
            }
        }
    }
}
