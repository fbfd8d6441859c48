//! Turns the stored bytes of one row into codes and scales (or floats) in a row buffer.
//!
//! Pure functions from byte slices to a [`RowBuf`](crate::RowBuf), without files and names. The callers guarantee that a slice holds
//! exactly one row, which the readers checked when they built the directory.

pub(crate) mod affine;
pub(crate) mod blocks;
pub(crate) mod codebooks;
pub(crate) mod float;
pub(crate) mod float8;
pub(crate) mod grids;
pub(crate) mod grouped;
pub(crate) mod micro;
pub(crate) mod superblocks;
pub(crate) mod ternary;

/// The little-endian 16-bit word at byte `at`.
fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}
