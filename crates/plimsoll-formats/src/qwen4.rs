//! The parts of Qwen4-Exp besides the layers of Qwen 3.5 MoE: residual streams, the index of sparse attention, n-gram embeddings.
//!
//! Reference: transformers, `modular_qwen4_exp.py`. The hash of n-grams depends on the configuration alone.

use crate::bounds::{HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, TAPS_MAX, within, wrong};
use crate::error::FormatError;

/// Most residual streams.
const STREAMS_MAX: usize = 16;
/// Longest n-gram, in tokens.
const NGRAM_MAX: usize = 8;
/// Most hashed heads of a layer.
const NGRAM_HEADS_MAX: usize = 128;
/// Most rows of a hashed head. Rows of a layer are numbered in 32 bits.
const NGRAM_ROWS_MAX: usize = 1 << 28;
/// Most parts that a table of n-grams is stored in.
const PARTS_MAX: usize = 4096;
/// Most layers with n-grams; [`ALL_HEADS_MAX`] limits the heads of all of them. Each head needs a search for the next prime number. A layer
/// repeats the searches of the layers before it: a second at most.
const NGRAM_LAYERS_MAX: usize = 32;
const ALL_HEADS_MAX: usize = 512;
/// Most parts of the tables of all layers: a plan names each part.
const ALL_PARTS_MAX: usize = 1 << 15;
/// Most blocks that a query selects.
const BLOCKS_MAX: usize = 1 << 16;
/// Most tokens of a block.
const BLOCK_MAX: usize = 1 << 12;

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The parts of Qwen4-Exp besides its layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qwen4 {
    /// Residual streams.
    pub streams: usize,
    /// Width between the two projections that compute the weights of the streams.
    pub mixer_rank: usize,
    /// Whether the output gate of recurrent layers is a sigmoid; otherwise SiLU.
    pub sigmoid_gate: bool,
    /// The index by which attention selects blocks.
    pub indexer: Indexer,
    /// The n-gram embeddings, if any layer has them.
    pub ngrams: Option<Ngrams>,
}

/// The index of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indexer {
    /// Query heads. There is one key head.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens of a block.
    pub block: usize,
    /// Most blocks that a query selects.
    pub blocks: usize,
}

/// The n-gram embeddings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ngrams {
    /// The layers with n-gram embeddings, counted from 0, ascending.
    pub layers: Vec<usize>,
    /// Width of all heads of a layer together.
    pub width: usize,
    /// Taps of the convolution. Its dilation is [`Ngrams::longest`].
    pub taps: usize,
    /// Tokens of the longest n-gram.
    pub longest: usize,
    /// Heads of each order, from two tokens on.
    pub heads_per_order: usize,
    /// The least number of rows of a head.
    pub rows: usize,
    /// The number of rows of a table is a multiple of this; the rest is padding.
    pub multiple: usize,
    /// The seed of the hash.
    pub seed: u64,
    /// Parts that published checkpoints store a table in.
    pub parts: usize,
    /// The token that ends a text: no n-gram extends across it.
    pub end: u32,
}

/// A hashed head and its rows of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashedHead {
    /// The first of these rows.
    pub first: u64,
    /// The number of rows: a prime number.
    pub rows: u64,
}

impl Qwen4 {
    /// Checks the sizes, given the width of a stream, the rotated part of a head, and which layers are recurrent.
    pub(crate) fn check(&self, hidden: usize, rotary_dim: usize, recurrent: &[bool]) -> Result<(), FormatError> {
        within("hc_count", self.streams, STREAMS_MAX)?;
        if self.streams < 2 {
            return wrong(format!("hc_count: {}, allowed are 2 to {STREAMS_MAX}", self.streams));
        }
        within("hc_lowrank", self.mixer_rank, HIDDEN_MAX)?;
        within("width of all residual streams", self.streams * hidden, HIDDEN_MAX)?;
        self.indexer.check(rotary_dim)?;
        let Some(ngrams) = &self.ngrams else { return Ok(()) };
        ngrams.check()?;
        match ngrams.layers.iter().find(|layer| recurrent.get(**layer) != Some(&true)) {
            Some(layer) => wrong(format!(
                "ple_layer_ids: {}, allowed are linear_attention layers from 1 to {}",
                layer + 1,
                recurrent.len()
            )),
            None => Ok(()),
        }
    }
}

impl Indexer {
    fn check(&self, rotary_dim: usize) -> Result<(), FormatError> {
        within("indexer_n_heads", self.heads, HEADS_MAX)?;
        within("indexer_head_dim", self.head_dim, HEAD_DIM_MAX)?;
        within("indexer_compress_ratio", self.block, BLOCK_MAX)?;
        within("indexer_budget / indexer_compress_ratio", self.blocks, BLOCKS_MAX)?;
        within("rotated part of an index head", rotary_dim, self.head_dim)
    }
}

