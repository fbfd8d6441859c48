//! An active request: reads the engine's outboxes until all choices have ended, one has failed, or time is up. Dropping it drops the
//! readers, which aborts the choices that still run.

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;

use axum::http::StatusCode;
use futures_util::Stream;
use futures_util::StreamExt;
use futures_util::stream::{SelectAll, unfold};
use plimsoll_engine::{Cause, Delta, Reader};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::conversation::answer_bytes::AnswerBytes;
use crate::conversation::logprobs::Spelling;
use crate::conversation::submission::Submission;
use crate::conversation::tally::Tally;
pub(crate) use crate::conversation::tally::{PromptDetails, Usage};
use crate::http::budget::Held;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, CANCELLED, cancelled, cut};
use crate::http::ids::now_s;
use crate::http::rates::RateBuckets;
use crate::otlp::Asked;
use crate::state::config::ServerConfig;
use crate::state::model::ModelState;
use crate::state::request_log::RequestLog;
use crate::state::running::RunningGuard;
use crate::state::server::{ServerPhase, reached};

type Choices = SelectAll<Pin<Box<dyn Stream<Item = (usize, Delta)> + Send>>>;

/// The next event of a request.
#[derive(Debug)]
pub(crate) enum Event {
    /// Output of one choice.
    Delta(usize, Delta),
    /// All choices have finished.
    Done,
    /// The request has failed; nothing follows.
    Failed(ApiError),
}

/// The occurrences that a request waits for.
enum Occurrence {
    Choice(Option<(usize, Delta)>),
    Cancelled,
    Cut,
    Late,
    Silent,
}

/// One HTTP request whose choices the engine generates.
pub(crate) struct ActiveRequest {
    pub state: Arc<ModelState>,
    /// The id in its answer.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub submission: Submission,
    choices: Choices,
    phase: watch::Receiver<ServerPhase>,
    last_output: Instant,
    deadline: Option<Instant>,
    /// Choices that have not finished yet. At 0, the deadline and the shutdown do not end the request.
    unfinished: usize,
    tally: Tally,
    log: RequestLog,
    guard: Option<RunningGuard>,
    rate_buckets: Option<Arc<RateBuckets>>,
    bytes: AnswerBytes,
}

impl ActiveRequest {
    /// `readers`: one per choice, all choices of the first prompt, then those of the second.
    pub fn new(
        state: &Arc<ModelState>,
        id: String,
        api: &'static str,
        submission: Submission,
        readers: Vec<Reader>,
        guard: RunningGuard,
        bytes: AnswerBytes,
    ) -> Self {
        let prompt_tokens = submission.prompts.iter().map(|p| p.ids.len() as u64).sum();
        let n = submission.common.n as usize;
        let now = Instant::now();
        let caller = Caller::current();
        let (sampling, max_tokens) = (&submission.common.sampling, submission.common.max_tokens);
        let (temperature, top_p, top_k) = (sampling.temperature, sampling.top_p, sampling.top_k);
        let asked = Asked { max_tokens, temperature, top_p, top_k };
        if let Some(buckets) = &caller.rate_buckets {
            buckets.charge(prompt_tokens);
        }
        Self {
            state: Arc::clone(state),
            phase: state.server.phase.subscribe(),
            last_output: now,
            deadline: state.server.config.request_timeout.map(|timeout| now + timeout),
            unfinished: readers.len(),
            tally: Tally::new(prompt_tokens, readers.len(), n),
            rate_buckets: caller.rate_buckets.clone(),
            log: RequestLog::new(state, &id, api, readers.len(), prompt_tokens, caller)
                .streaming(submission.common.stream)
                .watching(asked, readers.iter().map(Reader::watch))
                .recorded(submission.record(state, api)),
            guard: Some(guard),
            bytes,
            id,
            created: now_s(),
            submission,
            choices: readers.into_iter().enumerate().map(|(i, reader)| outputs(i, reader)).collect(),
        }
    }

