//! What an answer takes of the heap until it is sent: what is held for it before it begins, and what more as it comes.

use plimsoll_engine::{Delta, TokenOut};

use crate::conversation::logprobs::Spelling;
use crate::conversation::submission::{Prompt, Submission};
use crate::http::budget::{ByteBudget, Held};
use crate::http::error::{ApiError, ApiResult};
use crate::http::json::json_bytes;
use crate::state::model::ModelState;

/// Text of one token of a whole answer, as far as it is foreseen.
const PER_TOKEN: u64 = 64;

/// A token that is reported: its record in a list that grew by doubling, and its id as JSON.
const PER_REPORT: u64 = 96;

/// One reported alternative: its record, its text, and both as JSON that grew by doubling.
const PER_ALTERNATIVE: u64 = 256;

/// What of it is a text of [`SHORT`] bytes; each more takes so much: as text, as bytes, and both as JSON that grew by doubling.
const PER_SPELLED: u64 = 12;

/// Bytes of a token's text that are foreseen.
const SHORT: usize = 4;

/// One id of a prompt that the answer repeats.
const PER_ID: u64 = 16;

/// A text grows by doubling, and is there once more when it is taken apart; its JSON grows so too, and has thoughts twice.
const COPIES: u64 = 4;

/// An echo is written once, as JSON that grew by doubling.
const ECHOES: u64 = 2;

fn alternatives(asked: Option<u32>) -> u64 {
    asked.map_or(0, |n| PER_ALTERNATIVE * (u64::from(n) + 1))
}

impl Submission {
    /// What one answer to a prompt repeats of it.
    fn repeated(&self, prompt: &Prompt) -> u64 {
        let ids = if self.common.return_token_ids { PER_ID } else { 0 };
        let echo = prompt.echo.as_ref().map_or(0, |text| ECHOES * json_bytes(text) as u64);
        echo + prompt.ids.len() as u64 * (ids + alternatives(self.prompt_logprobs))
    }

    /// A whole answer is held in memory until the client has taken it, by a meter where more comes than was foreseen; of a stream, what its
    /// readers hold back and what comes at once. Its output comes in pieces of bounded size.
    pub fn hold(&self, state: &ModelState) -> ApiResult<(Option<Held>, Option<Meter>)> {
        let n = u64::from(self.common.n);
        let repeated = self.prompts.iter().map(|prompt| self.repeated(prompt)).sum::<u64>();
        let fixed = n * (self.prompts.len() as u64 * self.reading_bytes + repeated);
        if self.common.stream && !self.gathers {
            state.server.bytes.ever_holds(self.prompt_param, fixed)?;
            let held = if fixed > 0 { Some(state.server.bytes.hold(fixed)?) } else { None };
            return Ok((held, None));
        }
        let copies = if self.gathers { 2 } else { 1 };
        let reports = self.reports_tokens();
        let report = if reports { PER_REPORT } else { 0 };
        let per_token = copies * (PER_TOKEN + report + alternatives(self.logprobs));
        let mut output = 0;
        for prompt in &self.prompts {
            output += n * per_token * u64::from(self.max_tokens(state, prompt)?);
        }
        let (bytes, limit) = (fixed + output, state.server.bytes.limit());
        if bytes > limit {
            let message = format!(
                "the answer may need {bytes} bytes, more than this server's limit of {limit}; stream it, or ask for fewer tokens or log-probabilities"
            );
            return Err(ApiError::invalid(self.length_param, message));
        }
        let meter = Meter {
            copies,
            reports,
            priced: output,
            due: 0,
            more: state.server.bytes.hold(0)?,
            param: self.length_param,
        };
        Ok((Some(state.server.bytes.hold(bytes)?), Some(meter)))
    }
}

/// Holds what an answer's output takes beyond what was foreseen: tokens may be long.
#[derive(Debug)]
pub(crate) struct Meter {
    copies: u64,
    reports: bool,
    /// What is held for the output already.
    priced: u64,
    /// What all that came takes.
    due: u64,
    more: Held,
    param: &'static str,
}

impl Meter {
    /// Counts a piece.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn add(&mut self, state: &ModelState, delta: &Delta) -> ApiResult<()> {
        let spelling = Spelling { tokenizer: &state.served.tokenizer, as_ids: false };
        self.take(delta, |id| spelling.bytes(id).len(), &state.server.bytes)
    }

    /// The same, with the bytes that a token is spelled with.
    fn take(&mut self, delta: &Delta, spelled: impl Fn(u32) -> usize, budget: &ByteBudget) -> ApiResult<()> {
        let text = COPIES * (delta.text.len() + json_bytes(&delta.text)) as u64;
        let reports = if self.reports { PER_REPORT * delta.tokens.len() as u64 } else { 0 };
        let alternative = |id: u32| PER_ALTERNATIVE + PER_SPELLED * spelled(id).saturating_sub(SHORT) as u64;
        let reported = |token: &TokenOut| {
            let tops = token.logprobs.iter().flat_map(|report| report.top.iter().map(|(id, _)| alternative(*id)));
            token.logprobs.as_ref().map_or(0, |_| alternative(token.id)) + tops.sum::<u64>()
        };
        self.due += self.copies * (text + reports + delta.tokens.iter().map(reported).sum::<u64>());
        budget.ever_holds(self.param, self.due)?;
        self.more.grow(self.due.saturating_sub(self.priced + self.more.bytes()))
    }

    /// What it holds.
    pub fn into_held(self) -> Held {
        self.more
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_engine::TokenLogprobs;

    use super::*;

    fn said(text: &str, top: usize) -> Delta {
        let logprobs = (top > 0).then(|| TokenLogprobs { own: Some(-1.0), top: vec![(2, -1.0); top].into() });
        let token = TokenOut { id: 1, text_offset: 0, text_chars: 0, logprobs };
        Delta { text: text.into(), tokens: vec![token], ..Delta::default() }
    }

    #[test]
    fn long_tokens_are_held_as_they_come_and_short_ones_are_foreseen() {
        let budget = ByteBudget::new(100_000);
        let foreseen = |tokens: u64, per_token: u64| {
            let (priced, more) = (tokens * per_token, budget.hold(0).unwrap());
            Meter { copies: 1, reports: true, priced, due: 0, more, param: "max_tokens" }
        };
        let mut meter = foreseen(100, PER_TOKEN + PER_REPORT + alternatives(Some(2)));
        (0..100).for_each(|_| meter.take(&said("word", 2), |_| 4, &budget).unwrap());
        assert_eq!(budget.used(), 0, "no more than was foreseen");
        let mut meter = foreseen(100, PER_TOKEN + PER_REPORT);
        let blanks = said(&" ".repeat(81), 0);
        (0..100).for_each(|_| meter.take(&blanks, |_| 81, &budget).unwrap());
        assert!(budget.used() >= 100 * 2 * 81, "a text and its JSON at least: {}", budget.used());
        assert_eq!(budget.used(), meter.due - meter.priced);
        let error = (0..1000).find_map(|_| meter.take(&blanks, |_| 81, &budget).err()).unwrap();
        assert!(error.message.contains("--max-bytes-in-flight"), "{}", error.message);
        drop(meter);
        let mut meter = foreseen(1, PER_TOKEN + PER_REPORT + alternatives(Some(1)));
        meter.take(&said("x", 1), |id| if id == 2 { 200 } else { 4 }, &budget).unwrap();
        assert!(budget.used() > 2 * 200, "a long alternative: {}", budget.used());
    }
}
