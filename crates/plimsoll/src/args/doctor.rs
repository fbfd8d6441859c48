//! Flags of `doctor`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::engine::EngineArgs;
use super::http::HttpArgs;
use super::values::host;

/// Flags of `doctor`: the flags of the server to check.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Catalogue name, hf:org/repo(:file), a .gguf file, or a checkpoint directory. Named, its files are read whole and compared with
    /// their sums; without it the default model is planned, if it is cached.
    pub model: Option<String>,
    /// File for `serve --models`; each of its models is planned as if it were loaded alone.
    #[arg(long, conflicts_with = "model")]
    pub models: Option<PathBuf>,
    /// The flags that hold for each model of `models`.
    #[arg(skip)]
    pub inherited: Vec<OsString>,
    /// Settings in TOML, the file that `serve` takes.
    #[arg(long)]
    pub config: Option<String>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_parser = host)]
    pub host: String,
    /// Port to listen on.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// File for `serve --record`; checks that a trace can be recorded in it.
    #[arg(long)]
    pub record: Option<PathBuf>,
    /// Read every cached model and compare its checksums; this takes as long as the disk needs to read them.
    #[arg(long)]
    pub deep: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The HTTP side.
    #[command(flatten)]
    pub http: HttpArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl DoctorArgs {
    /// Whether the command line names models.
    pub fn names_models(&self) -> bool {
        self.model.is_some() || self.models.is_some()
    }
}
