//! The address that a session connects to, and the headers of each of its requests.

use std::collections::BTreeMap;

use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Uri, uri::PathAndQuery};
use sha2::{Digest, Sha256};

use super::McpServer;

/// The most headers of a request's tool, and their bytes.
const HEADERS_MAX: usize = 32;
const HEADER_BYTES_MAX: usize = 8 << 10;

/// Headers that belong to the transport.
const OWN: [&str; 12] = [
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
    "expect",
    "accept",
    "mcp-session-id",
    "mcp-protocol-version",
];

/// The client's headers for its calls. They may hold keys: neither `Debug` nor errors print values.
#[derive(Clone, Default)]
pub(crate) struct Credentials {
    headers: HeaderMap,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials({} headers)", self.headers.len())
    }
}

impl Credentials {
    /// # Errors
    /// A message about the wrong header, without its value.
    pub fn new(headers: &BTreeMap<String, String>, authorization: Option<&str>) -> Result<Self, String> {
        let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let bytes = bytes + authorization.map_or(0, str::len);
        if headers.len() > HEADERS_MAX || bytes > HEADER_BYTES_MAX {
            return Err(format!(
                "{} headers of {bytes} bytes; the limits are {HEADERS_MAX} and {HEADER_BYTES_MAX}",
                headers.len()
            ));
        }
        let mut all = HeaderMap::new();
        for (name, value) in headers {
            let name: HeaderName = name.parse().map_err(|_| "a name is not one of an HTTP header".to_owned())?;
            if OWN.contains(&name.as_str()) {
                return Err(format!("`{name}` is set by this server"));
            }
            all.insert(name.clone(), secret(value).ok_or_else(|| format!("the value of `{name}` is not a header's"))?);
        }
        if let Some(token) = authorization {
            if all.contains_key(header::AUTHORIZATION) {
                return Err("`authorization` is given twice".into());
            }
            let value = secret(&format!("Bearer {token}")).ok_or("authorization is not a header's value")?;
            all.insert(header::AUTHORIZATION, value);
        }
        Ok(Self { headers: all })
    }

    /// Returns about the heap bytes of the headers.
    pub fn bytes(&self) -> u64 {
        self.headers.iter().map(|(name, value)| (name.as_str().len() + value.len() + 128) as u64).sum()
    }
}

fn secret(value: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(value).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// One server with the credentials of one client.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    pub host: String,
    pub port: u16,
    pub tls: bool,
    pub path: PathAndQuery,
    /// The `host` header.
    pub authority: HeaderValue,
    pub credentials: Credentials,
    /// A hash that tells endpoints apart, credentials included.
    pub key: [u8; 32],
}

impl Endpoint {
    /// Returns none if the server's address cannot be used, which the configuration check excludes.
    pub fn new(server: &McpServer, credentials: Credentials) -> Option<Self> {
        let uri: Uri = server.url.parse().ok()?;
        let authority = uri.authority()?;
        let tls = uri.scheme_str() == Some("https");
        let mut hash = Sha256::new();
        hash.update(server.url.as_bytes());
        for (name, value) in &credentials.headers {
            for part in [name.as_str().as_bytes(), value.as_bytes()] {
                hash.update((part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        }
        Some(Self {
            host: authority.host().trim_start_matches('[').trim_end_matches(']').into(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            tls,
            path: uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")),
            authority: HeaderValue::from_str(authority.as_str()).ok()?,
            credentials,
            key: hash.finalize().into(),
        })
    }

    /// Returns the client's own headers.
    pub fn headers(&self) -> &HeaderMap {
        &self.credentials.headers
    }
}
