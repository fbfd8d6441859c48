//! A session with one MCP server: it begins at the first request, and tells the server its end on drop.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use hyper::body::{Body, Incoming};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::connection::{self, Answer, Connection, Next};
use super::error::printable;
use super::rpc;
use super::tools::{self, CallResult, ToolSet};
use super::{Endpoint, LIST_BYTES_MAX, McpError, McpServers, PAGES_MAX};

const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
const REVISION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// The longest id of a session, in bytes.
const SESSION_ID_BYTES_MAX: usize = 256;

/// The time for the messages at the end; no response waits for them.
const GOODBYE_WITHIN: Duration = Duration::from_secs(2);

/// The time for a reply to a request of the server.
const REPLY_WITHIN: Duration = Duration::from_secs(5);

/// A session with one server.
pub(crate) struct Session {
    servers: Arc<McpServers>,
    endpoint: Arc<Endpoint>,
    /// The session's headers; none before it has begun.
    own: Option<HeaderMap>,
    connection: Option<Connection>,
    requests: u64,
    /// The request that waits for its answer, except the one that begins the session.
    calling: Option<u64>,
}

#[derive(Deserialize)]
struct Initialized {
    #[serde(rename = "protocolVersion")]
    revision: String,
}

impl Session {
    pub fn new(servers: Arc<McpServers>, endpoint: Arc<Endpoint>) -> Self {
        Self { servers, endpoint, own: None, connection: None, requests: 0, calling: None }
    }

    /// Returns the server's tools, from the cache if they are there.
    pub async fn tools(&mut self) -> Result<Arc<ToolSet>, McpError> {
        if let Some(tools) = self.servers.cache.get(&self.endpoint.key) {
            self.servers.counts.cached.inc();
            return Ok(tools);
        }
        let (limit, since) = (self.servers.timeout, Instant::now());
        let done = match Arc::clone(&self.servers).turn().await {
            Ok(_turn) => timeout(limit, self.list()).await.unwrap_or(Err(McpError::TooSlow { limit })),
            Err(error) => Err(error),
        };
        self.servers.counts.count("tools/list", done.as_ref().err(), false, since.elapsed());
        let tools = Arc::new(done.inspect_err(|_| self.connection = None)?);
        self.servers.cache.put(self.endpoint.key, &tools);
        Ok(tools)
    }

    async fn list(&mut self) -> Result<ToolSet, McpError> {
        let mut all = ToolSet { tools: Vec::new(), bytes: 0 };
        let mut cursor: Option<String> = None;
        for _ in 0..PAGES_MAX {
            let result = self.ask(|id| rpc::list(id, cursor.as_deref())).await?;
            cursor = tools::page(&result, &mut all, LIST_BYTES_MAX)?;
            if cursor.is_none() {
                return Ok(all);
            }
        }
        Err(McpError::invalid(format!("its list of tools has more than {PAGES_MAX} pages, which is the limit")))
    }

    /// Calls a tool. `arguments`: JSON of an object.
    pub async fn call(&mut self, name: &str, arguments: &str) -> Result<CallResult, McpError> {
        let (limit, since) = (self.servers.timeout, Instant::now());
        let done = match Arc::clone(&self.servers).turn().await {
            Ok(_turn) => {
                timeout(limit, self.call_now(name, arguments)).await.unwrap_or(Err(McpError::TooSlow { limit }))
            }
            Err(error) => Err(error),
        };
        let tool_failed = done.as_ref().is_ok_and(|result| result.failed.is_some());
        self.servers.counts.count("tools/call", done.as_ref().err(), tool_failed, since.elapsed());
        if matches!(done, Err(McpError::TooSlow { .. })) {
            self.connection = None;
            self.goodbye(false);
        }
        done
    }

    async fn call_now(&mut self, name: &str, arguments: &str) -> Result<CallResult, McpError> {
        let result = self.ask(|id| rpc::call(id, name, arguments)).await?;
        tools::called(&result)
    }

    /// Sends a request within the session. Begins the session if necessary, and again if the server has forgotten it.
    async fn ask(&mut self, body: impl Fn(u64) -> String) -> Result<Box<RawValue>, McpError> {
        let began = self.own.is_some();
        self.begin().await?;
        match self.exchange(&body).await {
            Err(McpError::Status { status: 404, .. }) if began => {
                self.own = None;
                self.begin().await?;
                self.exchange(&body).await
            }
            done => done,
        }
    }