    /// Begins another turn of the model with a new prompt. The turn is admitted like a request: limits, budget, queue. Only the first turn
    /// is refused while the server drains.
    pub fn resume(&mut self, submission: Submission, api: &'static str) -> Result<(), ApiError> {
        let mut bytes = submission.reserve_answer_bytes(&self.state)?;
        let now = Instant::now();
        let again = !self.submission.prompts.is_empty();
        let readers = submission.submit(&self.state, now.into_std(), again)?;
        bytes.join(self.bytes.take());
        self.bytes = bytes;
        if let Some(guard) = &self.guard {
            guard.watch(readers.iter().map(Reader::watch).collect());
        }
        let prompt_tokens = submission.prompts.iter().map(|p| p.ids.len() as u64).sum();
        if let Some(buckets) = &self.rate_buckets {
            buckets.charge(prompt_tokens);
        }
        self.tally.turn(prompt_tokens, readers.len(), submission.common.n as usize);
        self.log.turn(prompt_tokens, readers.len(), submission.record(&self.state, api));
        (self.unfinished, self.last_output) = (readers.len(), now);
        self.choices = readers.into_iter().enumerate().map(|(i, reader)| outputs(i, reader)).collect();
        self.submission = submission;
        Ok(())
    }

    /// Completes when the request must end while no turn of the model runs: it was cancelled, is late, or the server stops. Cancel-safe.
    pub async fn interrupted(&mut self) -> ApiError {
        let error = tokio::select! {
            biased;
            () = cancellation(self.guard.as_ref()) => cancelled(),
            () = reached(&mut self.phase, ServerPhase::Cut) => cut(),
            () = at(self.deadline) => late(&self.state.server.config, false),
        };
        self.record_failure(error.clone());
        error
    }

    /// Changes the reserved bytes to exactly `bytes` for the output of the turns so far.
    pub fn hold_exactly(&mut self, bytes: u64) -> Result<(), ApiError> {
        self.bytes.hold_exactly(bytes)
    }

    /// Records that the model's turn has ended and the request continues.
    pub fn turn_ended(&mut self) {
        self.log.turn_ended();
    }

    /// Records the end of a request that continued after a turn of the model.
    pub fn record_finish(&mut self) {
        self.record(&Event::Done);
    }

    /// Records that the request failed while no turn of the model ran.
    pub fn record_failure(&mut self, error: ApiError) {
        self.record(&Event::Failed(error));
    }

    /// Calls `take` with each piece of output and its choice, until all choices have ended. Returns the error of the first choice that
    /// fails.
    pub async fn each(&mut self, mut take: impl FnMut(&Self, usize, Delta)) -> Result<(), ApiError> {
        loop {
            match self.next().await {
                Event::Delta(choice, delta) => take(self, choice, delta),
                Event::Done => return Ok(()),
                Event::Failed(error) => return Err(error),
            }
        }
    }

    /// Returns the next event. Cancel-safe.
    pub async fn next(&mut self) -> Event {
        let silence = self.last_output + self.state.server.config.silence_timeout;
        // Ends are checked before output: a slow client always has output waiting.
        let occurrence = tokio::select! {
            biased;
            () = cancellation(self.guard.as_ref()) => Occurrence::Cancelled,
            () = reached(&mut self.phase, ServerPhase::Cut), if self.unfinished > 0 => Occurrence::Cut,
            () = at(self.deadline), if self.unfinished > 0 => Occurrence::Late,
            next = self.choices.next() => Occurrence::Choice(next),
            () = sleep_until(silence) => Occurrence::Silent,
        };
        let event = match occurrence {
            Occurrence::Choice(Some((_, Delta { error: Some(message), cause, .. }))) => {
                Event::Failed(failure(&self.phase, message, cause))
            }
            Occurrence::Choice(Some((choice, delta))) => match self.bytes.add(&self.state, &delta) {
                Ok(()) => Event::Delta(choice, delta),
                Err(error) => Event::Failed(error),
            },
            Occurrence::Choice(None) => Event::Done,
            Occurrence::Cancelled => Event::Failed(cancelled()),
            Occurrence::Cut => Event::Failed(cut()),
            Occurrence::Late => Event::Failed(late(&self.state.server.config, false)),
            Occurrence::Silent => Event::Failed(late(&self.state.server.config, true)),
        };
        self.record(&event);
        event
    }

