//! Flags about access: which clients may send requests, how many, and for how long.

use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use plimsoll_bench::KeyArgs;
use plimsoll_server::{ApiKeys, Origins, RateLimits, ServerConfig};

use super::values::seconds;

/// Flags of the HTTP side about its clients.
#[derive(Debug, Args)]
pub struct AccessArgs {
    /// The clients' API keys.
    #[command(flatten)]
    pub keys: KeyArgs,
    /// Requests per minute for each API key, or for each address on a server without keys.
    #[arg(long, value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    pub rate_limit_requests: Option<u32>,
    /// Tokens per minute, prompt and output together, for each API key or address.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub rate_limit_tokens: Option<u64>,
    /// Origin that browsers may call from, such as `https://chat.example`, or `*` (repeatable).
    #[arg(long, value_delimiter = ',')]
    pub allowed_origins: Vec<String>,
    /// Host name that a server without keys on a loopback address answers to, besides localhost, or `*` (repeatable). A proxy on this
    /// machine may need it.
    #[arg(long, value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,
    /// Most seconds of a request [default: no limit].
    #[arg(long, value_parser = seconds(1))]
    pub request_timeout: Option<u64>,
    /// Seconds without a token after which a request ends.
    #[arg(long, default_value_t = 600, value_parser = seconds(1))]
    pub inactivity_timeout: u64,
    /// Seconds without a token after which a stream carries a comment, which keeps proxies from closing it.
    #[arg(long, alias = "heartbeat", default_value_t = 10, value_parser = seconds(1))]
    pub heartbeat: u64,
}

impl AccessArgs {
    /// The server's configuration with these rules.
    pub fn apply(&self, config: ServerConfig) -> anyhow::Result<ServerConfig> {
        Ok(ServerConfig {
            api_keys: ApiKeys::new(self.keys.all()?).map_err(|error| anyhow!(error))?,
            rates: RateLimits { requests: self.rate_limit_requests, tokens: self.rate_limit_tokens },
            origins: Origins::new(self.allowed_origins.clone())
                .map_err(|error| anyhow!(error).context("--allowed-origins"))?,
            allowed_hosts: self.allowed_hosts.clone(),
            request_timeout: self.request_timeout.map(Duration::from_secs),
            silence_timeout: Duration::from_secs(self.inactivity_timeout),
            keep_alive: Duration::from_secs(self.heartbeat),
            ..config
        })
    }
}
