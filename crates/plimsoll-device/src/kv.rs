//! The shape of the KV cache: pages of 16 positions, in one or two groups of layers.
//!
//! Layers of the whole group keep every position of a sequence; layers of the window group keep only the last positions. A page of a
//! group holds keys and values of 16 consecutive positions of one sequence for every layer of the group, one layer after another.
//! So the system gets a page back as one range. Each layer has its own number and width of heads.

use std::sync::Arc;

pub use plimsoll_kernels::KvDtype;
use plimsoll_kernels::KvLayout;

/// Positions per page.
pub const PAGE_TOKENS: usize = plimsoll_kernels::PAGE;

/// Pages that are read together. Sequences with the same first `SPLIT_PAGES` pages, the same next `SPLIT_PAGES`, and so on, should be
/// neighbours in a step. Their decode rows then read these pages once.
pub const SPLIT_PAGES: usize = plimsoll_kernels::SPLIT_PAGES;

/// Parses the name of a storage type: f32, f16, bf16 or q8.
pub fn parse_kv_dtype(name: &str) -> Result<KvDtype, String> {
    match name {
        "f32" => Ok(KvDtype::F32),
        "f16" => Ok(KvDtype::F16),
        "bf16" => Ok(KvDtype::Bf16),
        "q8" => Ok(KvDtype::Q8),
        _ => Err(format!("unknown KV type '{name}': use f32, f16, bf16 or q8")),
    }
}

/// Keys and values of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Most query heads of a layer that reads these keys and values; a multiple of `kv_heads`.
    pub heads: usize,
    /// Most positions that such a layer attends to, its own included; none: all.
    pub window: Option<usize>,
}

/// The group of pages that holds a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvGroup {
    /// Pages of the whole context.
    Whole,
    /// Pages of the last positions.
    Window,
}

/// The place of one layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedLayer {
    /// The group of pages that the layer is part of.
    pub group: KvGroup,
    /// Byte offset of the layer in a page of its group.
    pub offset: usize,
    /// The layout of keys and values, for the kernels.
    pub layout: KvLayout,
    /// Query heads to a key/value head, at most.
    pub queries: usize,
    /// The index keys behind keys and values, in layers that select positions.
    pub index: Option<IndexLayout>,
}

impl CachedLayer {
    /// Bytes of the layer's part of a page, in whole cache lines.
    pub fn bytes(&self) -> usize {
        self.kv_bytes() + self.index.map_or(0, |index| index.bytes())
    }

    /// Bytes of keys and values alone, in whole cache lines: index keys begin there.
    pub fn kv_bytes(&self) -> usize {
        self.layout.bytes_per_page().next_multiple_of(64)
    }
}

/// The layout of a layer's index keys in a page: a slot for every position. A slot has the position's place in time, height and width,
/// then the key. Keys are f32 in a cache of f32, and bfloat16 in any other: the choice must not depend on a scale that neighbours share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLayout {
    /// Elements of a key.
    pub width: usize,
    /// Whether elements are f32.
    pub wide: bool,
}

impl IndexLayout {
    /// Bytes before the key in a slot: three f32, padded.
    pub const KEY_AT: usize = 16;

    /// Bytes of a position's slot.
    pub fn slot_bytes(&self) -> usize {
        let element = if self.wide { size_of::<f32>() } else { size_of::<u16>() };
        Self::KEY_AT + (self.width * element).next_multiple_of(Self::KEY_AT)
    }

    /// Bytes of a page's slots, in whole cache lines.
    pub fn bytes(&self) -> usize {
        (PAGE_TOKENS * self.slot_bytes()).next_multiple_of(64)
    }
}

/// The shape of one model's KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShape {
    dtype: KvDtype,
    layers: Arc<[CachedLayer]>,
    page_bytes: [usize; 2],
    window: Option<usize>,
}

impl KvShape {
    /// A cache of these layers, all in the whole group.
    ///
    /// # Panics
    /// When no kernel supports a head width; models refuse such configurations when they declare their weights.
    pub fn new(dtype: KvDtype, layers: impl IntoIterator<Item = KvLayer>) -> Self {
        Self::placed(dtype, layers.into_iter().map(|layer| KvLayer { window: None, ..layer }).collect())
    }

