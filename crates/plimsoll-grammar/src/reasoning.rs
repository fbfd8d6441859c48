//! Reasoning before structured output. The grammar applies after it; a budget may limit its tokens.

use std::sync::Arc;

use plimsoll_text::Tokenizer;

/// Markers and budget of a reply's reasoning.
#[derive(Clone, Debug)]
pub struct ReasoningRules {
    /// The prompt contains the opening marker. Otherwise the reply may start with `open`.
    pub opened: bool,
    /// The opening marker; empty if only a prompt can have one.
    pub open: &'static str,
    /// The closing marker.
    pub close: &'static str,
    /// Most reasoning tokens. Then the closing marker is forced.
    pub budget: Option<u32>,
}

/// The reasoning of one output.
#[derive(Clone, Debug)]
pub(crate) struct ReasoningState {
    rules: ReasoningRules,
    tokenizer: Arc<Tokenizer>,
    phase: Phase,
    /// The last bytes of the text, which may be the start of the closing marker.
    tail: Vec<u8>,
    spent: u32,
    /// The tokens of the closing marker.
    closing: Vec<u32>,
    opening: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No token was accepted yet.
    Before,
    Inside,
    /// The closing marker is forced: this many of its tokens are accepted.
    Closing(usize),
    After,
}

/// The tokens allowed next, as far as reasoning decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextTokens {
    /// All except end tokens.
    Any,
    /// Only this token.
    Only(u32),
    /// The grammar's tokens, and this one.
    ConstrainedOr(u32),
    /// The grammar's tokens.
    Constrained,
}

impl ReasoningState {
    pub fn new(rules: ReasoningRules, tokenizer: &Arc<Tokenizer>) -> Self {
        let ids = |text: &str| tokenizer.encode(text, false, true).unwrap_or_default();
        let closing = ids(rules.close);
        let open = ids(rules.open);
        // Models are trained with opening markers of one token only.
        let opening = (open.len() == 1).then(|| open[0]);
        let phase = match (rules.opened, opening) {
            (true, _) => Phase::Inside,
            (false, Some(_)) => Phase::Before,
            (false, None) => Phase::After,
        };
        Self { rules, tokenizer: Arc::clone(tokenizer), phase, tail: Vec::new(), spent: 0, closing, opening }
    }

    pub fn next(&self) -> NextTokens {
        match self.phase {
            Phase::Inside if self.rules.budget.is_some_and(|most| self.spent >= most) => {
                self.closing.first().map_or(NextTokens::Any, |id| NextTokens::Only(*id))
            }
            Phase::Inside => NextTokens::Any,
            Phase::Closing(done) => self.closing.get(done).map_or(NextTokens::Any, |id| NextTokens::Only(*id)),
            Phase::Before => self.opening.map_or(NextTokens::Constrained, NextTokens::ConstrainedOr),
            Phase::After => NextTokens::Constrained,
        }
    }

    /// Accepts a token. True if the token belongs to the grammar.
    pub fn accept(&mut self, id: u32) -> bool {
        match self.phase {
            Phase::After => true,
            Phase::Before if Some(id) == self.opening => {
                self.phase = Phase::Inside;
                false
            }
            Phase::Before => {
                self.phase = Phase::After;
                true
            }
            Phase::Inside if self.next() == NextTokens::Only(id) => {
                self.close(1);
                false
            }
            Phase::Closing(done) => {
                self.close(done + 1);
                false
            }
            Phase::Inside => {
                self.tail.extend_from_slice(self.tokenizer.token_bytes(id));
                let close = self.rules.close.as_bytes();
                if self.tail.windows(close.len()).any(|window| window == close) {
                    self.phase = Phase::After;
                    self.tail = Vec::new();
                } else {
                    self.spent += 1;
                    let keep = self.tail.len().min(close.len().saturating_sub(1));
                    self.tail.drain(..self.tail.len() - keep);
                }
                false
            }
        }
    }

    fn close(&mut self, done: usize) {
        self.phase = if done == self.closing.len() { Phase::After } else { Phase::Closing(done) };
    }
}
