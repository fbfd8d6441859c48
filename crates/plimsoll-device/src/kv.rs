//! The shape of the key/value cache: pages of 16 positions over all layers.
//!
//! A page holds every layer's keys and values of 16 consecutive positions of one sequence, one layer after another, so
//! that a page can be given back to the system as one range.

pub use plimsoll_kernels::KvDtype;
use plimsoll_kernels::KvLayout;

/// Positions per page.
pub const PAGE_TOKENS: usize = plimsoll_kernels::PAGE;

/// Pages that are read together: sequences that have the first so many in common, the next so many, and so on, are best neighbours in
/// a step. Their decode rows then read them once.
pub const SPLIT_PAGES: usize = plimsoll_kernels::SPLIT_PAGES;

/// The storage type that `name` stands for: f32, f16, bf16 or q8.
pub fn parse_kv_dtype(name: &str) -> Result<KvDtype, String> {
    match name {
        "f32" => Ok(KvDtype::F32),
        "f16" => Ok(KvDtype::F16),
        "bf16" => Ok(KvDtype::Bf16),
        "q8" => Ok(KvDtype::Q8),
        _ => Err(format!("'{name}' is no KV type: use f32, f16, bf16 or q8")),
    }
}

/// What the cache of one model looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Attention layers with keys and values in the cache; 0 for an encoder, which keeps none.
    pub layers: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Element type.
    pub dtype: KvDtype,
}

impl KvShape {
    /// The kernels' view of one layer of one page.
    ///
    /// # Panics
    /// When no kernel takes the head width; models refuse such configurations when they declare their weights.
    pub fn layout(&self) -> KvLayout {
        KvLayout::new(self.kv_heads, self.head_dim, self.dtype).expect("checked at declaration")
    }

    /// Bytes of one layer of one page, in whole cache lines.
    pub fn layer_bytes(&self) -> usize {
        self.layout().bytes_per_page().next_multiple_of(64)
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }

    /// Bytes of one token over all layers, page padding included, rounded up.
    pub fn token_bytes(&self) -> usize {
        self.page_bytes().div_ceil(PAGE_TOKENS)
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
        self.layers * self.layer_bytes()
    }
}

/// What a device must know of a model to reserve its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// The cache. A draft head's layer, where there is one, is its last.
    pub kv: KvShape,
    /// The recurrent state, for models that have one.
    pub state: Option<StateShape>,
    /// Query heads of a layer; a multiple of the cache's.
    pub heads: usize,
    /// Width of the widest row that is normalised.
    pub hidden: usize,
    /// What of an encoder beside the model decides how much scratch a thread needs, for models that have one.
    pub encoder: Option<EncoderShape>,
    /// Whether some rows are computed in bfloat16 ([`crate::WeightTable::shaped`]).
    pub rounded: bool,
}

/// What a device must know of an encoder that runs in the same workspace as the model ([`crate::Device::attend_all`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderShape {
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the widest row that is normalised or blended.
    pub widest: usize,
}

/// How the keys and values of one sequence of an encoder lie in the workspace: exact, since nothing is to be saved.
pub(crate) fn encoder_layout(heads: usize, width: usize) -> KvLayout {
    KvLayout::padded(heads, width, KvDtype::F32).expect("checked at declaration")
}
