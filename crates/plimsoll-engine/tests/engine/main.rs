//! Requests through the whole engine: real models against their references, and a remembering runner with known
//! answers.
//!
//! This is one test binary, so that the workspace links it once. Tests that count the heap or inject faults affect the whole
//! process: each of them starts this program again, for itself.

mod audio;
mod churn;
#[path = "../common/mod.rs"]
mod common;
mod draft_model;
mod embeddings;
mod faults;
mod flat;
mod governor;
mod hybrid;
mod independence;
mod injected;
mod layers;
mod lifecycle;
mod load_line;
mod media;
mod museum;
mod pins;
mod process;
mod real_model;
mod reference;
mod restart;
mod restart_of_many;
mod simulate;
mod speculation;
mod vision;
mod watched;
mod windows;

use plimsoll_memory::heap::CountingHeap;

/// So that reports know what the heap holds.
#[global_allocator]
static HEAP: CountingHeap = CountingHeap;
