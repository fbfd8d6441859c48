//! Tools of MCP servers: the client side of the Model Context Protocol, over streamable HTTP.
//!
//! The operator names the servers (`--mcp-server`); requests cannot reach other servers. A server's answer is untrusted input: its bytes,
//! values, tools and time are bounded before any of it is used.

mod cache;
mod config;
mod connection;
mod counts;
mod endpoint;
mod error;
mod events;
pub mod fuzzed;
mod rpc;
mod session;
mod tools;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

pub(crate) use config::check_label;
pub use config::{McpConfig, McpServer};
pub(crate) use endpoint::{Credentials, Endpoint};
pub(crate) use error::McpError;
pub(crate) use session::Session;
pub(crate) use tools::{CallResult, Tool, ToolSet};

use cache::ToolCache;
pub(crate) use counts::Counts;

/// The most exchanges with servers that run at once. Others wait, at most for the time of a call.
const EXCHANGES_MAX: usize = 8;

/// The most bytes of one answer, including notifications before it.
pub(crate) const ANSWER_BYTES_MAX: usize = 512 << 10;

/// The most bytes of a server's list of tools: all pages and schemas together.
pub(crate) const LIST_BYTES_MAX: usize = 256 << 10;

/// The most pages of a list of tools.
const PAGES_MAX: usize = 16;

/// Heap bytes of one exchange: the answer as received, as a message and as text; the buffers of HTTP and TLS.
const EXCHANGE_BYTES: u64 = 3 * ANSWER_BYTES_MAX as u64 + (256 << 10);

/// Threads that look up names at once, for the plan.
pub(crate) const MCP_THREADS: usize = 1;

/// Returns the most heap bytes of MCP, for the plan. The parts of answers that a response keeps are charged to the budget of requests in
/// flight.
pub(crate) fn heap_bytes_max() -> u64 {
    EXCHANGES_MAX as u64 * EXCHANGE_BYTES + cache::CACHE_BYTES
}

/// The servers that requests may use, and the state shared by all exchanges with them.
pub(crate) struct McpServers {
    servers: Vec<McpServer>,
    timeout: Duration,
    tls: TlsConnector,
    turns: Arc<Semaphore>,
    /// Permits for name lookups; a lookup may outlast its exchange.
    lookups: Arc<Semaphore>,
    cache: ToolCache,
    pub counts: Counts,
}

impl McpServers {
    /// Returns none if the operator names no server.
    ///
    /// # Errors
    /// The certificates cannot be read.
    pub fn new(config: &McpConfig) -> Result<Option<Arc<Self>>, String> {
        if config.servers.is_empty() {
            return Ok(None);
        }
        Ok(Some(Arc::new(Self {
            servers: config.servers.clone(),
            timeout: config.timeout,
            tls: connection::tls(config.root_certificates.as_deref())?,
            turns: Arc::new(Semaphore::new(EXCHANGES_MAX)),
            lookups: Arc::new(Semaphore::new(EXCHANGES_MAX)),
            cache: ToolCache::default(),
            counts: Counts::default(),
        })))
    }

    /// Returns the server with this address, or, without one, with this label.
    pub fn find(&self, label: &str, url: Option<&str>) -> Option<&McpServer> {
        match url {
            Some(url) => self.servers.iter().find(|server| server.is_at(url)),
            None => self.servers.iter().find(|server| server.label == label),
        }
    }

    /// The labels, for messages.
    pub fn labels(&self) -> String {
        self.servers.iter().map(|server| server.label.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Returns the number of exchanges that run now.
    pub fn running(&self) -> u64 {
        (EXCHANGES_MAX - self.turns.available_permits().min(EXCHANGES_MAX)) as u64
    }

    /// Returns the bytes of cached lists.
    pub fn cached_bytes(&self) -> u64 {
        self.cache.bytes()
    }

    /// Waits until an exchange may run, at most for the time of one.
    async fn turn(&self) -> Result<OwnedSemaphorePermit, McpError> {
        let turn = timeout(self.timeout, Arc::clone(&self.turns).acquire_owned()).await;
        turn.ok().and_then(Result::ok).ok_or(McpError::Busy { running: EXCHANGES_MAX })
    }
}
