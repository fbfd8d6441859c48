//! Tiles over float panels. An output is accumulated in one chain of fused multiply-adds along k. With few rows the multiplier would
//! wait for the chain, so several panels advance together.

use std::array;
use std::ops::Range;

use super::{Target, TileTarget, Weights};
use crate::isa::{Isa, Kernel};
use crate::packing::{PANEL, PackKind, f8_code_bytes};
use crate::simd::Simd;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;
const F8: u8 = 3;

/// Bytes of rows of x that stay in the cache while panels stream by.
const ROW_BLOCK_BYTES: usize = 256 << 10;

/// `R` rows times `P` panels of format `KIND`.
struct Tile<const KIND: u8, const R: usize, const P: usize> {
    k: usize,
    /// The first panel; the others follow at `panel_bytes`.
    weights: *const u8,
    panel_bytes: usize,
    /// The first row; the others follow at `ld` floats.
    x: *const f32,
    ld: usize,
    /// Elements of k that share a scale: all of them if there are no scales.
    group: usize,
    targets: [TileTarget; P],
}

impl<const KIND: u8, const R: usize, const P: usize> Kernel for Tile<KIND, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let acc = if KIND == F8 { self.scaled_sums(s) } else { self.sums(s, 0..self.k) };
        for (r, acc) in acc.into_iter().enumerate() {
            for (target, acc) in self.targets.iter().zip(acc) {
                // SAFETY: the tile's rows are within the target.
                unsafe { target.write(s, r, acc) };
            }
        }
    }
}

impl<const KIND: u8, const R: usize, const P: usize> Tile<KIND, R, P> {
    /// Returns the sums over these k.
    #[inline(always)]
    fn sums<S: Simd>(&self, s: S, range: Range<usize>) -> [[S::F; P]; R] {
        let vector_bytes = PANEL
            * match KIND {
                F32 => 4,
                F8 => 1,
                _ => 2,
            };
        let mut acc = [[s.zero(); P]; R];
        for k in range {
            let mut w = [s.zero(); P];
            for (p, w) in w.iter_mut().enumerate() {
                // SAFETY: `multiply` only makes tiles of whole panels within the matrix, k vectors each.
                *w = unsafe {
                    let at = self.weights.add(p * self.panel_bytes + k * vector_bytes);
                    match KIND {
                        F32 => s.load(at.cast()),
                        F16 => s.load_f16(at),
                        F8 => s.load_f8(at),
                        _ => s.load_bf16(at),
                    }
                };
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                // SAFETY: `multiply` only makes tiles of rows within the input, k floats each.
                let x = s.splat(unsafe { *self.x.add(r * self.ld + k) });
                for (acc, w) in acc.iter_mut().zip(w) {
                    *acc = s.fma(x, w, *acc);
                }
            }
        }
        acc
    }

    /// Returns the sums over all k, group after group, each with its scale.
    #[inline(always)]
    fn scaled_sums<S: Simd>(&self, s: S) -> [[S::F; P]; R] {
        let mut acc = [[s.zero(); P]; R];
        let scales = f8_code_bytes(self.k);
        for (group, start) in (0..self.k).step_by(self.group).enumerate() {
            let sums = self.sums(s, start..self.k.min(start + self.group));
            // SAFETY: behind the codes every panel has a vector of scales for each group.
            let scale: [S::F; P] = array::from_fn(|p| unsafe {
                s.load(self.weights.add(p * self.panel_bytes + scales + group * 4 * PANEL).cast())
            });
            for (acc, sums) in acc.iter_mut().zip(sums) {
                for ((acc, sum), scale) in acc.iter_mut().zip(sums).zip(scale) {
                    *acc = s.fma(sum, scale, *acc);
                }
            }
        }
        acc
    }
}

/// The inputs that all tiles of one call share.
struct Job<'a> {
    isa: Isa,
    weights: &'a Weights<'a>,
    x: *const f32,
    ld: usize,
    target: Target,
}

