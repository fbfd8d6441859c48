//! Parameters of an attention layer that selects the positions of its rows.

use std::sync::Arc;

use super::Attention;
use crate::weights::VectorId;

/// Attention to selected blocks of positions, and to those behind the last complete block.
///
/// A block's key is the mean of its positions' index keys, normed, then rotated at the place of the block's first position.
/// Pairs are halves; twice as many elements as frequencies are rotated.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// The attention that it is a part of.
    pub attention: Attention,
    /// Index query heads.
    pub heads: usize,
    /// Positions of a block.
    pub block: usize,
    /// Blocks that a row selects.
    pub blocks: usize,
    /// The norm of block keys.
    pub norm: VectorId,
    /// The epsilon of the norm.
    pub eps: f32,
    /// Frequencies of the rotation.
    pub frequencies: VectorId,
    /// The axis of each frequency, in models with image input.
    pub axes: Option<Arc<[u8]>>,
    /// Factor of sine and cosine.
    pub rope_scale: f32,
}

impl Selection {
    /// The first position that has more complete blocks than it selects.
    pub fn selects_from(blocks: usize, block: usize) -> usize {
        (blocks + 1) * block - 1
    }

    /// Complete blocks among the positions up to `position`, its own included.
    pub fn complete(&self, position: usize) -> usize {
        (position + 1) / self.block
    }
}