impl Ngrams {
    fn check(&self) -> Result<(), FormatError> {
        within("ngram_size", self.longest, NGRAM_MAX)?;
        if self.longest < 2 {
            return wrong(format!("ngram_size: {}, allowed are 2 to {NGRAM_MAX}", self.longest));
        }
        within("heads_per_ngram", self.heads_per_order, NGRAM_HEADS_MAX)?;
        within("n-gram heads", self.heads(), NGRAM_HEADS_MAX)?;
        within("ple_embed_dim", self.width, HIDDEN_MAX)?;
        within("ple_conv_kernel_size", self.taps, TAPS_MAX)?;
        if self.taps < 2 {
            return wrong(format!("ple_conv_kernel_size: {}, allowed are 2 to {TAPS_MAX}", self.taps));
        }
        within("ngram_vocab_size_base", self.rows, NGRAM_ROWS_MAX)?;
        within("n-gram rows of a layer", self.rows.saturating_mul(self.heads()), u32::MAX as usize / 2)?;
        within("make_ngram_vocab_size_divisible_by", self.multiple, NGRAM_ROWS_MAX)?;
        within("split_ngram_parts", self.parts, PARTS_MAX)?;
        let layers = self.layers.len();
        within("layers of ple_layer_ids", layers, NGRAM_LAYERS_MAX)?;
        within("n-gram heads of all layers", self.heads().saturating_mul(layers), ALL_HEADS_MAX)?;
        within("split_ngram_parts of all layers", self.parts.saturating_mul(layers), ALL_PARTS_MAX)?;
        match self.width.is_multiple_of(self.heads()) {
            true => Ok(()),
            false => {
                wrong(format!("ple_embed_dim ({}) is not a multiple of {} n-gram heads", self.width, self.heads()))
            }
        }
    }

    /// Heads of a layer.
    pub fn heads(&self) -> usize {
        (self.longest - 1) * self.heads_per_order
    }

    /// Earlier inputs that the convolution needs.
    pub fn history(&self) -> usize {
        (self.taps - 1) * self.longest
    }

    /// Returns the hash's factors for the tokens of an n-gram, the last token's factor first. `index` counts the layers that have n-grams.
    pub fn multipliers(&self, index: usize, vocab: usize) -> Vec<u64> {
        let half = (i64::MAX as u64 / vocab.max(1) as u64 / 2).max(1);
        let base = self.seed.wrapping_add(10_007 * index as u64);
        let value = |place: u64| splitmix64(base.wrapping_add(GAMMA.wrapping_mul(place + 1)));
        (0..self.longest as u64).map(|place| 2 * (value(place) % half) + 1).collect()
    }

    /// Returns the hashed heads of a layer. No two heads of all layers have the same number of rows.
    pub fn hashed_heads(&self, index: usize) -> Vec<HashedHead> {
        let heads = self.heads();
        let mut primes = (self.rows as u64..).filter(|number| is_prime(*number)).skip(index * heads);
        let mut first = 0;
        let mut next = || {
            let head = HashedHead { first, rows: primes.next().expect("there are more primes") };
            first += head.rows;
            head
        };
        (0..heads).map(|_| next()).collect()
    }

    /// Returns the rows of the table of a layer with these heads, padding included.
    pub fn table_rows(&self, heads: &[HashedHead]) -> usize {
        let last = heads.last().map_or(0, |head| head.first + head.rows);
        (last as usize).next_multiple_of(self.multiple)
    }
}

fn splitmix64(value: u64) -> u64 {
    let value = value.wrapping_add(GAMMA);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

fn is_prime(number: u64) -> bool {
    match number {
        0 | 1 => false,
        2 => true,
        _ if number.is_multiple_of(2) => false,
        _ => (3..=number.isqrt()).step_by(2).all(|divisor| !number.is_multiple_of(divisor)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_reference() {
        let ngrams = Ngrams {
            layers: vec![0, 2],
            width: 32,
            taps: 4,
            longest: 3,
            heads_per_order: 2,
            rows: 97,
            multiple: 16,
            seed: 1234,
            parts: 4,
            end: 0,
        };
        // Computed by `_build_layer_multipliers` and `_find_nth_prime_after` of transformers.
        assert_eq!(ngrams.hashed_heads(0).iter().map(|head| head.rows).collect::<Vec<_>>(), [97, 101, 103, 107]);
        assert_eq!(ngrams.hashed_heads(1).iter().map(|head| head.rows).collect::<Vec<_>>(), [109, 113, 127, 131]);
        assert_eq!([0, 1].map(|index| ngrams.table_rows(&ngrams.hashed_heads(index))), [416, 480]);
        assert_eq!(ngrams.multipliers(0, 384), [16_304_757_896_083_889, 11_435_418_644_576_253, 7_275_717_464_594_479]);
        assert_eq!(ngrams.multipliers(1, 384), [5_228_146_660_100_193, 2_619_768_721_782_095, 9_086_037_022_200_413]);
    }
}
