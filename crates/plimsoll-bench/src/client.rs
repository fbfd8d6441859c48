//! A small HTTP client for measuring and for misbehaving: one connection per request, bounded buffers, plain http.
//!
//! It does not depend on the measurements. A connection ends when its [`Answer`] is dropped.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::events::Events;

/// Size limit in bytes of an event or of a whole answer.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// At most this many characters of a refusal are shown.
const WORDS_MAX: usize = 200;

/// A connection must be established within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The runtime of the commands that load a server: one thread, to leave the cores to the server.
pub fn client_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// A server to talk to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// `host:port`.
    pub authority: String,
    /// The path before `/v1/…`; empty for most servers.
    base: String,
    /// `Bearer KEY`, sent with every request and never printed.
    authorization: Option<HeaderValue>,
}

impl Target {
    /// Parses `http://host:port`, with or without `http://` and a trailing `/v1`; `key` is the server's API key.
    pub fn parse(url: &str, key: Option<&str>) -> Result<Self> {
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some((scheme, _)) => bail!("{url}: {scheme} is not supported; give http://host:port"),
            None => url,
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty() {
            bail!("{url}: the host is missing");
        }
        let port_given = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if port_given { authority.to_owned() } else { format!("{authority}:80") };
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("v1").unwrap_or(path).trim_end_matches('/');
        let base = if path.is_empty() { String::new() } else { format!("/{path}") };
        let authorization = key.map(bearer).transpose()?;
        Ok(Self { authority, base, authorization })
    }

    /// Opens a bare connection, for callers that write their own bytes.
    pub async fn connect(&self) -> Result<TcpStream> {
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(&self.authority)).await;
        let next = "`plimsoll serve` starts a server, --url names another";
        let stream = stream.with_context(|| format!("{}: no connection in time ({next})", self.authority))?;
        let stream = stream.with_context(|| format!("{}: no connection ({next})", self.authority))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Returns the head of a POST with this many bytes of JSON, to write on a bare connection.
    pub fn head(&self, path: &str, bytes: u64) -> String {
        let key = self.authorization.as_ref().and_then(|value| value.to_str().ok());
        let key = key.map_or_else(String::new, |value| format!("authorization: {value}\r\n"));
        format!(
            "POST {}{path} HTTP/1.1\r\nhost: {}\r\n{key}connection: close\r\ncontent-type: application/json\r\ncontent-length: {bytes}\r\n\r\n",
            self.base, self.authority
        )
    }

    /// Sends a JSON body. The answer's head must come within `within`.
    pub async fn post(&self, path: &str, body: &Value, within: Duration) -> Result<Answer> {
        self.send(Method::POST, path, Bytes::from(body.to_string()), within).await
    }

    /// Sends a GET. The answer's head must come within `within`.
    pub async fn get(&self, path: &str, within: Duration) -> Result<Answer> {
        self.send(Method::GET, path, Bytes::new(), within).await
    }

    /// Returns the first model that the server lists.
    pub async fn first_model(&self) -> Result<String> {
        let list = self.get("/v1/models", Duration::from_secs(30)).await?.good().await?.json().await?;
        let id = list.pointer("/data/0/id").and_then(Value::as_str);
        id.map(str::to_owned).with_context(|| format!("{} lists no model", self.authority))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes, within: Duration) -> Result<Answer> {
        let stream = self.connect().await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let connection = Connection(tokio::spawn(async move {
            // The error is ignored: the code that reads the answer gets an error, too.
            let _ = connection.await;
        }));
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))?;
        request.headers_mut().extend(self.authorization.clone().map(|value| (AUTHORIZATION, value)));
        let response = timeout(within, sender.send_request(request)).await;
        let response = response.with_context(|| format!("{}: no answer within {within:?}", self.authority))?;
        let response = response.with_context(|| format!("{}: no answer", self.authority))?;
        Ok(Answer { target: self.clone(), response, events: Events::default(), _connection: connection })
    }
}

/// Returns the value of the `authorization` header for a key.
fn bearer(key: &str) -> Result<HeaderValue> {
    let value = HeaderValue::from_str(&format!("Bearer {key}"));
    let mut value = value.context("the API key (--api-key or PLIMSOLL_API_KEY) is not visible ASCII")?;
    value.set_sensitive(true);
    Ok(value)
}

/// The task that drives a connection; aborted when this is dropped.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer with its head already read. Dropping it closes the connection.
pub struct Answer {
    target: Target,
    response: Response<Incoming>,
    events: Events,
    _connection: Connection,
}

impl Answer {
    /// The status code.
    pub fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// Returns this answer if it is a 200.
    ///
    /// # Errors
    /// When the status is another one; the error has the server's message.
    pub async fn good(self) -> Result<Self> {
        let (host, status) = (self.target.authority.clone(), self.status());
        match status {
            200 => Ok(self),
            401 => {
                let key = if self.target.authorization.is_some() { "another key" } else { "a key" };
                bail!("{host}: 401: it wants {key} (--api-key or PLIMSOLL_API_KEY)")
            }
            _ => bail!("{host}: {status}: {}", words(&self.text().await?)),
        }
    }

    /// Whether the answer has a `Retry-After` header.
    pub fn announces_retry(&self) -> bool {
        self.response.headers().contains_key(RETRY_AFTER)
    }

