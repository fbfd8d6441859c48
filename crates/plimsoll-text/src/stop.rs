//! Stop strings: a text ends at the first of several strings, while it is being generated.
//!
//! A stop string may arrive in pieces. Text that may be its beginning is therefore held back until the next bytes decide. One
//! Knuth–Morris–Pratt automaton per string reads every byte once. The held text is shorter than the longest stop string.

use std::collections::TryReserveError;

use crate::error::TextError;

/// The most stop strings of one request.
pub const STOPS_MAX: usize = 64;
/// The longest stop string, in bytes.
pub const STOP_BYTES_MAX: usize = 1024;

/// Watches one text for stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// The end of the text so far that may be the beginning of a stop string.
    held: String,
    /// Index of the stop string that ended the text.
    matched: Option<usize>,
    /// Whether that string is part of the text.
    kept: bool,
}

/// One stop string, and the length of its match so far.
#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// For every prefix, the length of the longest shorter prefix that it ends with.
    fallback: Vec<u16>,
    /// Bytes of the string that the end of the text matches.
    progress: usize,
}

impl StopMatcher {
    /// Returns a matcher for `stops`. Without any it passes all text.
    ///
    /// # Errors
    ///
    /// [`TextError::BadStop`] for an empty string, one longer than [`STOP_BYTES_MAX`], or more than [`STOPS_MAX`] strings.
    /// [`TextError::OutOfMemory`] without memory for the automata. Later only `out` is allocated.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, TextError> {
        if stops.len() > STOPS_MAX {
            let message = format!("{} strings, the limit is {STOPS_MAX}", stops.len());
            return Err(TextError::BadStop(message));
        }
        let mut automata = Vec::new();
        automata.try_reserve_exact(stops.len()).map_err(no_memory)?;
        for stop in stops {
            automata.push(Stop::new(stop.as_ref())?);
        }
        let longest = automata.iter().map(|stop: &Stop| stop.text.len()).max().unwrap_or(0);
        let mut held = String::new();
        held.try_reserve_exact(longest).map_err(no_memory)?;
        Ok(Self { stops: automata, held, matched: None, kept: false })
    }

    /// With `kept`, the text ends after the stop string instead of before it.
    pub fn keeping(mut self, kept: bool) -> Self {
        self.kept = kept;
        self
    }

    /// Returns the most bytes that [`Self::push`] and [`Self::finish`] together append to `out` for `text` bytes of text.
    pub fn appended_max(&self, text: usize) -> usize {
        self.held.len() + text
    }

    /// Reads the next piece of text and appends to `out` the part that is certainly not in a stop string. Returns `true` once a stop string
    /// is complete. Then `out` ends before it (or after it, see [`Self::keeping`]), and later text is ignored. If two strings are complete
    /// at the same byte, the longer one is the match.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.matched.is_some() {
            return true;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return false;
        }
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            if let Some((stop, length)) = self.step(byte) {
                self.matched = Some(stop);
                // The stop string began `length` bytes ago, in this piece or in the held text.
                let end = self.held.len() + index + 1;
                self.release(text, if self.kept { end } else { end - length }, out);
                self.held.clear();
                return true;
            }
        }
        let keep = self.stops.iter().map(|stop| stop.progress).max().unwrap_or(0);
        let total = self.held.len() + text.len();
        let released = total - keep;
        self.release(text, released, out);
        if released >= self.held.len() {
            let from = released - self.held.len();
            self.held.clear();
            self.held.push_str(&text[from..]);
        } else {
            self.held.drain(..released);
            self.held.push_str(text);
        }
        false
    }

    /// Ends the text: the held text is not a stop string and is appended.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        for stop in &mut self.stops {
            stop.progress = 0;
        }
    }

    /// The index of the stop string that ended the text, in the list given to [`Self::new`].
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }

    /// Advances every automaton by a byte. Returns the longest string that the byte completes, and its length in bytes.
    fn step(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut best = None;
        for (index, stop) in self.stops.iter_mut().enumerate() {
            let length = stop.text.len();
            if stop.step(byte) && best.is_none_or(|(_, longest)| length > longest) {
                best = Some((index, length));
            }
        }
        best
    }

    /// Appends the first `count` bytes of the held text and `text` together.
    fn release(&self, text: &str, count: usize, out: &mut String) {
        match count.checked_sub(self.held.len()) {
            Some(of_text) => {
                out.push_str(&self.held);
                out.push_str(&text[..of_text]);
            }
            None => out.push_str(&self.held[..count]),
        }
    }
}

