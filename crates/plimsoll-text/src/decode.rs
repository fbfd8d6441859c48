//! From token ids to text, one token at a time.
//!
//! Tokens are bytes, and a character may span several tokens: complete characters are written, incomplete ones wait. Invalid bytes become
//! U+FFFD as with Python's `errors="replace"`, one for each maximal broken piece. The state is a few bytes and never grows.
//! [`Tokenizer::decode`] runs this code over a slice, so that streamed and whole text are equal. Stop strings are in `stop`.

use crate::table::{Kind, Opening, TokenTable};
use crate::tokenizer::Tokenizer;

/// Turns a stream of token ids into text. Each request has one.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    skip_special: bool,
    /// Special tokens whose text is written even if `skip_special` is set.
    kept: Vec<u32>,
    /// Whether no text has been written yet, so that the vocabulary's rule for the first token still applies.
    opening: bool,
    waiting: Waiting,
}

impl Detokenizer {
    /// Returns a detokenizer for a text that begins with the first token pushed, as in [`Tokenizer::decode`]. With `skip_special`, the text
    /// of special tokens is not written.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, kept: Vec::new(), opening: true, waiting: Waiting::default() }
    }

    /// Returns a detokenizer for a text that continues another one, such as the answer to a prompt. A leading space of the first token
    /// separates it from the prompt and stays.
    pub fn continuing(skip_special: bool) -> Self {
        Self { opening: false, ..Self::new(skip_special) }
    }

    /// Returns the detokenizer with special tokens whose text is always written, independently of `skip_special`: markers that later stages
    /// read.
    pub fn keeping(self, kept: Vec<u32>) -> Self {
        Self { kept, ..self }
    }

    /// Appends to `out` the text that `id` completes. At most three bytes of an incomplete character wait. An id outside the vocabulary has
    /// no text.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        self.push_from(tokenizer.table(), tokenizer.opening(), id, out);
    }

    /// As [`Self::push`], from the parts of a tokenizer.
    pub(crate) fn push_from(&mut self, table: &TokenTable, rule: Opening, id: u32, out: &mut String) {
        match table.kind(id) {
            Kind::Hole => return,
            Kind::Special if self.skip_special && !self.kept.contains(&id) => return,
            Kind::Special | Kind::Text => {}
        }
        let text = table.text(id);
        if !self.opening {
            self.waiting.push(text, out);
            return;
        }
        match rule {
            Opening::Plain => self.waiting.push(text, out),
            Opening::StripSpace => {
                let stripped = text.strip_prefix(b" ").unwrap_or(text);
                self.waiting.push(stripped, out);
                // A token without text does not start the text.
                self.opening = text.is_empty();
                return;
            }
            Opening::StripMarks => {
                for part in table.raw(id).split('▁') {
                    self.waiting.push(part.as_bytes(), out);
                }
            }
            Opening::Raw { cleanup } => {
                let raw = table.raw(id);
                if cleanup {
                    let clean = tokenizers::decoders::wordpiece::cleanup(raw);
                    self.waiting.push(clean.as_bytes(), out);
                } else {
                    self.waiting.push(raw.as_bytes(), out);
                }
            }
        }
        self.opening = false;
    }

    /// Returns the most bytes that [`Self::push`] appends for `id`, together with [`Self::finish`] after it.
    pub fn appended_max(tokenizer: &Tokenizer, id: u32) -> usize {
        // Every byte that waits or is pushed may be broken, and U+FFFD has three bytes.
        let bytes = tokenizer.token_bytes(id).len().max(tokenizer.token_name(id).len());
        3 * (bytes + 4)
    }

    /// Ends the text: an incomplete character becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if self.waiting.len > 0 {
            out.push(char::REPLACEMENT_CHARACTER);
            self.waiting.len = 0;
        }
    }
}

/// The first bytes of a character whose other bytes have not been pushed yet.
#[derive(Clone, Copy, Default, Debug)]
struct Waiting {
    bytes: [u8; 4],
    len: usize,
}

impl Waiting {
    /// Appends the characters that `bytes` completes to `out` and keeps the rest.
    fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut rest = bytes;
        while self.len > 0 {
            let Some((&byte, tail)) = rest.split_first() else {
                return;
            };
            self.bytes[self.len] = byte;
            match std::str::from_utf8(&self.bytes[..=self.len]) {
                Ok(character) => {
                    out.push_str(character);
                    self.len = 0;
                    rest = tail;
                }
                Err(error) if error.error_len().is_none() => {
                    self.len += 1;
                    rest = tail;
                }
                Err(_) => {
                    // The waiting bytes were a valid beginning, so they are the whole broken piece. `byte` may begin a new character.
                    out.push(char::REPLACEMENT_CHARACTER);
                    self.len = 0;
                }
            }
        }
        let mut chunks = rest.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            out.push_str(chunk.valid());
            let broken = chunk.invalid();
            // Only the end of the input may be an incomplete character.
            let unfinished = chunks.peek().is_none()
                && std::str::from_utf8(broken).err().is_some_and(|error| error.error_len().is_none());
            if unfinished {
                self.bytes[..broken.len()].copy_from_slice(broken);
                self.len = broken.len();
            } else if !broken.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }
}

impl Tokenizer {
    /// The text of `ids`, without special tokens if `skip_special`. Ids outside the vocabulary have no text. Bytes that are not UTF-8
    /// become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut out = String::new();
        let mut detokenizer = Detokenizer::new(skip_special);
        for &id in ids {
            detokenizer.push(self, id, &mut out);
        }
        detokenizer.finish(&mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_cut_of_any_bytes_gives_what_the_whole_gives(
            bytes in proptest::collection::vec(
                prop_oneof![any::<u8>(), Just(0xe2), Just(0x82), Just(0xac), Just(0xf0), Just(0x9f), Just(0x80)],
                0..64,
            ),
            cuts in proptest::collection::vec(0usize..64, 0..16),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut waiting = Waiting::default();
            let mut out = String::new();
            for pair in cuts.windows(2) {
                waiting.push(&bytes[pair[0]..pair[1]], &mut out);
                prop_assert!(waiting.len <= 3);
            }
            if waiting.len > 0 {
                out.push(char::REPLACEMENT_CHARACTER);
            }
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
