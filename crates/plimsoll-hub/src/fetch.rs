//! Files from addresses in requests: bounded in bytes, time and redirects, and only from allowed hosts.
//!
//! The rules are checked against the address that is connected to, after name resolution and again for every redirect.
//! A name that resolves to another address the second time therefore gains nothing. Proxies are not used: behind one
//! the address is unknown.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use ureq::config::Config;
use ureq::http::{Response, Uri, header};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Body};

use crate::error::{HubError, printable};
use crate::http::tls;

/// Longest address that is parsed, in bytes.
const URL_BYTES_MAX: usize = 4096;

/// Most redirects of one fetch.
const REDIRECTS_MAX: u32 = 3;

/// Most bytes of an answer's head.
const HEAD_BYTES_MAX: usize = 32 << 10;

/// Bytes that are read, and passed to the receiver, at once.
const PIECE_BYTES: usize = 32 << 10;

/// Bytes of one piece, for callers that keep pieces.
pub const FETCH_PIECE_BYTES: u64 = PIECE_BYTES as u64;

/// Most heap bytes of one fetch beside the pieces that it passes on: connection, TLS, buffers.
pub const FETCH_BYTES: u64 = 384 << 10;

/// Allowed hosts of files, and the time limit of a fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRules {
    /// Whether this machine and private networks are allowed, too.
    pub private: bool,
    /// Allowed hosts; empty for all.
    pub hosts: Vec<String>,
    /// Time limit from the first lookup to the last byte, redirects included.
    pub timeout: Duration,
}

/// The reason why no file was fetched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The address cannot be parsed, or has a scheme that is not fetched.
    #[error("the address cannot be fetched: {0}")]
    BadAddress(&'static str),
    /// A redirect leads to such an address.
    #[error("`{host}` leads to an address that cannot be fetched: {why}")]
    BadRedirect {
        /// The server that redirects there.
        host: String,
        /// The reason.
        why: &'static str,
    },
    /// The rules forbid the host.
    #[error("`{host}` may not be asked: {why}")]
    Forbidden {
        /// The host.
        host: String,
        /// The rule.
        why: &'static str,
    },
    /// The file is larger than the limit.
    #[error("the file has {}{bytes} bytes; the limit is {limit}", if *.at_least { "at least " } else { "" })]
    TooLarge {
        /// Bytes of the file.
        bytes: u64,
        /// Whether the file may be larger still: the server did not announce its size.
        at_least: bool,
        /// The limit in bytes.
        limit: u64,
    },
    /// The server answered with another status than 200.
    #[error("`{host}` answered with status {status}")]
    Status {
        /// The server.
        host: String,
        /// The status.
        status: u16,
    },
    /// The fetch took too long.
    #[error("`{host}` took longer than {} s", .limit.as_secs_f32())]
    TooSlow {
        /// The server that was contacted when the time was up.
        host: String,
        /// The time limit.
        limit: Duration,
    },
    /// The connection failed or broke.
    #[error("`{host}`: {why}")]
    Failed {
        /// The server.
        host: String,
        /// The reason.
        why: String,
    },
    /// The receiver of the bytes has cancelled the fetch.
    #[error("cancelled: the caller no longer waits for the file")]
    Stopped,
}

/// A fetcher of files. One value serves all threads; every call blocks its own.
#[derive(Debug)]
pub struct Fetcher {
    agent: Agent,
    timeout: Duration,
}

impl Fetcher {
    /// Returns a fetcher under these rules. `root_certificates` replace the built-in ones.
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
            // Redirects are followed here, one by one.
            .max_redirects(0)
            .max_response_header_size(HEAD_BYTES_MAX)
            // Connections are not kept: the next file is on another host.
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

    /// Fetches a file of at most `limit` bytes and passes it to `take` piece by piece. `take` returns whether to continue.
    ///
    /// # Errors
    /// Any [`FetchError`]; its message names hosts, but no path and no query, which may hold secrets.
    pub fn fetch(&self, url: &str, limit: u64, mut take: impl FnMut(&[u8]) -> bool) -> Result<(), FetchError> {
        let (host, response) = self.answer(parsed(url).map_err(FetchError::BadAddress)?)?;
        if response.status() != 200 {
            return Err(FetchError::Status { host, status: response.status().as_u16() });
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
                Err(error) => return Err(self.broken(&host, &error)),
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

    /// Returns the answer at an address, after redirects, and the host that gave it.
    fn answer(&self, mut uri: Uri) -> Result<(String, Response<Body>), FetchError> {
        let deadline = Instant::now() + self.timeout;
        let mut led_by: Option<String> = None;
        for _ in 0..=REDIRECTS_MAX {
            let host = printable(uri.host().unwrap_or_default());
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(FetchError::TooSlow { host, limit: self.timeout });
            }
            let request = self.agent.get(uri.clone()).config().timeout_global(Some(rest)).build();
            let response = request.call().map_err(|error| match (self.failed(&host, &error), led_by.take()) {
                (FetchError::BadAddress(why), Some(host)) => FetchError::BadRedirect { host, why },
                (error, _) => error,
            })?;
            let location = response.headers().get(header::LOCATION).filter(|_| response.status().is_redirection());
            let Some(location) = location else { return Ok((host, response)) };
            let bad = |why| FetchError::BadRedirect { host: host.clone(), why };
            let location = location.to_str().map_err(|_| bad("it is not an address"))?;
            uri = led_to(&uri, location).map_err(bad)?;
            led_by = Some(host);
        }
        let host = printable(uri.host().unwrap_or_default());
        Err(FetchError::Failed { host, why: format!("it is led to after {REDIRECTS_MAX} redirects, and no further") })
    }

    fn failed(&self, host: &str, error: &ureq::Error) -> FetchError {
        match error {
            ureq::Error::Io(error) => self.broken(host, error),
            ureq::Error::Timeout(_) => FetchError::TooSlow { host: host.into(), limit: self.timeout },
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
                FetchError::BadAddress("it is not http:// or https:// with a host")
            }
            other => FetchError::Failed { host: host.into(), why: printable(&other.to_string()) },
        }
    }

