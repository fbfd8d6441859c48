//! What grammars are compiled for.

use std::path::PathBuf;
use std::sync::Arc;

use plimsoll_text::Tokenizer;

/// What grammars are compiled for.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Ids to text.
    pub tokenizer: Arc<Tokenizer>,
    /// Logits of a row; ids beyond the tokenizer's are never allowed.
    pub vocab: usize,
    /// The tokens that end output.
    pub ends: Vec<u32>,
    /// Special tokens that grammars may spell as text: the markers of calls.
    pub spelled: Vec<u32>,
    /// Bytes for everything; 0 switches constrained output off.
    pub bytes: u64,
    /// The program whose process compiles grammars for trial ([`crate::sandbox`]). Without one a grammar's cost is bounded by the
    /// library's own limits alone: for tests of crates that have no program.
    pub sandbox: Option<PathBuf>,
}
