//! A running generation: what the engine's outboxes bring, in the order it comes, until all choices have ended, one has
//! failed, or time is up. Dropping it drops the readers, which aborts what still runs.

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;

use axum::http::StatusCode;
use futures_util::Stream;
use futures_util::StreamExt;
use futures_util::stream::{SelectAll, unfold};
use plimsoll_engine::{Cause, Delta, Reader};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::conversation::price::Meter;
use crate::conversation::submission::Submission;
use crate::conversation::submit::Submitted;
use crate::http::budget::Held;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, CANCELLED, cancelled, cut};
use crate::http::rates::Client;
use crate::state::config::ServerConfig;
use crate::state::model::ModelState;
use crate::state::request_log::RequestLog;
use crate::state::running::Ticket;
use crate::state::server::{Phase, reached};

type Choices = SelectAll<Pin<Box<dyn Stream<Item = (usize, Delta)> + Send>>>;

/// What comes next.
#[derive(Debug)]
pub(crate) enum Event {
    /// Output of one choice.
    Delta(usize, Delta),
    /// All choices have ended well.
    Done,
    /// The request has failed; nothing follows.
    Failed(ApiError),
}

enum News {
    Choice(Option<(usize, Delta)>),
    Cancelled,
    Cut,
    Late,
    Silent,
}

/// The running choices of one HTTP request.
pub(crate) struct ActiveRequest {
    state: Arc<ModelState>,
    choices: Choices,
    phase: watch::Receiver<Phase>,
    last_news: Instant,
    deadline: Option<Instant>,
    /// Choices that have not finished yet. At 0, the deadline and the shutdown do not end the request.
    unfinished: usize,
    tally: Tally,
    log: RequestLog,
    ticket: Option<Ticket>,
    client: Option<Arc<Client>>,
    /// Of an answer that is held until it is whole.
    meter: Option<Meter>,
}

impl ActiveRequest {
    pub fn new(
        state: &Arc<ModelState>,
        id: &str,
        api: &'static str,
        draft: &Submission,
        started: &mut Submitted,
    ) -> Self {
        let readers = std::mem::take(&mut started.readers);
        let prompt_tokens = draft.prompts.iter().map(|p| p.ids.len() as u64).sum();
        let n = draft.common.n as usize;
        let now = Instant::now();
        let caller = Caller::current();
        if let Some(client) = &caller.client {
            client.charge(prompt_tokens);
        }
        Self {
            state: Arc::clone(state),
            phase: state.server.phase.subscribe(),
            last_news: now,
            deadline: state.server.config.request_timeout.map(|timeout| now + timeout),
            unfinished: readers.len(),
            tally: Tally {
                prompt_tokens,
                completion_tokens: 0,
                cached: vec![0; readers.len().div_ceil(n)],
                drafts: vec![(0, 0); readers.len()],
                n,
            },
            client: caller.client.clone(),
            log: RequestLog::new(state, id, api, readers.len(), prompt_tokens, caller)
                .streaming(draft.common.stream)
                .recorded(draft.record(state, api)),
            ticket: started.ticket.take(),
            meter: started.meter.take(),
            choices: readers.into_iter().enumerate().map(|(i, reader)| outputs(i, reader)).collect(),
        }
    }

    /// The next event. Cancel-safe.
    pub async fn next(&mut self) -> Event {
        let silence = self.last_news + self.state.server.config.silence_timeout;
        // What ends it comes before its output, of which a client that reads slowly always has some waiting.
        let news = tokio::select! {
            biased;
            () = cancellation(self.ticket.as_ref()) => News::Cancelled,
            () = reached(&mut self.phase, Phase::Cut), if self.unfinished > 0 => News::Cut,
            () = at(self.deadline), if self.unfinished > 0 => News::Late,
            next = self.choices.next() => News::Choice(next),
            () = sleep_until(silence) => News::Silent,
        };
        let event = match news {
            News::Choice(Some((_, Delta { error: Some(message), cause, .. }))) => {
                Event::Failed(failure(&self.phase, message, cause))
            }
            News::Choice(Some((choice, delta))) => self.metered(choice, delta),
            News::Choice(None) => Event::Done,
            News::Cancelled => Event::Failed(cancelled()),
            News::Cut => Event::Failed(cut()),
            News::Late => Event::Failed(late(&self.state.server.config, false)),
            News::Silent => Event::Failed(late(&self.state.server.config, true)),
        };
        self.note(&event);
        event
    }

    /// Output for which there is room.
    fn metered(&mut self, choice: usize, delta: Delta) -> Event {
        match self.meter.as_mut().map_or(Ok(()), |meter| meter.add(&self.state, &delta)) {
            Ok(()) => Event::Delta(choice, delta),
            Err(error) => Event::Failed(error),
        }
    }