    fn broken(&self, host: &str, error: &io::Error) -> FetchError {
        let inner = error.get_ref();
        if let Some(refused) = inner.and_then(|inner| inner.downcast_ref::<FetchError>()) {
            return refused.clone();
        }
        if let Some(inner) = inner.and_then(|inner| inner.downcast_ref::<ureq::Error>()) {
            return self.failed(host, inner);
        }
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                FetchError::TooSlow { host: host.into(), limit: self.timeout }
            }
            _ => FetchError::Failed { host: host.into(), why: printable(&error.to_string()) },
        }
    }
}

/// Returns the host of an address; empty if it has none.
pub fn host_of(url: &str) -> String {
    let uri = parsed(url).ok();
    uri.as_ref().and_then(|uri| uri.host()).map_or_else(String::new, str::to_ascii_lowercase)
}

/// Resolves a `Location` against `base`: either an address with a scheme, or a place on the same server. A redirect from TLS to
/// plain text is an error.
fn led_to(base: &Uri, location: &str) -> Result<Uri, &'static str> {
    let location = location.trim();
    let is_scheme = |scheme: &str| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    };
    let has_scheme = location.split_once(':').is_some_and(|(scheme, _)| is_scheme(scheme));
    let (Some(scheme), Some(authority)) = (base.scheme_str(), base.authority()) else { return parsed(location) };
    let path = base.path();
    let uri = match location {
        _ if has_scheme => parsed(location),
        _ if location.starts_with("//") => parsed(&format!("{scheme}:{location}")),
        _ if location.starts_with('/') => parsed(&format!("{scheme}://{authority}{location}")),
        _ if location.starts_with('?') || location.starts_with('#') || location.is_empty() => {
            parsed(&format!("{scheme}://{authority}{path}{location}"))
        }
        _ => {
            let directory = path.rfind('/').map_or("/", |at| &path[..=at]);
            parsed(&format!("{scheme}://{authority}{directory}{location}"))
        }
    }?;
    if scheme == "https" && uri.scheme_str() != Some("https") {
        return Err("it leads from https to http");
    }
    Ok(uri)
}

/// Whether the text behind the host is a port, or empty.
fn has_a_port_or_none(authority: &str) -> bool {
    let after = authority.rsplit_once(']').map_or(authority, |(_, after)| after);
    after.rsplit_once(':').is_none_or(|(_, port)| port.is_empty() || port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn parsed(url: &str) -> Result<Uri, &'static str> {
    if url.len() > URL_BYTES_MAX {
        return Err("it has more than 4096 bytes");
    }
    let begins = |with: &str| url.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with));
    if !begins("http://") && !begins("https://") {
        return Err("only http:// and https:// with a host are");
    }
    // A fragment names a place within the file.
    let url = url.split('#').next().unwrap_or_default();
    let Ok(uri) = url.parse::<Uri>() else { return Err("it is not an address") };
    match (uri.scheme_str(), uri.authority()) {
        (Some("http" | "https"), Some(authority)) if authority.as_str().contains('@') => Err("it has credentials"),
        // `Uri` ignores a port that is no number. It would then connect to another service than the named one.
        (Some("http" | "https"), Some(authority)) if !has_a_port_or_none(authority.as_str()) => {
            Err("its port is not a number up to 65535")
        }
        (Some("http" | "https"), Some(authority)) if !authority.host().is_empty() => Ok(uri),
        _ => Err("only http:// and https:// with a host are"),
    }
}

/// A resolver that returns only the allowed addresses of a host.
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

/// Whether an address belongs to the public internet: not to this machine, a private network, a link, multicast or documentation,
/// and is no embedding of such an address.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let reserved = match (a, b, c) {
        // "This" network; shared by carriers; protocols and the relay of 6to4; benchmarks; multicast, reserved,
        // broadcast.
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
        // ::ffff:a.b.c.d, and an IPv4 address behind NAT64.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => is_public_v4(embedded(high, low)),
        // Protocols with Teredo, 6to4, documentation.
        [0x2001, 0..=0x1ff, ..] | [0x2002, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
