//! Tiles over quantized panels: exact integer dot products per group, scaled into float sums.

mod ahead;

use std::ops::Range;

use self::ahead::{Ahead, ROWS};
use super::codes::{self, ByFormat};
use super::{Target, TileTarget, Weights};
use crate::acts::{ActBlock, ActForm, ActSums, Acts};
use crate::isa::{Isa, Kernel};
use crate::packing::{BLOCK, QuantPacking, SUPER};
use crate::simd::Simd;

/// Panels of fewer bytes are too short for the processor's own prefetcher.
const SHORT_PANEL: usize = 32 << 10;
/// Bytes of quantized rows that stay in the second-level cache while panels stream by.
const ROW_BLOCK_BYTES: usize = 256 << 10;
/// [`ROW_BLOCK_BYTES`] for the matrix unit, which unpacks a panel for every block of rows and has 2 MiB of second-level cache.
const TILED_BLOCK_BYTES: usize = 1 << 20;
/// At most this many rows in a block: the matrix unit keeps their sums.
pub(super) const MOST_ROWS: usize = 128;

/// `R` rows of numbers of `PLANES` bytes, times `P` panels of codes of form `CODE`, in groups of 16 (`HALVES`) or 32, with offsets
/// (`OFFSET`) or a zero point.
///
/// The panels advance together, one block each in turn: several streams read memory faster than one.
struct Tile<const CODE: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize, const P: usize>
{
    quant: QuantPacking,
    k: usize,
    /// The first panel; the others follow at `panel_bytes`.
    panel: *const u8,
    panel_bytes: usize,
    /// Bytes of scales per block, roughly.
    scale_bytes: usize,
    ahead: Ahead,
    /// The first row of activations; the others follow at `act_row_bytes`.
    acts: *const u8,
    act_row_bytes: usize,
    targets: [TileTarget; P],
}

/// Tiles side by side. The kernel itself walks over them: with a call per tile, each would wait for the one before.
struct Sweep<
    'a,
    const CODE: u8,
    const HALVES: bool,
    const OFFSET: bool,
    const PLANES: usize,
    const R: usize,
    const P: usize,
> {
    job: &'a Job<'a>,
    /// A multiple of `P` panels.
    panels: Range<usize>,
    /// A multiple of `R` rows.
    rows: Range<usize>,
}

impl<const CODE: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize, const P: usize> Kernel
    for Sweep<'_, CODE, HALVES, OFFSET, PLANES, R, P>
{
    /// One past its last row.
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        for row in self.rows.clone().step_by(R) {
            let ahead = self.ahead(row);
            for panel in self.panels.clone().step_by(P) {
                // SAFETY: within what `linear` has checked, as the code that made the sweep promises.
                unsafe { self.job.tile::<CODE, HALVES, OFFSET, PLANES, R, P>(panel, row, ahead) }.multiply(s);
            }
        }
        self.rows.end
    }
}

impl<const CODE: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize, const P: usize>
    Sweep<'_, CODE, HALVES, OFFSET, PLANES, R, P>
{
    /// Returns the prefetches of the tiles from `row` on: the panels after this sweep's. A single row of byte codes has so few
    /// instructions that the processor itself looks far enough ahead, unless the panel is short.
    #[inline(always)]
    fn ahead(&self, row: usize) -> Ahead {
        let Job { rows, panel_bytes, .. } = self.job;
        match codes::bits(CODE) == 8 && rows.len() == 1 && *panel_bytes >= SHORT_PANEL {
            true => Ahead::NONE,
            false => {
                let blocks = self.job.weights.packing.k() / BLOCK;
                Ahead::of(rows, row, blocks, codes::near::<CODE>(), self.panels.len() * panel_bytes)
            }
        }
    }
}

