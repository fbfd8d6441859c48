//! Tiles over quantized panels: exact integer dot products per group, scaled into float sums.

use std::ops::Range;

use super::codes::{self, ByFormat};
use super::{Target, TileTarget, Weights};
use crate::acts::{ActBlock, ActForm, ActSums, Acts};
use crate::isa::{Isa, Kernel};
use crate::packing::{BLOCK, PANEL, QuantPacking, SUPER};
use crate::simd::{CodeWidth, Simd};

/// Quantized rows that stay in the second-level cache while panels stream by, in bytes.
const ROW_BLOCK_BYTES: usize = 256 << 10;
/// The same for the matrix unit, which unpacks a panel for every block of rows and sits beside 2 MiB.
const TILED_BLOCK_BYTES: usize = 1 << 20;
/// And how many of them at most: the matrix unit keeps their sums.
pub(super) const MOST_ROWS: usize = 128;
/// `R` rows, of numbers of `PLANES` bytes, times `P` panels of `BITS`-bit codes, in groups of 16 (`HALVES`) or 32, with offsets
/// (`OFFSET`) or a zero point.
///
/// The panels advance together, a block each in turn: several streams get more out of the memory than one.
struct Tile<const BITS: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize, const P: usize>
{
    quant: QuantPacking,
    k: usize,
    /// The first panel; the others follow at `panel_bytes`.
    panel: *const u8,
    panel_bytes: usize,
    /// Bytes of scales per block, roughly.
    scale_bytes: usize,
    /// The first row of activations; the others follow at `act_row_bytes`.
    acts: *const u8,
    act_row_bytes: usize,
    targets: [TileTarget; P],
}

impl<const BITS: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize, const P: usize> Kernel
    for Tile<BITS, HALVES, OFFSET, PLANES, R, P>
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

