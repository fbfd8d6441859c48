//! Rows of prompts, in bfloat16, on the matrix unit: weights are unpacked once for many rows, into bfloat16 as well, and every sum
//! over k stays in the unit. Two panels times two tiles of sixteen rows advance together, so that each tile that is loaded is
//! multiplied twice.
//!
//! What a weight is: its value as `pack::unpack_row` gives it, rounded like the activations. In which order products are summed:
//! `unit::square`. Neither depends on the rows beside it or on how the work is cut.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Finish, Target, TileTarget, Weights, codes};
use crate::isa::{Isa, Kernel};
use crate::ops::Activation;
use crate::packing::{BLOCK, PANEL, PackKind, QuantPacking};
use crate::rounded::{Bf16Acts, Bf16Layout, QUAD_BYTES, TILE_BYTES, TILE_ROWS, round_bf16, store_quad};
use crate::simd::Simd;
use crate::unit;

/// Groups of 32 elements that are unpacked at a time: two panels' stay in the first-level cache, beside the rows that pass.
const GROUPS: usize = 12;
/// Most tiles of rows for which panels are unpacked once.
const TILES: usize = 32;

/// Memory of one call, on the stack of its thread.
#[repr(C, align(64))]
struct Scratch {
    /// Weights of each group, of both panels, as the unit takes them.
    weights: [[[u8; TILE_BYTES]; 2]; GROUPS],
    /// Sums of two tiles of rows and two panels.
    sums: [[[f32; TILE_ROWS * PANEL]; 4]; TILES / 2],
}

/// Groups `first..first + len` of one panel.
#[derive(Clone, Copy)]
struct Part {
    panel: *const u8,
    first: usize,
    len: usize,
    /// Which of the two it is.
    place: usize,
}

/// Writes quantized weights as tiles: of every four elements the first and third, then the second and fourth, side by side for each
/// of sixteen outputs.
struct Unpack<const BITS: u8, const HALVES: bool, const OFFSET: bool> {
    quant: QuantPacking,
    k: usize,
    part: Part,
    scratch: *mut Scratch,
}

impl<const BITS: u8, const HALVES: bool, const OFFSET: bool> Kernel for Unpack<BITS, HALVES, OFFSET> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Unpack { quant, k, part, scratch } = self;
        let block_bytes = PANEL * BLOCK * BITS as usize / 8;
        let zero = s.splat(f32::from(quant.zero));
        let value = |code: S::I, (scale, offset): (S::F, S::F)| {
            let code = s.float(code);
            let value = s.mul(scale, if OFFSET { code } else { s.sub(code, zero) });
            if OFFSET { s.add(value, offset) } else { value }
        };
        // SAFETY: `panels` only makes parts within the matrix, laid out as `packing` says, of at most `GROUPS` groups.
        unsafe {
            let scales = part.panel.add(k / BLOCK * block_bytes);
            for g in 0..part.len {
                let block = part.first + g;
                let all = codes::unpack::<S, BITS>(s, part.panel.add(block * block_bytes));
                let to = (&raw mut (*scratch).weights[g][part.place]).cast::<u8>();
                let halves = if HALVES { 2 } else { 1 };
                for half in 0..halves {
                    let of = codes::scales::<S, HALVES, OFFSET>(s, quant.scales, scales, block * halves + half);
                    for (quad, codes) in all.iter().enumerate().skip(half * 4).take(8 / halves) {
                        let low = [value(s.byte::<0>(*codes), of), value(s.byte::<1>(*codes), of)];
                        let high = [value(s.byte::<2>(*codes), of), value(s.byte::<3>(*codes), of)];
                        store_quad(s, to.add(QUAD_BYTES * quad), [low[0], low[1], high[0], high[1]]);
                    }
                }
            }
        }
    }
}

/// [`Unpack`] for weights that are bfloat16 already.
struct Interleave {
    part: Part,
    scratch: *mut Scratch,
}

