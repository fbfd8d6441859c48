//! The HTTPS client: small bounded answers, and large files that resume. It handles URLs, not models.

use std::cell::Cell;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::disk::{Partial, read_bounded, remove_if_present};
use crate::error::{HubError, printable};
use crate::progress::{Progress, still_wanted};
use crate::settings::Settings;
use crate::wanted::Wanted;

/// Most repetitions of a request without any new byte.
const RETRIES_MAX: u32 = 3;
/// Most connections for one file, however few bytes each of them delivers.
const CONNECTIONS_MAX: u32 = 1_000;
/// The longest pause that a server can request.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// The longest file of PEM certificates that is read, in bytes.
const CERTIFICATES_BYTES_MAX: u64 = 16 << 20;
/// The longest ETag that is stored, in bytes.
const ETAG_BYTES_MAX: u64 = 1_024;

/// A client for one endpoint.
pub(crate) struct Client {
    agent: Agent,
    pub(crate) endpoint: String,
    authorization: Option<String>,
    retry_pause: Duration,
    /// Whether the endpoint has ever answered. An endpoint that never did is not tried again.
    reached: Cell<bool>,
}

impl Client {
    /// Checks the settings and prepares the client; opens no connection.
    pub(crate) fn new(settings: &Settings) -> Result<Self, HubError> {
        let endpoint = settings.endpoint.trim_end_matches('/').to_owned();
        let bad = |name, why: &str| HubError::BadSetting { name, why: why.to_owned() };
        let uri: Uri = endpoint.parse().map_err(|_| bad("HF_ENDPOINT", "it is not an address"))?;
        let (Some(scheme), Some(host)) = (uri.scheme_str(), uri.host()) else {
            return Err(bad("HF_ENDPOINT", "it must start with https://HOST"));
        };
        if uri.query().is_some() || uri.authority().is_some_and(|a| a.as_str().contains('@')) {
            return Err(bad("HF_ENDPOINT", "it must have neither credentials nor a query; a token goes into HF_TOKEN"));
        }
        let local = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
        let authorization = match &settings.token {
            Some(_) if scheme != "https" && !local => {
                return Err(bad("HF_TOKEN", "HF_ENDPOINT is not https, it would leak"));
            }
            Some(token) if !token.bytes().all(|b| b.is_ascii_graphic()) => {
                return Err(bad("HF_TOKEN", "it has characters no token has"));
            }
            token => token.as_ref().map(|token| format!("Bearer {token}")),
        };
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // A redirect must not lead from TLS to plain text.
            .https_only(scheme == "https")
            .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_resolve(Some(settings.connect_timeout))
            .timeout_connect(Some(settings.connect_timeout))
            .timeout_recv_response(Some(settings.read_timeout))
            .timeout_per_read(Some(settings.read_timeout))
            .tls_config(tls(settings.root_certificates.as_deref())?);
        if local {
            config = config.proxy(None);
        }
        Ok(Self {
            agent: config.build().new_agent(),
            endpoint,
            authorization,
            retry_pause: settings.retry_pause,
            reached: Cell::new(false),
        })
    }

    /// Fetches a small answer of at most `limit` bytes.
    pub(crate) fn get(&self, url: &str, limit: u64) -> Result<Vec<u8>, HubError> {
        let mut failures = 0;
        loop {
            let answer = self.request(url, &[]).and_then(|response| {
                let response = successful(url, response)?;
                response
                    .into_body()
                    .into_with_config()
                    .limit(limit)
                    .read_to_vec()
                    .map_err(|error| self.failed(url, &error))
            });
            match answer {
                Ok(body) => return Ok(body),
                Err(error) => self.pause_or_fail(error, &mut failures)?,
            }
        }
    }

    /// Fetches a file of known size into `part_path`, continuing after the bytes already there, and syncs it. On failure the
    /// bytes received are kept, unless the server's file turns out to be another one.
    pub(crate) fn download(
        &self,
        url: &str,
        wanted: &Wanted<'_>,
        part_path: &Path,
        progress: &mut dyn Progress,
    ) -> Result<(), HubError> {
        let mut transfer = Transfer::open(url, wanted, part_path)?;
        transfer.announce(progress);
        let result = self.repeat(&mut transfer, progress);
        progress.done();
        result?;
        transfer.part.sync()?;
        remove_if_present(&transfer.etag_path)
    }

