//! Flags of `plan`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::engine::EngineArgs;
use super::http::HttpArgs;
use super::k8s::K8sArgs;

/// Flags of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Catalogue name or hf:OWNER/REPOSITORY (fetched if it is not in the cache), a .gguf file, a checkpoint directory, or a config.json.
    #[arg(default_value = plimsoll_hub::DEFAULT_MODEL)]
    pub model: String,
    /// Configuration file (TOML) of `serve`.
    #[arg(long)]
    pub config: Option<String>,
    /// Check that this many users fit at once, each with --context tokens.
    #[arg(long)]
    pub users: Option<u64>,
    /// Tokens of each user, prompt and output together [default with --users: 4096 or the context length, the lower].
    #[arg(long)]
    pub context: Option<u64>,
    /// Images of the largest size in each user's prompt.
    #[arg(long)]
    pub images: Option<u64>,
    /// Seconds of audio in each user's prompt.
    #[arg(long)]
    pub audio_seconds: Option<u64>,
    /// Load the weights, run the largest steps in a small KV cache, measure them, and print the sizes a start would choose.
    #[arg(long, conflicts_with_all = ["users", "context", "images", "audio_seconds"])]
    pub probe: bool,
    /// Plan the models of this file, as for `serve --models`.
    #[arg(long, conflicts_with_all = ["model", "users", "context", "probe", "k8s"])]
    pub models: Option<PathBuf>,
    /// The flags that hold for each model of `models`.
    #[arg(skip)]
    pub inherited: Vec<OsString>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The Kubernetes manifest.
    #[command(flatten)]
    pub k8s: K8sArgs,
    /// The HTTP side.
    #[command(flatten)]
    pub http: HttpArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}
