//! A completion as a stream.

use plimsoll_engine::{Delta, TokenLogprobs};

use super::respond::{Answer, Choice};
use crate::conversation::active::ActiveRequest;
use crate::conversation::choices::ids;
use crate::conversation::logprobs::CompletionLogprobs;
use crate::conversation::stream::StreamWriter;
use crate::http::sse::Events;

/// The state of a streamed completion.
pub(crate) struct CompletionStream {
    choices: Vec<State>,
}

#[derive(Default)]
struct State {
    /// The number of characters of an echo before the tokens' own text.
    before: usize,
    /// Reports of the prompt's tokens, kept until they are complete and the echo can go out.
    prompt: Vec<TokenLogprobs>,
    started: bool,
}

/// Returns whether the answer repeats its prompts.
fn echoes(request: &ActiveRequest) -> bool {
    request.submission.prompts.iter().any(|prompt| prompt.echo.is_some())
}

/// Returns whether the echo must wait for the prompt's log-probabilities.
fn echo_waits(request: &ActiveRequest) -> bool {
    echoes(request) && request.submission.logprobs.is_some()
}

/// Sends a piece of a choice. `begun`: whether there is usage to report.
fn send(request: &ActiveRequest, choice: Choice<'_>, begun: bool, out: &mut Events) {
    let common = &request.submission.common;
    let so_far = begun.then(|| request.usage());
    let usage = if common.continuous_usage { Some(so_far) } else { common.include_usage.then_some(None) };
    out.push(&Answer::new(request, &[choice], usage));
}

impl CompletionStream {
    pub fn new(request: &ActiveRequest) -> Self {
        Self { choices: std::iter::repeat_with(State::default).take(request.submission.choices()).collect() }
    }

    fn echo(&mut self, request: &ActiveRequest, index: usize, begun: bool, out: &mut Events) {
        let state = &mut self.choices[index];
        state.started = true;
        let reports = std::mem::take(&mut state.prompt);
        let prompt = request.submission.prompt(index);
        let Some(text) = prompt.echo.as_deref() else {
            return;
        };
        let logprobs = request.submission.logprobs.map(|_| {
            let mut logprobs = CompletionLogprobs::default();
            state.before = logprobs.add_prompt(request.spelling(), prompt, &reports);
            logprobs
        });
        let prompt_token_ids = request.submission.common.return_token_ids.then_some(&prompt.ids[..]);
        let choice = Choice { index, text: [text, ""], logprobs, prompt_token_ids, ..Choice::default() };
        send(request, choice, begun, out);
    }
}

impl StreamWriter for CompletionStream {
    fn open(&mut self, request: &ActiveRequest, out: &mut Events) {
        if echoes(request) && !echo_waits(request) {
            (0..self.choices.len()).for_each(|index| self.echo(request, index, false, out));
        }
    }

    fn delta(&mut self, request: &ActiveRequest, index: usize, delta: Delta, out: &mut Events) {
        let submission = &request.submission;
        if echo_waits(request) && !self.choices[index].started {
            self.choices[index].prompt.extend(delta.prompt_logprobs);
            if self.choices[index].prompt.len() == submission.prompt(index).ids.len() || delta.finish.is_some() {
                self.echo(request, index, true, out);
            }
        }
        let common = &submission.common;
        let reports_tokens = submission.reports_tokens();
        if !delta.text.is_empty() || (reports_tokens && !delta.tokens.is_empty()) {
            let first = !std::mem::replace(&mut self.choices[index].started, true);
            let prompt = submission.prompt(index);
            let before = self.choices[index].before;
            let logprobs = request.submission.logprobs.map(|_| {
                let mut logprobs = CompletionLogprobs::default();
                logprobs.add(request.spelling(), &delta.tokens, before);
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
            send(request, choice, true, out);
        }
        if let Some(reason) = delta.finish {
            let (finish_reason, stop_reason) = (Some(reason.name()), delta.stop_reason.as_deref());
            send(request, Choice { index, finish_reason, stop_reason, ..Choice::default() }, true, out);
        }
    }

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        if request.submission.common.include_usage {
            out.push(&Answer::new(request, &[], Some(Some(request.usage()))));
        }
    }
}