impl Kernel for Interleave {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Interleave { part, scratch } = self;
        // SAFETY: as for `Unpack`.
        unsafe {
            for g in 0..part.len {
                let from = part.panel.add((part.first + g) * BLOCK * 2 * PANEL);
                let to = (&raw mut (*scratch).weights[g][part.place]).cast::<u8>();
                for quad in 0..BLOCK / 4 {
                    let element = |i: usize| s.load_bf16(from.add((4 * quad + i) * 2 * PANEL));
                    store_quad(s, to.add(QUAD_BYTES * quad), [element(0), element(1), element(2), element(3)]);
                }
            }
        }
    }
}

/// Writes activation(gate) · up of a tile's rows for one panel of each, rounded, into a tile of rows.
struct FinishGlu<'a> {
    activation: Activation,
    /// One value per output of either panel, or none.
    biases: [Option<&'a [f32]>; 2],
    rows: usize,
    sums: [*const f32; 2],
    to: *mut u8,
}

impl Kernel for FinishGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // No closures: they would not be inlined here.
        let mut biases = [s.zero(); 2];
        for (value, bias) in biases.iter_mut().zip(self.biases) {
            if let Some(bias) = bias {
                *value = s.load_part(bias, 0.0);
            }
        }
        for row in 0..self.rows {
            // SAFETY: the sums are within the scratch, and the tile has a line for each of its rows.
            unsafe {
                let gate = s.add(s.load(self.sums[0].add(row * PANEL)), biases[0]);
                let up = s.add(s.load(self.sums[1].add(row * PANEL)), biases[1]);
                let value = s.mul(self.activation.apply(s, gate), up);
                s.store_high_words(self.to.add(row * 2 * BLOCK), round_bf16(s, value));
            }
        }
    }
}

/// A panel of a matrix.
#[derive(Clone, Copy)]
struct Panel<'a> {
    weights: &'a Weights<'a>,
    number: usize,
}

impl Panel<'_> {
    /// Unpacks `len` groups from `first` on to the panel's `place` of the scratch.
    ///
    /// # Safety
    /// Panel and groups are within the matrix.
    unsafe fn unpack(&self, isa: Isa, first: usize, len: usize, place: usize, scratch: *mut Scratch) {
        let packing = self.weights.packing;
        // SAFETY: the caller's word.
        let panel = unsafe { self.weights.data.as_ptr().add(self.number * packing.panel_bytes()) };
        let part = Part { panel, first, len, place };
        let PackKind::Quant(quant) = packing.kind() else {
            return isa.run_widest(Interleave { part, scratch });
        };
        let unpack = Quantized { isa, quant, k: packing.k(), part, scratch };
        match quant.bits {
            2 => unpack.run::<2>(),
            3 => unpack.run::<3>(),
            4 => unpack.run::<4>(),
            5 => unpack.run::<5>(),
            6 => unpack.run::<6>(),
            _ => unpack.run::<8>(),
        }
    }
}

/// What [`Unpack`] is to be told.
struct Quantized {
    isa: Isa,
    quant: QuantPacking,
    k: usize,
    part: Part,
    scratch: *mut Scratch,
}

impl Quantized {
    fn run<const BITS: u8>(self) {
        let Self { isa, quant, k, part, scratch } = self;
        match (quant.group == 16, quant.offset) {
            (false, false) => isa.run_widest(Unpack::<BITS, false, false> { quant, k, part, scratch }),
            (false, true) => isa.run_widest(Unpack::<BITS, false, true> { quant, k, part, scratch }),
            (true, false) => isa.run_widest(Unpack::<BITS, true, false> { quant, k, part, scratch }),
            (true, true) => isa.run_widest(Unpack::<BITS, true, true> { quant, k, part, scratch }),
        }
    }
}

