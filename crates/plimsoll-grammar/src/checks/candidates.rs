//! Texts that tokens would lead to, and the tokens that lead to invalid ones.

use super::Validate;
use crate::sandbox::Breach;

/// Documents that are validated before one mask. Tokens beyond them are taken away: what is left says the same with shorter tokens.
const CANDIDATES_MAX: usize = 48;

/// Texts that tokens would lead to.
#[derive(Default)]
pub(super) struct Candidates {
    texts: Vec<String>,
    depths: Vec<usize>,
    /// Tokens, with the text that each leads to.
    tokens: Vec<(u32, usize)>,
}

impl Candidates {
    pub(super) fn add(&mut self, token: u32, text: Vec<u8>) -> bool {
        self.add_open(token, text, 0)
    }

    /// False where there are too many.
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

    /// Takes away the tokens whose texts do not pass. Returns the texts that do.
    pub(super) fn judge(
        self,
        schema: &str,
        validate: &Validate<'_>,
        away: &mut Vec<u32>,
        passes: impl Fn(&[Breach], &str, usize) -> bool,
    ) -> Result<Vec<String>, String> {
        if self.texts.is_empty() {
            return Ok(Vec::new());
        }
        let breaches = validate(schema, &self.texts)?;
        let judged = self.texts.iter().zip(&self.depths).enumerate();
        let good: Vec<bool> = judged
            .map(|(at, (text, depth))| breaches.get(at).is_some_and(|breaches| passes(breaches, text, *depth)))
            .collect();
        away.extend(self.tokens.iter().filter(|(_, at)| !good[*at]).map(|(token, _)| token));
        Ok(self.texts.into_iter().zip(good).filter(|(_, good)| *good).map(|(text, _)| text).collect())
    }
}
