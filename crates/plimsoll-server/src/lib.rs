//! The HTTP face of Plimsoll: OpenAI's, Anthropic's and Ollama's APIs, embeddings and reranking, tokenize, health, metrics and the memory page.
//!
//! The path of a request: [`serve`] accepts a connection, `body` reads the body under a byte budget, `fields` parses it field by field.
//! `chat`, `completions`, `messages`, `responses` or `ollama` turn it into engine requests (on a blocking thread, never on the event loop).
//! `conversation` submits these and reads the engine's output. The API's own `respond` writes a whole answer, its `stream_writer` the
//! events of a stream.
//!
//! A server with several models (`models`) first reads a body to find the requested model, and loads it if necessary. Then it passes the
//! request to that model's handlers, which are the same.
//!
//! **Architecture invariant:** nothing here computes tokens or holds device memory, and nothing here grows with what a
//! client sends beyond the numbers in [`ServerConfig`]. An unknown field is named in a header, refused or left out (`--unknown-fields`); a value that is not supported is refused.

#![forbid(unsafe_code)]

mod chat;
mod completions;
mod conversation;
#[doc(hidden)]
pub mod fuzzed;
mod http;
mod mcp;
mod media;
mod messages;
mod models;
mod ollama;
mod ops;
mod otlp;
mod pooling;
mod responses;
mod serve;
mod state;
mod transcriptions;

pub use http::access::{ApiKeys, Origins};
pub use http::error::ServeError;
pub use http::rates::RateLimits;
pub use http::unknown::UnknownFields;
pub use mcp::{McpConfig, McpServer};
pub use models::{Listed, LoadError, Loader, serve_models};
pub use otlp::{OtlpConfig, Sampler};
/// The sandbox for documents. The program must run its child side.
pub use plimsoll_document as document;
/// The sandbox for grammars. The program must run its child side.
pub use plimsoll_grammar::sandbox;
pub use serve::listen::{StopSignals, bind, check_passed_socket, has_passed_socket, serve};
pub use state::config::{About, Formats, HTTP_WORKERS, Pooled, SamplingDefaults, SamplingSource, Served, ServerConfig};
pub use state::media::config::{MediaConfig, MediaFetch};
pub use state::record::RecordConfig;
