//! Flags about access: which clients may send requests, how many, and for how long.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use plimsoll_server::{ApiKeys, Origins, RateLimits, ServerConfig};

use crate::args::seconds;

/// Keys: those that a server takes, or what a client has of them.
#[derive(Clone, Debug, Default, Args)]
pub struct KeyArgs {
    /// API key, repeatable; clients send the first. Every route but /health, /ready and the page at / needs one. Other users of the
    /// machine see flags: prefer --api-key-file or PLIMSOLL_API_KEY.
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    pub api_key: Vec<String>,
    /// File with one API key per line; lines that begin with # are comments.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
}

impl KeyArgs {
    /// All that are given.
    pub fn all(&self) -> anyhow::Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        if let Some(file) = &self.api_key_file {
            keys.extend(read_keys(file)?);
        }
        Ok(keys)
    }

    /// The one that a client sends; a variable that is set to nothing is none.
    pub fn first(&self) -> anyhow::Result<Option<String>> {
        Ok(self.all()?.into_iter().find(|key| !key.is_empty()))
    }
}

/// Flags of the HTTP side that have to do with its clients.
#[derive(Debug, Args)]
pub struct AccessArgs {
    /// Their keys.
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

/// A file that names no key is a mistake: it would leave the server open.
fn read_keys(file: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("--api-key-file {}", file.display()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    match keys.is_empty() {
        true => Err(anyhow!("--api-key-file {}: there is no key in it", file.display())),
        false => Ok(keys),
    }
}
