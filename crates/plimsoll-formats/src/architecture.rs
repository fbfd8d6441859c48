//! The families of models.

use std::fmt;

/// The family of a model, which selects the code that runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Architecture {
    /// Llama and models of its shape (Mistral, SmolLM).
    Llama,
    /// Qwen 2 and 2.5: Llama with biases on the query, key and value projections.
    Qwen2,
    /// Qwen 3: Llama with norms on queries and keys.
    Qwen3,
    /// Qwen 3 MoE: Qwen 3 with a mixture of experts for the feed-forward part.
    Qwen3Moe,
    /// Qwen3-Next: three Gated DeltaNet layers to one of gated attention, mixture of experts.
    Qwen3Next,
    /// Qwen 3.5, dense: the layers of Qwen3-Next with a plain feed-forward part.
    Qwen3_5,
    /// Qwen 3.5 MoE.
    Qwen3_5Moe,
    /// Qwen4-Exp: the layers of Qwen 3.5 MoE over several residual streams, with sparse attention and n-gram embeddings.
    Qwen4Exp,
    /// BERT and models of its shape (MiniLM): an encoder.
    Bert,
    /// RoBERTa and XLM-RoBERTa: BERT with positions that start after the padding token's.
    Roberta,
    /// ModernBERT: an encoder. Most of its layers attend through a window.
    ModernBert,
    /// nomic-bert: BERT with rotated queries and keys, and a gated feed-forward part.
    NomicBert,
    /// Whisper: an encoder of audio, and a decoder that attends to its output at every layer.
    Whisper,
    /// A family of decoders that needs no model code, by its name. `family` has all of these.
    Family(&'static str),
    /// Any other architecture, by the name in the file. No model code runs it.
    Other(String),
}

impl Architecture {
    /// Models with code written for them. [`supported_models`](crate::supported_models) adds the families of decoders.
    pub(crate) const OF_OWN_CODE: &str = "Llama (and Mistral), Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3.5, Qwen3.5-MoE, Qwen4-Exp, Qwen2-VL, \
        Qwen2.5-VL, Qwen3-VL, Qwen3-VL-MoE, Qwen2.5-Omni and Qwen3-Omni-MoE (their thinkers), Qwen3-ASR, Whisper, BERT, RoBERTa, \
        ModernBERT, nomic-bert";

    /// Whether most layers are recurrent (Gated DeltaNet).
    pub fn is_hybrid(&self) -> bool {
        matches!(
            self,
            Architecture::Qwen3Next | Architecture::Qwen3_5 | Architecture::Qwen3_5Moe | Architecture::Qwen4Exp
        )
    }

    /// Whether every position attends to every other, so that the model generates no text.
    pub fn is_encoder(&self) -> bool {
        matches!(self, Architecture::Bert | Architecture::Roberta | Architecture::ModernBert | Architecture::NomicBert)
    }

    /// Whether the feed-forward part may be a mixture of experts.
    pub fn has_experts(&self) -> bool {
        matches!(
            self,
            Architecture::Qwen3Moe | Architecture::Qwen3Next | Architecture::Qwen3_5Moe | Architecture::Qwen4Exp
        )
    }
}

/// The family's name in messages.
impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Architecture::Family(name) => f.write_str(name),
            Architecture::Other(name) => f.write_str(name),
            Architecture::Qwen4Exp => f.write_str("Qwen4-Exp"),
            other => write!(f, "{other:?}"),
        }
    }
}
