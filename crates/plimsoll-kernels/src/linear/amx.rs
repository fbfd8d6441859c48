//! Quantized panels on the matrix unit (AMX): the dot products of sixteen rows and sixteen outputs at once.
//!
//! An unpacked block of codes has the layout of the unit's second operand (quads or pairs of k down, outputs across). The planes of the
//! activations, two or one, have the layout of its first. Bytes are multiplied into integers. If every sum is an integer that a float
//! holds (`QuantPacking::fits_floats`), bfloat16 is faster: activations are scaled by powers of two, and both planes are added into one
//! sum. Either way the products are exact, and the rows' sums are formed from them in the order of `quant.rs`: the bits are the same.
//!
//! The unit is so fast that it waits for its operands. A few panels therefore advance together, three groups of k at a time. Their
//! codes are unpacked once for all rows of the call and stay in the first-level cache. Then the rows follow, sixteen at a time, each
//! tile of them loaded once for all panels. First the unit multiplies, then the vector units scale.

use std::mem::{MaybeUninit, offset_of};
use std::ops::Range;

use super::quant::{Job, MOST_ROWS};
use super::{Finish, TileTarget, codes};
use crate::acts::{ACT_TILE_BYTES, ActBlock, ActForm, ActSums};
use crate::amx;
use crate::amx::group::{self, BFLOAT, SIGNED, SIGNED_BYTES, UNSIGNED, UNSIGNED_BYTES, one_plane};
use crate::bf16::TILE_ROWS;
use crate::isa::{Isa, Kernel};
use crate::packing::{BLOCK, PANEL, QuantPacking};
use crate::simd::{Simd, Words};
use unpack::Unpack;

mod unpack;

/// The vector units multiply fewer rows than this.
const FEWEST_ROWS: usize = 5;
/// [`FEWEST_ROWS`] for one plane: only whole tiles pay.
const FEWEST_BYTES: usize = TILE_ROWS;
/// Groups of k that are unpacked, multiplied and scaled at a time.
const GROUPS: usize = 3;
/// Codes and scales are prefetched this many groups before their use.
const AHEAD: usize = 2 * GROUPS;
/// At most this many panels advance together.
const PANELS: usize = 4;
/// At most this many tiles in a call.
const TILES: usize = MOST_ROWS / TILE_ROWS;
/// Floats of a tile of sums.
const TILE: usize = TILE_ROWS * PANEL;

/// Returns the operand format for codes; `None` if none fits.
fn kind(quant: QuantPacking, form: ActForm) -> Option<u8> {
    let (highest, zero) = (i32::from(quant.highest()), i32::from(quant.zero));
    let (bytes, signed) = (form == ActForm::Bytes, zero <= 128 && highest - zero <= 127);
    match zero {
        _ if form == ActForm::Tiled && quant.fits_floats() => Some(BFLOAT),
        0 => Some(if bytes { UNSIGNED_BYTES } else { UNSIGNED }),
        _ if signed => Some(if bytes { SIGNED_BYTES } else { SIGNED }),
        _ => None,
    }
}

/// Returns the bytes of a block of activations, and the offset of its sums.
const fn block_bytes(kind: u8) -> (usize, usize) {
    if one_plane(kind) {
        (size_of::<ActBlock<1>>(), offset_of!(ActBlock<1>, sums))
    } else {
        (size_of::<ActBlock<2>>(), offset_of!(ActBlock<2>, sums))
    }
}

/// Returns the levels of codes minus the zero point: small integers, which bfloat16 holds exactly.
fn words(quant: QuantPacking) -> Words {
    // The lower halves of these floats are zero.
    let word = |code| ((f32::from(quant.level(code)) - f32::from(quant.zero)).to_bits() >> 16) as u16;
    Words(std::array::from_fn(|code| word(code as u8)))
}

/// Memory of one call, on the stack of its thread.
#[repr(C, align(64))]
struct Scratch {
    /// Codes of each group, of each panel, as bytes or bfloat16.
    codes: [[[[u8; 2 * PANEL]; BLOCK]; PANELS]; GROUPS],
    /// Their scales and offsets.
    scales: [[[[f32; PANEL]; 2]; PANELS]; GROUPS],
    /// Dot products of each group: one tile per panel, or, as integers of two planes, one per plane.
    dots: [[[f32; TILE]; PANELS]; GROUPS],
    /// The sums of every tile of rows and every panel.
    sums: [[[f32; TILE]; PANELS]; TILES],
}

/// `size` rows from `start` on. The tile writes the rows from `own` on; another tile has computed the ones before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowTile {
    start: usize,
    own: usize,
    size: usize,
}

