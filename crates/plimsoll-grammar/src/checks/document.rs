//! A document while it is written: its keys, and what a token would bring to it.

use std::collections::BTreeSet;

use crate::shape::{Event, Shape};

#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) rule: usize,
    /// Where it begins in the text.
    pub(super) start: usize,
    pub(super) shape: Shape,
    /// Where the key that is being written begins.
    pub(super) key: usize,
    /// The keys of every open container, decoded.
    pub(super) keys: Vec<BTreeSet<Vec<u8>>>,
}

/// What a token would bring.
#[derive(Default)]
pub(super) struct Outcome {
    /// A key that its object has already.
    pub(super) repeats: bool,
    /// The document would end here, with so many bytes of the token.
    pub(super) ends: Option<usize>,
    /// A value in it would end here, the last one in the token.
    pub(super) value: Option<(usize, Shape)>,
    /// A number or a word stands at the end, which may be whole.
    pub(super) open_end: Option<Shape>,
}

impl Document {
    /// Takes the last byte of the text. True when the document has ended with it.
    pub(super) fn take(&mut self, text: &[u8]) -> bool {
        let Some(byte) = text.last() else { return false };
        let before = self.shape.depth();
        match self.shape.step(*byte) {
            Event::KeyBegins => self.key = text.len(),
            Event::KeyEnds => {
                let key = decoded(&text[self.key..text.len() - 1]);
                if let Some(keys) = self.keys.last_mut() {
                    keys.insert(key);
                }
            }
            _ => {}
        }
        match self.shape.depth() {
            now if now > before => self.keys.push(BTreeSet::new()),
            now if now < before => drop(self.keys.pop()),
            _ => {}
        }
        self.shape.ended()
    }

    /// What a token would bring, whose text stands behind `text`.
    pub(super) fn outcome(&self, text: &[u8], token: &[u8]) -> Outcome {
        let mut shape = self.shape.clone();
        let mut outcome = Outcome::default();
        // Containers that were open before the token, the rest is new and has no keys yet.
        let mut old = shape.depth();
        let mut key = (self.key, 0);
        for (at, byte) in token.iter().enumerate() {
            match shape.step(*byte) {
                Event::KeyBegins => key = (text.len(), at + 1),
                Event::KeyEnds if shape.depth() <= old => {
                    let written = [text.get(key.0..).unwrap_or_default(), &token[key.1..at]].concat();
                    let keys = shape.depth().checked_sub(1).and_then(|depth| self.keys.get(depth));
                    outcome.repeats |= keys.is_some_and(|keys| keys.contains(&decoded(&written)));
                }
                Event::ValueEnds => outcome.value = Some((at, shape.clone())),
                Event::Closes => outcome.value = Some((at + 1, shape.clone())),
                Event::Ends => {
                    outcome.ends = Some(at + 1);
                    return outcome;
                }
                Event::Inside | Event::KeyEnds => {}
            }
            old = old.min(shape.depth());
        }
        if token.last().is_some_and(|last| shape.may_end_value(*last)) {
            outcome.open_end = Some(shape);
        }
        outcome
    }
}

/// A key without its escapes. One that is none is left as it is.
fn decoded(raw: &[u8]) -> Vec<u8> {
    if !raw.contains(&b'\\') {
        return raw.to_vec();
    }
    let quoted = [b"\"", raw, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).map_or_else(|_| raw.to_vec(), String::into_bytes)
}
