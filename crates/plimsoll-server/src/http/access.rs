//! Access control: API keys, CORS origins and the `Host` header. The server checks a request's head before it reads any of the body.

use std::fmt;

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConstantTimeEq};

use crate::http::error::{ApiError, ApiResult, quote};

/// The API keys that this server accepts. An empty list accepts every request. Neither `Debug` nor errors
/// print them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ApiKeys(Vec<String>);

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// Bounds of a key's length in bytes, and the most keys.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 8..=512;
const KEYS_MAX: usize = 1024;

impl ApiKeys {
    /// Keys without repetitions.
    ///
    /// # Errors
    /// A message without the key itself: one is too short, too long or not visible ASCII, or there are too many.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut all: Vec<String> = Vec::new();
        for (number, key) in (1..).zip(keys) {
            if !KEY_BYTES.contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                let (least, most) = (KEY_BYTES.start(), KEY_BYTES.end());
                return Err(format!(
                    "API key {number} (--api-key, --api-key-file or PLIMSOLL_API_KEY) is not {least} to {most} visible ASCII characters"
                ));
            }
            if !all.contains(&key) {
                all.push(key);
            }
        }
        match all.len() {
            n if n > KEYS_MAX => Err(format!("{n} API keys, more than the limit of {KEYS_MAX}")),
            _ => Ok(Self(all)),
        }
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no keys, so that every request is accepted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of this key. All bytes of all keys are compared, so the time reveals only the length.
    fn find(&self, given: &[u8]) -> Option<usize> {
        let mut found = None;
        for (index, key) in self.0.iter().enumerate() {
            let equal: Choice = key.as_bytes().ct_eq(given);
            if bool::from(equal) {
                found = Some(index);
            }
        }
        found
    }

    /// Returns the number of the request's key, from `Authorization: Bearer` or `x-api-key`. None if no key is needed.
    pub(crate) fn check(&self, headers: &HeaderMap, path: &str) -> ApiResult<Option<usize>> {
        if self.is_empty() || OPEN.contains(&path) {
            return Ok(None);
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        match bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes)) {
            Some(given) => {
                self.find(given).map(Some).ok_or_else(|| unauthorized("the API key is not one of this server's"))
            }
            None => {
                Err(unauthorized("this server needs an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"))
            }
        }
    }
}

/// The route of the page's files.
pub(crate) const PAGE_FILES: &str = "/page/{*file}";

/// Routes that need no key. Probes carry none, and learn only whether the server is healthy. Browsers carry none when they open the page,
/// which is the same at every server and asks for a key itself.
const OPEN: [&str; 4] = ["/health", "/ready", "/", PAGE_FILES];

/// Returns the token of `Bearer TOKEN`; the scheme's case does not matter.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

fn unauthorized(message: &str) -> ApiError {
    let error = ApiError::new(StatusCode::UNAUTHORIZED, message);
    ApiError { close: true, code: Some("invalid_api_key"), ..error }
}

/// Scripts from these origins may read answers. Browsers enforce this; other clients ignore it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(Vec<String>);

/// Seconds that a browser may cache the answer to a preflight request.
const REMEMBER: HeaderValue = HeaderValue::from_static("600");

/// Headers of an answer that a script may read.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
);

impl Origins {
    /// Origins such as `https://chat.example`, or `*` for all.
    ///
    /// # Errors
    /// A message with the value that is not an origin.
    pub fn new(origins: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let all: Vec<String> = origins.into_iter().map(|origin| origin.trim().to_owned()).collect();
        let good = |origin: &String| {
            let host = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            origin == "*" || host.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', ' ', ',']))
        };
        match all.iter().find(|origin| !good(origin)) {
            Some(bad) => Err(format!("unknown origin `{bad}`: write https://host[:port] without a path, or *")),
            None => Ok(Self(all)),
        }
    }

