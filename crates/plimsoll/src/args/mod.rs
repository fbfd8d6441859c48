//! Flags, named as in lightllm and vllm-mlx. `flags.rs` adds the names of other servers.

mod access;
mod chat;
mod doctor;
mod engine;
mod http;
mod k8s;
mod media;
mod model;
mod plan;
mod reading;
mod replay;
mod serve;
pub mod values;

use clap::{Parser, Subcommand, ValueEnum};

pub use chat::ChatArgs;
pub use doctor::DoctorArgs;
pub use engine::EngineArgs;
pub use http::HttpArgs;
pub use k8s::K8sArgs;
pub use model::ModelArgs;
pub use plan::PlanArgs;
pub use reading::{GenerationConfig, ReadingArgs};
pub use replay::ReplayArgs;
pub use serve::ServeArgs;

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
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (OpenAI and Anthropic APIs).
    Serve(ServeArgs),
    /// Talk to a model in the terminal.
    Chat(ChatArgs),
    /// Print the memory that serving a model takes, without loading it.
    Plan(PlanArgs),
    /// Check this machine, its limits and the model files, and say what to change.
    Doctor(Box<DoctorArgs>),
    /// Fetch a model into the cache.
    Pull {
        /// Catalogue name or hf:org/repo(:file).
        model: String,
    },
    /// List cached models and the catalogue.
    Models,
    /// Remove a model from the cache.
    Rm {
        /// Name of the model, as `models` lists it.
        model: String,
    },
    /// Measure one or more OpenAI-compatible servers, interleaved.
    Bench(plimsoll_bench::bench::Args),
    /// Stress a server with faults and hostile clients, and print a verdict.
    Soak(plimsoll_bench::soak::Args),
    /// Send a recorded trace to a server again, or simulate it without a model.
    Replay(Box<ReplayArgs>),
    /// The neighbour that `soak --balloon` starts.
    #[command(hide = true)]
    Balloon(plimsoll_bench::soak::balloon::Args),
}
