//! State shared by all requests with PDFs: the reader, and the queue for it.

use std::sync::Arc;
use std::time::Duration;

use plimsoll_document::Reader;
use tokio::sync::Semaphore;

use crate::state::config::ServerConfig;

/// Time to read one PDF, and to wait for its turn.
pub(crate) const READ_WITHIN: Duration = Duration::from_secs(10);

/// Reads PDFs, where the operator allows it.
pub(crate) struct Documents {
    pub reader: Reader,
    /// Held by the request whose file is being read: one file at a time.
    pub turn: Arc<Semaphore>,
}

impl Documents {
    pub fn new(config: &ServerConfig) -> Option<Self> {
        let program = config.document_sandbox.clone().filter(|_| config.document_bytes > 0)?;
        let reader = Reader::new(program, config.document_bytes, READ_WITHIN);
        Some(Self { reader, turn: Arc::new(Semaphore::new(1)) })
    }
}