/// Cuts `rows`, at least [`FEWEST_ROWS`], into tiles of 16, 8 or 4.
fn row_tiles(rows: Range<usize>) -> impl Iterator<Item = RowTile> {
    let (mut own, end, len) = (rows.start, rows.end, rows.len());
    std::iter::from_fn(move || {
        let left = end.checked_sub(own).filter(|left| *left > 0)?;
        let enough = |size: &usize| *size >= left || 2 * *size > len;
        let size = [4, 8].into_iter().find(enough).unwrap_or(TILE_ROWS);
        let tile = RowTile { start: own.min(end - size), own, size };
        own = tile.start + size;
        Some(tile)
    })
}

/// Groups `first..first + len` of `P` panels from `panel` on.
#[derive(Clone, Copy)]
struct Part {
    panel: usize,
    first: usize,
    len: usize,
}

/// The activations of a tile of rows.
#[derive(Clone, Copy)]
struct Rows {
    /// The first row's blocks, its numbers for tiles and its blocks' sums; the other rows follow at `row_bytes`.
    blocks: *const u8,
    tiles: *const u8,
    sums: *const u8,
    row_bytes: usize,
}

impl Rows {
    /// Returns the first row's numbers of a group, in the unit's layout.
    ///
    /// # Safety
    /// The rows have the group.
    unsafe fn group<const HALVES: bool, const KIND: u8>(&self, group: usize) -> *const u8 {
        let (block, half) = if HALVES { (group / 2, group % 2) } else { (group, 0) };
        // SAFETY: the caller's word.
        unsafe {
            if KIND == BFLOAT {
                self.tiles.add(block * ACT_TILE_BYTES + half * BLOCK)
            } else {
                self.blocks.add(block * block_bytes(KIND).0 + half * BLOCK / 2)
            }
        }
    }
}

/// Multiplies a part by a tile of rows. A panel's products are stored just before the next group's overwrite their tile: by then they
/// have long been finished.
///
/// # Safety
/// The scratch holds the part, the unit is set up for the tile, and its rows have the part's groups.
unsafe fn multiply<const HALVES: bool, const KIND: u8, const P: usize>(part: Part, rows: Rows, scratch: *mut Scratch) {
    // SAFETY: the caller's word; groups and panels are within the scratch.
    unsafe {
        for g in 0..part.len {
            group::load_rows::<KIND>(rows.group::<HALVES, KIND>(part.first + g), rows.row_bytes);
            let (codes, dots) = ((&raw const (*scratch).codes[g]).cast::<u8>(), &raw mut (*scratch).dots);
            let before = (g > 0).then(|| (&raw mut (*dots)[g - 1]).cast::<u8>());
            group::multiply::<KIND, P>(codes, before);
        }
        group::store::<KIND, P>((&raw mut (*scratch).dots[part.len - 1]).cast());
    }
}

/// Adds the scaled dot products of a part and one of its panels to the sums of `R` rows.
struct Scale<const HALVES: bool, const OFFSET: bool, const KIND: u8, const R: usize> {
    part: Part,
    /// The panel's index in the part.
    p: usize,
    rows: Rows,
    scratch: *const Scratch,
    sums: *mut f32,
}

/// Repeats a statement for each row of a tile. With a loop that the compiler does not unroll, their sums would be kept in memory.
macro_rules! each_row {
    ($rows:expr, $row:ident => $body:expr) => {
        each_row!(@ $rows, $row => $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $rows:expr, $row:ident => $body:expr; $($number:literal)*) => {
        $(if $number < $rows {
            let $row: usize = $number;
            $body
        })*
    };
}

impl<const HALVES: bool, const OFFSET: bool, const KIND: u8, const R: usize> Kernel for Scale<HALVES, OFFSET, KIND, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut acc = [s.zero(); R];
        // SAFETY: `tile` has been promised rows and sums, and has multiplied the part.
        unsafe {
            if self.part.first > 0 {
                each_row!(R, row => acc[row] = s.load(self.sums.add(row * PANEL)));
            }
            for g in 0..self.part.len {
                self.group(s, g, &mut acc);
            }
            each_row!(R, row => s.store(self.sums.add(row * PANEL), acc[row]));
        }
    }
}

