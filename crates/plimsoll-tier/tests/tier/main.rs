//! The prefix cache on disk.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod keys;