    /// A cache of these layers, layers with a window in the window group. That group keeps as many positions as the widest window has.
    /// The prefix tree needs pages of the whole context: a model with sliding layers only has its layers there.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn grouped(dtype: KvDtype, layers: impl IntoIterator<Item = KvLayer>) -> Self {
        let layers: Vec<KvLayer> = layers.into_iter().collect();
        match layers.iter().all(|layer| layer.window.is_some()) {
            true => Self::new(dtype, layers),
            false => Self::placed(dtype, layers),
        }
    }

    /// [`KvShape::new`] for a model with recurrent state: its checkpoints do not cover window pages. Otherwise
    /// [`KvShape::grouped`].
    pub fn of(dtype: KvDtype, has_state: bool, layers: impl IntoIterator<Item = KvLayer>) -> Self {
        if has_state { Self::new(dtype, layers) } else { Self::grouped(dtype, layers) }
    }

    fn placed(dtype: KvDtype, layers: Vec<KvLayer>) -> Self {
        let (mut page_bytes, mut window) = ([0; 2], None);
        let place = |layer: KvLayer| {
            let group = if layer.window.is_some() { KvGroup::Window } else { KvGroup::Whole };
            window = window.max(layer.window);
            let layout = KvLayout::new(layer.kv_heads, layer.head_dim, dtype).expect("checked at declaration");
            let offset = page_bytes[group as usize];
            let queries = layer.heads / layer.kv_heads;
            let placed = CachedLayer { group, offset, layout, queries, index: None };
            page_bytes[group as usize] += placed.bytes();
            placed
        };
        let layers = layers.into_iter().map(place).collect();
        Self { dtype, layers, page_bytes, window }
    }

    /// A cache of these layers and, behind them, of a draft model's, all in the whole group.
    #[must_use]
    pub fn with_draft(mut self, draft: &Self) -> Self {
        let before = self.page_bytes(KvGroup::Whole);
        let moved = draft.layers.iter().map(|layer| CachedLayer { offset: before + layer.offset, ..*layer });
        self.layers = self.layers.iter().copied().chain(moved).collect();
        self.page_bytes[KvGroup::Whole as usize] += draft.page_bytes(KvGroup::Whole);
        self
    }

    /// A cache that keeps an index key of `width` elements beside keys and values, in all layers.
    #[must_use]
    pub fn with_index(self, width: usize) -> Self {
        let (mut page_bytes, wide) = ([0; 2], self.dtype == KvDtype::F32);
        let place = |layer: &CachedLayer| {
            let offset = page_bytes[layer.group as usize];
            let placed = CachedLayer { offset, index: Some(IndexLayout { width, wide }), ..*layer };
            page_bytes[layer.group as usize] += placed.bytes();
            placed
        };
        let layers = self.layers.iter().map(place).collect();
        Self { layers, page_bytes, ..self }
    }

    /// The cache of an encoder, which stores nothing.
    pub fn none() -> Self {
        Self::new(KvDtype::F32, [])
    }

    /// Returns the storage type of keys and values.
    pub fn dtype(&self) -> KvDtype {
        self.dtype
    }

    /// Returns every attention layer with keys and values in the cache; none for an encoder. The layer of a draft head, or
    /// the layers of a draft model, are the last.
    pub fn layers(&self) -> &[CachedLayer] {
        &self.layers
    }

    /// Layers of a group.
    pub fn count(&self, group: KvGroup) -> usize {
        self.layers.iter().filter(|layer| layer.group == group).count()
    }

    /// Returns the most positions that layers of the window group attend to; none without such layers.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Bytes of one page of a group.
    pub fn page_bytes(&self, group: KvGroup) -> usize {
        self.page_bytes[group as usize]
    }

    /// Bytes of `pages` pages of the whole context and `window_pages` pages of the window group.
    pub fn bytes(&self, pages: usize, window_pages: usize) -> usize {
        pages * self.page_bytes(KvGroup::Whole) + window_pages * self.page_bytes(KvGroup::Window)
    }

    /// Bytes of one token in the pages of the whole context, page padding included, rounded up.
    pub fn token_bytes(&self) -> usize {
        self.page_bytes(KvGroup::Whole).div_ceil(PAGE_TOKENS)
    }
}