    fn allowed<'a>(&self, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let known = |known: &String| known == "*" || origin == known.as_str();
        self.0.iter().any(known).then_some(origin)
    }

    /// Returns whether the request comes from a script of another page that is not among the allowed origins.
    pub(crate) fn foreign(&self, headers: &HeaderMap) -> bool {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let Some(origin) = text(header::ORIGIN) else { return false };
        let own = origin.split_once("://").map(|(_, host)| host);
        self.allowed(headers).is_none() && own != text(header::HOST)
    }

    /// Answers a CORS preflight request; none if the request is not one.
    pub(crate) fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Response> {
        let asks = headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        if self.0.is_empty() || method != Method::OPTIONS || !asks {
            return None;
        }
        let mut answer = StatusCode::NO_CONTENT.into_response();
        if self.allowed(headers).is_some() {
            let methods = HeaderValue::from_static("GET, POST, DELETE");
            answer.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
            answer.headers_mut().insert(header::ACCESS_CONTROL_MAX_AGE, REMEMBER);
            if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
                answer.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
            }
        }
        Some(answer)
    }

    /// Returns the origin that may read the answer. Must be called before the request is passed on.
    pub(crate) fn reader(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        self.allowed(headers).cloned()
    }

    /// Adds the CORS headers to the answer.
    pub(crate) fn mark(&self, reader: Option<HeaderValue>, headers: &mut HeaderMap) {
        if !self.0.is_empty() {
            headers.append(header::VARY, HeaderValue::from_static("origin"));
        }
        if let Some(origin) = reader {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }
}

/// The host names that this server accepts in the `Host` header.
///
/// This stops DNS rebinding: a web page from elsewhere later points its own name at the loopback address. The browser then takes this
/// server for the page's own, so the `Origin` header looks right. Only the `Host` header shows the foreign name. API keys keep such pages
/// out as well. A client that reaches a non-loopback address does not need DNS rebinding. Therefore names are checked only without API keys
/// and on a loopback address.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    allowed: Vec<String>,
    watched: bool,
}

impl Hosts {
    /// `listens`: the address that the server listens on. `allowed`: further names, or `*` for all.
    pub fn new(listens: &str, keys: &ApiKeys, allowed: &[String]) -> Self {
        let all = allowed.iter().any(|host| host == "*");
        let watched = !all && keys.is_empty() && is_loopback(listens);
        let allowed = allowed.iter().map(|host| host.to_ascii_lowercase()).collect();
        Self { allowed, watched }
    }

    /// Refuses a request with a foreign host name. Also refuses one with two `Host` headers, since a proxy in front of
    /// this server may use the other one. Only HTTP/1.0 allows a request without the header (RFC 9112, section 3.2).
    /// Browsers do not send such requests.
    pub fn check(&self, version: Version, headers: &HeaderMap) -> ApiResult<()> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next();
        let wrong = |message| Err(ApiError { close: true, ..ApiError::invalid("host", message) });
        if hosts.next().is_some() {
            return wrong("a request has one Host header, not several");
        }
        if host.is_none() && version != Version::HTTP_10 {
            return wrong("the request has no Host header (:authority in HTTP/2): send one");
        }
        let Some(host) = host.filter(|_| self.watched) else { return Ok(()) };
        let named = host.to_str().map(name_of).unwrap_or_default();
        let own = is_loopback(&named) || self.allowed.contains(&named);
        if own {
            return Ok(());
        }
        let message = format!(
            "this server is not asked by the name `{}`: without API keys, on a loopback address, it answers to localhost and loopback addresses; --allowed-hosts names others",
            quote(&named)
        );
        let error = ApiError::new(StatusCode::MISDIRECTED_REQUEST, message);
        Err(ApiError { close: true, code: Some("unknown_host"), ..error })
    }
}

/// Returns the name in `name:port` in lower case, an IPv6 address without its brackets. Any other text is a name as a whole.
fn name_of(host: &str) -> String {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(name, _)| name);
    let address = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    address.unwrap_or(name).trim_end_matches('.').to_ascii_lowercase()
}

