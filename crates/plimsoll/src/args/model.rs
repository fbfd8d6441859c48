//! Flags of one model among several.

use clap::Parser;

use super::engine::EngineArgs;
use super::reading::ReadingArgs;
use super::values::{seconds, size};

/// One table of `--models`, as flags.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, args_override_self = true)]
pub struct ModelArgs {
    /// The model, as for `serve`.
    #[arg(long)]
    pub model: String,
    /// Further names of the model in the API.
    #[arg(long)]
    pub served_model_name: Vec<String>,
    /// Idle seconds after which the model is unloaded [default: only when another model needs its memory].
    #[arg(long, value_parser = seconds(1))]
    pub idle_seconds: Option<u64>,
    /// Memory in bytes for structured output of this model; 0 turns it off.
    #[arg(long, value_parser = size, default_value = "48MiB")]
    pub grammar_bytes: u64,
    /// How the model's replies are parsed and texts embedded.
    #[command(flatten)]
    pub reading: ReadingArgs,
    /// The model's engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}
