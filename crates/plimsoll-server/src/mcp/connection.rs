//! HTTP to one MCP server: a connection, a request, and its bounded answer.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::value::RawValue;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::error::printable;
use super::rpc::{Heard, Messages};
use super::{ANSWER_BYTES_MAX, Endpoint, McpError, McpServers, rpc};

/// Bytes of a connection's buffer, which bounds an answer's head.
const BUFFER_BYTES: usize = 32 << 10;

/// The most headers of an answer.
const ANSWER_HEADERS_MAX: usize = 64;

/// The most bytes of a refusal's body that are read, and the time for it.
const REFUSAL_BYTES_MAX: usize = 16 << 10;
const REFUSAL_WITHIN: Duration = Duration::from_secs(1);

/// The media type of JSON.
const JSON: &str = "application/json";

/// The most bytes of a file of certificates.
const CERTIFICATES_BYTES_MAX: u64 = 4 << 20;

/// Returns a connector for TLS that trusts the built-in roots or those of the file.
pub(super) fn tls(root_certificates: Option<&Path>) -> Result<TlsConnector, String> {
    let mut roots = RootCertStore::empty();
    match root_certificates {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            let bad = |why: String| format!("SSL_CERT_FILE {}: {why}", path.display());
            let bytes = std::fs::metadata(path).map_err(|error| bad(error.to_string()))?.len();
            if bytes > CERTIFICATES_BYTES_MAX {
                return Err(bad(format!("it has {bytes} bytes; the limit is {CERTIFICATES_BYTES_MAX}")));
            }
            let certificates = CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))?;
            let (added, _) = roots.add_parsable_certificates(certificates.flatten());
            if added == 0 {
                return Err(bad("it has no certificates".into()));
            }
        }
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS: {error}"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// A connection, which may be used again.
pub(super) type Connection = SendRequest<Full<Bytes>>;

/// Connects to the server. The connection closes when it is dropped.
pub(super) async fn connect(servers: &McpServers, endpoint: &Endpoint) -> Result<Connection, McpError> {
    let failed = |error: io::Error| McpError::Connect(printable(&error.to_string()));
    let addresses = addresses(&servers.lookups, endpoint).await.map_err(failed)?;
    let stream = TcpStream::connect(&addresses[..]).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    let mut builder = Builder::new();
    builder.max_buf_size(BUFFER_BYTES).max_headers(ANSWER_HEADERS_MAX);
    let broken = |error: hyper::Error| McpError::Connect(printable(&error.to_string()));
    if !endpoint.tls {
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(connection);
        return Ok(sender);
    }
    let name = ServerName::try_from(endpoint.host.clone())
        .map_err(|_| McpError::Connect("the host is not a name that TLS can check".into()))?;
    let stream = servers.tls.connect(name, stream).await.map_err(failed)?;
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(broken)?;
    tokio::spawn(connection);
    Ok(sender)
}

/// Returns the server's addresses. A name is looked up on a separate thread: the runtime has few threads, and the lookup may take long.
async fn addresses(lookups: &Arc<Semaphore>, endpoint: &Endpoint) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = endpoint.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, endpoint.port)]);
    }
    let closed = || io::Error::other("the name was not looked up");
    // The thread holds the permit until the lookup ends, even if its exchange has ended by then.
    let permit = Arc::clone(lookups).acquire_owned().await.map_err(|_| closed())?;
    let (sender, receiver) = oneshot::channel();
    let (host, port) = (endpoint.host.clone(), endpoint.port);
    thread::Builder::new().name("plimsoll-mcp".into()).spawn(move || {
        let _permit = permit;
        let found = (host.as_str(), port).to_socket_addrs().map(|found| found.take(8).collect::<Vec<_>>());
        // The receiver is gone when the exchange has ended.
        let _ = sender.send(found);
    })?;
    let found = receiver.await.map_err(|_| closed())??;
    if found.is_empty() { Err(io::Error::other("the host has no address")) } else { Ok(found) }
}