impl<const BITS: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize, const P: usize>
    Tile<BITS, HALVES, OFFSET, PLANES, R, P>
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
            let codes = codes::unpack::<S, BITS>(s, panel.add(block * block_bytes));
            if R > 1 || BITS < 8 {
                codes::prefetch::<S, BITS>(s, panel, self.k, block, self.scale_bytes);
            }
            let all_scales = panel.add(self.k / BLOCK * block_bytes);
            let mut scales = [(s.zero(), s.zero()); 2];
            for (half, scales) in scales[..halves].iter_mut().enumerate() {
                *scales = codes::scales::<S, HALVES, OFFSET>(s, self.quant.scales, all_scales, block * halves + half);
            }
            let acts = self.acts.add(block * size_of::<ActBlock<PLANES>>());
            let mut row = 0;
            while row < R {
                // Codes of a half are too few for what rows share to pay for the registers.
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

    /// Adds a block, whose activations of the tile's first row lie at `acts`, to the sums of `F` rows from `row` on.
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

    /// Adds a group, a whole block or one `half` of it, whose activations of the first row lie at `acts`, to the sums of the first `F` rows.
    /// Σ (code − zero) · number is exact: at most 255 · 32639 · 32, which 32 bits hold.
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
        let width = match BITS {
            0..=4 => CodeWidth::Four,
            5 => CodeWidth::Five,
            6 => CodeWidth::Six,
            _ => CodeWidth::Eight,
        };
        let from = 4 * half.unwrap_or(0);
        let mut dots = [s.splat_i(0); F];
        // SAFETY: the caller's word; a half has four quads.
        unsafe {
            if !OFFSET {
                for (r, dot) in dots.iter_mut().enumerate() {
                    let sums = self.sums(acts, r);
                    let minus_sum = half.map_or(sums.minus_sum, |half| sums.minus_half_sums[half]);
                    // Of nonsense, whose scale is NaN, it may be anything.
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

    /// What is known of the `r`-th row's block behind `acts`.
    ///
    /// # Safety
    /// It is there.
    #[inline(always)]
    unsafe fn sums(&self, acts: *const u8, r: usize) -> &ActSums {
        // SAFETY: the caller's word.
        unsafe { &(*acts.add(r * self.act_row_bytes).cast::<ActBlock<PLANES>>()).sums }
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
    let acc = s.fma(s.mul(s.float(dot), act_scale), scale, acc);
    if OFFSET { s.fma(offset, s.splat(scaled_sum), acc) } else { acc }
}

/// What all tiles of one call share.
pub(super) struct Job<'a> {
    pub(super) isa: Isa,
    pub(super) weights: &'a Weights<'a>,
    pub(super) quant: QuantPacking,
    pub(super) acts: &'a Acts<'a>,
    pub(super) target: Target,
}

impl Job<'_> {
    /// # Safety
    /// `P` panels from `panel` and `R` rows from `row` are within what `linear` has checked.
    unsafe fn tile<
        const BITS: u8,
        const HALVES: bool,
        const OFFSET: bool,
        const PLANES: usize,
        const R: usize,
        const P: usize,
    >(
        &self,
        panel: usize,
        row: usize,
    ) -> Tile<BITS, HALVES, OFFSET, PLANES, R, P> {
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
        let (quant, panel_bytes) = (self.quant, packing.panel_bytes());
        let scale_bytes = quant.super_bytes() * BLOCK / SUPER;
        Tile { quant, k: packing.k(), panel: first, panel_bytes, scale_bytes, acts, act_row_bytes, targets }
    }

    /// Rows times panels: a few panels together for all rows, then the next few. Tiles are the largest that fit: eight rows
    /// share what is unpacked, four of them what is in registers; one or two rows take four panels at a time, as streams from memory.
    ///
    /// # Safety
    /// As for [`Job::tile`].
    unsafe fn tiles<const BITS: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize>(
        &self,
        panels: Range<usize>,
        rows: Range<usize>,
    ) {
        let isa = self.isa;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's word; `multiply` does not ask for more rows.
        if unsafe { self.tiled::<BITS, HALVES, OFFSET>(panels.clone(), rows.clone()) } {
            return;
        }
        let mut panel = panels.start;
        while panel < panels.end {
            let step = if isa != Isa::Portable && panels.end - panel >= 4 { 4 } else { 1 };
            let few = panel..panel + step;
            let mut row = rows.start;
            while row < rows.end {
                // SAFETY: no tile goes beyond `few` panels or `rows`; the rest is the caller's word.
                row += unsafe {
                    match (isa, rows.end - row) {
                        (_, 8..) if isa != Isa::Portable => {
                            (self.each::<BITS, HALVES, OFFSET, PLANES, 8>(few.clone(), row), 8).1
                        }
                        (_, 4..) if isa != Isa::Portable => {
                            (self.each::<BITS, HALVES, OFFSET, PLANES, 4>(few.clone(), row), 4).1
                        }
                        (Isa::Amx | Isa::Avx512, 2..) if step == 4 => {
                            (isa.run_widest(self.tile::<BITS, HALVES, OFFSET, PLANES, 2, 4>(panel, row)), 2).1
                        }
                        _ if step == 4 => {
                            (isa.run_vector(self.tile::<BITS, HALVES, OFFSET, PLANES, 1, 4>(panel, row)), 1).1
                        }
                        _ => (isa.run(self.tile::<BITS, HALVES, OFFSET, PLANES, 1, 1>(panel, row)), 1).1,
                    }
                };
            }
            panel += step;
        }
    }

    /// `R` rows times one panel after another.
    ///
    /// # Safety
    /// As for [`Job::tile`].
    unsafe fn each<const BITS: u8, const HALVES: bool, const OFFSET: bool, const PLANES: usize, const R: usize>(
        &self,
        panels: Range<usize>,
        row: usize,
    ) {
        for panel in panels {
            // SAFETY: the caller's word.
            let tile = unsafe { self.tile::<BITS, HALVES, OFFSET, PLANES, R, 1>(panel, row) };
            self.isa.run_vector(tile)
        }
    }
}

/// Some panels times some rows of a job, within its matrix, its activations and its target.
struct Part<'a> {
    job: &'a Job<'a>,
    panels: Range<usize>,
    rows: Range<usize>,
}

impl ByFormat for Part<'_> {
    fn run<const BITS: u8, const HALVES: bool, const OFFSET: bool>(self) {
        // SAFETY: `multiply` makes them within the ranges that `linear` has checked.
        unsafe {
            match self.job.acts.layout().form {
                ActForm::Bytes => self.job.tiles::<BITS, HALVES, OFFSET, 1>(self.panels, self.rows),
                ActForm::Words | ActForm::Tiled => self.job.tiles::<BITS, HALVES, OFFSET, 2>(self.panels, self.rows),
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
    let layout = acts.layout();
    let block_bytes = if isa == Isa::Amx { TILED_BLOCK_BYTES } else { ROW_BLOCK_BYTES };
    let step = block_bytes / layout.row_bytes() / 16 * 16;
    let step = step.clamp(16, MOST_ROWS);
    for start in rows.clone().step_by(step) {
        let part = Part { job: &job, panels: panels.clone(), rows: start..rows.end.min(start + step) };
        part.run_for(quant);
    }
}
