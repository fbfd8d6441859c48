//! Plimsoll: what a model says, taken apart while it says it.
//!
//! Text goes in as it is generated ([`ReplyParser::push`]); out come pieces of reasoning, of content and of tool calls
//! ([`Event`]). Every format is a machine that takes one character at a time and keeps only what it cannot decide yet, so
//! the pieces add up to the same whatever the cuts, memory is bounded, and no character is looked at twice.
//!
//! What is not what it promised to be comes back as content, nothing lost: a call without a name, a marker that ends
//! nowhere. From the moment a call's name is out it is a call, and its arguments are what the model wrote, also where they
//! are no JSON: the client sees what it would have to refuse.
//!
//! **Invariant:** this crate knows no token ids, no protocol and no template engine; of a template it looks at the text only
//! to learn which format its model was trained on.

#![forbid(unsafe_code)]

mod choose;
mod event;
mod formats;
mod held;
mod json;
mod reasoning;
mod reply;
mod tools;
mod watch;
mod written;

pub use choose::{Choice, ReasoningFormat, ToolFormat, UnknownFormat};
pub use event::Event;
pub use held::HELD_BYTES_MAX;
pub use reply::{ReplyParser, Spec, Start};
pub use tools::Tools;
