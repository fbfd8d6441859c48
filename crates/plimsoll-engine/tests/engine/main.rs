//! Requests through the whole engine: real models against their references, and a remembering runner with known
//! answers.
//!
//! This is one test binary, so that the workspace links it once. Tests that count the heap or inject faults affect the
//! whole process, so they have a binary of their own.

mod audio;
mod churn;
#[path = "../common/mod.rs"]
mod common;
mod draft_model;
mod embeddings;
mod faults;
mod governor;
mod hybrid;
mod independence;
mod layers;
mod lifecycle;
mod media;
mod pins;
mod real_model;
mod reference;
mod restart;
mod restart_of_many;
mod simulate;
mod speculation;
mod vision;
mod watched;
mod windows;