    async fn begin(&mut self) -> Result<(), McpError> {
        if self.own.is_some() {
            return Ok(());
        }
        self.requests += 1;
        let id = self.requests;
        let response = self.post(HeaderMap::new(), rpc::initialize(id)).await?;
        let mut own = HeaderMap::new();
        if let Some(value) = response.headers().get(SESSION_ID) {
            if value.len() > SESSION_ID_BYTES_MAX {
                return Err(McpError::invalid(format!("its session id has {} bytes", value.len())));
            }
            own.insert(SESSION_ID, value.clone());
        }
        let result = self.read(response, id, &own).await?;
        let initialized: Initialized =
            serde_json::from_str(result.get()).map_err(|error| McpError::invalid(format!("initialize: {error}")))?;
        let known = rpc::REVISIONS.into_iter().find(|known| *known == initialized.revision).ok_or_else(|| {
            let (known, other) = (rpc::REVISIONS.join(", "), printable(&initialized.revision));
            McpError::invalid(format!("it speaks revision `{other}` of MCP; known here are {known}"))
        })?;
        own.insert(REVISION, HeaderValue::from_static(known));
        // A notification gets no answer but an HTTP status.
        let response = self.post(own.clone(), rpc::initialized()).await?;
        if !response.body().is_end_stream() {
            self.connection = None;
        }
        self.own = Some(own);
        Ok(())
    }

    async fn exchange(&mut self, body: &impl Fn(u64) -> String) -> Result<Box<RawValue>, McpError> {
        self.requests += 1;
        let id = self.requests;
        // If this future is dropped, the session cancels the request: see `Drop`.
        self.calling = Some(id);
        let done = self.exchanged(id, body(id)).await;
        self.calling = None;
        done
    }

    async fn exchanged(&mut self, id: u64, body: String) -> Result<Box<RawValue>, McpError> {
        let own = self.own.clone().unwrap_or_default();
        let response = self.post(own.clone(), body).await?;
        self.read(response, id, &own).await
    }

    /// Reads the result of the request `id`, and answers requests of the server that arrive before it.
    async fn read(
        &mut self,
        response: Response<Incoming>,
        id: u64,
        own: &HeaderMap,
    ) -> Result<Box<RawValue>, McpError> {
        let connection = self.connection.take();
        let mut answer = Answer::new(response, id)?;
        loop {
            match answer.next().await? {
                Next::Result(result) => {
                    self.connection = connection.filter(|_| answer.is_whole());
                    return Ok(result);
                }
                Next::Replies(replies) => {
                    for reply in replies {
                        // A server that refuses a reply may still answer.
                        let _ = timeout(REPLY_WITHIN, self.say(own, reply)).await;
                    }
                }
            }
        }
    }

    /// Posts a reply on a separate connection: the answer still arrives on the last one.
    async fn say(&self, own: &HeaderMap, reply: String) -> Result<(), McpError> {
        let mut connection = connection::connect(&self.servers, &self.endpoint).await?;
        let request = connection::request(&self.endpoint, Method::POST, own, reply)?;
        let answer = connection.send_request(request).await;
        answer.map(drop).map_err(|error| McpError::Broken(error.to_string()))
    }

    /// Posts a message, on the last connection if it is still open.
    async fn post(&mut self, own: HeaderMap, body: String) -> Result<Response<Incoming>, McpError> {
        let mut last = self.connection.take();
        if let Some(connection) = &mut last
            && connection.ready().await.is_err()
        {
            last = None;
        }
        loop {
            let used_before = last.is_some();
            let mut connection = match last.take() {
                Some(last) => last,
                None => connection::connect(&self.servers, &self.endpoint).await?,
            };
            let request = connection::request(&self.endpoint, Method::POST, &own, body.clone())?;
            match connection.send_request(request).await {
                Ok(response) if response.status().is_success() => {
                    self.connection = Some(connection);
                    return Ok(response);
                }
                Ok(response) => return Err(connection::refused(response).await),
                // The server closed the connection, and the request was not sent.
                Err(error) if used_before && error.is_canceled() => {}
                Err(error) => return Err(McpError::Broken(printable(&error.to_string()))),
            }
        }
    }

    /// Tells the server that the open call is cancelled, and with `ends` that the session is over.
    fn goodbye(&mut self, ends: bool) {
        let (calling, own) = (self.calling.take(), self.own.clone());
        let Some(own) = own.filter(|own| own.contains_key(SESSION_ID)) else { return };
        if calling.is_none() && !ends {
            return;
        }
        // Without a runtime no message is sent; servers end sessions by themselves.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (servers, endpoint) = (Arc::clone(&self.servers), Arc::clone(&self.endpoint));
        let Ok(turn) = Arc::clone(&servers.turns).try_acquire_owned() else { return };
        runtime.spawn(async move {
            let _turn = turn;
            let words = calling.map(|id| (Method::POST, rpc::cancelled(id)));
            let last = ends.then(|| (Method::DELETE, String::new()));
            for (method, body) in words.into_iter().chain(last) {
                let said = async {
                    let mut connection = connection::connect(&servers, &endpoint).await?;
                    let request = connection::request(&endpoint, method, &own, body)?;
                    let answer = connection.send_request(request).await;
                    answer.map(drop).map_err(|error| McpError::Broken(error.to_string()))
                };
                // The server may support neither message.
                let _ = timeout(GOODBYE_WITHIN, said).await;
            }
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.goodbye(true);
    }
}
