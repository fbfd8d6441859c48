//! Log-probabilities that wait for the text that they belong to.

use std::ops::Range;

use plimsoll_engine::TokenOut;

use crate::conversation::logprobs::ChatToken;

/// Tokens whose text has not been returned yet: parts of a character, or a possible start of a marker. Each has the byte offset in the
/// reply at which its text begins.
#[derive(Debug, Default)]
pub(super) struct Unreported(Vec<(usize, ChatToken)>);

impl Unreported {
    pub fn add(&mut self, tokens: &[TokenOut], reports: Vec<ChatToken>) {
        self.0.extend(tokens.iter().map(|token| token.text_offset as usize).zip(reports));
    }

    /// Takes the reports of the text at `span`. Earlier reports are dropped: they belong to no text. `taken`: the end of the last token's
    /// text.
    pub fn of(&mut self, span: &Range<usize>, taken: usize) -> Vec<ChatToken> {
        self.drop_before(span.start, taken);
        let count = self.0.partition_point(|(at, _)| *at < span.end);
        self.0.drain(..count).map(|(_, report)| report).collect()
    }

    /// Drops the reports of tokens whose text ends at or before `end`.
    pub fn drop_before(&mut self, end: usize, taken: usize) {
        let ends = self.0.iter().skip(1).map(|(at, _)| *at).chain([taken]);
        let gone = self.0.iter().zip(ends).take_while(|((at, _), ends)| *at < end && *ends <= end).count();
        self.0.drain(..gone);
    }

    /// Takes all reports.
    pub fn rest(&mut self) -> impl Iterator<Item = ChatToken> {
        std::mem::take(&mut self.0).into_iter().map(|(_, report)| report)
    }
}
