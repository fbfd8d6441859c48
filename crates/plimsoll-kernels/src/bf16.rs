//! Rows rounded to bfloat16 in the matrix unit's layout: rows of a prompt, or all rows if the server is configured so. They take half
//! the bytes, and the order of a product's sums is the unit's (`linear/bf16.rs`). `acts` has the exact rows.

use crate::isa::{Isa, Kernel};
use crate::simd::{LANES, Simd};
use crate::sizes::BLOCK;
pub(crate) use crate::sizes::{TILE_BYTES, TILE_LINE, TILE_ROWS};

/// The shape of a buffer of activations in bfloat16. For every sixteen rows and every 32 elements it has the elements of the first row,
/// of the second, and so on, every four ordered 0, 2, 1, 3. The last tiles are as large as the others; their surplus rows are never
/// used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16Layout {
    /// Rows (tokens).
    pub rows: usize,
    /// Elements per row; a multiple of 32.
    pub k: usize,
}

impl Bf16Layout {
    /// Bytes of the buffer, which must be aligned to 64. Panics if `k` is not a multiple of 32 or the size overflows.
    pub fn bytes(self) -> usize {
        self.tiles().checked_mul(self.tile_bytes()).expect("activation buffer exceeds the address space")
    }

    /// Returns the number of tiles of sixteen rows.
    pub(crate) fn tiles(self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Returns the rows of a tile.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the matrix unit's alone"))]
    pub(crate) fn tile(self, tile: usize) -> std::ops::Range<usize> {
        tile * TILE_ROWS..self.rows.min((tile + 1) * TILE_ROWS)
    }

    /// Bytes of sixteen rows.
    pub(crate) fn tile_bytes(self) -> usize {
        assert!(self.k.is_multiple_of(BLOCK), "{} activations are not a multiple of {BLOCK}", self.k);
        (self.k / BLOCK).checked_mul(TILE_BYTES).expect("activation rows exceed the address space")
    }
}

/// Rounded activations, borrowed from the caller's buffer.
#[derive(Clone, Copy)]
pub struct Bf16Acts<'a> {
    layout: Bf16Layout,
    buffer: &'a [u8],
}

impl<'a> Bf16Acts<'a> {
    /// Wraps a buffer that [`round_row`] has filled. Panics if it is shorter than the layout or not aligned to 64 bytes.
    pub fn new(layout: Bf16Layout, buffer: &'a [u8]) -> Bf16Acts<'a> {
        let bytes = layout.bytes();
        assert!(buffer.len() >= bytes, "activation buffer of {} bytes, {bytes} needed", buffer.len());
        assert!(buffer.as_ptr().addr().is_multiple_of(64), "activation buffer not aligned to 64");
        Bf16Acts { layout, buffer }
    }

    /// Rows and elements per row.
    pub fn layout(&self) -> Bf16Layout {
        self.layout
    }

    /// Returns the tile of sixteen rows and the 32 elements of a group.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the matrix unit's alone"))]
    pub(crate) fn tile(&self, tile: usize, group: usize) -> *const u8 {
        self.buffer[tile * self.layout.tile_bytes() + group * TILE_BYTES..].as_ptr()
    }
}

/// Returns a float whose upper half is the nearest bfloat16, ties away from zero. A NaN from arithmetic stays a NaN. A NaN from a file,
/// with payload bits, may become a number: use [`round_any`] for it.
#[inline(always)]
pub(crate) fn round_up<S: Simd>(s: S, value: S::F) -> S::F {
    s.as_floats(s.add_i(s.bits(value), s.splat_i(1 << 15)))
}

/// [`round_up`] for any value: no NaN becomes a number.
#[inline(always)]
pub(crate) fn round_any<S: Simd>(s: S, value: S::F) -> S::F {
    // The upper half of an infinity or a NaN is one, too.
    s.select_lt(s.abs(value), s.splat(f32::INFINITY), round_up(s, value), value)
}

/// Stores sixteen elements of a row, rounded, into the row's tiles. `half` is the index of the sixteen in the row. The row's line
/// begins at the same offset in every tile.
///
/// # Safety
/// `line` is the row's line in its first tile, and the row has these elements.
#[inline(always)]
pub(crate) unsafe fn store_half<S: Simd>(s: S, line: *mut u8, half: usize, value: S::F) {
    // SAFETY: the caller's word.
    unsafe { s.store_high_words(line.add(half / 2 * TILE_BYTES + half % 2 * 2 * LANES), s.bits(round_any(s, value))) }
}

/// Rounds `x`, of `k` floats, into row `row` of a buffer of this layout. An infinity stays an infinity, and a NaN a NaN.
///
/// Panics if the row is not of this layout.
///
/// # Safety
/// `to` is the first byte of such a buffer, and nothing else accesses this row of it during the call.
pub unsafe fn round_row(isa: Isa, layout: Bf16Layout, x: &[f32], to: *mut u8, row: usize) {
    assert!(x.len() == layout.k && row < layout.rows, "{} activations for row {row} of {layout:?}", x.len());
    let at = row / TILE_ROWS * layout.tile_bytes() + row % TILE_ROWS * TILE_LINE;
    isa.run(RoundRow { x, to: to.wrapping_add(at) });
}

struct RoundRow<'a> {
    x: &'a [f32],
    /// The row's line in its first tile.
    to: *mut u8,
}

impl Kernel for RoundRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (half, x) in self.x.as_chunks::<LANES>().0.iter().enumerate() {
            // SAFETY: sixteen floats; the buffer has the row, as the caller of `round_row` promises.
            unsafe { store_half(s, self.to, half, s.load(x.as_ptr())) };
        }
    }
}
