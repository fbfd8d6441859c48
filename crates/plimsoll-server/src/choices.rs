//! Choices: a whole answer collected from its deltas, and the arithmetic both APIs need on the way.

use plimsoll_engine::{Delta, FinishReason, TokenLogprobs, TokenOut};

use crate::error::ApiError;
use crate::generation::{Event, Generation};

/// One choice of an answer that is not streamed.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub text: String,
    pub tokens: Vec<TokenOut>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub finish: Option<FinishReason>,
    pub stop_reason: Option<String>,
}

impl Collected {
    fn add(&mut self, delta: Delta) {
        self.text.push_str(&delta.text);
        self.tokens.extend(delta.tokens);
        self.prompt_logprobs.extend(delta.prompt_logprobs);
        self.finish = delta.finish.or(self.finish);
        self.stop_reason = delta.stop_reason.or(self.stop_reason.take());
    }
}

/// Waits for all choices, or for the first failure.
pub(crate) async fn collect(generation: &mut Generation, choices: usize) -> Result<Vec<Collected>, ApiError> {
    let mut collected: Vec<Collected> = std::iter::repeat_with(Collected::default).take(choices).collect();
    loop {
        match generation.next().await {
            Event::Delta(choice, delta) => collected[choice].add(delta),
            Event::Done => return Ok(collected),
            Event::Failed(error) => return Err(error),
        }
    }
}

/// OpenAI's word for the end.
pub(crate) fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// Token ids of a choice, for `return_token_ids`.
pub(crate) fn ids(tokens: &[TokenOut]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// Byte offsets into a growing text as character offsets, with nothing kept but two numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CharOffsets {
    bytes: usize,
    chars: usize,
}

impl CharOffsets {
    /// Starts after a text of this many characters (an echoed prompt).
    pub fn after(chars: usize) -> Self {
        Self { bytes: 0, chars }
    }

    /// The character offsets of all `tokens` that came with `text`; in one pass, since tokens come in order.
    pub fn all(&self, text: &str, tokens: &[TokenOut]) -> Vec<usize> {
        let mut seen = *self;
        let mut rest = text;
        let offset = |token: &TokenOut| {
            let ahead = (token.text_offset as usize).saturating_sub(seen.bytes).min(rest.len());
            let ahead = (0..=ahead).rev().find(|i| rest.is_char_boundary(*i)).unwrap_or(0);
            let (passed, left) = rest.split_at(ahead);
            seen.pass(passed);
            rest = left;
            seen.chars
        };
        tokens.iter().map(offset).collect()
    }

    /// Moves past `text`.
    pub fn pass(&mut self, text: &str) {
        self.bytes += text.len();
        self.chars += text.chars().count();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(offsets: &[u32]) -> Vec<TokenOut> {
        offsets.iter().map(|at| TokenOut { id: 0, text_offset: *at, logprobs: None }).collect()
    }

    #[test]
    fn byte_offsets_become_character_offsets_across_pieces() {
        let mut offsets = CharOffsets::after(10);
        assert_eq!(offsets.all("aé", &tokens(&[0, 1])), [10, 11]);
        offsets.pass("aé");
        // "日" is three bytes; its token starts at byte 3, the next at 6; one past the end stays at the end.
        assert_eq!(offsets.all("日x", &tokens(&[3, 6, 99])), [12, 13, 14]);
        // Inside a character counts as its start.
        assert_eq!(offsets.all("日x", &tokens(&[4])), [12]);
    }
}
