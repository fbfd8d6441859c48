//! Plimsoll: parses a model's reply while it is generated.
//!
//! Text goes in as it is generated ([`ReplyParser::push`]). Pieces of reasoning, content and tool calls come out
//! ([`Event`]). Every format is a state machine that takes one character at a time and holds back only undecided text.
//! So the result does not depend on how the text is split, memory is bounded, and each character is read once.
//!
//! Text that breaks its format becomes content, and no text is lost: a call without a name, an unclosed marker. Once a
//! call's name is emitted, it stays a call. Its arguments are then the model's text even if they are not JSON, so that
//! the client sees them.
//!
//! **Invariant:** this crate contains no token ids, no protocol and no template engine. It reads a template's text only
//! to find the formats of its model.

#![forbid(unsafe_code)]

mod choose;
mod event;
mod formats;
mod hold;
mod json;
mod reasoning;
mod reply;
mod tools;
mod watch;
mod written;

pub use choose::{Choice, ReasoningFormat, ToolFormat, UnknownFormat};
pub use event::Event;
pub use hold::HELD_BYTES_MAX;
pub use reply::{ReplyParser, Spec, Start};
pub use tools::Tools;
