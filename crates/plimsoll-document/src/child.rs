//! The child's side: reads one file from standard input, and writes its text or an error to standard output.

use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Duration;

use pdf_extract::{Document, PlainTextOutput, output_doc};
use plimsoll_memory::{child, heap};

use crate::{DocumentError, FILE_BYTES_MAX, PAGES_MAX, STACK_BYTES, TEXT_BYTES_MAX};

/// A job ends after this long even if the server, which has its own limit, does not end it.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Reads a file. The program calls it with [`crate::SANDBOX_ARGUMENT`] and the heap bytes that the file may take.
#[must_use]
pub fn serve(heap_bytes: Option<&str>) -> ExitCode {
    child::begin(c"plimsoll-pdf");
    let Some(heap_bytes) = heap_bytes.and_then(|bytes| bytes.parse().ok()) else { return ExitCode::FAILURE };
    match answer(heap_bytes) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn answer(heap_bytes: u64) -> io::Result<()> {
    heap::end_process_beyond(heap::in_use() + heap_bytes);
    let mut file = Vec::new();
    io::stdin().lock().take(FILE_BYTES_MAX + 1).read_to_end(&mut file)?;
    let (done, is_done) = channel();
    let work = move || {
        let read = catch_unwind(AssertUnwindSafe(|| text(&file)));
        let _ = done.send(read.unwrap_or_else(|_| Err(DocumentError::Broken("it is malformed".into()))));
    };
    std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work)?;
    let read = is_done.recv_timeout(TIME_MAX).map_err(io::Error::other)?;
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &read)?;
    out.flush()
}

/// Extracts the text of a PDF.
fn text(file: &[u8]) -> Result<String, DocumentError> {
    let broken = |error: &dyn std::fmt::Display| {
        DocumentError::Broken(error.to_string().chars().take(200).filter(|c| !c.is_control()).collect())
    };
    let mut document = Document::load_mem(file).map_err(|error| broken(&error))?;
    if document.is_encrypted() && document.decrypt("").is_err() {
        return Err(DocumentError::Encrypted);
    }
    let pages = document.get_pages().len();
    if pages > PAGES_MAX {
        return Err(DocumentError::Pages { pages });
    }
    let mut out = Bounded(Vec::new());
    let read = output_doc(&document, &mut PlainTextOutput::new(&mut out as &mut dyn Write));
    if out.0.len() == TEXT_BYTES_MAX {
        return Err(DocumentError::Text);
    }
    read.map_err(|error| broken(&error))?;
    let text = tidied(&String::from_utf8_lossy(&out.0));
    if text.is_empty() { Err(DocumentError::NoText { pages }) } else { Ok(text) }
}

/// Removes blanks at the ends of lines, and all but one of several empty lines.
fn tidied(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines().map(str::trim_end) {
        if !line.is_empty() || !(out.is_empty() || out.ends_with("\n\n")) {
            out.extend(line.chars().filter(|c| !c.is_control() || *c == '\t'));
            out.push('\n');
        }
    }
    out.truncate(out.trim_end().len());
    out
}

/// A text that is limited to [`TEXT_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = TEXT_BYTES_MAX - self.0.len();
        if room == 0 {
            return Err(io::Error::other("the text is too long"));
        }
        let taken = bytes.len().min(room);
        self.0.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{text, tidied};
    use crate::DocumentError;

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    #[test]
    fn pages_have_their_text() {
        let read = text(&fixture("two-pages.pdf")).unwrap();
        for words in ["Quarterly report", "The tide is the rise and fall of the sea.", "naïve café", "Second page"] {
            assert!(read.contains(words), "{words}: {read}");
        }
        assert_eq!(text(&fixture("owner.pdf")).unwrap(), "Owner only.");
    }

    #[test]
    fn what_has_no_text_says_why() {
        assert_eq!(text(&fixture("locked.pdf")), Err(DocumentError::Encrypted));
        assert_eq!(text(&fixture("empty.pdf")), Err(DocumentError::NoText { pages: 1 }));
        assert!(matches!(text(b"%PDF-1.7\nnothing"), Err(DocumentError::Broken(_))));
        let whole = fixture("two-pages.pdf");
        assert!(text(&whole[..whole.len() / 2]).is_err(), "half a file");
    }

    #[test]
    fn text_is_tidied() {
        assert_eq!(tidied("\n\n a  \n\n\n\nb\u{0}\n \n"), " a\n\nb");
    }
}