impl<const HALVES: bool, const OFFSET: bool, const KIND: u8, const R: usize> Scale<HALVES, OFFSET, KIND, R> {
    /// # Safety
    /// The part has the group, and its dot products have been written.
    #[inline(always)]
    unsafe fn group<S: Simd>(&self, s: S, g: usize, acc: &mut [S::F; R]) {
        let group = self.part.first + g;
        let (block, half) = if HALVES { (group / 2, group % 2) } else { (group, 0) };
        // SAFETY: the caller's word.
        unsafe {
            let scales = (&raw const (*self.scratch).scales[g][self.p]).cast::<f32>();
            let (scale, offset) = (s.load(scales), s.load(scales.add(PANEL)));
            let dots = (&raw const (*self.scratch).dots[g]).cast::<f32>();
            each_row!(R, row => {
                let at = row * self.rows.row_bytes;
                let (bytes, sums) = block_bytes(KIND);
                let acts = self.rows.blocks.add(at + block * bytes + sums).cast::<ActSums>();
                let scaled = if KIND == BFLOAT {
                    s.load(dots.add(self.p * TILE + row * PANEL))
                } else if one_plane(KIND) {
                    let dot = s.float(s.bits(s.load(dots.add(self.p * TILE + row * PANEL))));
                    s.mul(dot, s.splat((*acts).scale))
                } else {
                    let high = s.bits(s.load(dots.add(2 * self.p * TILE + row * PANEL)));
                    let low = s.bits(s.load(dots.add((2 * self.p + 1) * TILE + row * PANEL)));
                    s.mul(s.float(s.add_i(s.shl_i::<8>(high), low)), s.splat((*acts).scale))
                };
                acc[row] = s.fma(scaled, scale, acc[row]);
                if OFFSET {
                    let sum = match (HALVES, KIND) {
                        (true, _) => (*acts).scaled_half_sums[half],
                        (false, BFLOAT) => self.rows.sums.add(at).cast::<f32>().add(block).read(),
                        (false, _) => (*acts).scaled_sum,
                    };
                    acc[row] = s.fma(offset, s.splat(sum), acc[row]);
                }
            });
        }
    }
}

