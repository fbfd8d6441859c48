//! Attention and Mamba-2 side by side in one layer. Both read the same normed rows; their results are multiplied by two different factors
//! and added.
//!
//! Reference: transformers, `modeling_falcon_h1.py`.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, Input, KvLayer, Mode, StateShape, StepInput};
use plimsoll_formats::ModelConfig;

use crate::block::{AttentionBlock, AttentionPlace};
use crate::mamba::MambaBlock;

/// Weights of one layer with attention and Mamba-2.
pub struct ParallelBlock {
    attention: AttentionBlock,
    mamba: MambaBlock,
    /// The factors on the results of attention and of Mamba-2.
    scales: [f32; 2],
}

impl ParallelBlock {
    /// Declares `{prefix}.self_attn.*` and `{prefix}.mamba.*`. `layer` counts all layers, `cache` those with attention, `index` the
    /// recurrent ones.
    pub fn declare(
        config: &ModelConfig,
        prefix: &str,
        [layer, cache, index]: [usize; 3],
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let place = AttentionPlace { layer, cache, sliding: false, shared: false };
        Ok(Self {
            attention: AttentionBlock::declare(config, prefix, place, declare)?,
            mamba: MambaBlock::declare(config, prefix, index, declare)?,
            scales: config.variant.parallel_scales,
        })
    }

    /// The layer's part of the KV cache.
    pub fn kv(&self) -> Option<KvLayer> {
        self.attention.kv()
    }

    /// The shape of a slot's state in `layers` such layers.
    pub fn state_shape(&self, layers: usize) -> StateShape {
        self.mamba.state_shape(layers)
    }

    /// Elements that are normed together within the layer.
    pub fn norm_width(&self) -> usize {
        self.mamba.norm_width()
    }

    /// `x += attention(input) · scale + mamba(input) · scale`; `part` has the shape of `x` and is overwritten.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        angles: Option<Buf>,
        [x, part]: [Buf; 2],
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let input: Input = input.ready(device).into();
        let [of_attention, of_mamba] = self.scales;
        self.mamba.forward(device, input, part, Mode::Store, step)?;
        device.scale_rows(part, &|_| of_mamba);
        device.add(x, part);
        self.attention.forward(device, input, angles, part, Mode::Store, step)?;
        device.scale_rows(part, &|_| of_attention);
        device.add(x, part);
        Ok(())
    }
}