impl Job<'_> {
    /// # Safety
    /// `P` panels from `panel` and `R` rows from `row` are within what `linear` has checked.
    unsafe fn tile<const KIND: u8, const R: usize, const P: usize>(
        &self,
        panel: usize,
        row: usize,
    ) -> Tile<KIND, R, P> {
        let packing = self.weights.packing;
        // SAFETY: panels and rows are within the matrix, the input and the target, by this function's contract.
        let (targets, weights, x) = unsafe {
            (
                std::array::from_fn(|p| TileTarget::new(self.weights, self.target, panel + p, row)),
                self.weights.data.as_ptr().add(panel * packing.panel_bytes()),
                self.x.add(row * self.ld),
            )
        };
        let group = match packing.kind() {
            PackKind::F8 { group } => group,
            _ => packing.k(),
        };
        Tile { k: packing.k(), weights, panel_bytes: packing.panel_bytes(), x, ld: self.ld, group, targets }
    }

    /// Multiplies rows by panels in the largest tiles that fit and that the instruction set has registers for.
    ///
    /// # Safety
    /// As for [`Job::tile`].
    unsafe fn tiles<const KIND: u8>(&self, panels: Range<usize>, rows: Range<usize>) {
        let isa = self.isa;
        let mut panel = panels.start;
        while panel < panels.end {
            let left = panels.end - panel;
            let step = match isa {
                Isa::Amx | Isa::Avx512 if left >= 4 && rows.len() < 4 => 4,
                Isa::Avx512 | Isa::Amx if left >= 2 => 2,
                // Sums of four rows times two panels would take all registers.
                Isa::Avx2 | Isa::Neon if left >= 2 && rows.len() < 4 => 2,
                _ => 1,
            };
            let mut row = rows.start;
            while row < rows.end {
                // SAFETY: no tile goes beyond `panels` or `rows`; the rest is the caller's word.
                row += unsafe {
                    match (rows.end - row, step) {
                        (8.., 2) => (isa.run_widest(self.tile::<KIND, 8, 2>(panel, row)), 8).1,
                        (4.., 2) => (isa.run_widest(self.tile::<KIND, 4, 2>(panel, row)), 4).1,
                        // With tiles of four, two or three rows would be left for the smallest tile.
                        (6..=7 | 10.., 1) if isa != Isa::Portable => {
                            (isa.run_vector(self.tile::<KIND, 6, 1>(panel, row)), 6).1
                        }
                        (4.., 1) if isa != Isa::Portable => (isa.run_vector(self.tile::<KIND, 4, 1>(panel, row)), 4).1,
                        // The row of a verified draft uses the weights that its neighbour has loaded.
                        (3.., 4) => (isa.run_widest(self.tile::<KIND, 3, 4>(panel, row)), 3).1,
                        (2.., 4) => (isa.run_widest(self.tile::<KIND, 2, 4>(panel, row)), 2).1,
                        (_, 4) => (isa.run_widest(self.tile::<KIND, 1, 4>(panel, row)), 1).1,
                        (_, 2) => (isa.run_vector(self.tile::<KIND, 1, 2>(panel, row)), 1).1,
                        _ => (isa.run(self.tile::<KIND, 1, 1>(panel, row)), 1).1,
                    }
                };
            }
            panel += step;
        }
    }
}

/// # Safety
/// As for [`super::linear`], which has checked the shapes.
pub(super) unsafe fn multiply(
    isa: Isa,
    weights: &Weights<'_>,
    x: &[f32],
    ld: usize,
    panels: Range<usize>,
    rows: Range<usize>,
    target: Target,
) {
    let job = Job { isa, weights, x: x.as_ptr(), ld, target };
    let step = (ROW_BLOCK_BYTES / (4 * weights.packing.k())).next_multiple_of(8).max(8);
    for start in rows.clone().step_by(step) {
        let (panels, rows) = (panels.clone(), start..rows.end.min(start + step));
        // SAFETY: within the ranges that `linear` has checked.
        unsafe {
            match weights.packing.kind() {
                PackKind::F32 => job.tiles::<F32>(panels, rows),
                PackKind::F16 => job.tiles::<F16>(panels, rows),
                PackKind::Bf16 => job.tiles::<BF16>(panels, rows),
                PackKind::F8 { .. } => job.tiles::<F8>(panels, rows),
                PackKind::Quant(_) => unreachable!("linear sends quantized weights elsewhere"),
            }
        }
    }
}