impl<const CODE: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize, const P: usize>
    Tile<CODE, HALVES, OFFSET, PLANES, R, P>
{
    #[inline(always)]
    fn multiply<S: Simd>(self, s: S) {
        let mut acc = [[s.zero(); R]; P];
        let mut due = self.ahead.first;
        for block in 0..self.k / BLOCK {
            let asks = block == due;
            if asks {
                due += self.ahead.every;
            }
            for (p, acc) in acc.iter_mut().enumerate() {
                // SAFETY: tiles are of whole panels within the matrix and of rows within the activations.
                unsafe { self.block(s, p, block, asks, acc) };
            }
        }
        for (target, acc) in self.targets.iter().zip(acc) {
            for (r, acc) in acc.into_iter().enumerate() {
                // SAFETY: the tile's rows are within the target.
                unsafe { target.write(s, r, acc) };
            }
        }
    }

    /// Adds a block of panel `p` to the sums of all rows, and prefetches a later one if `asks`.
    ///
    /// # Safety
    /// The panel has the block, and so have the rows of activations.
    #[inline(always)]
    unsafe fn block<S: Simd>(&self, s: S, p: usize, block: usize, asks: bool, acc: &mut [S::F; R]) {
        let block_bytes = codes::block_bytes(CODE);
        let halves = if HALVES { 2 } else { 1 };
        // SAFETY: codes, scales and activations of the block are there, by this function's contract.
        unsafe {
            let panel = self.panel.add(p * self.panel_bytes);
            let codes = codes::levels::<S, CODE>(s, panel.add(block * block_bytes), self.quant.levels());
            if asks {
                let (next, block) = self.ahead.target(block, self.k / BLOCK);
                codes::prefetch_block::<S, CODE>(s, panel.wrapping_add(next), self.k, block, self.scale_bytes);
            }
            let all_scales = panel.add(self.k / BLOCK * block_bytes);
            let mut scales = [(s.zero(), s.zero()); 2];
            for (half, scales) in scales[..halves].iter_mut().enumerate() {
                *scales = codes::scales::<S, HALVES, OFFSET>(s, &self.quant, all_scales, block * halves + half);
            }
            let acts = self.acts.add(block * size_of::<ActBlock<PLANES>>());
            let mut row = 0;
            while row < R {
                // In groups of 16 the rows share too few codes to pay for the registers.
                if HALVES || !R.is_multiple_of(4) {
                    self.rows::<S, 1>(s, &codes, &scales, (acts, row), acc);
                    row += 1;
                } else {
                    self.rows::<S, 4>(s, &codes, &scales, (acts, row), acc);
                    row += 4;
                }
            }
        }
    }

    /// Adds a block to the sums of `F` rows from `row` on. The block's activations of the tile's first row lie at
    /// `acts`.
    ///
    /// # Safety
    /// They are rows of the tile, and activations of the block are there.
    #[inline(always)]
    unsafe fn rows<S: Simd, const F: usize>(
        &self,
        s: S,
        codes: &[S::B; 8],
        scales: &[(S::F, S::F); 2],
        (acts, row): (*const u8, usize),
        acc: &mut [S::F; R],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let acts = acts.add(row * self.act_row_bytes);
            if HALVES {
                let [c0, c1, c2, c3, c4, c5, c6, c7] = *codes;
                self.group::<S, 4, F>(s, &[c0, c1, c2, c3], scales[0], Some(0), acts, &mut acc[row..]);
                self.group::<S, 4, F>(s, &[c4, c5, c6, c7], scales[1], Some(1), acts, &mut acc[row..]);
            } else {
                self.group::<S, 8, F>(s, codes, scales[0], None, acts, &mut acc[row..]);
            }
        }
    }

    /// Adds a group, a whole block or one `half` of it, to the sums of the first `F` rows. The group's activations of
    /// the first row lie at `acts`. Σ (level − zero) · number is exact: at most 255 · 32639 · 32, which 32 bits hold.
    ///
    /// # Safety
    /// As for [`Tile::rows`].
    #[inline(always)]
    unsafe fn group<S: Simd, const N: usize, const F: usize>(
        &self,
        s: S,
        codes: &[S::B; N],
        scales: (S::F, S::F),
        half: Option<usize>,
        acts: *const u8,
        acc: &mut [S::F],
    ) {
        let width = codes::width(CODE);
        let from = 4 * half.unwrap_or(0);
        let mut dots = [s.splat_i(0); F];
        // SAFETY: the caller's word; a half has four quads.
        unsafe {
            if !OFFSET {
                for (r, dot) in dots.iter_mut().enumerate() {
                    let sums = self.sums(acts, r);
                    let minus_sum = half.map_or(sums.minus_sum, |half| sums.minus_half_sums[half]);
                    // Blocks with the scale NaN may wrap around: their result is NaN anyway.
                    *dot = s.splat_i(minus_sum.wrapping_mul(i32::from(self.quant.zero)));
                }
            }
            dots = match PLANES {
                1 => s.dots(width, codes, (acts.add(4 * from), self.act_row_bytes), dots),
                _ => s.dots_of_words(width, codes, (acts, self.act_row_bytes), from, dots),
            };
            for (r, dot) in dots.into_iter().enumerate() {
                let sums = self.sums(acts, r);
                let scaled_sum = half.map_or(sums.scaled_sum, |half| sums.scaled_half_sums[half]);
                acc[r] = scaled::<S, OFFSET>(s, dot, scales, s.splat(sums.scale), scaled_sum, acc[r]);
            }
        }
    }

    /// Returns the scale and sums of the `r`-th row's block; the first row's is at `acts`.
    ///
    /// # Safety
    /// It is there.
    #[inline(always)]
    unsafe fn sums(&self, acts: *const u8, r: usize) -> &ActSums {
        // SAFETY: the caller's word.
        unsafe { &(*acts.add(r * self.act_row_bytes).cast::<ActBlock<PLANES>>()).sums }
    }
}