    /// Reads the next piece of the body; none at its end.
    pub async fn piece(&mut self) -> Result<Option<Bytes>> {
        while let Some(frame) = self.response.body_mut().frame().await {
            let frame = frame.with_context(|| format!("{}: the answer broke off", self.target.authority))?;
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// Reads the whole body as text.
    pub async fn text(mut self) -> Result<String> {
        let mut all = self.events.take_rest();
        while let Some(piece) = self.piece().await? {
            if all.len() + piece.len() > ANSWER_BYTES_MAX {
                bail!("an answer of more than {ANSWER_BYTES_MAX} bytes");
            }
            all.extend_from_slice(&piece);
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    /// Reads the whole body as JSON.
    pub async fn json(self) -> Result<Value> {
        let host = self.target.authority.clone();
        let text = self.text().await?;
        serde_json::from_str(&text).with_context(|| format!("{host}: not JSON: {}", words(&text)))
    }

    /// Reads the data of the next server-sent event; none at the end of the body. Comments are skipped.
    pub async fn event(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(data) = self.events.pop() {
                return Ok(Some(data));
            }
            let Some(piece) = self.piece().await? else {
                return Ok(None);
            };
            if self.events.waiting() + piece.len() > ANSWER_BYTES_MAX {
                bail!("an event of more than {ANSWER_BYTES_MAX} bytes");
            }
            self.events.push(&piece);
        }
    }
}

/// Returns the message of an error answer, or the beginning of its text, without control characters.
fn words(text: &str) -> String {
    let error = serde_json::from_str::<Value>(text).ok();
    let message = error.as_ref().and_then(|error| error.pointer("/error/message")?.as_str());
    // A terminal obeys control characters.
    message.unwrap_or(text).trim().chars().filter(|c| !c.is_control()).take(WORDS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Sends a request with this key to a server that answers once. Returns the client's result and the head that the server received.
    fn asked(key: Option<&str>, status: &str, body: &str) -> (Result<String>, String) {
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut seen = Vec::new();
            while !seen.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                seen.extend(byte);
            }
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8(seen).unwrap()
        });
        let said = client_runtime().unwrap().block_on(async {
            let answer = Target::parse(&url, key)?.get("/v1/models", Duration::from_secs(30)).await?;
            answer.good().await?.text().await
        });
        (said, server.join().unwrap())
    }

    #[test]
    fn every_request_carries_the_key_and_no_debug_text_does() {
        let (said, head) = asked(Some("a-secret"), "200 OK", "hi");
        assert_eq!(said.unwrap(), "hi");
        assert!(head.contains("\r\nauthorization: Bearer a-secret\r\n"), "{head}");
        let (_, head) = asked(None, "200 OK", "");
        assert!(!head.contains("authorization"), "{head}");
        let target = Target::parse("http://a/x", Some("a-secret")).unwrap();
        let head = target.head("/v1/completions", 7);
        assert!(head.starts_with("POST /x/v1/completions ") && head.ends_with("content-length: 7\r\n\r\n"), "{head}");
        assert!(head.contains("\r\nauthorization: Bearer a-secret\r\n"), "{head}");
        assert!(!format!("{target:?}").contains("a-secret"), "{target:?}");
        let error = Target::parse("http://a", Some("secret\n")).unwrap_err();
        assert!(!format!("{error:#}").contains("secret"), "{error:#}");
    }

    #[test]
    fn a_refusal_says_what_the_server_wants() {
        let refused = |key, status, body| format!("{:#}", asked(key, status, body).0.unwrap_err());
        let words = refused(None, "401 Unauthorized", "{}");
        assert!(words.starts_with("127.0.0.1:"), "{words}");
        assert!(words.ends_with(": 401: it wants a key (--api-key or PLIMSOLL_API_KEY)"), "{words}");
        assert!(refused(Some("wrong"), "401 Unauthorized", "{}").contains("it wants another key"));
        assert!(refused(None, "404 Not Found", r#"{"error":{"message":"no route"}}"#).ends_with(": 404: no route"));
        assert!(refused(None, "502 Bad Gateway", "<html>").ends_with(": 502: <html>"));
    }

    #[test]
    fn missing_server_is_named() {
        // Bound but not listening, so that no other process can listen there.
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let authority = socket.local_addr().unwrap().as_socket().unwrap().to_string();
        let target = Target::parse(&format!("http://{authority}"), None).unwrap();
        let asked = async { target.get("/health", Duration::from_secs(30)).await.map(|answer| answer.status()) };
        let error = format!("{:#}", client_runtime().unwrap().block_on(asked).unwrap_err());
        assert!(error.starts_with(&format!("{authority}: no connection (`plimsoll serve` starts")), "{error}");
    }

    #[test]
    fn urls_with_and_without_port_and_version() {
        let parse = |url| Target::parse(url, None).map(|t| (t.authority, t.base)).unwrap();
        assert_eq!(parse("http://a:81"), ("a:81".into(), String::new()));
        assert_eq!(parse("http://a:81/v1/"), ("a:81".into(), String::new()));
        assert_eq!(parse("http://a/x/v1"), ("a:80".into(), "/x".into()));
        assert_eq!(parse("http://[::1]:9"), ("[::1]:9".into(), String::new()));
        assert!(Target::parse("https://a", None).is_err());
        assert!(Target::parse("http://", None).is_err());
    }
}
