//! The text of documents that clients send: PDF and plain text.
//!
//! A PDF is a program of a stranger's for a large parser. It is read in a child process that is started for it, with a
//! limit in heap bytes, stack and time. A file that needs more ends that process and nothing else.
//!
//! **Invariant:** this crate knows no HTTP and no models. The server's process parses no PDF.

#![forbid(unsafe_code)]

mod child;
mod reader;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use child::serve;
pub use reader::Reader;

/// The argument that makes the program the child's side.
pub const SANDBOX_ARGUMENT: &str = "document-sandbox";

/// Bytes of a file, at most.
pub const FILE_BYTES_MAX: u64 = 16 << 20;

/// Pages of a file, at most.
pub const PAGES_MAX: usize = 1000;

/// Bytes of the text of a file, at most.
pub const TEXT_BYTES_MAX: usize = 2 << 20;

/// The stack that a file is read on.
pub const STACK_BYTES: usize = 8 << 20;

/// Memory of the child process besides its heap and stack.
pub const PROCESS_BYTES: u64 = 4 << 20;

/// What a file is, as its first bytes say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A PDF.
    Pdf,
    /// UTF-8 text.
    Text,
}

impl Kind {
    /// Looks at a file. None: it is something else.
    #[must_use]
    pub fn of(file: &[u8]) -> Option<Self> {
        // Readers take a header that does not stand at the very beginning.
        let head = &file[..file.len().min(1024)];
        if head.windows(5).any(|window| window == b"%PDF-") {
            return Some(Self::Pdf);
        }
        let is_text = std::str::from_utf8(file).is_ok() && !file.contains(&0);
        is_text.then_some(Self::Text)
    }
}

/// Why a document has no text.
#[derive(Clone, Debug, Error, PartialEq, Eq, Serialize, Deserialize)]
pub enum DocumentError {
    /// It needs a password.
    #[error("the PDF is encrypted; remove its password")]
    Encrypted,
    /// It has pages, and no text on them.
    #[error("the PDF has no text on its {pages} pages, as scans have; send images of the pages")]
    NoText {
        /// Its pages.
        pages: usize,
    },
    /// It has too many pages.
    #[error("the PDF has {pages} pages; at most {PAGES_MAX} are read: split it")]
    Pages {
        /// Its pages.
        pages: usize,
    },
    /// Its text is too long.
    #[error("the PDF has more than {TEXT_BYTES_MAX} bytes of text: split it")]
    Text,
    /// It cannot be read.
    #[error("the PDF cannot be read: {0}")]
    Broken(String),
    /// A limit of the process.
    #[error("reading the PDF takes more than {0}: split or simplify it")]
    Limit(String),
    /// The process does not work.
    #[error("the process that reads documents cannot be used: {0}")]
    Process(String),
}

impl DocumentError {
    /// Whether another file would have a text.
    #[must_use]
    pub fn is_the_clients(&self) -> bool {
        !matches!(self, Self::Process(_))
    }
}
