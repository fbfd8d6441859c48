//! The part of a layer that mixes positions: attention, a convolution, Mamba-2, or attention and Mamba-2.

use plimsoll_device::{KvLayer, StateShape};
use plimsoll_formats::{ModelConfig, QkNorm};

use crate::block::AttentionBlock;
use crate::latent::LatentBlock;
use crate::mamba::MambaBlock;
use crate::parallel::ParallelBlock;
use crate::short_conv::ShortConvBlock;

pub(super) enum Mixer {
    Attention(AttentionBlock),
    Latent(Box<LatentBlock>),
    ShortConv(ShortConvBlock),
    Mamba(MambaBlock),
    Parallel(Box<ParallelBlock>),
}

impl Mixer {
    /// Elements of the widest row that is normed within, not counting norms of single heads.
    pub fn norm_width(&self, config: &ModelConfig) -> usize {
        match self {
            Self::Attention(_) if config.qk_norm && config.variant.qk_norm == QkNorm::Row => {
                config.heads * config.head_dim
            }
            Self::Attention(_) | Self::ShortConv(_) => 0,
            Self::Latent(latent) => latent.norm_width(),
            Self::Mamba(mamba) => mamba.norm_width(),
            Self::Parallel(both) => both.norm_width(),
        }
    }

    /// The recurrent state of `layers` such layers; none for attention.
    pub fn state_shape(&self, layers: usize) -> Option<StateShape> {
        match self {
            Self::Attention(_) | Self::Latent(_) => None,
            Self::ShortConv(conv) => Some(conv.spec().state_shape(layers)),
            Self::Mamba(mamba) => Some(mamba.state_shape(layers)),
            Self::Parallel(both) => Some(both.state_shape(layers)),
        }
    }

    /// The layer's part of the KV cache, if it has keys and values.
    pub fn kv(&self) -> Option<KvLayer> {
        match self {
            Self::Attention(attention) => attention.kv(),
            Self::Latent(latent) => Some(latent.kv()),
            Self::Parallel(both) => both.kv(),
            Self::ShortConv(_) | Self::Mamba(_) => None,
        }
    }
}
