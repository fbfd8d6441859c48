//! Flags of `serve`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::engine::EngineArgs;
use super::http::HttpArgs;
use super::reading::ReadingArgs;
use super::values::{host, seconds, size};

/// Default of `--drain-seconds`: seconds that running requests have to finish after SIGTERM.
pub const DRAIN_SECONDS: u64 = 30;

/// Default of `--log-ledger-every` at the level debug: steps between two log lines of the ledger.
const LEDGER_STEPS: u64 = 1000;

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Catalogue name, hf:org/repo(:file), a .gguf file, or a checkpoint directory.
    #[arg(default_value = plimsoll_hub::DEFAULT_MODEL)]
    pub model: String,
    /// Whether a flag, a variable or a file names the model.
    #[arg(skip)]
    pub model_is_named: bool,
    /// Configuration file (TOML). Keys are the names of flags. A flag or a variable (PLIMSOLL_PORT, ...) wins over the file.
    #[arg(long)]
    pub config: Option<String>,
    /// Print every setting and its source as a configuration file, then exit.
    #[arg(long)]
    pub print_config: bool,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_parser = host)]
    pub host: String,
    /// Port to listen on; 0 takes any free port.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Name of the model in the API, repeatable [default: the name of the model].
    #[arg(long)]
    pub served_model_name: Vec<String>,
    /// Steps between two log lines with the memory of every component; 0 turns them off [default: 1000 with --verbose, otherwise 0].
    #[arg(long)]
    pub log_ledger_every: Option<u64>,
    /// Record a line per request: time, lengths, settings, result, no content. `plimsoll replay` reads it. FILE.1 to FILE.3 keep earlier records.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Record the tokens of prompts too.
    #[arg(long, requires = "record")]
    pub record_content: bool,
    /// Largest size of the record in bytes.
    #[arg(long, value_parser = size, default_value = "1GiB")]
    pub record_bytes: u64,
    /// How replies are parsed and texts embedded.
    #[command(flatten)]
    pub reading: ReadingArgs,
    /// TOML file with a table `[[models]]` per model: name, model, and its own flags. A model is loaded at its first request.
    #[arg(long, conflicts_with = "model")]
    pub models: Option<PathBuf>,
    /// The flags that hold for each model of `models`, unless its table overrides them.
    #[arg(skip)]
    pub inherited: Vec<OsString>,
    /// Seconds that running requests have to finish after SIGTERM; a second signal ends them at once.
    #[arg(long, default_value_t = DRAIN_SECONDS, value_parser = seconds(0))]
    pub drain_seconds: u64,
    /// The HTTP side.
    #[command(flatten)]
    pub http: HttpArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl ServeArgs {
    /// Steps between two log lines with the ledger; 0 for none.
    pub fn ledger_steps(&self) -> u64 {
        let default = if tracing::enabled!(tracing::Level::DEBUG) { LEDGER_STEPS } else { 0 };
        self.log_ledger_every.unwrap_or(default)
    }
}