/// Adds a scaled integer sum to `acc`, then the offset's part.
#[inline(always)]
fn scaled<S: Simd, const OFFSET: bool>(
    s: S,
    dot: S::I,
    (scale, offset): (S::F, S::F),
    act_scale: S::F,
    scaled_sum: f32,
    acc: S::F,
) -> S::F {
    let acc = s.fma(s.mul(s.float(dot), act_scale), scale, acc);
    if OFFSET { s.fma(offset, s.splat(scaled_sum), acc) } else { acc }
}

/// Some panels times some rows, as many as stay in the cache together: the inputs that all their tiles share.
pub(super) struct Job<'a> {
    pub(super) isa: Isa,
    pub(super) weights: &'a Weights<'a>,
    pub(super) quant: QuantPacking,
    pub(super) acts: &'a Acts<'a>,
    pub(super) target: Target,
    /// Distance of two panels, in bytes.
    panel_bytes: usize,
    /// Distance of two rows of activations, in bytes.
    act_row_bytes: usize,
    pub(super) panels: Range<usize>,
    pub(super) rows: Range<usize>,
}

impl Job<'_> {
    /// # Safety
    /// `P` panels from `panel` and `R` rows from `row` are within what `linear` has checked.
    #[inline(always)]
    unsafe fn tile<
        const CODE: u8,
        const HALVES: bool,
        const OFFSET: bool,
        const PLANES: usize,
        const R: usize,
        const P: usize,
    >(
        &self,
        panel: usize,
        row: usize,
        ahead: Ahead,
    ) -> Tile<CODE, HALVES, OFFSET, PLANES, R, P> {
        let &Job { weights, quant, panel_bytes, act_row_bytes, .. } = self;
        // SAFETY: panels and rows are within the matrix, the activations and the target, by this function's contract.
        let (targets, first, acts) = unsafe {
            (
                std::array::from_fn(|p| TileTarget::new(weights, self.target, panel + p, row)),
                weights.data.as_ptr().add(panel * panel_bytes),
                self.acts.as_ptr().add(row * act_row_bytes),
            )
        };
        let scale_bytes = quant.super_bytes() * BLOCK / SUPER;
        Tile {
            quant,
            k: weights.packing.k(),
            panel: first,
            panel_bytes,
            scale_bytes,
            ahead,
            acts,
            act_row_bytes,
            targets,
        }
    }

    /// # Safety
    /// Panels and rows are within what `linear` has checked, and as many as multiples of `P` and `R`.
    unsafe fn sweep<
        const CODE: u8,
        const HALVES: bool,
        const OFFSET: bool,
        const PLANES: usize,
        const R: usize,
        const P: usize,
    >(
        &self,
        panels: &Range<usize>,
        rows: Range<usize>,
    ) -> Sweep<'_, CODE, HALVES, OFFSET, PLANES, R, P> {
        debug_assert!(
            panels.len().is_multiple_of(P) && rows.len().is_multiple_of(R),
            "{panels:?} by {P}, {rows:?} by {R}"
        );
        Sweep { job: self, panels: panels.clone(), rows }
    }

    /// Multiplies rows by panels: a few panels together for all rows, then the next few. Tiles are the largest that fit. Eight rows share
    /// the unpacked codes, four of them the codes in registers; one or two rows take four panels at a time, as streams from memory.
    ///
    /// # Safety
    /// As for [`Job::tile`].
    unsafe fn tiles<const CODE: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize>(&self) {
        let Job { isa, panels, rows, .. } = self;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's word; `multiply` does not ask for more rows.
        if unsafe { self.tiled::<CODE, HALVES, OFFSET>() } {
            return;
        }
        let mut panel = panels.start;
        while panel < panels.end {
            let step = if *isa != Isa::Portable && panels.end - panel >= 4 { 4 } else { 1 };
            let few = &(panel..panel + step);
            let mut row = rows.start;
            while row < rows.end {
                let left = rows.end - row;
                let (whole, all) = (row..row + left / ROWS * ROWS, row..rows.end);
                // SAFETY: no sweep goes beyond `few` panels or `rows`; the rest is the caller's word.
                row = unsafe {
                    match (isa, left) {
                        (Isa::Portable, _) => isa.run(self.sweep::<CODE, HALVES, OFFSET, PLANES, 1, 1>(few, all)),
                        (_, ROWS..) => isa.run_vector(self.sweep::<CODE, HALVES, OFFSET, PLANES, ROWS, 1>(few, whole)),
                        (_, 4..) => isa.run_vector(self.sweep::<CODE, HALVES, OFFSET, PLANES, 4, 1>(few, row..row + 4)),
                        (Isa::Amx | Isa::Avx512, 2..) if step == 4 => {
                            isa.run_widest(self.sweep::<CODE, HALVES, OFFSET, PLANES, 2, 4>(few, row..row + 2))
                        }
                        _ if step == 4 => isa.run_vector(self.sweep::<CODE, HALVES, OFFSET, PLANES, 1, 4>(few, all)),
                        _ => isa.run(self.sweep::<CODE, HALVES, OFFSET, PLANES, 1, 1>(few, all)),
                    }
                };
            }
            panel += step;
        }
    }
}

impl ByFormat for Job<'_> {
    fn run<const CODE: u8, const HALVES: bool, const OFFSET: bool>(self) {
        // SAFETY: `multiply` makes jobs within the ranges that `linear` has checked.
        unsafe {
            match self.acts.layout().form {
                ActForm::Bytes => self.tiles::<CODE, HALVES, OFFSET, 1>(),
                ActForm::Words | ActForm::Tiled => self.tiles::<CODE, HALVES, OFFSET, 2>(),
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
    let (panel_bytes, act_row_bytes) = (weights.packing.panel_bytes(), acts.layout().row_bytes());
    let block_bytes = if isa == Isa::Amx { TILED_BLOCK_BYTES } else { ROW_BLOCK_BYTES };
    let step = block_bytes / act_row_bytes / 16 * 16;
    let step = step.clamp(16, MOST_ROWS);
    for start in rows.clone().step_by(step) {
        let (panels, rows) = (panels.clone(), start..rows.end.min(start + step));
        Job { isa, weights, quant, acts, target, panel_bytes, act_row_bytes, panels, rows }.run_for(quant);
    }
}
