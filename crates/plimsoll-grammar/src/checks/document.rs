//! A JSON document in progress: its keys, and the effect of a token on it.

use std::collections::BTreeSet;

use crate::json_scanner::{Event, JsonScanner};

#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) rule: usize,
    /// Start offset in the text.
    pub(super) start: usize,
    pub(super) scanner: JsonScanner,
    /// Start offset of the current key.
    pub(super) key: usize,
    /// Unescaped keys of each open container.
    pub(super) keys: Vec<BTreeSet<Vec<u8>>>,
}

/// The effect of a token.
#[derive(Default)]
pub(super) struct Outcome {
    /// It repeats a key of its object.
    pub(super) repeats_key: bool,
    /// It ends the document, after this many of its bytes.
    pub(super) ends_document: Option<usize>,
    /// The last value that ends in it: the offset in the token, and the scanner there.
    pub(super) ends_value: Option<(usize, JsonScanner)>,
    /// It ends with a number or word that may be complete: the scanner there.
    pub(super) open_value: Option<JsonScanner>,
}

impl Document {
    /// Advances by the last byte of the text. True if the document ends with it.
    pub(super) fn push(&mut self, text: &[u8]) -> bool {
        let Some(byte) = text.last() else { return false };
        let before = self.scanner.depth();
        match self.scanner.step(*byte) {
            Event::KeyBegins => self.key = text.len(),
            Event::KeyEnds => {
                let key = unescaped(&text[self.key..text.len() - 1]);
                if let Some(keys) = self.keys.last_mut() {
                    keys.insert(key);
                }
            }
            _ => {}
        }
        match self.scanner.depth() {
            now if now > before => self.keys.push(BTreeSet::new()),
            now if now < before => drop(self.keys.pop()),
            _ => {}
        }
        self.scanner.has_ended()
    }

    /// The effect of a token that follows `text`.
    pub(super) fn outcome(&self, text: &[u8], token: &[u8]) -> Outcome {
        let mut scanner = self.scanner.clone();
        let mut outcome = Outcome::default();
        // Containers that were open before the token. Newer ones have no keys yet.
        let mut old = scanner.depth();
        let mut key = (self.key, 0);
        for (at, byte) in token.iter().enumerate() {
            match scanner.step(*byte) {
                Event::KeyBegins => key = (text.len(), at + 1),
                Event::KeyEnds if scanner.depth() <= old => {
                    let written = [text.get(key.0..).unwrap_or_default(), &token[key.1..at]].concat();
                    let keys = scanner.depth().checked_sub(1).and_then(|depth| self.keys.get(depth));
                    outcome.repeats_key |= keys.is_some_and(|keys| keys.contains(&unescaped(&written)));
                }
                Event::ValueEnds => outcome.ends_value = Some((at, scanner.clone())),
                Event::Closes => outcome.ends_value = Some((at + 1, scanner.clone())),
                Event::Ends => {
                    outcome.ends_document = Some(at + 1);
                    return outcome;
                }
                Event::Inside | Event::KeyEnds => {}
            }
            old = old.min(scanner.depth());
        }
        if token.last().is_some_and(|last| scanner.may_end_value(*last)) {
            outcome.open_value = Some(scanner);
        }
        outcome
    }
}

/// A key without its escapes; unchanged if it is not valid JSON.
fn unescaped(raw: &[u8]) -> Vec<u8> {
    if !raw.contains(&b'\\') {
        return raw.to_vec();
    }
    let quoted = [b"\"", raw, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).map_or_else(|_| raw.to_vec(), String::into_bytes)
}
