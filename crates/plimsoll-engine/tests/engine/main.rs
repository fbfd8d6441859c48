//! Requests through the whole engine: real models against their references, and a remembering runner whose every answer is known.
//!
//! One test binary, so that the workspace links it once. What counts the heap or injects faults is the process's, and has one of
//! its own beside this.

mod churn;
#[path = "../common/mod.rs"]
mod common;
mod embeddings;
mod faults;
mod governor;
mod hearing;
mod hybrid;
mod independence;
mod layers;
mod lifecycle;
mod media;
mod real_model;
mod reference;
mod simulate;
mod speculation;
mod vision;
mod watched;
