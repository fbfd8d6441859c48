//! Flags, named as in lightllm and vllm-mlx. `flags.rs` adds the names of other servers.

mod access;
mod cache;
mod doctor;
mod engine;
mod http;
mod k8s;
mod launch;
mod media;
mod model;
mod models;
mod plan;
mod reading;
mod replay;
mod run;
mod serve;
mod top;
pub mod values;

use clap::{Parser, Subcommand, ValueEnum};

pub use cache::CacheCommand;
pub use doctor::DoctorArgs;
pub use engine::EngineArgs;
pub use http::HttpArgs;
pub use k8s::K8sArgs;
pub use launch::{Client, LaunchArgs};
pub use model::ModelArgs;
pub use models::ModelsArgs;
pub use plan::PlanArgs;
pub use reading::{GenerationConfig, PoolingMode, ReadingArgs};
pub use replay::ReplayArgs;
pub use run::RunArgs;
pub use serve::ServeArgs;
pub use top::TopArgs;

/// LLM and multimodal serving engine that plans every byte of memory before it starts.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version)]
pub struct Cli {
    /// Log at the level debug.
    #[arg(long, short, global = true)]
    pub verbose: bool,
    /// Format of the log on standard error.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object a line.
    Json,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (OpenAI and Anthropic APIs).
    Serve(ServeArgs),
    /// Talk to a model in the terminal, or answer one message.
    #[command(visible_alias = "chat")]
    Run(Box<RunArgs>),
    /// Print the memory that serving a model takes, without loading it.
    Plan(PlanArgs),
    /// Check this machine, its limits and the model files, and say what to change.
    Doctor(Box<DoctorArgs>),
    /// Fetch a model into the cache.
    Pull {
        /// Catalogue name or hf:org/repo(:file).
        model: String,
    },
    /// List cached models and those with a short name, or those that fit this machine.
    Models(ModelsArgs),
    /// Remove a model from the cache.
    Rm {
        /// Name of the model, as `models` lists it.
        model: String,
    },
    /// Watch a server: its pools, and each request with its memory.
    Top(TopArgs),
    /// Start a coding agent against a running server.
    Launch(LaunchArgs),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write a page for each command.
    Man {
        /// Directory for plimsoll.1, plimsoll-serve.1 and so on.
        directory: Option<std::path::PathBuf>,
    },
    /// Look after a prefix cache on disk (`serve --cache-dir`).
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Measure one or more OpenAI-compatible servers, interleaved.
    Bench(plimsoll_bench::bench::Args),
    /// Load a server with faults and hostile clients, and print a verdict.
    Soak(plimsoll_bench::soak::Args),
    /// Send a recorded trace to a server again, or simulate it without a model.
    Replay(Box<ReplayArgs>),
    /// The neighbour that `soak --balloon` starts.
    #[command(hide = true)]
    Balloon(plimsoll_bench::soak::balloon::Args),
}
