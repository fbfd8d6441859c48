//! Structured output.
//!
//! A [`Source`] (JSON schema, regular expression, choice, Lark grammar) is compiled once for the served vocabulary. The
//! cache ([`Grammars`]) keeps it. Each request has a [`Guide`], which gives the engine the mask of allowed tokens. A
//! separate thread computes a mask while the model computes the logits.
//!
//! Outputs of one grammar share its automaton. If it fails, each output continues on a new automaton of its own.
//!
//! One byte budget holds the vocabulary's trie, compiled grammars and their automata. Idle grammars are evicted first.
//! If none is idle, a new grammar is refused. An automaton that outgrows the budget ends its request.
//!
//! **Invariant:** this crate contains no HTTP and no sampling. Grammars are untrusted input, so compiling has limits in
//! size and steps. A panic in the library ends one request only.

#![forbid(unsafe_code)]

mod automaton;
mod budget;
mod cache;
mod checks;
mod depth;
mod error;
pub mod gbnf;
mod guide;
mod job_queue;
mod json_scanner;
mod library;
mod pool;
mod reasoning;
pub mod sandbox;
mod sandboxes;
mod settings;
mod source;

pub use budget::Usage;
pub use cache::Grammars;
pub use error::GrammarError;
pub use guide::Guide;
pub use reasoning::ReasoningRules;
pub use sandboxes::{COMPILE_TIME_MAX, CompileLimits};
pub use settings::Settings;
pub use source::{CallStyle, CallableTool, SOURCE_BYTES_MAX, Source, ToolCalls, ToolInput};