    /// Takes the answer's share of the byte budget, for the body that is sent.
    pub fn take_held(&mut self) -> Option<Held> {
        self.bytes.take()
    }

    /// Returns the spelling of reported tokens.
    pub fn spelling(&self) -> Spelling<'_> {
        Spelling { tokenizer: &self.state.served.tokenizer, as_ids: self.submission.common.tokens_as_ids }
    }

    /// Ends a stream after a panic while its output was being written.
    pub fn panicked(&mut self) -> ApiError {
        self.log.ends("failed");
        self.state.server.panicked("writing the answer")
    }

    /// Returns the token counts so far.
    pub fn usage(&self) -> Usage {
        self.tally.usage()
    }

    fn record(&mut self, event: &Event) {
        match event {
            Event::Delta(choice, delta) => {
                self.last_output = Instant::now();
                self.unfinished -= usize::from(delta.finish.is_some());
                if delta.finish.is_some() {
                    self.log.choice_ended(*choice, delta.finish, None);
                }
                self.tally.add(*choice, delta);
                self.log.tokens(delta.tokens.len());
                if let Some(buckets) = self.rate_buckets.as_ref().filter(|_| !delta.tokens.is_empty()) {
                    buckets.charge(delta.tokens.len() as u64);
                }
            }
            Event::Done => self.log.ends("finished"),
            Event::Failed(error) => {
                self.log.ends(end_of(error, *self.phase.borrow()));
                // No output is read any more. Dropping the readers aborts the other choices.
                self.log.unwatch();
                self.choices.clear();
                self.guard = None;
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

/// Returns the API's error for an error from the engine.
pub(crate) fn failure(phase: &watch::Receiver<ServerPhase>, message: String, cause: Cause) -> ApiError {
    match *phase.borrow() {
        _ if cause == Cause::Memory => ApiError::unavailable(message, 5),
        _ if cause == Cause::Grammar => ApiError::unfit_grammar(message),
        ServerPhase::Serving => ApiError::internal(message),
        // A draining engine ends unfinished requests: not an internal error.
        _ => cut(),
    }
}

/// Returns the error of a request that took too long, in total or (`silent`) between two pieces of output.
pub(crate) fn late(config: &ServerConfig, silent: bool) -> ApiError {
    let message = if silent {
        format!("the engine produced nothing for {} s", config.silence_timeout.as_secs())
    } else {
        let limit = config.request_timeout.unwrap_or_default();
        format!("the request did not finish within this server's limit of {} s", limit.as_secs_f32())
    };
    ApiError { code: Some("timeout"), ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, message) }
}

/// Returns how a failed request ended, for the log and the metrics.
pub(crate) fn end_of(error: &ApiError, phase: ServerPhase) -> &'static str {
    match error.code {
        Some(CANCELLED) => "cancelled",
        Some("timeout") => "timeout",
        // While the server serves, this code means that memory was full.
        Some("unavailable") if phase != ServerPhase::Serving => "shutdown",
        _ => "failed",
    }
}

/// Completes when a client cancels the request. Without a guard it never completes.
async fn cancellation(guard: Option<&RunningGuard>) {
    match guard {
        Some(guard) => guard.cancelled().await,
        None => std::future::pending().await,
    }
}

/// Makes a stream of one reader. It is pulled, so a slow client costs nothing here.
fn outputs(choice: usize, reader: Reader) -> Pin<Box<dyn Stream<Item = (usize, Delta)> + Send>> {
    Box::pin(unfold(reader, move |mut reader| async move {
        let delta = reader.next().await?;
        Some(((choice, delta), reader))
    }))
}
