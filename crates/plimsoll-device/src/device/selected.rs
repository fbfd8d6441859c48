//! What an attention layer does that selects what its rows see, apart from its data.

use std::sync::Arc;

use super::Attention;
use crate::weights::VectorId;

/// Attention to selected blocks of positions, and to those behind the last complete block.
///
/// A block's key is the mean of its positions' index keys, normed, then rotated at the place of the block's first position
/// (halves, as many elements as there are frequencies twice).
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
    /// Its epsilon.
    pub eps: f32,
    /// Frequencies of the rotation.
    pub frequencies: VectorId,
    /// The axis of each, in models that see images.
    pub axes: Option<Arc<[u8]>>,
    /// What sine and cosine are multiplied with.
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
