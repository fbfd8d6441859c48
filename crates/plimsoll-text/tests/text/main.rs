//! Tokenizers and chat templates against the reference libraries, and hostile files and texts.

mod chat;
#[path = "../common/mod.rs"]
mod common;
mod hostile;
mod ids;
mod python;
mod streaming;
