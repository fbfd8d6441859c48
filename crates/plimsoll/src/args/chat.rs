//! Flags of `chat`.

use clap::Args;

use super::engine::EngineArgs;

/// Flags of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Catalogue name, hf:org/repo(:file), a .gguf file, or a checkpoint directory.
    #[arg(default_value = plimsoll_hub::DEFAULT_MODEL)]
    pub model: String,
    /// System prompt.
    #[arg(long)]
    pub system: Option<String>,
    /// Sampling temperature; 0 takes the most likely token.
    #[arg(long, default_value_t = 0.7)]
    pub temperature: f32,
    /// Most tokens per answer.
    #[arg(long, default_value_t = 1024)]
    pub max_tokens: u32,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}
