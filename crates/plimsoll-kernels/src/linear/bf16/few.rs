//! Few rows: each panel is unpacked once, group by group, and multiplied right after. The unit works while the next group is unpacked,
//! and only the panel is read from memory.

use std::ops::Range;

use super::unpack::{self, Panel, Unpack};
use crate::amx;
use crate::bf16::{Bf16Acts, TILE_BYTES};
use crate::isa::{Isa, Kernel};
use crate::linear::Weights;
use crate::packing::{BLOCK, PANEL};
use crate::simd::Simd;

/// At most this many tiles of rows: the unit keeps their sums.
pub(super) const TILES: usize = 4;
/// Number of tiles that groups are unpacked into in turn: one is written, the previous one multiplied, and older ones may still be
/// read.
pub(super) const RING: usize = 4;

/// Multiplies one panel by all rows of `tiles`. The sums of sixteen rows and outputs follow each other every `sums.1` floats.
///
/// # Safety
/// Panel, tiles and sums are within the matrix, the activations, which have as many columns, and what may be written, as are [`RING`]
/// tiles at `ring`; the unit is set up for these rows.
pub(super) unsafe fn multiply(
    isa: Isa,
    weights: &Weights<'_>,
    number: usize,
    acts: &Bf16Acts<'_>,
    tiles: Range<usize>,
    ring: *mut u8,
    sums: (*mut f32, usize),
) {
    let layout = acts.layout();
    let rows =
        Rows { isa, first: acts.tile(tiles.start, 0), step: layout.tile_bytes(), groups: layout.k / BLOCK, ring, sums };
    match tiles.len() {
        1 => unpack::of(weights, number, Few::<1>(&rows)),
        2 => unpack::of(weights, number, Few::<2>(&rows)),
        3 => unpack::of(weights, number, Few::<3>(&rows)),
        _ => unpack::of(weights, number, Few::<TILES>(&rows)),
    }
}

/// The rows, the ring of tiles and the sums. Passed by reference: reading a fresh copy right after tiles of sums were written would
/// wait until these are in the cache.
struct Rows {
    isa: Isa,
    first: *const u8,
    /// Distance of two tiles of rows, in bytes.
    step: usize,
    groups: usize,
    ring: *mut u8,
    sums: (*mut f32, usize),
}

/// The product of a panel with `N` tiles of rows.
struct Few<'a, const N: usize>(&'a Rows);

impl<const N: usize> Panel for Few<'_, N> {
    fn with(self, unpack: impl Unpack) {
        self.0.isa.run_widest(Multiply::<_, N> { unpack, rows: self.0 });
    }
}

struct Multiply<'a, U, const N: usize> {
    unpack: U,
    rows: &'a Rows,
}

impl<U: Unpack, const N: usize> Kernel for Multiply<'_, U, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rows { first, step, groups, ring, sums, .. } = *self.rows;
        let tile = |group: usize| ring.wrapping_add(group % RING * TILE_BYTES);
        // SAFETY: `multiply` was promised panel, rows and sums, and the unit.
        unsafe {
            amx::begin_sums::<N>();
            for group in 0..=groups {
                if group < groups {
                    self.unpack.group(s, group, tile(group));
                }
                if group > 0 {
                    let rows = first.add((group - 1) * TILE_BYTES);
                    amx::column::<N>(tile(group - 1), (rows, step));
                }
            }
            amx::end_sums::<N>(sums.0, sums.1, PANEL * size_of::<f32>());
        }
    }
}