/// One or two panels of as many columns as the activations have, times all rows of some tiles; what comes of it is in the scratch.
///
/// # Safety
/// Panels and tiles are within their matrices and the activations; the unit is set up.
unsafe fn multiply_panels(
    isa: Isa,
    panels: &[Panel<'_>],
    acts: &Bf16Acts<'_>,
    tiles: Range<usize>,
    scratch: *mut Scratch,
) {
    let groups = acts.layout().k / BLOCK;
    // SAFETY: the caller's word; a panel or tile that stands alone is multiplied twice, and one result left.
    unsafe {
        for first in (0..groups).step_by(GROUPS) {
            let len = GROUPS.min(groups - first);
            for (place, panel) in panels.iter().enumerate() {
                panel.unpack(isa, first, len, place, scratch);
            }
            for (pair, tile) in tiles.clone().step_by(2).enumerate() {
                let rows = [tile, (tile + 1).min(tiles.end - 1)].map(|tile| acts.tile(tile, first));
                let sums = (&raw mut (*scratch).sums[pair]).cast();
                unit::square(rows, (&raw const (*scratch).weights).cast(), len, sums, first == 0);
            }
        }
    }
}

/// The sums of the `number`-th tile of rows and the panel at `place`.
///
/// # Safety
/// The scratch has them.
unsafe fn sums(scratch: *const Scratch, number: usize, place: usize) -> *const f32 {
    // SAFETY: the caller's word.
    unsafe { (&raw const (*scratch).sums[number / 2][number % 2 * 2 + place]).cast() }
}

/// Has `each` multiply so many tiles of rows as panels are unpacked for at once, with scratch and the unit set up.
fn by_tiles(rows: Range<usize>, mut each: impl FnMut(Range<usize>, *mut Scratch)) {
    let tiles = rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
    let mut scratch = MaybeUninit::<Scratch>::uninit();
    unit::configure_full();
    for tile in tiles.clone().step_by(TILES) {
        each(tile..tiles.end.min(tile + TILES), scratch.as_mut_ptr());
    }
    unit::release();
}

/// Not inlined: its scratch shall be on the stack only of those who multiply so.
///
/// # Safety
/// As for [`super::linear`], which has checked the shapes; `rows` begin a tile, and end one or all rows.
#[inline(never)]
pub(super) unsafe fn multiply(
    isa: Isa,
    weights: &Weights<'_>,
    acts: &Bf16Acts<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
    target: Target,
) {
    by_tiles(rows, |tiles, scratch| {
        for first in panels.clone().step_by(2) {
            let pair = [first, first + 1].map(|number| Panel { weights, number });
            let pair = &pair[..(panels.end - first).min(2)];
            // SAFETY: within the ranges that `linear` has checked.
            unsafe {
                multiply_panels(isa, pair, acts, tiles.clone(), scratch);
                for (number, tile) in tiles.clone().enumerate() {
                    let rows = acts.layout().tile(tile);
                    for (place, panel) in pair.iter().enumerate() {
                        let target = TileTarget::new(weights, target, panel.number, rows.start);
                        isa.run_widest(Finish { target, rows: 0..rows.len(), sums: sums(scratch, number, place) });
                    }
                }
            }
        }
    });
}

/// # Safety
/// As for [`super::linear_glu`], which has checked the shapes.
#[inline(never)]
pub(super) unsafe fn multiply_glu(
    isa: Isa,
    matrices: [&Weights<'_>; 2],
    activation: Activation,
    acts: &Bf16Acts<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
    out: *mut u8,
) {
    let written = Bf16Layout { rows: acts.layout().rows, k: matrices[0].packing.out() };
    by_tiles(rows, |tiles, scratch| {
        for number in panels.clone() {
            let pair = matrices.map(|weights| Panel { weights, number });
            let biases = matrices.map(|weights| weights.bias.map(|bias| &bias[number * PANEL..][..PANEL]));
            // SAFETY: within the ranges that `linear_glu` has checked; the rest is the caller's word.
            unsafe {
                multiply_panels(isa, &pair, acts, tiles.clone(), scratch);
                for (index, tile) in tiles.clone().enumerate() {
                    let (rows, sums) = (written.tile(tile).len(), [0, 1].map(|place| sums(scratch, index, place)));
                    let to = out.add(tile * written.tile_bytes() + number / 2 * TILE_BYTES + number % 2 * 2 * PANEL);
                    isa.run_widest(FinishGlu { activation, biases, rows, sums, to });
                }
            }
        }
    });
}

#[cfg(test)]
mod tests;