    fn repeat(&self, transfer: &mut Transfer<'_>, progress: &mut dyn Progress) -> Result<(), HubError> {
        let mut failures = 0;
        for _ in 0..CONNECTIONS_MAX {
            still_wanted(progress)?;
            let before = transfer.part.len();
            if before == transfer.wanted.bytes {
                return Ok(());
            }
            if let Err(error) = self.connection(transfer, progress) {
                if transfer.part.len() > before {
                    failures = 0;
                }
                self.pause_or_fail(error, &mut failures)?;
            }
        }
        Err(transfer.interrupted("too many connections"))
    }

    /// Sends one request and receives as much of its body as arrives.
    fn connection(&self, transfer: &mut Transfer<'_>, progress: &mut dyn Progress) -> Result<(), HubError> {
        let response = self.request(transfer.url, &transfer.resume_headers()?)?;
        if response.status() == 416 {
            // The server's file is shorter than the partial file: it is another file.
            transfer.restart(progress)?;
            return Err(transfer.interrupted("the server's file has changed"));
        }
        let response = successful(transfer.url, response)?;
        if response.status() == 206 {
            transfer.check_continuation(&response, progress)?;
        } else {
            if transfer.part.len() > 0 {
                transfer.restart(progress)?;
            }
            transfer.check_beginning(&response)?;
        }
        transfer.receive(response.into_body(), progress)
    }

    fn request(&self, url: &str, headers: &[(&str, String)]) -> Result<Response<Body>, HubError> {
        let mut request = self.agent.get(url);
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let response = request.call().map_err(|error| self.failed(url, &error))?;
        self.reached.set(true);
        Ok(response)
    }

    fn failed(&self, url: &str, error: &ureq::Error) -> HubError {
        let url = url.to_owned();
        let why = printable(&error.to_string());
        match error {
            ureq::Error::BodyExceedsLimit(limit) => HubError::TooLarge {
                what: format!("the answer of {url}"),
                bytes: limit.saturating_add(1),
                limit: *limit,
            },
            ureq::Error::Http(_)
            | ureq::Error::BadUri(_)
            | ureq::Error::Protocol(_)
            | ureq::Error::LargeResponseHeader(..)
            | ureq::Error::TooManyRedirects => HubError::BadResponse { url, why },
            // The host is enough; a path would only make the line long.
            _ => HubError::Unreachable { url: origin(&url), why },
        }
    }

    /// Waits before the next try. Returns the error if another try cannot help or the tries are used up.
    fn pause_or_fail(&self, error: HubError, failures: &mut u32) -> Result<(), HubError> {
        let asked = match &error {
            HubError::Interrupted { .. } => None,
            HubError::Unreachable { .. } if self.reached.get() => None,
            HubError::Status { code: 429 | 500 | 502 | 503 | 504, retry_after_s, .. } => *retry_after_s,
            _ => return Err(error),
        };
        if *failures >= RETRIES_MAX {
            return Err(error);
        }
        let own = self.retry_pause * 2_u32.pow(*failures);
        *failures += 1;
        sleep(asked.map_or(own, Duration::from_secs).min(PAUSE_MAX));
        Ok(())
    }
}

/// One file in transfer.
struct Transfer<'a> {
    url: &'a str,
    wanted: &'a Wanted<'a>,
    part: Partial,
    /// Path of the ETag of the file, beside the partial file.
    etag_path: PathBuf,
}

impl<'a> Transfer<'a> {
    fn open(url: &'a str, wanted: &'a Wanted<'a>, part_path: &Path) -> Result<Self, HubError> {
        let mut etag_path = part_path.as_os_str().to_owned();
        etag_path.push(".etag");
        Ok(Self { url, wanted, part: Partial::open(part_path, wanted.bytes)?, etag_path: etag_path.into() })
    }

    fn announce(&self, progress: &mut dyn Progress) {
        progress.start(&format!("pulling {}", self.wanted.name), Some(self.wanted.bytes));
        progress.advance(self.part.len());
    }

    fn restart(&mut self, progress: &mut dyn Progress) -> Result<(), HubError> {
        self.part.truncate(0)?;
        remove_if_present(&self.etag_path)?;
        self.announce(progress);
        Ok(())
    }

    /// Returns the headers that request the rest. The file is fetched from its beginning if there is neither a validator nor a sum,
    /// which would detect a mixture of two files.
    fn resume_headers(&mut self) -> Result<Vec<(&'static str, String)>, HubError> {
        if self.part.len() == 0 {
            return Ok(Vec::new());
        }
        let etag = read_bounded(&self.etag_path, ETAG_BYTES_MAX)?
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .filter(|etag| is_strong(etag));
        if etag.is_none() && self.wanted.sha256.is_none() {
            self.part.truncate(0)?;
            return Ok(Vec::new());
        }
        let mut headers = vec![("Range", format!("bytes={}-", self.part.len()))];
        headers.extend(etag.map(|etag| ("If-Range", etag)));
        Ok(headers)
    }

