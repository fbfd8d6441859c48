//! The server over a scripted engine, by HTTP: every API, refused requests, and clients that misbehave.
//!
//! One test binary, so that the workspace links it once. Tests that count the heap or inject faults affect the whole process, so they are
//! separate binaries.

mod access;
mod anthropic;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod completions;
mod embed_routes;
mod embeddings;
mod hostile;
mod http2;
mod infill;
mod long_conversations;
mod media;
mod ollama;
mod openai_fields;
mod openapi;
mod operations;
mod otlp;
mod pages;
mod refusals;
mod refused_log;
mod responses;
mod several;
mod shutdown;
mod streams;
mod tolerant;
mod tools;
mod web_app;
