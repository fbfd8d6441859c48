//! The server over a scripted engine, by HTTP: every API, what it refuses, and clients that misbehave.
//!
//! One test binary, so that the workspace links it once. What counts the heap or injects faults is the process's, and has one of
//! its own beside this.

mod access;
mod anthropic;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod completions;
mod embeddings;
mod hostile;
mod load_line_page;
mod media;
mod openai_fields;
mod openapi;
mod operations;
mod pages;
mod refusals;
mod refused_log;
mod responses;
mod several;
mod shutdown;
mod streams;
mod tolerant;
mod tools;
