//! Flags of the HTTP side, and the configuration they make.

use std::time::Duration;

use clap::Args;
use plimsoll_server::{McpConfig, McpServer, OtlpConfig, ServerConfig};

use super::access::AccessArgs;
use super::media::MediaArgs;
use super::values::{seconds, size};

/// Flags of the HTTP side, the same for `serve` and `plan`.
#[derive(Debug, Args)]
pub struct HttpArgs {
    /// Largest request body in bytes; a larger one gets a 413.
    #[arg(long, value_parser = size, default_value = "8MiB")]
    pub max_body_bytes: u64,
    /// Memory in bytes of request bodies, parsed requests and unsent answers together.
    #[arg(long, value_parser = size, default_value = "24MiB")]
    pub max_bytes_in_flight: u64,
    /// Most inputs of one embedding, rerank or score request, up to 2048.
    #[arg(long, default_value_t = 2048)]
    pub max_inputs: u32,
    /// How unknown request fields are handled.
    #[arg(long, value_enum, default_value_t = UnknownFields::Warn)]
    pub unknown_fields: UnknownFields,
    /// Most open connections.
    #[arg(long, default_value_t = 256)]
    pub max_connections: u32,
    /// Memory in bytes for structured output (JSON schemas, regular expressions, tool calls); 0 turns it off.
    #[arg(long, value_parser = size, default_value = "48MiB")]
    pub grammar_bytes: u64,
    /// Memory in bytes of stored responses (/v1/responses). The least recently used one is evicted first; 0 stores none.
    #[arg(long, value_parser = size, default_value = "8MiB")]
    pub response_store_bytes: u64,
    /// Memory in bytes for the text of a PDF that a client sends, in a separate process; 0 reads no PDF.
    #[arg(long, value_parser = size, default_value = "0")]
    pub document_bytes: u64,
    /// MCP server that responses may use, such as files=http://127.0.0.1:9000/mcp (repeatable) [default: none].
    #[arg(long, value_name = "LABEL=URL")]
    pub mcp_server: Vec<McpServer>,
    /// Seconds within which an MCP server must answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds(1))]
    pub mcp_timeout: u64,
    /// Send OpenTelemetry traces to this collector (OTLP over HTTP), such as http://localhost:4318. OTEL_EXPORTER_OTLP_ENDPOINT does the same.
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// The clients of the HTTP side.
    #[command(flatten)]
    pub access: AccessArgs,
    /// The clients' images and videos.
    #[command(flatten)]
    pub media: MediaArgs,
}

/// How unknown request fields are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum UnknownFields {
    /// The request gets a 400.
    Refuse,
    /// The request is served, and a response header names the field.
    Warn,
    /// The request is served.
    Ignore,
}

impl HttpArgs {
    /// The server's configuration with these limits.
    pub fn config(&self) -> anyhow::Result<ServerConfig> {
        let variable = |name: &str| std::env::var(name).ok();
        let otlp = OtlpConfig::read(self.otlp_endpoint.as_deref(), variable).map_err(anyhow::Error::msg)?;
        let media = self.media.config()?;
        let mcp = McpConfig {
            servers: self.mcp_server.clone(),
            timeout: Duration::from_secs(self.mcp_timeout),
            root_certificates: media.root_certificates.clone(),
        };
        let config = self.access.apply(ServerConfig {
            max_body_bytes: self.max_body_bytes,
            max_bytes_in_flight: self.max_bytes_in_flight,
            max_inputs: self.max_inputs,
            max_connections: self.max_connections,
            unknown_fields: match self.unknown_fields {
                UnknownFields::Refuse => plimsoll_server::UnknownFields::Refuse,
                UnknownFields::Warn => plimsoll_server::UnknownFields::Warn,
                UnknownFields::Ignore => plimsoll_server::UnknownFields::Ignore,
            },
            grammar_bytes: self.grammar_bytes,
            grammar_sandbox: Some(plimsoll_memory::host::own_program()),
            response_store_bytes: self.response_store_bytes,
            document_bytes: self.document_bytes,
            document_sandbox: Some(plimsoll_memory::host::own_program()),
            otlp,
            media,
            mcp,
            ..ServerConfig::default()
        })?;
        config.check()?;
        Ok(config)
    }
}
