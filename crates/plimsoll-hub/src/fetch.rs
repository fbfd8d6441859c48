//! Files from addresses that strangers name: bounded in bytes, time and redirects, and only from where it is allowed.
//!
//! What is allowed is decided about the address that is connected to, after the name was resolved and again for every redirect: a
//! name that means another address the second time it is asked gains nothing. Proxies are not used, since behind one nobody knows
//! what is connected to.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Duration;

use ureq::Agent;
use ureq::config::{Config, RedirectAuthHeaders};
use ureq::http::{Uri, header};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

use crate::error::{HubError, printable};
use crate::http::tls;

/// Longest address that is looked at, in bytes.
const URL_BYTES_MAX: usize = 4096;

/// Most redirects of one fetch.
const REDIRECTS_MAX: u32 = 3;

/// Bytes of an answer's head.
const HEAD_BYTES_MAX: usize = 32 << 10;

/// Bytes that are read at once.
const PIECE_BYTES: usize = 32 << 10;

/// Heap bytes that one fetch takes at most besides what it hands on: connection, TLS, buffers.
pub const FETCH_BYTES: u64 = 384 << 10;

/// From where files may be fetched, and how long that may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRules {
    /// Also from this machine and from private networks.
    pub private: bool,
    /// Only from these hosts; empty for all.
    pub hosts: Vec<String>,
    /// From the first lookup to the last byte, redirects included.
    pub timeout: Duration,
}

/// Why nothing was fetched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The address cannot be read, or is of a kind that is not fetched.
    #[error("the address cannot be fetched: {0}")]
    BadAddress(&'static str),
    /// The rules do not allow it.
    #[error("`{host}` may not be asked: {why}")]
    Forbidden {
        /// The host.
        host: String,
        /// The rule.
        why: &'static str,
    },
    /// It is larger than asked for.
    #[error("the file has {}{bytes} bytes; the limit is {limit}", if *.at_least { "at least " } else { "" })]
    TooLarge {
        /// What it has.
        bytes: u64,
        /// The server has not said how many there are.
        at_least: bool,
        /// What is allowed.
        limit: u64,
    },
    /// The server has answered with something else than a file.
    #[error("the server answered with status {0}")]
    Status(u16),
    /// It took too long.
    #[error("it took longer than {} s", .0.as_secs_f32())]
    TooSlow(Duration),
    /// There is no connection, or it broke.
    #[error("{0}")]
    Failed(String),
    /// Whoever takes the bytes wants no more of them.
    #[error("nobody waits for the file any more")]
    Stopped,
}

/// Fetches files. One value serves all threads; every call blocks its own.
#[derive(Debug)]
pub struct Fetcher {
    agent: Agent,
    timeout: Duration,
}

impl Fetcher {
    /// A fetcher under these rules. `root_certificates` replace the built-in ones.
    ///
    /// # Errors
    /// [`HubError::BadSetting`] where the certificates cannot be read.
    pub fn new(rules: &FetchRules, root_certificates: Option<&Path>) -> Result<Self, HubError> {
        let allowed = if rules.private { |_| true } else { is_public };
        Self::reaching(rules, root_certificates, allowed)
    }

