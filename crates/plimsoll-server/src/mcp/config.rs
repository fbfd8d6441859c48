//! The operator's settings for MCP: `--mcp-server`, `--mcp-timeout`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use axum::http::Uri;

/// The longest label, and the longest address, in bytes.
const LABEL_BYTES_MAX: usize = 64;
const URL_BYTES_MAX: usize = 2048;

/// The most servers.
const SERVERS_MAX: usize = 64;

/// The servers that requests may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpConfig {
    /// The servers; an empty list switches MCP off.
    pub servers: Vec<McpServer>,
    /// A list of tools, or the answer to a call, must arrive within this time. The wait for a permit before it may take as long again.
    pub timeout: Duration,
    /// A file of certificates that replace the built-in roots, from `SSL_CERT_FILE`.
    pub root_certificates: Option<PathBuf>,
}

impl Default for McpConfig {
    fn default() -> Self {
        Self { servers: Vec::new(), timeout: Duration::from_secs(60), root_certificates: None }
    }
}

impl McpConfig {
    /// Refuses a label that two servers have, too many servers, and a file without certificates.
    ///
    /// # Errors
    /// A message with the flag or the variable.
    pub fn check(&self) -> Result<(), String> {
        let count = self.servers.len();
        if count > SERVERS_MAX {
            return Err(format!("--mcp-server is given {count} times; at most {SERVERS_MAX} are allowed"));
        }
        for (at, server) in self.servers.iter().enumerate() {
            if self.servers[..at].iter().any(|other| other.label == server.label) {
                return Err(format!("--mcp-server has the label `{}` twice; give each server its own", server.label));
            }
        }
        // The certificates are read again later; this detects a wrong file before a model is loaded.
        if count > 0 {
            super::connection::tls(self.root_certificates.as_deref())?;
        }
        Ok(())
    }
}

/// A server that requests may use: its label, and its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpServer {
    pub(crate) label: String,
    /// Scheme and host in lower case.
    pub(crate) url: String,
}

impl McpServer {
    /// Returns whether this is the server's address. A slash at the end makes no difference.
    pub(crate) fn is_at(&self, url: &str) -> bool {
        let plain = |url: &str| url.trim_end_matches('/').to_owned();
        normal(url).is_ok_and(|url| plain(&url) == plain(&self.url))
    }
}

impl FromStr for McpServer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (label, url) = text.split_once('=').ok_or("write LABEL=URL, such as files=http://127.0.0.1:9000/mcp")?;
        check_label(label).map_err(|why| format!("the label `{label}` {why}"))?;
        Ok(Self { label: label.into(), url: normal(url)? })
    }
}

impl std::fmt::Display for McpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.label, self.url)
    }
}

/// Refuses a label that cannot stand before a tool's name.
pub(crate) fn check_label(label: &str) -> Result<(), String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let good = label.starts_with(|c: char| c.is_ascii_alphabetic())
        && label.len() <= LABEL_BYTES_MAX
        && label.chars().all(legal);
    let wrong = || format!("must have 1 to {LABEL_BYTES_MAX} letters, digits, `_` or `-`, and begin with a letter");
    good.then_some(()).ok_or_else(wrong)
}

/// Returns an address with its scheme and host in lower case.
fn normal(url: &str) -> Result<String, String> {
    if url.len() > URL_BYTES_MAX {
        return Err(format!("the URL has {} bytes; the limit is {URL_BYTES_MAX}", url.len()));
    }
    // The value may hold a password, so the message does not repeat it.
    let wrong = || "the URL must be http:// or https:// with a host, and without a user name".to_owned();
    let uri = url.parse::<Uri>().map_err(|_| wrong())?;
    let authority = uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(wrong)?;
    let scheme = uri.scheme_str().filter(|scheme| ["http", "https"].contains(scheme)).ok_or_else(wrong)?;
    if authority.host().is_empty() {
        return Err(wrong());
    }
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    Ok(format!("{scheme}://{}{path}", authority.as_str().to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_a_label_and_an_address() {
        let server: McpServer = "files=http://LocalHost:9000/mcp".parse().unwrap();
        assert_eq!(server.to_string(), "files=http://localhost:9000/mcp");
        assert!(server.is_at("http://localhost:9000/mcp/") && server.is_at("http://LOCALHOST:9000/mcp"));
        for other in ["http://localhost:9001/mcp", "https://localhost:9000/mcp", "http://localhost:9000/MCP", "mcp"] {
            assert!(!server.is_at(other), "{other}");
        }
        for bad in ["http://x/mcp", "=http://x", "1a=http://x", "a=ftp://x", "a=http://u:p@x", "a=x", "a.b=http://x"] {
            let error = bad.parse::<McpServer>().unwrap_err();
            assert!(!error.contains("u:p"), "{error}");
        }
        let both = McpConfig { servers: vec![server.clone(), server], ..McpConfig::default() };
        assert!(both.check().unwrap_err().contains("twice"));
    }
}