    /// Checks the first part of a whole file: its announced length must be the wanted one. Stores its ETag.
    fn check_beginning(&self, response: &Response<Body>) -> Result<(), HubError> {
        let length = text(response, "content-length").and_then(|value| value.parse().ok());
        if let Some(actual) = length.filter(|length| *length != self.wanted.bytes) {
            return Err(HubError::SizeMismatch { what: self.url.to_owned(), expected: self.wanted.bytes, actual });
        }
        if let Some(etag) = text(response, "etag").filter(|etag| is_strong(etag)) {
            fs::write(&self.etag_path, etag).map_err(HubError::io("write", &self.etag_path))?;
        }
        Ok(())
    }

    /// Checks the answer to a request for the rest: it must begin at the end of the partial file, in a file of the wanted length.
    /// If it does not, the partial file is of no use with this server.
    fn check_continuation(&mut self, response: &Response<Body>, progress: &mut dyn Progress) -> Result<(), HubError> {
        let range = text(response, "content-range").unwrap_or("nothing");
        let (from, bytes) = (self.part.len(), self.wanted.bytes);
        let expected = format!("bytes {from}-{}/{bytes}", bytes - 1);
        if range == expected {
            return Ok(());
        }
        self.restart(progress)?;
        Err(self.interrupted(&format!("it sends `{range}` instead of `{expected}`")))
    }

    fn receive(&mut self, body: Body, progress: &mut dyn Progress) -> Result<(), HubError> {
        let mut reader = body.into_reader();
        let mut buffer = vec![0_u8; 1 << 17];
        loop {
            still_wanted(progress)?;
            let read = match reader.read(&mut buffer) {
                Ok(0) if self.part.len() == self.wanted.bytes => return Ok(()),
                Ok(0) => return Err(self.interrupted("the connection was closed")),
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.interrupted(&error.to_string())),
            };
            let total = self.part.len().saturating_add(read as u64);
            if total > self.wanted.bytes {
                self.part.truncate(0)?;
                return Err(HubError::TooLarge { what: self.url.to_owned(), bytes: total, limit: self.wanted.bytes });
            }
            self.part.append(&buffer[..read])?;
            progress.advance(read as u64);
        }
    }

    fn interrupted(&self, why: &str) -> HubError {
        HubError::Interrupted {
            url: self.url.to_owned(),
            received: self.part.len(),
            expected: self.wanted.bytes,
            why: printable(why),
        }
    }
}

/// Returns scheme and host of an address.
fn origin(url: &str) -> String {
    let host_at = url.find("://").map_or(0, |at| at + 3);
    let end = url[host_at..].find('/').map_or(url.len(), |at| host_at + at);
    url[..end].to_owned()
}

/// Whether an ETag is a strong validator. Only a strong one proves that two answers have the same bytes.
fn is_strong(etag: &str) -> bool {
    etag.len() >= 2 && etag.starts_with('"') && etag.ends_with('"')
}

fn text<'r>(response: &'r Response<Body>, name: &str) -> Option<&'r str> {
    response.headers().get(name)?.to_str().ok()
}

fn successful(url: &str, response: Response<Body>) -> Result<Response<Body>, HubError> {
    match response.status().as_u16() {
        200 | 206 => Ok(response),
        code => Err(HubError::Status {
            url: url.to_owned(),
            code,
            retry_after_s: text(&response, "retry-after").and_then(|value| value.parse().ok()),
        }),
    }
}

/// Returns the built-in root certificates, or those of the user's file.
pub(crate) fn tls(root_certificates: Option<&Path>) -> Result<TlsConfig, HubError> {
    let Some(path) = root_certificates else {
        return Ok(TlsConfig::default());
    };
    let bad = |why: String| HubError::BadSetting { name: "SSL_CERT_FILE", why };
    let pem = read_bounded(path, CERTIFICATES_BYTES_MAX)
        .map_err(|error| bad(error.to_string()))?
        .ok_or_else(|| bad(format!("{} does not exist", path.display())))?;
    let certificates: Vec<_> = parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(bad(format!("{} has no certificates", path.display())));
    }
    Ok(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&certificates)).build())
}
