//! A backlog: unread output of a slow reader, returned in pieces of bounded size. So one event never exceeds its
//! planned size.
//!
//! Only text is copied; reports are moved. Not here: locks, waiting.

use std::collections::VecDeque;

use crate::api::output::{Delta, TokenLogprobs, TokenOut};

/// Bytes of one piece, as its answer is written: more than one token or report only as long as they fit.
pub const DELTA_BYTES: usize = 8 << 10;
/// A token's id and offset in an answer.
const TOKEN_BYTES: usize = 32;
/// One reported alternative in an answer: its text, its bytes as numbers, its log-probability.
const ALTERNATIVE_BYTES: usize = 128;

/// Output that was taken from the outbox and not yet returned.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    /// The delta without its lists. Its text before `said` was returned.
    rest: Delta,
    tokens: VecDeque<TokenOut>,
    prompt: VecDeque<TokenLogprobs>,
    /// Bytes of `rest.text` that were returned.
    said: usize,
    /// Bytes of the whole answer's text before `rest.text`.
    before: usize,
}

fn report_bytes(report: Option<&TokenLogprobs>) -> usize {
    report.map_or(0, |report| (report.top.len() + 1) * ALTERNATIVE_BYTES)
}

fn token_bytes(token: &TokenOut) -> usize {
    TOKEN_BYTES + report_bytes(token.logprobs.as_ref())
}

/// Moves entries while they fit into `room`. The first one always moves, unless the piece has other content (`came`).
fn fill<T>(from: &mut VecDeque<T>, to: &mut Vec<T>, room: &mut usize, came: bool, bytes: impl Fn(&T) -> usize) {
    while let Some(next) = from.front().map(&bytes) {
        if next > *room && (came || !to.is_empty()) {
            break;
        }
        *room = room.saturating_sub(next);
        to.extend(from.pop_front());
    }
}

impl Backlog {
    /// Takes over new output. The output before it has been returned.
    pub fn refill(&mut self, mut delta: Delta) {
        debug_assert!(self.is_empty(), "the one before is not used up");
        self.before += self.rest.text.len();
        self.said = 0;
        self.tokens = std::mem::take(&mut delta.tokens).into();
        self.prompt = std::mem::take(&mut delta.prompt_logprobs).into();
        self.rest = delta;
    }

    /// Whether all output was returned.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.prompt.is_empty() && self.said == self.rest.text.len()
    }

    /// The next piece. The end of the request is in the last one.
    pub fn piece(&mut self) -> Delta {
        let Delta { cached_tokens, drafted_tokens, accepted_tokens, .. } = self.rest;
        let mut piece = Delta { cached_tokens, drafted_tokens, accepted_tokens, ..Delta::default() };
        let mut room = DELTA_BYTES;
        fill(&mut self.prompt, &mut piece.prompt_logprobs, &mut room, false, |report| report_bytes(Some(report)));
        if self.prompt.is_empty() {
            let came = !piece.prompt_logprobs.is_empty();
            fill(&mut self.tokens, &mut piece.tokens, &mut room, came, token_bytes);
            self.text(&mut piece);
        }
        if self.is_empty() {
            let rest = &mut self.rest;
            piece.finish = rest.finish.take();
            piece.stop_reason = rest.stop_reason.take();
            // An embedding is one value of a fixed size.
            piece.pooled = rest.pooled.take();
            (piece.error, piece.cause) = (rest.error.take(), rest.cause);
        }
        piece
    }

    /// The text of the piece's tokens: up to where the next one begins, and no more than fits.
    fn text(&mut self, piece: &mut Delta) {
        let text = &self.rest.text;
        let next =
            self.tokens.front().map_or(text.len(), |next| (next.text_offset as usize).saturating_sub(self.before));
        let end = next.clamp(self.said, text.len());
        let end = (self.said..=end).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(self.said);
        let mut room = DELTA_BYTES;
        let fits = |c: &char| {
            let left = room.checked_sub(written(*c));
            room = left.unwrap_or(0);
            left.is_some()
        };
        let end = self.said + text[self.said..end].chars().take_while(fits).map(char::len_utf8).sum::<usize>();
        piece.text.push_str(&text[self.said..end]);
        self.said = end;
    }
}

/// Bytes of a character as JSON writes it.
fn written(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        _ => c.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::api::output::FinishReason;

    fn report(n: usize) -> TokenLogprobs {
        TokenLogprobs { own: Some(-1.0), top: vec![(7, -2.0); n].into() }
    }

    /// Joins pieces to one delta, to compare with the delta before it was cut.
    fn join(deltas: impl IntoIterator<Item = Delta>) -> Delta {
        deltas.into_iter().fold(Delta::default(), |mut sum, delta| {
            assert!(!sum.is_last(), "something follows the end");
            sum.text.push_str(&delta.text);
            sum.tokens.extend(delta.tokens);
            sum.prompt_logprobs.extend(delta.prompt_logprobs);
            (sum.finish, sum.error, sum.cause) = (delta.finish, delta.error, delta.cause);
            (sum.cached_tokens, sum.stop_reason) = (delta.cached_tokens, delta.stop_reason);
            sum
        })
    }

    proptest! {
        #[test]
        fn pieces_are_small_and_say_the_same(
            pieces in proptest::collection::vec(("[a-zäß日🦀\"\n]{0,12}", 0usize..21, any::<bool>()), 0..400),
            prompt in 0usize..60,
            alternatives in 0usize..21,
            held in 0usize..40,
        ) {
            let (mut text, mut tokens) = (String::new(), Vec::new());
            for (id, (piece, n, reported)) in pieces.iter().enumerate() {
                let logprobs = reported.then(|| report(*n));
                tokens.push(TokenOut { id: id as u32, text_offset: text.len() as u32, text_chars: 0, logprobs });
                text.push_str(piece);
            }
            // The last characters are held back until the end, as the beginning of a stop string is.
            let mut cut = text.len().saturating_sub(held);
            while !text.is_char_boundary(cut) { cut -= 1; }
            let first = Delta {
                text: text[..cut].into(), tokens: tokens.clone(), cached_tokens: 3,
                prompt_logprobs: vec![report(alternatives); prompt], ..Delta::default()
            };
            let end = Delta {
                text: text[cut..].into(), cached_tokens: 3, finish: Some(FinishReason::Stop),
                stop_reason: Some("x".into()), ..Delta::default()
            };
            let whole = join([first.clone(), end.clone()]);
            let mut backlog = Backlog::default();
            let mut said = Vec::new();
            for delta in [first, end] {
                backlog.refill(delta);
                loop {
                    let piece = backlog.piece();
                    let reports = piece.prompt_logprobs.iter().map(|r| report_bytes(Some(r))).sum::<usize>();
                    let bytes = reports + piece.tokens.iter().map(token_bytes).sum::<usize>();
                    let single = piece.tokens.len() + piece.prompt_logprobs.len() == 1;
                    prop_assert!(bytes <= DELTA_BYTES || single, "{bytes} bytes");
                    prop_assert!(piece.text.chars().map(written).sum::<usize>() <= DELTA_BYTES);
                    said.push(piece);
                    if backlog.is_empty() { break; }
                }
            }
            // A token's text never comes before the token.
            let (mut known, mut length) = (0, 0);
            for piece in &said {
                known += piece.tokens.len();
                length += piece.text.len();
                if let Some(next) = tokens.get(known) {
                    prop_assert!(length <= next.text_offset as usize);
                }
            }
            prop_assert_eq!(join(said), whole);
        }
    }
}
