//! Flags of `top`.

use clap::Args;
use plimsoll_bench::KeyArgs;

use super::values::seconds;

/// Flags of `top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Server to watch.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Seconds between two updates.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = seconds(1))]
    pub interval: u64,
    /// Print the status once as text and end. This is the default where standard output is no terminal.
    #[arg(long)]
    pub once: bool,
    /// The server's key.
    #[command(flatten)]
    pub keys: KeyArgs,
}
