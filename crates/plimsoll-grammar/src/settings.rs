//! Settings of a grammar cache.

use std::path::PathBuf;
use std::sync::Arc;

use plimsoll_text::Tokenizer;

/// Settings of a grammar cache.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Maps token ids to text.
    pub tokenizer: Arc<Tokenizer>,
    /// Logits per row. Ids beyond the tokenizer's are never allowed.
    pub vocab: usize,
    /// Tokens that end an output.
    pub ends: Vec<u32>,
    /// Special tokens that grammars may spell as text: the markers of calls.
    pub spelled: Vec<u32>,
    /// Budget in bytes; 0 disables structured output.
    pub bytes: u64,
    /// The program that runs as the sandbox ([`crate::sandbox`]). Without it only the library's own limits bound the
    /// cost of a grammar: for tests of crates that have no program.
    pub sandbox: Option<PathBuf>,
}