impl Job<'_> {
    /// Multiplies some panels by some rows if there are enough rows and the unit can. Returns whether it did.
    ///
    /// # Safety
    /// As for [`Job::tile`], and there are at most [`MOST_ROWS`] rows.
    pub(super) unsafe fn tiled<const CODE: u8, const HALVES: bool, const OFFSET: bool>(&self) -> bool {
        let form = self.acts.layout().form;
        let fewest = if form == ActForm::Bytes { FEWEST_BYTES } else { FEWEST_ROWS };
        if self.isa != Isa::Amx || self.rows.len() < fewest {
            return false;
        }
        // Integers of two planes take two tiles per panel, so that fewer panels advance together. With offsets there is no zero point.
        // SAFETY: the caller's word.
        unsafe {
            match kind(self.quant, form) {
                // Codes of eight bits never fit into floats.
                Some(BFLOAT) if codes::bits(CODE) < 8 => self.by_panels::<CODE, HALVES, OFFSET, BFLOAT, PANELS>(),
                Some(UNSIGNED_BYTES) => self.by_panels::<CODE, HALVES, OFFSET, UNSIGNED_BYTES, PANELS>(),
                Some(SIGNED_BYTES) => self.by_panels::<CODE, HALVES, false, SIGNED_BYTES, PANELS>(),
                Some(UNSIGNED) => self.by_panels::<CODE, HALVES, OFFSET, UNSIGNED, { PANELS / 2 }>(),
                Some(_) => self.by_panels::<CODE, HALVES, false, SIGNED, { PANELS / 2 }>(),
                None => return false,
            }
        }
        true
    }

    /// Multiplies the panels `P` at a time, and the rest one by one. Not inlined, so that only calls that multiply by tiles have its
    /// scratch on the stack.
    ///
    /// # Safety
    /// As for [`Job::tiled`], with enough rows and of the packing's [`kind`].
    #[inline(never)]
    unsafe fn by_panels<const CODE: u8, const HALVES: bool, const OFFSET: bool, const KIND: u8, const P: usize>(&self) {
        let Job { panels, rows, .. } = self;
        let table = (KIND == BFLOAT).then(|| words(self.quant));
        let mut scratch = MaybeUninit::<Scratch>::uninit();
        let scratch = scratch.as_mut_ptr();
        let together = panels.len() / P * P;
        // SAFETY: the panels are the caller's.
        unsafe {
            for panel in (panels.start..panels.start + together).step_by(P) {
                self.together::<CODE, HALVES, OFFSET, KIND, P>(panel, rows.clone(), table.as_ref(), scratch);
            }
            for panel in panels.start + together..panels.end {
                self.together::<CODE, HALVES, OFFSET, KIND, 1>(panel, rows.clone(), table.as_ref(), scratch);
            }
        }
        amx::release();
    }

    /// Multiplies `P` panels from `panel` on by all rows.
    ///
    /// # Safety
    /// As for [`Job::by_panels`].
    unsafe fn together<const CODE: u8, const HALVES: bool, const OFFSET: bool, const KIND: u8, const P: usize>(
        &self,
        panel: usize,
        rows: Range<usize>,
        table: Option<&Words>,
        scratch: *mut Scratch,
    ) {
        let len = if HALVES { BLOCK / 2 } else { BLOCK };
        let bytes = if KIND == BFLOAT { 2 * len } else { len };
        let groups = self.weights.packing.k() / len;
        let mut shape = 0;
        for first in (0..groups).step_by(GROUPS) {
            let part = Part { panel, first, len: GROUPS.min(groups - first) };
            self.isa.run_widest(Unpack::<CODE, HALVES, OFFSET, P> { job: self, part, table, scratch });
            for (number, tile) in row_tiles(rows.clone()).enumerate() {
                if shape != tile.size {
                    amx::configure(tile.size, bytes);
                    shape = tile.size;
                }
                // SAFETY: the part is unpacked, the unit set up, and rows are the caller's word.
                unsafe {
                    match tile.size {
                        4 => self.tile_of::<HALVES, OFFSET, KIND, P, 4>(part, number, tile, scratch),
                        8 => self.tile_of::<HALVES, OFFSET, KIND, P, 8>(part, number, tile, scratch),
                        _ => self.tile_of::<HALVES, OFFSET, KIND, P, TILE_ROWS>(part, number, tile, scratch),
                    }
                }
            }
        }
        for (number, tile) in row_tiles(rows).enumerate() {
            for p in 0..P {
                // SAFETY: panels and rows are the caller's word, and each tile has its sums.
                unsafe {
                    let target = TileTarget::new(self.weights, self.target, panel + p, tile.start);
                    let sums = (&raw const (*scratch).sums[number][p]).cast();
                    self.isa.run_widest(Finish { target, rows: tile.own - tile.start..tile.size, sums });
                }
            }
        }
    }

    /// Adds a part to the sums of a tile of `R` rows.
    ///
    /// # Safety
    /// The scratch holds the part, the unit is set up for `R` rows, and the tile is within the activations.
    unsafe fn tile_of<const HALVES: bool, const OFFSET: bool, const KIND: u8, const P: usize, const R: usize>(
        &self,
        part: Part,
        number: usize,
        tile: RowTile,
        scratch: *mut Scratch,
    ) {
        let layout = self.acts.layout();
        let row_bytes = layout.row_bytes();
        // SAFETY: the caller's word.
        unsafe {
            let blocks = self.acts.as_ptr().add(tile.start * row_bytes);
            let (tiles, sums) = (blocks.wrapping_add(layout.tiles_at()), blocks.wrapping_add(layout.sums_at()));
            let rows = Rows { blocks, tiles, sums, row_bytes };
            multiply::<HALVES, KIND, P>(part, rows, scratch);
            for p in 0..P {
                let sums = (&raw mut (*scratch).sums[number][p]).cast();
                self.isa.run_widest(Scale::<HALVES, OFFSET, KIND, R> { part, p, rows, scratch, sums });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_write_every_row_once_and_read_no_other() {
        for (from, len) in (FEWEST_ROWS..=MOST_ROWS).map(|len| (len % 7, len)) {
            let mut next = from;
            let tiles: Vec<RowTile> = row_tiles(from..from + len).collect();
            for tile in &tiles {
                assert_eq!(tile.own, next, "{len} rows");
                assert!(tile.start >= from && tile.start <= tile.own && [4, 8, 16].contains(&tile.size), "{tile:?}");
                next = tile.start + tile.size;
            }
            assert_eq!(next, from + len);
            assert!(tiles.len() <= TILES, "{len} rows in {} tiles", tiles.len());
        }
    }

    #[test]
    fn codes_are_signed_where_their_zero_point_fits_a_byte() {
        let quant = |bits, zero| QuantPacking {
            bits,
            group: 32,
            scales: crate::PackScales::F16,
            zero,
            offset: false,
            codebook: None,
        };
        let found = [(4, 0), (4, 8), (6, 32), (8, 128), (8, 0), (8, 1), (8, 127), (4, 129)]
            .map(|(bits, zero)| [ActForm::Words, ActForm::Bytes].map(|form| kind(quant(bits, zero), form)));
        let (plain, signed) = ([UNSIGNED, UNSIGNED_BYTES].map(Some), [SIGNED, SIGNED_BYTES].map(Some));
        assert_eq!(found, [plain, signed, signed, signed, plain, [None; 2], [None; 2], [None; 2]]);
    }
}