/// Returns whether a host is a name that browsers resolve to this machine themselves, or a loopback address.
fn is_loopback(host: &str) -> bool {
    let address = host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    let below = host.strip_suffix(".localhost");
    address || host == "localhost" || below.is_some_and(|below| !below.contains([',', ' ', '\t']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::config::ServerConfig;

    fn hosts(config: &ServerConfig) -> Hosts {
        Hosts::new(&config.host, &config.api_keys, &config.allowed_hosts)
    }

    #[test]
    fn keys_are_found_whole_or_not_at_all() {
        let keys = ApiKeys::new(["first-key".into(), "second-key".into(), "first-key".into()]).unwrap();
        assert_eq!(keys.len(), 2);
        assert_eq!(keys.find(b"second-key"), Some(1));
        for wrong in [&b"second-ke"[..], b"second-keyy", b"", b"Second-key"] {
            assert_eq!(keys.find(wrong), None);
        }
        for bad in ["short", "with a blank", "nön-ascii-key", &"x".repeat(513)] {
            let error = ApiKeys::new([bad.to_owned()]).unwrap_err();
            assert!(!error.contains(bad), "a key is never repeated: {error}");
        }
        assert_eq!(format!("{keys:?}"), "2 keys");
    }

    #[test]
    fn only_origins_are_origins() {
        for good in ["*", "http://localhost:3000", "https://a.example"] {
            assert!(Origins::new([good.to_owned()]).is_ok(), "{good}");
        }
        for bad in ["", "a.example", "https://", "https://a.example/", "https://*.example"] {
            assert!(Origins::new([bad.to_owned()]).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_own_names_reach_an_open_server_on_the_loopback() {
        let with = |config: ServerConfig, host: &str| {
            let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_str(host).unwrap())]);
            hosts(&config).check(Version::HTTP_11, &headers)
        };
        let open = ServerConfig::default;
        for own in [
            "localhost",
            "LOCALHOST:8000",
            "127.0.0.1:8000",
            "127.1.2.3",
            "[::1]:8000",
            "app.localhost:1",
            "localhost.",
        ] {
            assert_eq!(with(open(), own), Ok(()), "{own}");
        }
        for other in [
            "evil.example:8000",
            "localhost.evil.example",
            "192.168.0.1",
            "127.0.0.1.evil.example",
            "",
            "[::2]",
            // Two `Host` headers joined into one by a proxy.
            "localhost:8000, evil.example",
            "evil.example, app.localhost",
            "[::1]:8000, evil.example",
        ] {
            let error = with(open(), other).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (421, Some("unknown_host")), "{other}");
            assert!(error.message.contains("--allowed-hosts"));
        }
        let named = |host: &str| ServerConfig { allowed_hosts: vec![host.into()], ..open() };
        assert!(with(named("Box.lan"), "box.LAN:8000").is_ok() && with(named("*"), "evil.example").is_ok());
        let keyed = ServerConfig { api_keys: ApiKeys::new(["a-long-key".into()]).unwrap(), ..open() };
        assert!(with(keyed, "evil.example").is_ok(), "keys keep others out");
        assert!(with(ServerConfig { host: "0.0.0.0".into(), ..open() }, "box.lan").is_ok());
        let nameless = |version| hosts(&open()).check(version, &HeaderMap::new());
        assert!(nameless(Version::HTTP_10).is_ok());
        assert_eq!(nameless(Version::HTTP_11).unwrap_err().status.as_u16(), 400);
        let keyed = ServerConfig { api_keys: ApiKeys::new(["a-long-key".into()]).unwrap(), ..open() };
        let mut two = HeaderMap::new();
        for _ in 0..2 {
            two.append(header::HOST, HeaderValue::from_static("localhost"));
        }
        for config in [open(), keyed] {
            assert_eq!(hosts(&config).check(Version::HTTP_10, &two).unwrap_err().status.as_u16(), 400);
        }
    }
}
