//! A completion as a stream.

use plimsoll_engine::{Delta, TokenLogprobs};

use super::respond::{Answer, Choice, ReplyContext};
use crate::conversation::active::Usage;
use crate::conversation::choices::{finish_name, ids};
use crate::conversation::logprobs::CompletionLogprobs;
use crate::conversation::stream::Shape;
use crate::http::budget::Held;
use crate::http::sse::Events;

/// The stream's state: per choice, how much text has gone and which part of an echo is still to come.
pub(crate) struct Stream {
    context: ReplyContext,
    choices: Vec<State>,
    /// Bytes of what is repeated of the prompt.
    _held: Option<Held>,
}

#[derive(Default)]
struct State {
    /// Characters of an echo, which comes before the tokens' own text.
    before: usize,
    /// Reports of the prompt's tokens, kept until they are complete and the echo can go out.
    prompt: Vec<TokenLogprobs>,
    started: bool,
}

impl Stream {
    pub fn new(context: ReplyContext, choices: usize, held: Option<Held>) -> Self {
        Self { context, choices: std::iter::repeat_with(State::default).take(choices).collect(), _held: held }
    }

    fn send(&self, choice: Choice<'_>, usage: Option<Usage>, out: &mut Events) {
        let common = &self.context.asked.draft.common;
        let usage = if common.continuous_usage { Some(usage) } else { common.include_usage.then_some(None) };
        out.push(&Answer::new(&self.context, &[choice], usage));
    }

    /// Whether the echo must wait for the prompt's log-probabilities.
    fn echo_waits(&self) -> bool {
        self.context.asked.echo && self.context.asked.draft.logprobs.is_some()
    }

    fn echo(&mut self, index: usize, usage: Option<Usage>, out: &mut Events) {
        let state = &mut self.choices[index];
        state.started = true;
        let reports = std::mem::take(&mut state.prompt);
        let prompt = self.context.prompt(index);
        let Some(text) = prompt.echo.as_deref() else {
            return;
        };
        let logprobs = self.context.asked.draft.logprobs.map(|_| {
            let mut logprobs = CompletionLogprobs::default();
            state.before = logprobs.add_prompt(self.context.spelling(), prompt, &reports);
            logprobs
        });
        let prompt_token_ids = self.context.asked.draft.common.return_token_ids.then_some(&prompt.ids[..]);
        self.send(Choice { index, text: [text, ""], logprobs, prompt_token_ids, ..Choice::default() }, usage, out);
    }
}

impl Shape for Stream {
    fn open(&mut self, out: &mut Events) {
        if self.context.asked.echo && !self.echo_waits() {
            (0..self.choices.len()).for_each(|index| self.echo(index, None, out));
        }
    }

    fn delta(&mut self, index: usize, delta: Delta, usage: Usage, out: &mut Events) {
        if self.echo_waits() && !self.choices[index].started {
            self.choices[index].prompt.extend(delta.prompt_logprobs);
            if self.choices[index].prompt.len() == self.context.prompt(index).ids.len() || delta.finish.is_some() {
                self.echo(index, Some(usage), out);
            }
        }
        let common = &self.context.asked.draft.common;
        let reports_tokens = self.context.asked.draft.reports_tokens();
        if !delta.text.is_empty() || (reports_tokens && !delta.tokens.is_empty()) {
            let first = !std::mem::replace(&mut self.choices[index].started, true);
            let prompt = self.context.prompt(index);
            let before = self.choices[index].before;
            let logprobs = self.context.asked.draft.logprobs.map(|_| {
                let mut logprobs = CompletionLogprobs::default();
                logprobs.add(self.context.spelling(), &delta.tokens, before);
                logprobs
            });
            let choice = Choice {
                index,
                text: ["", &delta.text],
                logprobs,
                token_ids: common.return_token_ids.then(|| ids(&delta.tokens)),
                prompt_token_ids: (first && common.return_token_ids).then_some(&prompt.ids[..]),
                ..Choice::default()
            };
            self.send(choice, Some(usage), out);
        }
        if let Some(reason) = delta.finish {
            let (finish_reason, stop_reason) = (Some(finish_name(reason)), delta.stop_reason.as_deref());
            self.send(Choice { index, finish_reason, stop_reason, ..Choice::default() }, Some(usage), out);
        }
    }

    fn close(&mut self, usage: Usage, out: &mut Events) {
        if self.context.asked.draft.common.include_usage {
            out.push(&Answer::new(&self.context, &[], Some(Some(usage))));
        }
    }
}