    fn reaching(
        rules: &FetchRules,
        root_certificates: Option<&Path>,
        allowed: fn(IpAddr) -> bool,
    ) -> Result<Self, HubError> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
            .redirect_auth_headers(RedirectAuthHeaders::Never)
            .max_redirects(REDIRECTS_MAX)
            .max_response_header_size(HEAD_BYTES_MAX)
            // Nothing is kept: the next file comes from elsewhere.
            .max_idle_connections(0)
            .timeout_global(Some(rules.timeout))
            .proxy(None)
            .tls_config(tls(root_certificates)?)
            .build();
        let hosts = rules.hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        let resolver = Guard { inner: DefaultResolver::default(), hosts, allowed };
        let agent = Agent::with_parts(config, DefaultConnector::default(), resolver);
        Ok(Self { agent, timeout: rules.timeout })
    }

    /// Fetches a file of at most `limit` bytes and hands it to `take` piece by piece, which says whether it wants more.
    ///
    /// # Errors
    /// Any [`FetchError`]; its words name no path and no query, which may hold secrets.
    pub fn fetch(&self, url: &str, limit: u64, mut take: impl FnMut(&[u8]) -> bool) -> Result<(), FetchError> {
        let uri = parsed(url)?;
        // From TLS no redirect leads to plain text.
        let secure = uri.scheme_str() == Some("https");
        let request = self.agent.get(uri).config().https_only(secure).build();
        let response = request.call().map_err(|error| self.failed(&error))?;
        if response.status() != 200 {
            return Err(FetchError::Status(response.status().as_u16()));
        }
        let announced = response.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
        if let Some(bytes) = announced.filter(|bytes: &u64| *bytes > limit) {
            return Err(FetchError::TooLarge { bytes, at_least: false, limit });
        }
        let mut reader = response.into_body().into_reader();
        let (mut piece, mut total) = (vec![0; PIECE_BYTES], 0);
        loop {
            let read = match reader.read(&mut piece) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.broken(&error)),
            };
            total += read as u64;
            if total > limit {
                return Err(FetchError::TooLarge { bytes: total, at_least: true, limit });
            }
            if !take(&piece[..read]) {
                return Err(FetchError::Stopped);
            }
        }
    }

    fn failed(&self, error: &ureq::Error) -> FetchError {
        match error {
            ureq::Error::Io(error) => self.broken(error),
            ureq::Error::Timeout(_) => FetchError::TooSlow(self.timeout),
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
                FetchError::BadAddress("it, or one it leads to, is not http:// or https:// with a host")
            }
            ureq::Error::RequireHttpsOnly(_) => FetchError::BadAddress("it leads from https to http"),
            ureq::Error::TooManyRedirects => FetchError::Failed(format!("it leads on more than {REDIRECTS_MAX} times")),
            other => FetchError::Failed(printable(&other.to_string())),
        }
    }

    fn broken(&self, error: &io::Error) -> FetchError {
        let inner = error.get_ref();
        if let Some(refused) = inner.and_then(|inner| inner.downcast_ref::<FetchError>()) {
            return refused.clone();
        }
        if let Some(inner) = inner.and_then(|inner| inner.downcast_ref::<ureq::Error>()) {
            return self.failed(inner);
        }
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => FetchError::TooSlow(self.timeout),
            _ => FetchError::Failed(printable(&error.to_string())),
        }
    }
}

/// Whether what follows the host is a port, or nothing.
fn has_a_port_or_none(authority: &str) -> bool {
    let after = authority.rsplit_once(']').map_or(authority, |(_, after)| after);
    after.rsplit_once(':').is_none_or(|(_, port)| port.is_empty() || port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn parsed(url: &str) -> Result<Uri, FetchError> {
    let bad = |why| Err(FetchError::BadAddress(why));
    if url.len() > URL_BYTES_MAX {
        return bad("it has more than 4096 bytes");
    }
    // What a fragment names is in the file.
    let url = url.split('#').next().unwrap_or_default();
    let Ok(uri) = url.parse::<Uri>() else { return bad("it is not an address") };
    match (uri.scheme_str(), uri.authority()) {
        (Some("http" | "https"), Some(authority)) if authority.as_str().contains('@') => bad("it has credentials"),
        // What cannot be a port is no port for `Uri`, which leads to another service than the one that was named.
        (Some("http" | "https"), Some(authority)) if !has_a_port_or_none(authority.as_str()) => {
            bad("its port is not a number up to 65535")
        }
        (Some("http" | "https"), Some(_)) => Ok(uri),
        _ => bad("only http:// and https:// with a host are"),
    }
}

/// Finds the addresses of a host and keeps those that may be connected to.
#[derive(Debug)]
struct Guard {
    inner: DefaultResolver,
    hosts: Vec<String>,
    allowed: fn(IpAddr) -> bool,
}

impl Resolver for Guard {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        let refused = |why| {
            let error = FetchError::Forbidden { host: printable(&host), why };
            Err(ureq::Error::Io(io::Error::other(error)))
        };
        if !self.hosts.is_empty() && !self.hosts.contains(&host) {
            return refused("it is not among the hosts that this server may ask (--allowed-media-domains)");
        }
        let found = self.inner.resolve(uri, config, timeout)?;
        let mut kept = self.empty();
        found.iter().filter(|address| (self.allowed)(address.ip())).for_each(|address| kept.push(*address));
        if kept.is_empty() {
            return refused("its address is not a public one (--media-fetch)");
        }
        Ok(kept)
    }
}

/// Whether an address belongs to the open internet: not to this machine, a private network, a link, a group, a documentation, nor
/// to a way of writing another address.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let reserved = match (a, b, c) {
        // "This" network; shared by carriers; protocols and the relay of 6to4; benchmarks; groups, the future, everybody.
        (0, ..) | (100, 64..=127, _) | (192, 0, 0) | (192, 88, 99) | (198, 18..=19, _) | (224.., ..) => true,
        _ => false,
    };
    !(reserved
        || address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation())
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let embedded = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match segments {
        // ::ffff:a.b.c.d, and what a NAT64 makes of an address.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => is_public_v4(embedded(high, low)),
        // Protocols with Teredo, 6to4, documentation.
        [0x2001, 0..=0x1ff, ..] | [0x2002, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
