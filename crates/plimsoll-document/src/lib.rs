//! The text of documents that clients send: PDF and plain text.
//!
//! A PDF is untrusted input for a large parser. It is read in a child process that is started for it, with limits on heap bytes, stack and
//! time. A file that exceeds them ends that process and nothing else.
//!
//! **Invariant:** this crate knows no HTTP and no models. The server's process parses no PDF.

#![forbid(unsafe_code)]

mod child;
mod reader;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use child::serve;
pub use reader::Reader;

/// The argument with which the program runs the child's side.
pub const SANDBOX_ARGUMENT: &str = "document-sandbox";

/// The most bytes of a file.
pub const FILE_BYTES_MAX: u64 = 16 << 20;

/// The most pages of a file.
pub const PAGES_MAX: usize = 1000;

/// The most bytes of a file's text.
pub const TEXT_BYTES_MAX: usize = 2 << 20;

/// The bytes of the stack on which a file is read.
pub const STACK_BYTES: usize = 8 << 20;

/// Bytes of the child process besides its heap and stack.
pub const PROCESS_BYTES: u64 = 4 << 20;

/// The kind of a file, by its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A PDF.
    Pdf,
    /// UTF-8 text.
    Text,
}

impl Kind {
    /// Detects the kind of a file; none for any other kind.
    #[must_use]
    pub fn of(file: &[u8]) -> Option<Self> {
        // PDF readers accept a header that is not at the very beginning.
        let head = &file[..file.len().min(1024)];
        if head.windows(5).any(|window| window == b"%PDF-") {
            return Some(Self::Pdf);
        }
        let is_text = std::str::from_utf8(file).is_ok() && !file.contains(&0);
        is_text.then_some(Self::Text)
    }
}

/// The reason why a document has no text.
#[derive(Clone, Debug, Error, PartialEq, Eq, Serialize, Deserialize)]
pub enum DocumentError {
    /// The PDF needs a password.
    #[error("the PDF is encrypted; remove its password")]
    Encrypted,
    /// The PDF has pages, and no text on them.
    #[error("the PDF has no text on its {pages} pages, as scans have; send images of the pages")]
    NoText {
        /// The number of pages.
        pages: usize,
    },
    /// The PDF has too many pages.
    #[error("the PDF has {pages} pages; at most {PAGES_MAX} are read: split it")]
    Pages {
        /// The number of pages.
        pages: usize,
    },
    /// The text is too long.
    #[error("the PDF has more than {TEXT_BYTES_MAX} bytes of text: split it")]
    Text,
    /// The PDF cannot be read.
    #[error("the PDF cannot be read: {0}")]
    Broken(String),
    /// The PDF exceeds a limit of the process.
    #[error("reading the PDF takes more than {0}: split or simplify it")]
    Limit(String),
    /// The process does not work.
    #[error("the process that reads documents cannot be used: {0}")]
    Process(String),
}

impl DocumentError {
    /// Returns whether the file is the cause, so that another file may have a text.
    #[must_use]
    pub fn is_the_clients(&self) -> bool {
        !matches!(self, Self::Process(_))
    }
}
