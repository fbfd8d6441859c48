//! Plimsoll: output that must have a form.
//!
//! A [`Source`] (JSON schema, regular expression, choice, Lark grammar) is compiled once for the served vocabulary and kept
//! in a cache ([`Grammars`]); each request walks it with a [`Guide`], which tells the engine the tokens that may come next.
//! A mask is computed on a thread of its own while the model computes the logits it will be laid over.
//!
//! Outputs of one form share its automaton as long as that goes well; none of them ends because of the others.
//!
//! All of it lives in one budget in bytes: the vocabulary's trie, compiled grammars, and what their automata grow to in
//! use. Idle grammars go first; when nothing is idle, a new one is refused, and one that outgrows the budget ends its
//! request.
//!
//! **Invariant:** this crate knows no HTTP and no sampling; a grammar comes from strangers, so compiling is limited in size
//! and steps, and a panic in the library ends one request.

#![forbid(unsafe_code)]

mod automaton;
mod budget;
mod cache;
mod checks;
mod depth;
mod error;
pub mod gbnf;
mod guide;
mod jobs;
mod library;
mod pool;
pub mod sandbox;
mod settings;
mod shape;
mod source;
mod thinking;
mod trial;

pub use budget::Usage;
pub use cache::Grammars;
pub use error::GrammarError;
pub use guide::Guide;
pub use settings::Settings;
pub use source::{Call, CallStyle, Calls, Input, SOURCE_BYTES_MAX, Source};
pub use thinking::Thinking;
pub use trial::{COMPILE_TIME_MAX, Patience};