fn no_memory(_: TryReserveError) -> TextError {
    TextError::OutOfMemory("stop strings")
}

impl Stop {
    fn new(text: &str) -> Result<Self, TextError> {
        if text.is_empty() || text.len() > STOP_BYTES_MAX {
            return Err(TextError::BadStop(format!(
                "a string of {} bytes; between 1 and {STOP_BYTES_MAX} are allowed",
                text.len()
            )));
        }
        let bytes = text.as_bytes();
        let (mut fallback, mut own) = (Vec::new(), String::new());
        fallback.try_reserve_exact(bytes.len()).map_err(no_memory)?;
        own.try_reserve_exact(bytes.len()).map_err(no_memory)?;
        fallback.resize(bytes.len(), 0);
        own.push_str(text);
        let mut length = 0;
        for index in 1..bytes.len() {
            while length > 0 && bytes[index] != bytes[length] {
                length = usize::from(fallback[length - 1]);
            }
            length += usize::from(bytes[index] == bytes[length]);
            fallback[index] = length as u16;
        }
        Ok(Self { text: own, fallback, progress: 0 })
    }

    /// Reads one byte of text. Returns `true` if the string is complete.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.progress > 0 && bytes[self.progress] != byte {
            self.progress = usize::from(self.fallback[self.progress - 1]);
        }
        self.progress += usize::from(bytes[self.progress] == byte);
        self.progress == bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The expected result, by a search of the whole text: the match that ends first, the longest of those.
    fn reference(stops: &[String], text: &str, kept: bool) -> (String, Option<usize>) {
        let found = stops
            .iter()
            .enumerate()
            .filter_map(|(index, stop)| text.find(stop.as_str()).map(|at| (at + stop.len(), at, index)))
            .min();
        match found {
            Some((end, start, index)) => (text[..if kept { end } else { start }].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    proptest! {
        #[test]
        fn equals_a_search_of_the_whole(
            stops in proptest::collection::vec("[abé]{1,4}", 0..4),
            pieces in proptest::collection::vec("[abéc]{0,5}", 0..8),
            kept: bool,
        ) {
            let mut matcher = StopMatcher::new(&stops).unwrap().keeping(kept);
            let mut out = String::new();
            let longest = stops.iter().map(String::len).max().unwrap_or(1);
            for piece in &pieces {
                if matcher.push(piece, &mut out) {
                    break;
                }
                prop_assert!(matcher.held.len() < longest);
            }
            let stopped = matcher.matched();
            matcher.finish(&mut out);
            prop_assert_eq!((out, stopped), reference(&stops, &pieces.concat(), kept));
        }
    }

    #[test]
    fn limits_are_named() {
        assert!(StopMatcher::new(&[""]).is_err());
        let error = StopMatcher::new(&vec!["x"; STOPS_MAX + 1]).unwrap_err();
        assert!(error.to_string().contains("64"), "{error}");
        assert!(StopMatcher::new(&["x".repeat(STOP_BYTES_MAX + 1)]).is_err());
    }

    #[test]
    fn text_after_the_stop_is_ignored() {
        let mut matcher = StopMatcher::new(&["###"]).unwrap();
        let mut out = String::new();
        assert!(!matcher.push("a#", &mut out));
        assert_eq!(out, "a");
        assert!(matcher.push("## b", &mut out));
        assert!(matcher.push("c", &mut out));
        matcher.finish(&mut out);
        assert_eq!(out, "a");
    }
}
