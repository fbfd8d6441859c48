//! Heap bytes of an answer until it is sent: the expected bytes are reserved before it begins, further ones with the output.

use plimsoll_engine::{Delta, TokenOut};

use crate::conversation::logprobs::Spelling;
use crate::conversation::submission::{Submission, TokenizedPrompt};
use crate::http::budget::{ByteBudget, Held};
use crate::http::error::{ApiError, ApiResult};
use crate::http::json::json_bytes;
use crate::state::model::ModelState;

/// Expected bytes for the text of one token in a whole answer.
const PER_TOKEN: u64 = 64;

/// Bytes of a reported token: its record in a list that grew by doubling, and its id as JSON.
const PER_REPORT: u64 = 96;

/// Bytes of one reported alternative: its record, its text, and both as JSON that grew by doubling.
const PER_ALTERNATIVE: u64 = 256;

/// Bytes for each further byte of an alternative's text beyond [`SHORT`] bytes, which [`PER_ALTERNATIVE`] covers: as text, as bytes, and
/// both as JSON that grew by doubling.
const PER_SPELLED: u64 = 12;

/// Expected bytes of a token's text.
const SHORT: usize = 4;

/// Bytes of one prompt id that the answer repeats.
const PER_ID: u64 = 16;

/// Copies of an answer's text. The text grows by doubling, and exists a second time while it is parsed. Its JSON grows by doubling too, and
/// has reasoning twice.
const COPIES: u64 = 4;

/// Copies of an echo, which is written once, as JSON that grew by doubling.
const ECHOES: u64 = 2;

fn alternatives(asked: Option<u32>) -> u64 {
    asked.map_or(0, |n| PER_ALTERNATIVE * (u64::from(n) + 1))
}

impl Submission {
    /// Returns the bytes of the prompt that one answer repeats.
    fn repeated(&self, prompt: &TokenizedPrompt) -> u64 {
        let ids = if self.common.return_token_ids { PER_ID } else { 0 };
        let echo = prompt.echo.as_ref().map_or(0, |text| ECHOES * json_bytes(text) as u64);
        echo + prompt.ids.len() as u64 * (ids + alternatives(self.prompt_logprobs))
    }

    /// Reserves the bytes of the answer. Whole answers reserve all output, with a [`Meter`] for longer tokens than expected. Streams
    /// reserve only the bytes that the reply parser may hold back, and one piece of output.
    pub fn reserve_answer_bytes(&self, state: &ModelState) -> ApiResult<AnswerBytes> {
        let n = u64::from(self.common.n);
        let repeated = self.prompts.iter().map(|prompt| self.repeated(prompt)).sum::<u64>();
        let fixed = n * (self.prompts.len() as u64 * self.rules.reading_bytes() + repeated);
        if self.common.stream && !self.repeats_output {
            state.server.bytes.ever_holds(self.prompt_param, fixed)?;
            let held = if fixed > 0 { Some(state.server.bytes.hold(fixed)?) } else { None };
            return Ok(AnswerBytes { held, meter: None });
        }
        let copies = if self.repeats_output { 2 } else { 1 };
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
            reserved: output,
            used: 0,
            extra: state.server.bytes.hold(0)?,
            param: self.length_param,
        };
        Ok(AnswerBytes { held: Some(state.server.bytes.hold(bytes)?), meter: Some(meter) })
    }
}

/// The share of the byte budget that one answer holds until it is sent.
#[derive(Debug)]
pub(crate) struct AnswerBytes {
    /// Reserved before the first token; `None` if nothing was needed.
    held: Option<Held>,
    /// Counts the output of an answer that is kept until it is complete.
    meter: Option<Meter>,
}

impl AnswerBytes {
    /// Adds the bytes that earlier turns hold.
    pub fn join(&mut self, earlier: Option<Held>) {
        match (&mut self.held, earlier) {
            (Some(held), Some(earlier)) => held.join(earlier),
            (None, earlier) => self.held = earlier,
            (Some(_), None) => {}
        }
    }

