//! Rows in bfloat16 on the matrix unit. Weights are unpacked into bfloat16 as well, and every sum over k stays in the unit. Many rows
//! share an unpacking. Two panels times two tiles of sixteen rows advance together, so that each loaded tile is multiplied twice. `few`
//! handles few rows.
//!
//! `unpack` defines the value of a weight, and `amx::square` the order in which products are summed. Neither depends on the rows beside
//! it or on the division of the work.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{Finish, Target, TileTarget, Weights};
use crate::amx;
use crate::bf16::{Bf16Acts, Bf16Layout, TILE_BYTES, TILE_LINE, TILE_ROWS, store_half};
use crate::isa::{Isa, Kernel};
use crate::ops::Activation;
use crate::packing::{BLOCK, PANEL};
use crate::simd::Simd;
use unpack::{Panel, Unpack};

mod few;
mod unpack;

/// At most this many groups of 32 elements are unpacked at a time: those of two panels stay in the first-level cache, beside the rows.
const GROUPS: usize = 10;
/// Panels are unpacked once for at most this many tiles of rows.
const TILES: usize = 32;

const _: () = assert!(2 * GROUPS >= few::RING, "the ring lies where many groups do");

/// Floats of a tile's sums for one panel.
const SUMS: usize = TILE_ROWS * PANEL;

/// Memory of one call, on the stack of its thread.
#[repr(C, align(64))]
struct Scratch {
    /// Weights of each group of both panels, in the unit's layout.
    weights: [[[u8; TILE_BYTES]; 2]; GROUPS],
    /// Sums of two tiles of rows and two panels.
    sums: [[[f32; SUMS]; 4]; TILES / 2],
}

/// Writes activation(gate) · up of a tile's rows for one panel of each, rounded, into a tile of rows.
struct FinishGlu<'a> {
    activation: Activation,
    /// One value per output of either panel, or none.
    biases: [Option<&'a [f32]>; 2],
    rows: usize,
    sums: [*const f32; 2],
    /// The tile's first line, and the position along it: each panel fills half a tile.
    to: *mut u8,
    half: usize,
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
                let value = s.mul(self.activation.apply_rough(s, gate), self.activation.factor(s, up));
                store_half(s, self.to.add(row * TILE_LINE), self.half, value);
            }
        }
    }
}

/// Unpacks groups `first..first + len` of a panel on to its `place` in the scratch.
struct Fill {
    isa: Isa,
    first: usize,
    len: usize,
    place: usize,
    scratch: *mut Scratch,
}

impl Panel for Fill {
    fn with(self, unpack: impl Unpack) {
        self.isa.run_widest(FillWith { unpack, fill: self });
    }
}

struct FillWith<U> {
    unpack: U,
    fill: Fill,
}

impl<U: Unpack> Kernel for FillWith<U> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Fill { first, len, place, scratch, .. } = self.fill;
        for g in 0..len {
            // SAFETY: `multiply_panels` only fills with groups of the matrix, at most `GROUPS`.
            unsafe { self.unpack.group(s, first + g, (&raw mut (*scratch).weights[g][place]).cast()) };
        }
    }
}

/// Multiplies one or two panels, with as many columns as the activations, by all rows of some tiles. Calls `done` for every tile right
/// after its last product, with its sums for the first panel and the second.
///
/// # Safety
/// Panels and tiles are within their matrices and the activations; the unit is set up.
unsafe fn multiply_panels(
    isa: Isa,
    panels: &[(&Weights<'_>, usize)],
    acts: &Bf16Acts<'_>,
    tiles: Range<usize>,
    scratch: *mut Scratch,
    mut done: impl FnMut(usize, [*const f32; 2]),
) {
    let groups = acts.layout().k / BLOCK;
    // For a pair of tiles: the first one's sums, then the second's.
    let sums = move |number: usize| {
        // SAFETY: the scratch has them.
        let all = unsafe { (&raw mut (*scratch).sums[number / 2]).cast::<f32>() };
        let first = all.wrapping_add(number % 2 * 2 * SUMS);
        [first, first.wrapping_add(SUMS)]
    };
    if tiles.len() <= few::TILES {
        for (place, (weights, number)) in panels.iter().enumerate() {
            // SAFETY: the caller's word; the scratch has room for the ring, and its first sums are these.
            unsafe {
                let ring = (&raw mut (*scratch).weights).cast();
                few::multiply(isa, weights, *number, acts, tiles.clone(), ring, (sums(0)[place], 2 * SUMS));
            }
        }
        tiles.clone().enumerate().for_each(|(number, tile)| done(tile, sums(number).map(<*mut f32>::cast_const)));
        return;
    }
    // Parts of nearly equal size: sums are loaded and stored once per part.
    let part = groups.div_ceil(groups.div_ceil(GROUPS));
    for first in (0..groups).step_by(part) {
        let len = part.min(groups - first);
        for (place, (weights, number)) in panels.iter().enumerate() {
            unpack::of(weights, *number, Fill { isa, first, len, place, scratch });
        }
        for (number, tile) in tiles.clone().enumerate().step_by(2) {
            let pair = [tile, (tile + 1).min(tiles.end - 1)];
            let rows = pair.map(|tile| acts.tile(tile, first));
            // A single tile is multiplied twice, and a single panel together with older weights in the scratch. Both surplus sums are
            // never read.
            // SAFETY: the caller's word.
            unsafe { amx::square(rows, (&raw const (*scratch).weights).cast(), len, sums(number)[0], first == 0) };
            if first + len == groups {
                (tile..=pair[1])
                    .enumerate()
                    .for_each(|(i, tile)| done(tile, sums(number + i).map(<*mut f32>::cast_const)));
            }
        }
    }
}

/// Calls `each` for up to [`TILES`] tiles of rows at a time, with scratch and the unit set up.
fn by_tiles(rows: Range<usize>, mut each: impl FnMut(Range<usize>, *mut Scratch)) {
    let tiles = rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
    let mut scratch = MaybeUninit::<Scratch>::uninit();
    for tile in tiles.clone().step_by(TILES) {
        let tiles = tile..tiles.end.min(tile + TILES);
        // A single tile may have few rows.
        amx::configure_rows(if tiles.len() == 1 { rows.end - tile * TILE_ROWS } else { TILE_ROWS });
        each(tiles, scratch.as_mut_ptr());
    }
    amx::release();
}

/// Not inlined, so that only calls that multiply rounded rows have its scratch on the stack.
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
            let pair = [(weights, first), (weights, first + 1)];
            let pair = &pair[..(panels.end - first).min(2)];
            // SAFETY: within the ranges that `linear` has checked.
            unsafe {
                multiply_panels(isa, pair, acts, tiles.clone(), scratch, |tile, sums| {
                    let rows = acts.layout().tile(tile);
                    for ((_, number), sums) in pair.iter().zip(sums) {
                        let target = TileTarget::new(weights, target, *number, rows.start);
                        isa.run_widest(Finish { target, rows: 0..rows.len(), sums });
                    }
                });
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
            let pair = matrices.map(|weights| (weights, number));
            let biases = matrices.map(|weights| weights.bias.map(|bias| &bias[number * PANEL..][..PANEL]));
            // SAFETY: within the ranges that `linear_glu` has checked; the rest is the caller's word.
            unsafe {
                multiply_panels(isa, &pair, acts, tiles.clone(), scratch, |tile, sums| {
                    let rows = written.tile(tile).len();
                    let to = out.add(tile * written.tile_bytes());
                    isa.run_widest(FinishGlu { activation, biases, rows, sums, to, half: number });
                });
            }
        }
    });
}
