//! What the server and its sandbox say to each other: frames of JSON behind four bytes of length.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// The exit status of a sandbox with a job that needed more heap than allowed.
pub(super) const EXIT_BYTES: i32 = plimsoll_memory::heap::EXIT_BEYOND;

/// Bytes of one frame at most.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// The parts of a vocabulary that a grammar's text can name: special tokens, except those that it spells as text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Vocabulary {
    pub special: Vec<String>,
}

/// What one job may take.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Bounds {
    /// Heap bytes beyond what the process holds before it.
    pub heap_bytes: u64,
    /// Bytes of its stack.
    pub stack_bytes: usize,
}

/// A job.
#[derive(Debug, Serialize)]
pub(crate) enum Request<'a> {
    /// The first frame: what grammars are compiled for, and what each job may take.
    Setup(&'a Vocabulary, Bounds),
    /// Compile a grammar in llguidance's Lark dialect, and throw it away.
    Compile(&'a str),
    /// Make rules of the part of a schema (JSON text) at a JSON pointer.
    Schema { schema: &'a str, at: &'a str, name: &'a str, lenient: bool },
    /// Make rules of a grammar (Lark's notation, or else a regular expression) of a text inside a JSON string.
    Input { text: &'a str, lark: bool, name: &'a str },
    /// Tell the schemas that stand directly in that part.
    Parts { schema: &'a str, at: &'a str },
    /// Validate documents (JSON texts) against a schema (a JSON text).
    Validate { schema: &'a str, documents: &'a [String] },
}

/// [`Request`] as the child reads it.
#[derive(Debug, Deserialize)]
pub(super) enum Job {
    Setup(Vocabulary, Bounds),
    Compile(String),
    Schema { schema: String, at: String, name: String, lenient: bool },
    Input { text: String, lark: bool, name: String },
    Parts { schema: String, at: String },
    Validate { schema: String, documents: Vec<String> },
}

/// What comes of a job that stayed within its limits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Ready,
    /// It compiles, and took so many heap bytes at its peak.
    Compiles {
        bytes: u64,
    },
    /// A schema's rules, and what is left to validation.
    Rules {
        rules: String,
        validated: Vec<String>,
    },
    /// JSON pointers of schemas.
    Parts(Vec<String>),
    /// The breaches of each document, a few at most; none where it is valid.
    Validated(Vec<Vec<Breach>>),
    /// It cannot be done at all, and why.
    Refused(String),
}

/// One way in which a document breaks its schema.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Breach {
    /// The keyword that is not satisfied.
    pub keyword: String,
    /// JSON pointer of the value that breaks it.
    pub instance: String,
    /// JSON pointer of the keyword in the schema, through references.
    pub schema: String,
}

pub(super) fn write_frame(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).ok().filter(|length| *length as usize <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::other("the frame is too long"))?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(frame)?;
    to.flush()
}

/// Reads one frame; none at the end of the stream. `again` says whether to go on after an error.
pub(super) fn read_frame(
    from: &mut impl Read,
    mut again: impl FnMut(&io::Error) -> bool,
) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    if !fill(from, &mut length, &mut again)? {
        return Ok(None);
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::other(format!("a frame of {length} bytes; at most {FRAME_BYTES_MAX} are allowed")));
    }
    let mut frame = vec![0; length];
    Ok(fill(from, &mut frame, &mut again)?.then_some(frame))
}

/// Fills the buffer. False at the end of the stream.
fn fill(from: &mut impl Read, mut buffer: &mut [u8], again: &mut impl FnMut(&io::Error) -> bool) -> io::Result<bool> {
    while !buffer.is_empty() {
        match from.read(buffer) {
            Ok(0) => return Ok(false),
            Ok(read) => buffer = &mut buffer[read..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted || again(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