    /// What the answer holds beyond `held`, with that.
    pub fn all_held(&mut self, held: Option<Held>) -> Option<Held> {
        let more = self.meter.take().map(Meter::into_held);
        match (held, more) {
            (Some(mut held), Some(more)) => {
                held.join(more);
                Some(held)
            }
            (held, more) => held.or(more),
        }
    }

    /// Ends a stream after a panic while its output was being written.
    pub fn panicked(&mut self) -> ApiError {
        self.log.ends("failed");
        self.state.server.panicked("writing the answer")
    }

    /// What has been counted so far.
    pub fn usage(&self) -> Usage {
        self.tally.usage()
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Delta(choice, delta) => {
                self.last_news = Instant::now();
                self.unfinished -= usize::from(delta.finish.is_some());
                self.tally.add(*choice, delta);
                self.log.tokens(delta.tokens.len());
                if let Some(client) = self.client.as_ref().filter(|_| !delta.tokens.is_empty()) {
                    client.charge(delta.tokens.len() as u64);
                }
            }
            Event::Done => self.log.ends("finished"),
            Event::Failed(error) => {
                self.log.ends(end_of(error, *self.phase.borrow()));
                // No output is read any more. Dropping the readers aborts the other choices.
                self.choices.clear();
                self.ticket = None;
            }
        }
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}

/// What the engine's last words for a request mean.
pub(crate) fn failure(phase: &watch::Receiver<Phase>, message: String, cause: Cause) -> ApiError {
    match *phase.borrow() {
        _ if cause == Cause::Memory => ApiError::unavailable(message, 5),
        _ if cause == Cause::Form => ApiError::unfit_form(message),
        Phase::Serving => ApiError::internal(message),
        // An engine that drains ends what it could not finish; that is no defect.
        _ => cut(),
    }
}

/// It took too long, in all or (`silent`) between two pieces.
pub(crate) fn late(config: &ServerConfig, silent: bool) -> ApiError {
    let message = if silent {
        format!("the engine produced nothing for {} s", config.silence_timeout.as_secs())
    } else {
        let limit = config.request_timeout.unwrap_or_default();
        format!("the request did not finish within this server's limit of {} s", limit.as_secs_f32())
    };
    ApiError { code: Some("timeout"), ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, message) }
}

/// Why a request that failed in this phase has ended, for the log and the metrics.
pub(crate) fn end_of(error: &ApiError, phase: Phase) -> &'static str {
    match error.code {
        Some(CANCELLED) => "cancelled",
        Some("timeout") => "timeout",
        // While the server serves, room is what there was none of.
        Some("unavailable") if phase != Phase::Serving => "shutdown",
        _ => "failed",
    }
}

/// Completes when a client cancels the request. Without a ticket it never completes.
async fn cancellation(ticket: Option<&Ticket>) {
    match ticket {
        Some(ticket) => ticket.cancelled().await,
        None => std::future::pending().await,
    }
}

/// One reader as a stream: pulled, never pushed, so that a slow client costs nothing here.
fn outputs(choice: usize, reader: Reader) -> Pin<Box<dyn Stream<Item = (usize, Delta)> + Send>> {
    Box::pin(unfold(reader, move |mut reader| async move {
        let delta = reader.next().await?;
        Some(((choice, delta), reader))
    }))
}

/// Token counts of the whole request.
struct Tally {
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Cached prompt tokens of each prompt's first choice: the others share with it, and counting them would exceed the prompt.
    cached: Vec<u32>,
    /// Drafted and accepted tokens of each choice.
    drafts: Vec<(u32, u32)>,
    n: usize,
}

impl Tally {
    fn add(&mut self, choice: usize, delta: &Delta) {
        self.completion_tokens += delta.tokens.len() as u64;
        if choice.is_multiple_of(self.n) {
            self.cached[choice / self.n] = delta.cached_tokens;
        }
        self.drafts[choice] = (delta.drafted_tokens, delta.accepted_tokens);
    }

    fn usage(&self) -> Usage {
        let drafts = |of: fn(&(u32, u32)) -> u32| self.drafts.iter().map(|both| u64::from(of(both))).sum();
        let speculation = Speculation { drafted: drafts(|both| both.0), accepted: drafts(|both| both.1) };
        Usage {
            speculation: (speculation.drafted > 0).then_some(speculation),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: self.cached.iter().map(|n| u64::from(*n)).sum() },
        }
    }
}

/// OpenAI's `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptDetails,
    /// Ours; only of requests that were drafted for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Speculation>,
}

/// What drafts did for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Speculation {
    /// Tokens that were guessed and the model checked.
    pub drafted: u64,
    /// Those that the model would have said, too.
    pub accepted: u64,
}

/// OpenAI's `prompt_tokens_details`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PromptDetails {
    pub cached_tokens: u64,
}
