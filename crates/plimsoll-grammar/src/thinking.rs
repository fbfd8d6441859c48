//! Reasoning before constrained output: they are free, but may be limited in tokens, and the constraint begins after them.

use std::sync::Arc;

use plimsoll_text::Tokenizer;

/// How a reply's reasoning begin and end.
#[derive(Clone, Debug)]
pub struct Thinking {
    /// The prompt has opened them already; otherwise the reply may begin with `open`.
    pub opened: bool,
    /// Opens reasoning; empty where only a prompt can.
    pub open: &'static str,
    /// Ends reasoning.
    pub close: &'static str,
    /// Tokens of thought at most; then the end is written for the model.
    pub budget: Option<u32>,
}

/// Where a reply stands with its reasoning.
#[derive(Clone, Debug)]
pub(crate) struct Reasoning {
    rules: Thinking,
    tokenizer: Arc<Tokenizer>,
    state: State,
    /// The end of the text so far, as long as a marker could begin in it.
    tail: Vec<u8>,
    spent: u32,
    /// The tokens that write the end.
    closing: Vec<u32>,
    opening: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing has come.
    Before,
    Inside,
    /// The end is being written: this many of its tokens are there.
    Closing(usize),
    After,
}

/// What the next token may be as far as reasoning go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Any but an end of the output.
    Any,
    /// This one.
    Only(u32),
    /// What the constraint says, or this one.
    Or(u32),
    /// What the constraint says.
    Constrained,
}

impl Reasoning {
    pub fn new(rules: Thinking, tokenizer: &Arc<Tokenizer>) -> Self {
        let ids = |text: &str| tokenizer.encode(text, false, true).unwrap_or_default();
        let closing = ids(rules.close);
        let open = ids(rules.open);
        // An opening of several tokens is none that the model was trained on.
        let opening = (open.len() == 1).then(|| open[0]);
        let state = match (rules.opened, opening) {
            (true, _) => State::Inside,
            (false, Some(_)) => State::Before,
            (false, None) => State::After,
        };
        Self { rules, tokenizer: Arc::clone(tokenizer), state, tail: Vec::new(), spent: 0, closing, opening }
    }

    pub fn next(&self) -> Next {
        match self.state {
            State::Inside if self.rules.budget.is_some_and(|most| self.spent >= most) => {
                self.closing.first().map_or(Next::Any, |id| Next::Only(*id))
            }
            State::Inside => Next::Any,
            State::Closing(done) => self.closing.get(done).map_or(Next::Any, |id| Next::Only(*id)),
            State::Before => self.opening.map_or(Next::Constrained, Next::Or),
            State::After => Next::Constrained,
        }
    }

    /// Takes a token. True if it is the constraint's.
    pub fn take(&mut self, id: u32) -> bool {
        match self.state {
            State::After => true,
            State::Before if Some(id) == self.opening => {
                self.state = State::Inside;
                false
            }
            State::Before => {
                self.state = State::After;
                true
            }
            State::Inside if self.next() == Next::Only(id) => {
                self.close(1);
                false
            }
            State::Closing(done) => {
                self.close(done + 1);
                false
            }
            State::Inside => {
                self.tail.extend_from_slice(self.tokenizer.token_bytes(id));
                let close = self.rules.close.as_bytes();
                if self.tail.windows(close.len()).any(|window| window == close) {
                    self.state = State::After;
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
        self.state = if done == self.closing.len() { State::After } else { State::Closing(done) };
    }
}
