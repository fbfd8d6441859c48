//! Upper limits of the HTTP side under its configuration: heap bytes, and threads.

use plimsoll_engine::HttpAlternative;
use plimsoll_grammar::sandbox::SANDBOXES_BYTES_MAX;
use plimsoll_memory::Bytes;

use super::{CONNECTION_BUFFER_BYTES, HTTP_WORKERS, PROBE_BUFFER_BYTES, PROBES_MAX, ServerConfig};
use crate::http::body::PARSED_FACTOR;
use crate::mcp::{self, MCP_THREADS};
use crate::otlp::{self, OTLP_THREADS};
use crate::state::background::BACKGROUND_MAX;
use crate::state::media::config::DECODERS;
use crate::state::record::RECORDER_BYTES;
use crate::state::spans::Spans;

/// Heap bytes of one connection besides its two buffers: 22.1 KiB measured with both full (`tests/host_heap.rs`).
const CONNECTION_FIXED_BYTES: u64 = 23 << 10;

/// Bytes of one event of a stream: a piece of output ([`plimsoll_engine::backlog::DELTA_BYTES`]) as JSON, in a list
/// that grew by doubling.
const EVENT_BYTES: u64 = 2 * plimsoll_engine::backlog::DELTA_BYTES as u64;

/// Threads for reading a document: one that waits for its process, two for the pipes.
const DOCUMENT_THREADS: usize = 3;

impl ServerConfig {
    /// The most heap bytes that open connections take: buffers, task, parsed head, stream state.
    pub fn connection_bytes_max(&self) -> u64 {
        let bytes = |count: u64, buffer: usize| count * (2 * buffer as u64 + CONNECTION_FIXED_BYTES);
        bytes(self.max_connections.into(), CONNECTION_BUFFER_BYTES) + bytes(PROBES_MAX as u64, PROBE_BUFFER_BYTES)
    }

    /// The most heap bytes of stream events that do not fit into their connections' buffers yet, one event a connection.
    pub fn event_bytes_max(&self) -> u64 {
        u64::from(self.max_connections) * EVENT_BYTES
    }

    /// Bytes for all bodies that are being parsed: the need of one body of the largest size.
    pub(crate) fn parsing_bytes_max(&self) -> u64 {
        PARSED_FACTOR * self.max_body_bytes
    }

    /// The part of [`Self::heap_bytes_max`] that each model has: its grammars, the processes that test and validate
    /// them, and the text workers' buffers.
    pub fn model_bytes_max(&self, grammar_bytes: u64) -> u64 {
        let sandboxes = if grammar_bytes == 0 { 0 } else { SANDBOXES_BYTES_MAX };
        grammar_bytes + sandboxes + u64::from(self.text_workers) * plimsoll_text::CUTTING_BYTES_MAX as u64
    }

    /// The most heap bytes the HTTP side takes, for the plan: the sum over all holders.
    pub fn heap_bytes_max(&self) -> u64 {
        let connections = self.connection_bytes_max() + self.event_bytes_max();
        // Bodies, prompts and whole answers share one budget, enforced byte by byte. Bodies that are being parsed have another.
        let in_flight = self.max_bytes_in_flight + self.parsing_bytes_max();
        // The values that a template makes before the prompt is complete, and the prompt.
        let templates = u64::from(self.text_workers) * 2 * plimsoll_text::PROMPT_BYTES_MAX as u64;
        let running = u64::from(self.max_connections) * crate::state::running::ENTRY_BYTES;
        // A response in the background takes the same memory as a connection, without the connection's buffers.
        let own = crate::state::running::ENTRY_BYTES + CONNECTION_FIXED_BYTES + EVENT_BYTES;
        let background = if self.response_store_bytes == 0 { 0 } else { u64::from(BACKGROUND_MAX) * own };
        let documents =
            if self.document_bytes == 0 { 0 } else { plimsoll_document::Reader::process_bytes(self.document_bytes) };
        connections
            + in_flight
            + templates
            + self.max_tokenizing_bytes
            + self.model_bytes_max(self.grammar_bytes)
            + self.response_store_bytes
            + running
            + background
            + documents
            + if self.mcp.servers.is_empty() { 0 } else { mcp::heap_bytes_max() }
            + self.record.as_ref().map_or(0, |_| RECORDER_BYTES)
            + self
                .otlp
                .as_ref()
                .map_or(0, |_| otlp::heap_bytes_max(self.max_connections + BACKGROUND_MAX, size_of::<Spans>()))
            + self.rates.heap_bytes_max(self.api_keys.len())
    }

    /// Threads of the HTTP side: the runtime's, one that fetches a file or loads a model, two for grammars, the document threads, the
    /// recorder's, the exporter's and one that looks up names of MCP servers. More files are fetched, and more names looked up, at once
    /// only if the system has threads to spare.
    pub fn threads_max(&self) -> usize {
        let documents = if self.document_bytes == 0 { 0 } else { DOCUMENT_THREADS };
        let otlp = self.otlp.as_ref().map_or(0, |_| OTLP_THREADS);
        let mcp = if self.mcp.servers.is_empty() { 0 } else { MCP_THREADS };
        HTTP_WORKERS + self.blocking_threads() + 1 + 2 + documents + usize::from(self.record.is_some()) + otlp + mcp
    }

    /// Threads of the runtime that tokenize, decode media and unload a model. The runtime starts all of them at once:
    /// if the system refused a thread later, a request would hang. The runtime never starts more. Without this limit it
    /// would start another thread whenever a finished one is still busy for a moment.
    pub fn blocking_threads(&self) -> usize {
        self.text_workers as usize + 2 * DECODERS + 1
    }

    /// Returns [`Self::heap_bytes_max`] with each limit halved in turn, for advice when a plan does not fit.
    pub fn alternatives(&self) -> Vec<HttpAlternative> {
        let with = |flag, value: String, change: &dyn Fn(&mut Self)| {
            let mut config = self.clone();
            change(&mut config);
            let http_bytes = config.heap_bytes_max();
            config.check().is_ok().then_some(HttpAlternative { flag, value, http_bytes })
        };
        let (connections, body) = (self.max_connections / 2, self.max_body_bytes / 2);
        let (in_flight, grammars) = (self.max_bytes_in_flight / 2, self.grammar_bytes / 2);
        let all = [
            with("--max-connections", connections.to_string(), &|config| config.max_connections = connections),
            with("--max-body-bytes", Bytes(body).flag(), &|config| config.max_body_bytes = body),
            with("--max-bytes-in-flight", Bytes(in_flight).flag(), &|config| config.max_bytes_in_flight = in_flight),
            with("--grammar-bytes", Bytes(grammars).flag(), &|config| config.grammar_bytes = grammars),
        ];
        all.into_iter().flatten().collect()
    }
}
