//! Clients that load a running server: `bench` measures it, `soak` loads it with faults, `replay` sends a recorded trace.
//!
//! The command line parses the flags and calls these commands. The clients speak HTTP only, so they work with any server.

#![forbid(unsafe_code)]

pub mod bench;
pub mod client;
#[doc(hidden)]
pub mod events;
mod keys;
mod output;
mod process;
mod prompts;
pub mod replay;
pub mod soak;

pub use client::client_runtime;
pub use keys::KeyArgs;
pub use output::Print;