    /// Changes the share to exactly `bytes` for the output of the turns so far, which is complete.
    ///
    /// # Errors
    /// The byte budget has no room for them.
    pub fn hold_exactly(&mut self, bytes: u64) -> ApiResult<()> {
        self.held = self.take();
        self.held.as_mut().map_or(Ok(()), |held| held.become_bytes(bytes))
    }

    /// Counts a piece of output. Streams are not counted: their pieces have bounded size.
    ///
    /// # Errors
    /// The byte budget has no room for it.
    pub fn add(&mut self, state: &ModelState, delta: &Delta) -> ApiResult<()> {
        let Some(meter) = &mut self.meter else { return Ok(()) };
        let spelling = Spelling { tokenizer: &state.served.tokenizer, as_ids: false };
        meter.add(delta, |id| spelling.bytes(id).len(), &state.server.bytes)
    }

    /// Takes the whole share, for the body of the answer.
    pub fn take(&mut self) -> Option<Held> {
        match (self.held.take(), self.meter.take()) {
            (Some(mut held), Some(meter)) => {
                held.join(meter.extra);
                Some(held)
            }
            (held, meter) => held.or(meter.map(|meter| meter.extra)),
        }
    }
}

/// Counts an answer's output, and reserves the bytes beyond the expected ones: tokens may be long.
#[derive(Debug)]
struct Meter {
    copies: u64,
    reports: bool,
    /// Bytes reserved for the output before it began.
    reserved: u64,
    /// Bytes of all output so far.
    used: u64,
    /// The share for bytes beyond `reserved`.
    extra: Held,
    param: &'static str,
}

impl Meter {
    /// Counts a piece of output. `spelled` returns the length of a token's text.
    fn add(&mut self, delta: &Delta, spelled: impl Fn(u32) -> usize, budget: &ByteBudget) -> ApiResult<()> {
        let text = COPIES * (delta.text.len() + json_bytes(&delta.text)) as u64;
        let reports = if self.reports { PER_REPORT * delta.tokens.len() as u64 } else { 0 };
        let alternative = |id: u32| PER_ALTERNATIVE + PER_SPELLED * spelled(id).saturating_sub(SHORT) as u64;
        let reported = |token: &TokenOut| {
            let tops = token.logprobs.iter().flat_map(|report| report.top.iter().map(|(id, _)| alternative(*id)));
            token.logprobs.as_ref().map_or(0, |_| alternative(token.id)) + tops.sum::<u64>()
        };
        self.used += self.copies * (text + reports + delta.tokens.iter().map(reported).sum::<u64>());
        budget.ever_holds(self.param, self.used)?;
        self.extra.grow(self.used.saturating_sub(self.reserved + self.extra.bytes()))
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
    fn long_tokens_reserve_more_bytes_and_short_ones_fit_the_reserved() {
        let budget = ByteBudget::new(100_000);
        let expecting = |tokens: u64, per_token: u64| {
            let (reserved, extra) = (tokens * per_token, budget.hold(0).unwrap());
            Meter { copies: 1, reports: true, reserved, used: 0, extra, param: "max_tokens" }
        };
        let mut meter = expecting(100, PER_TOKEN + PER_REPORT + alternatives(Some(2)));
        (0..100).for_each(|_| meter.add(&said("word", 2), |_| 4, &budget).unwrap());
        assert_eq!(budget.used(), 0, "no more than was reserved");
        let mut meter = expecting(100, PER_TOKEN + PER_REPORT);
        let blanks = said(&" ".repeat(81), 0);
        (0..100).for_each(|_| meter.add(&blanks, |_| 81, &budget).unwrap());
        assert!(budget.used() >= 100 * 2 * 81, "a text and its JSON at least: {}", budget.used());
        assert_eq!(budget.used(), meter.used - meter.reserved);
        let error = (0..1000).find_map(|_| meter.add(&blanks, |_| 81, &budget).err()).unwrap();
        assert!(error.message.contains("--max-bytes-in-flight"), "{}", error.message);
        drop(meter);
        let mut meter = expecting(1, PER_TOKEN + PER_REPORT + alternatives(Some(1)));
        meter.add(&said("x", 1), |id| if id == 2 { 200 } else { 4 }, &budget).unwrap();
        assert!(budget.used() > 2 * 200, "a long alternative: {}", budget.used());
    }
}
