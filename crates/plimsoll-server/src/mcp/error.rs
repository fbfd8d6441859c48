//! Errors of exchanges with MCP servers.

use std::time::Duration;

use thiserror::Error;

/// The most characters of a server's text that a message repeats.
const TEXT_CHARS: usize = 500;

/// The reason why an exchange failed. The messages have neither path nor headers, which may hold secrets.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum McpError {
    #[error("{running} exchanges with MCP servers run, which is the limit; try again later")]
    Busy { running: usize },
    #[error("no connection to the server: {0}")]
    Connect(String),
    #[error("the server did not answer within {} s (--mcp-timeout)", .limit.as_secs_f32())]
    TooSlow { limit: Duration },
    #[error("the server's answer has more than {limit} bytes, which is the limit")]
    TooLarge { limit: usize },
    #[error("the server answered with HTTP status {status}{}", .said.as_ref().map_or_else(String::new, |said| format!(": {said}")))]
    Status { status: u16, said: Option<String> },
    #[error("the server answered with error {code}: {message}")]
    Rpc { code: i64, message: String },
    #[error("the server's answer is not valid: {0}")]
    Invalid(String),
    #[error("the connection broke before the answer was complete: {0}")]
    Broken(String),
}

impl McpError {
    /// Returns the cause, for metrics.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Busy { .. } => "busy",
            Self::Connect(_) => "connect",
            Self::TooSlow { .. } => "timeout",
            Self::TooLarge { .. } => "too_large",
            Self::Status { .. } => "http_status",
            Self::Rpc { .. } => "rpc_error",
            Self::Invalid(_) => "invalid",
            Self::Broken(_) => "disconnected",
        }
    }

    pub fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }
}

/// Shortens a server's text to one line for a message.
pub(super) fn printable(text: &str) -> String {
    text.chars().take(TEXT_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
