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
    /// API key that opens every route except /health, /ready and the page at / (repeatable; client commands send the
    /// first). Every user of the machine can read flags, but not PLIMSOLL_API_KEY or the file of --api-key-file.
    #[arg(long, alias = "api_key", value_name = "KEY", value_delimiter = ',')]
    pub api_key: Vec<String>,
    /// File of such keys, one a line; lines that begin with # are comments.
    #[arg(long, alias = "api_key_file", value_name = "FILE")]
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
    /// Requests per minute of each key, or of each address on a server without keys.
    #[arg(long, alias = "rate_limit_requests", value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    pub rate_limit_requests: Option<u32>,
    /// Tokens of prompts and answers per minute of each key, or of each address on a server without keys.
    #[arg(long, alias = "rate_limit_tokens", value_parser = clap::value_parser!(u64).range(1..))]
    pub rate_limit_tokens: Option<u64>,
    /// Origin from which scripts may use the server in a browser, such as `https://chat.example`, or `*` (repeatable).
    #[arg(long, alias = "allowed_origins", value_delimiter = ',')]
    pub allowed_origins: Vec<String>,
    /// Name under which a server without keys may be asked on a loopback address, besides localhost and such addresses, or `*`
    /// (repeatable): a proxy on the same machine may send another's.
    #[arg(long, alias = "allowed_hosts", value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,
    /// Seconds after which a request is ended, whatever it does [default: never].
    #[arg(long, alias = "request_timeout", value_parser = seconds(1))]
    pub request_timeout: Option<u64>,
    /// Seconds of silence of the engine after which a request is ended; one that goes on talking is never cut.
    #[arg(long, alias = "inactivity_timeout", default_value_t = 600, value_parser = seconds(1))]
    pub inactivity_timeout: u64,
    /// Seconds of silence after which a stream sends a comment, so that proxies do not close it as idle.
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
