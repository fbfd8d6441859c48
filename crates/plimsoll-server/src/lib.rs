//! The HTTP face of Plimsoll: OpenAI's API, embeddings and reranking, tokenize, health, metrics and the memory page.
//!
//! A request's way: [`serve`] accepts a connection, `limits` reads its body under a byte budget, `fields` takes it apart
//! field by field, `chat` or `completions` turn it into engine requests (on a blocking thread, never on the event
//! loop), `generation` reads what the engine answers, and the API's own `respond` shapes it, whole or as a stream.
//!
//! **Architecture invariant:** nothing here computes tokens or holds device memory, and nothing here grows with what a
//! client sends beyond the numbers in [`ServerConfig`]. A field that is not understood is refused, never ignored.

mod app;
mod chat;
mod choices;
mod completions;
mod config;
mod error;
mod fields;
mod form;
mod generation;
mod health;
mod ids;
mod limits;
mod logprobs;
mod memory;
mod metrics;
mod models;
mod params;
mod pooled;
mod prompt;
mod request_log;
mod serve;
mod socket;
mod sse;
mod submit;
mod tokenize;

pub use config::{Formats, Pooled, SamplingDefaults, Served, ServerConfig};
pub use error::ServeError;
pub use serve::{bind, serve};
