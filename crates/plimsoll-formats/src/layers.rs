//! The properties of one decoder layer, for models with layers that differ: heads, the source of keys and values, the width of the
//! feed-forward part.

use crate::bounds::{
    CONTEXT_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, VOCAB_MAX, positive, within, wrong,
};
use crate::config::{Experts, ModelConfig};
use crate::error::FormatError;
use crate::variant::{LayerHeads, Mixer, check_taps};

impl ModelConfig {
    /// Whether layer `layer` attends through the sliding window.
    pub fn slides(&self, layer: usize) -> bool {
        self.layer_is_sliding.get(layer) == Some(&true)
    }

    /// The heads of layers with a sliding window, or of layers without one.
    pub fn heads_of(&self, sliding: bool) -> LayerHeads {
        let Self { kv_heads, head_dim, rotary_dim, .. } = *self;
        let plain = LayerHeads { kv_heads, head_dim, rotary_dim, values_are_keys: false };
        self.variant.global_heads.filter(|_| !sliding).unwrap_or(plain)
    }

    /// The query heads of layer `layer`.
    pub fn query_heads(&self, layer: usize) -> usize {
        self.variant.query_heads.get(layer).copied().unwrap_or(self.heads)
    }

    /// The layer whose keys and values layer `layer` reads. None if it has its own.
    pub fn kv_source(&self, layer: usize) -> Option<usize> {
        let first = self.layers - self.variant.shared_kv_layers;
        let source = (0..first).rev().find(|source| self.slides(*source) == self.slides(layer));
        source.filter(|_| (first..self.layers).contains(&layer))
    }

