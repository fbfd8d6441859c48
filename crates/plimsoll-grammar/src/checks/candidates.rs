//! Texts that tokens would produce, and the tokens that produce invalid ones.

use super::Validate;
use crate::sandbox::Violation;

/// Most documents validated for one mask. Tokens beyond it are removed: shorter tokens can produce the same text.
const CANDIDATES_MAX: usize = 48;

/// Texts that tokens would produce, without duplicates.
#[derive(Default)]
pub(super) struct Candidates {
    texts: Vec<String>,
    depths: Vec<usize>,
    /// Each token with the index of its text.
    tokens: Vec<(u32, usize)>,
}

impl Candidates {
    pub(super) fn add(&mut self, token: u32, text: Vec<u8>) -> bool {
        self.add_open(token, text, 0)
    }

    /// Adds a token. False if there are too many texts.
    pub(super) fn add_open(&mut self, token: u32, text: Vec<u8>, depth: usize) -> bool {
        let text = String::from_utf8_lossy(&text).into_owned();
        let at = self.texts.iter().position(|known| *known == text);
        let at = at.or_else(|| {
            let room = self.texts.len() < CANDIDATES_MAX;
            room.then(|| {
                self.texts.push(text);
                self.depths.push(depth);
                self.texts.len() - 1
            })
        });
        at.map(|at| self.tokens.push((token, at))).is_some()
    }

    /// Adds tokens with invalid texts to `rejected`. Returns the texts that pass.
    pub(super) fn validate_all(
        self,
        schema: &str,
        validate: &Validate<'_>,
        rejected: &mut Vec<u32>,
        passes: impl Fn(&[Violation], &str, usize) -> bool,
    ) -> Result<Vec<String>, String> {
        if self.texts.is_empty() {
            return Ok(Vec::new());
        }
        let violations = validate(schema, &self.texts)?;
        let candidates = self.texts.iter().zip(&self.depths).enumerate();
        let valid: Vec<bool> = candidates
            .map(|(at, (text, depth))| violations.get(at).is_some_and(|violations| passes(violations, text, *depth)))
            .collect();
        rejected.extend(self.tokens.iter().filter(|(_, at)| !valid[*at]).map(|(token, _)| token));
        Ok(self.texts.into_iter().zip(valid).filter(|(_, valid)| *valid).map(|(text, _)| text).collect())
    }
}
