//! The families of models.

/// The family of a model, which decides the code that runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Architecture {
    /// Llama and models of its shape (Mistral, SmolLM).
    Llama,
    /// Qwen 2 and 2.5: Llama with biases on the query, key and value projections.
    Qwen2,
    /// Qwen 3: Llama with norms on queries and keys.
    Qwen3,
    /// Gemma 3: norms around each half layer, sliding and global layers, scaled embeddings.
    Gemma3,
    /// Qwen 3 MoE: Qwen 3 with a mixture of experts for the feed-forward part.
    Qwen3Moe,
    /// Qwen3-Next: three Gated DeltaNet layers to one of gated attention, mixture of experts.
    Qwen3Next,
    /// Qwen 3.5, dense: the layers of Qwen3-Next with a plain feed-forward part.
    Qwen3_5,
    /// Qwen 3.5 MoE.
    Qwen3_5Moe,
    /// BERT and models of its shape (MiniLM): an encoder.
    Bert,
    /// RoBERTa and XLM-RoBERTa: BERT with positions that start after the padding's.
    Roberta,
    /// Anything else, by the name the file gives. No model code runs it.
    Other(String),
}

impl Architecture {
    /// Every family that runs, as refusals list them.
    pub const SUPPORTED: &str = "Llama (and Mistral), Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3.5, Qwen3.5-MoE, \
        Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE, Qwen3-Omni-MoE (its thinker), Gemma 3, BERT and RoBERTa";

    /// Whether most layers are recurrent (Gated DeltaNet).
    pub fn is_hybrid(&self) -> bool {
        matches!(self, Architecture::Qwen3Next | Architecture::Qwen3_5 | Architecture::Qwen3_5Moe)
    }

    /// Whether every position sees every other, so that nothing is generated.
    pub fn is_encoder(&self) -> bool {
        matches!(self, Architecture::Bert | Architecture::Roberta)
    }

    /// Whether the feed-forward part may be a mixture of experts.
    pub fn has_experts(&self) -> bool {
        matches!(self, Architecture::Qwen3Moe | Architecture::Qwen3Next | Architecture::Qwen3_5Moe)
    }
}