    /// The mixture of experts of layer `layer`, if it has one. A draft head's layer, after the last, has one if the model has.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.layers.get(layer).copied().unwrap_or(true))
    }

    /// The width of the plain feed-forward part of layer `layer`.
    pub fn mlp_width(&self, layer: usize) -> usize {
        self.variant.mlp_widths.get(layer).copied().unwrap_or(self.intermediate_size)
    }

    /// Checks the values of [`Variant`](crate::variant::Variant).
    pub(crate) fn check_variant(&self) -> Result<(), FormatError> {
        let variant = &self.variant;
        positive("residual multiplier", variant.residual_scale, 1e6)?;
        positive("logit scale", variant.logit_scale, 1e6)?;
        positive("epsilon of the norms after a layer's halves", variant.post_norm_eps.unwrap_or(1.0), 1.0)?;
        positive("embedding multiplier", self.embedding_scale, 1e6)?;
        let parts = variant.mamba.as_ref().and_then(|mamba| mamba.scales).map_or([1.0; 5], |scales| scales.0);
        let scales = variant.parallel_scales.into_iter().chain(variant.mlp_scales.unwrap_or([1.0; 2])).chain(parts);
        scales.into_iter().try_for_each(|scale| positive("multiplier of a layer's part", scale, 1e6))?;
        if let Some(growth) = variant.query_growth {
            positive("growth of queries", growth.beta, 1e3)?;
            within("step of the growth of queries", growth.length, CONTEXT_MAX)?;
        }
        match variant.rotated.len() {
            0 => {}
            flags if flags == self.layers => {}
            flags => return wrong(format!("{flags} flags of rotation for {} layers", self.layers)),
        }
        variant.global_heads.map_or(Ok(()), |heads| heads.check(self.heads))?;
        variant.latent.map_or(Ok(()), |latent| latent.check(self.heads))?;
        if let Some(input) = variant.per_layer_input {
            within("embedding of all layers", input.width.saturating_mul(self.layers), HIDDEN_MAX)?;
            within("rows of the embedding of layers", input.rows, VOCAB_MAX)?;
            if input.rows < self.vocab_size {
                return wrong(format!(
                    "the embedding of layers has {} rows for {} tokens",
                    input.rows, self.vocab_size
                ));
            }
        }
        if let Some(qwen4) = &variant.qwen4 {
            let recurrent = self.delta_net.as_ref().map_or(&[][..], |delta| &delta.layers);
            qwen4.check(self.hidden_size, self.rotary_dim, recurrent)?;
        }
        self.check_layers()?;
        self.check_mixers()
    }

    /// Checks the mixers: attention, convolution or recurrence of each layer.
    fn check_mixers(&self) -> Result<(), FormatError> {
        let mixers = &self.variant.mixers;
        if mixers.is_empty() {
            return Ok(());
        }
        if mixers.len() != self.layers {
            return wrong(format!("{} layer types for {} layers", mixers.len(), self.layers));
        }
        if !mixers.iter().any(|mixer| matches!(mixer, Mixer::Attention | Mixer::Parallel)) {
            return wrong(format!("none of {} layers is one of attention; at least one is needed", self.layers));
        }
        let idle = |layer| self.variant.mixer(layer) == Mixer::None && !self.variant.transforms(layer);
        if let Some(layer) = (0..self.layers).find(|layer| idle(*layer)) {
            return wrong(format!("layer {layer} has neither attention nor a recurrence nor a feed-forward part"));
        }
        within("width of rows before experts", self.variant.expert_latent.unwrap_or(1), HIDDEN_MAX)?;
        if mixers.contains(&Mixer::ShortConv) {
            check_taps(self.variant.conv_taps)?;
        }
        let has_mamba = mixers.iter().any(|mixer| matches!(mixer, Mixer::Mamba | Mixer::Parallel));
        match (&self.variant.mamba, has_mamba) {
            (Some(mamba), true) => mamba.check(),
            (None, true) => wrong("Mamba layers without their sizes".to_owned()),
            (_, false) => Ok(()),
        }
    }

    /// Checks the lists that have one entry per layer, and the layers that share keys and values.
    fn check_layers(&self) -> Result<(), FormatError> {
        let (variant, layers) = (&self.variant, self.layers);
        if !variant.mlp_widths.is_empty() && variant.mlp_widths.len() != layers {
            return wrong(format!("{} widths of feed-forward parts for {layers} layers", variant.mlp_widths.len()));
        }
        variant.mlp_widths.iter().try_for_each(|width| within("intermediate size", *width, INTERMEDIATE_MAX))?;
        self.check_query_heads()?;
        let shared = variant.shared_kv_layers;
        if shared >= layers {
            return wrong(format!("{shared} of {layers} layers share keys and values: one at least must have its own"));
        }
        match (layers - shared..layers).find(|layer| self.kv_source(*layer).is_none()) {
            Some(layer) => wrong(format!("layer {layer} shares keys and values, and no layer of its kind has them")),
            None => Ok(()),
        }
    }

    /// Checks the query heads of each layer against its key-value heads.
    fn check_query_heads(&self) -> Result<(), FormatError> {
        let listed = &self.variant.query_heads;
        if !listed.is_empty() && listed.len() != self.layers {
            return wrong(format!("{} numbers of query heads for {} layers", listed.len(), self.layers));
        }
        for (layer, heads) in listed.iter().enumerate() {
            let LayerHeads { kv_heads, head_dim, .. } = self.heads_of(self.slides(layer));
            within("attention heads of a layer", *heads, HEADS_MAX)?;
            within("attention width of a layer (heads x head width)", heads * head_dim, HIDDEN_MAX)?;
            if !heads.is_multiple_of(kv_heads) {
                return wrong(format!("{kv_heads} key-value heads do not divide the {heads} heads of layer {layer}"));
            }
        }
        Ok(())
    }
}

impl LayerHeads {
    fn check(&self, heads: usize) -> Result<(), FormatError> {
        within("key-value heads of global layers", self.kv_heads, heads)?;
        within("head width of global layers", self.head_dim, HEAD_DIM_MAX)?;
        within("attention width of global layers (heads x head width)", heads * self.head_dim, HIDDEN_MAX)?;
        within("rotated part of a head of global layers", self.rotary_dim, self.head_dim)?;
        let Self { kv_heads, head_dim, rotary_dim, .. } = *self;
        if !heads.is_multiple_of(kv_heads) {
            return wrong(format!("{kv_heads} key-value heads of global layers do not divide {heads} heads"));
        }
        match head_dim.is_multiple_of(2) && rotary_dim.is_multiple_of(2) {
            true => Ok(()),
            false => {
                wrong(format!("a global head width of {head_dim}, {rotary_dim} rotated, cannot be rotated in pairs"))
            }
        }
    }
}
