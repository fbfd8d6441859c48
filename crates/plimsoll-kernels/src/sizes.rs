//! The sizes that kernels, weights and activations share.

/// Lanes of a vector, on every instruction set.
pub(crate) const LANES: usize = 16;
/// Elements of k in a block, the unit in which activations and codes are stored.
pub const BLOCK: usize = 32;
/// Elements of k that share one `d` (and `dmin`) under [`PackScales::Super`](crate::PackScales::Super).
pub const SUPER: usize = 256;
/// Outputs in a panel.
pub const PANEL: usize = LANES;
/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Bytes of a line of a tile: 32 elements of a row.
pub(crate) const TILE_LINE: usize = 2 * BLOCK;
/// Bytes of a tile: a line for each of its rows.
pub(crate) const TILE_BYTES: usize = TILE_ROWS * TILE_LINE;
/// The largest number of 16 bits: its upper byte is 127 and its lower one may still round up to it.
pub(crate) const WORD_MAX: f32 = 32_639.0;
