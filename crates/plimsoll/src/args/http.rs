//! Flags of the HTTP side, and the configuration they make.

use clap::Args;
use plimsoll_server::ServerConfig;

use super::access::AccessArgs;
use super::media::MediaArgs;
use super::values::bytes;

/// Flags of the HTTP side that have a price in the plan, the same for `serve` and `plan`.
#[derive(Debug, Args)]
pub struct HttpArgs {
    /// Largest request body in bytes; a larger one gets a 413.
    #[arg(long, value_parser = bytes(), default_value_t = 8 << 20)]
    pub max_body_bytes: u64,
    /// Memory in bytes of request bodies, parsed requests and unsent answers together.
    #[arg(long, value_parser = bytes(), default_value_t = 24 << 20)]
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
    #[arg(long, value_parser = bytes(), default_value_t = 48 << 20)]
    pub grammar_bytes: u64,
    /// Memory in bytes of stored responses (/v1/responses). The least recently used one is evicted first; 0 stores none.
    #[arg(long, value_parser = bytes(), default_value_t = 8 << 20)]
    pub response_store_bytes: u64,
    /// Its clients.
    #[command(flatten)]
    pub access: AccessArgs,
    /// Their pictures and videos.
    #[command(flatten)]
    pub media: MediaArgs,
}

/// What becomes of an unknown field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum UnknownFields {
    /// The request is a 400.
    Refuse,
    /// The request goes on, and a response header names the field.
    Warn,
    /// The request goes on.
    Ignore,
}

impl HttpArgs {
    /// The server's configuration with these limits.
    pub fn config(&self) -> anyhow::Result<ServerConfig> {
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
            media: self.media.config()?,
            ..ServerConfig::default()
        })?;
        config.check()?;
        Ok(config)
    }
}
