//! A small HTTP client for measuring and for misbehaving: one connection per request, bounded buffers, plain http.
//!
//! Nothing here knows what is measured. A connection ends when its [`Answer`] is dropped.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST, RETRY_AFTER};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::events::Events;

/// Longest event or whole answer that is kept.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// A connection must be there within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A server to talk to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// `host:port`.
    pub authority: String,
    /// What precedes `/v1/…`; empty for most servers.
    base: String,
}

impl Target {
    /// Reads `http://host:port`, with or without a trailing `/v1`.
    pub fn parse(url: &str) -> Result<Self> {
        let Some(rest) = url.strip_prefix("http://") else { bail!("{url}: only http://host:port is supported") };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty() {
            bail!("{url}: the host is missing");
        }
        let port_given = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if port_given { authority.to_owned() } else { format!("{authority}:80") };
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("v1").unwrap_or(path).trim_end_matches('/');
        let base = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(Self { authority, base })
    }

    /// A bare connection, for those who write their own bytes.
    pub async fn connect(&self) -> Result<TcpStream> {
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(&self.authority)).await;
        let stream = stream.with_context(|| format!("{}: no connection in time", self.authority))??;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Sends a JSON body. The answer's head must come within `within`.
    pub async fn post(&self, path: &str, body: &Value, within: Duration) -> Result<Answer> {
        self.send(Method::POST, path, Bytes::from(body.to_string()), within).await
    }

    /// Reads a page.
    pub async fn get(&self, path: &str, within: Duration) -> Result<Answer> {
        self.send(Method::GET, path, Bytes::new(), within).await
    }

    async fn send(&self, method: Method, path: &str, body: Bytes, within: Duration) -> Result<Answer> {
        let stream = self.connect().await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let connection = Connection(tokio::spawn(async move {
            // An error here is seen by whoever reads the answer.
            let _ = connection.await;
        }));
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))?;
        let response = timeout(within, sender.send_request(request)).await;
        let response = response.with_context(|| format!("no answer from {} within {within:?}", self.authority))??;
        Ok(Answer { response, events: Events::default(), _connection: connection })
    }
}

/// The task that drives a connection; ends with its owner.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer whose head has come. Dropping it closes the connection.
pub struct Answer {
    response: Response<Incoming>,
    events: Events,
    _connection: Connection,
}

impl Answer {
    /// The status code.
    pub fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// Whether the server said when to come back.
    pub fn announces_retry(&self) -> bool {
        self.response.headers().contains_key(RETRY_AFTER)
    }

    /// The next piece of the body; none at its end.
    pub async fn piece(&mut self) -> Result<Option<Bytes>> {
        while let Some(frame) = self.response.body_mut().frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// The whole body as text.
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

    /// The whole body as JSON.
    pub async fn json(self) -> Result<Value> {
        let text = self.text().await?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {}", text.chars().take(200).collect::<String>()))
    }

    /// The data of the next server-sent event; none at the end of the body. Comments are passed over.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_with_and_without_port_and_version() {
        let parse = |url| Target::parse(url).map(|t| (t.authority, t.base)).unwrap();
        assert_eq!(parse("http://a:81"), ("a:81".into(), String::new()));
        assert_eq!(parse("http://a:81/v1/"), ("a:81".into(), String::new()));
        assert_eq!(parse("http://a/x/v1"), ("a:80".into(), "/x".into()));
        assert_eq!(parse("http://[::1]:9"), ("[::1]:9".into(), String::new()));
        assert!(Target::parse("https://a").is_err());
        assert!(Target::parse("http://").is_err());
    }
}