/// Makes a request to the server. `own`: the session's headers.
pub(super) fn request(
    endpoint: &Endpoint,
    method: Method,
    own: &HeaderMap,
    body: String,
) -> Result<Request<Full<Bytes>>, McpError> {
    let mut request = Request::new(Full::new(Bytes::from(body)));
    *request.method_mut() = method;
    *request.uri_mut() = endpoint.path.clone().into();
    let headers = request.headers_mut();
    headers.extend(endpoint.headers().clone());
    headers.extend(own.clone());
    headers.insert(header::HOST, endpoint.authority.clone());
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    headers.insert(header::ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
    let agent = HeaderValue::from_static(concat!("plimsoll/", env!("CARGO_PKG_VERSION")));
    headers.entry(header::USER_AGENT).or_insert(agent);
    Ok(request)
}

/// The next part of an answer.
pub(super) enum Next {
    Result(Box<RawValue>),
    /// Replies to requests of the server, which come before the result.
    Replies(Vec<String>),
}

/// The answer to the request `id`, read piece by piece.
pub(super) struct Answer {
    body: Incoming,
    id: u64,
    /// The reader of a stream's messages. None: the answer is one message of JSON.
    messages: Option<Messages>,
    bytes: usize,
    result: Option<Result<Box<RawValue>, McpError>>,
}

impl Answer {
    pub fn new(response: Response<Incoming>, id: u64) -> Result<Self, McpError> {
        let messages = match kind(&response).as_str() {
            JSON => None,
            "text/event-stream" => Some(Messages::new(id)),
            _ => return Err(McpError::invalid("its content type is neither application/json nor text/event-stream")),
        };
        Ok(Self { body: response.into_body(), id, messages, bytes: 0, result: None })
    }

    /// Returns whether the connection may be used again after the result. A stream may continue, so its connection is closed.
    pub fn is_whole(&self) -> bool {
        self.messages.is_none()
    }

    /// Reads until the next part of the answer.
    pub async fn next(&mut self) -> Result<Next, McpError> {
        if let Some(result) = self.result.take() {
            return result.map(Next::Result);
        }
        let Some(messages) = &mut self.messages else {
            let whole = whole(&mut self.body, ANSWER_BYTES_MAX).await?;
            let none = || McpError::invalid("the answer is to another request");
            return match rpc::heard(&whole, self.id) {
                Heard::Answer(answer) => answer.map(Next::Result),
                Heard::Request { .. } | Heard::Other => Err(none()),
            };
        };
        while let Some(data) = piece(&mut self.body, self.bytes, ANSWER_BYTES_MAX).await? {
            self.bytes += data.len();
            let mut replies = Vec::new();
            self.result = messages.read(&data, &mut replies);
            if !replies.is_empty() {
                return Ok(Next::Replies(replies));
            }
            if let Some(result) = self.result.take() {
                return result.map(Next::Result);
            }
        }
        Err(McpError::Broken("the stream ended without it".into()))
    }
}

/// Returns the error of a refused request, with the message in a small body.
pub(super) async fn refused(response: Response<Incoming>) -> McpError {
    let (status, kind) = (response.status().as_u16(), kind(&response));
    let said = async {
        let body = whole(&mut response.into_body(), REFUSAL_BYTES_MAX).await.ok()?;
        rpc::refusal(&body)
    };
    // The body may never end.
    let said = if kind == JSON { timeout(REFUSAL_WITHIN, said).await.ok().flatten() } else { None };
    McpError::Status { status, said }
}

/// Returns the media type of an answer.
fn kind(response: &Response<Incoming>) -> String {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

async fn whole(body: &mut Incoming, most: usize) -> Result<Vec<u8>, McpError> {
    let mut whole = Vec::new();
    while let Some(data) = piece(body, whole.len(), most).await? {
        whole.extend_from_slice(&data);
    }
    Ok(whole)
}

/// Returns the next bytes of an answer. `before`: the number of bytes already received.
async fn piece(body: &mut Incoming, before: usize, limit: usize) -> Result<Option<Bytes>, McpError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| McpError::Broken(printable(&error.to_string())))?;
        let Ok(data) = frame.into_data() else { continue };
        if before + data.len() > limit {
            return Err(McpError::TooLarge { limit });
        }
        return Ok(Some(data));
    }
    Ok(None)
}
