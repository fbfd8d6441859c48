//! The protocol of the server and its sandbox: frames of JSON after four bytes of length.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Exit status after a job exceeded the heap limit.
pub(super) const EXIT_HEAP_LIMIT: i32 = plimsoll_memory::heap::EXIT_BEYOND;

/// Most bytes of one frame.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// The part of a vocabulary that a grammar's text can name: special tokens, except those spelled as text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Vocabulary {
    pub special: Vec<String>,
}

/// Limits of one job.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Bounds {
    /// Heap bytes beyond those in use before it.
    pub heap_bytes: u64,
    /// Bytes of its stack.
    pub stack_bytes: usize,
}

/// A job.
#[derive(Debug, Serialize)]
pub(crate) enum SandboxRequest<'a> {
    /// The first frame: the vocabulary, and the limits of each job.
    Setup(&'a Vocabulary, Bounds),
    /// Compile a grammar in llguidance's Lark dialect, and drop the result.
    Compile(&'a str),
    /// Compile the part of a schema (JSON text) at a JSON pointer into rules.
    Schema { schema: &'a str, at: &'a str, name: &'a str, lenient: bool },
    /// Compile a grammar (Lark, or else a regular expression) of text inside a JSON string into rules.
    Input { text: &'a str, lark: bool, name: &'a str },
    /// List the direct subschemas of that part.
    Parts { schema: &'a str, at: &'a str },
    /// Validate documents (JSON texts) against a schema (a JSON text).
    Validate { schema: &'a str, documents: &'a [String] },
}

/// [`SandboxRequest`] as the child reads it.
#[derive(Debug, Deserialize)]
pub(super) enum OwnedRequest {
    Setup(Vocabulary, Bounds),
    Compile(String),
    Schema { schema: String, at: String, name: String, lenient: bool },
    Input { text: String, lark: bool, name: String },
    Parts { schema: String, at: String },
    Validate { schema: String, documents: Vec<String> },
}

/// The result of a job that stayed within its limits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Ready,
    /// The grammar compiles; peak heap bytes.
    Compiles {
        bytes: u64,
    },
    /// A schema's rules, and the keywords left to validation.
    Rules {
        rules: String,
        validated: Vec<String>,
    },
    /// JSON pointers of subschemas.
    Parts(Vec<String>),
    /// The violations of each document, a few at most; empty if it is valid.
    Validated(Vec<Vec<Violation>>),
    /// The job is impossible, for this reason.
    Refused(String),
}

/// One violation of a schema by a document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// The keyword that is not satisfied.
    pub keyword: String,
    /// JSON pointer of the invalid value.
    pub instance: String,
    /// JSON pointer of the keyword in the schema, through references.
    pub schema: String,
}

pub(super) fn write_frame(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).ok().filter(|length| *length as usize <= FRAME_BYTES_MAX);
    let length =
        length.ok_or_else(|| io::Error::other(format!("the frame exceeds the limit of {FRAME_BYTES_MAX} bytes")))?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(frame)?;
    to.flush()
}

/// Reads one frame. `None` at the end of the stream. `retry` says whether to continue after an error.
pub(super) fn read_frame(
    from: &mut impl Read,
    mut retry: impl FnMut(&io::Error) -> bool,
) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    if !fill(from, &mut length, &mut retry)? {
        return Ok(None);
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::other(format!("the frame has {length} bytes; the limit is {FRAME_BYTES_MAX}")));
    }
    let mut frame = vec![0; length];
    Ok(fill(from, &mut frame, &mut retry)?.then_some(frame))
}

/// Fills the buffer. False at the end of the stream.
fn fill(from: &mut impl Read, mut buffer: &mut [u8], retry: &mut impl FnMut(&io::Error) -> bool) -> io::Result<bool> {
    while !buffer.is_empty() {
        match from.read(buffer) {
            Ok(0) => return Ok(false),
            Ok(read) => buffer = &mut buffer[read..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted || retry(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
