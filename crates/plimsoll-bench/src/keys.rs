//! API keys: flags that servers and their clients share.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;

/// API keys: the ones that a server accepts, or the ones that a client has.
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
    /// Returns all keys from the flags and the file.
    pub fn all(&self) -> anyhow::Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        if let Some(file) = &self.api_key_file {
            keys.extend(read_keys(file)?);
        }
        Ok(keys)
    }

    /// Returns the key that a client sends. A key that is set to an empty text counts as none.
    pub fn first(&self) -> anyhow::Result<Option<String>> {
        Ok(self.all()?.into_iter().find(|key| !key.is_empty()))
    }
}

/// Reads the keys in a file. A file without keys is an error: it would leave the server open.
fn read_keys(file: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("--api-key-file {}", file.display()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    match keys.is_empty() {
        true => Err(anyhow!("--api-key-file {}: there is no key in it", file.display())),
        false => Ok(keys),
    }
}