/// The recurrent state of one sequence at one position: a slot. All of it is f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Recurrent layers.
    pub layers: usize,
    /// Channels of a layer's causal convolution.
    pub conv_channels: usize,
    /// Inputs the convolution looks back to: its kernel's width less one.
    pub conv_history: usize,
    /// Value heads of a layer, each with a matrix of `key_dim` × `value_dim`.
    pub heads: usize,
    /// Rows of a head's matrix.
    pub key_dim: usize,
    /// Columns of a head's matrix.
    pub value_dim: usize,
    /// State of layers that look up n-grams, in models with such layers.
    pub ngrams: Option<NgramState>,
}

/// State of layers that look up n-grams, in a slot behind the state of recurrent layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramState {
    /// Layers that look up n-grams.
    pub layers: usize,
    /// Channels of a layer's convolution.
    pub channels: usize,
    /// Inputs that the convolution looks back to.
    pub history: usize,
    /// Token ids before a row that an n-gram may reach.
    pub tokens: usize,
}

impl NgramState {
    /// Bytes of one layer's convolution history, in whole cache lines.
    pub fn conv_bytes(&self) -> usize {
        (self.channels * self.history * size_of::<f32>()).next_multiple_of(64)
    }

    /// Bytes of one layer: history, then token ids.
    pub fn layer_bytes(&self) -> usize {
        self.conv_bytes() + (self.tokens * size_of::<u32>()).next_multiple_of(64)
    }
}

impl StateShape {
    /// Bytes of one layer's convolution history, in whole cache lines.
    pub fn conv_bytes(&self) -> usize {
        (self.conv_channels * self.conv_history * size_of::<f32>()).next_multiple_of(64)
    }

    /// Bytes of one layer: history, then the heads' matrices.
    pub fn layer_bytes(&self) -> usize {
        self.conv_bytes() + (self.heads * self.key_dim * self.value_dim * size_of::<f32>()).next_multiple_of(64)
    }

    /// Bytes of one slot over all layers.
    pub fn slot_bytes(&self) -> usize {
        self.ngrams_at() + self.ngrams.map_or(0, |ngrams| ngrams.layers * ngrams.layer_bytes())
    }

    /// Returns the offset in a slot of the state of layers that look up n-grams.
    pub fn ngrams_at(&self) -> usize {
        self.layers * self.layer_bytes()
    }
}

/// Sizes of a model from which a device reserves its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// The cache.
    pub kv: KvShape,
    /// The recurrent state, for models that have one.
    pub state: Option<StateShape>,
    /// Width of the widest row that is normalised.
    pub hidden: usize,
    /// Sizes of the model's encoder, for scratch of a thread; none for a model without an encoder.
    pub encoder: Option<EncoderShape>,
    /// Whether some rows are computed in bfloat16 ([`crate::WeightTable::shaped`]).
    pub bf16: bool,
}

/// Sizes of an encoder that runs in the same workspace as the model ([`crate::Device::attend_all`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderShape {
    /// Elements of a head, in each of at most two encoders.
    pub head_dims: [usize; 2],
    /// Width of the widest row that is normalised or blended.
    pub widest: usize,
    /// Query heads to a key/value head, at most.
    pub queries: usize,
}

impl EncoderShape {
    /// One encoder.
    pub fn new(head_dim: usize, widest: usize) -> Self {
        Self { head_dims: [head_dim; 2], widest, queries: 1 }
    }

    /// Returns this shape with `queries` query heads to a key/value head.
    #[must_use]
    pub fn shared(self, queries: usize) -> Self {
        Self { queries, ..self }
    }

    /// Two encoders beside one model.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let (widest, queries) = (self.widest.max(other.widest), self.queries.max(other.queries));
        Self { head_dims: [self.head_dims[0], other.head_dims[0]], widest, queries }
    }

    /// Elements of the widest head.
    pub fn head_dim(&self) -> usize {
        self.head_dims[0].max(self.head_dims[1])
    }
}

/// Returns the layout of one encoder sequence's keys and values in the workspace. It is f32, since no memory is to be saved.
pub(crate) fn encoder_layout(heads: usize, width: usize) -> KvLayout {
    KvLayout::padded(heads, width, KvDtype::F32).expect("checked at declaration")
}
