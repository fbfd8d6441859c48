//! Flags of `launch`.

use std::ffi::OsString;

use clap::{Args, ValueEnum};
use plimsoll_bench::KeyArgs;

/// Flags of `launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// The client.
    #[arg(value_enum)]
    pub client: Client,
    /// Server to use [default: the server on this machine].
    #[arg(long)]
    pub url: Option<String>,
    /// Model of the server [default: its first].
    #[arg(long)]
    pub model: Option<String>,
    /// Print the settings that the client needs, and start nothing.
    #[arg(long)]
    pub print: bool,
    /// The server's key.
    #[command(flatten)]
    pub keys: KeyArgs,
    /// Arguments for the client, after `--`.
    #[arg(last = true)]
    pub arguments: Vec<OsString>,
}

/// A client that can be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Client {
    /// Claude Code.
    Claude,
    /// Codex.
    Codex,
    /// OpenCode.
    Opencode,
    /// aider.
    Aider,
    /// Continue's command line, `cn`.
    Continue,
}
