//! Flags about a model's replies and embeddings.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use plimsoll_engine::Pooling;
use plimsoll_reply::{Choice, ReasoningFormat, ToolFormat};

/// Flags about a model's replies, embeddings and sampling. With `--models`, each model has its own.
#[derive(Debug, Default, Args)]
pub struct ReadingArgs {
    /// Format of the model's tool calls: auto (read from the chat template), none, hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v31, glm45, functiongemma, gemma4, openai, lfm2, olmo3, kimi_k2, nemotron_json, granite, phi4_mini_json, hunyuan_a13b.
    #[arg(long, default_value = "auto")]
    pub tool_call_parser: Choice<ToolFormat>,
    /// Format of the model's reasoning: auto (read from the chat template), none, think (also qwen3, deepseek_r1, glm45), mistral, seed_oss, gemma4, openai.
    #[arg(long, default_value = "auto")]
    pub reasoning_parser: Choice<ReasoningFormat>,
    /// Pooling mode of embeddings: mean, last or cls; or rank, for a Qwen3-Reranker, which scores texts by its next token [default: as in the checkpoint's sentence-transformers files or the GGUF file;
    /// mean for encoders without either].
    #[arg(long)]
    pub pooling: Option<PoolingMode>,
    /// Default sampling: auto (the checkpoint's generation_config.json; without one temperature 0.7, top_p 0.95, min_p 0.05) or off (temperature 1, no filter).
    #[arg(long, value_enum, default_value_t = GenerationConfig::Auto)]
    pub generation_config: GenerationConfig,
}

/// The output of an embedding or scoring model for a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingMode {
    /// An embedding.
    Embedding(Pooling),
    /// A score of the text and the one that it is compared with.
    Rank,
}

impl FromStr for PoolingMode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "mean" => Ok(Self::Embedding(Pooling::Mean)),
            "last" => Ok(Self::Embedding(Pooling::Last)),
            "cls" => Ok(Self::Embedding(Pooling::First)),
            "rank" => Ok(Self::Rank),
            _ => Err(format!("unknown pooling mode '{name}': use mean, last, cls or rank")),
        }
    }
}

/// Whether the sampling of the checkpoint's generation_config.json is the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GenerationConfig {
    /// It is the default.
    #[default]
    Auto,
    /// It is ignored.
    #[value(alias = "vllm")]
    Off,
}
